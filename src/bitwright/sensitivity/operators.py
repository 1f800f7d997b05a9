"""Put kernels, or what stands in for them, onto single operators of a float model for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from bitwright.attach import attachment_of, prepare, strip
from bitwright.graph import Graph
from bitwright.modes import evaluating
from bitwright.plan import ComputeSpec, Plan


class Operators:
    """The operators of a model, each of which can be run by something else."""

    def __init__(self, model: nn.Module, graph: Graph, names: Mapping[str, Any]) -> None:
        attachment = attachment_of(model)
        self._hooks = {name: attachment.hooks_at(graph.by_name[name]) for name in names}

    def put(self, stand_ins: Mapping[str, Any]) -> None:
        """These run by what is given for them, all others in float."""
        for name, hooks in self._hooks.items():
            assert hooks is not None
            hooks.kernel = stand_ins.get(name)


@contextmanager
def operators_of(model: nn.Module, graph: Graph, specs: Mapping[str, ComputeSpec]) -> Iterator[Operators]:
    """Take hold of these operators; in the end the model is as it was."""
    prepare(model, Plan(compute=specs), graph=graph, simulate=True)
    try:
        found = Operators(model, graph, specs)
        found.put({})
        yield found
    finally:
        strip(model)


@contextmanager
def as_in_training(model: nn.Module) -> Iterator[None]:
    """Batch norms by the batch, as where gradients are made, but no dropout; running statistics are put back."""
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with evaluating(model):
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.train()
        try:
            yield
        finally:
            for name, buffer in model.named_buffers():
                if name in kept:
                    buffer.copy_(kept[name])
