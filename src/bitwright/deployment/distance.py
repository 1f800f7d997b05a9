"""The distance of a quantized model from its float model, the sites with the largest errors, and unsuitable ranges.

`check` answers another question: a runtime may compute exactly what the simulation computes although both have lost the
model's accuracy. A few samples are enough to measure the distance, so `quantize` always does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bitwright.core.errors import Problem
from bitwright.core.tensor_tree import as_array, as_call, batch_size, eval_mode, map_tensors, slice_batch, tensors_in
from bitwright.deployment.parity import AgreementSums, decibels
from bitwright.quantizers import Attachment, Quantizer, attachment_of, in_mode, tapped

FAR_DB = 10.0  # below, the error is a third of the output's amplitude; typical INT8 models have 20 to 40
FAR_TOP1, FAR_TOP1_DB = 0.5, 20.0  # below both, the top-1 class often changes, and not only for similar classes
MAX_CLIPPED = 0.1  # maximum share of an activation's values outside its grid; clipping observers drop 1 % or less
MIN_USED = 1 / 32  # minimum share of a grid that values reach; below, five bits are unused
_NEGLIGIBLE = 1e-10  # energy of an output relative to the largest one
_BAD_DB = 25.0  # limit for a single site; 8-bit sites have 30 to 50
_SAMPLES, _FEWEST, _NUMBERS = 16, 4, 1 << 19  # samples to measure, minimum, and limit of their input values
_LOOKED_AT = 1 << 16  # values of an activation that are enough for a ratio of energies
_SHOWN = 5
# Quantizers with a range from data; others clip on purpose, to a fixed or learned range.
_FROM_DATA = ("plain", "lsq", "lsqplus", "tqt")


@dataclass(frozen=True, kw_only=True)
class SiteDistance:
    """The effect of one quantizer on its input."""

    site: str
    sqnr_db: float
    """The error of this quantizer alone."""
    clipped: float
    """The share of values outside its grid."""
    used: float
    """The largest value relative to the end of the grid."""
    weight: bool


@dataclass(frozen=True, kw_only=True)
class OutputDistance:
    """The distance of one output between the quantized and the float model."""

    name: str
    sqnr_db: float
    top1_agreement: float | None


@dataclass(frozen=True, kw_only=True)
class Distance:
    """The distance of the simulated model from the float model."""

    samples: int
    outputs: tuple[OutputDistance, ...]
    worst: tuple[SiteDistance, ...]
    """The sites with the largest errors, worst first."""
    warnings: tuple[Problem, ...] = ()

    @property
    def sqnr_db(self) -> float:
        """The SQNR of the worst output."""
        return min((output.sqnr_db for output in self.outputs), default=inf)

    @property
    def top1_agreement(self) -> float | None:
        """The share of equal top-1 classes, for the first output with classes."""
        return next((o.top1_agreement for o in self.outputs if o.top1_agreement is not None), None)

    @property
    def far(self) -> bool:
        """Whether quantization changed the outputs too much; the limits are `FAR_DB`, `FAR_TOP1` and `FAR_TOP1_DB`."""
        agreement = self.top1_agreement
        lost = agreement is not None and agreement < FAR_TOP1 and self.sqnr_db < FAR_TOP1_DB
        return self.sqnr_db < FAR_DB or lost

    def __str__(self) -> str:
        agreement = self.top1_agreement
        classes = "" if agreement is None else f", the same top-1 class for {100 * agreement:.3g} %"
        samples = f"{self.samples} sample{'s' if self.samples != 1 else ''}"
        return f"{self.sqnr_db:.1f} dB SQNR{classes} of {samples}"


def measure_distance(model: nn.Module, batch: Any, *, samples: int | None = _SAMPLES) -> Distance:
    """Run some samples of a batch through the prepared model, in float and quantized, and measure every site."""
    attachment = attachment_of(model)
    if samples is not None:  # use fewer samples if they are large
        numbers = max(1, sum(t.numel() for _, t in tensors_in(batch)) // max(1, batch_size(batch)))
        samples = min(samples, max(_FEWEST, _NUMBERS // numbers))
    with eval_mode(model), torch.no_grad():
        try:
            return _measure(model, attachment, batch if samples is None else slice_batch(batch, 0, samples))
        except Exception:
            if samples is None or batch_size(batch) <= samples:
                raise
            return _measure(model, attachment, batch)  # the model accepts only one batch size


def _measure(model: nn.Module, attachment: Attachment, batch: Any) -> Distance:
    with in_mode(model, "float"):
        exact = _outputs(model, batch)
    with in_mode(model, "quantize"):
        sites = measure_sites(model, lambda: _outputs(model, batch))
    sums: dict[str, AgreementSums] = {}
    for (name, ours), (_, truth) in zip(sites.result, exact, strict=True):
        s, f = _comparable(ours, truth)
        sums.setdefault(name or "output", AgreementSums()).add(s, s, f)
    found = distance_of(attachment, sums, sites.sites, batch_size(batch), calibrated_on=True)
    lost = [name or "output" for name, truth in exact if _without_numbers(truth)]
    return replace(found, warnings=(_not_finite(lost), *found.warnings)) if lost else found


def _without_numbers(array: NDArray[Any]) -> bool:
    """Whether it contains NaN or only infinities; some infinities may be intended (masks)."""
    if not array.size or not np.issubdtype(array.dtype, np.floating):
        return False
    return bool(np.isnan(array).any()) or not bool(np.isfinite(array).any())


def _not_finite(outputs: list[str]) -> Problem:
    return Problem(
        what="the float model returns NaN or only infinities on the calibration data",
        where=", ".join(outputs),
        fix="check its parameters and buffers for NaN and infinity, and its dtype for overflow",
        code="non-finite-output",
    )


def _outputs(model: nn.Module, batch: Any) -> list[tuple[str, NDArray[Any]]]:
    args, kwargs = as_call(map_tensors(batch, Tensor.clone))  # the model may write into its inputs
    return [(path, as_array(tensor)) for path, tensor in tensors_in(model(*args, **kwargs))]


def _comparable(ours: NDArray[Any], truth: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Common NaN values count as equal; NaN only in the quantized model counts as an infinite error."""
    s, f = ours.astype(np.float64), truth.astype(np.float64)
    both = np.isnan(s) & np.isnan(f)
    return np.nan_to_num(np.where(both, 0.0, s), nan=np.inf, posinf=np.inf, neginf=-np.inf), np.where(both, 0.0, f)


