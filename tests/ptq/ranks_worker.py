"""One process of test_ranks: calibrates on batches of its own, in many ways, and gives back what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from two_ranks import work

from bitwright.backends import place
from bitwright.core.formats import Format
from bitwright.graph import capture
from bitwright.plan import Plan, SiteSpec
from bitwright.ptq import calibrate
from bitwright.quantizers import prepare, quantizers_of

EXTREMES = ["minmax"]
MEANS = ["average-minmax", "ema-minmax", "percentile", "mse", "kl", "ema-quantile", "ema-mse", "clip-std", "lsq"]
MEANS += ["lsqplus", "pot-floor", "pot-mode"]
QUANTIZERS = ["plain", "lsq", "lsqplus", "pact", "dorefa", "dsq", "qil", "apot", "tqt", "nnie"]


class Fork(nn.Module):
    """Takes the left way for positive inputs, the right one for others; the last layer is common."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.last = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.left(x) if x.sum() > 0 else self.right(x))


SITES = [f"{layer}:{port}" for layer in ("left", "right", "last") for port in ("input", "weight")]


def fork(sites: list[str] = SITES, **options: Any) -> Fork:
    formats = {"input": "int8/tensor/sym/adasign", "weight": "int4/channel/sym"}
    specs = {site: SiteSpec(format=Format.parse(formats[site.split(":")[1]]), **options) for site in sites}
    return prepare(Fork(), Plan(sites=specs)).eval()


def data(rank: int) -> Tensor:
    """Both take the left way; only rank 1 has negative numbers among its inputs."""
    x = torch.rand(16, 4, generator=torch.Generator().manual_seed(rank)) + 0.5
    return x if rank == 0 else torch.cat([x * 3, -2.5 * x[:4]])


def state(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {k: v.detach().clone() for k, v in model.state_dict().items() if k.startswith("bitwright.")}
    return found | {f"{site} codes": [q.qmin, q.qmax] for site, q in quantizers_of(model).items()}


def error(call: Callable[[], object]) -> list[str]:
    try:
        call()
    except Exception as raised:
        return [type(raised).__name__, str(raised)]
    return []


def broken(rank: int) -> Iterator[Tensor]:
    yield data(rank)
    if rank == 1:
        raise FileNotFoundError("images/0001.jpg")
    yield data(rank)


def main(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    common = ["left:input", "left:weight"]
    for observer in [*EXTREMES, *MEANS]:
        model = fork(common, observer=observer)
        assert calibrate(model, [data(rank)] * (rank + 1)) == rank + 1
        found[f"observer {observer}"] = state(model)
    for quantizer in QUANTIZERS:
        model = fork(quantizer=quantizer)
        calibrate(model, [data(0), -data(0)] if rank == 0 else [data(1)])  # rank 1 never takes the right way
        found[f"quantizer {quantizer}"] = state(model)
    # biases on the grid of their products, guards, folded norms; rank 0 has no batch at all
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).eval()
    with torch.no_grad():
        conv[4].bias.fill_(1e9)  # makes the weight's scale coarser
    images = torch.randn(8, 2, 6, 6)
    prepare(conv, place(capture(conv, images), "onnxruntime", saturating=True))
    assert calibrate(conv, [images] if rank else []) == rank
    found["no batch on one rank"] = state(conv)
    found["no batch at all"] = error(lambda: calibrate(fork(), []))
    found["never reached"] = error(lambda: calibrate(fork(), [data(rank)]))
    nan = data(rank) * (float("nan") if rank == 1 else 1.0)
    found["nan"] = error(lambda: calibrate(fork(), [data(rank), nan]))
    found["broken loader"] = error(lambda: calibrate(fork(common), broken(rank)))
    bad = fork()
    with torch.no_grad():
        bad.right.weight[0, 0] = float("inf")
    found["bad weight on one way"] = error(lambda: calibrate(bad, [data(0) if rank else -data(0)]))
    unsigned = SiteSpec(format=Format.parse("uint8/tensor/sym"))
    model = prepare(Fork(), Plan(sites={"left:input": unsigned, "right:weight": unsigned}))
    found["no codes"] = error(lambda: calibrate(model, [-data(0) if rank else data(1)]))
    blocks = prepare(Fork(), Plan(sites={"left:input": SiteSpec(format=Format.parse("int8/group2/sym"))}))
    found["unequal shapes"] = error(lambda: calibrate(blocks, [data(rank)]))
    found["unequal plans"] = error(lambda: calibrate(fork(common if rank else SITES), [data(rank)]))
    alone = fork(common)
    for other in (0, 1):  # every process takes part in making every group
        group: Any = dist.new_group([other])
        if other == rank:
            calibrate(alone, [data(rank)], group=group)
    found["alone"] = state(alone)
    again = fork(common)  # after all those errors nobody is left behind in a collective
    calibrate(again, [data(rank)])
    found["again"] = state(again)
    return found


if __name__ == "__main__":
    work(main)
