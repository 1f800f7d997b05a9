"""`weight_costs(model, batches)`: the cost of each candidate format at each weight, from one pass with gradients.

To second order, rounding a weight adds ½ Σ h·(ŵ − w)² to the loss, where h is the diagonal of its Hessian. It is
estimated by the Fisher information: the squared gradient of the likelihood of labels that are drawn from the model's
own prediction. No candidate is evaluated by running the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.backends import DEFAULT_BACKEND, BackendTable, backend, place
from bitwright.backends.bit_budget import FormatCost, WeightCosts, stored_bits
from bitwright.core.arguments import Seed, strict
from bitwright.core.display import Progress
from bitwright.core.errors import BitwrightError, CalibrationError, PlanError, Problem
from bitwright.core.formats import Format
from bitwright.core.tensor_tree import as_call, batch_size, eval_mode, tensors_in
from bitwright.graph import Graph, capture
from bitwright.plan import Plan
from bitwright.ptq.step import round_weight
from bitwright.quantizers import attachment_of, prepare, strip, weights_may_change
from bitwright.workload.data import split

CANDIDATES = ("int4/group128", "int4/group32", "int8/group128")


@strict
def weight_costs(
    model: nn.Module,
    batches: Iterable[Any],
    target: str | BackendTable = DEFAULT_BACKEND,
    *,
    formats: Sequence[str] = CANDIDATES,
    keep_float: str | Iterable[str] = (),
    loss: Callable[[Any], Tensor] | None = None,
    graph: Graph | None = None,
    seed: Seed = 0,
    progress: Progress | None = None,
) -> WeightCosts:
    """The cost of each candidate format at each weight that the target quantizes; `make_plan(…, costs=…)` uses it.

    `batches` are inputs, of which each sample is run once forward and backward. `loss` maps the model's output to a
    number; by default it is the likelihood of labels drawn from the prediction (of logits; of other outputs, a random
    projection). Formats that don't fit a weight (blocks that don't divide it) are left out there.

    >>> import torch, bitwright
    >>> model, x = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 4)), torch.randn(8, 64)
    >>> costs = bitwright.weight_costs(model, [x], formats=["int4/group32", "int8/group32"])
    >>> plan = bitwright.make_plan(bitwright.capture(model, x), bits=6, costs=costs)
    >>> [str(plan.sites[site].format) for site in ("0:weight", "1:weight")]
    ['int4/group32/sym/full', 'int8/group32/sym/full']
    """
    table = backend(target)
    parsed = [str(table.weights.parse(text)) for text in formats]
    stream = list(batches)
    if not stream:
        raise CalibrationError("no batch to compute costs with", fix="give at least one batch", code="no-batches")
    graph = capture(model, stream[0]) if graph is None else graph
    keep = [keep_float] if isinstance(keep_float, str) else list(keep_float)
    plan = place(graph, table, weights=parsed[0], activations="float", keep_float=keep)
    names = _parameters(graph, plan)
    known = dict(model.named_parameters())
    shapes = {site: tuple(known[name].shape) for site, name in names.items()}
    moments, samples = _second_moments(model, stream, set(names.values()), loss, seed, progress)
    costs: dict[str, list[FormatCost]] = {site: [] for site in names}
    for format in parsed:
        whole = replace(plan, sites={site: replace(plan.sites[site], format=Format.parse(format)) for site in names})
        unfit = {problem.where for problem in whole.validate(graph) if problem.code == "group-size"}
        fitting = replace(whole, sites={site: spec for site, spec in whole.sites.items() if site not in unfit})
        for site, error in _errors(model, graph, fitting, names, moments) if fitting.sites else ():
            bits = stored_bits(Format.parse(format), shapes[site])
            costs[site].append(FormatCost(format=format, bits=bits, penalty=0.5 * error))
    bare = [
        Problem(what="no candidate fits this weight", where=site, value=shapes[site], code="no-candidate",
                fix=f"add a format such as int8/channel/sym, or keep_float={site.rpartition(':')[0]!r}")
        for site, own in costs.items() if not own
    ]  # fmt: skip
    if bare:
        raise PlanError(bare, title="weights without a candidate format")
    quantized = {id(known[name]) for name in names.values()}
    others = {id(p): p.numel() * p.element_size() for p in model.parameters() if id(p) not in quantized}
    return WeightCosts(
        sites={site: tuple(own) for site, own in costs.items()},
        elements={site: known[name].numel() for site, name in names.items()},
        other_bytes=sum(others.values()),
        samples=samples,
    )


def _parameters(graph: Graph, plan: Plan) -> dict[str, str]:
    """Weight site → its parameter."""
    found = {}
    for op in graph.ops:
        for port in op.ports:
            site = op.site(port.name)
            spec = plan.sites.get(site)
            if spec is not None and spec.share is None and port.sources[0].kind == "param":
                found[site] = port.sources[0].name
    return found


def _second_moments(
    model: nn.Module,
    batches: Iterable[Any],
    names: set[str],
    loss: Callable[[Any], Tensor] | None,
    seed: int,
    progress: Progress | None,
) -> tuple[dict[str, Tensor], int]:
    """The mean of g² of each weight, over samples. Each gradient is freed as soon as it is computed."""
    sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in model.named_parameters() if name in names}
    generator = torch.Generator().manual_seed(seed)
    samples = 0
    positions = 0
    with _gradients(model, sums), eval_mode(model), torch.enable_grad():
        for piece in split(batches, 1):
            args, kwargs = as_call(piece)
            output = model(*args, **kwargs)
            if loss is None:
                value, count = _likelihood(output, generator)
            else:
                value, count = loss(output), 1
            value.backward()
            samples += batch_size(piece)
            positions += count
            if progress is not None:
                progress(samples, None, "gradients")
    return {name: total / max(positions, 1) for name, total in sums.items()}, samples


@contextmanager
def _gradients(model: nn.Module, sums: dict[str, Tensor]) -> Iterator[None]:
    """Add the squares of gradients of these parameters to `sums`. Others get no gradient."""
    asked = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    hooks = []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in sums)
        if name in sums:

            def add(tensor: Tensor, name: str = name) -> None:
                if tensor.grad is not None:
                    sums[name].addcmul_(tensor.grad.float(), tensor.grad.float())
                    tensor.grad = None

            hooks.append(parameter.register_post_accumulate_grad_hook(add))
    kept = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name in kept:
        model.get_parameter(name).grad = None
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(asked[name])
            parameter.grad = kept.get(name)


def _likelihood(output: Any, generator: torch.Generator) -> tuple[Tensor, int]:
    """−Σ log p of labels drawn from the prediction, and the number of predictions. Squared gradients add up over them.

    A sum over positions has the sum of their squared gradients in expectation, because labels are independent.
    """
    found = [(path, tensor) for path, tensor in tensors_in(output) if tensor.is_floating_point()]
    if not found:
        raise BitwrightError("the model returns no floating-point tensor", fix="give a loss", code="no-output-tensor")
    named = [tensor for path, tensor in found if "logits" in path]
    tensor = (named or [found[0][1]])[0].float()
    if tensor.dim() >= 2 and tensor.shape[-1] > 1 and (named or tensor.dim() == 2):
        logs = torch.log_softmax(tensor, dim=-1).flatten(0, -2)
        labels = torch.multinomial(logs.detach().exp().cpu(), 1, generator=generator).to(logs.device)
        return -logs.gather(1, labels).sum(), len(logs)
    signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device) * 2 - 1
    return (tensor * signs).sum(), 1


@torch.no_grad()
def _errors(
    model: nn.Module, graph: Graph, plan: Plan, names: dict[str, str], moments: dict[str, Tensor]
) -> list[tuple[str, float]]:
    """Σ E[g²]·(ŵ − w)² at each site that its format in the plan fits."""
    prepare(model, plan, graph=graph)
    found = []
    try:
        with weights_may_change(model):
            for site, quantizer in attachment_of(model).quantizers.items():
                weight = model.get_parameter(names[site]).detach().float()
                change = round_weight(quantizer, weight).sub_(weight)
                found.append((site, float((change.square_() * moments[names[site]]).sum())))
    finally:
        strip(model)
    return found
