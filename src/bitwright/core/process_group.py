"""Join and leave a torch.distributed process group without a deadlock.

With torch 2.13, a `DistributedDataParallel` that dies after `destroy_process_group()` can block its process forever:

1. A worker thread of gloo finishes an all-reduce. Its caller continues at once, while the thread still
   holds the finished work. The work stores the thread-local state of its caller, Python objects included.
2. Python frees the DDP. Its `Reducer` (C++) holds the last reference to the group, and pybind11 destroys a `Reducer`
   with the GIL held. The group's destructor joins gloo's threads.
3. The worker thread frees the work, needs the GIL for the stored Python object, and waits for step 2.

The Python object of a `ProcessGroup` is safe: its destructor releases the GIL first. So the rule is that a Python
reference to the group must outlive every `Reducer` of it. This module enforces the rule.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

__all__ = ["keep_group", "keep_groups", "leave_group", "process_group"]

_KEPT: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The group of each reducer. pybind11 calls weak references to an object after it has destroyed the C++ object, so a
group is released after its reducer."""


def keep_group(net: Any) -> None:
    """Keep a DDP's process group alive until the DDP's reducer is destroyed."""
    for part in (net.reducer, net.logger):  # the logger shares the reducer
        if part is not None:
            _KEPT[part] = net.process_group


def keep_groups() -> None:
    """`keep_group` for every DDP object in this process."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    from torch.nn.parallel import DistributedDataParallel

    # isinstance() would be slow (DDP has an abstract base class), and some proxies of torch warn about it
    for found in [one for one in gc.get_objects() if DistributedDataParallel in type(one).__mro__]:
        if "reducer" in vars(found):  # else its __init__ has failed
            keep_group(found)


def leave_group() -> None:
    """Destroy the default process group; any `DistributedDataParallel` may outlive it safely."""
    if dist.is_available() and dist.is_initialized():
        keep_groups()
        dist.destroy_process_group()


@contextmanager
def process_group(backend: str, **options: Any) -> Iterator[None]:
    """`init_process_group(backend, **options)`, left again at the end."""
    dist.init_process_group(backend, **options)
    try:
        yield
    finally:
        leave_group()
