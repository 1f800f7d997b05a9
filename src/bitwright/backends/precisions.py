"""Names of precisions ("int8", "w4a8", "w8a8-dynamic", "fp8"): the backend and the plan choices they stand for.

A few names ("qsync-int8") stand for kernels by kind of operator instead of quantizers.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from pathlib import Path

from bitwright.backends.choices import Choices, patterns_of, reject_choices_with_plan, weight_format
from bitwright.backends.table import DEFAULT_BACKEND, BackendTable, backend
from bitwright.backends.token_models import HEAD_BITS
from bitwright.core.errors import FormatError, PlanError, Problem, TrainError, did_you_mean
from bitwright.core.formats import Format
from bitwright.core.registry import KERNELS
from bitwright.graph import Graph
from bitwright.plan import ComputeSpec, Plan

Precision = str | Path | Plan
_WORD = re.compile(r"(?:int(\d+)|w(\d+)a(\d+))(-dynamic)?", re.IGNORECASE)
_FP8 = {"weights": "fp8e4m3/channel", "activations": "fp8e4m3/token/dynamic"}
_COMMON = ("int8", "int4", "int2", "w4a8", "w2a8", "w8a16", "w4a16", "w8a8-dynamic", "w4a8-dynamic")
_FLOAT_BITS = (16, 32)
"""Activations with these bits stay in float (w4a16: weights only), unless the target has 16-bit integers."""
_FIRST_LAST_BITS = 8
#: The default in training: its scales are learned, and no other quantizer is better at 8 bits.
_QUANTIZER = "lsq"
_START = "mse"  # below 8 bits, a range that clips outliers is better than one that covers all values
_POOLS = ("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d")
KERNEL_PRECISIONS: Mapping[str, Mapping[str, str]] = {
    "qsync-int8": {"conv2d": "int8", **dict.fromkeys(("relu", *_POOLS), "fp16")},
}
"""The kernel of each kind of operator. `qsync-int8` is the flag --int8 of QSync's training script."""


def kernel_precision(name: str, graph: Graph, choices: Choices | None = None, *, model: str | None = None) -> Plan:
    """The plan of a precision in `KERNEL_PRECISIONS`. It accepts no choice except `keep_float`.

    >>> import torch
    >>> from bitwright import capture
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3))
    >>> plan = kernel_precision("qsync-int8", capture(net, torch.ones(1, 3, 9, 9)), {"keep_float": ["2"]})
    >>> {name: spec.format for name, spec in plan.compute.items()}
    {'0': 'int8', '1': 'fp16', '2': 'float'}
    """
    kinds = KERNEL_PRECISIONS[name]
    choices = choices or Choices()
    keep = patterns_of(choices)
    reject_choices_with_plan({key: value for key, value in choices.items() if key != "keep_float"})
    problems = [
        Problem(
            what="this keep_float pattern matches no operator",
            where="keep_float",
            value=pattern,
            fix=did_you_mean(pattern, graph.by_name),
            code="unknown-operator",
        )
        for pattern in keep
        if not any(fnmatch.fnmatchcase(op, pattern) for op in graph.by_name)
    ]
    ops = [op for op in graph.ops if op.kind in kinds and not op.constant]
    if not ops:
        what, fix = f"the precision {name} applies to no operator of the model", f"it lowers only {', '.join(kinds)}"
        problems.append(Problem(what=what, where="precision", value=name, fix=fix, code="plan-all-float"))
    if problems:
        raise PlanError(problems)
    compute: dict[str, ComputeSpec] = {}
    for op in ops:
        spec = ComputeSpec(format=kinds[op.kind], why=f"{op.kind} in {name}")
        kept = any(fnmatch.fnmatchcase(op.name, pattern) for pattern in keep)
        reason = "kept in float by request" if kept else KERNELS.get(spec.format).refuses_named(op, spec)
        compute[op.name] = spec if reason is None else ComputeSpec(why=reason)
    return Plan(compute=compute, model=model)


