"""How far the runtime's numbers are from the simulation: of outputs, and of each site in the order of execution.

Float kernels add in different orders, so a value next to a rounding boundary may get another code. In some models such
a difference grows from layer to layer, until the outputs differ although every operator is correct. `GrowthProbe`
distinguishes this from wrong arithmetic: if the runtime's codes replace those of the simulation at each site,
differences can't accumulate, and only wrong operators still differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations
from math import inf, log10
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bitwright.core.errors import ArtefactError, Problem
from bitwright.core.formatting import decibels as as_decibels
from bitwright.core.formatting import percent
from bitwright.core.tensor_tree import as_array, call_copied, tensors_in
from bitwright.deployment.onnx_files import Damage
from bitwright.deployment.runtimes.base import Runtime
from bitwright.quantizers import Quantizer, in_mode, quantizers_of, tapped

MIN_SQNR = 30.0
# Codes may differ by one if a sum is near a rounding boundary, and such flips propagate through a deep network. Real
# differences in arithmetic (saturation, another scale) cause a larger error than quantization itself.
MAX_ROUNDING = 1.5  # limit relative to the effect of the runtime's own rounding, which is as large as it is random
MAX_SHARE = 0.5  # limit for an output, relative to the quantization error; a single site may differ by all of it


def decibels(signal: float, error: float) -> float:
    """The ratio of two energies in dB."""
    return inf if error == 0 else -inf if error == inf else 10 * log10(max(signal, 1e-300) / error)


def share_of(error: float, quantization: float) -> float:
    """The ratio of two errors, as amplitudes."""
    if error == 0:
        return 0.0
    return (error / quantization) ** 0.5 if quantization else inf


@dataclass(frozen=True, kw_only=True)
class OutputCheck:
    """The agreement of one output between runtime and simulation."""

    name: str
    sqnr_db: float
    max_error: float
    cosine: float
    top1_agreement: float | None
    quantization_share: float
    """The runtime's deviation relative to the quantization error (simulation against float)."""
    rounding_share: float | None = None
    """The runtime's deviation relative to the effect of its own rounding. None: it rounds only as quantizers do."""

    @property
    def passed(self) -> bool:
        """Whether the deviation is small: absolutely, or relative to quantization or to the runtime's rounding."""
        explained = self.rounding_share is not None and self.rounding_share <= MAX_ROUNDING
        return explained or self.sqnr_db >= MIN_SQNR or self.quantization_share <= MAX_SHARE


@dataclass
class AgreementSums:
    """Sums of one output over all batches."""

    signal: float = 0.0
    error: float = 0.0
    quantization: float = 0.0
    dot: float = 0.0
    other: float = 0.0
    exact: float = 0.0
    largest: float = 0.0
    agree: int = 0
    agree_with_float: int = 0
    rows: int = 0
    rounding: float | None = None

    def add(
        self,
        simulated: NDArray[Any],
        real: NDArray[Any],
        exact: NDArray[Any],
        rounded: NDArray[Any] | None = None,
    ) -> None:
        """Add the outputs of one batch. Equal infinities count as agreement.

        `rounded` are those of the simulation with the runtime's own rounding.
        """
        if rounded is not None:
            difference = _difference(rounded.astype(np.float64), simulated.astype(np.float64))
            self.rounding = (self.rounding or 0.0) + float((difference**2).sum())
        s, r, f = (a.astype(np.float64) for a in (simulated, real, exact))
        if s.ndim == 2 and s.shape[1] > 1:
            self.agree += int((s.argmax(1) == r.argmax(1)).sum())
            self.agree_with_float += int((s.argmax(1) == f.argmax(1)).sum())
            self.rows += s.shape[0]
        with np.errstate(over="ignore", invalid="ignore"):
            self._add(s, r, f)

    def _add(self, s: NDArray[np.float64], r: NDArray[np.float64], f: NDArray[np.float64]) -> None:
        error, quantization = _difference(r, s), _difference(s, f)
        s, r, f = (np.where(np.isfinite(a), a, 0.0) for a in (s, r, f))
        self.signal += float((s * s).sum())
        self.exact += float((f * f).sum())
        self.other += float((r * r).sum())
        self.dot += float((s * r).sum())
        self.error += float((error**2).sum())
        self.quantization += float((quantization**2).sum())
        self.largest = max(self.largest, float(np.abs(error).max(initial=0.0)))

    def result(self, name: str) -> OutputCheck:
        """Convert the sums to metrics."""
        return OutputCheck(
            name=name,
            sqnr_db=decibels(self.signal, self.error),
            max_error=self.largest,
            cosine=self.dot / max((self.signal * self.other) ** 0.5, 1e-300),
            top1_agreement=self.agree / self.rows if self.rows else None,
            quantization_share=share_of(self.error, self.quantization),
            rounding_share=None if self.rounding is None else share_of(self.error, self.rounding),
        )


