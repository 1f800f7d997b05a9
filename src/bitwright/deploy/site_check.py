"""Site by site: the codes of the simulated model against those of an artefact on a real runtime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bitwright.core.modes import call_copied
from bitwright.deploy.agreement import MIN_SQNR, decibels, share_of
from bitwright.deploy.integrity import Damage
from bitwright.deploy.runtimes.base import Runtime
from bitwright.quantizers import Quantizer, in_mode, quantizers_of, tapped


@dataclass(frozen=True, kw_only=True)
class SiteCheck:
    """One site: codes of the runtime against codes of the simulation."""

    site: str
    stored: bool
    """A weight or a bias: its codes are read from the artefact, and have to be the model's own."""
    differing: float
    """Share of codes that differ."""
    largest: int
    """The largest difference of codes, in LSB."""
    sqnr_db: float
    quantization_share: float
    """Runtime's deviation relative to what quantization itself changes (simulated against float)."""
    grid: str | None
    """How the artefact's scale or zero point differs from the model's; None: it doesn't."""

    @property
    def damaged(self) -> bool:
        """The artefact has other numbers than the model; no rounding explains that."""
        return self.grid is not None or (self.stored and self.differing > 0)

    @property
    def diverges(self) -> bool:
        """More than rounding."""
        return self.damaged or (self.sqnr_db < MIN_SQNR and self.quantization_share > 1.0)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """How the codes inside were seen: a runtime shows outputs, so a copy of the artefact has more of them."""

    outputs: int
    """Outputs that the copy has beyond the artefact's."""
    undisturbed: bool
    """The copy's other outputs are those of the artefact, bit by bit: what was seen is what is deployed."""


@dataclass(frozen=True, kw_only=True)
class Sites:
    """All sites in the order of execution."""

    checks: tuple[SiteCheck, ...]
    unseen: tuple[str, ...]
    """Sites without codes of their own in the artefact: their tensor passes the same quantizer elsewhere."""
    probe: Probe


@dataclass
class _Seen:
    """What the simulated model has at one site."""

    codes: NDArray[Any]
    grid: dict[str, NDArray[Any]]
    zero: NDArray[Any]
    owner: str
    exact: NDArray[Any] | None = None  # the float model's numbers, in units of the scale


def check_sites(
    model: nn.Module, real: Runtime, artefact: Path, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sites:
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
        if f"{site}.value" in constants:  # a bias that is stored as the numbers that its codes stand for
            constants[name] = np.rint(constants[f"{site}.value"] / what.grid["scale"].astype(np.float64))
        if name in constants or name in results:
            checks.append(_compare(site, what, name, results, constants))
        else:
            unseen.append(site)
    return Sites(
        checks=tuple(checks),
        unseen=tuple(unseen),
        probe=Probe(
            outputs=len(probe.outputs) - len(real.outputs),
            undisturbed=all(np.array_equal(array, results[name]) for name, array in plain.items()),
        ),
    )


class StoredSites:
    """Compares what an artefact stores of each site with the model's own: codes of weights, scales, zero points."""

    def __init__(self, constants: dict[str, NDArray[Any]]) -> None:
        self.constants = dict(constants)
        self.found: dict[str, Damage] = {}
        self.seen_in_order: dict[str, None] = {}

    def look(self, site: str, quantizer: Quantizer, x: Tensor) -> None:
        """A tap: what comes to this site in the simulated model."""
        if site in self.seen_in_order:
            return
        self.seen_in_order[site] = None
        grid = quantizer.grid()
        numbers = {"scale": grid.scale.cpu().numpy(), "zero_point": grid.zero_point.cpu().numpy()}
        zero = quantizer.layout.spread(grid.zero_point, x).cpu().numpy()
        name = f"{site}.codes"
        if f"{site}.value" in self.constants:
            value = self.constants[f"{site}.value"]
            self.constants[name] = np.rint(value / numbers["scale"].astype(np.float64))
        stored = name in self.constants
        codes = quantizer.integers(x).cpu().numpy() if stored else np.zeros(())
        seen = _Seen(codes=codes, grid=numbers, zero=zero, owner=quantizer.site)
        differs = _grid_difference(seen, self.constants)
        if differs is not None:
            self.found.setdefault(site, Damage(site=site, what=differs))
        if stored:
            theirs = _turned_back(self.constants[name].astype(np.int64), codes)
            if not np.array_equal(theirs, codes):
                count = int((theirs != codes).sum()) if theirs.shape == codes.shape else codes.size
                self.found.setdefault(site, Damage(site=site, what=f"{count} of {codes.size} codes aren't the model's"))


def _simulate(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, _Seen]:
    seen: dict[str, _Seen] = {}

    def look(site: str, quantizer: Quantizer, x: Tensor) -> None:
        if site in seen:
            return
        grid = quantizer.grid()
        seen[site] = _Seen(
            codes=quantizer.integers(x).cpu().numpy(),
            grid={"scale": grid.scale.cpu().numpy(), "zero_point": grid.zero_point.cpu().numpy()},
            zero=quantizer.layout.spread(grid.zero_point, x).cpu().numpy(),
            owner=quantizer.site,
        )

    def look_exactly(site: str, quantizer: Quantizer, x: Tensor) -> None:
        if site in seen and seen[site].exact is None:
            scale = quantizer.layout.spread(quantizer.grid().scale, x).cpu().numpy()
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
    site: str, seen: _Seen, name: str, results: dict[str, NDArray[Any]], constants: dict[str, NDArray[Any]]
) -> SiteCheck:
    stored = name in constants
    found = (constants if stored else results)[name].astype(np.int64)
    if stored:
        found = _turned_back(found, seen.codes)
    if found.shape != seen.codes.shape:
        grid = f"codes have the shape {found.shape}, the model's {seen.codes.shape}"
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
    """Artefacts store matrices as their operators read them, often transposed: the turn that fits best."""
    if found.shape == codes.shape and np.array_equal(found, codes):
        return found
    if found.ndim == codes.ndim:
        turns = [found.transpose(axes) for axes in permutations(range(found.ndim))]
    elif found.size == codes.size:  # a stack of matrices, written as one
        every = list(permutations(range(codes.ndim)))
        turns = [found.reshape(codes.transpose(axes).shape).transpose(np.argsort(axes)) for axes in every]
    else:
        return found
    fitting = [turned for turned in turns if turned.shape == codes.shape]
    return min(fitting, key=lambda turned: int((turned != codes).sum()), default=found)


def _grid_difference(seen: _Seen, constants: dict[str, NDArray[Any]]) -> str | None:
    for name, ours in seen.grid.items():
        theirs = constants.get(f"{seen.owner}.{name}")
        if theirs is None:
            continue  # a bias has no zero point
        ours, stored = ours.astype(np.float64).ravel(), theirs.astype(np.float64).ravel()
        if ours.size != stored.size:
            return f"{stored.size} values of {name}, the model has {ours.size}"
        if not np.array_equal(np.sort(ours), np.sort(stored)):  # blocks of a transposed weight come in another order
            worst = int(np.abs(np.sort(ours) - np.sort(stored)).argmax())
            return f"{name} {np.sort(stored)[worst]:.9g}, the model's is {np.sort(ours)[worst]:.9g}"
    return None
