"""Names of precisions ("int8", "w4a8"): the backend and the plan choices that they stand for."""

from __future__ import annotations

import re
from pathlib import Path

from bitwright.backends.table import backend
from bitwright.backends.validation import Choices, reject_choices_with_plan
from bitwright.core.errors import TrainError
from bitwright.core.formats import Format
from bitwright.plan import Plan

Precision = str | Path | Plan
_WORD = re.compile(r"int(\d+)|w(\d+)a(\d+)", re.IGNORECASE)
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
        return plan, target or plan.backend or "onnxruntime", Choices(), []
    match = _WORD.fullmatch(str(precision))
    if match is None:
        raise TrainError.single(
            "unknown precision",
            where="precision",
            value=str(precision),
            fix="write int8, int4, w4a8 (4-bit weights, 8-bit activations), or the path of a plan.yaml",
            code="unknown-precision",
        )
    weight_bits, activation_bits = int(match[2] or match[1]), int(match[3] or match[1])
    notes: list[str] = []
    low = min(weight_bits, activation_bits) < _FIRST_LAST_BITS
    if target is None:
        target = "academic" if low else "onnxruntime"
        if low:
            notes.append(f"{precision} is simulated on the backend academic; to deploy, name a backend that runs it")
    table = backend(target)
    made: Choices = {**choices}
    made["weights"] = choices.get("weights") or _widths(table.weights.format, weight_bits)
    made["activations"] = choices.get("activations") or _widths(table.activations.format, activation_bits)
    if learned and choices.get("quantizer") is None:
        made["quantizer"] = _QUANTIZER
    if low:
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
