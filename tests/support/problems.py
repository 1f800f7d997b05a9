"""Checks on errors: their codes, locations and the facts they mention, never their wording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bitwright import BitwrightError


@contextmanager
def raises_problem(
    code: str, *, where: object = None, mentions: object = None, kind: type[BitwrightError] = BitwrightError
) -> Iterator[pytest.ExceptionInfo[BitwrightError]]:
    """Check that the block raises an error with this code, at this location.

    `mentions` is a fact that the message must contain: a name, a number or a suggested name.
    """
    with pytest.raises(kind) as raised:
        yield raised
    error = raised.value
    assert code in error.codes, error
    found = [problem for problem, own in zip(error.problems, error.codes, strict=True) if own == code]
    if where is not None:
        assert str(where) in [problem.where for problem in found], error
    if mentions is not None:
        assert str(mentions) in str(error), error
