"""Every quantizer's forward and gradients against its formula, written again in NumPy and float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitwright.quantizers import Quantizer

Array = NDArray[np.float64]
Build = Callable[..., Quantizer]
TOLERANCE = 1e-6
SHAPE = (4, 48)


def data(seed: int, positive: bool = False) -> Tensor:
    x = torch.from_numpy(np.random.default_rng(seed).normal(size=SHAPE).astype(np.float32) * 1.7)
    return x.abs() if positive else x


@dataclass
class Got:
    """What the quantizer computes, in float64, with columns for what is kept per channel."""

    x: Array
    up: Array
    out: Array
    dx: Array
    grads: dict[str, Array]

    def per_scale(self, gradient: Array, like: Array) -> Array:
        return gradient.sum(axis=1) if like.size > 1 else gradient.sum().reshape(())


def run(quantizer: Quantizer, x: Tensor, seed: int = 9) -> Got:
    x = x.detach().clone().requires_grad_()
    up = torch.from_numpy(np.random.default_rng(seed).normal(size=SHAPE).astype(np.float32))
    quantizer.zero_grad()
    out = quantizer(x)
    out.backward(up)
    assert x.grad is not None
    grads = {name: p.grad.double().numpy() for name, p in quantizer.named_parameters() if p.grad is not None}
    return Got(*(t.detach().double().numpy() for t in (x, up, out, x.grad)), grads)


def column(value: Tensor) -> Array:
    kept = value.detach().double().numpy()
    return kept.reshape(-1, 1) if kept.ndim else kept


def close(ours: Array, theirs: Any) -> None:
    theirs = np.broadcast_to(theirs, ours.shape)
    size = max(1.0, float(np.abs(theirs).max()))
    assert np.abs(ours - theirs).max() <= TOLERANCE * size


def clear_of(*steps: Array) -> Array:
    """Where float32 can't fall on the other side of a jump than float64 does."""
    return np.logical_and.reduce([np.abs(s) > 1e-4 for s in steps])


def no_ties(quantizer: Quantizer, x: Tensor, scale: Array, zero: Any = 0.0) -> Tensor:
    """Move numbers that lie on a rounding boundary or an end: the formulas jump there."""
    steps = x.double().numpy() / scale
    ends = [quantizer.qmin - zero, quantizer.qmax - zero]
    near = ~clear_of(steps - np.floor(steps) - 0.5, *(steps - end for end in ends))
    near |= ~clear_of(steps - np.rint(steps))
    return torch.where(torch.from_numpy(near), x + torch.from_numpy(np.asarray(0.013 * scale, np.float32)), x)


