"""Memory that a process frees stays its own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from bitwright.core.environment import keep_freed_memory

CHILD = """
import ctypes, sys
from pathlib import Path
from bitwright.core.environment import keep_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
if sys.argv[1] == "keep":
    assert keep_freed_memory()
size = 24 << 20
block = libc.malloc(ctypes.c_size_t(size))
ctypes.memset(block, 1, size)
full = resident()
libc.free(ctypes.c_void_p(block))
sys.stdout.write(str((full - resident()) / size))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
@pytest.mark.parametrize(("word", "given_back"), [("keep", 0.0), ("plain", 1.0)])
def test_a_freed_block_stays(word: str, given_back: float) -> None:
    ran = subprocess.run([sys.executable, "-c", CHILD, word], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) == pytest.approx(given_back, abs=0.1)


def test_allocator_settings_are_linux_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert keep_freed_memory.__wrapped__() is False
