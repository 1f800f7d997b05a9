"""Ranges of weights that have moved since calibration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bitwright.attach import Quantizer, attachment_of, in_mode, tapped, weights_may_change
from bitwright.graph.tree import as_call
from bitwright.modes import evaluating


@torch.no_grad()
def settle_weights(model: nn.Module, example: Any) -> list[str]:
    """Fit the ranges of a trained model's weights again; gives the sites whose scale a guard had to raise.

    What is learned stays as it was learned, but for guards: a target whose accumulators overflow doesn't care how a
    scale was found. `example` is one call of the model: weights are seen as they are deployed, folded norms included.
    """
    seen: dict[str, tuple[Quantizer, Tensor]] = {}

    def look(site: str, quantizer: Quantizer, x: Tensor) -> None:
        if quantizer.weight:
            seen.setdefault(quantizer.site, (quantizer, x.detach()))

    args, kwargs = as_call(example)
    with evaluating(model), in_mode(model, "quantize"), weights_may_change(model), tapped(model, look):
        model(*args, **kwargs)
    raised: list[str] = []
    for quantizer, weight in sorted(seen.values(), key=lambda pair: bool(pair[0].of)):
        if quantizer.of:  # a bias: its weight's scale may have to make room
            quantizer.observe(weight)
            quantizer.settle()
        elif quantizer.learned:
            if quantizer.keep_guard(weight):
                raised.append(quantizer.site)
        else:
            observer = quantizer.new_observer()
            observer.observe(quantizer.layout.rows(weight.to(torch.float32)))
            quantizer.set_range(*observer.range(), weight.shape, weight.to(torch.float32))
    for quantizer in attachment_of(model).quantizers.values():
        quantizer.tracked.forget()
    for fold in attachment_of(model).folds.values():
        fold.bias = None  # it was folded with the scale before
    return raised