FORMATS = ["int2/tensor/sym", "int4/tensor/sym", "int4/channel/sym", "int8/channel/sym", "int4/tensor/sym/adasign"]
AFFINE = ["uint4/tensor/asym", "int4/channel/asym", "uint8/tensor/asym"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("format", [*FORMATS, *AFFINE])
@pytest.mark.parametrize("name", ["lsq", "lsqplus"])
def test_lsq_and_lsqplus(build: Build, name: str, format: str, seed: int) -> None:
    x = data(seed, positive="adasign" in format)
    q = build(name, format, x)
    with torch.no_grad():
        q.scale.mul_(0.6)  # as training might: both ends clip
        if name == "lsqplus" and "asym" in format:
            q.zero_point.add_(0.3)  # a real number, used as the code next to it
    s, z = column(q.scale), np.rint(column(q.zero_point))
    n, p = q.qmin, q.qmax
    x = no_ties(q, x, s, z)
    got = run(q, x)
    steps = got.x / s + z
    below, above = steps < n, steps > p
    expected = (np.clip(np.rint(got.x / s) + z, n, p) - z) * s
    g = 1 / np.sqrt(got.x.size / s.size * p)
    ds = np.where(below, n - z, np.where(above, p - z, (expected - got.x) / s))
    close(got.out, expected)
    close(got.dx, np.where(below | above, 0, got.up))
    close(got.grads["scale"], got.per_scale(g * ds * got.up, s))
    if name == "lsqplus" and "asym" in format:
        close(got.grads["zero_point"], got.per_scale(g * np.where(below | above, -s, 0) * got.up, s))
        assert np.abs(got.grads["zero_point"]).max() > 0
    else:
        assert "zero_point" not in got.grads


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("format", [*FORMATS, *AFFINE])
def test_pact(build: Build, format: str, seed: int) -> None:
    x = data(seed, positive="adasign" in format)
    q = build("pact", format, x, alpha=1.1)
    high, low = column(q.high), column(q.low)
    assert high.max() <= 1.1 * (1 + (0.6 / 3 if "asym" in format else 1e-6))
    n, p = q.qmin, q.qmax
    if "asym" in format:
        s = (high - low) / (p - n)
        z = n - np.rint(low / s)
    else:
        s, z = high / p, np.zeros_like(high)
        low = -high if n < 0 else np.zeros_like(high)
    x = no_ties(q, x, s, z)
    got = run(q, x)
    clipped = np.clip(got.x, low, high)
    close(got.out, (np.clip(np.rint(clipped / s) + z, n, p) - z) * s)
    above, below = got.x > high, got.x < low
    assert above.any()
    close(got.dx, np.where(above | below, 0, got.up))
    dhigh, dlow = np.where(above, got.up, 0), np.where(below, got.up, 0)
    if "asym" in format:
        close(got.grads["high"], got.per_scale(dhigh, high))
        close(got.grads["low"], got.per_scale(dlow, low))
    else:
        close(got.grads["high"], got.per_scale(dhigh - (dlow if n < 0 else 0), high))


def test_pact_alpha_by_finite_differences(build: Build) -> None:
    """The clipping itself is smooth in α wherever no number lies on it."""
    x = data(0)
    q = build("pact", "int4/tensor/sym", x, alpha=1.5)
    got = run(q, x)
    alpha, h = float(q.high.detach()), 1e-5

    def clipped(a: float) -> float:
        return float((np.clip(got.x, -a, a) * got.up).sum())

    close(got.grads["high"], (clipped(alpha + h) - clipped(alpha - h)) / (2 * h))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("format", ["int4/tensor/sym", "int4/channel/sym", "uint4/channel/asym"])
def test_dorefa_weights(build: Build, format: str, seed: int) -> None:
    w = data(seed)
    q = build("dorefa", format, w, weight=True)
    got = run(q, w)
    t = np.tanh(got.x)
    largest = np.abs(t).max(axis=1, keepdims=True) if "channel" in format else np.abs(t).max()
    squeezed = t / largest
    p, n = q.qmax, q.qmin
    s, z = (2 / (p - n), n + np.rint((p - n) / 2)) if "asym" in format else (1 / p, 0)
    away = clear_of(squeezed / s - np.floor(squeezed / s) - 0.5)
    expected = (np.clip(np.rint(squeezed / s) + z, n, p) - z) * s
    close(got.out[away], expected[away])
    # d(tᵢ/m): the usual slope, and at the largest element that of the divisor
    slope = 1 - t**2
    dx = got.up * slope / largest
    for row in range(SHAPE[0]) if "channel" in format else [slice(None)]:
        place = np.unravel_index(np.abs(t[row]).argmax(), t[row].shape)
        m = np.abs(t[row]).max()
        dx[row][place] -= (got.up[row] * t[row]).sum() / m**2 * np.sign(t[row][place]) * slope[row][place]
    close(got.dx, dx)


@pytest.mark.parametrize(
    ("format", "positive"),
    [("int4/tensor/sym", False), ("int4/tensor/sym/adasign", True), ("uint4/tensor/asym", True)],
)
def test_dorefa_activations(build: Build, format: str, positive: bool) -> None:
    x = data(1, positive)
    q = build("dorefa", format, x)
    low = 0.0 if positive else -1.0
    s = 1 / q.qmax
    x = no_ties(q, x, np.float64(s))
    got = run(q, x)
    close(got.out, np.rint(np.clip(got.x, low, 1) / s) * s)
    close(got.dx, np.where((got.x < low) | (got.x > 1), 0, got.up))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("format", [*FORMATS, *AFFINE])
@pytest.mark.parametrize("alpha", [0.1, 0.4])
def test_dsq(build: Build, format: str, seed: int, alpha: float) -> None:
    x = data(seed, positive="adasign" in format)
    q = build("dsq", format, x * 0.7, alpha=alpha)
    s, z, n, p = column(q.scale), column(q.zero_point), q.qmin, q.qmax
    x = no_ties(q, x, s, z)
    got = run(q, x)
    k_s = 1 / (1 - alpha)
    k = np.log((k_s + 1) / (k_s - 1))
    # 8-bit steps in float32 have 1e-5 less places behind the point: start from float32's own quotient
    steps = (got.x.astype(np.float32) / s.astype(np.float32)).astype(np.float64) + z
    u = np.clip(steps, n, p)
    phi = np.floor(u) + 0.5 + 0.5 * k_s * np.tanh(k * (u - np.floor(u) - 0.5))
    slope = 0.5 * k_s * k * (1 - np.tanh(k * (u - np.floor(u) - 0.5)) ** 2)
    inside = (steps >= n) & (steps <= p)
    close(got.out, (np.rint(phi) - z) * s)
    close(got.dx, np.where(inside, slope * got.up, 0))
    assert len(np.unique(got.dx.round(6) / got.up.round(6))) > 20  # not a straight-through 0 or 1


def test_dsq_soft_function_by_finite_differences(build: Build) -> None:
    q: Any = build("dsq", "int4/tensor/sym", data(0))
    u = torch.linspace(-6.93, 6.89, 301, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(q.soft, (u,), eps=1e-6, atol=1e-6)
    whole = torch.arange(-7, 8, dtype=torch.float64)
    assert torch.allclose(q.soft(whole), whole)  # continuous: it meets every whole number
    assert torch.allclose(q.soft(whole - 1e-12), whole)


def test_dsq_really_runs_the_soft_function(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    q: Any = build("dsq", "int4/tensor/sym", data(0))
    monkeypatch.setattr(type(q), "soft", lambda self, steps: steps * 0 + 3.2)
    assert torch.equal(q(data(0)).unique(), 3 * q.scale.reshape(1))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("weight", [True, False])
def test_qil(build: Build, format: str, weight: bool, seed: int) -> None:
    x = data(seed, positive="adasign" in format)
    q = build("qil", format, x, weight=weight)
    with torch.no_grad():
        q.centre.mul_(0.9)
        q.half_width.mul_(0.7)  # prunes and clips
    centre, half = column(q.centre), column(q.half_width)
    p = q.qmax
    share = 0.5 * np.abs(x.double().numpy()) / half - 0.5 * centre / half + 0.5
    assert (share < 0).any()
    assert (share > 1).any()
    near = ~clear_of(share, share - 1, share * p - np.floor(share * p) - 0.5)
    x = torch.where(torch.from_numpy(near), x * 1.01, x)
    got = run(q, x)
    share = 0.5 * np.abs(got.x) / half - 0.5 * centre / half + 0.5
    t = np.clip(share, 0, 1) * np.sign(got.x)
    inside = (share > 0) & (share < 1)
    g = 1 / np.sqrt(got.x.size / centre.size * p)
    close(got.out, np.rint(t * p) / p)
    close(got.dx, np.where(inside, 0.5 / half * got.up, 0))
    sign = np.sign(got.x) * got.up * inside
    close(got.grads["centre"], got.per_scale(-g * 0.5 / half * sign, centre))
    close(got.grads["half_width"], got.per_scale(-g * 0.5 * (np.abs(got.x) - centre) / half**2 * sign, half))


UNSIGNED_4_BITS = sorted(
    (a + b) / 0.75 for a in (0, 2**-1, 2**-3, 2**-5) for b in (0, 2**-2, 2**-4, 2**-6)
)  # of the reference


def test_apot_levels() -> None:
    from bitwright.quantizers.apot import levels

    assert np.allclose(levels(4), UNSIGNED_4_BITS)
    assert levels(1) == [0, 1]
    assert [level * 0.625 for level in levels(3)] == [0, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 5 / 8]
    for bits in range(1, 9):
        assert len(levels(bits)) == 2**bits
        assert levels(bits)[-1] == 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize(
    "format", ["int4/tensor/sym", "int4/channel/sym", "int5/tensor/sym", "int4/tensor/sym/adasign"]
)
def test_apot(build: Build, format: str, weight: bool, seed: int) -> None:
    from bitwright.quantizers.apot import levels

    x = data(seed, positive="adasign" in format and not weight)
    q = build("apot", format, x, weight=weight)
    assert bool((q.scale == 3).all() if weight else (q.scale <= 6).all())
    with torch.no_grad():
        q.scale.mul_(0.5)
    got = run(q, x)
    axis = 1 if "channel" in format else None
    mean, std = (got.x.mean(axis, keepdims=True), got.x.std(axis, keepdims=True)) if weight else (0.0, 1.0)
    alpha = column(q.scale)
    ratio = (got.x - mean) / std / alpha
    signed = q.qmin < 0
    known = np.array(levels(int(format[3]) - signed))
    known = np.unique(np.concatenate([known, -known])) if signed else known
    share = np.clip(ratio, known[0], 1)
    distance = np.abs(share[..., None] - known)
    level = known[distance.argmin(-1)]
    nearest_two = np.sort(distance, axis=-1)[..., :2]
    away = nearest_two[..., 1] - nearest_two[..., 0] > 1e-5
    assert away.mean() > 0.98
    inside = (ratio >= known[0]) & (ratio <= 1)
    close(got.out[away], (level * alpha)[away])
    close(got.dx, np.where(inside, got.up / std, 0))
    if away.all():
        close(got.grads["scale"], got.per_scale(np.where(inside, level - ratio, level) * got.up, alpha))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("format", FORMATS)
def test_tqt(build: Build, format: str, seed: int) -> None:
    x = data(seed, positive="adasign" in format)
    q = build("tqt", format, x)
    with torch.no_grad():
        q.log2_threshold.sub_(1.0)  # clips
    log2_t = column(q.log2_threshold)
    n, p = q.qmin, q.qmax
    s = 2.0 ** np.ceil(log2_t) / (p + 1)
    x = no_ties(q, x, s)
    got = run(q, x)
    steps = got.x / s
    below, above = steps < n, steps > p
    close(got.out, np.clip(np.rint(steps), n, p) * s)
    close(got.dx, np.where(below | above, 0, got.up))
    dt = s * np.log(2) * np.where(below, n, np.where(above, p, np.rint(steps) - steps))
    close(got.grads["log2_threshold"], got.per_scale(dt * got.up, log2_t))


def test_tqt_threshold_by_finite_differences(build: Build) -> None:
    """Straight-through is exact where everything is clipped: x̂ = p·2^(log2 t)/(p+1), smooth in log2 t."""
    x = data(0).abs() + 10
    q = build("tqt", "int4/tensor/sym", data(0))
    with torch.no_grad():
        q.log2_threshold.fill_(1.0)
    got = run(q, x)
    h = 1e-6
    out = [q.qmax * 2 ** (1.0 + d) / (q.qmax + 1) * got.up.sum() for d in (h, -h)]
    close(got.grads["log2_threshold"], (out[0] - out[1]) / (2 * h))


def test_nnie_values_of_the_reference(build: Build) -> None:
    q = build("nnie", "int8/tensor/sym", torch.tensor([[-1.0, 1.0]]))
    out = q(torch.tensor([1.0, 0.5, -0.7, 1e-4, 2.0, 0.0, -1e-4]))
    assert torch.allclose(out, torch.tensor([1.0, 0.5, -0.70711, 0.0, 1.0, 0.0, 0.0]), atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("grain", ["tensor", "channel"])
def test_nnie(build: Build, bits: int, grain: str) -> None:
    x = data(2) * torch.logspace(-4, 0, SHAPE[1])  # down into the dead zone
    q = build("nnie", f"int{bits}/{grain}/sym", x)
    got = run(q, x)
    k, top = 2.0 ** (bits - 4), 2 ** (bits - 1) - 1
    z = np.rint(k * np.log2(column(q.scale))) - top
    negative = (got.x < 0).astype(float)
    exact = k * np.log2(np.abs(got.x)) - z
    level = 2 ** ((np.clip(np.rint(exact), negative, top) + z) / k)
    dead = np.abs(got.x) <= 2 ** ((z + negative) / k - 1)
    assert dead.any()
    away = clear_of(exact - np.floor(exact) - 0.5) & (np.abs(exact - negative + k) > 1e-4)
    close(got.out[away], np.where(dead, 0, np.sign(got.x) * level)[away])
    close(got.dx, got.up)


def test_fixed_is_plain() -> None:
    from bitwright.core.registry import QUANTIZERS

    assert QUANTIZERS.get("fixed") is QUANTIZERS.get("plain")
