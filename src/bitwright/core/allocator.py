"""Keep freed memory in the process instead of returning it to the operating system.

glibc returns large blocks as soon as they are free, and the kernel clears their pages on the next allocation. On a CPU,
this takes a considerable and varying part of a training step because glibc adjusts its thresholds at run time. Fixed
thresholds make steps faster and their times reproducible.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_TRIM, _PAD, _MMAP = -1, -2, -3  # mallopt constants
_LARGEST = 32 << 20  # the largest threshold that glibc accepts; larger blocks are still returned


@cache
def keep_freed_memory() -> bool:
    """Set glibc's thresholds so that this process keeps freed memory. Return False if the C library isn't glibc."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return all(mallopt(name, value) == 1 for name, value in ((_MMAP, _LARGEST), (_TRIM, 2**31 - 1), (_PAD, _LARGEST)))
