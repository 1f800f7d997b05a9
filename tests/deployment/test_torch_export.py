"""The exported program has the quantizers of the model, whichever path the model's code takes under torch.export."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import bitwright as bw
from bitwright.core.errors import ExportError


def export_and_check(model: nn.Module, batches: list[Any], folder: Path) -> bw.Artefact:
    bw.quantize(model.eval(), batches)
    artefact = bw.export(model, folder / "model.onnx", batches[0])
    assert bw.check(model, artefact.path, batches[-1:]).passed
    return artefact


def images(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 3, 8, 8, generator=generator) for _ in range(count)]


def rows(count: int = 3, width: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 4, width, generator=generator) for _ in range(count)]


class LinearAttention(nn.Module):
    """Attention without softmax, computed with autocast switched off: the block of timm's EfficientViT."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.qkv = nn.Conv2d(16, 48, 1, bias=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        batch, _, height, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, -1, 24, height * width).transpose(-1, -2).chunk(3, dim=-1)
        v = F.pad(v, (0, 1), value=1.0)
        with torch.autocast(device_type=v.device.type, enabled=False):
            q, k, v = torch.relu(q).float(), torch.relu(k).float(), v.float()
            out = q @ (k.transpose(-1, -2) @ v)
            out = out[..., :-1] / (out[..., -1:] + 1e-5)
        out = out.transpose(-1, -2).reshape(batch, -1, height, width)
        return self.head((out + x).mean((2, 3)))


def test_a_region_without_autocast_keeps_its_quantizers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    artefact = export_and_check(LinearAttention(), images(), tmp_path)
    assert artefact.weights == 3
    assert artefact.activation_pairs > 8


class Nested(nn.Module):
    """Regions within regions, one of which gives several results."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y = self.inner(x)
            with torch.no_grad():
                a, b = self.last(y).relu(), y.sigmoid()
        with torch.enable_grad():
            return self.last(a * b) + a


def test_regions_within_regions_keep_their_quantizers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    artefact = export_and_check(Nested(), rows(), tmp_path)
    assert artefact.weights == 2


class Half(nn.Module):
    """Autocast to float16 in a part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            x = self.first(x).relu() + 1
        return self.last(x.float())


def test_the_casts_of_autocast_are_exported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    artefact = export_and_check(Half(), rows(), tmp_path)
    assert artefact.weights == 2


class EagerCheck(nn.Module):
    """Calls more operators outside torch.export than under it: those after them have other numbers there."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.a, self.b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            assert (x @ x.transpose(-1, -2)).isfinite().all()
        return (self.first(x) @ self.a).reshape(-1, 4, 8) @ self.b


def test_operators_that_only_eager_mode_has_do_not_shift_the_others(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = EagerCheck()
    artefact = export_and_check(model, rows(), tmp_path)
    assert artefact.weights == 3


class OtherBranch(nn.Module):
    """The same product, spelled in two places; and one more before it under torch.export."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            x = torch.mul(x, 1.0)
            y = torch.matmul(x, self.a)
        else:
            y = x @ self.a
        return (y * 0.5) @ self.b


