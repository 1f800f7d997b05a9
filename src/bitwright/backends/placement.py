"""Where a backend wants its quantizers: from a graph and a table to a plan."""

from __future__ import annotations

import fnmatch
from dataclasses import replace
from typing import Unpack

from bitwright.backends.choices import Choices
from bitwright.backends.table import BackendTable, Rule, backend
from bitwright.errors import PlanError, Problem, did_you_mean
from bitwright.formats import Format
from bitwright.graph import Graph, Op, Port, Source
from bitwright.graph.functions import can_hook
from bitwright.graph.naming import SiteName
from bitwright.plan import DEFAULT_STRATEGY, NO_FOLDING, STRATEGIES, FoldSpec, Plan, SiteSpec, known_strategies
from bitwright.registry import QUANTIZERS

Edge = tuple[str, str]  # (operator, port) that reads a tensor
_TURNS = ("attribute_T", "attribute_mT", "t")  # a stored weight, seen from another side


def place(graph: Graph, target: str | BackendTable, *, model: str | None = None, **choices: Unpack[Choices]) -> Plan:
    """A uniform plan: every operator that the backend has a rule for, in its default (or the chosen) formats."""
    table = backend(target)
    weight_format = Format.parse(choices.get("weights") or table.weights.format)
    activation_format = Format.parse(choices.get("activations") or table.activations.format)
    keep = list(choices.get("keep_float", ()))
    problems = [
        Problem(
            what=f"{table.name} can't run this {role} format",
            where="plan",
            value=str(format),
            fix=f"use one of: {', '.join(choice.formats)}",
        )
        for role, format, choice in (
            ("weight", weight_format, table.weights),
            ("activation", activation_format, table.activations),
        )
        if not choice.allows(format)
    ]
    quantizer = choices.get("quantizer") or _natural(activation_format)
    weight_quantizer = choices.get("weight_quantizer") or (
        _natural(weight_format) if quantizer in ("plain", "minifloat") else _partner(quantizer)
    )
    problems += [
        QUANTIZERS.get(name).refusal(format, where="plan")
        for name, format in ((quantizer, activation_format), (weight_quantizer, weight_format))
        if QUANTIZERS.get(name).symmetric_only and not format.symmetric
    ]
    problems += [
        Problem(
            what="the pattern of keep_float matches no operator",
            where="plan",
            value=pattern,
            fix=did_you_mean(pattern, graph.by_name),
        )
        for pattern in keep
        if not any(fnmatch.fnmatchcase(name, pattern) for name in graph.by_name)
    ]
    bn = DEFAULT_STRATEGY if (asked := choices.get("bn")) is None else asked
    if bn != NO_FOLDING and bn not in STRATEGIES:
        fix = known_strategies(none=True)
        problems.append(Problem(what="unknown folding strategy", where="bn", value=bn, fix=fix))
    elif asked is not None and bn != NO_FOLDING and not table.fold:
        what = f"{table.name} runs batch norms as they are: none would be folded"
        problems.append(Problem(what=what, where="bn", value=bn, fix="leave bn out, or use another backend"))
    if problems:
        raise PlanError(problems)
    guard = table.guard if table.guard and (table.guard.when == "always" or choices.get("saturating")) else None
    if weight_format.bits != 8 or not weight_format.signed or activation_format.bits != 8:
        guard = None  # the limit is one of 8-bit products
    activation = SiteSpec(
        format=activation_format,
        observer=choices.get("observer") or table.activations.observer,
        quantizer=quantizer,
    )
    weight = SiteSpec(
        format=weight_format,
        observer=choices.get("weight_observer") or table.weights.observer,
        quantizer=weight_quantizer,
        guard=guard.name if guard else None,
    )
    edges = choices.get("edges")
    if edges is not None:
        problems = [
            Problem(
                what=f"{table.name} can't run this {role} format at the first and last operator",
                where="edges",
                value=str(format.with_bits(edges)),
                fix=f"use one of: {', '.join(choice.formats)}",
            )
            for role, format, choice in (
                ("weight", weight_format, table.weights),
                ("activation", activation_format, table.activations),
            )
            if not choice.allows(format.with_bits(edges))
        ]
        if problems:
            raise PlanError(problems)
    placement = _Placement(graph, table, keep, bn)
    plan = placement.plan(activation, weight, guard.why.strip() if guard else "", edges)
    # a plan finds its table again by what the user called it: a registered name, or the path of a file
    return replace(plan, backend=target if isinstance(target, str) else table.name, model=model)


