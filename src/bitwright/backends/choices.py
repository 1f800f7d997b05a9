"""What a user may choose about a uniform plan; what isn't chosen is the backend's default."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

from bitwright.errors import PlanError, Problem


class Choices(TypedDict, total=False):
    """Keywords of `make_plan`, `place` and `quantize`."""

    weights: str | None
    """Format of weights, e.g. "int4/group32/sym"."""
    activations: str | None
    """Format of activations, e.g. "uint8/tensor/asym"."""
    observer: str | None
    """How activation ranges are found."""
    weight_observer: str | None
    """How weight ranges are found."""
    quantizer: str | None
    """The arithmetic at activations, and at weights if nothing else is said; "plain" if not said."""
    weight_quantizer: str | None
    """The arithmetic at weights; if not said, what goes with `quantizer` (pact: dorefa)."""
    edges: int | None
    """Bits of the first and the last operator with a weight, and of what they read; by default the backend's."""
    keep_float: Iterable[str]
    """Patterns of operators that stay float."""
    bn: int | None
    """How batch norms are folded: -1 not at all, 0 to 4 by that strategy (docs/folding.md); 4 if not said."""
    saturating: bool | None
    """Whether the deploying machine's 8-bit products saturate; None asks this one."""


def patterns_of(choices: Choices) -> list[str]:
    """The patterns of `keep_float`; a single string is one pattern, not a list of letters."""
    given = choices.get("keep_float") or ()
    return [given] if isinstance(given, str) else list(given)


def refuse_beside_plan(choices: Choices) -> None:
    """A plan has all choices in it: any that is given beside it would be ignored."""
    given = [name for name, value in choices.items() if value is not None and value != [] and value != ()]
    if given:
        raise PlanError(
            [
                Problem(
                    what="a plan already decides this, so this argument would be ignored",
                    where=name,
                    value=choices.get(name),
                    fix="change the plan, or leave out either `plan` or this argument",
                    code="ignored-argument",
                )
                for name in given
            ],
            title="arguments beside a plan",
        )
