"""The attached state of a prepared model: which quantizers stand where, and what runs at each call."""

from __future__ import annotations

from types import MethodWrapperType
from typing import Any

from torch import Tensor, nn

from bitwright.attach.folding import Fold
from bitwright.attach.quantizer import Quantizer
from bitwright.graph import Op
from bitwright.graph.functions import KINDS, carries_floats, locate, put
from bitwright.graph.intercept import ForwardShim, Interceptor
from bitwright.graph.naming import SiteName
from bitwright.plan import Plan

CONTAINER = "bitwright"  # the child of the model that holds all quantizers: keys are `bitwright.<site>.scale`


class Alias:
    """A second site of a quantizer: same grid, own name."""

    def __init__(self, owner: Quantizer, site: str) -> None:
        self.owner = owner
        self.site = site

    def __call__(self, x: Tensor, **also: Any) -> Tensor:
        """Run the owner under this site's name."""
        result: Tensor = self.owner(x, self.site, **also)
        return result


class OpHooks:
    """What happens at one operator call."""

    def __init__(self) -> None:
        self.inputs: dict[str, Quantizer | Alias] = {}
        self.output: Quantizer | Alias | None = None
        self.fold: Fold | None = None
        self.kernel: Any = None  # runs the operator in its place
        self.folded: Fold | None = None  # this operator is a norm that another one has folded in


# path → per call of that module → kind → per occurrence
Table = dict[str, list[OpHooks]]


class Container(nn.Module):
    """Holds the quantizers as a tree along the site names. An identity: nn.Sequential runs all children."""

    def __init__(self, attachment: Attachment | None = None) -> None:
        super().__init__()
        self.attachment = attachment  # at the root of the tree: trainers may hide the model's forward behind their own

    def forward(self, x: Any = None) -> Any:
        """Give back what came."""
        return x

    def add(self, site: str, quantizer: Quantizer) -> None:
        """Put a quantizer at the end of its path; in `_modules`, as a site may be named like an attribute."""
        *branches, leaf = site.split(".")
        here: nn.Module = self
        for branch in branches:
            if branch not in here._modules:
                here._modules[branch] = Container()
            child = here._modules[branch]
            assert child is not None
            here = child
        here._modules[leaf] = quantizer


class Attachment(Interceptor):
    """Runs quantizers at the operators of one prepared model. All state is here: nothing is process-wide."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.quantizers: dict[str, Quantizer] = {}
        self.shared: dict[str, str] = {}  # site → the site whose quantizer it uses
        self.folds: dict[str, Fold] = {}  # by the site of the folded bias
        self.kernels: dict[str, Any] = {}  # by operator
        self.tables: dict[str, list[Table]] = {}
        self.root: ForwardShim | None = None  # the model's own, whatever a trainer wraps around it
        self.calls: dict[str, int] = {}
        self.frame: tuple[Table, dict[str, int]] | None = None

    def begin(self) -> None:
        """A forward starts: nothing was called yet."""
        self.calls = {}
        self.frame = None

    def enter(self, path: str) -> Any:
        """The operators of this module come next."""
        before = self.frame
        tables = self.tables.get(path)
        if tables is None:
            self.frame = None
            return before
        call = 0
        if len(tables) > 1:
            call = self.calls.get(path, 0)
            self.calls[path] = call + 1
            # More calls than were recorded (a longer sequence): the last known one stands for the rest.
            call = min(call, len(tables) - 1)
        self.frame = (tables[call], {})
        return before

    def leave(self, token: Any) -> None:
        """Back to the caller's operators."""
        self.frame = token

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function, with quantizers if the plan has any here."""
        frame = self.frame
        if frame is None:
            return func(*args, **kwargs)
        known = None if isinstance(func, MethodWrapperType) else KINDS.get(func)
        if known is None:
            return func(*args, **kwargs)
        kind, writes = known
        hooks = frame[0].get(kind)
        if hooks is None or not carries_floats(args, kwargs):
            return func(*args, **kwargs)
        index = frame[1].get(kind, 0)
        frame[1][kind] = index + 1
        if index >= len(hooks):
            return func(*args, **kwargs)
        return _run(hooks[index], kind, writes, func, args, kwargs)

    def hooks_at(self, op: Op) -> OpHooks | None:
        """What happens at one recorded operator."""
        name = SiteName.parse(op.site("output"))
        tables = self.tables.get(name.path)
        if tables is None or not any(port.is_floating for port in op.ports):
            return None
        entries = tables[min(name.call, len(tables) - 1)].get(op.kind, [])
        return entries[name.index] if name.index < len(entries) else None

    def run(self, op: Op, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one recorded operator by itself, as `call` does within a forward."""
        hooks = self.hooks_at(op)
        if hooks is None:
            return func(*args, **kwargs)
        return _run(hooks, op.kind, op.inplace, func, args, kwargs)


def _run(hooks: OpHooks, kind: str, writes: bool, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if hooks.folded is not None:
        x = hooks.folded.norm_output(args[0] if args else kwargs["input"])
        if x is not None:
            return x if hooks.output is None else hooks.output(x)
    writes = writes or kwargs.get("inplace") is True
    target = args[0] if writes else None
    if target is not None:
        # What quantizers and autograd keep of the old numbers must stay as it is: let it write into a copy.
        args = (target.clone(), *args[1:])
    if kind == "relu" and hooks.output is not None and not hooks.inputs:
        # One pass for both. (`relu` of a module, and in place, comes as F.relu or as torch.relu_.)
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
        result = hooks.fold.run(func, new_args, new_kwargs, hooks.inputs.get("weight"), hooks.inputs.get("bias"))
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
        # The caller may go on with its own tensor instead of the result: it must hold the same numbers.
        target.copy_(result)
        return target if returned else None
    return result


def _quantize_output(quantizer: Quantizer | Alias, result: Any) -> Any:
    if isinstance(result, Tensor):
        return quantizer(result)
    if isinstance(result, tuple) and result and isinstance(result[0], Tensor):
        return (quantizer(result[0]), *result[1:])
    return result
