"""Print a comparison of runtimes."""

from __future__ import annotations

from bitwright.bench.comparison import Comparison, LatencyRow, OnRuntime, Together
from bitwright.cli.out import Out
from bitwright.core import formatting


def show_comparison(out: Out, result: Comparison) -> None:
    """Print the comparison as tables, or as JSON."""
    out.data(result.to_dict())
    heads = ["runtime", "variant", "metric", "#size", "ran as", "agrees"]
    out.table(heads, [cells for row in result.runtimes for cells in _quality(row)], title=result.workload)
    timings = [timing for row in result.runtimes for timing in row.timings]
    if timings:
        heads = ["runtime", "variant", "#batch", "#p50", "#p90", "#p99", "#of float", "#samples/s"]
        out.table(
            heads, map(_latency, timings), title=f"latency in ms, {formatting.counted(timings[0].threads, 'thread')}"
        )
    if result.together:
        one = result.together[0]
        cores = formatting.counted(len(one.instances[0].cores), "core")
        share = f"{formatting.counted(len(one.instances), 'instance')} × {cores}"
        heads = ["runtime", "variant", "#batch", "instance", "#p50", "#p90", "#p99", "#samples/s", "#of float"]
        rows = [cells for row in result.together for cells in _crowd(row)]
        out.table(heads, rows, title=f"latency in ms and throughput, {share}{'' if one.pinned else ' (not bound)'}")
    for skip in result.skipped:
        out.say(f"skipped {skip.runtime}: {skip.why}")
    for pick in result.fastest:
        speed = f"{pick.median_ms:.3g} ms" if pick.throughput is None else f"{pick.throughput:,.0f} samples/s"
        out.say(f"fastest with batch {pick.batch}: {pick.runtime}, {pick.variant}, {speed}")


def _quality(row: OnRuntime) -> list[tuple[str, ...]]:
    """One line for each variant: what doesn't depend on the batch size."""
    kinds = row.executed_text
    verdict = f"{'yes' if row.parity.passed else 'no'}, {formatting.decibels(row.parity.sqnr_db)}"
    rows: list[tuple[str, ...]] = []
    for size in row.sizes:
        scores = [f"{one.metric} {one.text}" for one in row.accuracies if one.where == size.name]
        told = (kinds, verdict) if size.name == "quantized" else ("float", "")
        rows.append((row.runtime, size.name, ", ".join(scores), formatting.size(size.bytes), *told))
    return rows


def _latency(row: LatencyRow) -> tuple[str, ...]:
    times = [f"{value:.3g}" for value in (row.median_ms, row.p90_ms, row.p99_ms) if value is not None]
    rate = f"{row.batch / row.median_ms * 1e3:,.0f}"
    return (row.runtime, row.variant, str(row.batch), *times, f"{row.ratio:.2f}×", rate)


def _crowd(row: Together) -> list[tuple[str, ...]]:
    """A line for each instance, and one for all of them."""
    name = (row.runtime, row.variant, str(row.batch))
    lines = [
        (
            *name,
            f"cores {','.join(map(str, one.cores))}",
            *_percentiles(one.median_ms, one.p90_ms, one.p99_ms),
            f"{one.throughput:,.0f}",
            "",
        )
        for one in row.instances
    ]
    whole = _percentiles(row.median_ms, row.p90_ms, row.p99_ms)
    return [*lines, (*name, "all", *whole, f"{row.throughput:,.0f}", f"{row.ratio:.2f}×")]


def _percentiles(*values: float) -> tuple[str, ...]:
    return tuple(f"{value:.3g}" for value in values)
