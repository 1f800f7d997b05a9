"""The tables of keys of all importers, for `bitwright list` and the migration pages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from bitwright.core.arguments import strict
from bitwright.core.display import Summarized, Table
from bitwright.core.errors import UnknownName, did_you_mean
from bitwright.importers.key_table import KeyRow, Section, rows
from bitwright.importers.lpot import LpotConfig
from bitwright.importers.mqbench import HuggingFaceConfig, ToolkitConfig, ZooConfig

__all__ = ["TABLES", "ImportedKeys", "key_rows", "keys_page", "list_keys"]

TABLES: dict[str, tuple[str, type[Section]]] = {
    "lpot": ("LPOT and Neural Compressor 1.x", LpotConfig),
    "mqbench-zoo": ("MQBench: configurations of the paper's zoo", ZooConfig),
    "mqbench-toolkit": ("MQBench: the toolkit's ImageNet example", ToolkitConfig),
    "mqbench-text": ("MQBench: the toolkit's text example", HuggingFaceConfig),
}
"""The title and the table of each kind of file."""
_HEAD = """\
# Keys of other systems' files

Bitwright reads files of LPOT and MQBench. **Honoured** keys keep their meaning when the file runs; where only some
values do, the table says so, and the others stop before any work with the code `cannot-run`. **Noted** keys can't
change the result; they are accepted and reported once. **In code**: the file is read, but it only runs if you pass this
part in Python: a loader, `eval_func` or `postprocess`. **Rejected** keys are errors, with the reason and a fix. Any
other key is an error, too.

`bitwright quantize --config` runs the files of MQBench's toolkit. `bitwright train` and `bitwright grid run` apply
every honoured key of the paper's zoo.

`python -m bitwright.importers.key_listing` writes this page from the tables that the importers use.
"""


def key_rows(name: str) -> list[KeyRow]:
    """The rows of a table by its name in `TABLES`. Sections that occur several times are listed once."""
    return list(rows(TABLES[name][1], seen={}))


@dataclass(frozen=True)
class ImportedKeys(Summarized):
    """The keys of a kind of file, and how each is handled."""

    title: str
    rows: list[KeyRow]

    def __repr__(self) -> str:
        return f"<ImportedKeys of {self.title}: {len(self.rows)}>"

    def summary(self) -> Iterator[Table]:
        """One row for each key."""
        yield Table(
            ["key", "handling", "", "fix"], [tuple(asdict(row).values()) for row in self.rows], title=self.title
        )

    def to_dict(self) -> dict[str, Any]:
        """The rows as plain data."""
        return {"title": self.title, "keys": [asdict(row) for row in self.rows]}


@strict
def list_keys(table: str) -> ImportedKeys:
    """List the keys that files of another system may have: honoured, noted, in code or rejected.

    >>> list_keys("mqbench-text")
    <ImportedKeys of MQBench: the toolkit's text example: 38>
    """
    if table not in TABLES:
        raise UnknownName("unknown importer", value=table, fix=did_you_mean(table, TABLES), code="unknown-name")
    return ImportedKeys(TABLES[table][0], key_rows(table))


def keys_page() -> str:
    """The page of all keys in Markdown."""
    parts = [_HEAD]
    for name, (title, _) in TABLES.items():
        lines = [f"## {title}\n", "| key | | |", "|---|---|---|"]
        for row in key_rows(name):
            text = f"{row.text} Fix: {row.advice}." if row.advice else row.text
            lines.append(f"| `{row.key}` | {row.handling} | {text.replace('|', chr(92) + '|')} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":  # python -m bitwright.importers.key_listing > docs/migrate/keys.md
    sys.stdout.write(keys_page())
