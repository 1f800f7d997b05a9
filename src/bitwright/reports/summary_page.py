"""`report(folders, path)`: one page from the results of one or more runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bitwright.core.arguments import strict
from bitwright.core.errors import BitwrightError
from bitwright.reports.folder import REPORT, join, write_html
from bitwright.reports.markdown import write_markdown
from bitwright.reports.record import Record, read_json, write_json

__all__ = ["report", "write_page"]

_WRITERS = {".html": write_html, ".json": write_json, ".md": write_markdown}


@strict
def report(runs: Any, path: str | Path) -> Record:
    """Write one page (.html, .md or .json) from runs of one workload.

    `runs` is one or a list of: an output folder, a report.json file, a `Record`, or a result with a record
    (`Deployment`). The first run that quantized something is shown in full; the others add their sensitivity, tuning,
    training, runtimes and predictions, and a point in the plots of accuracy against latency and size.

    >>> import bitwright  # doctest: +SKIP
    >>> bitwright.report(["tuned", "digits-int8"], "page.html")  # doctest: +SKIP
    """
    _writer(path)  # before any file is read
    given = list(runs) if isinstance(runs, Iterable) and not isinstance(runs, str | Record) else [runs]
    named = [_read(run) for run in given]
    record = join([record for _, record in named], [name for name, _ in named])
    write_page(record, path)
    return record


def write_page(record: Record, path: str | Path) -> Path:
    """Write a record as HTML, Markdown or JSON, by the suffix of `path`."""
    return Path(_writer(path)(record, path))


def _writer(path: str | Path) -> Any:
    writer = _WRITERS.get(Path(path).suffix)
    if writer is None:
        raise BitwrightError(
            "unknown kind of page",
            where=str(path),
            fix="end its name with .html, .md or .json",
            code="unknown-page-suffix",
        )
    return writer


def _read(run: Any) -> tuple[str, Record]:
    """A title for the run, and its record."""
    if isinstance(run, str | Path):
        place = Path(run)
        title = place.name if place.is_dir() or place.name != REPORT else place.parent.name
        return title, read_json(place / REPORT if place.is_dir() else place)
    record = run if isinstance(run, Record) else getattr(run, "record", None)
    if not isinstance(record, Record):
        raise BitwrightError(
            "this is not a result with a report",
            value=type(run).__name__,
            fix="give an output folder, a report.json, a Record or a Deployment",
            code="no-record",
        )
    return record.title, record
