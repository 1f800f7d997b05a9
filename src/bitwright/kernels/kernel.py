"""What a kernel is: one class, registered once; profile, predict, planners and training know it from then on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from bitwright.graph import Op
from bitwright.plan import ComputeSpec
from bitwright.registry import KERNELS


class Kernel(ABC):
    """Runs operators of some kinds in one precision.

    It is given the call as the model makes it, and returns what the call would: autograd works through it.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    compiles: ClassVar[bool] = True
    """Whether torch.compile of a whole model looks into it, too."""
    has_compiled_arithmetic: ClassVar[bool] = False
    """Whether its own arithmetic is compiled, so that the process has torch's compiler in memory."""

    def __init__(self, spec: ComputeSpec, *, simulate: bool = False) -> None:
        self.spec = spec
        self.simulate = simulate
        self.floats: dict[str, str] = {}
        """Products of the backward pass that the plan wants low and that stay float, with the reason: after a call."""

    @classmethod
    def refuses(cls, op: Op, spec: ComputeSpec) -> str | None:
        """Why it can't run this operator; None if it can."""
        return None if op.kind in cls.kinds else f"{cls.name} has no kernel for {op.kind}"

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        """Why it can only be simulated on this device; None if it really runs there."""
        return None

    @classmethod
    def missing_for(cls, kind: str, device: torch.device) -> str | None:
        """The same for operators of one kind, where it differs by that."""
        return cls.missing(device)

    @classmethod
    def rounded(cls, weight: Tensor, kind: str, spec: ComputeSpec) -> Tensor | None:
        """The weight as its output sees it, for indicators that look at weights alone; None if it can't say."""
        return None

    @classmethod
    def seconds(cls, kind: str, shapes: Mapping[str, tuple[int, ...]], spec: ComputeSpec) -> tuple[float, float] | None:
        """What a call with these shapes takes forward and backward where no profile has it; None if it can't say."""
        return None

    @abstractmethod
    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call."""


Made = TypeVar("Made", bound=type[Kernel])


def kernel(name: str, *kinds: str) -> Callable[[Made], Made]:
    """Register a class as the kernel of that name, for operators of these kinds."""

    def register(made: Made) -> Made:
        made.name, made.kinds = name, kinds
        KERNELS.register(name, made)
        return made

    return register
