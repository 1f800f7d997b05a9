"""Time every operator and quantizer of a training step, forward and backward.

Timestamps are taken within real steps, because an operator that is timed alone runs with warm caches. A forward call
has two timestamps. In backward, a timestamp is taken before each autograd node runs. The time until the next timestamp
belongs to this node, including the engine's work for it. So the parts add up to the whole.

Steps are repeated in alternation; a reference workload and the overhead of the timer are measured as well.
"""

from __future__ import annotations

import gc
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.core.tensor_tree import tensors_in
from bitwright.graph.graph import operator_name, primary_kind
from bitwright.graph.interception import Interceptor, install, uninstall
from bitwright.graph.operators import carries_floats, kind_of, locate
from bitwright.plan import Plan
from bitwright.profiling.cost_key import CallSpec, TensorSpec, describe, is_loss
from bitwright.profiling.device_profile import Host
from bitwright.profiling.execution import IMPLEMENTATIONS, Cast, Execution, OperatorUnderPlan, base_format
from bitwright.profiling.profiled_step import TimedStep
from bitwright.profiling.step_graph import loss_call
from bitwright.quantizers import Attachment, Quantizer, find_attachment
from bitwright.training.config import StepSettings

Key = tuple[str, str]
"""What is measured: (text of an operator, its format), or (text of a tensor, kind of its cast)."""


def operator_key(call: CallSpec, execution: Execution) -> Key:
    """The key of an operator. The result of a learned quantizer has a gradient, even if its input has none."""
    changed = {
        cast.port: spec.with_(grad=True) for cast in execution.casts if cast.learns and (spec := call.port(cast.port))
    }
    return call.key(changed), execution.format


def cast_key(cast: Cast, tensor: TensorSpec) -> Key:
    """The key of a cast."""
    return str(tensor), cast.kind


@dataclass
class SavedBytes:
    """What one kind of call saves for backward: tensors that exist anyway, and its own bytes."""

    ports: set[str] = field(default_factory=set)
    """Saved inputs, after their cast if they have one, and `output` for the result."""
    own: int = 0
    """Bytes that only this call holds."""


@dataclass(frozen=True)
class CallWork:
    """The inputs and outputs of one kind of call."""

    kind: str
    inputs: Mapping[str, TensorSpec]
    outputs: tuple[TensorSpec, ...]


