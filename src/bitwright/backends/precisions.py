"""Names of precisions ("int8", "w4a8", "w8a8-dynamic", "w4a16"): the backend and the plan choices they stand for."""

from __future__ import annotations

import re
from pathlib import Path

from bitwright.backends.choices import Choices, reject_choices_with_plan
from bitwright.backends.table import DEFAULT_BACKEND, backend
from bitwright.core.errors import TrainError
from bitwright.core.formats import Format
from bitwright.plan import Plan

Precision = str | Path | Plan
_WORD = re.compile(r"(?:int(\d+)|w(\d+)a(\d+))(-dynamic)?", re.IGNORECASE)
_FLOAT_BITS = (16, 32)
"""Activations with these bits stay in float (w4a16: weights only), unless the target has 16-bit integers."""
_FIRST_LAST_BITS = 8
#: The default in training: its scales are learned, and no other quantizer is better at 8 bits.
_QUANTIZER = "lsq"
_START = "mse"  # below 8 bits, a range that clips outliers is better than one that covers all values


def resolve(
    precision: Precision, target: str | None, choices: Choices, *, learned: bool = True
) -> tuple[Plan | None, str, Choices, list[str]]:
    """The plan (if one is given), the backend's name, the choices for `make_plan`, and notes for the user.

    With `learned`, as in training, the scales are parameters.
    """
    if isinstance(precision, Plan) or str(precision).endswith((".yaml", ".yml")):
        plan = precision if isinstance(precision, Plan) else Plan.load(precision)
        reject_choices_with_plan(choices)
        return plan, target or plan.backend or DEFAULT_BACKEND, Choices(), []
    match = _WORD.fullmatch(str(precision))
    if match is None:
        raise TrainError.single(
            "unknown precision",
            where="precision",
            value=str(precision),
            fix="write int8, int4, w4a8 (4-bit weights, 8-bit activations), w8a8-dynamic "
            "(activation scales at run time), w4a16 (weights only), or the path of a plan.yaml",
            code="unknown-precision",
        )
    weight_bits, activation_bits = int(match[2] or match[1]), int(match[3] or match[1])
    dynamic = match[4] is not None
    notes: list[str] = []
    low = min(weight_bits, activation_bits) < _FIRST_LAST_BITS
    weight_only = activation_bits in _FLOAT_BITS and not dynamic
    if target is None:
        # Weights of few bits are stored as they are; activations of few bits have no kernels.
        target = "academic" if low and not (weight_only or dynamic) else DEFAULT_BACKEND
        if target == "academic":
            notes.append(f"{precision} is simulated on the backend academic; to deploy, name a backend that runs it")
    table = backend(target)
    made: Choices = {**choices}
    made["weights"] = choices.get("weights") or _widths(table.weights.format, weight_bits)
    if weight_only and Format.parse(table.activations.format).bits != activation_bits:
        usual = "float"
    elif dynamic:
        usual = f"int{activation_bits}/token/sym/dynamic"
    else:
        usual = _widths(table.activations.format, activation_bits)
    made["activations"] = choices.get("activations") or usual
    if learned and choices.get("quantizer") is None:
        made["weight_quantizer" if Format.parse(made["activations"] or "").dynamic else "quantizer"] = _QUANTIZER
    if low and not (weight_only or dynamic):
        if choices.get("first_last_bits") is None:
            made["first_last_bits"] = _FIRST_LAST_BITS
            notes.append(f"the first and the last operator have {_FIRST_LAST_BITS} bits")
        for key in ("observer", "weight_observer"):
            if choices.get(key) is None:
                made[key] = _START
    return None, target, made, notes


def _widths(format: str, bits: int) -> str:
    return str(Format.parse(format).with_bits(bits))


def word(precision: Precision | None) -> str | None:
    """A precision as text, for a file."""
    if precision is None:
        return None
    return precision.to_yaml() if isinstance(precision, Plan) else str(precision)
