"""Every public name has a docstring with an example, and the suite runs that example."""

from __future__ import annotations

import doctest
import inspect
from functools import cache
from importlib import import_module

import pytest

import bitwright

#: Names that can't have a docstring of their own: a string and a type alias.
EXCEPTIONS = {"__version__", "Progress"}
NAMES = sorted(set(bitwright.__all__) - EXCEPTIONS)


@cache
def collected(module: str) -> dict[str, doctest.DocTest]:
    """The doctests of a module, as pytest collects them."""
    tests = doctest.DocTestFinder(exclude_empty=True).find(import_module(module))
    return {test.name: test for test in tests if test.examples}


def test_exceptions_are_names_without_their_own_docstring() -> None:
    assert set(bitwright.__all__) >= EXCEPTIONS
    assert isinstance(bitwright.__version__, str)
    assert not inspect.isclass(bitwright.Progress)


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_has_an_example_that_runs(name: str) -> None:
    public = getattr(bitwright, name)
    found = collected(public.__module__).get(f"{public.__module__}.{public.__qualname__}")
    assert found is not None, "no >>> example in the docstring"
    skipped = [one.source for one in found.examples if one.options.get(doctest.SKIP)]
    assert not skipped
    assert any(one.want for one in found.examples), "the example shows no result"
