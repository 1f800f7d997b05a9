"""Run a model again from the middle: what comes before a chosen call is taken from a recorded run.

All runs that differ from a recorded one only from some call on share what it computed until then. A mode around the
model records the result of each torch function in order, and gives the results back up to the cut. The numbers of
one forward pass are kept in memory, no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_FIRST = -1  # what was there before the first call: inputs and parameters


class Recording(TorchFunctionMode):
    """The results of one run, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Any] = []
        self.position = 0
        self.cut = 0
        self._made: dict[int, int] = {}  # storage → the call that made it
        self._rewritten: list[tuple[int, int]] = []  # calls (made, written over): in between, numbers were others

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        here, self.position = self.position, self.position + 1
        if here < self.cut:
            return self.results[here]
        result = func(*args, **(kwargs or {}))
        if self.cut == 0 and here == len(self.results):
            self._keep(here, func, args, kwargs or {}, result)
        return result

    def _keep(self, here: int, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        self.results.append(result)
        for target in _written(func, args, kwargs):
            self._rewritten.append((self._made.get(_storage(target), _FIRST), here))
        for made in tree_leaves(result):
            if isinstance(made, Tensor):
                self._made.setdefault(_storage(made), here)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """The run inside is kept."""
        self.results, self._made, self._rewritten = [], {}, []
        self.position = self.cut = 0
        with self:
            yield

    @contextmanager
    def replaying(self, cut: int) -> Iterator[None]:
        """The run inside gets the kept results of the calls before `cut`; later ones are made."""
        self.position, self.cut = 0, self.usable(cut)
        try:
            with self:
                yield
        finally:
            self.cut = 0

    def usable(self, cut: int) -> int:
        """The last call up to `cut` before which all kept numbers are those of that moment.

        A tensor that is written over in place is kept as it is in the end: a run can't start where it was otherwise.
        """
        while True:
            earlier = min((made for made, over in self._rewritten if made < cut <= over), default=cut)
            if earlier == cut:
                return cut
            cut = max(earlier, 0)

    @property
    def bytes(self) -> int:
        """What the kept results hold, each storage once."""
        tensors = [x for x in tree_leaves(self.results) if isinstance(x, Tensor)]
        return sum({_storage(x): x.untyped_storage().nbytes() for x in tensors}.values())


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call writes into."""
    name = getattr(func, "__name__", "")
    special = name.startswith("__") and name.endswith("__")
    in_place = (name.startswith("__i") and special and name not in ("__invert__", "__index__", "__int__")) or (
        name.endswith("_") and not special
    )
    targets = [args[0]] if args and (in_place or name == "__setitem__" or kwargs.get("inplace") is True) else []
    targets += tree_leaves(kwargs.get("out"))
    return [target for target in targets if isinstance(target, Tensor)]
