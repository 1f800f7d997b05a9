"""Indicators against the truth: the gradients of the whole model with one operator at a time in int8.

    python benchmarks/indicators.py [--batches 4] [--size 32] [--only resnet20 bert]

Truth, Monte Carlo: E‖ĝ − g‖² over batches, ĝ with one operator in the simulated kernel and g in float. Kernels that
round to the nearest have no randomness but that of the batches; with stochastic rounding each batch is run with several
seeds. The second truth is the increase of the loss. Spearman's rank correlation over operators, and CPU seconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from common import environment, save
from scipy.stats import spearmanr
from torch import Tensor, nn

from bitwright import capture, load_workload
from bitwright.core.registry import KERNELS
from bitwright.plan import ComputeSpec
from bitwright.sensitivity import score_operators
from bitwright.sensitivity.error_injection import substitutable_operators, training_batch_norms
from bitwright.sensitivity.operator_scores import spec_of
from bitwright.workload import call
from bitwright.workload.data import split

INDICATORS = ("gradient-variance", "hessian", "output-error", "weight-variance", "random")
RANDOM_SEEDS = 20
Batches = list[tuple[Any, Tensor]]


def resnet20(batches: int, size: int) -> tuple[nn.Module, Batches, Callable[[Any, Any], Tensor]]:
    workload = load_workload("resnet20-cifar10")
    data = workload.evaluation()
    found = [pair for _, pair in zip(range(batches), split(data, size), strict=False)]
    return workload.model, found, F.cross_entropy


def bert(batches: int, size: int) -> tuple[nn.Module, Batches, Callable[[Any, Any], Tensor]]:
    """A small BERT that has learned something: whether a sequence has more even than odd words."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=200,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=32,
        attn_implementation="eager",
    )
    model = BertForSequenceClassification(config)
    generator = torch.Generator().manual_seed(1)

    def batch(count: int) -> tuple[dict[str, Tensor], Tensor]:
        words = torch.randint(0, 200, (count, 24), generator=generator)
        return {"input_ids": words}, ((words % 2 == 0).sum(1) > 12).long()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(100):
        inputs, target = batch(32)
        optimizer.zero_grad()
        F.cross_entropy(model(**inputs).logits, target).backward()
        optimizer.step()
    return (
        model.eval(),
        [batch(size) for _ in range(batches)],
        lambda output, target: F.cross_entropy(output.logits, target),
    )


def truth(
    model: nn.Module, data: Batches, loss: Callable[[Any, Any], Tensor], spec: ComputeSpec, repeats: int
) -> tuple[dict[str, float], dict[str, float], float]:
    """Gradient variance and loss increase for each operator alone in this format, and CPU seconds."""
    graph = capture(model, data[0][0])
    kernel = KERNELS.get(spec.format)
    chosen = {op.name: spec for op in graph.ops if kernel.refuses(op, spec) is None}
    variances, losses = dict.fromkeys(chosen, 0.0), dict.fromkeys(chosen, 0.0)
    parameters = [p for p in model.parameters() if p.requires_grad]
    begin = time.process_time()
    with training_batch_norms(model), substitutable_operators(model, graph, chosen) as operators:
        for inputs, target in data:
            operators.put({})
            value = loss(call(model, inputs), target)
            wanted = torch.autograd.grad(value, parameters, allow_unused=True)
            for name in chosen:
                operators.put({name: kernel(spec, simulate=True)})
                for _ in range(repeats):
                    other = loss(call(model, inputs), target)
                    got = torch.autograd.grad(other, parameters, allow_unused=True)
                    error = sum(
                        float((a - b).square().sum()) for a, b in zip(got, wanted, strict=True) if b is not None
                    )
                    variances[name] += error / len(data) / repeats
                    losses[name] += (other.item() - value.item()) / len(data) / repeats
    return variances, losses, time.process_time() - begin


def compare(model: nn.Module, data: Batches, loss: Callable[[Any, Any], Tensor], format: str) -> dict[str, Any]:
    torch.manual_seed(0)
    spec = spec_of(format)
    variances, losses, seconds = truth(model, data, loss, spec, 3 if spec.stochastic else 1)
    variance_of, loss_of = list(variances.values()), [abs(x) for x in losses.values()]

    def row(indicator: str, batches: Batches, seed: int = 0) -> dict[str, Any]:
        found = score_operators(model, batches, loss, indicator=indicator, formats=(format,), seed=seed)
        values = [found.value(name, format) for name in variances]
        return {
            "variance": float(spearmanr(values, variance_of).statistic),
            "loss": float(spearmanr(values, loss_of).statistic),
            "seconds": found.seconds,
            "values": dict(zip(variances, values, strict=True)),
        }

    rows = {indicator: row(indicator, data) for indicator in INDICATORS[:-1]}
    rows["gradient-variance, one batch"] = row("gradient-variance", data[:1])
    rows["hessian, one batch"] = row("hessian", data[:1])
    draws = [row("random", data, seed) for seed in range(RANDOM_SEEDS)]  # one draw may be lucky
    rows["random, mean of the size"] = {
        key: mean(abs(draw[key]) for draw in draws) for key in ("variance", "loss", "seconds")
    }
    return {"format": format, "truth": variances, "loss": losses, "seconds": seconds, "indicators": rows}


def table(name: str, found: dict[str, Any]) -> list[str]:
    lines = [
        "",
        f"## {name}, {found['format']}: {len(found['truth'])} operators, Monte Carlo in {found['seconds']:.1f} s",
        "",
        "| indicator | Spearman with gradient variance | with loss increase | CPU seconds |",
        "|---|---|---|---|",
    ]
    for indicator, row in found["indicators"].items():
        lines.append(f"| {indicator} | {row['variance']:.2f} | {row['loss']:.2f} | {row['seconds']:.2f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--formats", nargs="*", default=["int8", "int8/stochastic/weight", "bf16"])
    parser.add_argument("--only", nargs="*", default=["resnet20", "bert"], choices=["resnet20", "bert"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    facts = environment(batches=arguments.batches, size=arguments.size)
    rows: dict[str, Any] = {}
    text = [
        "# Indicators against Monte Carlo, one operator at a time in low precision",
        "",
        "ResNet-20 with the CIFAR-10 checkpoint, batch norms as in training; BERT of 4 layers of width 64. Spearman's",
        "rank correlation over operators. One operator's noise moves the loss up or down: the size of it is taken.",
    ]
    for name, make in (("resnet20", resnet20), ("bert", bert)):
        if name in arguments.only:
            made = make(arguments.batches, arguments.size)
            for format in arguments.formats:
                rows[f"{name} {format}"] = found = compare(*made, format)
                text += table(name, found)
                print("\n".join(text[-len(table(name, found)) :]), flush=True)
    save("indicators", {"environment": facts, "rows": rows}, "\n".join(text))


if __name__ == "__main__":
    main()
