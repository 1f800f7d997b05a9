"""Factors per channel between a norm (or a linear) and the linears that read it: where SmoothQuant and AWQ work.

x/s and W·s give what x and W gave. The division is free where something before can take it: the weight and bias of a
layer norm or an RMS norm, or of a linear that only one other linear reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bitwright.graph import Op, Source
from bitwright.graph.tape import Call, plainly
from bitwright.ptq.pairs import divide_outputs, find_pairs, multiply_inputs
from bitwright.ptq.work import Work

_NORMS = ("layer_norm", "rms_norm")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Linears that read the same channels, and what makes them."""

    maker: Op
    readers: tuple[Op, ...]

    def divide(self, work: Work, by: Tensor) -> None:
        """Move the factors: smaller activations, larger weights."""
        if self.maker.kind in _NORMS:
            for port in ("weight", "bias"):
                parameter = work.weight_of(self.maker, port)
                if parameter is not None:
                    with torch.no_grad():
                        parameter.div_(by.to(parameter.dtype))
        else:
            divide_outputs(work, self.maker, by)
        for reader in self.readers:
            multiply_inputs(work, reader, by)


def find_groups(work: Work) -> list[Group]:
    """All groups whose readers have quantized weights, in the order of the graph; near misses are noted."""
    groups = []
    quantized = {weight.op.name for weight in work.weights()}
    for op in work.graph.ops:
        if op.kind not in _NORMS:
            continue
        readers = [pair[0] for pair in work.graph.consumers.get(Source("op", op.name), ())]
        if not any(reader.name in quantized for reader in readers):
            continue
        problem = _problem(work, op, readers)
        if problem is not None:
            work.skipped[op.name] = problem
        else:
            groups.append(Group(maker=op, readers=tuple(readers)))
    left = dict(work.skipped)
    for pair in find_pairs(work):
        if pair.second.kind == "linear" and pair.clip is None and pair.second.name in quantized:
            groups.append(Group(maker=pair.first, readers=(pair.second,)))
    work.skipped = left  # that convolutions have no partner is no news here
    return groups


def _problem(work: Work, op: Op, readers: list[Op]) -> str | None:
    if Source("op", op.name) in work.graph.output_sources or any(reader.kind != "linear" for reader in readers):
        return "others than linears read it, too"
    if work.weight_of(op) is None:
        return "the norm has no weight to take the factor"
    owners = [(op, "weight"), (op, "bias"), *((reader, "weight") for reader in readers)]
    for owner, name in owners:
        port = owner.port(name)
        if port is None:
            continue
        if work.weight_of(owner, name) is None or work.readers[port.sources[0]] > 1:
            return f"{owner.site(name)} is shared with other operators, or computed"
    return None


def inward(by: Tensor, unit: float) -> Tensor:
    """The factors, up to a common one: large activations must not grow by them, and small ones must not shrink.

    `unit` is `unit_of` the activations.
    """
    if unit == 1.0:
        return by
    return by / (by.amin() if unit > 1.0 else by.amax())


class Statistic(Protocol):
    """Something about the channels of an activation, gathered over batches."""

    def see(self, rows: Tensor) -> None:
        """One batch, as (positions, channels)."""


@torch.no_grad()
def gather(work: Work, groups: list[Group], batch: int, statistics: Mapping[str, Statistic]) -> None:
    """Let each group's statistic (by its maker) see what the group's readers read; one pass over the data."""
    sources = {group.readers[0].name: group.maker.name for group in groups}

    def look(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = sources.get(call.op.name)
        if name is not None:
            x = args[0] if args else kwargs["input"]
            statistics[name].see(x.reshape(-1, x.shape[-1]).float())
        return plainly(call, args, kwargs)

    work.watch(batch, look)


def weight_columns(work: Work, group: Group) -> Tensor:
    """The weights of all readers, one below the other: (outputs, channels)."""
    return torch.cat([_weight(work, reader).detach().float() for reader in group.readers])


def _weight(work: Work, op: Op) -> nn.Parameter:
    found = work.weight_of(op)
    assert found is not None  # `find_groups` has looked
    return found
