"""The state attached to a prepared model: its quantizers and what runs at each call."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodWrapperType
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.core.errors import PlanError, Problem
from bitwright.graph import Op
from bitwright.graph.graph import SiteName
from bitwright.graph.interception import ForwardShim, Interceptor
from bitwright.graph.operators import (
    EXPERT_PRODUCTS,
    PRODUCTS,
    SELECTING,
    carries_floats,
    hookable_kind,
    in_transform,
    locate,
    put,
)
from bitwright.plan import Plan
from bitwright.quantizers.base import Quantizer
from bitwright.quantizers.export_sites import Route
from bitwright.quantizers.folding import Fold, FoldedCall
from bitwright.quantizers.state import identify_weight, state_problems

log = logging.getLogger("bitwright")

CONTAINER = "bitwright"  # the submodule that holds all quantizers: keys are `bitwright.<site>.scale`


class Alias:
    """Another site of a quantizer: the same grid under another name."""

    def __init__(self, owner: Quantizer, site: str) -> None:
        self.owner = owner
        self.site = site

    def __call__(self, x: Tensor, **also: Any) -> Tensor:
        """Run the owner with this site's name."""
        result: Tensor = self.owner(x, self.site, **also)
        return result


class OpHooks:
    """The quantizers, kernel and fold of one operator call."""

    def __init__(self) -> None:
        self.inputs: dict[str, Quantizer | Alias] = {}
        self.output: Quantizer | Alias | None = None
        self.fold: Fold | None = None
        self.kernel: Any = None  # replaces the operator
        self.folded: Fold | None = None  # set if this operator is a norm that is folded into another one


# path → per call of that module → kind → per occurrence
HookTable = dict[str, list[OpHooks]]
# recorded operators: kind → count
OperatorCounts = dict[str, int]

# a running module call: its hooks, operator counts by kind, path, call, recorded counts
CallFrame = tuple[HookTable, dict[str, int], str, int, OperatorCounts | None]


