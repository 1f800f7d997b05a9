"""Backend tables: what a target can run, where its compiler expects quantizers, and what it fuses."""

from __future__ import annotations

import fnmatch
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from bitwright.core.arguments import strict
from bitwright.core.documents import read_yaml
from bitwright.core.errors import BackendError, BitwrightError, PlanError, Problem
from bitwright.core.formats import Format
from bitwright.core.registry import BACKENDS
from bitwright.core.schemas import Strict, validated
from bitwright.graph import Graph
from bitwright.plan import Plan
from bitwright.plan.plan import is_pattern

DEFAULT_BACKEND = "onnxruntime"
"""The target of plans without a backend."""
DEFAULT_RUNTIME = "onnxruntime"
"""The runtime of artefacts if this machine has no runtime of their target."""


class Choice(Strict):
    """The default format of weights or activations, and all supported formats."""

    format: str
    formats: tuple[str, ...]
    observer: str = "minmax"
    quantizer: str = Field("plain", description="The target's quantizer, if its levels are not uniform.")

    @field_validator("format")
    @classmethod
    def _readable(cls, text: str) -> str:
        try:
            return str(Format.parse(text))
        except BitwrightError as error:
            raise ValueError(str(error)) from error

    def allows(self, format: Format) -> bool:
        """Whether the target can run this format."""
        # A pattern such as uint8/tensor/* doesn't include dynamic formats: they need other kernels. Neither does
        # int4/*/sym* include full ones, because many targets can't store negative scales.
        listed = [
            p
            for p in self.formats
            if p == "*" or (p.endswith("/dynamic"), p.endswith("/full")) == (format.dynamic, format.full)
        ]
        return format.is_plain_float or any(fnmatch.fnmatchcase(str(format), p) for p in listed)

    def parse(self, text: str) -> Format:
        """Parse a format. Groups that are written without a symmetry ("int4/group32") use every code if the target can.

        A symmetric format without `full` leaves out one of its codes, which matters for few bits.
        """
        format = Format.parse(text)
        options = text.lower().replace(" ", "").split("/")[1:]
        if format.granularity == "group" and len(options) == 1 and format.minifloat is None:
            full = replace(format, full=format.signed)
            return full if self.allows(full) else format
        return format


class Rule(Strict):
    """Where operators of one kind have quantizers."""

    inputs: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    when: Literal["always", "between-anchors", "fused"] = Field(
        default="always",
        description="between-anchors: only if all inputs come from anchors; "
        "fused: only if the target fuses the operator into a preceding anchor.",
    )
    unless: tuple[Literal["embedding", "broadcast"], ...] = Field(
        default=(), description="Stay float after an embedding, or if an operand is broadcast (attention masks)."
    )
    output: bool = Field(
        default=False,
        description="Quantize the (fused) output even if its readers are float, because the target requires it.",
    )
    float_operands: int = Field(
        default=0,
        ge=0,
        le=100,
        description="Number of operands that stay float because the target fuses the add into the preceding operator.",
    )
    shared: bool = Field(
        default=False,
        description="Use one grid for operands and output: the target copies codes without rescaling.",
    )
    why: str = ""


class Guard(Strict):
    """A limit on weight codes, and when it is required."""

    name: str
    when: Literal["always", "saturating"]
    why: str


class BackendTable(Strict):
    """One hardware target."""

    schema_version: Literal[1, 2] = Field(
        alias="schema", description="2 added quantizer, unless, shared, when: fused, edges and artefacts."
    )
    name: str
    title: str
    runtime: str | None = None
    artefacts: tuple[str, ...] = Field(
        ("qdq",), min_length=1, description="Formats that the target's tools read; `export` writes the first."
    )
    weights: Choice
    activations: Choice
    edges: int | None = Field(
        None,
        ge=2,
        le=32,
        description="Bits of the first and last operator with a weight if the others have fewer.",
    )
    guard: Guard | None = None
    bias: Literal["int32", "float"] = "float"
    fold: tuple[str, ...] = Field((), description="Kinds of operators that a following batch norm is folded into.")
    operators: dict[str, Rule]
    transparent: tuple[str, ...] = Field(
        (), description="Kinds that only move or select values and keep the grid of their input."
    )
    absorbed: dict[str, tuple[str, ...]] = Field(
        {}, description="Kinds that the target fuses into these readers: quantize before them, not after."
    )
    anchors: tuple[str, ...] = Field((), description="Kinds with integer outputs on the target.")
    passing: tuple[str, ...] = Field(
        (), description="Kinds that the target fuses after an anchor (activation functions, the folded norm)."
    )


