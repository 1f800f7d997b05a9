"""A leaderboard with made-up numbers, as large as one likes: for its page only."""

from __future__ import annotations

import random
from statistics import mean, stdev

from bitwright.bench.leaderboard import FloatNet, Leaderboard, Row, SiteFacts, Spread, Summary
from bitwright.core.environment import machine
from bitwright.reports import Executed, ExecutedSites, OnDevice

ALGORITHMS = ("lsq", "lsqplus", "pact", "dorefa", "dsq", "qil", "apot", "tqt", "nnie", "plain")
BACKENDS = ("academic", "tensorrt", "snpe", "tvm", "openvino", "onnxruntime")
MODELS = ("residual-fashion-mnist", "depthwise-cifar10")


def made_up(
    algorithms: tuple[str, ...] = ALGORITHMS, backends: tuple[str, ...] = BACKENDS, *, evil: str = ""
) -> Leaderboard:
    """Every combination, two seeds; some rows are refused, diverged or failed. `evil` is put wherever text goes."""
    draw = random.Random(0)
    rows: list[Row] = []
    for algorithm in algorithms:
        for backend in backends:
            for bits in (8, 4, 2):
                for model in MODELS:
                    for seed in (0, 1):
                        rows.append(
                            _row(draw, len(rows), algorithm + evil, backend + evil, bits, model + evil, seed, evil)
                        )
    return Leaderboard(
        name=f"made-up{evil}",
        title=f"Made-up numbers{evil}",
        config_hash="0123456789abcdef",
        config={"name": evil or "made-up", "bits": [8, 4, 2]},
        machines={f"m1{evil}": machine()},
        floats=(FloatNet(model=f"residual{evil}", seed=0, accuracy=91.0, trained_on=91.3, start=f"ab12{evil}"),),
        rows=tuple(rows),
        summaries=tuple(_summaries(rows)),
    )


def _row(
    draw: random.Random, number: int, algorithm: str, backend: str, bits: int, model: str, seed: int, evil: str
) -> Row:
    keys = {
        "id": f"{number:016x}",
        "model": model,
        "algorithm": algorithm,
        "w_method": algorithm,
        "a_method": algorithm,
        "backend": backend,
        "bits": bits,
        "seed": seed,
        "config": {"algorithms": [algorithm], "backends": [backend], "bits": [bits], "seeds": [seed]},
    }
    if algorithm.startswith("apot") and backend.startswith("tvm"):
        return Row(**keys, status="refused", reason=f"no table of levels{evil}")
    if bits == 2 and draw.random() < 0.05:
        return Row(**keys, status="diverged", reason="the loss is not finite", attempts=1)
    float_accuracy = 91.0 if model.startswith("residual") else 84.0
    drop = {8: 0.2, 4: 1.5, 2: 9.0}[bits] * (2.0 if "snpe" in backend or "tvm" in backend else 1.0) + draw.gauss(0, 0.3)
    format = f"int{bits}/channel/sym"
    one = ExecutedSites(quantizer=f"bitwright.quantizers.{algorithm}", format=format, sites=5, levels=2**bits)
    device = OnDevice(runtime="onnxruntime", accuracy=float_accuracy - drop - 0.03, gap=-0.03, kinds={"int8": 7})
    return Row(
        **keys,
        status="done",
        metric="top1",
        accuracy=float_accuracy - drop,
        float_accuracy=float_accuracy,
        samples=2000,
        device=device if backend.startswith("onnxruntime") else None,
        executed=Executed(weights=(one,), activations=(one,), biases=7, folding={"4": 7}),
        sites=tuple(SiteFacts(f"conv{n}{evil}:weight", format, -0.5, 0.5, 0.0125, 20.0 + n) for n in range(3)),
        notes=(f"a note{evil}",) if evil else (),
        attempts=1,
        minutes=0.3,
        machine=f"m1{evil}",
        finished="2026-11-16T10:40:00Z",
    )


def _summaries(rows: list[Row]) -> list[Summary]:
    found: list[Summary] = []
    for keys in (("algorithm", "backend", "bits", "model"), ("algorithm", "bits")):
        groups: dict[tuple[object, ...], list[Row]] = {}
        for row in rows:
            groups.setdefault(tuple(getattr(row, key) for key in keys), []).append(row)
        for values, group in groups.items():
            states = {state: sum(row.status == state for row in group) for state in {row.status for row in group}}
            found.append(
                Summary(
                    **dict(zip(keys, values, strict=True)),
                    accuracy=_spread([row.accuracy for row in group]),
                    drop=_spread([row.drop for row in group]),
                    gap=_spread([row.device.gap if row.device else None for row in group]),
                    rows=states,
                )
            )
    return found


def _spread(values: list[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(count=len(known), mean=mean(known), std=stdev(known) if len(known) > 1 else 0.0)
