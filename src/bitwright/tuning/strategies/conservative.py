"""conservative: from float, one kind of operator after the other."""

from __future__ import annotations

from bitwright.tuning.search import Asking, Search
from bitwright.tuning.strategies.fallback import one

_ORDER = ("conv", "matmul", "linear")


def conservative(search: Search) -> Asking:
    """Quantize convolutions, then matrix products, linears, and the rest; keep each kind with which the goal holds."""
    free = search.space.free
    kinds = sorted({op.kind for op in free}, key=lambda kind: (_place(kind), kind))
    quantized: set[str] = set()
    for kind in kinds:
        floats = [op.name for op in free if op.kind not in (*quantized, kind)]
        outcome = yield from one([search.space.floated(None, floats)])
        if outcome.passed:
            quantized.add(kind)


def _place(kind: str) -> int:
    return next((place for place, start in enumerate(_ORDER) if kind.startswith(start)), len(_ORDER))
