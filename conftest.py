"""For tests and doctests: report a test that hangs, with its name and its stacks, instead of waiting forever.

pytest-timeout interrupts a test that waits in Python. It can't interrupt C code: its signal handler and its timer both
need the GIL. The watchdog of faulthandler is a C thread without that need. It fires a little later, writes the stacks
of all threads and ends the process; pytest-xdist then reports the test as failed and replaces the worker.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import pytest_timeout

import bitwright

# These modules import Triton, which is an extra.
_TRITON = ("quantization", "gemm", "convolution")
collect_ignore = [] if find_spec("triton") else [f"src/bitwright/kernels/triton/{name}.py" for name in _TRITON]

_STDERR = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("hang_grace", "seconds from a test's timeout to the end of its process", default="30")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STDERR] = os.dup(2)  # tests replace it


def pytest_sessionstart() -> None:
    """Import the package before pytest collects its doctests.

    With `--import-mode=importlib`, pytest creates a second copy of a module that nothing has imported yet, and sets it
    as an attribute of its package. The copy would replace a function of the same name, such as `quantizers.prepare`.
    """
    for name in bitwright.__all__:
        getattr(bitwright, name)


@contextmanager
def _watched(item: pytest.Item) -> Iterator[None]:
    """One phase of a test. Each has a watchdog of its own, as pytest cancels it when a phase fails."""
    seconds = pytest_timeout._get_item_settings(item).timeout
    if seconds:
        grace = float(item.config.getini("hang_grace"))
        faulthandler.dump_traceback_later(seconds + grace, exit=True, file=item.config.stash[_STDERR])
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with _watched(item):
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with _watched(item):
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    with _watched(item):
        yield