def test_one_operator_in_two_branches_is_one_operator(tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert export_and_check(OtherBranch(), rows(), tmp_path).weights == 2


class OtherOperators(nn.Module):
    """Under torch.export the product is made of other operators."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if torch.compiler.is_exporting():
            return (x.unsqueeze(-1) * self.weight).sum(-2)
        return x @ self.weight


def test_a_path_with_other_operators_is_refused_with_the_sites(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = OtherOperators().eval()
    bw.quantize(model, rows())
    with pytest.raises(ExportError) as caught:
        bw.export(model, tmp_path / "model.onnx", rows()[0])
    assert caught.value.codes == ["export-path-differs"]
    assert "/matmul#0:input1" in str(caught.value.problems[0].where)
    assert not list(tmp_path.iterdir())


class Pair(nn.Module):
    """Two linears; `shape` says what becomes of their result."""

    def __init__(self, shape: Any = lambda x, y: y) -> None:
        super().__init__()
        self.first, self.last, self.shape = nn.Linear(8, 8), nn.Linear(8, 4), shape

    def forward(self, x: Tensor) -> Any:
        return self.shape(x, self.last(self.first(x).relu()))


@dataclass(frozen=True)
class Result:
    y: Tensor
    count: int = 3
    more: Any = None


class Named(NamedTuple):
    y: Tensor
    name: str


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        (lambda x, y: (y, 3, 0.5, True, None, "text"), 1),
        (lambda x, y: {"b": y, "shape": x.shape, "batch": x.shape[0], "a": [x * 2, x.dtype, x.device]}, 2),
        (lambda x, y: Result(y=y, more=[Result(y=y + 1)]), 2),
        (lambda x, y: Named(y, "text"), 1),
    ],
    ids=["numbers", "shapes", "dataclasses", "named tuple"],
)
def test_what_is_no_tensor_is_left_out_of_the_outputs(shape: Any, count: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert len(export_and_check(Pair(shape), rows(), tmp_path).outputs) == count


@dataclass
class Sample:
    x: Tensor
    factor: float
    others: Any = None


class OfSample(Pair):
    def forward(self, sample: Sample, flag: bool = True) -> Any:
        return Result(y=super().forward(sample.x) * sample.factor + sample.others["bias"])


def test_dataclasses_are_inputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches: list[Any] = [(Sample(x, 2.0, {"bias": x.mean(-1, keepdim=True)}), False) for x in rows()]
    artefact = export_and_check(OfSample(), batches, tmp_path)
    assert artefact.inputs == ("sample_x", "sample_others_bias")
    assert artefact.dynamic_batch


def test_a_compiled_model_is_unwrapped(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Pair().eval()
    quantized = bw.quantize(torch.compile(model, backend="eager"), rows())
    assert quantized.model is model
    assert {site for site, _ in quantized.plan.quantized} >= {"first:weight", "last:weight"}
    artefact = quantized.export(tmp_path / "model.onnx")
    assert quantized.check(artefact.path).passed


def test_a_compiled_part_runs_as_it_is_written(tmp_path: Path) -> None:
    torch.manual_seed(0)

    def unused(*_: Any) -> Any:
        raise AssertionError("compiled while its operators are recorded")

    model = nn.Sequential(nn.Linear(8, 8), torch.compile(Pair(), backend=unused)).eval()  # type: ignore[arg-type]
    assert export_and_check(model, rows(), tmp_path).weights == 3


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.matrix_exp(x.triu() - x.triu().T)


@pytest.mark.parametrize("kind", ["orthogonal", "cayley", "householder", "weight_norm", "spectral_norm", "own"])
def test_computed_weights_are_deployed(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Pair()
    if kind == "own":
        parametrize.register_parametrization(model.first, "weight", Symmetric())
    elif kind in ("cayley", "householder"):
        parametrizations.orthogonal(model.first, orthogonal_map=kind)
    else:
        getattr(parametrizations, kind)(model.first)
    assert export_and_check(model, rows(), tmp_path).weights == 2


def test_a_computed_weight_that_stays_in_float_is_deployed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Pair().eval()
    parametrizations.orthogonal(model.first)
    bw.quantize(model, rows(), keep_float=["first"])
    artefact = bw.export(model, tmp_path / "model.onnx", rows()[0])
    assert artefact.weights == 1
    assert bw.check(model, artefact.path, rows()[1:]).passed


@torch.library.custom_op("bitwright_tests::grouped_mm_fallback", mutates_args=())
def grouped_mm_fallback(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return F.grouped_mm(x, weight, offs=offs)


@grouped_mm_fallback.register_fake
def _(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


class Experts(nn.Module):
    """A mixture of experts as transformers runs it: rows sorted by expert, counted, multiplied in groups.

    Compilers get a twin of grouped_mm: torch's own has no rule for float32 there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.router, self.weight = nn.Linear(8, 4), nn.Parameter(torch.randn(4, 8, 16) / 4)
        self.last = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 8)
        expert, order = torch.sort(self.router(rows).argmax(-1))
        counts = torch.histc(expert.float(), bins=4, min=0, max=3)
        offsets = counts.cumsum(0, dtype=torch.int32)
        fallback = torch.ops.bitwright_tests.grouped_mm_fallback
        grouped = fallback if torch.compiler.is_compiling() else F.grouped_mm
        made = grouped(rows[order], self.weight, offs=offsets)
        return self.last(made[torch.argsort(order)])


