"""One process of test_sync: a training step of each folding strategy on this rank's share of a batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from two_ranks import work

from bitwright.core.formats import Format
from bitwright.plan import FoldSpec, Plan, SiteSpec
from bitwright.ptq import calibrate
from bitwright.quantizers import prepare, quantizers_of

SHARES = (5, 3)  # samples of each rank: unequal ones must weigh as they should
CASES = [
    (strategy, norm, rounding)
    for strategy in range(5)
    for norm in ("BatchNorm2d", "SyncBatchNorm")
    for rounding in (True, False)
]
CASES += [(strategy, "cumulative", False) for strategy in (2, 3, 4)]  # running statistics are means of all batches


def build(strategy: int, norm: str, rounding: bool, group: Any = None) -> tuple[nn.Sequential, Tensor, Tensor]:
    """The prepared model, the joint batch and a weight for each output."""
    torch.manual_seed(0)
    kind: Any = nn.SyncBatchNorm if norm == "SyncBatchNorm" else nn.BatchNorm2d
    momentum = None if norm == "cumulative" else 0.1
    model = nn.Sequential(nn.Conv2d(3, 4, 3), kind(4, momentum=momentum), nn.Tanh()).double()
    nn.init.normal_(model[1].weight)
    model[1].process_group = group
    x = torch.randn(sum(SHARES), 3, 6, 6, dtype=torch.float64)
    x[: SHARES[0]] += 2.0  # the ranks' statistics differ much
    sites = {"0:weight": SiteSpec(format=Format.parse("int8/channel/sym"))}
    sync = norm != "SyncBatchNorm" and strategy > 1  # the other one says so itself
    prepare(model, Plan(sites=sites, fold={"1": FoldSpec(into="0", strategy=strategy, sync=sync)}))
    calibrate(model, [x])
    for quantizer in quantizers_of(model).values():
        quantizer.enabled = rounding
    return model, x, torch.randn(sum(SHARES), 4, 4, 4, dtype=torch.float64)


def train(model: nn.Sequential, run: nn.Module, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Two steps; outputs, gradients of the last one, and all state."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        out = run(x)
        (out * weights).sum().backward()
        optimizer.step()
    found = {f"grad {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"out": out.detach(), **found, **{k: v.detach().clone() for k, v in model.state_dict().items()}}


def mean_over_ranks(grad: Tensor) -> Tensor:
    """What DDP does with a gradient."""
    grad = grad.clone()
    dist.all_reduce(grad)
    return grad / 2


def main(rank: int) -> dict[str, dict[str, Tensor]]:
    start = sum(SHARES[:rank])
    own = slice(start, start + SHARES[rank])
    results = {}
    for strategy, norm, rounding in CASES:
        model, x, weights = build(strategy, norm, rounding)
        run: nn.Module = model
        if norm == "SyncBatchNorm":  # on a CPU, DDP refuses a model that has one
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_hook(mean_over_ranks)
        else:
            run = DistributedDataParallel(model, forward_sync_buffers=False)
        # with twice the loss, the mean over ranks is the joint batch's gradient
        results[f"{strategy} {norm} {rounding}"] = train(model, run.train(), x[own], 2 * weights[own])
    group: Any = dist.new_group([0, 1])
    for strategy in (2, 3, 4):
        model, x, weights = build(strategy, "SyncBatchNorm", False, group)
        for parameter in model.parameters():
            parameter.register_hook(mean_over_ranks)
        torch._dynamo.reset()
        compiled: Any = torch.compile(model.train(), fullgraph=True, backend="aot_eager")
        results[f"{strategy} compiled"] = train(model, compiled, x[own], 2 * weights[own])
    return results


if __name__ == "__main__":
    work(main)
