"""`quantize="int8"`: from one word to a backend and choices, or a plan."""

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
_EDGE_BITS = 8
#: Its scales learn, and at 8 bits nothing is better; a plan or `quantizer=` says otherwise.
_QUANTIZER = "lsq"
_START = "mse"  # where few codes must do, a range that clips the rare is a better start than one that covers all


def resolve(precision: Precision, target: str | None, choices: Choices) -> tuple[Plan | None, str, Choices, list[str]]:
    """A plan if one was given, the backend's name, what to choose if not, and what was decided for the user."""
    if isinstance(precision, Plan) or str(precision).endswith((".yaml", ".yml")):
        plan = precision if isinstance(precision, Plan) else Plan.load(precision)
        reject_choices_with_plan(choices)
        return plan, target or plan.backend or "onnxruntime", Choices(), []
    match = _WORD.fullmatch(str(precision))
    if match is None:
        raise TrainError.single(
            "unknown precision",
            where="quantize",
            value=str(precision),
            fix="write int8, int4, w4a8 (weights 4 bits, activations 8), or the path of a plan.yaml",
        )
    weight_bits, activation_bits = int(match[2] or match[1]), int(match[3] or match[1])
    notes: list[str] = []
    low = min(weight_bits, activation_bits) < _EDGE_BITS
    if target is None:
        target = "academic" if low else "onnxruntime"
        if low:
            notes.append(f"{precision} is simulated on the backend academic; name a backend that runs it to deploy")
    table = backend(target)
    made: Choices = {**choices}
    made["weights"] = choices.get("weights") or _widths(table.weights.format, weight_bits)
    made["activations"] = choices.get("activations") or _widths(table.activations.format, activation_bits)
    if choices.get("quantizer") is None:
        made["quantizer"] = _QUANTIZER
    if low:
        if choices.get("edges") is None:
            made["edges"] = _EDGE_BITS
            notes.append(f"the first and the last operator have {_EDGE_BITS} bits")
        for key in ("observer", "weight_observer"):
            if choices.get(key) is None:
                made[key] = _START
    return None, target, made, notes


def _widths(format: str, bits: int) -> str:
    return str(Format.parse(format).with_bits(bits))


def word(precision: Precision | None) -> str | None:
    """A precision as a file can hold it."""
    if precision is None:
        return None
    return precision.to_yaml() if isinstance(precision, Plan) else str(precision)
