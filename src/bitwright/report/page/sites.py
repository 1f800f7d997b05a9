"""The plan: every site with its format, range, loss and reason; and what stayed in float."""

from __future__ import annotations

from html import escape

from bitwright.core import formatting
from bitwright.core.files import yaml_text
from bitwright.quantizers.site_statistics import SiteRow
from bitwright.report.formatting import executed_sites, ranges, row_facts, seen
from bitwright.report.page.elements import cell, choice, facts, pair, row, section, table
from bitwright.report.record import Record


def measures(record: Record) -> list[tuple[str, str]]:
    """What cells can be coloured by: keys that `graph.js` knows, and their names; the most telling first."""
    found: list[tuple[str, str]] = []
    scored = record.sensitivity
    if scored is not None:
        if any(site.loss_change is not None for site in scored.sites):
            found.append(("loss_change", "change of the loss if quantized alone"))
        found.append(("output_error", "error of the outputs if quantized alone"))
    if any(site.sqnr_db is not None for site in record.sites):
        found.append(("sqnr_db", "own noise (SQNR)"))
    if any(site.clipped is not None for site in record.sites):
        found.append(("clipped", "clipped share"))
    if record.sites:
        found.append(("bits", "bits"))
    if any(node.macs for node in record.graph):
        found.append(("macs", "multiply-accumulates"))
    return found


def network(record: Record) -> str:
    """The section, or nothing where no graph was recorded."""
    options = measures(record)
    if not record.graph or not options:
        return ""
    source = "the worst site of each operator"
    if record.sensitivity is not None:
        source += f"; sensitivity by bitwright score on {record.sensitivity.samples} samples"
    note = (
        f"Each box is an operator; data flows from left to right, row by row. The colour is {source}. "
        "Choose a box, or walk with the arrow keys."
    )
    body = (
        f'<div class="tools">{choice("measure", "Colour by", options)}'
        '<span class="legend" id="legend" aria-hidden="true"></span></div>'
        '<div id="network" class="network"></div>'
        '<noscript><p class="note">The drawing needs scripts; the table of sites has the same figures.</p></noscript>'
        '<div id="operator" class="operator" aria-live="polite"></div>'
    )
    return section("graph", f"The model: {len(record.graph)} operators", body, note=note)


def ran(record: Record) -> str:
    """Classes, formats and levels that were read from the trained model."""
    found = record.row
    if found is None:
        return ""
    rows = [
        row(
            cell(role),
            cell(one.quantizer, code=True),
            cell(one.format, code=True),
            cell(str(one.sites), value=one.sites),
            cell(str(one.levels), value=one.levels),
        )
        for role, one in executed_sites(found)
    ]
    heads = ["Role", "Quantizer", "Format in force", "#Sites", "#Levels counted"]
    body = table(heads, rows, label="What ran") + facts(row_facts(found))
    config = escape(yaml_text(found.config))
    body += f"<details><summary>Config, as YAML: runs this row again</summary><pre>{config}</pre></details>"
    return section("ran", "What ran", body, note="Read from the trained model, not from the config.")


HEADS = ("Site", "Format", "#SQNR", "#Clipped", "#Range", "#Scale", "Why")


def plan(record: Record) -> str:
    """The table of sites, with a filter; a row opens to its histogram."""
    if not record.sites:
        return ""
    count = len(record.sites)
    formats = sorted({site.format for site in record.sites})
    ports = sorted({_port(site.site) for site in record.sites})
    damage = {} if record.sensitivity is None else {one.site: one for one in record.sensitivity.sites}
    heads = list(HEADS)
    if damage:
        heads.insert(3, "#Output error")
    tools = (
        '<div class="tools"><input type="search" id="filter" placeholder="Filter: name, format, reason" '
        'aria-label="Filter sites" aria-controls="site-table">'
        f"{choice('by-port', 'Port', [('', 'all'), *((port, port) for port in ports)])}"
        f"{choice('by-format', 'Format', [('', 'all'), *((one, one) for one in formats)])}"
        '<label class="pick only-narrow">Sort<select id="sort-by"></select></label>'
        f'<span class="note" id="shown" role="status">{count} of {count}</span></div>'
    )
    rows = []
    for number, site in enumerate(record.sites):
        scored = damage.get(site.site)
        error = None if not damage else -1.0 if scored is None else scored.output_error
        rows.append(_row(site, number, error))
    opened = "Open a row for its histogram." if any(site.histogram for site in record.sites) else ""
    note = f"What the plan says of each site, and what it costs there. {opened}".strip()
    body = tools + table(heads, rows, label="Sites", sortable=True, anchor="site-table", stacked=True)
    return section("sites", "Plan", body, note=note)


def _port(site: str) -> str:
    """The kind of a site: inputs are numbered where an operator has several."""
    return site.rpartition(":")[2].rstrip("0123456789") or "site"


def _row(site: SiteRow, number: int, error: float | None) -> str:
    how = site.observer if site.quantizer == "plain" else site.quantizer
    how = how if site.share is None else f"grid of {site.share}"
    how += f", guard {site.guard}" if site.guard else ""
    scale = formatting.span(formatting.number(site.scale_min), formatting.number(site.scale_max))
    ends = formatting.span(str(site.zero_point_min), str(site.zero_point_max))
    zero = "" if ends == "0" else f"<small>zero at {escape(ends)}</small>"
    clipped = "–" if site.clipped is None else formatting.percent(site.clipped)
    sqnr = "–" if site.sqnr_db is None else f"{site.sqnr_db:.1f} dB"
    opener = (
        f'<button type="button" class="opener" aria-expanded="false" data-n="{number}">'
        f"<code>{escape(site.site)}</code></button>"
    )
    cells = [
        f"<td>{opener}</td>",
        f"<td><code>{escape(site.format)}</code><small>{escape(how)}</small></td>",
        cell(sqnr, value=1e9 if site.sqnr_db is None else site.sqnr_db),
        cell(clipped, value=-1.0 if site.clipped is None else site.clipped),
        _range(site),
        f'<td class="n" data-v="{site.scale_min!r}">{escape(scale)}{zero}</td>',
        f'<td class="why">{escape(site.why)}</td>',
    ]
    if error is not None:
        cells.insert(3, cell("–" if error < 0 else formatting.percent(error), value=error))
    return f'<tr data-port="{escape(_port(site.site))}" data-format="{escape(site.format)}">{"".join(cells)}</tr>'


def _range(site: SiteRow) -> str:
    """What was seen; the grid under it."""
    shown, grid = ranges(site)
    low, high = seen(site) or (site.low, site.high)
    below = f"<small>grid {escape(grid)}</small>" if grid else ""
    return f'<td class="n" data-v="{high - low!r}">{escape(shown)}{below}</td>'


def left(record: Record) -> str:
    """What stayed in float, and what vanished into its neighbour: nothing is skipped silently."""
    if not record.sites and not record.float_operators:
        return ""
    if record.float_operators:
        rows = [row(cell(one.operator, code=True), cell(one.kind), cell(one.why)) for one in record.float_operators]
        inner = table(["Operator", "Kind", "Why"], rows, label="Left in float", sortable=True)
    else:
        inner = '<p class="note">None: all operators of this model are quantized, or part of one that is.</p>'
    text = section("float", "Left in float", inner)
    folds = ""
    if record.folds:
        rows = [row(cell(norm, code=True), cell(into, code=True)) for norm, into in record.folds.items()]
        folds = section("folds", "Folded", table(["Batch norm", "Into"], rows, label="Folded batch norms"))
    return pair(text, folds)
