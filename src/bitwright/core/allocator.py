"""Memory that a process frees and needs again: kept, instead of given back to the system at every step.

glibc gives large blocks back as soon as they are free, and the system has to clear their pages when they are asked for
again. For activations that takes a good part of a training step on a CPU, more or less of it by chance: the limit moves
with what was freed before. With fixed limits steps are faster, and take the same time again and again.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_TRIM, _PAD, _MMAP = -1, -2, -3  # mallopt's numbers
_LARGEST = 32 << 20  # glibc takes no larger one: larger blocks come and go as before


@cache
def keep_freed_memory() -> bool:
    """Let this process keep what it frees; False where the C library isn't glibc."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return all(mallopt(name, value) == 1 for name, value in ((_MMAP, _LARGEST), (_TRIM, 2**31 - 1), (_PAD, _LARGEST)))
