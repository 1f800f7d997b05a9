"""Intercept every operator call of a model's forward, together with the module that makes it."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import get_ident
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.overrides import TorchFunctionMode

from bitwright.core.errors import BitwrightError

checkpointing: Any = torch.utils.checkpoint

_running = threading.local()


@contextmanager
def running(interceptor: Any) -> Iterator[None]:
    """Make this interceptor the active one of the current thread."""
    before = getattr(_running, "interceptor", None)
    _running.interceptor = interceptor
    try:
        yield
    finally:
        _running.interceptor = before


def follow_checkpoints() -> None:
    """Intercept activation checkpoints that run again in the backward pass. Called when a model is prepared."""
    if getattr(checkpointing, "_bitwright", False):
        return
    reentrant = getattr(checkpointing, "CheckpointFunction", None)
    others = getattr(checkpointing, "_checkpoint_without_reentrant_generator", None)
    if reentrant is None or others is None:  # an incompatible torch version; checkpoints are not intercepted
        return
    apply = reentrant.apply

    @wraps(apply)
    def apply_seen(function: Any, *args: Any) -> Any:
        return apply(_replayed(function), *args)

    @wraps(others)
    def generate_seen(function: Any, *args: Any, **kwargs: Any) -> Any:
        return others(_replayed(function), *args, **kwargs)

    reentrant.apply = apply_seen
    checkpointing._checkpoint_without_reentrant_generator = generate_seen
    checkpointing._bitwright = True


def _replayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function so that a rerun in the backward pass starts from the state it had in the forward."""
    interceptor = getattr(_running, "interceptor", None)
    if interceptor is None:
        return function
    state = interceptor.snapshot()
    if state is None:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        if interceptor.active:  # within the forward
            return function(*args, **kwargs)
        with interceptor.replaying(state):
            return function(*args, **kwargs)

    return run


# Python functions of torch that call operators we need to intercept. They check `has_torch_function…` first and would
# cause an infinite recursion, so we run a copy of the function in which these checks return False.
_COMPOSITES: tuple[Any, ...] = (F.multi_head_attention_forward,)


def _no(*_: Any) -> bool:
    return False


def _without_dispatch_checks(func: Any) -> Any:
    checks = {name: _no for name in func.__globals__ if name.startswith("has_torch_function")}
    twin = FunctionType(
        func.__code__, {**func.__globals__, **checks}, func.__name__, func.__defaults__, func.__closure__
    )
    twin.__kwdefaults__ = func.__kwdefaults__
    return twin


COMPOSITES: dict[Any, Any] = {func: _without_dispatch_checks(func) for func in _COMPOSITES}


_UNFLATTEN = torch.Tensor.unflatten


class Interceptor:
    """Receives each module entry and each torch function call. Subclasses override the methods."""

    def __init__(self) -> None:
        self.active = False
        self.enabled = True
        self.thread = 0  # the thread of the running forward

    def begin(self) -> None:
        """An outermost forward starts."""

    def enter(self, path: str) -> Any:
        """A module starts. The return value is passed to `leave`."""
        raise NotImplementedError

    def leave(self, token: Any) -> None:
        """The module ends."""
        raise NotImplementedError

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch function is called. Return its result."""
        raise NotImplementedError

    def snapshot(self) -> Any:
        """The state of the forward; None if reruns in the backward pass need no interception."""
        return None

    def restore(self, state: Any) -> None:
        """Return to a snapshot."""

    @contextmanager
    def replaying(self, state: Any) -> Iterator[None]:
        """Intercept operators of a finished forward while they run again in the backward pass."""
        thread, self.thread, self.active = self.thread, get_ident(), True
        before = self.snapshot()
        self.restore(state)
        try:
            with running(self), _OperatorMode(self):
                yield
        finally:
            self.restore(before)
            self.thread, self.active = thread, False


class _OperatorMode(TorchFunctionMode):
    def __init__(self, interceptor: Interceptor) -> None:
        super().__init__()
        self.interceptor = interceptor

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in COMPOSITES:
            with self:
                return COMPOSITES[func](*args, **(kwargs or {}))
        if func is _UNFLATTEN:
            func = torch.unflatten
        return self.interceptor.call(func, args, kwargs or {})


def bare(model: nn.Module) -> nn.Module:
    """The model that `torch.compile` wraps, or the model itself."""
    if type(model).__name__ != "OptimizedModule":
        return model
    inner: nn.Module = model._modules.get("_orig_mod") or model
    return inner


class ForwardShim:
    """Replaces `module.forward`. Can be pickled and deep-copied with its module."""

    def __init__(self, module: nn.Module, path: str, interceptor: Interceptor) -> None:
        self.module = module
        self.path = path
        self.interceptor = interceptor
        self.inner: Callable[..., Any] | None = module.__dict__.get("forward")  # an override by other code
        self.compiled = (
            bare(module) is not module
        )  # whether torch.compile compiles it: its operators can't be intercepted
        self.stand_in: type[nn.Module] | None = None  # a class with a forward that replaces the module's

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.compiled:
            return bare(self.module)(*args, **kwargs)
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        if self.stand_in is not None and self.interceptor.active:
            return self.stand_in.forward(self.module, *args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, with interception."""
        interceptor = self.interceptor
        if args and args[0] is self.module:  # bound like a method, for example by Accelerate's unwrap_model
            args = args[1:]
        if not interceptor.enabled:
            return self._forward(*args, **kwargs)
        if interceptor.active:
            if not torch.compiler.is_compiling() and interceptor.thread != get_ident():
                # Torch function modes are thread-local, so this forward would not be intercepted.
                raise BitwrightError(
                    "this model is running in another thread",
                    where=self.path or None,
                    value=type(self.module).__name__,
                    fix="use a copy.deepcopy of the model in each thread",
                    code="used-in-another-thread",
                )
            token = interceptor.enter(self.path)
            try:
                return self._forward(*args, **kwargs)
            finally:
                interceptor.leave(token)
        # The outermost call: of the complete model, or of a submodule that the user calls directly.
        interceptor.active = True
        if not torch.compiler.is_compiling():
            interceptor.thread = get_ident()
        interceptor.begin()
        token = interceptor.enter(self.path)
        try:
            if torch.compiler.is_compiling():
                with _OperatorMode(interceptor):
                    return self._forward(*args, **kwargs)
            with running(interceptor), _OperatorMode(interceptor):
                return self._forward(*args, **kwargs)
        finally:
            interceptor.leave(token)
            interceptor.active = False

    # torch.export and inspect read the code and signature of a forward.
    @property
    def __code__(self) -> CodeType:
        code: CodeType = (self.inner or type(self.module).forward).__code__
        return code

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.inner or type(self.module).forward.__get__(self.module))


def install(model: nn.Module, interceptor: Interceptor, paths: Iterable[str] | None = None) -> None:
    """Replace the forward of the modules at `paths` (default: all) by shims."""
    wanted = None if paths is None else set(paths)
    for path, module in list(model.named_modules()):
        if wanted is None or path in wanted:
            module.__dict__["forward"] = ForwardShim(module, path, interceptor)


def uninstall(model: nn.Module, interceptor: Interceptor) -> None:
    """Remove the shims of this interceptor and restore the previous forwards."""
    for module in model.modules():
        shim = module.__dict__.get("forward")
        if isinstance(shim, ForwardShim) and shim.interceptor is interceptor:
            if shim.inner is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = shim.inner
