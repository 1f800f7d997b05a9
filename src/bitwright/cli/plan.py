"""`bitwright plan`: make, validate and compare plans."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bitwright.backends import Choices, make_plan, resolve_for_backend
from bitwright.backends import backend as find_backend
from bitwright.cli.allocating import allocate
from bitwright.cli.choosing import with_choices
from bitwright.cli.data import open_workload
from bitwright.cli.options import load_plan, target
from bitwright.cli.out import Out
from bitwright.cli.stepping import LayoutOption
from bitwright.cli.verb import verb
from bitwright.core.errors import BitwrightError, visible_text
from bitwright.graph import capture
from bitwright.importers.qsync import load_mapper, plan_of_mapper
from bitwright.plan import Plan, json_schema

_PLANNER = "recover"
_BACKEND = target(None, None)


@verb(
    "plan",
    examples="""
    bitwright plan digits -o plan.yaml
    bitwright plan digits --weights int4/group8/sym --keep-float head
    bitwright plan digits --plan edited.yaml --against plan.yaml
    bitwright plan digits-untrained --cluster cluster.yaml --indications indications.json -o plan.yaml
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
    backend: str,
    plan: Plan | None,
    choices: Choices,
    against: Annotated[
        Path | None,
        typer.Option(help="Show what changes from this plan to the one here.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write here, not to stdout.", show_default=False)
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of plan files.")] = False,
    cluster: Annotated[
        Path | None,
        typer.Option(help="Plan low-precision training on these machines (cluster.yaml).", show_default=False),
    ] = None,
    indications: Annotated[
        Path | None,
        typer.Option(help="How much operators suffer: of `bitwright score --indicator`.", show_default=False),
    ] = None,
    profiles: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=FILE",
            help="Profiles of the cluster's kinds, where cluster.yaml names none or others; several times, or commas.",
            show_default=False,
        ),
    ] = None,
    planner: Annotated[str, typer.Option(help="For a cluster: a name of `bitwright list planners`.")] = _PLANNER,
    mapper: Annotated[
        Path | None,
        typer.Option(help="Make it of QSync's mapper (.npy), which is read without running it.", show_default=False),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="For a cluster: samples per device and step.", show_default=False)
    ] = None,
    channels_last: LayoutOption = False,
) -> None:
    """Decide the number format of every site, and say why.

    With --plan an existing plan is validated for the workload instead of making one. With --cluster operators of a
    training step get precisions, one section for each kind of device.
    """
    if schema:
        out.result(json.dumps(json_schema(), indent=1))
        return
    if workload is None:
        raise BitwrightError("there is no workload to plan for", fix="bitwright plan WORKLOAD, or --schema")
    if cluster is None:
        _refuse(
            "these are for a --cluster",
            {"indications": indications, "profiles": profiles, "planner": planner != _PLANNER, "batch": batch}
            | {"channels_last": channels_last},
            "add --cluster FILE",
        )
    if cluster is not None:
        _refuse(
            "these don't go with --cluster",
            {"backend": backend != _BACKEND, "plan": plan, "mapper": mapper, "against": against}
            | {name: value for name, value in choices.items() if name != "keep_float"},
            "leave them out: operators that train in low precision have kernels, not quantizers",
        )
        kept = list(choices.get("keep_float", ()))
        found = open_workload(out, workload)
        allocate(
            out,
            found,
            workload,
            cluster,
            indications,
            planner,
            profiles=profiles or [],
            batch=batch,
            channels_last=channels_last,
            keep_float=kept,
            output=output,
        )
        return
    other = load_plan(against)
    table = find_backend(backend)  # before the workload is opened: a wrong name is found at once
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


def _refuse(what: str, given: Mapping[str, object], fix: str) -> None:
    """Options that would do nothing are named, all of them."""
    names = [f"--{name.replace('_', '-')}" for name, value in given.items() if value not in (None, False, [])]
    if names:
        raise BitwrightError(what, value=", ".join(names), fix=fix)


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
