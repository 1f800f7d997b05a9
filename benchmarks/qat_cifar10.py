"""QAT of ResNet-20 on CIFAR-10 (BITWRIGHT_DATA): W8A8, W4A4 and W2A2 from the same float weights, a few epochs each.

The test images are looked at after each epoch, and never choose anything: the row is that of the last epoch.
Runs are kept in --folder, so that an interrupted benchmark goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from common import environment, save

from bitwright import TrainConfig, Trainer, check, evaluate, open_runtime
from bitwright.zoo.workloads import resnet20_cifar10

RUNS: dict[str, dict[str, Any]] = {
    "W8A8": {
        "quantize": "int8",
        "backend": "onnxruntime",
        "config": {"epochs": 2, "lr": 0.0005, "distill": 0.5, "freeze_bn": 0},
    },
    "W4A4": {
        "quantize": "int4",
        "backend": "academic",
        "weights": "int4/channel/sym",
        "config": {"epochs": 3, "lr": 0.02, "distill": 0.5},
    },
    "W2A2": {
        "quantize": "int2",
        "backend": "academic",
        "weights": "int2/channel/sym",
        "config": {"epochs": 3, "lr": 0.04, "distill": 0.5},
    },
}


def run(name: str, folder: Path) -> dict[str, Any]:
    """Train one precision; W8A8 is then exported and run on ONNX Runtime."""
    options = dict(RUNS[name])
    config = TrainConfig(**options.pop("config"), batch=64, seed=0)
    workload = resnet20_cifar10()
    start = time.perf_counter()
    result = Trainer(workload, config=config, out=folder / name, resume=True, **options).fit()
    row: dict[str, Any] = {
        "precision": name,
        "settings": RUNS[name],
        "config_hash": config.digest,
        "quantizers": sorted({site.quantizer for _, site in result.quantized.plan.quantized if site.share is None}),
        "top1": [values["top1"] for values in result.metrics],
        "minutes": (time.perf_counter() - start) / 60,
    }
    if options["backend"] == "onnxruntime":
        artefact = result.quantized.export(folder / name / "model.onnx").path
        images = (inputs for inputs, _ in workload.evaluation())
        parity = check(result.model, artefact, images)
        row["runtime"] = evaluate(workload, open_runtime("onnxruntime", artefact))["top1"]
        row["same_top1"] = 100 * float(parity.outputs[0].top1_agreement or 0)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("qat-runs"))
    parser.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    workload = resnet20_cifar10()
    floating = evaluate(workload, workload.model)["top1"]
    rows = []
    for name in RUNS:
        kept = arguments.folder / f"{name}.json"
        if name in arguments.only:
            kept.write_text(json.dumps(run(name, arguments.folder)))
        if kept.exists():
            rows.append(json.loads(kept.read_text()))
    lines = [
        "# QAT of ResNet-20 on CIFAR-10: 10,000 test images, 25,000 training images",
        "",
        f"Float: {floating:.2f} %. First and last layer have 8 bits; weights per channel.",
        "",
        "| precision | quantizers | after each epoch | last | to float | ONNX Runtime | same top-1 | minutes |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        each = ", ".join(f"{value:.2f}" for value in row["top1"])
        last = row["top1"][-1]
        runtime = f"{row['runtime']:.2f} | {row['same_top1']:.2f} %" if "runtime" in row else " | "
        lines.append(
            f"| {row['precision']} | {', '.join(row['quantizers'])} | {each} | {last:.2f} | {last - floating:+.2f} "
            f"| {runtime} | {row['minutes']:.1f} |"
        )
    save("qat_cifar10", {"environment": environment(), "float": floating, "rows": rows}, "\n".join(lines))


if __name__ == "__main__":
    main()
