"""CPU seconds of an export to ONNX, written directly and by torch.onnx, in one interleaved run.

    python benchmarks/export_time.py [--repeats 3] [--models resnet20 ...] [--source FOLDER]

Each measurement is a fresh process, which imports the libraries and quantizes the model before the clock starts. With
`--source`, the folder `src` of another version is measured beside this one (`git worktree add`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

MODELS = ("resnet20", "efficientnet-lite0", "bert-base")


def one(model: str) -> dict[str, float]:
    """In a process of its own."""
    import onnxruntime  # noqa: F401
    import torch
    import torch.onnx
    from peers import quietly
    from ptq_time import _load

    import bitwright as bw

    quietly()
    torch.set_num_threads(1)
    net, example, data, _ = _load(model, 1)
    quantized = bw.quantize(net, data, example=example)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first", "second"):
            start = time.process_time()
            quantized.export(Path(folder) / f"{name}.onnx")
            found[name] = time.process_time() - start
    return found


def _fresh(model: str, source: Path | None) -> dict[str, float]:
    paths = [str(source)] if source is not None else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--one", model]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return dict(json.loads(ran.stdout.strip().splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--source", type=Path, help="the src folder of another version")
    parser.add_argument("--one", metavar="MODEL")
    options = parser.parse_args()
    os.environ.setdefault("BITWRIGHT_DATA", str(Path(__file__).parents[2] / "shared" / "data"))
    if options.one:
        print(json.dumps(one(options.one)))
        return
    from common import environment, save

    versions = {"this version": None, **({"other version": options.source} if options.source else {})}
    results: dict[str, Any] = {}
    for model in options.models:
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in versions}
        for _ in range(options.repeats):
            for name, source in versions.items():
                runs[name].append(_fresh(model, source))
                print(model, name, runs[name][-1], flush=True)
        results[model] = {
            name: {key: round(median(run[key] for run in found), 3) for key in found[0]} for name, found in runs.items()
        }
    lines = ["| model | version | first export | later exports | ratio of first exports |", "|---" * 5 + "|"]
    for model, rows in results.items():
        for name, row in rows.items():
            ratio = f"{row['first'] / rows['other version']['first']:.2f}" if "other version" in rows else ""
            lines.append(f"| {model} | {name} | {row['first']:.2f} | {row['second']:.2f} | {ratio} |")
    title = "# Export to ONNX: CPU seconds, medians\n\nThe first export of a process also loads modules of torch.\n\n"
    facts = environment(repeats=options.repeats)
    save("export_time", {"environment": facts, "results": results}, title + "\n".join(lines))


if __name__ == "__main__":
    main()
