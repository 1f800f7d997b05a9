"""`bitwright list`: what is registered, and whether it works here."""

from __future__ import annotations

from typing import Annotated

import typer

from bitwright.cli.out import Out
from bitwright.cli.verb import verb


@verb(
    "list",
    examples="""
    bitwright list
    bitwright list backends
    bitwright list runtimes --json
    """,
)
def list_(
    out: Out,
    kind: Annotated[str | None, typer.Argument(metavar="KIND", help="Only this kind.", show_default=False)] = None,
) -> None:
    """List observers, quantizers, backends, runtimes and other plugins, and whether they work here."""
    from bitwright.workflows.doctor import KINDS, list_plugins

    out.show(list_plugins(KINDS if kind is None else [kind]))
