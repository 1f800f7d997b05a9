"""Place quantizers: from a graph and a backend table to a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Unpack

from bitwright.backends.bit_budget import WeightCosts, budget_choices, with_budget
from bitwright.backends.decisions import Decisions
from bitwright.backends.precisions import Choices, choice_problems, patterns_of
from bitwright.backends.precisions import weight_format as format_of_weights
from bitwright.backends.table import DEFAULT_BACKEND, BackendTable, Guard, backend, check_plan, dynamic_table
from bitwright.backends.token_models import HEAD
from bitwright.core.arguments import strict
from bitwright.core.errors import FormatError, PlanError, Problem
from bitwright.core.formats import Format
from bitwright.core.registry import QUANTIZERS
from bitwright.graph import Graph, Op, Port, Source
from bitwright.graph.graph import SiteName, refuse_module_names
from bitwright.graph.operators import EXPERT_PRODUCTS, SELECTING, can_hook, channel_axis, is_product
from bitwright.plan import DEFAULT_STRATEGY, FoldSpec, Plan, SiteSpec

UNUSED = (
    "no recorded operator reads this parameter: the inputs don't use it, or it is read by code that can't be recorded"
)
_HEAD_GROUP = 32  # runtimes multiply weights of this group size with float inputs


def multiplies(op: Op) -> bool:
    """Whether an operator multiplies its inputs, rather than moving or scaling them."""
    return op.macs > 0 or is_product(op.kind)


def left_in_float(decisions: Decisions, sites: Mapping[str, SiteSpec]) -> dict[str, str]:
    """What isn't quantized: operator → reason in graph order, then parameters that no operator reads."""
    graph = decisions.graph
    quantized = _integer_readers(graph, sites)
    placed = _placed(sites)
    bare: dict[str, list[tuple[str, Port]]] = {}  # operator → parameters that it reads without a quantizer
    for parameter in graph.parameters:
        name = parameter.names[0]
        for op, port in readers(graph, Source("param", name)):
            if op.site(port.name) not in placed:
                bare.setdefault(op.name, []).append((name, port))
    found: dict[str, str] = {}
    parameters: dict[str, str] = {}
    for op in graph.ops:
        if op.name in decisions.float:
            found[op.name] = decisions.float[op.name]
        elif op.name in decisions.fold:
            continue
        elif op.name not in quantized:
            if multiplies(op) or op.name in bare:
                found[op.name] = _reason(op, decisions)
        elif op.name in bare:
            if any(op.site(port.name) in placed for port in op.ports):
                parameters |= {name: _float_operand(port, decisions) for name, port in bare[op.name]}
            else:  # reads integers and computes in float
                found[op.name] = _reason(op, decisions)
    return found | parameters | dict.fromkeys(unread_parameters(graph), UNUSED)


def unlisted(graph: Graph, plan: Plan) -> Iterator[Problem]:
    """Operators and parameters that are neither quantized nor listed in the plan."""
    quantized, placed = _integer_readers(graph, plan.sites), _placed(plan.sites)
    for op in graph.ops:
        if multiplies(op) and op.name not in quantized and op.name not in plan.float:
            yield _missing("operator", op.name)
    for parameter in graph.parameters:
        name = parameter.names[0]
        uses = list(readers(graph, Source("param", name)))
        if name in plan.float:
            continue
        if not uses:
            yield _missing("parameter", name)
        for op, port in uses:
            if op.site(port.name) not in placed and op.name not in plan.float and op.name not in plan.folds:
                yield _missing("parameter", f"{name} (read by {op.name})")


def readers(graph: Graph, source: Source) -> Iterator[tuple[Op, Port]]:
    """The operators that compute with a parameter, including through operators that only reshape parameters."""
    open_, seen = [source], {source}
    while open_:
        for op, port in graph.consumers.get(open_.pop(), ()):
            made = [Source("op", op.name, index) for index in range(len(op.outputs))]
            if op.constant and any(graph.consumers.get(one) for one in made):
                open_ += [one for one in made if one not in seen]
                seen.update(made)
            else:
                yield op, port


