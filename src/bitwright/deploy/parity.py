"""`check(model, artefact, batches)`: does the real runtime compute what the simulated model computes?"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, log10
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bitwright.attach import Quantizer, in_mode, quantizers_of, tapped
from bitwright.deploy.artefacts.store import QDQ, kind_of_artefact
from bitwright.deploy.runtime import Runtime, open_runtime
from bitwright.errors import ArtefactError, WorkloadError
from bitwright.graph.tree import as_call, tensors_in
from bitwright.modes import evaluating

MIN_SQNR = 30.0
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
class SiteCheck:
    """One site: codes of the runtime against codes of the simulation."""

    site: str
    sqnr_db: float
    mean_difference: float
    share_off: float
    """Share of codes that differ by more than one."""
    quantization_share: float
    """As for outputs."""

    @property
    def diverges(self) -> bool:
        """More than rounding."""
        return self.sqnr_db < MIN_SQNR and self.quantization_share > 1.0


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result: per output and, on demand, per site."""

    runtime: str
    samples: int
    outputs: tuple[OutputCheck, ...]
    sites: tuple[SiteCheck, ...] = ()

    @property
    def passed(self) -> bool:
        """All outputs agree."""
        return all(output.passed for output in self.outputs)

    @property
    def first_divergence(self) -> str | None:
        """The first site, in the order of execution, whose codes differ by more than rounding."""
        return next((site.site for site in self.sites if site.diverges), None)


def _db(signal: float, error: float) -> float:
    return inf if error == 0 else 10 * log10(max(signal, 1e-300) / error)


def _share(error: float, quantization: float) -> float:
    if error == 0:
        return 0.0
    return (error / quantization) ** 0.5 if quantization else inf


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
            sqnr_db=_db(self.signal, self.error),
            max_error=self.largest,
            cosine=self.dot / max((self.signal * self.other) ** 0.5, 1e-300),
            top1_agreement=self.agree / self.rows if self.rows else None,
            quantization_share=_share(self.error, self.quantization),
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
    """Run `batches` through the prepared model and through the artefact on the real runtime, and compare."""
    artefact = Path(artefact)
    real = open_runtime(runtime, artefact, threads=threads)
    if (kind := kind_of_artefact(artefact)) != QDQ:
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
        sites = _check_sites(model, artefact, runtime, first) if per_site else ()
    return Check(
        runtime=runtime,
        samples=samples,
        outputs=tuple(sum_.result(name) for name, sum_ in sums.items()),
        sites=sites,
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


def _check_sites(
    model: nn.Module, artefact: Path, runtime: str, call: tuple[tuple[Any, ...], dict[str, Any]]
) -> tuple[SiteCheck, ...]:
    args, kwargs = call
    simulated: dict[str, NDArray[Any]] = {}
    exact: dict[str, NDArray[Any]] = {}  # float values in units of the site's scale
    zeros: dict[str, NDArray[Any]] = {}

    def look(site: str, quantizer: Quantizer, x: Tensor) -> None:
        name = f"{site}.codes"
        if quantizer.weight or name in (simulated if quantizer.enabled else exact):
            return
        grid = quantizer.grid()
        scale, zero = (quantizer.layout.spread(part, x).cpu().numpy() for part in (grid.scale, grid.zero_point))
        zeros[name] = zero
        if quantizer.enabled:
            simulated[name] = quantizer.integers(x).cpu().numpy()
        else:
            exact[name] = x.detach().float().cpu().numpy() / scale + zero

    with tapped(model, look), torch.no_grad():
        with in_mode(model, "quantize"):
            model(*args, **kwargs)
        with in_mode(model, "quantize"):
            for quantizer in quantizers_of(model).values():
                quantizer.enabled = False
            model(*args, **kwargs)
    with tempfile.TemporaryDirectory() as folder:
        opened = Path(folder) / "opened.onnx"
        names = _expose_codes(artefact, opened, set(simulated))
        real = open_runtime(runtime, opened)
        results = dict(zip(real.outputs, real.run(real.feed(*args, **kwargs)), strict=True))
    checks = []
    for name, codes in simulated.items():
        if name in names and name in results:
            difference = np.abs(results[name].astype(np.int64) - codes)
            error = float((difference.astype(np.float64) ** 2).sum())
            quantization = float(((codes - exact[name]) ** 2).sum()) if name in exact else 0.0
            checks.append(
                SiteCheck(
                    site=name.removesuffix(".codes"),
                    sqnr_db=_db(float(((codes - zeros[name]) ** 2).sum()), error),
                    mean_difference=float(difference.mean()),
                    share_off=float((difference > 1).mean()),
                    quantization_share=_share(error, quantization),
                )
            )
    return tuple(checks)


def _expose_codes(artefact: Path, opened: Path, wanted: set[str]) -> set[str]:
    """A copy of the artefact that also returns the codes of its sites: outputs of Q, so fusions stay as they are."""
    model = ir.load(artefact)
    names: set[str] = set()
    for node in model.graph:
        value = node.outputs[0]
        if node.op_type == "QuantizeLinear" and value.name in wanted:
            zero_point = node.inputs[2]
            assert zero_point is not None and zero_point.dtype is not None  # we wrote it
            value.dtype = zero_point.dtype
            model.graph.outputs.append(value)
            names.add(value.name)
    ir.save(model, opened)
    return names
