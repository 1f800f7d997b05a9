"""`check(model, artefact, batches)`: does the real runtime compute what the simulated model computes?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from bitwright.attach import in_mode
from bitwright.deploy.artefacts.store import QDQ, kind_of_artefact
from bitwright.deploy.runtime import Runtime, open_runtime
from bitwright.deploy.sites import MIN_SQNR, Probe, SiteCheck, check_sites, decibels, share_of
from bitwright.errors import ArtefactError, WorkloadError
from bitwright.graph.tree import as_call, tensors_in
from bitwright.modes import evaluating

# Codes may differ by one where a sum falls next to a rounding boundary, and such flips spread through a deep network.
# Arithmetic that really differs (saturation, another scale) is louder than the error that quantization makes anyway.
MAX_SHARE = 0.5  # of an output; a single site may drift up to that error itself


@dataclass(frozen=True, kw_only=True)
class OutputCheck:
    """One output of the model: runtime against simulation."""

    name: str
    sqnr_db: float
    max_error: float
    cosine: float
    top1_agreement: float | None
    quantization_share: float
    """Runtime's deviation relative to what quantization itself changes (simulated against float)."""

    @property
    def passed(self) -> bool:
        """Close to the simulation, absolutely or beside the error that quantization makes anyway."""
        return self.sqnr_db >= MIN_SQNR or self.quantization_share <= MAX_SHARE


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result: per output and, on demand, per site."""

    runtime: str
    samples: int
    outputs: tuple[OutputCheck, ...]
    sites: tuple[SiteCheck, ...] = ()
    unseen: tuple[str, ...] = ()
    """Sites without codes of their own in the artefact: their tensor passes the same quantizer elsewhere."""
    probe: Probe | None = None
    """How the sites were seen."""

    @property
    def passed(self) -> bool:
        """All outputs agree, and no site that was looked at has other numbers in the artefact than in the model."""
        return all(output.passed for output in self.outputs) and not any(site.damaged for site in self.sites)

    @property
    def first_divergence(self) -> str | None:
        """The first site, in the order of execution, whose codes differ by more than rounding."""
        return next((site.site for site in self.sites if site.diverges), None)


@dataclass
class _Sums:
    signal: float = 0.0
    error: float = 0.0
    quantization: float = 0.0
    dot: float = 0.0
    other: float = 0.0
    largest: float = 0.0
    agree: int = 0
    rows: int = 0

    def add(self, simulated: NDArray[Any], real: NDArray[Any], exact: NDArray[Any]) -> None:
        s, r, f = (a.astype(np.float64) for a in (simulated, real, exact))
        self.signal += float((s * s).sum())
        self.other += float((r * r).sum())
        self.dot += float((s * r).sum())
        self.error += float(((r - s) ** 2).sum())
        self.quantization += float(((s - f) ** 2).sum())
        self.largest = max(self.largest, float(np.abs(r - s).max(initial=0.0)))
        if s.ndim == 2 and s.shape[1] > 1:
            self.agree += int((s.argmax(1) == r.argmax(1)).sum())
            self.rows += s.shape[0]

    def result(self, name: str) -> OutputCheck:
        return OutputCheck(
            name=name,
            sqnr_db=decibels(self.signal, self.error),
            max_error=self.largest,
            cosine=self.dot / max((self.signal * self.other) ** 0.5, 1e-300),
            top1_agreement=self.agree / self.rows if self.rows else None,
            quantization_share=share_of(self.error, self.quantization),
        )


def check(
    model: nn.Module,
    artefact: str | Path,
    batches: Iterable[Any],
    *,
    runtime: str = "onnxruntime",
    per_site: bool = False,
    threads: int | None = None,
) -> Check:
    """Run `batches` through the prepared model and through the artefact on the real runtime, and compare.

    With `per_site`, the first batch is also compared at every site, in the order of execution.
    """
    artefact = Path(artefact)
    real = open_runtime(runtime, artefact, threads=threads)
    if real.suffix == ".onnx" and (kind := kind_of_artefact(artefact)) != QDQ:
        raise ArtefactError(
            "this artefact is a float model; its grids lie beside it, where no runtime here looks",
            where=str(artefact),
            value=kind,
            fix='export with artefact="qdq" (--artefact qdq) to check the same numbers here',
        )
    sums: dict[str, _Sums] = {}
    samples = 0
    first: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    with evaluating(model):
        for batch in batches:
            args, kwargs = as_call(batch)
            first = first or (args, kwargs)
            samples += next((int(t.shape[0]) if t.dim() else 1 for _, t in tensors_in((args, kwargs))), 1)
            _compare(model, real, args, kwargs, sums)
        if first is None:
            raise WorkloadError("there is no batch to check with", fix="give at least one batch")
        sites = check_sites(model, real, artefact, *first) if per_site else None
    return Check(
        runtime=runtime,
        samples=samples,
        outputs=tuple(sum_.result(name) for name, sum_ in sums.items()),
        sites=() if sites is None else sites.checks,
        unseen=() if sites is None else sites.unseen,
        probe=None if sites is None else sites.probe,
    )


def _compare(
    model: nn.Module, real: Runtime, args: tuple[Any, ...], kwargs: dict[str, Any], sums: dict[str, _Sums]
) -> None:
    with torch.no_grad():
        with in_mode(model, "quantize"):
            simulated = list(tensors_in(model(*args, **kwargs)))
        with in_mode(model, "float"):
            exact = [tensor for _, tensor in tensors_in(model(*args, **kwargs))]
    results = real.run(real.feed(*args, **kwargs))
    if len(results) != len(simulated):
        raise ArtefactError(
            f"the artefact has {len(results)} outputs, the model {len(simulated)}",
            fix="export the artefact from this model",
        )
    for (path, tensor), array, truth in zip(simulated, results, exact, strict=True):
        if tuple(array.shape) != tuple(tensor.shape):
            raise ArtefactError(
                "the artefact's output has another shape than the model's",
                where=path or "output",
                value=f"{tuple(array.shape)} against {tuple(tensor.shape)}",
                fix="export the artefact from this model",
            )
        sums.setdefault(path or "output", _Sums()).add(tensor.cpu().numpy(), array, truth.cpu().numpy())