def unread_parameters(graph: Graph) -> list[str]:
    """Parameters that no recorded operator reads, by their first names."""
    names = (parameter.names[0] for parameter in graph.parameters)
    return [name for name in names if not graph.consumers.get(Source("param", name))]


def _integer_readers(graph: Graph, sites: Mapping[str, SiteSpec]) -> set[str]:
    """Operators that read a quantized tensor, through their own site or one at the producer's output."""
    placed = _placed(sites)
    made = {Source("op", op.name) for op in graph.ops if op.site("output") in placed}
    made |= {Source("op", name) for name in graph.selections if graph.by_name[name].site("input0") in placed}
    return {
        op.name
        for op in graph.ops
        if any(op.site(port.name) in placed or not made.isdisjoint(port.sources) for port in op.ports)
    }


def _placed(sites: Mapping[str, SiteSpec]) -> set[str]:
    return {site for site, spec in sites.items() if spec.quantizes}


def _float_operand(port: Port, decisions: Decisions) -> str:
    """Why a parameter of an operator with integer operands stays in float."""
    if port.role != "bias":
        return "its operator reads it in float"
    if decisions.table.bias != "int32":
        return f"{decisions.table.name} adds biases in float"
    return "added in float: the operator's input and weight give no grid for this bias"


def _reason(op: Op, decisions: Decisions) -> str:
    table = decisions.table
    if op.name in decisions.kept:
        return "kept in float by request"
    if op.name in decisions.selected or op.name in decisions.graph.selections:
        return f"{table.name} has no integer rule for weights of experts"
    if op.kind in SELECTING and op.ports[0].role == "weight":
        return "selects vectors, such as biases of experts, which are added in float"
    if op.constant:
        return "its result depends on parameters only, not on the input"
    if decisions.tokens is not None and (reason := decisions.tokens.float_reason(op)) is not None:
        return reason
    if op.name in decisions.quantized:
        return "none of its operands has a quantizer under this plan"
    if op.kind not in table.operators:
        return f"{table.name} has no integer rule for {op.kind}"
    return f"{table.name} runs {op.kind} in integers only next to other integer operators"


def _missing(what: str, name: str) -> Problem:
    return Problem(
        what=f"this {what} is neither quantized nor listed as float",
        where=name,
        fix="please report this problem together with the model",
        code="unlisted",
    )


