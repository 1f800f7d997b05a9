"""The choices for a plan, and the named precisions ("int8", "w4a8", "w8a8-dynamic", "fp8") that stand for them.

Choices are validated against a backend. A few names ("qsync-int8") stand for kernels by kind of operator instead of
quantizers.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from bitwright.backends.table import DEFAULT_BACKEND, BackendTable, backend
from bitwright.backends.token_models import HEAD_BITS
from bitwright.core.errors import FormatError, PlanError, Problem, TrainError, did_you_mean
from bitwright.core.formats import Format
from bitwright.core.registry import KERNELS, OBSERVERS, QUANTIZERS
from bitwright.graph import Graph
from bitwright.plan import NO_FOLDING, STRATEGIES, ComputeSpec, Plan, known_strategies

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


class Choices(TypedDict, total=False):
    """Keyword arguments of `make_plan`, `place` and `quantize`."""

    weights: str | None
    """Format of weights, e.g. "int4/group32" (groups with the best grid that the target can store)."""
    activations: str | None
    """Format of activations, e.g. "uint8/tensor/asym"."""
    group: int | None
    """Values along the reduction axis that share one scale of a weight, instead of the granularity of `weights`."""
    head_bits: int | None
    """Bits of the weights of the head, which predicts tokens. Default: 8 if a named precision has fewer."""
    observer: str | None
    """Observer of activation ranges."""
    weight_observer: str | None
    """Observer of weight ranges."""
    quantizer: str | None
    """Quantizer of activations, and of weights unless `weight_quantizer` is given. Default: "plain"."""
    weight_quantizer: str | None
    """Quantizer of weights. Default: the one that belongs to `quantizer` (pact: dorefa)."""
    first_last_bits: int | None
    """Bits of the first and last operator with a weight, and of their inputs. Default: the backend's value."""
    keep_float: Iterable[str]
    """Patterns of operators that stay in float."""
    fold: int | None
    """Batch-norm folding: -1 for none, 0 to 4 for a strategy (docs/folding.md). Default: 4."""
    saturating: bool | None
    """Whether 8-bit products saturate on the deployment machine. None: test this machine."""


def patterns_of(choices: Choices) -> list[str]:
    """The patterns of `keep_float`. A string is one pattern."""
    given = choices.get("keep_float") or ()
    return [given] if isinstance(given, str) else list(given)


def reject_choices_with_plan(choices: Mapping[str, Any]) -> None:
    """Reject choices that are given together with a plan, because they would have no effect."""
    given = [name for name, value in choices.items() if value is not None and value != [] and value != ()]
    if given:
        raise PlanError(
            [
                Problem(
                    what="the plan already defines this, so the argument would have no effect",
                    where=name,
                    value=choices.get(name),
                    fix="change the plan, or remove either `plan` or this argument",
                    code="ignored-argument",
                )
                for name in given
            ],
            title="arguments that conflict with a plan",
        )


def weight_format(choices: Choices, table: BackendTable) -> Format:
    """The format of weights."""
    format, group = table.weights.parse(choices.get("weights") or table.weights.format), choices.get("group")
    if group is not None and group < 1:
        what, fix = "a group must have at least one value", "use group=32"
        raise PlanError([Problem(what=what, where="group", value=group, fix=fix, code="invalid-value")])
    if group is None:
        return format
    if format.minifloat is None and format.symmetric and not format.is_float:
        return table.weights.parse(f"{format.name}/group{group}")  # with every code where the target can store it
    return replace(format, granularity="group", group=group)


def choice_problems(choices: Choices, table: BackendTable, graph: Graph) -> list[Problem]:
    """Problems of the choices, each reported once rather than for each site."""
    return [*_names(choices), *_formats(choices, table), *_patterns(choices, graph), *_folding(choices, table)]


