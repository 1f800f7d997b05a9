"""Print the results of a verb that writes a quantized model into a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from bitwright.cli.out import Out
from bitwright.cli.verb import CHECK_FAILED
from bitwright.core import formatting

if TYPE_CHECKING:
    from bitwright.workflows import Deployment


def show(out: Out, result: Deployment) -> None:
    """Print a summary and the files, and exit with 1 if a runtime diverges."""

    from bitwright.reports.record import float_and_quantized

    record = result.record
    out.data(result.to_dict())
    rows: list[tuple[str, str, str]] = []
    for accuracy in record.accuracies:
        rows.append(
            (
                f"{accuracy.metric}, {accuracy.where}",
                accuracy.text,
                "" if accuracy is record.accuracies[0] else accuracy.change_from(record.accuracies[0]),
            )
        )
    sizes = float_and_quantized(record)
    if sizes is not None:
        share = f"{100 * sizes[1].bytes / sizes[0].bytes:.0f} % of {formatting.size(sizes[0].bytes)} ({sizes[0].name})"
        rows.append(("size", formatting.size(sizes[1].bytes), share))
    for timing in record.timings:
        if timing.variant == "quantized":
            where = f"latency, {timing.runtime}, batch {timing.batch}"
            rows.append((where, f"{timing.median_ms:.3g} ms", f"{timing.rate_text}, {timing.ratio_text}"))
    for row in record.parities:
        agreement = "" if row.top1_agreement is None else f"top-1 agrees on {100 * row.top1_agreement:.4g} %"
        verdict = "agrees" if row.passed else f"diverges, first at {row.first_divergence or 'the output'}"
        rows.append(
            (
                f"parity, {row.runtime}",
                verdict,
                f"{formatting.decibels(row.sqnr_db)} SQNR, {agreement}".rstrip(", "),
            )
        )
    if record.distance is not None:
        far = record.distance
        agreement = "" if far.top1_agreement is None else f", top-1 agrees on {100 * far.top1_agreement:.4g} %"
        text = f"{formatting.decibels(far.sqnr_db)} SQNR{agreement}"
        rows.append(("simulated against float", "far from float" if far.far else "close to float", text))
    rows.append(("quantized sites", str(len(record.sites)), f"{len(record.float_operators)} operators left in float"))
    out.table([record.title, "#", ""], rows)
    for file in result.files.values():
        out.say(f"  {file}")
    diverged = [row for row in record.parities if not row.passed]
    if diverged:
        names = ", ".join(f"{row.runtime} (first at {row.first_divergence or 'the output'})" for row in diverged)
        out.stderr.print(f"check failed: the artefact diverges from the simulation on {names}")
        raise typer.Exit(CHECK_FAILED)