def distance_of(
    attachment: Attachment,
    sums: dict[str, AgreementSums],
    sites: Iterable[SiteDistance],
    samples: int,
    *,
    calibrated_on: bool = False,
) -> Distance:
    """The metrics and warnings; ranges aren't evaluated on the data that they were `calibrated_on`."""
    loudest = max((one.exact for one in sums.values()), default=0.0)
    outputs = tuple(
        OutputDistance(
            name=name,
            sqnr_db=decibels(one.exact, one.quantization),
            top1_agreement=one.agree_with_float / one.rows if one.rows else None,
        )
        for name, one in sums.items()
        if one.exact > _NEGLIGIBLE * loudest or one.quantization > loudest
    )
    sites = list(sites)
    worst = tuple(sorted(sites, key=lambda site: site.sqnr_db)[:_SHOWN])
    found = Distance(samples=samples, outputs=outputs, worst=worst)
    unfit = [] if calibrated_on else _unfit_ranges(attachment, sites)
    noted = [*([_far(attachment, found, data=bool(unfit))] if found.far else []), *unfit]
    return Distance(samples=samples, outputs=outputs, worst=worst, warnings=tuple(noted))


def _far(attachment: Attachment, found: Distance, *, data: bool) -> Problem:
    weights = [q.format for q in attachment.quantizers.values() if q.weight and q.port != "bias"]
    advice = []
    if any(format.bits < 8 for format in weights):
        advice.append('more bits (weights="int8/channel/sym")')
    elif any(format.granularity == "tensor" for format in weights):
        advice.append('a scale per channel (weights="int8/channel/sym")')
    steps = '["gptq"] or ["adaround"]' if any(f.bits < 8 for f in weights) else '["equalize", "bias-correction"]'
    bad = [site for site in found.worst if site.sqnr_db < _BAD_DB] or list(found.worst[:1])
    operators = list(dict.fromkeys(site.site.rpartition(":")[0] for site in bad))[:3]
    advice.append(f"steps={steps}")
    advice.append(f"keep_float={operators}")
    if any(q.learned for q in attachment.quantizers.values()):  # training has moved the scales, not the data
        advice.insert(0, "training with a lower learning rate of the scales (quantizer_lr, parameter_groups(lr=…))")
    else:
        advice.insert(0 if data else len(advice), "calibration data similar to the data in production")
    return Problem(
        what=f"the quantized model is far from the float model: {found}; these sites have the largest errors",
        where=", ".join(f"{site.site} ({site.sqnr_db:.1f} dB)" for site in bad),
        fix=f"try {', '.join(advice[:-1])}, or {advice[-1]}",
        code="far-from-float",
    )