def agreement_of(
    name: str,
    simulated: NDArray[Any],
    real: NDArray[Any],
    exact: NDArray[Any],
    rounded: NDArray[Any] | None = None,
) -> OutputCheck:
    """The agreement of one output for one batch."""
    sums = AgreementSums()
    sums.add(simulated, real, exact, rounded)
    return sums.result(name)


def _difference(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """`one - other`, where equal infinities differ by 0."""
    return np.where(one == other, 0.0, one - other)


def refuse_nan(path: str, *, simulated: NDArray[Any], real: NDArray[Any], exact: NDArray[Any], runtime: str) -> None:
    """Raise an error if an output contains NaN, which can't agree; it names the first model that computed NaN."""
    has_nan = {
        name: bool(np.isnan(array).any())
        for name, array in (("float", exact), ("simulated", simulated), (runtime, real))
        if np.issubdtype(array.dtype, np.floating)
    }
    if not any(has_nan.values()):
        return
    if has_nan.get("float"):
        what, fix = "the float model returns NaN for these inputs", "fix the model or the inputs"
    elif has_nan.get("simulated"):
        what, fix = "the quantized model returns NaN where the float model doesn't", "keep the sites before it in float"
    else:
        what, fix = (
            f"{runtime} returns NaN where the simulated model doesn't",
            "check with per_site=True to find the site",
        )
    raise ArtefactError(what, where=path or "output", fix=fix, code="nan-output")


@dataclass(frozen=True, kw_only=True)
class SiteCheck:
    """The comparison of one site's codes between runtime and simulation."""

    site: str
    stored: bool
    """Whether it is a weight or bias, with codes read from the artefact that must be equal."""
    differing: float
    """The share of differing codes."""
    largest: int
    """The largest difference of codes, in LSB."""
    sqnr_db: float
    quantization_share: float
    """The runtime's deviation relative to the quantization error (simulation against float)."""
    grid: str | None
    """How the artefact's scale or zero point differs from the model's, or None."""

    @property
    def damaged(self) -> bool:
        """Whether the artefact's values differ from the model's by more than rounding could explain."""
        return self.grid is not None or (self.stored and self.differing > 0)

    @property
    def diverges(self) -> bool:
        """Whether the difference is larger than rounding could explain."""
        return self.damaged or (self.sqnr_db < MIN_SQNR and self.quantization_share > 1.0)


@dataclass(frozen=True, kw_only=True)
class ProbeInfo:
    """How internal codes were obtained: by a copy of the artefact with additional outputs."""

    outputs: int
    """The number of additional outputs of the copy."""
    outputs_identical: bool
    """Whether the other outputs of the copy are bit-identical to those of the artefact."""


@dataclass(frozen=True, kw_only=True)
class SiteComparison:
    """All sites in execution order."""

    checks: tuple[SiteCheck, ...]
    unseen: tuple[str, ...]
    """Sites without their own codes in the artefact, because their tensor is quantized elsewhere."""
    probe: ProbeInfo


@dataclass
class _SimulatedSite:
    """The values of the simulated model at one site."""

    codes: NDArray[Any]
    grid: dict[str, NDArray[Any]]
    zero: NDArray[Any]
    owner: str
    exact: NDArray[Any] | None = None  # the float model's values, in units of the scale


def check_sites(
    model: nn.Module, real: Runtime, artefact: Path, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> SiteComparison:
    """Compare every site of the prepared model for one call."""
    seen = _simulate(model, args, kwargs)
    constants = type(real).stored(artefact)
    probe = type(real).probing(
        artefact, [site for site in seen if not {f"{site}.codes", f"{site}.value"} & set(constants)]
    )
    feed = real.feed(*args, **kwargs)
    results = dict(zip(probe.outputs, probe.run(feed), strict=True))
    plain = dict(zip(real.outputs, real.run(feed), strict=True))
    checks, unseen = [], []
    for site, what in seen.items():
        name = f"{site}.codes"
        if f"{site}.value" in constants:  # a bias stored as float values
            constants[name] = np.rint(constants[f"{site}.value"] / what.grid["scale"].astype(np.float64))
        if name in constants or name in results:
            checks.append(_compare(site, what, name, results, constants))
        else:
            unseen.append(site)
    return SiteComparison(
        checks=tuple(checks),
        unseen=tuple(unseen),
        probe=ProbeInfo(
            outputs=len(probe.outputs) - len(real.outputs),
            outputs_identical=all(np.array_equal(array, results[name]) for name, array in plain.items()),
        ),
    )


class StoredSites:
    """Compares stored codes of weights, scales and zero points of an artefact with the model's."""

    def __init__(self, constants: dict[str, NDArray[Any]]) -> None:
        self.constants = dict(constants)
        self.found: dict[str, Damage] = {}
        self.seen_in_order: dict[str, None] = {}

    def look(self, site: str, quantizer: Quantizer, x: Tensor) -> None:
        """A tap function that receives the input of each site in the simulated model."""
        if site in self.seen_in_order:
            return
        self.seen_in_order[site] = None
        grid = quantizer.deployed_grid(x)
        numbers = {"scale": grid.scale.cpu().numpy(), "zero_point": grid.zero_point.cpu().numpy()}
        zero = quantizer.layout.spread(grid.zero_point, x).cpu().numpy()
        name = f"{site}.codes"
        if f"{site}.value" in self.constants:
            value = self.constants[f"{site}.value"]
            self.constants[name] = np.rint(value / numbers["scale"].astype(np.float64))
        stored = name in self.constants
        codes = quantizer.integers(x).cpu().numpy() if stored else np.zeros(())
        seen = _SimulatedSite(codes=codes, grid=numbers, zero=zero, owner=quantizer.site)
        differs = _grid_difference(seen, self.constants)
        if differs is not None:
            self.found.setdefault(site, Damage(site=site, what=differs))
        if stored:
            theirs = _turned_back(self.constants[name].astype(np.int64), codes)
            if not np.array_equal(theirs, codes):
                count = int((theirs != codes).sum()) if theirs.shape == codes.shape else codes.size
                self.found.setdefault(
                    site, Damage(site=site, what=f"{count} of {codes.size} codes differ from the model")
                )


def _simulate(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, _SimulatedSite]:
    seen: dict[str, _SimulatedSite] = {}

    def look(site: str, quantizer: Quantizer, x: Tensor) -> None:
        if site in seen:
            return
        grid = quantizer.deployed_grid(x)
        seen[site] = _SimulatedSite(
            codes=quantizer.integers(x).cpu().numpy(),
            grid={"scale": grid.scale.cpu().numpy(), "zero_point": grid.zero_point.cpu().numpy()},
            zero=quantizer.layout.spread(grid.zero_point, x).cpu().numpy(),
            owner=quantizer.site,
        )

    def look_exactly(site: str, quantizer: Quantizer, x: Tensor) -> None:
        if site in seen and seen[site].exact is None:
            scale = quantizer.layout.spread(quantizer.deployed_grid(x).scale, x).cpu().numpy()
            seen[site].exact = x.detach().float().cpu().numpy() / scale + seen[site].zero

    _walk(model, look, args, kwargs, enabled=True)
    _walk(model, look_exactly, args, kwargs, enabled=False)
    return seen


def _walk(
    model: nn.Module,
    look: Callable[[str, Quantizer, Tensor], None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    enabled: bool,
) -> None:
    with tapped(model, look), torch.no_grad(), in_mode(model, "quantize"):
        for quantizer in quantizers_of(model).values():
            quantizer.enabled = enabled
        call_copied(model, args, kwargs)


def _compare(
    site: str, seen: _SimulatedSite, name: str, results: dict[str, NDArray[Any]], constants: dict[str, NDArray[Any]]
) -> SiteCheck:
    stored = name in constants
    found = (constants if stored else results)[name].astype(np.int64)
    if stored:
        found = _turned_back(found, seen.codes)
    if found.shape != seen.codes.shape:
        grid = f"codes have the shape {found.shape}, but the model's have {seen.codes.shape}"
        return SiteCheck(
            site=site, stored=stored, differing=1.0, largest=0, sqnr_db=-inf, quantization_share=inf, grid=grid
        )
    difference = np.abs(found - seen.codes)
    error = float((difference.astype(np.float64) ** 2).sum())
    quantization = 0.0 if seen.exact is None else float(((seen.codes - seen.exact) ** 2).sum())
    return SiteCheck(
        site=site,
        stored=stored,
        differing=float((difference > 0).mean()),
        largest=int(difference.max(initial=0)),
        sqnr_db=decibels(float(((seen.codes - seen.zero).astype(np.float64) ** 2).sum()), error),
        quantization_share=share_of(error, quantization),
        grid=_grid_difference(seen, constants),
    )


def _turned_back(found: NDArray[Any], codes: NDArray[Any]) -> NDArray[Any]:
    """Undo the transposition of a stored matrix. The permutation with the best match is used."""
    if found.shape == codes.shape and np.array_equal(found, codes):
        return found
    if found.ndim == codes.ndim:
        turns = [found.transpose(axes) for axes in permutations(range(found.ndim))]
    elif found.size == codes.size:  # a stack of matrices, stored as one
        every = list(permutations(range(codes.ndim)))
        turns = [found.reshape(codes.transpose(axes).shape).transpose(np.argsort(axes)) for axes in every]
    else:
        return found
    fitting = [turned for turned in turns if turned.shape == codes.shape]
    return min(fitting, key=lambda turned: int((turned != codes).sum()), default=found)


def _grid_difference(seen: _SimulatedSite, constants: dict[str, NDArray[Any]]) -> str | None:
    for name, ours in seen.grid.items():
        theirs = constants.get(f"{seen.owner}.{name}")
        if theirs is None:
            continue  # a bias has no zero point
        ours, stored = ours.astype(np.float64).ravel(), theirs.astype(np.float64).ravel()
        if ours.size != stored.size:
            return f"{stored.size} values of {name}, but the model has {ours.size}"
        if not np.array_equal(np.sort(ours), np.sort(stored)):  # blocks of a transposed weight have another order
            worst = int(np.abs(np.sort(ours) - np.sort(stored)).argmax())
            return f"{name} is {np.sort(stored)[worst]:.9g}, but the model's is {np.sort(ours)[worst]:.9g}"
    return None


# A runtime's code is correct if it is the rounded value of the simulation, up to the float error of the value: 0.01 LSB
# and the error of float32 sums, relative to the range. Codes of 8 bits have a tolerance of 0.011 LSB.
_TOLERANCE, _SUM_ERROR = 0.01, 4e-6
_MIN_CORRECT = 0.999  # the share of correct codes; the others may differ by 1


@dataclass(frozen=True, kw_only=True)
class RoundingGrowth:
    """The result of a run of the simulation with the runtime's codes."""

    wrong: str | None
    """The first site that differs although all earlier sites have the runtime's codes."""
    sqnr_db: float
    """The lowest agreement of an output in that run."""
    explains: bool
    """Whether all sites and outputs agree in that run, so that only rounding differs."""
    begins: str | None
    """The first site whose codes differ without the runtime's codes."""
    begins_share: float
    """The share of different codes at that site."""
    largest: str | None
    """The site with the largest relative difference without the runtime's codes."""
    largest_db: float
    """The agreement at that site."""

    def warning(self) -> Problem:
        """The warning of a check that passed because only rounding differs."""
        growth = f"they begin at {self.begins} ({percent(self.begins_share)} of the codes differ)"
        peak = f"and are largest at {self.largest} ({as_decibels(self.largest_db)})"
        return Problem(
            what=f"rounding differences grow in this model: {growth} {peak}. With the same codes at each site, "
            f"runtime and simulation agree to {as_decibels(self.sqnr_db)}",
            where=self.begins,
            fix="compare the accuracy on the runtime; outputs of single samples depend on the order of float sums. "
            "More bits, or float, between these sites reduce the differences",
            code="rounding-grows",
        )


class GrowthProbe:
    """Runs batches that miss parity again with the codes of the runtime."""

    def __init__(self, model: nn.Module, real: Runtime, artefact: Path) -> None:
        self.model, self.real, self.artefact = model, real, artefact
        self.result: RoundingGrowth | None = None
        self._probe: Runtime | None = None
        self._hidden = False

    def examine(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, real: list[NDArray[Any]], exact: list[NDArray[Any]]
    ) -> None:
        """Examine one batch with the outputs of the runtime and the float model. One wrong batch decides the result.

        There is no result if the runtime doesn't expose its sites, or if its results change when it does.
        """
        if self._hidden or (self.result is not None and not self.result.explains):
            return
        try:
            codes, outputs = self._run(args, kwargs)
        except ArtefactError:
            self._hidden, self.result = True, None
            return
        if not all(np.array_equal(seen, plain) for seen, plain in zip(outputs, real, strict=True)):
            self._hidden, self.result = True, None
            return
        free, forced = _Comparison(codes, force=False), _Comparison(codes, force=True)
        free.run(self.model, args, kwargs)
        simulated = forced.run(self.model, args, kwargs)
        results = [
            agreement_of(path, as_array(ours), theirs, truth)
            for (path, ours), theirs, truth in zip(simulated, outputs, exact, strict=True)
        ]
        wrong = next((site for site, correct in forced.correct.items() if not correct), None)
        peak = min(free.sqnr, key=lambda site: free.sqnr[site], default=None)
        begins = next((site for site, share in free.differing.items() if share), None)
        found = RoundingGrowth(
            wrong=wrong,
            sqnr_db=min((one.sqnr_db for one in results), default=inf),
            explains=wrong is None and begins is not None and all(one.passed for one in results),
            begins=begins,
            begins_share=0.0 if begins is None else free.differing[begins],
            largest=peak,
            largest_db=inf if peak is None else free.sqnr[peak],
        )
        if self.result is None or not found.explains or found.largest_db < self.result.largest_db:
            self.result = found

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, NDArray[Any]], list[NDArray[Any]]]:
        """The codes of the runtime by site, and its outputs."""
        if self._probe is None:
            self._probe = type(self.real).probing(self.artefact, _sites_of(self.model, args, kwargs))
        feed = self.real.feed(*args, **kwargs)
        seen = dict(zip(self._probe.outputs, self._probe.run(feed), strict=True))
        outputs = [seen.pop(name) for name in self.real.outputs]
        return {name.removesuffix(".codes"): array for name, array in seen.items()}, outputs


def _sites_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    seen: dict[str, None] = {}
    with tapped(model, lambda site, quantizer, x: seen.setdefault(site)), torch.no_grad(), in_mode(model, "quantize"):
        call_copied(model, args, kwargs)
    return list(seen)


class _Comparison:
    """Compares the codes of all sites in one run; with `force`, the runtime's codes replace the simulation's."""

    def __init__(self, codes: dict[str, NDArray[Any]], *, force: bool) -> None:
        self.codes, self.force = codes, force
        self.differing: dict[str, float] = {}
        self.sqnr: dict[str, float] = {}
        self.correct: dict[str, bool] = {}
        self._next: Tensor | None = None  # the value of the runtime for the quantizer that was tapped last
        self._known: dict[str, list[tuple[Tensor, Tensor]]] = {}  # quantizer → inputs and the runtime's values

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Tensor]]:
        with tapped(model, self._look), torch.no_grad(), in_mode(model, "quantize"), self._forced(model):
            return list(tensors_in(call_copied(model, args, kwargs)))

    @contextmanager
    def _forced(self, model: nn.Module) -> Iterator[None]:
        quantizers = list(quantizers_of(model).values()) if self.force else []
        for quantizer in quantizers:
            quantizer.stand_in = self._substitute(quantizer)
        try:
            yield
        finally:
            for quantizer in quantizers:
                quantizer.stand_in = None

    def _substitute(self, quantizer: Quantizer) -> Callable[[Tensor], Tensor]:
        def substitute(x: Tensor) -> Tensor:
            return quantizer.quantize(x) if self._next is None else self._next

        return substitute

    def _look(self, site: str, quantizer: Quantizer, x: Tensor) -> None:
        self._next = None
        if site in self.codes and site not in self.correct:
            self._compare(site, quantizer, x.detach().to(torch.float32))
        elif site not in self.codes:  # the artefact quantizes this tensor once, at another site
            for known, value in self._known.get(quantizer.site, []):
                if known.shape == x.shape and torch.equal(known, x.detach().to(torch.float32)):
                    self._next = value

    def _compare(self, site: str, quantizer: Quantizer, x: Tensor) -> None:
        theirs = torch.from_numpy(self.codes[site].astype(np.int32)).to(x.device)
        if theirs.shape != x.shape:
            self.differing[site], self.sqnr[site], self.correct[site] = 1.0, -inf, False
            return
        grid = quantizer.deployed_grid(x)
        scale, zero_point = (quantizer.layout.spread(one, x) for one in (grid.scale, grid.zero_point))
        ours = quantizer.integers(x)
        difference = (theirs - ours).abs()
        self.differing[site] = float((difference > 0).double().mean()) if x.numel() else 0.0
        error = float(difference.double().square().sum())
        self.sqnr[site] = decibels(float((ours - zero_point).double().square().sum()), error)
        exact = torch.clamp(quantizer.transform(x) / scale + zero_point, grid.qmin, grid.qmax)
        tolerance = 0.5 + _TOLERANCE + _SUM_ERROR * (grid.qmax - grid.qmin)
        wrong = (difference > 0) & ((theirs - exact).abs() > tolerance)
        within_one = int(difference.max()) <= 1 if x.numel() else True
        self.correct[site] = within_one and int(wrong.sum()) <= (1 - _MIN_CORRECT) * x.numel()
        if self.force:
            self._next = (theirs - zero_point) * scale
            self._known.setdefault(quantizer.site, []).append((x, self._next))
