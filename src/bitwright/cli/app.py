"""The application that verbs register with."""

from __future__ import annotations

from typing import Annotated

import typer

from bitwright.version import __version__

app = typer.Typer(
    name="bitwright",
    help="Give every operator of a PyTorch model the precision that it deserves.",
    epilog="Start with: bitwright quickstart. Each verb has examples in its own --help.",
    no_args_is_help=True,
    add_completion=False,
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
