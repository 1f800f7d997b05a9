"""`bitwright plan`: make, validate and compare plans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from bitwright.cli.options import OptionalWorkloadArg, PrecisionOption, exclude, open_workload, option, require
from bitwright.cli.out import Out
from bitwright.cli.settings import with_choices
from bitwright.cli.verb import verb
from bitwright.core.errors import visible_text

_SAMPLES = 32  # calibration samples; each needs a gradient


@verb(
    "plan",
    writes=("output",),
    examples="""
    bitwright plan digits -o plan.yaml
    bitwright plan digits --weights int4/group8/sym --keep-float head
    bitwright plan digits --bits 5 --candidate int4/channel --candidate int8/channel -o plan.yaml
    bitwright plan digits --plan edited.yaml --against plan.yaml
    bitwright plan my_workload.py:net --precision qsync-int8 -o plan.yaml
    bitwright plan my_workload.py:net --mapper qsync.npy --keep-float "classifier*" -o plan.yaml
    bitwright plan --schema > plan.schema.json
    """,
)
@with_choices
def plan(
    out: Out,
    workload: OptionalWorkloadArg = None,
    *,
    backend: str | None,
    plan: Any,
    choices: Any,
    precision: PrecisionOption = None,
    bits: Annotated[
        float | None, option("Choose the formats of weights with this mean number of bits.", "--bits", metavar="N")
    ] = None,
    size: Annotated[
        str | None, option("Choose the formats of weights with this size of all parameters (60MB).", "--size")
    ] = None,
    candidate: Annotated[
        list[str] | None, option("A format to choose from, with --bits or --size; can be repeated.", metavar="FORMAT")
    ] = None,
    samples: Annotated[
        int | None, option("Calibration samples for --bits or --size (default: 32).", "--samples", min=1, metavar="N")
    ] = None,
    against: Annotated[Path | None, option("Show the changes from this plan to the new one.")] = None,
    output: Annotated[Path | None, option("Write here, not to stdout.", "--output", "-o")] = None,
    schema: Annotated[bool, option("Print the JSON Schema of plan files.", "--schema")] = False,
    mapper: Annotated[Path | None, option("Convert QSync's mapper (.npy); the file is not executed.")] = None,
) -> None:
    """Choose the number format of every site, with the reason.

    With --plan, an existing plan is validated for the workload instead. `plan-cluster` plans low-precision training.
    """
    from bitwright.backends import DEFAULT_BACKEND, make_plan, plan_warnings, resolve_for_backend
    from bitwright.backends import backend as find_backend
    from bitwright.core.errors import log_warnings
    from bitwright.graph import capture
    from bitwright.importers.qsync import load_mapper, plan_of_mapper, summarize_mapper
    from bitwright.plan import Plan, json_schema
    from bitwright.sensitivity.weight_costs import CANDIDATES, weight_costs
    from bitwright.workload.data import calibration, first

    if schema:
        out.result(json.dumps(json_schema(), indent=1))
        return
    if precision is not None:
        exclude("--precision", {"--plan": plan, "--mapper": mapper})
    if mapper is not None:
        others = {f"--{name.replace('_', '-')}": value for name, value in choices.items() if name != "keep_float"}
        exclude("--mapper", {"--plan": plan, "--backend": backend, **others})
    require("WORKLOAD", workload, "bitwright plan WORKLOAD, or --schema")
    other = None if against is None else Plan.load(against)
    target = backend or (plan.backend if plan is not None else None) or DEFAULT_BACKEND
    table = find_backend(target)  # reject an unknown name before loading the workload
    budget = bits is not None or size is not None
    if budget:
        exclude("--bits and --size", {"--plan": plan, "--mapper": mapper, "--precision": precision})
        exclude("--bits", {"--size": size if bits is not None else None})
    else:
        require(
            "--bits or --size",
            not (candidate or samples),
            "add one of them, because --candidate and --samples apply only to a budget",
        )
    found = open_workload(out, str(workload))
    graph = capture(found.model, found.inputs)
    costs = None
    if budget:
        data = first(calibration(found), samples or _SAMPLES)
        keep = choices.get("keep_float", ())
        formats = candidate or CANDIDATES
        costs = weight_costs(found.model, data, target, graph=graph, keep_float=keep, formats=formats)
    if mapper is not None:
        mapped = load_mapper(mapper)
        made = plan_of_mapper(mapped, graph, model=found.model, exclude=choices.get("keep_float", ()))
        made = replace(made, model=found.name)
        out.note(f"{mapper.name}: {summarize_mapper(mapped)}")
    elif plan is None:
        made = make_plan(
            graph, target, model=found.name, precision=precision, bits=bits, size=size, costs=costs, **choices
        )
    else:
        made = resolve_for_backend(plan, table, graph, name=found.name)
    log_warnings(plan_warnings(graph, made))
    changes = [] if other is None else other.resolve(graph).diff(made)
    if output is not None:
        made.save(output)
    out.data(
        {
            "output": None if output is None else str(output),
            "quantized_sites": len(list(made.quantized)),
            "float_operators": dict(made.float),
            "changes": [vars(change) for change in changes],
            "plan": made.to_yaml(),
        }
    )
    if other is not None and not out.json:
        out.result(visible_text("\n".join(map(str, changes))) or "no changes")
    elif output is None and not out.json:
        out.result(made.to_yaml())
    if output is not None:
        out.say(f"{output}: {made.counts_text}")
