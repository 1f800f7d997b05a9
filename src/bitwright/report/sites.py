"""What each quantizer does to the numbers that reach it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import log10
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.attach import Attachment, Quantizer, attachment_of, in_mode, tapped
from bitwright.modes import evaluating
from bitwright.plan import SiteSpec
from bitwright.report.record import SiteRow
from bitwright.workload import call


@dataclass
class _Sums:
    signal: float = 0.0
    error: float = 0.0
    clipped: int = 0
    count: int = 0

    @torch.no_grad()
    def add(self, quantizer: Quantizer, x: Tensor) -> None:
        grid = quantizer.grid()
        x = x.detach().to(torch.float32)
        scale, zero_point = (
            quantizer.layout.spread(grid.scale, x),
            quantizer.layout.spread(grid.zero_point, x),
        )
        codes = torch.round(quantizer.transform(x) / scale) + zero_point
        self.clipped += int(((codes < grid.qmin) | (codes > grid.qmax)).sum())
        self.count += x.numel()
        self.signal += float(x.double().square().sum())
        self.error += float((quantizer.quantize(x) - x).double().square().sum())

    @property
    def sqnr_db(self) -> float | None:
        if self.error == 0 or self.signal == 0:
            return None
        return 10 * log10(self.signal / self.error)


def site_rows(model: nn.Module, batches: Iterable[Any]) -> tuple[SiteRow, ...]:
    """One row per site of a calibrated model, in the plan's order, measured on `batches`.

    The error of a site is its own: the signal is what reaches it, with the errors of earlier sites.
    """
    attachment = attachment_of(model)
    sums: dict[str, _Sums] = {}

    def look(site: str, quantizer: Quantizer, x: Tensor) -> None:
        if quantizer.weight and site in sums:
            return  # a weight is the same in each batch
        sums.setdefault(site, _Sums()).add(quantizer, x)

    with evaluating(model), torch.no_grad(), in_mode(model, "quantize"), tapped(model, look):
        for batch in batches:
            call(model, batch)
    return tuple(_row(site, spec, attachment, sums.get(site, _Sums())) for site, spec in attachment.plan.quantized)


def _row(site: str, spec: SiteSpec, attachment: Attachment, sums: _Sums) -> SiteRow:
    quantizer = attachment.quantizers[attachment.shared.get(site, site)]
    grid = quantizer.grid()
    scale, zero_point = grid.scale.double(), grid.zero_point.double()
    return SiteRow(
        site=site,
        format=str(quantizer.format),
        observer=quantizer.spec.observer,
        quantizer=quantizer.spec.quantizer,
        guard=quantizer.spec.guard,
        share=spec.share,
        scales=scale.numel(),
        scale_min=float(scale.min()),
        scale_max=float(scale.max()),
        zero_point_min=int(zero_point.min()),
        zero_point_max=int(zero_point.max()),
        low=float(((grid.qmin - zero_point) * scale).min()),
        high=float(((grid.qmax - zero_point) * scale).max()),
        clipped=sums.clipped / sums.count if sums.count else None,
        sqnr_db=sums.sqnr_db,
        why=spec.why,
    )
