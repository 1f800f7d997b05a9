"""Sites in exported programs: markers, and the mapping of an exported forward's operators to the original ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import SequenceMatcher
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bitwright.graph.interception import ForwardShim

if TYPE_CHECKING:
    from bitwright.quantizers.attachment import Attachment


# Defined without `custom_op`, whose wrappers take most of the time in which torch.export traces a marker.
_LIBRARY = torch.library.Library("bitwright", "FRAGMENT")
_LIBRARY.define("site(Tensor x, str site) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("site", lambda x, site: x.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("bitwright::site", lambda x, site: torch.empty_like(x), lib=_LIBRARY)


def site_marker(x: Tensor, site: str) -> Tensor:
    """Mark `x` as the input of the quantizer of `site`."""
    marked: Tensor = torch.ops.bitwright.site.default(x, site)
    return marked


@torch.library.custom_op("bitwright::snapshot", mutates_args=())
def snapshot(x: Tensor) -> Tensor:
    """A copy of `x`. It is a custom operator because compilers keep its result instead of recomputing it."""
    return x.clone()


@snapshot.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


Scope = tuple[str, int, str]  # module path, its call, kind of operator
CallKey = tuple[tuple[Any, ...], tuple[Any, ...]]  # (code location, kinds of tensors)

# Code of torch and of this package.
_OTHERS = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
_SHIM = ForwardShim.__call__.__code__


class Route:
    """Records the calls of one forward. With a `map`, returns the recorded operator for each call."""

    def __init__(self, map: dict[Scope, list[int | None]] | None = None) -> None:
        self.map = map
        self.steps: dict[Scope, list[CallKey]] = {}

    def place(self, scope: Scope, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """The operator of the `index`-th call in this scope; None for a call without a counterpart."""
        self.steps.setdefault(scope, []).append((_location(), _tensors(args, kwargs)))
        if self.map is None or scope not in self.map:
            return index
        known = self.map[scope]
        return known[index] if index < len(known) else None


@contextmanager
def routed(attachment: Attachment, route: Route) -> Iterator[None]:
    """Let forwards of the prepared model follow and record `route` in this block."""
    attachment.route = route
    try:
        yield
    finally:
        attachment.route = None


def align(usual: Route, exported: Route) -> dict[Scope, list[int | None]]:
    """For each scope with different calls: the original operator of each exported call."""
    found: dict[Scope, list[int | None]] = {}
    for scope, steps in exported.steps.items():
        known = usual.steps.get(scope, [])
        if [where for where, _ in steps] != [where for where, _ in known]:
            found[scope] = _match(known, steps)
    return found


def _match(usual: Sequence[CallKey], exported: Sequence[CallKey]) -> list[int | None]:
    """Match calls by instruction. Between matches, pair calls in order if both sides have the same kinds of tensors."""
    result: list[int | None] = [None] * len(exported)
    matcher = SequenceMatcher(None, [where for where, _ in usual], [where for where, _ in exported], autojunk=False)
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        if tag == "equal" or [t for _, t in usual[i:i_end]] == [t for _, t in exported[j:j_end]]:
            result[j:j_end] = range(i, i_end)
    return result


def _location() -> tuple[Any, ...]:
    """The instructions of the model's own code on the stack, up to the module's forward."""
    found: list[Any] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not _SHIM:
        code = frame.f_code
        if not code.co_filename.startswith(_OTHERS):
            found.append((code.co_filename, code.co_name, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return tuple((str(value.dtype), value.dim()) for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
