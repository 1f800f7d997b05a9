"""`bitwright plan`: make, validate and compare plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from bitwright.cli.options import OptionalWorkloadArg, PrecisionOption, exclude, option, require
from bitwright.cli.out import Out
from bitwright.cli.settings import with_choices
from bitwright.cli.verb import verb
from bitwright.core.errors import visible_text


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
    from bitwright.plan import Plan, json_schema
    from bitwright.workflows.quantization import plan_workload

    if schema:
        out.result(json.dumps(json_schema(), indent=1))
        return
    if precision is not None:
        exclude("--precision", {"--plan": plan, "--mapper": mapper})
    if mapper is not None:
        others = {f"--{name.replace('_', '-')}": value for name, value in choices.items() if name != "keep_float"}
        exclude("--mapper", {"--plan": plan, "--backend": backend, **others})
    require("WORKLOAD", workload, "bitwright plan WORKLOAD, or --schema")
    if bits is not None or size is not None:
        exclude("--bits and --size", {"--plan": plan, "--mapper": mapper, "--precision": precision})
        exclude("--bits", {"--size": size if bits is not None else None})
    else:
        fix = "add one of them, because --candidate and --samples apply only to a budget"
        require("--bits or --size", not (candidate or samples), fix)
    other = None if against is None else Plan.load(against)
    given = {"precision": precision, "bits": bits, "size": size, "samples": samples, "plan": plan, "mapper": mapper}
    with out.progress(f"planning {workload}"):
        made = plan_workload(str(workload), backend, candidates=candidate or (), against=other, **given, **choices)
    for note in made.notes:
        out.note(note)
    if output is not None:
        made.plan.save(output)
    out.data({"output": None if output is None else str(output), **made.to_dict()})
    if made.changes is not None and not out.json:
        out.result(visible_text("\n".join(map(str, made.changes))) or "no changes")
    elif output is None and not out.json:
        out.result(made.plan.to_yaml())
    if output is not None:
        out.say(f"{output}: {made.plan.counts_text}")