class Container(nn.Module):
    """Holds the quantizers as a tree of site names. Its forward is the identity: nn.Sequential runs all children."""

    def __init__(self, attachment: Attachment | None = None) -> None:
        super().__init__()
        self.attachment = attachment  # only at the root; trainers may wrap the model's forward

    def forward(self, x: Any = None) -> Any:
        """Return the input."""
        return x

    def add(self, site: str, quantizer: Quantizer) -> None:
        """Add a quantizer at its path, directly in `_modules`: a site may have the name of an attribute."""
        *branches, leaf = site.split(".")
        here: nn.Module = self
        for branch in branches:
            if branch not in here._modules:
                here._modules[branch] = Container()
            child = here._modules[branch]
            assert child is not None
            here = child
        here._modules[leaf] = quantizer

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Check the state of all quantizers before loading any, and report every problem."""
        if self.attachment is not None:
            problems = self.attachment.state_problems(state_dict, prefix)
            if problems:
                raise PlanError(problems, title="the state of quantizers can't be loaded")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _copied(frame: CallFrame | None) -> CallFrame | None:
    return None if frame is None else (frame[0], dict(frame[1]), *frame[2:])


_NO_TABLES: list[HookTable] = [{}]


class Attachment(Interceptor):
    """Runs the quantizers of one prepared model. There is no process-wide state."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.quantizers: dict[str, Quantizer] = {}
        self.shared: dict[str, str] = {}  # site → the site with its quantizer
        self.folds: dict[str, Fold] = {}  # site of the folded bias → fold
        self.kernels: dict[str, Any] = {}  # operator → kernel
        self.tables: dict[str, list[HookTable]] = {}
        self.recorded: dict[str, list[OperatorCounts]] = {}  # path → counts of each call; other modules are not checked
        self.tokens: dict[str, Tensor] = {}  # operator → uses of each expert in calibration
        # modules that select weights of experts by an index → operators in each iteration of a loop, by kind
        self.experts: dict[str, dict[str, int]] = {}
        self.watching = True  # whether weights are compared with those of calibration
        self.warnings: dict[tuple[str, str], Problem] = {}  # (code, location) → warning; each is logged once
        self.root: ForwardShim | None = None  # the shim of the model itself, inside the wrappers of a trainer
        self.calls: dict[str, int] = {}
        self.frame: CallFrame | None = None
        self.route: Route | None = None  # while comparing a forward with an exported one

    def state_problems(self, state: Mapping[str, Any], prefix: str) -> list[Problem]:
        """Problems in the state of these quantizers. `state` has all of a quantizer's tensors or none."""
        given: dict[str, dict[str, Any]] = {}
        for key, value in state.items():
            if key.startswith(prefix):
                site, _, name = key.removeprefix(prefix).rpartition(".")
                given.setdefault(site, {})[name] = value
        found = [
            state_problems(quantizer, given[site])
            for site, quantizer in self.quantizers.items()
            if site in given and not quantizer.of
        ]
        return [problem for problems in found for problem in problems]

    def begin(self) -> None:
        """Reset the operator counts at the start of a forward."""
        self.calls = {}
        self.frame = None

    def enter(self, path: str) -> Any:
        """Select the hooks of this module."""
        before = self.frame
        tables = self.tables.get(path, _NO_TABLES)
        recorded = self.recorded.get(path)
        if tables is _NO_TABLES and recorded is None:
            self.frame = None
            return before
        calls = max(len(tables), 1 if recorded is None else len(recorded))
        call = 0
        if calls > 1:
            call = self.calls.get(path, 0)
            self.calls[path] = call + 1
            # More calls than recorded (such as a longer sequence) use the hooks of the last known call.
            call = min(call, calls - 1)
        known = None if recorded is None else recorded[min(call, len(recorded) - 1)]
        call = min(call, len(tables) - 1)
        self.frame = (tables[call], {}, path, call, known)
        return before

    def leave(self, token: Any) -> None:
        """Return to the hooks of the caller."""
        self.frame = token

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function, with quantizers if the plan has any for it."""
        frame = self.frame
        if func is torch.topk or func is Tensor.topk:
            return self._call_topk(func, args, kwargs)
        if frame is None or in_transform():
            return func(*args, **kwargs)
        return self._call(frame, func, args, kwargs)

    def _call_topk(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Among equal values, select those with the lowest indices, as ONNX requires.

        torch does not specify the order of equal values. Quantized values are often equal, so runtimes would
        select different ones. An exported program keeps the operator itself.
        """
        training = self.root is not None and self.root.module.training
        own = in_transform() or training or "out" in kwargs or torch.compiler.is_exporting()
        run = func if own else topk_by_index
        if self.frame is None or in_transform():
            return run(*args, **kwargs)
        return self._call(self.frame, func, args, kwargs, run=run)

    def _call(
        self, frame: CallFrame, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, run: Any = None
    ) -> Any:
        """Run a torch function in a module that has quantizers; `run` computes its result, if given."""
        run = run or func
        known = None if isinstance(func, MethodWrapperType) else hookable_kind(func)
        if known is None:
            return run(*args, **kwargs)
        kind, writes = known
        table, counts, path, call, recorded = frame
        hooks = table.get(kind)
        if hooks is None and (recorded is None or kind not in PRODUCTS):
            return run(*args, **kwargs)
        if not carries_floats(args, kwargs):
            return run(*args, **kwargs)
        index = counts.get(kind, 0)
        counts[kind] = index + 1
        eager = not torch.compiler.is_compiling()
        place: int | None = index
        if self.route is not None:
            place = None if hooks is None else self.route.place((path, call, kind), index, args, kwargs)
        elif eager and recorded is not None and index >= recorded.get(kind, 0):
            place = self._place_unseen(path, call, kind, index, recorded.get(kind, 0))
        if hooks is None or place is None or place >= len(hooks):
            return run(*args, **kwargs)
        if eager:
            self._identify_weights(hooks[place], kind, func, args, kwargs)
            if kind in EXPERT_PRODUCTS or path in self.experts:
                self._count_tokens(kind, hooks[place], locate(kind, func, args, kwargs))
        return _run(hooks[place], kind, writes, run, args, kwargs)

    def _place_unseen(self, path: str, call: int, kind: str, index: int, known: int) -> int:
        """The hooks of an operator beyond the recorded ones: in a loop over experts, those of the last expert."""
        each = self.experts.get(path, {}).get(kind, 0)
        if 0 < each <= known:
            return known - each + (index - known) % each
        self._note_unseen(f"{path}#{call}/{kind}#{index}" if call else f"{path}/{kind}#{index}")
        return index

    def _note_unseen(self, operator: str) -> None:
        """Warn about an operator that was not recorded and has no quantizers. In training, other branches may run."""
        if self.root is not None and self.root.module.training:
            return
        self.warn(
            Problem(
                what="this operator was not recorded, so it runs in float",
                where=operator,
                fix="quantize with inputs that reach it (a longer loop, another branch), or keep it in float",
                code="unseen-operator",
            )
        )

    def _identify_weights(
        self, hooks: OpHooks, kind: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not hooks.inputs:
            return
        for port, _, tensor in locate(kind, func, args, kwargs):
            quantizer = hooks.inputs.get(port)
            owner = quantizer.owner if isinstance(quantizer, Alias) else quantizer
            if owner is None or owner.marking or not (owner.observing or (owner.enabled and self.watching)):
                continue
            with torch._C.DisableTorchFunction():  # hide this computation from other modes
                problem = identify_weight(owner, tensor)
            if problem is not None:
                self.warn(problem)

    def _count_tokens(self, kind: str, hooks: OpHooks, operands: list[tuple[str, Any, Tensor]]) -> None:
        """Count the uses of each expert in calibration, from the ends of their rows or from indices of experts."""
        grouped = kind in EXPERT_PRODUCTS
        quantizer = hooks.inputs.get("input1" if grouped else "input0")
        owner = quantizer.owner if isinstance(quantizer, Alias) else quantizer
        given = {port: tensor for port, _, tensor in operands}
        if owner is None or not owner.observing or ("input2" if grouped else "input1") not in given:
            return
        with torch._C.DisableTorchFunction():
            if grouped:
                rows = torch.diff(given["input2"].detach().cpu().long(), prepend=torch.zeros(1, dtype=torch.long))
            elif kind in SELECTING and not given["input1"].is_floating_point():
                rows = torch.bincount(given["input1"].reshape(-1).cpu(), minlength=given["input0"].shape[0])
            else:
                return
            operator = owner.site.rpartition(":")[0]
            self.tokens[operator] = self.tokens[operator] + rows if operator in self.tokens else rows

    def note_unseen_experts(self) -> None:
        """Warn about experts that got no token in calibration."""
        for operator, rows in self.tokens.items():
            unseen = (rows == 0).nonzero().flatten().tolist()
            if unseen:
                self.warn(
                    Problem(
                        what=f"{len(unseen)} of {len(rows)} experts got no token in calibration; their weights have "
                        "ranges of their own, and their inputs the range of the other experts' inputs",
                        where=operator,
                        value=unseen,
                        fix="calibrate with more data, or keep these experts in float",
                        code="unseen-expert",
                    )
                )
        self.tokens = {}

    def warn(self, problem: Problem) -> None:
        """Store a warning and log it once."""
        key = (problem.code or "", problem.where or "")
        if key not in self.warnings:
            self.warnings[key] = problem
            log.warning("%s", problem)

    @contextmanager
    def replaying(self, state: Any) -> Iterator[None]:
        """Replay operators without observing values again."""
        following = [quantizer for quantizer in self.quantizers.values() if quantizer.following]
        for quantizer in following:
            quantizer.replayed = True
        try:
            with super().replaying(state):
                yield
        finally:
            for quantizer in following:
                quantizer.replayed = False

    def snapshot(self) -> Any:
        """The state of the forward, for operators that run again from here (gradient checkpointing)."""
        return dict(self.calls), _copied(self.frame)

    def restore(self, state: Any) -> None:
        """Return to a snapshot."""
        calls, frame = state
        self.calls, self.frame = dict(calls), _copied(frame)

    def hooks_at(self, op: Op) -> OpHooks | None:
        """The hooks of one recorded operator."""
        name = SiteName.parse(op.site("output"))
        tables = self.tables.get(name.path)
        if tables is None or not any(port.is_floating for port in op.ports):
            return None
        entries = tables[min(name.call, len(tables) - 1)].get(op.kind, [])
        return entries[name.index] if name.index < len(entries) else None

    def run(self, op: Op, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one recorded operator separately, as `call` does within a forward."""
        hooks = self.hooks_at(op)
        if hooks is None:
            return func(*args, **kwargs)
        return _run(hooks, op.kind, op.inplace, func, args, kwargs)


def topk_by_index(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """`torch.topk` that selects the lowest indices among equal values.

    >>> topk_by_index(torch.tensor([1.0, 2.0, 1.0, 1.0]), 2).indices
    tensor([1, 0])
    """
    if k > (input.shape[dim] if input.dim() else 1):
        return torch.topk(input, k, dim, largest, sorted)  # raises torch's own error
    values, indices = torch.sort(input, dim=dim, descending=largest, stable=True)
    if not input.dim():
        return torch.return_types.topk((values, indices))
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


def _run(hooks: OpHooks, kind: str, writes: bool, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = kwargs.get("out")
    if out is not None:  # quantizers must also change `out`, which the caller may use
        rest = {name: value for name, value in kwargs.items() if name != "out"}
        return _write_into(out, _run(hooks, kind, writes, func, args, rest))
    if hooks.folded is not None:
        x = hooks.folded.norm_output(args[0] if args else kwargs["input"])
        if x is not None:
            return x if hooks.output is None else hooks.output(x)
    writes = writes or kwargs.get("inplace") is True
    if writes and not args:  # F.relu(input=x, inplace=True)
        kwargs = dict(kwargs)
        args = (kwargs.pop("input"),)
    target = args[0] if writes else None
    if target is not None:
        # Quantizers and autograd need the old values, so the function writes to a copy.
        args = (target.clone(), *args[1:])
    if kind == "relu" and hooks.output is not None and not hooks.inputs:
        # One pass for both. (A module's `relu`, and the in-place one, arrive as F.relu or torch.relu_.)
        result = hooks.output(args[0] if args else kwargs["input"], relu=True)
        return result if target is None else target.copy_(result)
    new_args, new_kwargs = list(args), dict(kwargs)
    if hooks.inputs:
        for port, place, tensor in locate(kind, func, args, kwargs):
            quantizer = hooks.inputs.get(port)
            # A folded weight and its bias are quantized after folding.
            if quantizer is not None and not (hooks.fold is not None and port in ("weight", "bias")):
                put(new_args, new_kwargs, place, quantizer(tensor))
    if hooks.fold is not None:
        call = FoldedCall(func, new_args, new_kwargs, hooks.inputs.get("weight"), hooks.inputs.get("bias"))
        result = hooks.fold.run(call)
    elif hooks.kernel is not None:
        result = hooks.kernel(func, tuple(new_args), new_kwargs)
    else:
        result = func(*new_args, **new_kwargs)
    returned = result is not None
    if target is not None and not returned:  # x[i] = y
        result = new_args[0]
    if hooks.output is not None:
        result = _quantize_output(hooks.output, result)
    if target is not None:
        # The caller may use its own tensor instead of the result, so both must have the same values.
        if result.shape != target.shape:  # t_, squeeze_, unsqueeze_
            func(target, *args[1:], **kwargs)
        target.copy_(result)
        return target if returned else None
    return result


def _write_into(out: Any, result: Any) -> Any:
    """Copy the result of a function to the tensors given as `out`."""
    if isinstance(out, Tensor):
        if out.shape == result.shape:
            return out.copy_(result)
        return torch.ops.aten.clone.out(result, out=out)  # also resizes, as the function itself would
    for target, value in zip(out, result, strict=True):
        _write_into(target, value)
    return out


def _quantize_output(quantizer: Quantizer | Alias, result: Any) -> Any:
    if isinstance(result, Tensor):
        return quantizer(result)
    if isinstance(result, tuple) and result and isinstance(result[0], Tensor):
        return (quantizer(result[0]), *result[1:])
    return result
