"""The numbers by which the field knows the ways to fold a batch norm, and what each does in training.

All of them deploy the same arithmetic: w·γ/σ with running statistics, and no norm. −1 stands for not folding:
such a norm isn't in a plan's `fold` at all.
"""

from __future__ import annotations

NO_FOLDING = -1
DEFAULT_STRATEGY = 4
STRATEGIES = {
    0: "folded once: statistics, γ and β are frozen",
    1: "running statistics are frozen, γ and β train",
    2: "folded with the statistics of the batch (two convolutions)",
    3: "folded with running statistics, output corrected to those of the batch (two convolutions)",
    4: "folded for rounding only, then the norm itself runs",
}
# these never look at the batch: there is nothing to synchronise
WITHOUT_BATCH = (0, 1)


def known_strategies(*, none: bool = False) -> str:
    """What may stand there, for an error's fix."""
    known = {NO_FOLDING: "no folding", **STRATEGIES} if none else STRATEGIES
    return "use one of: " + "; ".join(f"{number} ({meaning})" for number, meaning in known.items())