class _SitePlacer:
    """Builds the sites of one plan."""

    def __init__(
        self,
        decisions: Decisions,
        activation: SiteSpec,
        weight: SiteSpec,
        guard: Guard | None,
        head_bits: int | None = None,
    ) -> None:
        self.decisions, self.graph, self.table = decisions, decisions.graph, decisions.table
        self.activation, self.weight, self.guard = activation, weight, guard
        self.head_bits = head_bits
        self.sites: dict[str, SiteSpec] = {}
        self.owner: dict[Source, str] = {}  # grid (by its representative) → the site with its quantizer
        self.tensor: dict[str, Source] = {}  # that site → the tensor it quantizes
        self.weights: dict[str, str] = {}  # parameter (by its first use) → the site with its quantizer
        self.weight_only: set[str] = set()  # weights of operators whose inputs stay in float
        self.mixed = self._mixed_weights()
        self.reader: dict[str, Op] = {}  # that site → the first operator that reads it

    def _mixed_weights(self) -> set[str]:
        """First uses of weights with quantized readers that use different channel axes."""
        axes: dict[str, set[int]] = {}
        for op in self.graph.ops:
            rule = self.decisions.quantized.get(op.name)
            for port in op.ports if rule is not None else ():
                if rule is not None and port.name in rule.weights and port.role == "weight":
                    first = self.graph.weight_owner.get(op.site(port.name), op.site(port.name))
                    axes.setdefault(first, set()).add(channel_axis(op.kind, port.name) % max(1, len(port.shape)))
        return {site for site, found in axes.items() if len(found) > 1}

    def plan(self, edges: int | None, *, narrower: bool) -> Plan:
        """The sites in graph order. `narrower`: apply the `edges` bits even where formats have more bits."""
        for op in self.graph.ops:
            for port in op.ports:
                site = op.site(port.name)
                if (op.name, port.name) in self.decisions.wanted:
                    self._place_input(op, port, site)
                elif op.name in self.decisions.quantized and port.name in self.decisions.quantized[op.name].weights:
                    self._place_weight(op, port, site)
            self._place_bias(op)
            source = Source("op", op.name)
            if self._at_output(source):
                self._place(op.site("output"), source, op.kind, self._reason(source))
        self.sites.update(self._idle_calls())
        if self.activation.format.is_plain_float:  # weight-only quantization
            self.sites = {site: spec for site, spec in self.sites.items() if self._is_weight(site)}
        if edges is not None:
            self._widen_edges(edges, narrower)
        self._widen_head()
        if self.guard is not None:
            self._guard_products(self.guard)
        fold = {norm: FoldSpec(into=into, strategy=self.decisions.bn) for norm, into in self.decisions.fold.items()}
        return Plan(sites=self.sites, fold=fold, float=left_in_float(self.decisions, self.sites))

    def _place(self, site: str, source: Source, kind: str, why: str) -> None:
        """Add a quantizer, or share that of the first tensor with this grid."""
        grid = self.decisions.grid(source)
        known = self.owner.setdefault(grid, site)
        if known == site:
            self.tensor[site] = source
            self.sites[site] = replace(self.activation, why=why)
            return
        if self.tensor[known] == source:
            why = "the same tensor"
        elif source.kind == "op" and source.name in self.decisions.carried:
            why = f"{kind} keeps the grid of its input"
        else:
            why = f"{self.table.name} has one grid for these tensors: codes pass without rescaling"
        self.sites[site] = SiteSpec(share=known, why=why)

    def _widen_edges(self, bits: int, narrower: bool) -> None:
        """Use other bits for the first and the last operator with a weight, as is usual for low-bit models."""
        weighted = [op for op in self.graph.ops if op.site("weight") in self.sites]
        for op in {op.name: op for op in (*weighted[:1], *weighted[-1:])}.values():
            for site in (op.site("weight"), self._feeding(op)):
                site = self.sites[site].share or site if site in self.sites else None
                if site is None or self.sites[site].format.bits == bits:
                    continue
                spec = self.sites[site]
                if spec.format.bits < bits or narrower:
                    why = "; ".join(t for t in (spec.why, f"{bits} bits at the first and last operator") if t)
                    self.sites[site] = replace(spec, format=spec.format.with_bits(bits), why=why)

    def _widen_head(self) -> None:
        """Use other bits for the operator that predicts tokens."""
        tokens = self.decisions.tokens
        if tokens is None or self.head_bits is None:
            return
        head = self.graph.by_name[tokens.head]
        for port in head.ports:
            site = head.site(port.name)
            spec = self.sites.get(site)
            if spec is None or spec.share is not None or port.role != "weight":
                continue
            format, why = spec.format.with_bits(self.head_bits), f"{self.head_bits} bits: {HEAD}"
            if self.activation.format.dynamic and self._free_input(head):
                self.weight_only.add(site)
                format, why = self._in_groups(format, port), f"{why}, so its input stays in float"
                self.sites[site] = replace(spec, format=format, why=why)
            elif format != spec.format:
                self.sites[site] = replace(spec, format=format, why=why)

    def _free_input(self, op: Op) -> bool:
        """Leave the input of an operator in float, and its bias, if no other operator reads that input."""
        source, site = self.decisions.feeding(op), self._feeding(op)
        if source is None or site not in self.sites or any(spec.share == site for spec in self.sites.values()):
            return False
        if len(self.graph.consumers[source]) > 1 or source in self.graph.output_sources:
            return False
        del self.sites[site]
        self.sites.pop(op.site("bias"), None)
        return True

    def _in_groups(self, format: Format, port: Port) -> Format:
        """The format with a scale per group if the target can store that and groups divide the weight."""
        wanted = f"{format.name}/group{_HEAD_GROUP}"
        if format.is_float or format.granularity == "group" or port.shape[-1] % _HEAD_GROUP:
            return format
        try:
            found = self.table.weights.parse(wanted)
        except FormatError:
            return format
        return found if self.table.weights.allows(found) else format

    def _guard_products(self, guard: Guard) -> None:
        """Limit the weights of 8-bit products. Edges may be 8-bit where other operators have fewer bits."""
        for site, op in self.reader.items():
            spec, feeding = self.sites.get(site), self._feeding(op)
            if op.name in self.graph.selections:
                continue  # multiplied in float after the selection
            if (
                site in self.weight_only
                or spec is None
                or not spec.format.signed
                or spec.format.bits != 8
                or _is_depthwise(op)
            ):
                continue  # a depthwise operator adds one product per step, so no pair of products can saturate
            if self.sites.get(feeding or "", self.activation).format.bits == 8:
                why = "; ".join(text for text in (spec.why.removeprefix(_weight_reason(op)), guard.why.strip()) if text)
                self.sites[site] = replace(spec, guard=guard.name, why=why.removeprefix("; "))

    def _is_weight(self, site: str) -> bool:
        """Whether this is the weight of a layer, or of experts."""
        op = self.reader.get(self.sites[site].share or site)
        experts = op is not None and (op.kind in EXPERT_PRODUCTS or op.name in self.graph.selections)
        return SiteName.parse(site).port == "weight" or experts

    def _feeding(self, op: Op) -> str | None:
        source = self.decisions.feeding(op)
        return None if source is None else self.owner.get(self.decisions.grid(source))

    def _idle_calls(self) -> dict[str, SiteSpec]:
        """List later calls of a shared module that stay float: unknown calls use the spec of the last known one."""
        last: dict[str, int] = {}
        for site in self.sites:
            name = SiteName.parse(site)
            last[name.path] = max(last.get(name.path, 0), name.call)
        idle: dict[tuple[str, int], str] = {}
        for op in self.graph.ops:
            if op.module in last and op.call > last[op.module] and can_hook(op.kind) and op.outputs[0].is_floating:
                idle.setdefault((op.module, op.call), op.site("output"))
        return {site: SiteSpec(why="this call of the shared module stays float") for site in idle.values()}

    def _at_output(self, source: Source) -> bool:
        """Quantize a tensor once at its producer if all readers read it quantized or the target requires it."""
        readers = self.graph.consumers.get(source, ())
        op = self.graph.by_name[source.name]
        hookable = can_hook(op.kind) and any(port.is_floating for port in op.ports)
        if not hookable or len(op.outputs) != 1 or op.constant:
            return False
        if source in self.decisions.needed:
            return True
        return (
            bool(readers)
            and source not in self.graph.output_sources
            and all((op.name, port.name) in self.decisions.wanted and len(port.sources) == 1 for op, port in readers)
        )

    def _reason(self, source: Source) -> str:
        wanted = self.decisions.wanted
        readers = [op.name for op, p in self.graph.consumers.get(source, ()) if (op.name, p.name) in wanted]
        if not readers:
            return f"{self.table.name} runs the operator before it in integers only with an integer output"
        shown = ", ".join(readers[:3]) + (", …" if len(readers) > 3 else "")
        return f"read as integers by {shown}"

    def _place_input(self, op: Op, port: Port, site: str) -> None:
        if len(port.sources) > 1:  # the producer differs between recordings, so this port has its own quantizer
            self.sites[site] = replace(self.activation, why=f"input of {op.kind}; its producer varies")
            return
        source = port.sources[0]
        if source.kind == "op" and self._at_output(source):
            return
        alone = len(self.graph.consumers[source]) == 1
        why = f"input of {op.kind}" + ("" if alone else "; other readers of this tensor stay float")
        self._place(site, source, op.kind, why)

    def _place_bias(self, op: Op) -> None:
        weight_site = op.site("weight")
        if self.table.bias != "int32" or op.name not in self.decisions.quantized or weight_site not in self.sites:
            return
        bias = op.port("bias")
        if bias is None and op.name not in self.decisions.fold.values():
            return
        if bias is not None and (bias.role != "bias" or len(bias.shape) != 1):
            return  # computed from the input, or a matrix: the accumulator can't start with it
        weight_site = self.sites[weight_site].share or weight_site
        grain = self.sites[weight_site].format.granularity
        feeding = self._feeding(op)
        if (
            feeding is None
            or self.sites[feeding].format.is_plain_float
            or grain == "group"
            or not self.sites[weight_site].format.symmetric
        ):
            return
        self.sites[op.site("bias")] = SiteSpec(
            format=Format.parse(f"int32/{grain}/sym"),
            quantizer="product",
            quantizer_options={"of": [feeding, weight_site]},
            why="added to the integer accumulator",
        )

    def _place_weight(self, op: Op, port: Port, site: str) -> None:
        first = self.weights.setdefault(self.graph.weight_owner.get(site, site), site)
        if first != site:
            self.sites[site] = SiteSpec(share=first, why="the same parameter")
            return
        self.reader[site] = op
        selection = self.graph.selections.get(op.name)
        if op.kind in EXPERT_PRODUCTS or selection is not None:
            axis = -2 if selection is None else selection.axis
            format, why = self.weight.format, _weight_reason(op)
            if format.granularity in ("channel", "tensor"):
                format = replace(format, granularity="group", group=port.shape[axis])
                why = "weights of experts: one scale for each expert and channel"
            elif selection is not None:
                why = f"weights of experts, read by {selection.product}"
            spec = replace(self.weight, format=format, why=why)
            self.sites[site] = spec if selection is None else replace(spec, axis=axis)
            return
        if site in self.mixed and self.weight.format.granularity == "channel":
            one = replace(self.weight.format, granularity="tensor")
            why = "its readers have their channels along different axes: one scale for all"
            self.sites[site] = replace(self.weight, format=one, why=why)
            return
        self.sites[site] = replace(self.weight, why=self.decisions.quantized[op.name].why or _weight_reason(op))


