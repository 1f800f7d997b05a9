"""The model's graph as a heat map. The drawing itself is made by `graph.js`, which knows the width of the screen."""

from __future__ import annotations

from bitwright.report.page.elements import choice, section
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
