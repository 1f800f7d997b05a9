"""Distinguish growing rounding differences from wrong arithmetic: simulate with the runtime's codes at every site.

Float kernels add in different orders, so a value next to a rounding boundary may get another code. In some models such
a difference grows from layer to layer, until the outputs differ although every operator is correct. If the runtime's
codes replace those of the simulation at each site, differences can't accumulate, and only wrong operators still differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
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
from bitwright.deployment.parity import agreement_of, decibels
from bitwright.deployment.runtimes.base import Runtime
from bitwright.quantizers import Quantizer, in_mode, quantizers_of, tapped

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