def _weight_reason(op: Op) -> str:
    """The default reason of a weight's quantizer."""
    return f"weight of {op.kind}"


def _is_depthwise(op: Op) -> bool:
    weight, data = op.port("weight"), op.port("input")
    return (
        op.kind in ("conv1d", "conv2d", "conv3d")
        and weight is not None
        and data is not None
        and weight.shape[1] == 1
        and data.shape[1] == weight.shape[0]
    )


@strict
def place(graph: Graph, target: str | BackendTable, *, model: str | None = None, **choices: Unpack[Choices]) -> Plan:
    """A uniform plan: every operator with a rule gets the backend's default (or the chosen) formats."""
    table = backend(target)
    keep = patterns_of(choices)
    if problems := choice_problems({**choices, "keep_float": keep}, table, graph):
        raise PlanError(problems)
    weight_format = format_of_weights(choices, table)
    activation_format = Format.parse(choices.get("activations") or table.activations.format)
    quantizer = choices.get("quantizer") or _default_quantizer(activation_format, table.activations.quantizer)
    usual = _matching_weight_quantizer(quantizer) if choices.get("quantizer") else table.weights.quantizer
    weight_quantizer = choices.get("weight_quantizer") or _default_quantizer(weight_format, usual)
    problems = [
        QUANTIZERS.get(name).refusal(format, where="plan")
        for name, format in ((quantizer, activation_format), (weight_quantizer, weight_format))
        if QUANTIZERS.get(name).symmetric_only and not format.symmetric
    ]
    if problems:
        raise PlanError(problems)
    guard = table.guard if table.guard and (table.guard.when == "always" or choices.get("saturating")) else None
    activation = SiteSpec(
        format=activation_format,
        observer=choices.get("observer") or table.activations.observer,
        quantizer=quantizer,
    )
    weight = SiteSpec(
        format=weight_format,
        observer=choices.get("weight_observer") or table.weights.observer,
        quantizer=weight_quantizer,
    )
    edges = choices.get("first_last_bits")
    if edges is not None:
        problems = [
            Problem(
                what=f"{table.name} can't run this {role} format at the first and last operator",
                where="first_last_bits",
                value=str(format.with_bits(edges)),
                fix=f"use one of: {', '.join(choice.formats)}",
                code="unsupported-format",
            )
            for role, format, choice in (
                ("weight", weight_format, table.weights),
                ("activation", activation_format, table.activations),
            )
            if not choice.allows(format.with_bits(edges))
        ]
        if problems:
            raise PlanError(problems)
    bn = DEFAULT_STRATEGY if (asked := choices.get("fold")) is None else asked
    decisions = Decisions(graph, dynamic_table(table) if activation_format.dynamic else table, keep, bn)
    sites = _SitePlacer(decisions, activation, weight, guard, choices.get("head_bits"))
    plan = sites.plan(table.edges if edges is None else edges, narrower=edges is not None)
    if missing := list(unlisted(graph, plan)):
        raise PlanError(missing, title="the plan doesn't cover the complete model")
    # a plan refers to its table by the user's spelling: a registered name or a path
    return replace(plan, backend=target if isinstance(target, str) else table.name, model=model)


