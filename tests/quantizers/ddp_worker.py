"""One process of test_ddp: trains learnable scales on data of its own and writes down what it ends with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from two_ranks import work

from bitwright.backends import place
from bitwright.graph import capture
from bitwright.ptq import calibrate
from bitwright.quantizers import prepare, quantizers_of


def main(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3))
    example = torch.randn(8, 2, 6, 6)
    prepare(model, place(capture(model, example), "onnxruntime", weights="int4/channel/sym", quantizer="lsq"))
    calibrate(model, [example])
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    before = {site: q.scale.detach().clone() for site, q in quantizers_of(model).items() if q.scale.requires_grad}
    torch.manual_seed(100 + rank)  # each rank sees other data
    parallel.train()
    for _ in range(4):
        optimizer.zero_grad()
        parallel(torch.randn(8, 2, 6, 6)).square().mean().backward()
        optimizer.step()
    after = {site: quantizers_of(model)[site].scale.detach().clone() for site in before}
    return {"before": before, "after": after, "state": model.state_dict()}


if __name__ == "__main__":
    work(main)
