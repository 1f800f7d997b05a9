"""Compiled arithmetic: the same numbers as without, few variants, and a word where no compiler works.

Inductor needs seconds per function: the tests that really generate code are few and share them; the rest compile
with a backend that runs what was traced.
"""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitwright.core.errors import FormatError
from bitwright.core.formats import Format
from bitwright.core.registry import QUANTIZERS
from bitwright.plan import SiteSpec
from bitwright.quantizers import (
    Layout,
    Quantizer,
    compile_arithmetic,
    compiled,
    quantizers_of,
    rounding,
    strip,
)

pytestmark = [
    # torch 2.13's own tracer of autograd functions makes one in a way that torch deprecates; inductor imports such
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # and its compiler looks at the gradients of inputs that aren't leaves
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.timeout(600),
]
NAMES = sorted(set(QUANTIZERS.names()) - {"product"})
FORMATS = {
    "tensor": "uint8/tensor/asym",
    "tensor-sym": "int8/tensor/sym",
    "channel": "int4/channel/sym",
    "group": "int4/group8/sym",
}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.set_num_threads(1)
    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "_broken", [])
    monkeypatch.setattr(compiled, "SMALL", 1 << 14)
    yield
    torch._dynamo.reset()


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Compile with a backend that runs what was traced and counts how often it was asked."""
    made: list[int] = []
    real = torch.compile

    def backend(graph: Any, inputs: Any, options: Any = None) -> Any:
        made.append(len(inputs))
        return real_backend(graph, inputs)

    real_backend = torch._dynamo.lookup_backend("aot_eager")
    monkeypatch.setattr(torch, "compile", lambda f, **options: real(f, backend=backend, **options))
    monkeypatch.setattr(compiled, "_kernels", {})
    for kernel in all_kernels():
        monkeypatch.setattr(kernel, "twin", None)
    return made


def all_kernels() -> list[compiled.CompiledKernel]:
    by_relu = (rounding._FORWARD, rounding._BACKWARD, rounding._PLAIN_BACKWARD)
    folds = (*rounding._FOLDED_FORWARD.values(), rounding._FOLDED_BACKWARD)
    return [*(kernel for pair in by_relu for kernel in pair.values()), rounding._BACKWARD_ZERO, *folds]


def build(name: str, format: str, seen: Tensor, *, weight: bool, axis: int | None = None) -> Quantizer:
    parsed = Format.parse(format)
    port = "weight" if weight else "input"
    where = axis if axis is not None else 0 if parsed.granularity == "channel" else 1
    layout = Layout(parsed.granularity, where, parsed.group)
    spec = SiteSpec(format=parsed, quantizer=name)
    quantizer: Quantizer = QUANTIZERS.get(name)(
        spec, site=f"test:{port}", kind="linear", port=port, layout=layout, weight=weight
    )
    quantizer.observe(seen)
    quantizer.update_grid()
    with torch.no_grad():
        for parameter in quantizer.parameters():
            parameter.mul_(0.8)  # some numbers are clipped
    return quantizer


def run(quantizer: Quantizer, x: Tensor, *, relu: bool = False) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    quantizer.zero_grad(set_to_none=True)
    out = quantizer(x, relu=relu)
    weights = torch.linspace(-1.0, 2.0, out.numel(), dtype=out.dtype).reshape(out.shape)
    out.backward(weights)
    assert x.grad is not None
    grads = {name: p.grad.clone() for name, p in quantizer.named_parameters() if p.grad is not None}
    return out.detach(), x.grad, grads


def agree(quantizer: Quantizer, x: Tensor, *, relu: bool = False, exact: bool = True) -> None:
    quantizer.compiled = False
    out, to_x, grads = run(quantizer, x, relu=relu)
    quantizer.compiled = True
    c_out, c_to_x, c_grads = run(quantizer, x, relu=relu)
    assert compiled._broken == []
    assert c_out.dtype == out.dtype
    assert c_out.stride() == out.stride()
    if exact:
        assert torch.equal(c_out, out)
        assert torch.equal(c_to_x, to_x)
    else:  # functions such as tanh and log2 have other last bits in vectorised code, and a code may flip
        assert (c_out != out).float().mean() < 1e-3
        assert torch.allclose(c_to_x, to_x, rtol=1e-4, atol=1e-4)
    assert c_grads.keys() == grads.keys()
    for name, grad in grads.items():
        size = x.detach().float().abs().sum() * 1e-6 + grad.abs().max() * 1e-5
        assert torch.allclose(c_grads[name], grad, rtol=1e-4, atol=float(size)), name


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("layout", list(FORMATS))
@pytest.mark.parametrize("name", NAMES)
def test_every_quantizer_and_layout(name: str, layout: str, counting: list[int]) -> None:
    x = numbers(64, 512)
    try:
        quantizer = build(name, FORMATS[layout], x, weight=not layout.startswith("tensor"))
    except FormatError:
        pytest.skip("refuses the format")
    agree(quantizer, x, exact=name in ("plain", "fixed", "lsq", "lsqplus", "tqt"))
    if layout.startswith("tensor"):
        agree(quantizer, x, relu=True, exact=name in ("plain", "fixed", "lsq", "lsqplus", "tqt"))
    assert counting or layout == "group"  # own kernels leave groups as they are


@pytest.mark.slow
@pytest.mark.parametrize("layout", list(FORMATS))
@pytest.mark.parametrize("name", NAMES)
def test_every_quantizer_and_layout_in_generated_code(name: str, layout: str) -> None:
    x = numbers(64, 512)
    try:
        quantizer = build(name, FORMATS[layout], x, weight=not layout.startswith("tensor"))
    except FormatError:
        pytest.skip("refuses the format")
    agree(quantizer, x, exact=name in ("plain", "fixed", "lsq", "lsqplus", "tqt"))


@pytest.mark.slow
def test_generated_code_of_lsq_is_equal_to_the_bit() -> None:
    x = numbers(8, 16, 16, 16)
    for format in ("uint8/tensor/asym", "int4/tensor/sym"):
        quantizer = build("lsq", format, x, weight=False)
        agree(quantizer, x)
        agree(quantizer, x.to(memory_format=torch.channels_last))
        agree(quantizer, x, relu=True)
    agree(build("lsq", "int8/channel/sym", x[0], weight=True), numbers(16, 64, 4, 8))


def test_any_dtype_and_memory_order(counting: list[int]) -> None:
    x = numbers(8, 16, 16, 16)
    lsq = build("lsq", "uint8/tensor/asym", x, weight=False)
    for other in (x.double(), x.bfloat16(), x.to(memory_format=torch.channels_last), x.transpose(1, 3), x[:, :, ::2]):
        agree(lsq, other)
    per_channel = build("lsq", "int8/channel/sym", x, weight=False, axis=1)
    agree(per_channel, x)
    volume = numbers(4, 8, 8, 8, 16).to(memory_format=torch.channels_last_3d)
    agree(lsq, volume)
    generic = build("dsq", "uint8/tensor/asym", x, weight=False)
    agree(generic, x.to(memory_format=torch.channels_last), exact=False)


def test_a_gradient_that_is_expanded(counting: list[int]) -> None:
    x = numbers(32, 1024).requires_grad_()
    quantizer = build("lsq", "uint8/tensor/asym", x.detach(), weight=False)
    quantizer(x).sum().backward()
    expected = x.grad
    x.grad = None
    quantizer.compiled = True
    quantizer(x).sum().backward()
    assert expected is not None
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def test_autocast_and_no_grad(counting: list[int]) -> None:
    x = numbers(32, 1024)
    quantizer = build("lsq", "uint8/tensor/asym", x, weight=False)
    expected = quantizer(x).detach()
    quantizer.compiled = True
    with torch.no_grad():
        assert torch.equal(quantizer(x), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(quantizer(x).detach(), expected)


def test_a_gradient_of_gradients(counting: list[int]) -> None:
    x = numbers(32, 1024).requires_grad_()
    quantizer = build("lsq", "int4/tensor/sym", x.detach(), weight=False)
    results = []
    for on in (False, True):
        quantizer.compiled = on
        (first,) = torch.autograd.grad(quantizer(x).pow(3).sum(), x, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), [x, quantizer.scale]))
    for eager, fused in zip(*results, strict=True):
        assert torch.allclose(eager, fused, rtol=1e-4)
    assert results[0][1].abs() > 0


def folding(kind: str, weight: Tensor, *, guard: str | None) -> Quantizer:
    spec = SiteSpec(format=Format.parse("int8/channel/sym"), quantizer="lsq", guard=guard)
    layout = Layout("channel", 0)
    lsq: Quantizer = QUANTIZERS.get("lsq")(spec, site="a:weight", kind=kind, port="weight", layout=layout, weight=True)
    lsq.observe(weight)
    lsq.update_grid()
    with torch.no_grad():
        lsq.scale.mul_(0.5)  # some numbers are clipped, and the guard has work
    return lsq


FOLDED = {"conv2d": (6, 4, 3, 3), "odd": (6, 3, 3, 3), "depthwise": (6, 1, 3, 3), "conv1d": (6, 4, 5), "linear": (6, 8)}


@pytest.mark.parametrize("guard", [None, "int16-pairs"])
@pytest.mark.parametrize("which", list(FOLDED))
def test_a_folded_weight_is_the_same_in_compiled_code(which: str, guard: str | None, counting: list[int]) -> None:
    weight, start = numbers(*FOLDED[which]).requires_grad_(), numbers(6, seed=1)  # some factors are negative
    lsq = folding(which if which in ("conv1d", "linear") else "conv2d", weight.detach(), guard=guard)
    factor = start.reshape(-1, *[1] * (weight.dim() - 1)).requires_grad_()
    results = []
    for on in (False, True):
        lsq.compiled = on
        out = lsq(weight, factor=factor)
        first = torch.autograd.grad(out.pow(3).sum(), [weight, factor, lsq.scale], create_graph=True)
        second = torch.autograd.grad(sum(part.square().sum() for part in first), [weight, factor, lsq.scale])
        plain = torch.autograd.grad(lsq(weight, factor=factor).pow(3).sum(), [weight, factor, lsq.scale])
        results.append((out.detach(), [*first, *second, *plain]))
    assert counting != []
    assert torch.equal(results[0][0], results[1][0])
    for eager, fused in zip(results[0][1], results[1][1], strict=True):
        assert eager.abs().max() > 0
        assert torch.allclose(eager, fused, rtol=1e-4, atol=1e-5 * float(eager.detach().abs().max()))


@pytest.mark.parametrize("guard", [None, "int16-pairs"])
def test_folded_weights_are_rounded_like_others(guard: str | None) -> None:
    weight, factor = numbers(6, 4, 3, 3).requires_grad_(), numbers(6, 1, 1, 1, seed=1).requires_grad_()
    lsq = folding("conv2d", weight.detach(), guard=guard)
    leaves = [weight, factor, lsq.scale]
    out, apart = lsq(weight, factor=factor), lsq(weight * factor) / factor
    assert torch.equal(out, apart)
    grads = torch.linspace(-1.0, 2.0, out.numel()).reshape(out.shape)
    for ours, theirs in zip(*(torch.autograd.grad(one, leaves, grads) for one in (out, apart)), strict=True):
        assert ours.abs().max() > 0
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


def test_generated_code_of_a_folded_weight_is_equal_to_the_bit() -> None:
    weight, factor = numbers(16, 8, 3, 3), numbers(16, 1, 1, 1, seed=1)
    lsq = folding("conv2d", weight, guard="int16-pairs")
    expected = lsq(weight, factor=factor)
    lsq.compiled = True
    assert torch.equal(lsq(weight, factor=factor), expected)


@pytest.mark.parametrize("name", ["lsq", "plain", "dsq", "pact"])
def test_new_sizes_dont_compile_again(name: str, counting: list[int]) -> None:
    quantizer = build(name, "uint8/tensor/asym", numbers(64, 512), weight=False)
    quantizer.compiled = True
    run(quantizer, numbers(64, 16, 8, 8))
    made = len(counting)
    assert made > 0
    other = build(name, "uint8/tensor/asym", numbers(64, 512, seed=3), weight=False)  # and another site uses the same
    other.compiled = True
    for shape in ((37, 16, 8, 8), (64, 32, 16, 16), (50, 512), (41, 7, 77)):
        run(other, numbers(*shape))
    assert len(counting) == made


def test_small_tensors_are_not_compiled(counting: list[int]) -> None:
    for name in ("lsq", "dsq"):
        quantizer = build(name, "uint8/tensor/asym", numbers(4, 8), weight=False)
        quantizer.compiled = True
        run(quantizer, numbers(4, 8))
    assert counting == []


def test_compilation_is_off_by_default(zoo: SimpleNamespace, counting: list[int]) -> None:
    model = zoo.quantized(zoo.seeded(zoo.Residual), quantizer="lsq").train()
    assert not any(quantizer.compiled for quantizer in quantizers_of(model).values())
    x = numbers(64, 3, 16, 16)
    model(x).sum().backward()
    assert counting == []
    compile_arithmetic(model)
    twin = copy.deepcopy(model)
    model(x).sum().backward()
    assert counting != []
    assert all(quantizer.compiled for quantizer in quantizers_of(twin).values())
    compile_arithmetic(model, on=False)
    made = len(counting)
    model(x).sum().backward()
    assert len(counting) == made
    assert not hasattr(strip(model), "bitwright")


def test_a_training_step_is_the_same(zoo: SimpleNamespace, counting: list[int]) -> None:
    model = zoo.quantized(zoo.seeded(zoo.Residual), quantizer="lsq").train()
    other = copy.deepcopy(model)
    compile_arithmetic(other)
    x = numbers(64, 3, 16, 16)
    a, b = model(x), other(x)
    assert torch.equal(a, b)
    for out in (a, b):
        out.square().sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        if ours.grad is not None:
            assert theirs.grad is not None
            assert torch.allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4 * (1 + ours.grad.abs().max())), name


def test_inlined_when_the_whole_model_is_compiled_or_exported(zoo: SimpleNamespace) -> None:
    model = zoo.quantized(zoo.seeded(zoo.Residual), quantizer="lsq")
    compile_arithmetic(model)
    x = numbers(64, 3, 16, 16)
    expected = model(x).detach()
    explained = torch._dynamo.explain(model)(x)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)
    whole = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(whole(x), expected, atol=0.05)
    exported = torch.export.export(model, (x,), strict=False)
    assert torch.allclose(exported.module()(x), expected, atol=0.05)


def test_missing_compiler_is_reported_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no compiler here\nand more")

    monkeypatch.setattr(torch, "compile", lambda f, **_: broken)
    for kernel in all_kernels():
        monkeypatch.setattr(kernel, "twin", None)
    x = numbers(64, 512)
    quantizer = build("lsq", "uint8/tensor/asym", x, weight=False)
    expected = run(quantizer, x)
    quantizer.compiled = True
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            got = run(quantizer, x)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    assert len(caplog.records) == 1
    assert "no compiler here" in caplog.text


_BROKEN = """
import logging, torch
from torch import nn
import bitwright as bw
from bitwright.quantizers import compile_arithmetic
logging.basicConfig()
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))
x = torch.randn(16, 3, 32, 32)
bw.quantize(model, [x], quantizer="lsq")
expected = model(x).detach()
compile_arithmetic(model)
for _ in range(2):
    out = model(x)
    out.sum().backward()
