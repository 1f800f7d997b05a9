"""Output of verbs: results to stdout, progress and errors to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table
from rich.text import Text

from bitwright.core.errors import UNSEEN, Problem, shortened, shortened_repr, visible_text
from bitwright.core.progress import Progress

Advance = Callable[[int], None]


class _Console(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        """Print texts without control characters."""
        super().print(*(visible_text(one) if isinstance(one, str) else one for one in objects), **options)

    def on_broken_pipe(self) -> None:
        """Raise what the pipe raised: rich would end the process by itself, as if with an error."""
        raise


def _text(words: str) -> Text:
    return Text(visible_text(words))


class Out:
    """The output of one verb. With `json`, stdout has one JSON value; with `quiet`, only errors are printed."""

    def __init__(self, *, json: bool, quiet: bool) -> None:
        self.json = json
        self.quiet = quiet
        # A file or a pipe has no width: rich would cut tables at 80 columns.
        wide = None if sys.stdout.isatty() else 160
        self.stdout = _Console(highlight=False, markup=False, emoji=False, width=wide)
        self.stderr = _Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """Print a line of text."""
        if not (self.json or self.quiet):
            self.stdout.print(text, soft_wrap=True)

    def table(self, heads: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None) -> None:
        """Print a table; columns with a # before their title are right-aligned."""
        if self.json or self.quiet:
            return
        named = None if title is None else _text(title)
        table = Table(box=box.SIMPLE_HEAD, title=named, title_justify="left", pad_edge=False)
        for head in heads:
            side: Literal["left", "right"] = "right" if head.startswith("#") else "left"
            table.add_column(_text(head.removeprefix("#")), justify=side, overflow="fold")
        for row in rows:
            table.add_row(*(_text(cell) for cell in row))
        self.stdout.print(table)

    def result(self, text: str) -> None:
        """Print the requested text unchanged, also with --quiet."""
        typer.echo(text, nl=not text.endswith("\n"))

    def data(self, value: Any) -> None:
        """Print the result as JSON, with --json."""
        if self.json:
            text = json.dumps(_finite(value), indent=1, ensure_ascii=False)
            self.result(UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text))

    def note(self, text: str) -> None:
        """Print a note to stderr."""
        if not self.quiet:
            self.stderr.print(f"note: {text}")

    def error(self, text: str, problems: Sequence[Problem]) -> None:
        """Print an error."""
        self.stderr.print(Text.assemble(("error: ", "bold red"), visible_text(text)))
        details = [
            {
                "code": p.code,
                "what": p.what,
                "where": p.where,
                "value": None
                if p.value is None
                else shortened(str(p.value))
                if isinstance(p.value, str)
                else shortened_repr(p.value),
                "fix": p.fix,
            }
            for p in problems
        ]
        self.data({"error": text, "problems": details})

    @contextmanager
    def steps(self, title: str, total: int | None = None) -> Iterator[Advance]:
        """A progress bar, or a spinner without a total; call what it gives with the number of steps done."""
        shown = not (self.json or self.quiet) and self.stderr.is_terminal
        columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn()]
        if total is not None:
            columns.insert(3, MofNCompleteColumn())
        with ProgressBar(*columns, console=self.stderr, disable=not shown, transient=True) as progress:
            task = progress.add_task(title, total=total)
            yield lambda done: progress.update(task, completed=done)

    @contextmanager
    def progress(self, title: str = "starting") -> Iterator[Progress]:
        """Show the progress of a public function: a bar if the total is known, else a spinner."""
        shown = not (self.json or self.quiet) and self.stderr.is_terminal
        columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn()]
        with ProgressBar(*columns, console=self.stderr, disable=not shown, transient=True) as bar:
            task = bar.add_task(title, total=None)
            yield lambda done, total, text: bar.update(task, completed=done, total=total, description=text)

    @contextmanager
    def phases(self, title: str) -> Iterator[Callable[[str], None]]:
        """A spinner beside what is being done now; call what it gives with each new phase."""
        shown = not (self.json or self.quiet) and self.stderr.is_terminal
        columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()]
        with ProgressBar(*columns, console=self.stderr, disable=not shown, transient=True) as progress:
            task = progress.add_task(title, total=None)
            yield lambda text: progress.update(task, description=text)

    @contextmanager
    def units(self) -> Iterator[Callable[[str, int, int], None]]:
        """A progress bar whose words and total change; it appears when it is first told where the work stands."""
        shown = not (self.json or self.quiet) and self.stderr.is_terminal
        columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()]
        progress = ProgressBar(*columns, TimeElapsedColumn(), console=self.stderr, disable=not shown, transient=True)
        task = progress.add_task("", total=None)

        def tell(words: str, done: int, total: int) -> None:
            progress.start()
            progress.update(task, description=words, completed=done, total=total)

        try:
            yield tell
        finally:
            progress.stop()


def _finite(value: Any) -> Any:
    """JSON has neither infinity nor NaN."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
