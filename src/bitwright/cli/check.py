"""`bitwright check`: compare an artefact on the real runtime with the simulated model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bitwright.cli.data import open_workload, probes
from bitwright.cli.options import SamplesOption, WorkloadArg
from bitwright.cli.out import Out
from bitwright.cli.prepared import CheckpointOption, PlanOption, read_plan
from bitwright.cli.verb import CHECK_FAILED, verb
from bitwright.core import formatting

if TYPE_CHECKING:
    from bitwright.deployment import Check


@verb(
    "check",
    examples="""
    bitwright check digits --plan out/plan.yaml --checkpoint out/checkpoint.safetensors out/model.onnx
    bitwright check digits --plan p.yaml --checkpoint c.safetensors m.onnx --runtime openvino --per-site
    """,
)
def check(
    out: Out,
    workload: WorkloadArg,
    artefact: Annotated[Path, typer.Argument(metavar="ARTEFACT", help="The exported file.")],
    plan: PlanOption = None,
    checkpoint: CheckpointOption = None,
    runtime: Annotated[
        str | None,
        typer.Option(
            help="A runtime, or `all` that can be used here (default: that of the plan's backend).",
            show_default=False,
        ),
    ] = None,
    per_site: Annotated[bool, typer.Option("--per-site", help="Compare the codes at every site too.")] = False,
    samples: SamplesOption = None,
) -> None:
    """Run an artefact on the real runtime and compare it with the simulated model and with the float model.

    Exits with 1 if an output diverges, or if the weights or scales of the file are not those of the model, and names
    the first such site. A large distance from the float model is only a warning.
    """
    from bitwright.deployment import check as check_model
    from bitwright.deployment import default_runtime, open_runtime, readers
    from bitwright.ptq.quantize import load_prepared
    from bitwright.workload.data import rebatched

    chosen = read_plan(plan, checkpoint)
    names = readers(artefact) if runtime == "all" else [runtime or default_runtime(chosen[0].backend, artefact)[0]]
    # a damaged artefact ends this before the workload is loaded
    sizes = {name: open_runtime(name, artefact).batch for name in names}
    found = open_workload(out, workload)
    load_prepared(found, *chosen)
    results: list[Check] = []
    for name in names:
        with out.steps(f"checking on {name}"):
            size = sizes[name]
            data = rebatched(probes(found, samples), size)
            result = check_model(found.model, artefact, data, runtime=name if runtime else None, per_site=per_site)
            if not result.passed and not per_site:  # find the first diverging site
                data = rebatched(probes(found, size or 1), size)
                sites = check_model(found.model, artefact, data, runtime=name, per_site=True, measure=False)
                result = replace(result, sites=sites.sites, unseen=sites.unseen, probe=sites.probe)
        results.append(result)
    _show(out, results, per_site=per_site)


def _show(out: Out, results: list[Check], *, per_site: bool) -> None:

    out.data([result.to_dict() for result in results])
    rows = []
    for result in results:
        for output in result.outputs:
            agreement = "" if output.top1_agreement is None else f"{100 * output.top1_agreement:.4g} %"
            verdict = "agrees" if output.passed else "diverges"
            sqnr = formatting.decibels(None if output.sqnr_db == float("inf") else output.sqnr_db)
            rows.append((result.runtime, output.name, verdict, sqnr, f"{output.max_error:.3g}", agreement))
    out.table(["runtime", "output", "verdict", "#SQNR", "#largest error", "#same top-1"], rows)
    _show_distance(out, results[0])
    if per_site:
        for result in results:
            _show_sites(out, result)
    failed = [result for result in results if not result.passed]
    for result in failed:
        for damage in result.damages:
            out.stderr.print(f"check failed: the artefact is not the model's: {damage.site}: {damage.what}")
        where = result.first_divergence or "no single site: only the output differs"
        out.stderr.print(f"check failed: {result.runtime} diverges; first diverging site: {where}")
    if failed:
        raise typer.Exit(CHECK_FAILED)


def _show_distance(out: Out, result: Check) -> None:
    """The same for all runtimes: only the simulated model and the float model take part."""

    distance = result.distance
    if distance is None:
        return
    out.table(
        ["simulated against float", "#SQNR", "#same top-1"],
        [
            (
                output.name,
                formatting.decibels(None if output.sqnr_db == float("inf") else output.sqnr_db),
                "" if output.top1_agreement is None else f"{100 * output.top1_agreement:.4g} %",
            )
            for output in distance.outputs
        ],
    )


def _show_sites(out: Out, result: Check) -> None:

    out.table(
        [f"site ({result.runtime})", "#codes that differ", "#largest, LSB", "#SQNR", ""],
        [
            (
                site.site,
                f"{100 * site.differing:.3g} %",
                str(site.largest),
                formatting.decibels(None if site.sqnr_db == float("inf") else site.sqnr_db),
                site.grid or ("diverges" if site.diverges else ""),
            )
            for site in result.sites
        ],
    )
    if result.unseen:
        out.say(f"sites without own codes in the artefact: {', '.join(result.unseen)}")
    if result.probe is not None:
        verdict = (
            "its other outputs equal those of the artefact"
            if result.probe.outputs_identical
            else "its other outputs differ, because the runtime fuses operators differently there"
        )
        out.say(f"measured in a copy of the artefact with {result.probe.outputs} more outputs; {verdict}")
    out.say(f"first diverging site on {result.runtime}: {result.first_divergence or 'none'}")
