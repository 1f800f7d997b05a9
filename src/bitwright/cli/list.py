"""`bitwright list`: what is registered, and whether it works here."""

from __future__ import annotations

from typing import Annotated

import typer

from bitwright.cli.out import Out
from bitwright.cli.verb import verb
from bitwright.core.errors import UnknownName


@verb(
    "list",
    examples="""
    bitwright list
    bitwright list backends
    bitwright list runtimes --json
    bitwright list importers lpot
    """,
)
def list_(
    out: Out,
    kind: Annotated[str | None, typer.Argument(metavar="KIND", help="Only this kind.", show_default=False)] = None,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The keys of this importer's files.", show_default=False)
    ] = None,
) -> None:
    """List observers, quantizers, backends, runtimes and other plugins, and whether they work here."""
    from bitwright.workflows.doctor import KINDS, list_plugins

    if name is None:
        out.show(list_plugins(KINDS if kind is None else [kind]))
        return
    from bitwright.importers.key_listing import list_keys

    if kind != "importers":
        raise UnknownName("only importers have keys", value=kind, fix=f"bitwright list {kind}", code="invalid-value")
    out.show(list_keys(name))
