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
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import environment, save
from scipy.stats import spearmanr
from torch import Tensor, nn

from bitwright import capture, load_workload
from bitwright.batching import split
from bitwright.plan import ComputeSpec
from bitwright.registry import KERNELS
from bitwright.sensitivity import indicate
from bitwright.sensitivity.indicate import spec_of
from bitwright.sensitivity.operators import as_in_training, operators_of
from bitwright.workload import call

INDICATORS = ("gradient-variance", "hessian", "output-error", "weight-variance", "random")
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
    return model.eval(), [batch(size) for _ in range(batches)], lambda output, target: F.cross_entropy(
        output.logits, target
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
    with as_in_training(model), operators_of(model, graph, chosen) as operators:
        for inputs, target in data:
            operators.put({})
            value = loss(call(model, inputs), target)
            wanted = torch.autograd.grad(value, parameters, allow_unused=True)
            for name in chosen:
                operators.put({name: kernel(spec, simulate=True)})
                for _ in range(repeats):
                    other = loss(call(model, inputs), target)
                    got = torch.autograd.grad(other, parameters, allow_unused=True)
                    error = sum(float((a - b).square().sum()) for a, b in zip(got, wanted, strict=True) if b is not None)
                    variances[name] += error / len(data) / repeats
                    losses[name] += (other.item() - value.item()) / len(data) / repeats
    return variances, losses, time.process_time() - begin


def compare(model: nn.Module, data: Batches, loss: Callable[[Any, Any], Tensor], format: str) -> dict[str, Any]:
    torch.manual_seed(0)
    spec = spec_of(format)
    variances, losses, seconds = truth(model, data, loss, spec, 3 if spec.stochastic else 1)
    rows: dict[str, Any] = {}
    for indicator in INDICATORS:
        found = indicate(model, data, loss, indicator=indicator, formats=(format,))
        values = [found.value(name, format) for name in variances]
        rows[indicator] = {
            "variance": float(spearmanr(values, list(variances.values())).statistic),
            "loss": float(spearmanr(values, [abs(x) for x in losses.values()]).statistic),
            "seconds": found.seconds,
            "values": dict(zip(variances, values, strict=True)),
        }
    return {"format": format, "truth": variances, "loss": losses, "seconds": seconds, "indicators": rows}


if __name__ == "__main__":
    import sys

    torch.set_num_threads(1)
    for make in (resnet20, bert):
        if make.__name__ in sys.argv[1]:
            r = compare(*make(4, 32), sys.argv[2])
            for k, v in r["indicators"].items():
                print(k, {a: b for a, b in v.items() if a != "values"})
            print("mc", r["seconds"])
            g = r["indicators"]["gradient-variance"]["values"]
            for n, v in r["truth"].items():
                print(f"{n:50} {v:.3e} {g[n]:.3e} {g[n]/v:.2f} loss {r['loss'][n]:+.2e}")