def dynamic_table(table: BackendTable) -> BackendTable:
    """The table for activations with scales that are computed at run time.

    Only products of activations with a matrix of weights have integer kernels for them. Everything else stays in
    float, and biases are added in float, because the scale of the accumulator isn't known in advance.
    """
    products = {
        kind: rule.model_copy(
            update={"inputs": tuple(port for port in rule.inputs if port not in rule.weights), "output": False}
        )
        for kind, rule in table.operators.items()
        if kind in ("linear", "addmm", "matmul") and rule.weights
    }
    return table.model_copy(
        update={
            "name": f"{table.name} with dynamic activations",
            "operators": products,
            "bias": "float",
            "fold": (),
            "transparent": (),
            "absorbed": {},
            "anchors": (),
            "passing": (),
        }
    )


def load_table(path: Path) -> BackendTable:
    """Load a table from a YAML file."""
    try:
        data = read_yaml(path, what="the backend table", error=BackendError)
    except BackendError as error:
        wrong = error.problems[0]
        line = (wrong.where or "").removeprefix(str(path)).strip(":")
        what = f"{wrong.what} (at {line})" if line else wrong.what
        raise BackendError(what, where=str(path), value=wrong.value, fix=wrong.fix, code=wrong.code) from error
    return validated(BackendTable, data, title=f"the backend table {path} has problems")


@strict
def backend(name: str | BackendTable) -> BackendTable:
    """Return the table of a backend, by registered name or from a file (`path.yaml`).

    `bitwright list backends` shows all names.

    >>> table = backend("onnxruntime")
    >>> table.title
    'ONNX Runtime on CPUs, QDQ ONNX'
    """
    if isinstance(name, BackendTable):
        return name
    if name.endswith((".yaml", ".yml")):
        return load_table(Path(name))
    table: BackendTable = BACKENDS.get(name)()
    return table


def resolve_for_backend(plan: Plan, table: BackendTable, graph: Graph, *, name: str | None = None) -> Plan:
    """Resolve a plan for a model (`name`) and a backend. Raises all problems of both."""
    problems = plan.validate(graph)
    # a plan with unresolved patterns has no sites to check
    known = replace(plan, sites={key: spec for key, spec in plan.sites.items() if not is_pattern(key)})
    unknown = {problem.where for problem in problems if problem.code == "unknown-site"}
    found = check_plan(known if problems else plan.resolve(graph), table, graph)
    problems += [problem for problem in found if problem.where not in unknown]
    if problems:
        raise PlanError(problems, title=problems_title(plan, name))
    return plan.resolve(graph)


def problems_title(plan: Plan, name: str | None) -> str:
    """The title of a list of problems, which mentions a plan made for another model."""
    if name is None or plan.model in (None, name):
        return "the plan has problems"
    return f"the plan has problems: it was made for {plan.model!r}, but this model is {name!r}"


def check_plan(plan: Plan, table: BackendTable, graph: Graph | None = None) -> list[Problem]:
    """Every site with a format that the target can't run. The graph tells which operands are weights."""
    roles = {} if graph is None else {op.site(port.name): port.role for op in graph.ops for port in op.ports}
    problems: list[Problem] = []
    for site, spec in plan.quantized:
        if spec.share is not None or spec.quantizer == "product":
            continue
        weight = site.endswith(":weight")
        choice = table.weights if weight else table.activations
        # an operand may be a weight (x @ w) or a constant that counts as data (positions): accept either list
        unsure = roles.get(site, "weight") == "weight" and site.rpartition(":")[2].startswith("input")
        if not choice.allows(spec.format) and not (unsure and table.weights.allows(spec.format)):
            problems.append(
                Problem(
                    what=f"{table.name} can't run this format here",
                    where=site,
                    value=str(spec.format),
                    fix=f"use one of: {', '.join(choice.formats)}, float",
                    code="unsupported-format",
                )
            )
    return problems
