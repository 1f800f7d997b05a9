"""Arithmetic as one loop instead of many: torch.compile for small functions of tensors, inside a model that isn't.

A chain of elementwise operators reads and writes its tensor once per operator; compiled, it does so once. The
functions are compiled when they are first used, with sizes left open, so that few variants serve all models. Where
no compiler works, that is said once and the same functions run as they are.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_log = logging.getLogger(__name__)

SMALL = 1 << 14
"""Tensors with fewer elements aren't worth a call into compiled code."""


class _Switch(threading.local):
    on = False


_switch = _Switch()
_broken: list[str] = []  # why compiling was given up in this process


@contextmanager
def arithmetic_compiled(on: bool) -> Iterator[None]:
    """While this lasts, kernels that are called in this thread run compiled (or not)."""
    before = _switch.on
    _switch.on = on
    try:
        yield
    finally:
        _switch.on = before


def wanted(elements: int) -> bool:
    """Whether a tensor of that many elements goes through compiled code now."""
    # What an outer torch.compile or torch.export traces is inlined there.
    return _switch.on and not _broken and elements >= SMALL and not torch.compiler.is_compiling()


class Kernel:
    """A pure function of tensors, and its compiled twin."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.compiled: Callable[..., Any] | None = None

    def __call__(self, *inputs: Any, fused: bool) -> Any:
        """Run it, compiled if `fused`."""
        if fused and not _broken:
            if self.compiled is None:
                # fullgraph: too many variants are an error here, which is reported, and no silent eager run
                self.compiled = torch.compile(self.function, dynamic=True, fullgraph=True)
            try:
                return self.compiled(*inputs)
            except Exception as error:  # whatever a machine's compiler can fail with; eager raises what isn't its fault
                give_up(error)
        return self.function(*inputs)


def give_up(error: Exception) -> None:
    """No compiled arithmetic from here on, in this process."""
    if not _broken:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        _broken.append(reason)
        _log.warning(
            "the quantizers' arithmetic can't be compiled on this machine, so it runs uncompiled, with the same "
            "results, but slower: %s",
            reason,
        )


def compiling_works() -> bool:
    """Whether nothing has failed so far."""
    return not _broken