@dataclass
class Sample:
    """The times of one step by key: total seconds and the number of calls."""

    forward: dict[Key, float] = field(default_factory=lambda: defaultdict(float))
    backward: dict[Key, float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[Key, int] = field(default_factory=lambda: defaultdict(int))
    saved: dict[Key, SavedBytes] = field(default_factory=dict)
    work: dict[Key, CallWork] = field(default_factory=dict)
    """Filled together with `saved`, in a step whose times aren't used."""
    engine: float = 0.0
    """Seconds from the call of backward to the first node."""
    nodes: int = 0
    operators: int = 0
    """The number of forward calls without the loss."""
    hooked: int = 0
    """The number of forward calls with quantizers."""


class _Plain(Interceptor):
    """Intercepts the calls of a float model without changing them."""

    def enter(self, path: str) -> Any:
        return None

    def leave(self, token: Any) -> None:
        pass

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


@contextmanager
def _overridden(target: Any, **methods: Callable[..., Any]) -> Iterator[None]:
    """Replace methods of one object within this block."""
    for name, method in methods.items():
        setattr(target, name, method)
    try:
        yield
    finally:
        for name in methods:
            delattr(target, name)


class _Frame:
    """A call in progress."""

    def __init__(
        self, key: Key, execution: Execution | None, kind: str, inputs: Iterable[tuple[str, TensorSpec]]
    ) -> None:
        self.key = key
        self.kind = kind
        self.inputs = inputs
        self.execution = execution
        self.nested = 0.0
        self.added = 0.0
        self.labels: dict[int, str] = {}
        self.kept: list[Tensor] = []


ACCUMULATE = "accumulate"


class StepTimer:
    """Times the operator calls of one model, float or prepared."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        settings: StepSettings,
        clock: Callable[[], float],
        *,
        host: Host | None = None,
    ) -> None:
        self.model = model
        self.plan = plan
        self.settings = settings
        self.clock = clock
        host = host or Host()
        self.hook = host.hook  # the cost of a timestamp in backward
        prepared = find_attachment(model) is not None
        # the cost of interception per call in a prepared model, without and with quantizers; predictions add it
        self.seen, self.hooked = (host.seen, host.hooked) if prepared else (0.0, 0.0)
        self.host, self.prepared = host, prepared
        self.primary = {path: primary_kind(module) for path, module in model.named_modules()}
        self.parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.executions: dict[tuple[str, str], Execution] = {}
        self.saving = False
        self._begin()

    def _begin(self) -> None:
        self.sample = Sample()
        self.owners: dict[Any, Key] = {}
        self.marks: list[tuple[Key, float]] = []
        self.handles: list[Any] = []
        self.frames: list[_Frame] = []
        self.place: tuple[str, int, dict[str, int]] = ("", 0, {})
        self.calls: dict[str, int] = {}

    # -- interception --------------------------------------------------------------------------------------

    @contextmanager
    def around(self) -> Iterator[None]:
        """Time the model's calls within this block."""
        attachment = find_attachment(self.model)
        target: Interceptor = attachment if attachment is not None else _Plain()
        if attachment is None:
            install(self.model, target)
        originals = {name: getattr(target, name) for name in ("begin", "enter", "leave", "call")}
        quantizers = list(attachment.quantizers.values()) if attachment is not None else []
        try:
            with ExitStack() as stack:
                stack.enter_context(
                    _overridden(
                        target,
                        enter=lambda path: (self._enter(path), originals["enter"](path)),
                        leave=lambda token: originals["leave"](self._leave(token)),
                        call=lambda func, args, kwargs: self._call(originals["call"], func, args, kwargs),
                    )
                )
                for quantizer in quantizers:
                    stack.enter_context(_overridden(quantizer, forward=self._quantizing(quantizer)))
                yield
        finally:
            if not isinstance(target, Attachment):
                uninstall(self.model, target)

    def _enter(self, path: str) -> Any:
        before = self.place
        number = self.calls.get(path, 0)
        self.calls[path] = number + 1
        self.place = (path, number, {})
        return before

    def _leave(self, token: Any) -> Any:
        self.place, inner = token
        return inner

    def _name(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        path, number, counts = self.place
        counted = kind if carries_floats(args, kwargs) else f"{kind}_int"
        index = counts.get(counted, 0)
        counts[counted] = index + 1
        return operator_name(path, number, counted, index, self.primary.get(path))

    # -- forward ---------------------------------------------------------------------------------------------

    def _call(self, inner: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = kind_of(func)
        if kind is None or self.frames:
            return inner(func, args, kwargs)
        call = describe(kind, func, args, kwargs)
        name = self._name(kind, args, kwargs)
        execution = self._execution(name, call)
        frame = _Frame(operator_key(call, execution), execution, kind, call.ports)
        frame.added = self.hooked if execution.casts else self.seen
        self.sample.operators += 1
        self.sample.hooked += bool(execution.casts)
        if self.saving:
            found = locate(kind, func, args, kwargs)
            frame.labels = {t.untyped_storage().data_ptr(): port for port, _, t in reversed(found)}
        return self._timed(frame, lambda: inner(func, args, kwargs))

    def _execution(self, name: str, call: CallSpec) -> Execution:
        known = self.executions.get((name, call.template))
        if known is None:
            settings = self.settings
            asked = OperatorUnderPlan(name, call, self.plan, settings.amp, settings.fuse)
            known = self.executions[(name, call.template)] = IMPLEMENTATIONS.execution(asked)
        return known

    def _quantizing(self, quantizer: Quantizer) -> Callable[..., Tensor]:
        forward = type(quantizer).forward

        def run(x: Tensor, site: str | None = None, **also: Any) -> Tensor:
            outer = self.frames[-1] if self.frames else None
            if outer is None or outer.execution is None:
                return forward(quantizer, x, site, **also)
            port = (site or quantizer.site).rpartition(":")[2]
            cast = outer.execution.cast_at(port)
            if cast is None:  # the module is called again: the plan has its weight at the first call
                return forward(quantizer, x, site, **also)
            for tensor in (x, also.get("factor")):  # earlier nodes belong to the operator
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                    self.own(tensor.grad_fn, outer.key)
            spec = TensorSpec.of(x)
            frame = _Frame(cast_key(cast, spec), None, "cast", [("input", spec)])
            if self.saving:
                frame.labels = {x.untyped_storage().data_ptr(): "input"}
            result: Tensor = self._timed(frame, lambda: forward(quantizer, x, site, **also))
            if self.saving:
                outer.labels[result.untyped_storage().data_ptr()] = port
            return result

        return run

    def _timed(self, frame: _Frame, run: Callable[[], Any]) -> Any:
        clock, sample = self.clock, self.sample
        self.frames.append(frame)
        try:
            t0 = clock()
            result = run()
            spent = clock() - t0
        finally:
            self.frames.pop()
        sample.forward[frame.key] += max(0.0, spent - frame.nested - frame.added)
        sample.calls[frame.key] += 1
        if self.frames:
            self.frames[-1].nested += spent
        for _, tensor in tensors_in(result):
            if tensor.grad_fn is not None:
                self.own(tensor.grad_fn, frame.key)
        if self.saving:
            self._note_saved(frame, result)
        if self.frames:  # our own work isn't part of the outer call
            self.frames[-1].nested += clock() - t0 - spent
        return result

    # -- backward --------------------------------------------------------------------------------------------

    def own(self, node: Any, key: Key) -> None:
        """Assign this node, and all nodes behind it without an owner, to this call."""
        waiting = [node]
        while waiting:
            node = waiting.pop()
            if node is None or node in self.owners:
                continue
            owner = key
            if node.name() == "torch::autograd::AccumulateGrad":
                owner = (str(TensorSpec.of(node.variable)), ACCUMULATE)
                self.sample.calls[owner] += 1
            self.owners[node] = owner
            self.handles.append(node.register_prehook(self._mark(owner)))
            waiting.extend(following for following, _ in node.next_functions)

    def _mark(self, key: Key) -> Callable[[Any], None]:
        marks, clock = self.marks, self.clock

        def mark(_: Any) -> None:
            marks.append((key, clock()))

        return mark

    # -- memory ----------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Tensor:
        if self.frames:
            self.frames[-1].kept.append(tensor)
        return tensor

    def _note_saved(self, frame: _Frame, result: Any) -> None:
        outputs = {t.untyped_storage().data_ptr() for _, t in tensors_in(result)}
        saved = SavedBytes()
        seen: set[int] = set()
        for tensor in frame.kept:
            place = tensor.untyped_storage().data_ptr()
            if place in seen:
                continue
            seen.add(place)
            if place in frame.labels:
                saved.ports.add(frame.labels[place])
            elif place in outputs:
                saved.ports.add("output")
            elif place not in self.parameters:
                saved.own += tensor.untyped_storage().nbytes()
        self.sample.saved[frame.key] = saved
        made = tuple(TensorSpec.of(tensor) for _, tensor in tensors_in(result))
        self.sample.work[frame.key] = CallWork(frame.kind, dict(frame.inputs), made)

    # -- one step --------------------------------------------------------------------------------------------

    def run(self, step: TimedStep, *, saving: bool = False) -> Sample:
        """Run and time one step. With `saving`, also record saved tensors; the times are then invalid."""
        self._begin()
        self.saving = saving
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        step.timer = self
        try:
            with self.around():
                if saving:
                    with hooks:
                        step()
                else:
                    step()
        finally:
            step.timer = None
            self.saving = False
            for handle in self.handles:
                handle.remove()
        sample, self.owners = self.sample, {}
        return sample

    def loss(self, run: Callable[[], Tensor], loss: Any, output: Any, target: Any) -> Tensor:
        """Time the loss like an operator."""
        call = loss_call(loss, output, target)
        frame = _Frame((call.key(), base_format(self.settings.amp)), None, call.kind, call.ports)
        if self.saving:
            frame.labels = {t.untyped_storage().data_ptr(): path or "output" for path, t in tensors_in(output)}
        result: Tensor = self._timed(frame, run)
        return result

    def backward(self, run: Callable[[], None]) -> None:
        """Run backward and compute the times of its nodes from their timestamps."""
        self.marks.clear()
        start = self.clock()
        run()
        end = self.clock()
        marks, sample = self.marks, self.sample
        if not marks:
            return
        sample.engine += marks[0][1] - start
        sample.nodes += len(marks)
        for (key, at), following in zip(marks, [*(at for _, at in marks[1:]), end], strict=True):
            sample.backward[key] += max(0.0, following - at - self.hook)
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.owners.clear()


Name = TypeVar("Name")


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable garbage collection, which would be counted as work of the measured code."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def interleaved(
    work: Mapping[Name, Callable[[], float]], *, rounds: int, warm: int = 2, most: float = 20.0
) -> dict[Name, float]:
    """Run all pieces of work in turn and return the typical seconds of each. Stop after `most` seconds in total."""
    taken: dict[Name, list[float]] = {name: [] for name in work}
    with gc_disabled():
        spent = 0.0
        for number in range(rounds + warm):
            for name, run in work.items():
                seconds = run()
                spent += seconds
                if number >= warm or rounds == 0:
                    taken[name].append(seconds)
            if spent > most and number >= warm + 2:
                break
    return {name: typical(values) for name, values in taken.items()}


def middle_half(values: Iterable[Name], key: Callable[[Name], Any] | None = None) -> list[Name]:
    """Return the values without the lowest and the highest quarter.

    >>> middle_half([9, 1, 2, 4, 3, 100, 5, 6])
    [3, 4, 5, 6]
    """
    ordered = sorted(values, key=key)  # type: ignore[type-var, arg-type]
    cut = len(ordered) // 4
    return ordered[cut : len(ordered) - cut]


def typical(values: Iterable[float]) -> float:
    """The mean of the middle half. Outliers don't count, but pauses that occur every other time do."""
    return statistics.fmean(middle_half(values))


@cache
def _tensors() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(16, 16, 32, 32, generator=generator)
    kernel = torch.randn(16, 16, 3, 3, generator=generator)
    return image, kernel, torch.randn(1 << 18, generator=generator)


@torch.no_grad()
def yardstick(clock: Callable[[], float]) -> float:
    """Seconds of a fixed reference workload: a convolution and some passes over memory."""
    image, kernel, flat = _tensors()
    start = clock()
    for _ in range(2):
        F.relu(F.conv2d(image, kernel, padding=1))
        (flat * 0.5).add_(1.0).round_()
    return clock() - start


@dataclass(frozen=True, kw_only=True)
class TimerOverhead:
    """The overhead of the timer in seconds: per forward call, per backward call, and of the loss.

    It consists of clock readings, name lookups and cache misses. It is small compared with operators of a millisecond,
    but a tenth of a step whose operators take 30 µs.
    """

    forward: float = 0.0
    backward: float = 0.0
    loss: float = 0.0


def timer_overhead(timer: StepTimer, sample: Sample, plain: Mapping[str, float]) -> TimerOverhead:
    """Compare the sum of a timed step, as a prediction computes it, with the phases of a plain step."""
    host, batches = timer.host, timer.settings.accumulate
    loss = sum(seconds for (text, _), seconds in sample.forward.items() if is_loss(text))
    operators = {key: seconds for key, seconds in sample.forward.items() if not is_loss(key[0])}
    between = host.between(sample.operators, sample.hooked, prepared=timer.prepared)
    started = batches * host.start(sample.operators // batches)
    forward = sum(operators.values()) + between - plain["forward"]
    backward = sum(sample.backward.values()) + started - plain["backward"]
    return TimerOverhead(
        forward=_per_call(operators, sample.calls, forward),
        backward=_per_call(sample.backward, sample.calls, backward),
        loss=(loss - plain["loss"]) / batches,
    )


def _per_call(times: Mapping[Key, float], calls: Mapping[Key, int], over: float) -> float:
    """Distribute `over` equally among the calls, but no call gives more than its own time.

    >>> _per_call({("a", ""): 6.0, ("b", ""): 1.0}, {("a", ""): 2, ("b", ""): 1}, 5.0)
    2.0
    """
    left, level = sum(calls[key] for key in times), 0.0
    for level, count in sorted((times[key] / calls[key], calls[key]) for key in times):
        if left * level >= over:
            return over / left
        over -= level * count
        left -= count
    return level


@dataclass(frozen=True)
class Fit:
    """Coefficients, R², and the largest relative error at held-out sizes."""

    coefficients: tuple[float, ...]
    r2: float
    held_out: float | None


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float], *, hold_out: int = 3) -> Fit:
    """Non-negative least squares, with errors weighted by the square root of the time.

    This weighting matches the spread of times on a machine with occasional pauses. The held-out error comes from a fit
    without every `hold_out`-th size; the result is fitted to all sizes.

    >>> found = fit([(n, 1.0) for n in range(1, 10)], [2.0 * n + 1.0 for n in range(1, 10)])
    >>> [round(c, 6) for c in found.coefficients], round(found.r2, 6)
    ([2.0, 1.0], 1.0)
    """
    x, y = np.asarray(rows, float), np.asarray(seconds, float)
    held = np.zeros(len(y), bool)
    if len(y) > 2 * x.shape[1]:
        held[1::hold_out] = True
    error = float(np.max(np.abs(x[held] @ _solve(x[~held], y[~held]) / y[held] - 1))) if held.any() else None
    coefficients = _solve(x, y)
    rest = y - x @ coefficients
    spread = float(np.sum((y - y.mean()) ** 2))
    return Fit(tuple(map(float, coefficients)), 1.0 - float(np.sum(rest**2)) / spread if spread else 1.0, error)


def _solve(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    from scipy.optimize import nnls  # imported here because it takes most of a second

    weights = 1.0 / np.sqrt(np.maximum(y, 1e-12))
    scaled = x * weights[:, None]
    sizes = np.maximum(np.abs(scaled).max(axis=0), 1e-300)  # columns differ by orders of magnitude
    solution: np.ndarray = nnls(scaled / sizes, y * weights)[0] / sizes
    return solution