def _unfit_ranges(attachment: Attachment, sites: list[SiteDistance]) -> list[Problem]:
    """Warnings about ranges that don't match the current data."""
    owners = {site.site: attachment.quantizers[attachment.shared.get(site.site, site.site)] for site in sites}
    ranged = [s for s in sites if not s.weight and owners[s.site].spec.quantizer in _FROM_DATA]
    fix = "calibrate with samples of the data in production, with the same preprocessing"
    found = []
    clipping = [site for site in ranged if site.clipped > MAX_CLIPPED]
    if clipping:
        worst = sorted(clipping, key=lambda site: -site.clipped)[:_SHOWN]
        found.append(
            Problem(
                what=f"{len(clipping)} of {len(ranged)} activation ranges are too small for this data: more than "
                f"{MAX_CLIPPED:.0%} of the values are clipped",
                where=", ".join(f"{site.site} ({site.clipped:.0%})" for site in worst),
                fix=fix,
                code="ranges-clip",
            )
        )
    narrow = [site for site in ranged if 0 < site.used < MIN_USED]
    if narrow and (narrow[0] is ranged[0] or 2 * len(narrow) > len(ranged)):
        worst = sorted(narrow, key=lambda site: site.used)[:_SHOWN]
        found.append(
            Problem(
                what=f"{len(narrow)} of {len(ranged)} activation ranges are more than {1 / MIN_USED:.0f} times as wide "
                "as this data",
                where=", ".join(f"{site.site} ({1 / max(site.used, 1e-9):.3g} times)" for site in worst),
                fix=fix,
                code="ranges-too-wide",
            )
        )
    return found


@dataclass(frozen=True, kw_only=True)
class _SiteMeasurements:
    result: Any
    sites: tuple[SiteDistance, ...]


def measure_sites(
    model: nn.Module, run: Callable[[], Any], also: Callable[[str, Quantizer, Tensor], None] | None = None
) -> _SiteMeasurements:
    """Call `run` and measure the effect of each quantizer on its first input; `also` receives the same inputs."""
    sites: dict[str, SiteDistance] = {}

    def look(site: str, quantizer: Quantizer, x: Tensor) -> None:
        if also is not None:
            also(site, quantizer, x)
        if site not in sites and x.numel() and quantizer.port != "bias":
            sites[site] = _site(site, quantizer, x.detach().to(torch.float32))

    with tapped(model, look):
        result = run()
    return _SiteMeasurements(result=result, sites=tuple(sites.values()))


def _site(site: str, quantizer: Quantizer, x: Tensor) -> SiteDistance:
    if x.numel() > _LOOKED_AT and quantizer.layout.granularity == "tensor":
        x = x.flatten()[:: -(-x.numel() // _LOOKED_AT) | 1]  # an odd step reaches all channels
    grid = quantizer.deployed_grid(x)
    scale, zero_point = (quantizer.layout.spread(kept, x) for kept in (grid.scale, grid.zero_point))
    steps = quantizer.transform(x) / scale
    codes = torch.round(steps) + zero_point
    reach = torch.maximum(grid.qmax - zero_point, zero_point - grid.qmin).clamp(min=1)
    return SiteDistance(
        site=site,
        sqnr_db=_own_error(x, quantizer.quantize(x) - x, by_row=quantizer.weight),
        clipped=float(((codes < grid.qmin) | (codes > grid.qmax)).float().mean()),
        used=float((steps.abs() / reach).max()),
        weight=quantizer.weight,
    )


def _own_error(x: Tensor, error: Tensor, *, by_row: bool) -> float:
    """The SQNR. For a weight it is the mean over rows, so that one large row can't hide the loss of others."""
    signal, noise = x.double().square(), error.double().square()
    if not by_row or x.dim() < 2:
        return decibels(float(signal.sum()), float(noise.sum()))
    signal, noise = signal.flatten(1).sum(1), noise.flatten(1).sum(1)
    there = signal > 0
    return decibels(1.0, float((noise[there] / signal[there]).mean())) if bool(there.any()) else inf
