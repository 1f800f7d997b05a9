"""A row of a grid: what really ran, and the config that runs it again."""

from __future__ import annotations

from html import escape

from bitwright.files import yaml_text
from bitwright.report import words
from bitwright.report.page.elements import cell, facts, row, section, table
from bitwright.report.record import Record


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
        for role, one in words.executed(found)
    ]
    heads = ["Role", "Quantizer", "Format in force", "#Sites", "#Levels counted"]
    body = table(heads, rows, label="What ran") + facts(words.ran(found))
    config = escape(yaml_text(found.config))
    body += f"<details><summary>Config, as YAML: runs this row again</summary><pre>{config}</pre></details>"
    return section("ran", "What ran", body, note="Read from the trained model, not from the config.")
