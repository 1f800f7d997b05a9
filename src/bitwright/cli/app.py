"""The application: its verbs are known by a table, and imported when they run."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from bitwright.cli.known import known_verbs
from bitwright.version import __version__


class Verbs(TyperGroup):
    """All verbs, none of them imported: torch takes seconds, and neither help nor completion needs it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands.update(known_verbs())

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Whole sentences, where click would cut them off."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _sentence(command.help or "")) for name, command in self.commands.items()])


def _sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s", " ".join(text.split("\n\n", 1)[0].split()), maxsplit=1)[0]


app = typer.Typer(
    name="bitwright",
    cls=Verbs,
    help="Give every operator of a PyTorch model the precision that it deserves.",
    epilog="Start with: bitwright quickstart. Each verb has examples in its own --help.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # errors are told by `verb`, in one place
    rich_markup_mode=None,  # boxes leave an 80-column terminal no room for words
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bitwright {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass
