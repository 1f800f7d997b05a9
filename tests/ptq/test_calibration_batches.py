"""Large calibration batches are cut, and images laid channels-last, where that changes no range, and only there."""

from __future__ import annotations

import pytest
import torch
from problems import raises_problem
from torch import Tensor, nn

from bitwright.core.formats import Format
from bitwright.plan import Plan, SiteSpec
from bitwright.ptq import calibrate
from bitwright.ptq import calibration as feeding
from bitwright.quantizers import prepare, quantizers_of


class Counted(nn.Module):
    """Notes the sizes of its batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)
        self.norm.running_mean.normal_()  # type: ignore[union-attr]
        self.sizes: list[int] = []
        self.channels_last: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        self.channels_last.append(x.is_contiguous(memory_format=torch.channels_last))
        result: Tensor = self.second(self.mixed(torch.relu(self.norm(self.first(x)))))
        return result

    def mixed(self, x: Tensor) -> Tensor:
        return x


class Mixed(Counted):
    """Samples of a batch have to do with each other."""

    def mixed(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0)


class Stateful(Counted):
    """Keeps its last result, and adds it to the next one."""

    last: Tensor | None = None

    def mixed(self, x: Tensor) -> Tensor:
        before, self.last = self.last, x
        return x if before is None else x + before


class OnlyWhole(Counted):
    """Knows one batch size."""

    def mixed(self, x: Tensor) -> Tensor:
        return x.view(10, *x.shape[1:])


SITES = ("first:input", "first:weight", "second:input", "second:weight", "second:output")
DATA = [torch.randn(10, 3, 9, 9, generator=torch.Generator().manual_seed(n)) for n in range(3)]


def ranges(model: Counted, observer: str = "minmax") -> dict[str, tuple[Tensor, Tensor]]:
    specs = {
        site: SiteSpec(
            format=Format.parse("int8/channel/sym" if site.endswith("weight") else "uint8/tensor/asym"),
            observer=observer if not site.endswith("weight") else "minmax",
        )
        for site in SITES
    }
    plan = Plan(sites=specs, fold={"norm": "first"})
    prepare(model.eval(), plan)
    assert calibrate(model, DATA) == 3
    return {site: (q.scale, q.zero_point) for site, q in quantizers_of(model).items()}


def same(a: dict[str, tuple[Tensor, Tensor]], b: dict[str, tuple[Tensor, Tensor]]) -> None:
    for site, (scale, zero_point) in a.items():
        assert torch.allclose(scale, b[site][0], rtol=1e-4), site
        assert torch.equal(zero_point, b[site][1]), site


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if four samples were all that memory has room for."""
    monkeypatch.setattr(feeding, "LARGEST", 4 * 4 * 8 * 7 * 7)


@pytest.mark.usefixtures("small")
def test_split_batches_give_the_ranges_of_whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Counted()
    cut = ranges(model)
    assert model.sizes == [4, 4, 2] * 3  # what looking ahead did is forgotten
    monkeypatch.undo()
    whole = Counted()
    same(cut, ranges(whole))
    assert whole.sizes == [10] * 3


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", [Mixed, Stateful, OnlyWhole])
def test_batch_dependent_models_get_whole_batches(kind: type[Counted], monkeypatch: pytest.MonkeyPatch) -> None:
    model = kind()
    found = ranges(model)
    assert model.sizes == [10] * 3
    monkeypatch.undo()
    same(found, ranges(kind()))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("observer", ["ema-minmax", "average-minmax", "mse", "percentile"])
def test_batch_counting_observers_get_whole_batches(observer: str) -> None:
    model = Counted()
    ranges(model, observer)
    assert model.sizes == [10] * 3


@pytest.mark.usefixtures("small")
def test_a_failure_in_a_piece_names_the_batch() -> None:
    model = Counted()
    prepare(model.eval(), Plan(sites={"first:input": SiteSpec(format=Format.parse("uint8/tensor/asym"))}))
    bad = DATA[1].clone()
    bad[7] = float("nan")
    with raises_problem("not-finite", where="first:input"):
        calibrate(model, [DATA[0], bad])
    with raises_problem("calibration-failed", where="calibration batch 1"):
        calibrate(model, [DATA[0], torch.randn(10, 2, 9, 9)])


class Viewing(Counted):
    """Cuts channels in halves by a view, which wants them in the plain order; maybe only of some batches."""

    def __init__(self, above: float = -1e9) -> None:
        super().__init__()
        self.above = above

    def mixed(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1).view(x.shape) if x.max() > self.above else x


def test_channels_last_calibration_keeps_ranges() -> None:
    model = Counted()
    found = ranges(model)
    assert model.channels_last == [True] * 3
    same(found, ranges(Plainly()))


class Plainly(Counted):
    """Insists on the plain order."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(len(x), -1).view(x.shape))


def test_models_that_fail_with_channels_last_get_contiguous_batches() -> None:
    model = Viewing()
    ranges(model)
    assert model.channels_last == [False] * 3


def test_a_later_batch_that_fails_with_channels_last_is_contiguous() -> None:
    with torch.no_grad():
        tops = [Counted().eval().norm(Counted().first(batch)).max().item() for batch in DATA]
    model = Viewing(above=(max(tops[1:]) + tops[0]) / 2)
    assert max(tops[1:]) > tops[0]
    same(ranges(model), ranges(Counted()))
    assert model.channels_last[0]
    assert not model.channels_last[-1]
