"""`bitwright plan`: make, validate and compare plans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitwright.cli.choosing import with_choices
from bitwright.cli.data import open_workload
from bitwright.cli.options import load_plan
from bitwright.cli.out import Out
from bitwright.cli.verb import verb
from bitwright.core.errors import BitwrightError, visible_text

if TYPE_CHECKING:
    from bitwright.plan import Plan


@verb(
    "plan",
    examples="""
    bitwright plan digits -o plan.yaml
    bitwright plan digits --weights int4/group8/sym --keep-float head
    bitwright plan digits --plan edited.yaml --against plan.yaml
    bitwright plan my_workload.py:net --mapper qsync.npy -o plan.yaml
    bitwright plan --schema > plan.schema.json
    """,
)
@with_choices
def plan(
    out: Out,
    workload: Annotated[
        str | None,
        typer.Argument(metavar="WORKLOAD", help="file.py:function, or a registered name.", show_default=False),
    ] = None,
    *,
    backend: Any,
    plan: Any,
    choices: Any,
    against: Annotated[
        Path | None,
        typer.Option(help="Show the changes from this plan to the new one.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write here, not to stdout.", show_default=False)
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of plan files.")] = False,
    mapper: Annotated[
        Path | None,
        typer.Option(help="Convert QSync's mapper (.npy); the file is not executed.", show_default=False),
    ] = None,
) -> None:
    """Choose the number format of every site, with the reason.

    With --plan, an existing plan is validated for the workload instead. `plan-cluster` plans low-precision training.
    """
    from bitwright.backends import backend as find_backend
    from bitwright.backends import make_plan, resolve_for_backend
    from bitwright.graph import capture
    from bitwright.importers.qsync import load_mapper, plan_of_mapper
    from bitwright.plan import json_schema

    if schema:
        out.result(json.dumps(json_schema(), indent=1))
        return
    if workload is None:
        raise BitwrightError(
            "a workload is required", fix="bitwright plan WORKLOAD, or --schema", code="workload-missing"
        )
    other = load_plan(against)
    table = find_backend(backend)  # reject an unknown name before loading the workload
    found = open_workload(out, workload)
    graph = capture(found.model, found.inputs)
    if mapper is not None:
        made = replace(plan_of_mapper(load_mapper(mapper), graph), model=found.name)
    elif plan is None:
        made = make_plan(graph, backend, model=found.name, **choices)
    else:
        made = resolve_for_backend(plan, table, graph, name=found.name)
    if output is not None:
        made.save(output)
    _show(out, made, other.resolve(graph) if other is not None else None, output)


def _show(out: Out, plan: Plan, other: Plan | None, output: Path | None) -> None:
    quantized = len(list(plan.quantized))
    changes = other.diff(plan) if other is not None else []
    out.data(
        {
            "output": None if output is None else str(output),
            "quantized_sites": quantized,
            "float_operators": dict(plan.float),
            "changes": [vars(change) for change in changes],
            "plan": plan.to_yaml(),
        }
    )
    if out.json:
        return
    if other is not None:
        out.result(visible_text("\n".join(str(change) for change in changes)) or "no changes")
    elif output is None:
        out.result(plan.to_yaml())
    if output is not None:
        low = sum(spec.is_low_precision for spec in plan.compute.values())
        computed = f"{low} operators computed in low precision, " if low else ""
        out.say(f"{output}: {computed}{quantized} quantized sites, {len(plan.float)} entries left in float")
