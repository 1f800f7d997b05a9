"""Token-wise clipping: clip outliers of a few tokens at a quantile of the tokens' peaks.

The range ends at a quantile of the tokens' maximum and minimum values. The step chooses the quantile that changes the
outputs of the linear operators that read the activation least.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from bitwright.graph import Op, Source
from bitwright.ptq.block_replay import Replay
from bitwright.ptq.step import PtqContext, Step, is_uniform, magnitude_unit
from bitwright.quantizers import Quantizer, extremes, grid_from_range


class TokenClip(Step):
    """Clip activations to a range that few tokens exceed (transformers); one pass over the data."""

    name: ClassVar[str] = "token-clip"
    needs_reference: ClassVar[bool] = False

    grid: int = Field(default=20, ge=2, description="Number of quantiles to try.")
    lowest: float = Field(default=0.7, gt=0, lt=1, description="The lowest quantile; the highest is 1 (no clipping).")
    batch: int = Field(default=32, ge=1, description="Samples per batch.")

    def units(self, context: PtqContext) -> Sequence[str]:
        """Sites of per-tensor activations with shape (batch, tokens, channels)."""
        return list(_sites(context))

    @torch.no_grad()
    def run(self, context: PtqContext, unit: str) -> None:
        """Try all quantiles and keep the best."""
        if "replay" not in context.cache:
            context.cache["replay"] = Replay(context, self.batch, targets=False)
        replay: Replay = context.cache["replay"]
        source, position, weights = _sites(context)[unit]
        replay.advance(position)
        quantizer = context.attachment.quantizers[unit]
        peaks = [_peaks(replay.values(index, "quantized")[source]) for index in range(len(replay))]
        low, high = (torch.cat(part) for part in zip(*peaks, strict=True))
        peak = float(torch.maximum(high.abs().max(), low.abs().max()))
        if peak == 0.0:  # nothing to clip
            return
        size = magnitude_unit(peak)
        best, least = None, float("inf")
        for share in torch.linspace(1.0, self.lowest, self.grid).tolist():
            ends = torch.quantile(low, 1 - share), torch.quantile(high, share)
            grid = grid_from_range(ends[0].reshape(1), ends[1].reshape(1), quantizer.format, site=unit)
            error = 0.0
            for index in range(len(replay)):
                x = replay.values(index, "quantized")[source].float()
                codes = torch.clamp(torch.round(x / grid.scale) + grid.zero_point, grid.qmin, grid.qmax)
                change = (codes - grid.zero_point) * grid.scale - x
                error += sum(float((change / size @ weight.T).double().square().sum()) for weight in weights)
            if best is None or error < least:
                best, least = ends, error
        assert best is not None
        shape = replay.values(0, "quantized")[source].shape
        quantizer.set_range(best[0].reshape(1), best[1].reshape(1), shape)

    def finish(self, context: PtqContext) -> None:
        """Remove the temporary files."""
        replay = context.cache.pop("replay", None)
        if replay is not None:
            replay.close()


def _peaks(x: Tensor) -> tuple[Tensor, Tensor]:
    low, high = extremes(x.float().flatten(0, -2))
    return low, high


def _sites(context: PtqContext) -> dict[str, tuple[Source, int, list[Tensor]]]:
    """Site → its tensor, the position at which it is available, and the weights that multiply it."""
    found: dict[str, tuple[Source, int, list[Tensor]]] = {}
    for site, quantizer in context.attachment.quantizers.items():
        name, _, port = site.rpartition(":")
        op = context.graph.by_name.get(name)
        if op is None or not _per_tensor(quantizer) or context.graph.partial(op):
            continue
        place = _tensor_position(context, op, port)
        if place is None:
            continue
        weights = [_weight(context, reader) for reader, _ in context.graph.consumers.get(place[0], ())]
        if weights and all(weight is not None for weight in weights):
            found[site] = (*place, [weight for weight in weights if weight is not None])
    return dict(sorted(found.items(), key=lambda item: item[1][1]))


def _per_tensor(quantizer: Quantizer) -> bool:
    return not quantizer.weight and is_uniform(quantizer) and quantizer.layout.granularity == "tensor"


def _tensor_position(context: PtqContext, op: Op, port: str) -> tuple[Source, int] | None:
    position = context.tape.position(op.name)
    if port == "output":
        return (Source("op", op.name), position + 1) if len(op.outputs[0].shape) == 3 else None
    found = op.port(port)
    if found is None or len(found.sources) != 1 or len(found.shape) != 3 or found.sources[0].kind != "op":
        return None
    return found.sources[0], position


def _weight(context: PtqContext, op: Op) -> Tensor | None:
    return context.weight_of(op) if op.kind == "linear" else None
