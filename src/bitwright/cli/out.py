"""Output of verbs: results to stdout, progress and errors to stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table
from rich.text import Text

from bitwright.core.display import Progress
from bitwright.core.errors import Problem, problem_data, visible_text
from bitwright.core.formatting import json_text

if TYPE_CHECKING:
    from bitwright.core.display import Summarized

CHECK_FAILED = 1


class SafeConsole(Console):
    """A console that prints texts without control characters."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print texts without control characters."""
        super().print(*(visible_text(one) if isinstance(one, str) else one for one in objects), **options)

    def on_broken_pipe(self) -> None:
        """Raise the error of the pipe again. Otherwise rich would end the process with an error code."""
        raise


def safe_text(words: object) -> Text:
    """A text without markup; None is empty."""
    return Text("" if words is None else visible_text(str(words)))


class Out:
    """The output of one verb. With `json`, stdout has one JSON value; with `quiet`, only errors are printed."""

    def __init__(self, *, json: bool, quiet: bool) -> None:
        self.json = json
        self.quiet = quiet
        # A file or a pipe has no width: rich would cut tables at 80 columns.
        wide = None if sys.stdout.isatty() else 160
        self.stdout = SafeConsole(highlight=False, markup=False, emoji=False, width=wide)
        self.stderr = SafeConsole(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def show(self, result: Any, *, output: Path | None = None, most: int | None = None, **more: Any) -> None:
        """Print a result and the files that were written, as text or JSON. Exit with 1 if the result has failures."""
        files = {} if output is None else _files(output)
        written = {} if output is None else {"output": str(output), "files": files}
        self.data({**written, **result.to_dict(), **more})
        self.summary(result, most=most)
        for path in files.values():
            self.say(f"  {path}")
        self.fail_if(result.failures())

    def show_all(self, results: Sequence[Any]) -> None:
        """Print several results of one kind."""
        self.data([result.to_dict() for result in results])
        for result in results:
            self.summary(result)
        self.fail_if([reason for result in results for reason in result.failures()])

    def summary(self, result: Summarized, *, most: int | None = None) -> None:
        """Print the tables and lines of a result, with at most so many rows in each table."""
        for part in result.summary():
            if isinstance(part, str):
                self.say(part)
            else:
                rows, left = part.shown(most)
                self.table(part.heads, rows, title=part.title)
                self.say(f"… and {left} more rows") if left else None

    def say(self, text: str) -> None:
        """Print a line of text."""
        if not (self.json or self.quiet):
            self.stdout.print(text, soft_wrap=True)

    def table(self, heads: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "") -> None:
        """Print a table; columns with a # before their title are right-aligned."""
        if not (self.json or self.quiet):
            named = safe_text(title) if title else None
            table = Table(box=box.SIMPLE_HEAD, title=named, title_justify="left", pad_edge=False)
            for head in heads:
                side: Literal["left", "right"] = "right" if head.startswith("#") else "left"
                table.add_column(safe_text(head.removeprefix("#")), justify=side, overflow="fold")
            for row in rows:
                table.add_row(*map(safe_text, row))
            self.stdout.print(table)

    def result(self, text: str) -> None:
        """Print the requested text unchanged, also with --quiet."""
        typer.echo(text, nl=not text.endswith("\n"))

    def data(self, value: Any) -> None:
        """Print the result as JSON, with --json."""
        if self.json:
            self.result(json_text(value))

    def note(self, text: str) -> None:
        """Print a note to stderr."""
        if not self.quiet:
            self.stderr.print(f"note: {text}")

    def fail_if(self, reasons: Sequence[str]) -> None:
        """Print why a check failed and exit with 1, if there are reasons."""
        for reason in reasons:
            self.stderr.print(f"check failed: {reason}")
        if reasons:
            raise typer.Exit(CHECK_FAILED)

    def error(self, text: str, problems: Sequence[Problem]) -> None:
        """Print an error."""
        self.stderr.print(Text.assemble(("error: ", "bold red"), visible_text(text)))
        self.data({"error": text, "problems": [problem_data(problem) for problem in problems]})

    @contextmanager
    def progress(self, title: str = "starting") -> Iterator[Progress]:
        """Show the progress of a public function: a bar if the total is known, else a spinner."""
        shown = not (self.json or self.quiet) and self.stderr.is_terminal
        columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn()]
        with ProgressBar(*columns, console=self.stderr, disable=not shown, transient=True) as bar:
            task = bar.add_task(title, total=None)

            def tell(done: int, total: int | None, text: str) -> None:
                count = "" if total is None else f" {done}/{total}"
                bar.update(task, completed=done, total=total, description=visible_text(f"{text}{count}"))

            yield tell


def _files(output: Path) -> dict[str, str]:
    """The written file, or the files of the written folder, by name."""
    from bitwright.core.output_folder import visible_files

    return {file.name: str(file) for file in (visible_files(output) if output.is_dir() else [output])}
