"""conservative: start from float and quantize one kind of operator at a time."""

from __future__ import annotations

from bitwright.tuning.search import CandidateGenerator, Search, evaluate_one

_ORDER = ("conv", "matmul", "linear")


def conservative(search: Search) -> CandidateGenerator:
    """Quantize convolutions, matrix products, linear operators and the rest; keep each kind that meets the goal."""
    free = search.space.free
    kinds = sorted({op.kind for op in free}, key=lambda kind: (_place(kind), kind))
    quantized: set[str] = set()
    for kind in kinds:
        floats = [op.name for op in free if op.kind not in (*quantized, kind)]
        outcome = yield from evaluate_one([search.space.floated(None, floats)])
        if outcome.passed:
            quantized.add(kind)


def _place(kind: str) -> int:
    return next((place for place, start in enumerate(_ORDER) if kind.startswith(start)), len(_ORDER))
