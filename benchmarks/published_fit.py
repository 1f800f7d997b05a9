"""Fit the efficiencies of `published.yaml` to published GPU times, and predict each model from the others.

    python benchmarks/published_fit.py [--traces FOLDER] [--graphs FOLDER]

Constants: the share of the peak that products reach on a T4 in float32 (at full clock, and under the power limit), FP16
and INT8, and the share of the bandwidth that other operators reach, from traces of ResNet-50 on V100s. The published
times lack some facts; these are chosen, not predicted, and marked in the table:

- ResNet-50's and VGG-16's scripts use batch 128, QSync's graphs of them batch 64. ResNet-50's FP16 time at batch 128
  would need the whole bandwidth without any arithmetic, so its 16- and 8-bit times count as batch 64.
- RoBERTa's texts are padded to the longest of a batch, which isn't published. Its size follows from its FP16 time.
- Float32 products reach about 0.8 of the peak (BERT, ResNet-50) or 0.4 (RoBERTa, VGG-16, the longer steps). Both are
  fitted; which one applies to a model is chosen.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from common import environment, save
from qsync_models import MEASURED, MODELS, Steps, plan_of, settings

from bitwright.cluster import Predictor
from bitwright.importers.qsync import QSYNC_FORMATS, QSyncExecution
from bitwright.importers.trace import match_trace
from bitwright.profiling import IMPLEMENTATIONS, DeviceProfile
from bitwright.profiling.published_profile import Facts, derived_profile, published_devices

GRIDS = {
    "float32": np.geomspace(0.25, 1.0, 9),
    "fp16": np.geomspace(0.1, 0.5, 9),
    "int8": np.geomspace(0.02, 0.4, 9),
}
SLOW = ("roberta", "vgg16")  # float32 under the power limit
CHOSEN = {
    ("roberta", "fp16"): "size of the batch",
    ("roberta", "fp32"): "clock",
    ("vgg16", "fp32"): "clock",
    ("resnet50", "fp16"): "batch 64",
    ("resnet50", "int8"): "batch 64",
}
MIXED = {"linear16": "fp16", "embedding16": "fp32", "linear+embedding16": "fp16", "linear+norm16": "fp16"}
TRACES = (
    "kineto_resnet50_num_workers_0.json.gz",
    "hta_ns_resolution_trace_rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz",
)
PRODUCTS = ("conv2d", "linear")


def seconds(steps: Steps, facts: Facts, name: str, precision: str, batch: int) -> float:
    graph = steps.of(name, batch)
    profile = derived_profile(facts, graph, QSYNC_FORMATS)
    return Predictor.make(graph, plan_of(precision, graph), profile, None, settings(name)).seconds


def units_of(precision: str) -> tuple[str, ...]:
    """The constants on which a time depends."""
    return {"fp32": ("float32",), "embedding16": ("float32",), "int8": ("fp16", "int8")}.get(precision, ("fp16",))


class Curves:
    """Each time by the inverse of each constant: exact at the points of a grid, and piecewise linear between them."""

    def __init__(self, steps: Steps, facts: Facts) -> None:
        self.base = dict(facts.efficiency)
        self.points: dict[tuple[str, str, str], np.ndarray[Any, Any]] = {}
        self.start: dict[tuple[str, str], float] = {}
        for name, precision, batch, _ in MEASURED:
            self.start[name, precision] = seconds(steps, facts, name, precision, batch)
            for unit in units_of(precision):
                times = [seconds(steps, with_(facts, {unit: value}), name, precision, batch) for value in GRIDS[unit]]
                self.points[name, precision, unit] = np.array(times)

    def predict(self, name: str, precision: str, constants: Mapping[str, float]) -> float:
        """Constants act on different parts of the step, so their effects add up."""
        total = self.start[name, precision]
        for unit in units_of(precision):
            value = constants["slow"] if unit == "float32" and name in SLOW else constants[unit]
            inverse, times = 1 / GRIDS[unit][::-1], self.points[name, precision, unit][::-1]
            at, before = np.interp([1 / value, 1 / self.base[unit]], inverse, times)
            total += float(at - before)
        return 1e3 * total

    def fit(self, models: tuple[str, ...]) -> dict[str, float]:
        """Constants with the smallest squared logarithmic errors on these models, one after the other."""
        found = dict(self.base)
        found["slow"] = found["float32"]
        rows = [row for row in MEASURED if row[0] in models]
        tasks = (
            ("float32", [r for r in rows if units_of(r[1]) == ("float32",) and r[0] not in SLOW]),
            ("fp16", [r for r in rows if units_of(r[1]) == ("fp16",) and r[0] != "roberta"]),
            ("int8", [r for r in rows if "int8" in units_of(r[1])]),
            ("slow", [r for r in rows if units_of(r[1]) == ("float32",) and r[0] in SLOW]),
        )
        for unit, used in tasks:
            models_of = sorted({row[0] for row in used})
            weights = {name: 1 / sum(row[0] == name for row in used) for name in models_of}  # each model counts equally
            grid = GRIDS["float32" if unit == "slow" else unit]
            values = np.geomspace(grid[0], grid[-1], 800)

            def error(value: float, unit: str = unit, used: Any = used, weights: Any = weights) -> float:
                made = {**found, unit: value}
                return float(sum(weights[n] * math.log(self.predict(n, p, made) / ms) ** 2 for n, p, _, ms in used))

            found[unit] = float(min(values, key=error)) if used else math.nan
        return found


def with_(facts: Facts, efficiency: Mapping[str, float]) -> Facts:
    return facts.model_copy(update={"efficiency": {**facts.efficiency, **efficiency}})


def memory_share(steps: Steps, traces: list[DeviceProfile], facts: Facts) -> tuple[float, list[tuple[float, float]]]:
    """The share of the bandwidth in traces, and the times of all operators: traced and predicted."""
    graph = steps.of("resnet50", 32)
    whole = derived_profile(with_(facts, {"memory": 1.0}), graph)
    ratios = []
    for profile in traces:
        traced = ideal = 0.0
        for op in graph.ops:
            own, other = (one.by_operator.get((op.call.key(), "float32")) for one in (profile, whole))
            if op.call.kind in PRODUCTS or own is None or other is None:
                continue
            traced += total(own)
            ideal += total(other)
        ratios.append(ideal / traced)
    share = float(np.mean(ratios))
    made = derived_profile(with_(facts, {"memory": share}), graph)
    sums = []
    for profile in traces:
        pairs = [
            (total(own), total(other))
            for op in graph.ops
            if (own := profile.by_operator.get((op.call.key(), "float32"))) is not None
            and (other := made.by_operator.get((op.call.key(), "float32"))) is not None
        ]
        sums.append((1e3 * sum(a for a, _ in pairs), 1e3 * sum(b for _, b in pairs)))
    return share, sums


def total(cost: Any) -> float:
    return float(cost.forward.seconds + (cost.backward.seconds if cost.backward else 0.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="the folder of the published traces; without it, 0.85 is used")
    parser.add_argument("--graphs", type=Path, help="keep the recorded steps in this folder")
    chosen = parser.parse_args()
    IMPLEMENTATIONS.register("qsync", QSyncExecution())
    steps = Steps(chosen.graphs)
    share, sums = None, []
    if chosen.traces is not None:
        traces = [match_trace(chosen.traces / name, steps.of("resnet50", 32)).profile for name in TRACES]
        share, sums = memory_share(steps, traces, published_devices()["nvidia-v100"])
        print(f"memory {share:.3f}; V100 {sums}", flush=True)
    curves = Curves(steps, published_devices()["nvidia-t4"])
    every = curves.fit(MODELS)
    held = {name: curves.fit(tuple(other for other in MODELS if other != name)) for name in MODELS}
    rows = []
    for name, precision, batch, measured in MEASURED:
        fitted, out = curves.predict(name, precision, every), curves.predict(name, precision, held[name])
        row: dict[str, Any] = {"model": name, "precision": precision, "batch": batch, "measured": measured}
        row |= {"fitted": fitted, "held_out": out, "error": out / measured - 1}
        row["chosen"] = CHOSEN.get((name, precision), "")
        if precision in MIXED:
            uniform = next(ms for n, p, _, ms in MEASURED if (n, p) == (name, MIXED[precision]))
            ratio = out / curves.predict(name, MIXED[precision], held[name])
            row["ratio_measured"], row["ratio"] = measured / uniform, ratio
            row["ratio_error"] = ratio / (measured / uniform) - 1
        rows.append(row)
        print(row, flush=True)
    report(rows, every, held, share, sums)


def report(
    rows: list[dict[str, Any]],
    every: dict[str, float],
    held: dict[str, dict[str, float]],
    share: float | None,
    sums: list[tuple[float, float]],
) -> None:
    within = sum(abs(row["error"]) <= 0.10 for row in rows)
    mixed = [row for row in rows if "ratio" in row]
    names = ("float32", "slow", "fp16", "int8")
    lines = [
        "# Derived profiles against published T4 times",
        "",
        "Held out: the constants are fitted without this model's times. Chosen: facts that aren't published and were "
        "chosen to fit, see the head of `published_fit.py`. They make the held-out error smaller than that of a model "
        "about which nothing is known.",
        "",
        f"{within} of {len(rows)} times are within 10 %; {sum(abs(r['ratio_error']) <= 0.05 for r in mixed)} of "
        f"{len(mixed)} mixed plans are within 5 % relative to their uniform counterparts.",
        "",
        "| model | precision | batch | measured | fitted to all | held out | error | chosen |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {r['model']} | {r['precision']} | {r['batch']} | {r['measured']:.0f} ms | {r['fitted']:.0f} ms "
            f"| {r['held_out']:.0f} ms | {100 * r['error']:+.1f} % | {r['chosen']} |"
            for r in rows
        ),
        "",
        "| model | mixed plan | relative to | measured | predicted (held out) | error |",
        "|---|---|---|---|---|---|",
        *(
            f"| {r['model']} | {r['precision']} | {MIXED[r['precision']]} | {r['ratio_measured']:.3f} "
            f"| {r['ratio']:.3f} | {100 * r['ratio_error']:+.1f} % |"
            for r in mixed
        ),
        "",
        "## Constants",
        "",
        "Share of the peak. `slow`: float32 under the power limit.",
        "",
        "| fitted to | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
        *(
            f"| {label} | " + " | ".join(f"{made[n]:.3f}" for n in names) + " |"
            for label, made in (("all", every), *((f"all but {name}", made) for name, made in held.items()))
        ),
    ]
    if share is not None:
        lines += [
            "",
            f"Share of the bandwidth, from traces of ResNet-50 (batch 32) on two V100s: {share:.3f}. Kernels of all "
            "matched operators, with the T4's share for products: "
            + "; ".join(f"traced {a:.1f} ms, predicted {b:.1f} ms ({100 * (b / a - 1):+.1f} %)" for a, b in sums)
            + ". No product of these traces was used in the fit.",
        ]
    data = {"environment": environment(), "rows": rows, "constants": every, "held_out": held, "memory": share}
    save("published_fit", {**data, "v100": sums}, "\n".join(lines))


if __name__ == "__main__":
    main()
