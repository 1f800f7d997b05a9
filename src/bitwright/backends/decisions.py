"""Decide which operators and operands a target runs in integers, and which tensors share a grid."""

from __future__ import annotations

import fnmatch

from bitwright.backends.table import BackendTable, Rule
from bitwright.backends.token_models import ROUTER, token_model
from bitwright.graph import Graph, Op, Port, Source
from bitwright.graph.operators import is_product
from bitwright.plan import NO_FOLDING

Edge = tuple[str, str]  # (operator, port) that reads a tensor
EXPERTS = "_grouped_mm"
"""The rule of tables that run products with weights of experts."""
_TRANSPOSES = ("attribute_T", "attribute_mT", "t")  # views of a stored weight


class Decisions:
    """The decisions for a graph under a table's rules."""

    def __init__(self, graph: Graph, table: BackendTable, keep: list[str], bn: int) -> None:
        self.graph = graph
        self.table = table
        self.kept = {n for n in graph.by_name if any(fnmatch.fnmatchcase(n, pattern) for pattern in keep)}
        self.bn = bn
        self.selected: dict[str, set[str]] = {}  # product → ports that read weights of experts by an index
        for name, selection in graph.selections.items():
            self.selected.setdefault(selection.product, set()).add(selection.port)
            if self.kept & {name, selection.product}:
                self.kept |= {name, selection.product}
        self.tokens = token_model(graph)
        self.fold = {} if bn == NO_FOLDING else self._folds()
        self.quantized: dict[str, Rule] = {}
        self.float: dict[str, str] = {}
        self.wanted: set[Edge] = set()
        self.carried: set[str] = set()
        self.together: dict[Source, Source] = {}  # tensor → another one with the same grid (union-find)
        self.needed: set[Source] = set()  # tensors that are quantized regardless of their readers
        for op in graph.ops:
            self._decide(op)
        for op in reversed(graph.ops):
            self._carry(op)
        for name, rule in self.quantized.items():
            if rule.shared:
                self._unite(graph.by_name[name])

    def grid(self, source: Source) -> Source:
        """The representative of all tensors that share a grid with this one."""
        while source in self.together:
            source = self.together[source]
        return source

    def feeding(self, op: Op) -> Source | None:
        """The tensor that defines the grid of the operator's input, before operators that the target absorbs."""
        port = op.port("input")
        while port is not None and len(port.sources) == 1:
            source = port.sources[0]
            if (op.name, port.name) in self.wanted:
                return source
            if source.kind != "op" or self.graph.by_name[source.name].kind not in self.table.absorbed:
                return None
            op = self.graph.by_name[source.name]
            port = op.port("input") or op.port("input0")
        return None

    def _unite(self, op: Op) -> None:
        """Use one grid for all integer inputs of the operator and for its output."""
        read = [p.sources[0] for p in op.ports if (op.name, p.name) in self.wanted and len(p.sources) == 1]
        for source in (*read[1:], self._fused_output(op)):
            first, other = self.grid(read[0]), self.grid(source)
            if first != other:
                self.together[other] = first

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
                or (op.kind == "linear" and len(op.outputs[0].shape) != 2)  # the norm has another channel axis
                or reader[0].port("running_mean") is None
                or self.graph.partial(op) != self.graph.partial(reader[0])
            ):
                continue
            folds[reader[0].name] = op.name
        return folds

    def _origin(self, source: Source) -> Op | None:
        """The operator that made a tensor, skipping those that only move it or are fused."""
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
        """Whether a constant operand is a weight: its port takes only weights, or it is a stored parameter.

        Other constants (such as positions repeated for each sample) may grow with the input and count as data.
        """
        if port.name not in rule.weights or port.role != "weight" or len(port.sources) != 1:
            return False
        source = port.sources[0]
        while port.name in rule.inputs and source.kind == "op":
            op = self.graph.by_name[source.name]
            if len(op.ports) != 1 or op.kind not in (*_TRANSPOSES, *self.table.transparent):
                return False
            source = op.ports[0].sources[0]
        return True

    def _decide(self, op: Op) -> None:
        rule = self.table.operators.get(op.kind)
        if op.constant:
            return
        selection = self.graph.selections.get(op.name)
        if selection is not None:
            product = self.table.operators.get(self.graph.by_name[selection.product].kind)
            if product is not None and EXPERTS in self.table.operators and op.name not in self.kept:
                self.quantized[op.name] = Rule(weights=(op.ports[0].name,))
            return
        selected = self.selected.get(op.name, set()) if EXPERTS in self.table.operators else set()
        if rule is None:
            if op.macs > 0 or is_product(op.kind):
                reason = None if self.tokens is None else self.tokens.float_reason(op)
                self.float[op.name] = reason or f"{self.table.name} has no integer rule for {op.kind}"
            return
        if op.name in self.kept:
            self.float[op.name] = "kept in float by request"
            return
        if self.tokens is not None and op.name in self.tokens.routers:
            self.float[op.name] = ROUTER
            return
        if selected:
            rule = rule.model_copy(update={"weights": tuple(port for port in rule.weights if port not in selected)})
        ports = [p for p in op.ports if _named(p, rule.inputs) and not self._is_weight(p, rule)]
        ports = [port for port in ports if port.name not in selected]
        if not ports or not all(port.is_floating for port in ports):
            if op.macs > 0:
                self.float[op.name] = "its input carries no floating-point numbers"
            return
        if any(p.role == "activation" and _named(p, rule.weights) and not _named(p, rule.inputs) for p in op.ports):
            self.float[op.name] = "its weight is computed from the input"
            return
        if any(port.role == "weight" and 0 in port.shape for port in op.ports):
            self.float[op.name] = "its weight has no elements"
            return
        if not self._applies(op, rule, ports):
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

    def _applies(self, op: Op, rule: Rule, ports: list[Port]) -> bool:
        """Whether the rule's conditions on neighbouring operators hold."""
        if rule.when == "between-anchors" and not (
            len(ports) == sum(port.is_floating for port in op.ports)
            and all(self._is_anchor(source) for port in ports for source in port.sources)
        ):
            return False
        if rule.when == "fused" and not any(self._fuses(port) for port in ports):
            return False
        if "broadcast" in rule.unless and any(port.shape != op.outputs[0].shape for port in ports):
            return False
        origins = [self._origin(source) for port in ports for source in port.sources]
        return "embedding" not in rule.unless or all(o is None or o.kind != "embedding" for o in origins)

    def _fused_output(self, op: Op) -> Source:
        """The output of an operator after the norm and activation that the target fuses into it."""
        source = Source("op", op.name)
        while (reader := self._only_reader(source)) is not None and reader[0].kind in self.table.passing:
            source = Source("op", reader[0].name)
        return source

    def _fuses(self, port: Port) -> bool:
        """Whether the add that reads this port can be fused into the preceding anchor."""
        source = port.sources[0]
        return len(port.sources) == 1 and self._only_reader(source) is not None and self._is_anchor(source)

    def _carry(self, op: Op) -> None:
        """Quantize the inputs of a transparent or absorbed operator if all its readers read integers."""
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
                self.together[source] = self.grid(port.sources[0])


def _named(port: Port, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(port.name, pattern) for pattern in patterns)
