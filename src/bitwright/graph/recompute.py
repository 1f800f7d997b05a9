"""Gradient checkpointing: operators that run once more in the backward pass must be seen as they were the first time.

`torch.utils.checkpoint` runs a function again while gradients are computed. By then the model's forward has ended, no
mode is active, and operators would be counted from the beginning (or not be seen at all): the gradients would be those
of another function. torch has no public hook around that second run that serves both kinds of checkpoints, so the
function is wrapped where torch takes it. Outside of a prepared model's forward nothing changes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch.utils.checkpoint

checkpointing: Any = torch.utils.checkpoint

_running = threading.local()


@contextmanager
def running(interceptor: Any) -> Iterator[None]:
    """This interceptor sees the forward that is under way in this thread."""
    before = getattr(_running, "interceptor", None)
    _running.interceptor = interceptor
    try:
        yield
    finally:
        _running.interceptor = before


def follow_checkpoints() -> None:
    """Let checkpointed functions be seen in the backward pass; called once a model is prepared."""
    if getattr(checkpointing, "_bitwright", False):
        return
    reentrant = getattr(checkpointing, "CheckpointFunction", None)
    others = getattr(checkpointing, "_checkpoint_without_reentrant_generator", None)
    if reentrant is None or others is None:  # another torch: such models are refused by their own tests, not here
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
    """The function; when it runs again after the forward, from where it was in the forward."""
    interceptor = getattr(_running, "interceptor", None)
    if interceptor is None:
        return function
    state = interceptor.snapshot()
    if state is None:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        if interceptor.active:  # the forward itself
            return function(*args, **kwargs)
        with interceptor.replaying(state):
            return function(*args, **kwargs)

    return run
