"""What a prediction costs: by the number of operators, on 1,024 devices of four kinds, and after one change.

    python benchmarks/predict_scale.py [--layers 1 3 6 12 24 48]

BERTs of 1 to 48 layers (BERT-base has 12), narrow ones: operators count, not their width. CPU seconds, medians.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import RESULTS, environment, save
from torch import Tensor

from bitwright.cluster import Cluster, Link, Predictor
from bitwright.core.files import write_text
from bitwright.plan import Plan
from bitwright.profiling import DeviceProfile, SampleStore, StepSettings, Variant, record_step
from bitwright.profiling.device_profile import TensorsCost
from bitwright.profiling.profiled_step import CLOCKS, TimedStep
from bitwright.profiling.step_timer import StepTimer
from bitwright.training import Qat


def logits_loss(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, target)


def seconds(run: Callable[[], Any], times: int = 7) -> float:
    taken = []
    for _ in range(times):
        start = time.process_time()
        run()
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def measure(layers: int) -> dict[str, Any]:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=24, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=48, vocab_size=64
    )
    model = BertForSequenceClassification(config)
    batch = ({"input_ids": torch.randint(0, 64, (2, 8))}, torch.randint(0, 2, (2,)))
    graph = record_step(model, batch, logits_loss)
    quantized = copy.deepcopy(model)
    plan = Qat(quantized, [batch[0]], precision="int8", example=batch[0], fuse=False).plan
    settings = StepSettings(fuse=False, bucket_cap_mb=0.02)
    store = SampleStore()
    for variant in (
        Variant(model=model.train(), settings=settings),
        Variant(model=quantized.train(), plan=plan, settings=settings),
    ):
        step = TimedStep(variant.model, [batch], logits_loss, settings)
        timer = StepTimer(variant.model, variant.plan, settings, CLOCKS["wall"])
        store.add_round(timer.run(step), wanted=2)
    free = [TensorsCost(name=name, per_element=1e-9, per_tensor=1e-6) for name in ("sgd/loop", "zero_grad")]
    profile = DeviceProfile(bitwright_profile=1, device="here", operators=list(store.costs().values()), tensors=free)
    kinds = dict.fromkeys("abcd", profile)
    cluster = Cluster.of(dict.fromkeys("abcd", 256), link=Link(latency_us=5, gbit_per_s=100))
    predictor = Predictor.make(graph, plan, kinds, cluster, settings)
    name = f"bert.encoder.layer.{layers // 2}.output.dense"
    less: Plan = replace(plan, sites={s: v for s, v in plan.sites.items() if not s.startswith(f"{name}:")})
    return {
        "layers": layers,
        "operators": len(graph.ops),
        "one_device_ms": 1e3 * seconds(lambda: Predictor.make(graph, plan, profile, None, settings).predict()),
        "cluster_ms": 1e3 * seconds(lambda: Predictor.make(graph, plan, kinds, cluster, settings).predict()),
        "exact_ms": 1e3 * seconds(lambda: predictor.predict(exact=True), 3),
        "changed_ms": 1e3 * seconds(lambda: predictor.changed("b", less, {name}).seconds, 21),
    }


def plot(rows: list[dict[str, Any]]) -> str:
    """Milliseconds over operators, as an SVG of a few lines."""
    right, top = max(r["operators"] for r in rows), max(r["cluster_ms"] for r in rows)
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 360" font-family="sans-serif" font-size="13">',
        '<rect width="640" height="360" fill="white"/><path d="M60 20V310H620" fill="none" stroke="black"/>',
        f'<text x="620" y="330" text-anchor="end">{right} operators</text>',
        f'<text x="66" y="32">{top:.0f} ms</text>',
    ]
    for key, colour, words in (("cluster_ms", "#2266aa", "1,024 devices"), ("one_device_ms", "#aa6622", "one device")):
        points = [(60 + 560 * r["operators"] / right, 310 - 280 * r[key] / top) for r in rows]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        parts.append(f'<text x="{points[-1][0]:.0f}" y="{points[-1][1] - 8:.0f}" text-anchor="end">{words}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="*", default=[1, 3, 6, 12, 24, 48])
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(layers) for layers in chosen.layers]
    x, y = (np.array([r[key] for r in rows]) for key in ("operators", "cluster_ms"))
    fitted = np.polyval(np.polyfit(x, y, 1), x)
    r2 = 1 - float(((y - fitted) ** 2).sum() / ((y - y.mean()) ** 2).sum())
    lines = [
        "| layers | operators | one device | 1,024 of 4 kinds | each by itself | one operator changed |",
        "|---|---|---|---|---|---|",
        *(
            f"| {r['layers']} | {r['operators']} | {r['one_device_ms']:.0f} ms | {r['cluster_ms']:.0f} ms "
            f"| {r['exact_ms']:.0f} ms | {r['changed_ms']:.2f} ms |"
            for r in rows
        ),
    ]
    words = (
        "Bars: 1,024 devices in 1 s and one change in 5 ms, for a graph of BERT-base's size (12 layers); linear in the "
        f"operators (R² of a line: {r2:.4f}). CPU time. ![plot](predict_scale.svg)"
    )
    write_text(RESULTS / "predict_scale.svg", plot(rows))
    data = {"environment": environment(layers=chosen.layers), "rows": rows, "r2": r2}
    save("predict_scale", data, "\n".join(["# What a prediction costs", "", words, "", *lines]))


if __name__ == "__main__":
    main()
