"""Quantizers: the arithmetic at one site. One file each, loaded by name from the registry."""

from bitwright.quantizers.attachment import CONTAINER, Attachment
from bitwright.quantizers.base import Quantizer
from bitwright.quantizers.export_sites import Route, align, routed
from bitwright.quantizers.folding import Fold
from bitwright.quantizers.grid import Grid, Layout, extremes, grid_from_range
from bitwright.quantizers.observers.base import Observer
from bitwright.quantizers.preparation import (
    attachment_of,
    compile_arithmetic,
    find_attachment,
    folded_once,
    in_mode,
    prepare,
    quantizers_of,
    replaced_modules,
    set_mode,
    strip,
    tapped,
    unwrap_forward,
    warnings_of,
    weights_may_change,
)
from bitwright.quantizers.rounding import can_fold, round_folded, round_to_grid, usable_scale, with_gradient_of

__all__ = [
    "CONTAINER",
    "Attachment",
    "Fold",
    "Grid",
    "Layout",
    "Observer",
    "Quantizer",
    "Route",
    "align",
    "attachment_of",
    "can_fold",
    "compile_arithmetic",
    "extremes",
    "find_attachment",
    "folded_once",
    "grid_from_range",
    "in_mode",
    "prepare",
    "quantizers_of",
    "replaced_modules",
    "round_folded",
    "round_to_grid",
    "routed",
    "set_mode",
    "strip",
    "tapped",
    "unwrap_forward",
    "usable_scale",
    "warnings_of",
    "weights_may_change",
    "with_gradient_of",
]