def resolve(
    precision: Precision, target: str | None, choices: Choices, *, learned: bool = True
) -> tuple[Plan | None, str, Choices, list[str]]:
    """Return the plan (if one is given), the backend's name, the choices for `make_plan`, and notes for the user.

    If `learned` is set, as in training, the scales are parameters.
    """
    if isinstance(precision, Plan) or str(precision).endswith((".yaml", ".yml")):
        plan = precision if isinstance(precision, Plan) else Plan.load(precision)
        reject_choices_with_plan(choices)
        return plan, target or plan.backend or DEFAULT_BACKEND, Choices(), []
    if str(precision).lower() == "fp8":
        return None, target or "academic", _with_fp8(choices), [] if target else [_simulated(precision)]
    match = _WORD.fullmatch(str(precision))
    if str(precision) in KERNEL_PRECISIONS:
        raise TrainError.single(
            "this precision stands for low-precision kernels, which train, predict and profile run",
            where="precision",
            value=str(precision),
            fix="write int8 to quantize the model",
            code="kernel-precision",
        )
    if match is None:
        raise TrainError.single(
            "unknown precision",
            where="precision",
            value=str(precision),
            fix="write int8, int4, w4a8 (4-bit weights, 8-bit activations), w8a8-dynamic "
            "(activation scales at run time), w4a16 (weights only), fp8, the path of a plan.yaml, "
            f"or for training {', '.join(KERNEL_PRECISIONS)} (kernels)",
            code="unknown-precision",
        )
    weight_bits, activation_bits = int(match[2] or match[1]), int(match[3] or match[1])
    dynamic = match[4] is not None
    notes: list[str] = []
    low = min(weight_bits, activation_bits) < _FIRST_LAST_BITS
    weight_only = activation_bits in _FLOAT_BITS and not dynamic
    if target is None:
        # Targets can store low-bit weights, but they have no kernels for low-bit activations.
        target = "academic" if low and not (weight_only or dynamic) else DEFAULT_BACKEND
        if target == "academic":
            notes.append(_simulated(precision))
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
    if not choices.get("weights") and not choices.get("activations"):
        _require_supported(str(precision), table, made)
    if low and (weight_only or dynamic) and choices.get("head_bits") is None:
        head = weight_format(made, table).with_bits(HEAD_BITS)
        made["head_bits"] = HEAD_BITS if table.weights.allows(head) else None
    if learned and choices.get("quantizer") is None:
        made["weight_quantizer" if Format.parse(made["activations"] or "").dynamic else "quantizer"] = _QUANTIZER
    if low and not (weight_only or dynamic):
        if choices.get("first_last_bits") is None:
            made["first_last_bits"] = _FIRST_LAST_BITS
            notes.append(f"the first and the last operator use {_FIRST_LAST_BITS} bits")
        for key in ("observer", "weight_observer"):
            if choices.get(key) is None:
                made[key] = _START
    return None, target, made, notes


def _require_supported(precision: str, table: BackendTable, choices: Choices) -> None:
    """Raise if the target can't run the formats that a precision stands for."""
    if _runs(table, choices):
        return
    usable = [name for name in _COMMON if _runs(table, _formats(name, table))]
    raise TrainError.single(
        f"{table.name} can't run this precision",
        where="precision",
        value=precision,
        fix=f"use one of: {', '.join(usable)}" + ("" if table.name == "academic" else '; or backend="academic"'),
        code="unsupported-precision",
    )


def _runs(table: BackendTable, choices: Choices) -> bool:
    try:
        activations = table.activations.parse(choices.get("activations") or "float")
        return table.weights.allows(weight_format(choices, table)) and (
            activations.is_plain_float or table.activations.allows(activations)
        )
    except FormatError:
        return False


def _formats(precision: str, table: BackendTable) -> Choices:
    """The formats of a precision in `_COMMON`."""
    match = _WORD.fullmatch(precision)
    assert match is not None
    weights, activations = int(match[2] or match[1]), int(match[3] or match[1])
    made: Choices = {"weights": _widths(table.weights.format, weights)}
    if activations not in _FLOAT_BITS:
        made["activations"] = (
            f"int{activations}/token/sym/dynamic" if match[4] else _widths(table.activations.format, activations)
        )
    return made


def _simulated(precision: Precision) -> str:
    return f"{precision} is simulated on the backend academic; to deploy, name a backend that runs it"


def _with_fp8(choices: Choices) -> Choices:
    made: Choices = {**choices}
    made["weights"] = choices.get("weights") or _FP8["weights"]
    made["activations"] = choices.get("activations") or _FP8["activations"]
    return made


def _widths(format: str, bits: int) -> str:
    return str(Format.parse(format).with_bits(bits))


def word(precision: Precision | None) -> str | None:
    """A precision as text, for a file."""
    if precision is None:
        return None
    return precision.to_yaml() if isinstance(precision, Plan) else str(precision)