def _default_quantizer(format: Format, usual: str) -> str:
    """The default quantizer of a format."""
    if format.minifloat is not None:
        return "minifloat"
    if format.dynamic:
        return "dynamic"
    return "plain" if usual == "minifloat" else usual


def _matching_weight_quantizer(quantizer: str) -> str:
    """The weight quantizer for an activation quantizer; usually the same."""
    found: str | None = QUANTIZERS.get(quantizer).weight_partner
    return found or quantizer


@strict
def make_plan(
    graph: Graph,
    target: str | BackendTable = DEFAULT_BACKEND,
    *,
    model: str | None = None,
    precision: str | None = None,
    bits: float | None = None,
    size: int | str | None = None,
    costs: WeightCosts | None = None,
    **choices: Unpack[Choices],
) -> Plan:
    """Choose the format of every site by the rules of a backend.

    With `bits` per weight, or the `size` of all parameters (bytes, or "60MB"), each weight gets the format of `costs`
    (from `bitwright.weight_costs`) with which the loss is expected to increase least within this budget. Activations
    stay in float unless `activations` says otherwise.

    `precision` is a name such as `w4a8`, or `qsync-int8` for low-precision kernels, which need no backend.

    `target` is the name of a backend, the path of a table file, or a table. The other arguments change the default
    formats, as in `bitwright.quantize`. If `saturating` is not given, this machine is tested. Set it if another machine
    runs the model.

    >>> import torch
    >>> from bitwright import capture, make_plan
    >>> graph = capture(torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU()), torch.ones(1, 8))
    >>> plan = make_plan(graph, "onnxruntime", saturating=False)
    >>> print(plan.sites["0:weight"].format, "-", plan.sites["0:weight"].why)
    int8/channel/sym - weight of linear
    """
    refuse_module_names(op.module for op in graph.ops)
    choices = budget_choices(costs, choices, bits=bits, size=size, precision=precision)
    if precision is not None:
        from bitwright.backends.precisions import KERNEL_PRECISIONS, kernel_precision, resolve

        if precision in KERNEL_PRECISIONS:
            return kernel_precision(precision, graph, choices, model=model)
        own = None if target == DEFAULT_BACKEND else target if isinstance(target, str) else target.name
        _, target, choices, _ = resolve(precision, own, choices, learned=False)
    table = backend(target)
    choices["keep_float"] = patterns_of(choices)
    if problems := choice_problems(choices, table, graph):  # before testing this machine
        raise PlanError(problems)
    if choices.get("saturating") is None and table.guard is not None and table.runtime is not None:
        from bitwright.deployment.measurement import saturates  # runs a model on the runtime

        choices["saturating"] = saturates(table.runtime)
    plan = place(graph, target, model=model, **choices)
    if costs is None:
        return plan
    plan = with_budget(plan, costs, bits=bits, size=size)
    if problems := check_plan(plan, table, graph):
        raise PlanError(problems)
    return plan
