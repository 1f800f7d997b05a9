"""Verbs as a table knows them: enough for help and completion, without importing what they need to run.

`verbs.json` is made from the verbs themselves (`make verbs`); a test compares both.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from bitwright.cli.completing import completer

TABLE = Path(__file__).with_name("verbs.json")
#: The verbs that were imported, by name: `verb` puts them here.
REAL: dict[str, typer.Typer] = {}


@cache
def read_table() -> list[dict[str, Any]]:
    """What is known of each verb, in the order of --help."""
    table: list[dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def known_verbs() -> dict[str, TyperCommand]:
    """A command for each verb of the table."""
    return {facts["name"]: _command(facts) for facts in read_table()}


def real_verb(name: str, module: str) -> TyperCommand:
    """The verb itself, from its module."""
    import_module(module)
    command = typer.main.get_command(REAL[name])
    assert isinstance(command, TyperCommand)
    return command


class KnownVerb(TyperCommand):
    """Shows help and completes by the table; anything else is the real verb's."""

    facts: dict[str, Any]

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Help ends here. Where `--help` was but an option's value, and for all else, the verb is imported."""
        completing = parent is not None and parent.resilient_parsing
        if completing or {"-h", "--help"} & set(args):
            context = super().make_context(info_name, list(args), parent=parent, **extra)
            if completing:
                return context
        real = real_verb(self.facts["name"], self.facts["module"])
        return real.make_context(info_name, args, parent=parent, **extra)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """As the verb has them."""
        return list(self.facts["usage"])

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """As the verb describes them."""
        for title in ("arguments", "options"):
            rows = [tuple(one["help"]) for one in self.facts[title]]
            if rows:
                with formatter.section(title.capitalize()):
                    formatter.write_dl(rows)


def _command(facts: dict[str, Any]) -> TyperCommand:
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)

    def nothing(**arguments: Any) -> None:
        pass

    nothing.__signature__ = inspect.Signature(list(_parameters(facts)))  # type: ignore[attr-defined]
    nothing.__annotations__ = {one.name: one.annotation for one in _parameters(facts)}
    alone.command(facts["name"], cls=KnownVerb, help=facts["help"])(nothing)
    command = typer.main.get_command(alone)
    assert isinstance(command, KnownVerb)
    command.facts = facts
    return command


def _parameters(facts: dict[str, Any]) -> Iterator[inspect.Parameter]:
    keyword = inspect.Parameter.KEYWORD_ONLY
    for number, one in enumerate([*facts["arguments"], *facts["options"]]):
        names: Sequence[str] = one["names"]
        if "--help" in names:
            continue  # every command has it
        if not names[0].startswith("-"):
            said: Any = typer.Argument(metavar=names[0], autocompletion=completer(names, one["choices"]))
        elif one["flag"]:
            off = one["off"]
            said = typer.Option(*names[:-1], "/".join([names[-1], *off[:1]]))
        else:
            said = typer.Option(*names, autocompletion=completer(names, one["choices"]))
        kind: Any = bool if one["flag"] else list[str] | None if one["many"] else str | None
        yield inspect.Parameter(f"p{number}", keyword, default=None, annotation=Annotated[kind, said])
