"""Every parameter of every architecture is quantized, or listed with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from automatic import AUTOMATIC, build_automatically
from torch import Tensor, nn

import bitwright as bw
from bitwright.quantizers import Quantizer, in_mode
from bitwright.quantizers.preparation import tapped

pytestmark = pytest.mark.filterwarnings("ignore")  # their code is not ours

FAST = {"llama", "mixtral", "clip", "qwen3_moe", "gpt_oss", "jamba"}
BUILT: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
    **{a.name: a.build for a in ARCHITECTURES},
    **{kind: lambda kind=kind: build_automatically(kind, AUTOMATIC[kind]) for kind in AUTOMATIC},  # type: ignore[misc]
}


def rounded_parameters(model: nn.Module, example: Any) -> set[int]:
    """The parameters that pass through a quantizer when the model runs, directly or as a view."""
    found: set[int] = set()

    def look(site: str, quantizer: Quantizer, x: Tensor) -> None:
        found.add(id(x if x._base is None else x._base))

    with torch.no_grad(), in_mode(model, "calibrate"), tapped(model, look):
        model(**example)
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else [pytest.mark.slow]) for n in BUILT])
def test_every_parameter_is_quantized_or_listed(name: str) -> None:
    model, example = BUILT[name]()
    graph = bw.capture(model, example)
    plan = bw.make_plan(graph, precision="w4a16", group=4) if divisible(graph, 4) else bw.make_plan(graph)
    listed = set(plan.float)
    reasons = {source.name: op.name for op in graph.ops for port in op.ports for source in port.sources}
    assert all(plan.float.values())
    bw.prepare(model, plan, graph=graph)
    rounded = rounded_parameters(model, example)
    assert rounded
    through: dict[str, set[str]] = {}
    for op in graph.ops:
        for port in op.ports:
            for source in port.sources:
                through.setdefault(source.name, set()).add(op.name)
    missing = []
    for parameter in graph.parameters:
        if id(model.get_parameter(parameter.names[0])) in rounded or listed & set(parameter.names):
            continue
        readers, open_ = set(), set(through.get(parameter.names[0], ()))
        while open_:  # also behind operators that only reshape or normalise the parameter
            reader = open_.pop()
            readers.add(reader)
            if graph.by_name[reader].constant:
                open_ |= through.get(reader, set()) - readers
        sites = {site.rpartition(":")[0] for site, spec in plan.sites.items() if spec.quantizes}
        if not readers & (listed | sites | set(plan.folds)):
            missing.append(parameter.names[0])
    assert not missing, (missing, reasons)
    stacks = [p for p in graph.parameters if len(p.shape) == 3 and "expert" in p.names[0]]
    floats = [p.names[0] for p in stacks if id(model.get_parameter(p.names[0])) not in rounded]
    assert not floats, "weights of experts stay in float"


def divisible(graph: bw.Graph, group: int) -> bool:
    """Whether every matrix can be divided into groups."""
    weights = [port.shape for op in graph.ops for port in op.ports if port.role == "weight"]
    return all(shape[-1] % group == 0 for shape in weights if len(shape) in (2, 3))