def _names(choices: Choices) -> Iterator[Problem]:
    for where, name, registry in (
        ("observer", choices.get("observer"), OBSERVERS),
        ("weight_observer", choices.get("weight_observer"), OBSERVERS),
        ("quantizer", choices.get("quantizer"), QUANTIZERS),
        ("weight_quantizer", choices.get("weight_quantizer"), QUANTIZERS),
    ):
        if name is not None and name not in registry:
            fix = did_you_mean(name, registry.names())
            yield Problem(what=f"unknown {registry.kind}", where=where, value=name, fix=fix, code="unknown-name")


def _formats(choices: Choices, table: BackendTable) -> Iterator[Problem]:
    for role, text, choice in (
        ("weight", choices.get("weights"), table.weights),
        ("activation", choices.get("activations"), table.activations),
    ):
        try:
            format = weight_format(choices, table) if role == "weight" else choice.parse(text or choice.format)
            heads = choices.get("head_bits")
            head = format.with_bits(heads) if heads is not None and role == "weight" else format
        except FormatError as error:
            yield from error.problems
            continue
        if not choice.allows(format):
            what, fix = f"{table.name} can't run this {role} format", f"use one of: {', '.join(choice.formats)}"
            yield Problem(what=what, where="plan", value=str(format), fix=fix, code="unsupported-format")
        elif not choice.allows(head):
            what, fix = f"{table.name} can't run this format of the head", f"use one of: {', '.join(choice.formats)}"
            yield Problem(what=what, where="head_bits", value=str(head), fix=fix, code="unsupported-format")


def _patterns(choices: Choices, graph: Graph, *, where: str = "plan") -> Iterator[Problem]:
    for pattern in patterns_of(choices):
        if not any(fnmatch.fnmatchcase(name, pattern) for name in graph.by_name):
            what, fix = "this keep_float pattern matches no operator", did_you_mean(pattern, graph.by_name)
            yield Problem(what=what, where=where, value=pattern, fix=fix, code="unknown-operator")


def _folding(choices: Choices, table: BackendTable) -> Iterator[Problem]:
    strategy = choices.get("fold")
    if strategy is None or strategy == NO_FOLDING:
        return
    if strategy not in STRATEGIES:
        yield Problem(
            what="unknown folding strategy",
            where="fold",
            value=strategy,
            fix=known_strategies(none=True),
            code="unknown-folding-strategy",
        )
    elif not table.fold:
        yield Problem(
            what=f"{table.name} runs batch norms as separate operators, so they can't be folded",
            where="fold",
            value=strategy,
            fix="remove fold, or use another backend",
            code="fold-not-supported",
        )


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
    problems = list(_patterns(choices, graph, where="keep_float"))
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
        usual = _per_token(activation_bits, table)
    else:
        usual = _widths(table.activations.format, activation_bits)
    made["activations"] = choices.get("activations") or usual
    if not choices.get("weights") and not choices.get("activations"):
        _require_supported(str(precision), table, made)
    if (dynamic or (low and weight_only)) and choices.get("head_bits") is None:
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
    usable = [name for name in _COMMON if _runs(table, _formats_of(name, table))]
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


def _formats_of(precision: str, table: BackendTable) -> Choices:
    """The formats of a precision in `_COMMON`."""
    match = _WORD.fullmatch(precision)
    assert match is not None
    weights, activations = int(match[2] or match[1]), int(match[3] or match[1])
    made: Choices = {"weights": _widths(table.weights.format, weights)}
    if activations not in _FLOAT_BITS:
        made["activations"] = (
            _per_token(activations, table) if match[4] else _widths(table.activations.format, activations)
        )
    return made


def _per_token(bits: int, table: BackendTable) -> str:
    """Activations with scales at run time: with zero points, because most tokens reach further to one side."""
    found = f"int{bits}/token/asym/dynamic"
    try:
        allowed = table.activations.allows(table.activations.parse(found))
    except FormatError:
        allowed = False
    return found if allowed else found.replace("asym", "sym")


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