class _Placement:
    def __init__(self, graph: Graph, table: BackendTable, keep: list[str], bn: int) -> None:
        self.graph = graph
        self.table = table
        self.kept = {n for n in graph.by_name if any(fnmatch.fnmatchcase(n, pattern) for pattern in keep)}
        self.bn = bn
        self.fold = {} if bn == NO_FOLDING else self._folds()
        self.quantized: dict[str, Rule] = {}
        self.float: dict[str, str] = {}
        self.wanted: set[Edge] = set()
        self.carried: set[str] = set()
        self.weights: dict[str, str] = {}  # parameter (by its first use) → the site that has its quantizer
        self.needed: set[Source] = set()  # tensors that are quantized whoever reads them
        for op in graph.ops:
            self._decide(op)
        for op in reversed(graph.ops):
            self._carry(op)

    def _only_reader(self, source: Source) -> tuple[Op, Port] | None:
        readers = self.graph.consumers.get(source, ())
        return readers[0] if len(readers) == 1 and source not in self.graph.output_sources else None

    def _folds(self) -> dict[str, str]:
        folds: dict[str, str] = {}
        for op in self.graph.ops:
            if op.kind not in self.table.fold or op.name in self.kept:
                continue
            reader = self._only_reader(Source("op", op.name))
            if reader is None or reader[0].kind != "batch_norm" or len(reader[1].sources) != 1:
                continue
            weight = op.port("weight")
            shared = weight is None or len(self.graph.consumers[weight.sources[0]]) > 1
            if (
                shared
                or (op.kind == "linear" and len(op.outputs[0].shape) != 2)  # the norm's channels are another axis
                or reader[0].port("running_mean") is None
                or self.graph.partial(op) != self.graph.partial(reader[0])
            ):
                continue
            folds[reader[0].name] = op.name
        return folds

    def _origin(self, source: Source) -> Op | None:
        """The operator that really made a tensor, behind what only moves it or is fused."""
        seen = 0
        while source.kind == "op" and seen < len(self.graph.ops):
            op = self.graph.by_name[source.name]
            passing = op.kind in (*self.table.passing, *self.table.transparent, *self.table.absorbed)
            port = op.port("input") or op.port("input0")
            if not passing or port is None or len(port.sources) != 1:
                return op
            source, seen = port.sources[0], seen + 1
        return None

    def _is_anchor(self, source: Source) -> bool:
        origin = self._origin(source)
        return origin is not None and origin.kind in self.table.anchors and origin.name in self.quantized

    def _is_weight(self, port: Port, rule: Rule) -> bool:
        """Whether a constant operand is a weight: at a port for nothing else, or a parameter as it is stored.

        Other constants (positions, repeated for each sample) may grow with the input: they count as data.
        """
        if port.name not in rule.weights or port.role != "weight" or len(port.sources) != 1:
            return False
        source = port.sources[0]
        while port.name in rule.inputs and source.kind == "op":
            op = self.graph.by_name[source.name]
            if len(op.ports) != 1 or op.kind not in (*_TURNS, *self.table.transparent):
                return False
            source = op.ports[0].sources[0]
        return True

    def _decide(self, op: Op) -> None:
        rule = self.table.operators.get(op.kind)
        if op.constant:
            return
        if rule is None:
            if op.macs > 0:
                self.float[op.name] = f"{self.table.name} has no integer rule for {op.kind}"
            return
        if op.name in self.kept:
            self.float[op.name] = "kept in float by request"
            return
        ports = [p for p in op.ports if _named(p, rule.inputs) and not self._is_weight(p, rule)]
        if not ports or not all(port.is_floating for port in ports):
            if op.macs > 0:
                self.float[op.name] = "its input carries no floating-point numbers"
            return
        if any(p.role == "activation" and _named(p, rule.weights) and not _named(p, rule.inputs) for p in op.ports):
            self.float[op.name] = "its weight is computed from the input"
            return
        if rule.when == "between-anchors" and not (
            len(ports) == sum(port.is_floating for port in op.ports)
            and all(self._is_anchor(source) for port in ports for source in port.sources)
        ):
            return
        self.quantized[op.name] = rule
        fused = 0
        for port in ports:
            if fused < rule.float_operands and self._fuses(port):
                fused += 1
                continue
            self.wanted.add((op.name, port.name))
        if rule.output:
            self.needed.add(self._fused_output(op))

    def _fused_output(self, op: Op) -> Source:
        """The tensor that an operator hands on, behind the norm and activation that the target fuses into it."""
        source = Source("op", op.name)
        while (reader := self._only_reader(source)) is not None and reader[0].kind in self.table.passing:
            source = Source("op", reader[0].name)
        return source

    def _fuses(self, port: Port) -> bool:
        """Whether the add that reads this port can be fused into the anchor before it."""
        source = port.sources[0]
        return len(port.sources) == 1 and self._only_reader(source) is not None and self._is_anchor(source)

    def _carry(self, op: Op) -> None:
        """A transparent operator all of whose readers want integers gets integers itself; an absorbed one instead."""
        source = Source("op", op.name)
        readers = self.graph.consumers.get(source, ())
        into = self.table.absorbed.get(op.kind, ())
        absorbed = bool(readers) and all(reader.kind in into for reader, _ in readers)
        if (
            not (into or op.kind in self.table.transparent)
            or op.constant
            or not readers
            or source in self.graph.output_sources
            or len(op.outputs) != 1
            or op.name in self.kept
        ):
            return
        port = op.port("input") or op.port("input0")
        if port is None or port.role != "activation" or len(port.sources) != 1 or len(op.ports) != 1:
            return
        if all((reader.name, p.name) in self.wanted for reader, p in readers):
            self.wanted.add((op.name, port.name))
            if absorbed:
                self.wanted -= {(reader.name, p.name) for reader, p in readers}
            else:
                self.carried.add(op.name)

    def plan(self, activation: SiteSpec, weight: SiteSpec, guard_why: str, edges: int | None) -> Plan:
        """The sites, in the order of the graph."""
        sites: dict[str, SiteSpec] = {}
        owner: dict[Source, str] = {}  # tensor → the site whose quantizer it has
        for op in self.graph.ops:
            for port in op.ports:
                site = op.site(port.name)
                if (op.name, port.name) in self.wanted:
                    self._place_input(op, port, site, activation, sites, owner)
                elif op.name in self.quantized and port.name in self.quantized[op.name].weights:
                    self._place_weight(op, port, site, weight, guard_why, sites)
            self._place_bias(op, sites, owner)
            source = Source("op", op.name)
            if self._at_output(source):
                if op.name in self.carried:
                    port = op.port("input") or op.ports[0]
                    spec = SiteSpec(share=owner[port.sources[0]], why=f"{op.kind} keeps the grid of its input")
                    owner[source] = owner[port.sources[0]]
                else:
                    spec = _because(activation, self._reason(source))
                    owner[source] = op.site("output")
                sites[op.site("output")] = spec
        sites.update(self._idle_calls(sites))
        if activation.format.is_plain_float:  # weights only
            sites = {site: spec for site, spec in sites.items() if SiteName.parse(site).port == "weight"}
        if edges is not None:
            self._widen_edges(edges, sites, owner)
        fold = {norm: FoldSpec(into=before, strategy=self.bn) for norm, before in self.fold.items()}
        return Plan(sites=sites, fold=fold, float=self.float)

    def _widen_edges(self, bits: int, sites: dict[str, SiteSpec], owner: dict[Source, str]) -> None:
        """Other bits for the first and the last operator with a weight: what all low-bit papers do."""
        weighted = [op for op in self.graph.ops if op.site("weight") in sites]
        for op in {op.name: op for op in (*weighted[:1], *weighted[-1:])}.values():
            feeding = self._feeding(op, owner)
            for site in (op.site("weight"), feeding):
                site = sites[site].share or site if site in sites else None
                if site is not None and sites[site].format.bits != bits:
                    spec = sites[site]
                    why = "; ".join(t for t in (spec.why, f"{bits} bits at the first and last operator") if t)
                    sites[site] = replace(spec, format=spec.format.with_bits(bits), why=why)

    def _idle_calls(self, sites: dict[str, SiteSpec]) -> dict[str, SiteSpec]:
        """A shared module's later calls that stay float say so: calls that a plan doesn't know take the last one's."""
        last: dict[str, int] = {}
        for site in sites:
            name = SiteName.parse(site)
            last[name.path] = max(last.get(name.path, 0), name.call)
        idle: dict[tuple[str, int], str] = {}
        for op in self.graph.ops:
            if op.module in last and op.call > last[op.module] and can_hook(op.kind) and op.outputs[0].is_floating:
                idle.setdefault((op.module, op.call), op.site("output"))
        return {site: SiteSpec(why="this call of the shared module stays float") for site in idle.values()}

    def _at_output(self, source: Source) -> bool:
        """Quantize a tensor once where it is made, if everybody who reads it wants that or the target needs it."""
        readers = self.graph.consumers.get(source, ())
        op = self.graph.by_name[source.name]
        hookable = can_hook(op.kind) and any(port.is_floating for port in op.ports)
        if not hookable or len(op.outputs) != 1 or op.constant:
            return False
        if source in self.needed:
            return True
        return (
            bool(readers)
            and source not in self.graph.output_sources
            and all((op.name, port.name) in self.wanted and len(port.sources) == 1 for op, port in readers)
        )

    def _reason(self, source: Source) -> str:
        readers = [op.name for op, p in self.graph.consumers.get(source, ()) if (op.name, p.name) in self.wanted]
        if not readers:
            return f"{self.table.name} runs the operator before it in integers only with an integer output"
        shown = ", ".join(readers[:3]) + (", …" if len(readers) > 3 else "")
        return f"read as integers by {shown}"

    def _place_input(
        self,
        op: Op,
        port: Port,
        site: str,
        activation: SiteSpec,
        sites: dict[str, SiteSpec],
        owner: dict[Source, str],
    ) -> None:
        if len(port.sources) > 1:  # runs differ in where this comes from: a quantizer of its own
            sites[site] = _because(activation, f"input of {op.kind}; its producer varies")
            return
        source = port.sources[0]
        if source.kind == "op" and self._at_output(source):
            return
        known = owner.get(source)
        if known is None:
            owner[source] = site
            sites[site] = _because(activation, f"input of {op.kind}; other readers of this tensor stay float")
            if len(self.graph.consumers[source]) == 1:
                sites[site] = _because(activation, f"input of {op.kind}")
        else:
            sites[site] = SiteSpec(share=known, why="the same tensor")

    def _feeding(self, op: Op, owner: dict[Source, str]) -> str | None:
        """The site whose quantizer the operator's input has, also behind what the target absorbs."""
        port = op.port("input")
        while port is not None and len(port.sources) == 1:
            source = port.sources[0]
            if (op.name, port.name) in self.wanted:
                return owner.get(source)
            if source.kind != "op" or self.graph.by_name[source.name].kind not in self.table.absorbed:
                return None
            op = self.graph.by_name[source.name]
            port = op.port("input") or op.port("input0")
        return None

    def _place_bias(self, op: Op, sites: dict[str, SiteSpec], owner: dict[Source, str]) -> None:
        weight_site = op.site("weight")
        if self.table.bias != "int32" or op.name not in self.quantized or weight_site not in sites:
            return
        if op.port("bias") is None and op.name not in self.fold.values():
            return
        weight_site = sites[weight_site].share or weight_site
        grain = sites[weight_site].format.granularity
        feeding = self._feeding(op, owner)
        if (
            feeding is None
            or sites[feeding].format.is_plain_float
            or grain == "group"
            or not sites[weight_site].format.symmetric
        ):
            return
        sites[op.site("bias")] = SiteSpec(
            format=Format.parse(f"int32/{grain}/sym"),
            quantizer="product",
            quantizer_options={"of": [feeding, weight_site]},
            why="added to the integer accumulator",
        )

    def _place_weight(
        self, op: Op, port: Port, site: str, weight: SiteSpec, guard_why: str, sites: dict[str, SiteSpec]
    ) -> None:
        first = self.weights.setdefault(self.graph.weight_owner.get(site, site), site)
        if first != site:
            sites[site] = SiteSpec(share=first, why="the same parameter")
            return
        rule_why = self.quantized[op.name].why
        if weight.guard and _is_depthwise(op):  # one product per step: nothing is paired
            weight = replace(weight, guard=None)
        sites[site] = _because(weight, "; ".join(t for t in (rule_why, guard_why if weight.guard else "") if t))


def _natural(format: Format) -> str:
    """The quantizer that a format has if nothing is said."""
    return "plain" if format.minifloat is None else "minifloat"


def _partner(quantizer: str) -> str:
    """The quantizer of weights that goes with one of activations: mostly the same."""
    found: str | None = QUANTIZERS.get(quantizer).weight_partner
    return found or quantizer


def _named(port: Port, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(port.name, pattern) for pattern in patterns)


def _is_depthwise(op: Op) -> bool:
    weight, data = op.port("weight"), op.port("input")
    return (
        op.kind in ("conv1d", "conv2d", "conv3d")
        and weight is not None
        and data is not None
        and weight.shape[1] == 1
        and data.shape[1] == weight.shape[0]
    )


def _because(spec: SiteSpec, why: str) -> SiteSpec:
    return replace(spec, why=why)
