"""prepare() and strip(): the interception layer that puts quantizers on a model and takes them off."""

from bitwright.attach.attachment import CONTAINER, Attachment
from bitwright.attach.folded import can_fold, round_folded
from bitwright.attach.folding import Fold
from bitwright.attach.gradients import usable_scale, with_gradient_of
from bitwright.attach.grid import Grid, Layout, extremes, grid_from_range
from bitwright.attach.observer import Observer
from bitwright.attach.prepare import (
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
from bitwright.attach.quantizer import Quantizer
from bitwright.attach.rounding import round_to_grid
from bitwright.attach.routes import Route, align, routed

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