assert torch.equal(out.detach(), expected)
"""


def test_without_a_compiler_on_the_machine(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "CXX": str(tmp_path / "none"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run([sys.executable, "-c", _BROKEN], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("can't be compiled here") == 1, done.stderr


def test_a_model_that_writes_in_place_after_a_quantizer(counting: list[int]) -> None:
    x = numbers(64, 512).requires_grad_()
    for name in ("lsq", "plain", "pact", "dorefa", "dsq"):
        quantizer = build(name, "uint8/tensor/asym", x.detach(), weight=False)
        for on in (False, True):
            quantizer.compiled = on
            x.grad = None
            out = nn.functional.relu(quantizer(x).add_(1.0), inplace=True)
            out.sum().backward()
            expected = nn.functional.relu(quantizer(x.detach()) + 1.0)
            assert torch.equal(out.detach(), expected), name
            assert x.grad is not None, name
            assert x.grad.abs().sum() > 0, name


_DIGEST = """
import hashlib, torch
from bitwright.kernels.codes import encode
torch.set_num_threads(1)
x = torch.randn(32, 4100, generator=torch.Generator().manual_seed(0))
codes = encode(x, signed=True)
print(hashlib.sha256(codes.values.numpy().tobytes()).hexdigest(), torch.backends.cpu.get_cpu_capability())
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="needs vectors of two widths")
def test_a_cache_that_machines_with_other_vectors_share(tmp_path: Path) -> None:
    """torch's cache of generated code doesn't know their width: codes were garbage, and memory was overwritten."""
    told = []
    for width in ("avx2", "avx512"):
        env = {**os.environ, "ATEN_CPU_CAPABILITY": width, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        run = subprocess.run(
            [sys.executable, "-c", _DIGEST], env=env, check=True, capture_output=True, text=True, timeout=300
        )
        told.append(run.stdout.split())
    assert [capability for _, capability in told] == ["AVX2", "AVX512"]
    assert len({digest for digest, _ in told}) == 1


@pytest.mark.skipif(not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="x86 only")
def test_the_width_of_vectors_is_part_of_what_is_compiled() -> None:
    width = {"AVX2": 256, "AVX512": 512}[torch.backends.cpu.get_cpu_capability()]
    assert compiled.for_this_cpu() == {"cpp.simdlen": width}
    assert "cpp.simdlen" in torch._inductor.list_options()