def test_grouped_products_are_translated(tmp_path: Path) -> None:
    torch.manual_seed(0)
    artefact = export_and_check(Experts(), rows(), tmp_path)
    assert artefact.weights == 3  # with those of the experts
    assert artefact.dynamic_batch


class Histogram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x), torch.histc(x, bins=5, min=-1, max=1)


def test_a_histogram_counts_as_torch_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = rows()
    batches[-1].view(-1)[:6] = torch.tensor([-1.0, 1.0, -1.001, 1.001, 0.2, -0.2])
    artefact = export_and_check(Histogram(), batches, tmp_path)
    expected = torch.histc(batches[-1], bins=5, min=-1, max=1)
    session = onnxruntime.InferenceSession(str(artefact.path), providers=["CPUExecutionProvider"])
    counts = session.run(None, {"x": batches[-1].numpy()})[1]
    assert counts.tolist() == expected.tolist()


class Branching(nn.Module):
    """A branch on data, which torch.export can't trace."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else self.layer(-x)


def test_a_failed_trace_prints_no_log_of_torch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    quantized = bw.quantize(Branching(), [torch.rand(4, 4)])
    caplog.clear()
    capfd.readouterr()
    with pytest.raises(bw.BitwrightError) as error:
        quantized.export(tmp_path / "model.onnx")
    assert error.value.codes == ["torch-export-failed"]
    assert not [record for record in caplog.records if record.name.startswith("torch")]
    assert capfd.readouterr().err == ""


@dataclass
class Features:
    values: Tensor


class Signature(nn.Module):
    """A model whose parameters are declared by its subclass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 4)

    def mixed(self, a: Tensor, b: Tensor) -> Tensor:
        return self.first(a) - 3 * self.second(b)


class AnyKeyword(Signature):
    def forward(self, a: Tensor, **options: Any) -> Tensor:
        return self.mixed(a, options["b"])


class OnlyKeywords(Signature):
    def forward(self, **options: Any) -> Tensor:
        return self.mixed(options["a"], options["b"])


class KeywordOnly(Signature):
    def forward(self, *, a: Tensor, b: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.mixed(a, b)


class ObjectFirst(Signature):
    def forward(self, a: Features, b: Tensor) -> Tensor:
        return self.mixed(a.values, b)


class Containers(Signature):
    def forward(self, a: dict[str, list[Tensor]], b: dict[str, Tensor]) -> Tensor:
        return self.mixed(a["list"][0], b["value"])


@pytest.mark.parametrize(
    ("model", "call", "names"),
    [
        (AnyKeyword, lambda a, b: {"a": a, "b": b, "scale": 3}, {"a", "b"}),
        (OnlyKeywords, lambda a, b: {"b": b, "a": a, "mask": None}, {"a", "b"}),
        (KeywordOnly, lambda a, b: {"b": b, "a": a, "mask": None}, {"a", "b"}),
        (ObjectFirst, lambda a, b: {"b": b, "a": Features(a)}, {"a_values", "b"}),
        (ObjectFirst, lambda a, b: (Features(a), b), {"a_values", "b"}),
        (Containers, lambda a, b: {"b": {"value": b}, "a": {"list": [a]}}, {"a_list_0", "b_value"}),
    ],
)
def test_inputs_keep_their_names_in_any_signature(model: Any, call: Any, names: set[str], tmp_path: Path) -> None:
    batches = [call(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(3)]
    artefact = export_and_check(model(), batches, tmp_path)
    assert set(artefact.inputs) == names
    assert artefact.dynamic_batch
