"""Texts and selections that the HTML page and the Markdown file share."""

from __future__ import annotations

from bitwright.bench.comparison import Accuracy, LatencyRow, Size
from bitwright.bench.leaderboard import ExecutedSites
from bitwright.core.formatting import number, span
from bitwright.quantizers.site_statistics import SiteRow
from bitwright.reports.record import GridRow, Record


def own_accuracy(record: Record) -> Accuracy:
    """The quantized model's accuracy on the backend's runtime, else on the first checked one, else the last known."""
    names = [record.backend, *(one.runtime for one in record.parities), *(one.runtime for one in record.timings)]
    found = {one.where: one for one in record.accuracies[1:]}
    return next((found[name] for name in names if name in found), record.accuracies[-1])


def own_timings(record: Record) -> tuple[LatencyRow, ...]:
    """Timings of the run, else those that `bitwright bench` measured on the backend's runtime, else on the first."""
    if record.timings or record.comparison is None:
        return record.timings
    rows = [row for row in record.comparison.runtimes if row.timings]
    own = [row for row in rows if record.backend in (row.backend, row.runtime)]
    return next((row.timings for row in (*own, *rows)), ())


def float_and_quantized(record: Record) -> tuple[Size, Size] | None:
    """The two sizes to compare; the first is the reference."""
    return (record.sizes[0], record.sizes[-1]) if len(record.sizes) > 1 else None


def observed_range(site: SiteRow) -> tuple[float, float] | None:
    """The smallest and largest number that reached a site; None: not measured."""
    return None if site.seen_low is None or site.seen_high is None else (site.seen_low, site.seen_high)


def ranges(site: SiteRow) -> tuple[str, str]:
    """The range of the numbers at a site, and the range of its grid.

    The grid of a 32-bit accumulator is far wider than any number, so it is omitted.
    """
    wide = site.format.startswith("int32")
    grid = "" if wide else span(number(site.low), number(site.high))
    found = observed_range(site)
    return ("–" if wide else grid, "") if found is None else (span(*map(number, found)), grid)


def environment_facts(record: Record) -> list[tuple[str, str]]:
    """Names and values of the environment of a run."""
    found = record.environment
    items = [
        ("Machine", f"{found.cpu}, {found.cores} cores, {found.platform}"),
        ("CPU features", ", ".join(found.cpu_features) or "none known"),
        ("Threads of torch", str(found.threads)),
        ("Python", found.python),
        ("Packages", ", ".join(f"{name} {version}" for name, version in found.packages.items())),
        ("Seed", "none" if record.seed is None else str(record.seed)),
    ]
    return items if record.plan_sha256 is None else [*items, ("Plan (SHA-256)", record.plan_sha256)]


def executed_sites(row: GridRow) -> list[tuple[str, ExecutedSites]]:
    """What ran at weights, then at activations."""
    both = {"weights": row.executed.weights, "activations": row.executed.activations}
    return [(role, one) for role, found in both.items() for one in found]


def row_facts(row: GridRow) -> list[tuple[str, str]]:
    """Names and values that describe how a row of a grid ran, without its quantizers."""
    folded = ", ".join(f"{count} by strategy {strategy}" for strategy, count in row.executed.folding.items())
    items = [
        ("Row", row.id),
        ("Float weights", row.start),
        ("Norms", f"folded: {folded}" if folded else "run as they are"),
        ("Biases on the accumulator's grid", str(row.executed.biases)),
    ]
    device = row.device
    if device is not None:
        kinds = ", ".join(f"{count} {kind}" for kind, count in (device.kinds or {}).items() if count)
        told = [] if device.gap is None else [f"{device.gap:+.2f} points from simulated"]
        told += [f"ran {kinds}"] if kinds else []
        items.append((f"On {device.runtime}", device.reason or "; ".join(told)))
    if row.beyond is not None:
        items.append(("Beyond the backend", row.beyond))
    return [*items, *(("Note", note) for note in row.notes)]
