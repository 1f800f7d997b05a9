"""Write down what the verbs say of themselves: the table of `known`, and the man page. `make verbs` runs this."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bitwright.cli import VERBS, app
from bitwright.cli.known import TABLE, real_verb
from bitwright.cli.man import man_page
from bitwright.files import write_text

#: In a checkout; a wheel carries the page to share/man, where `man` finds it.
MAN = Path(__file__).parents[3] / "man" / "bitwright.1"


def describe() -> list[dict[str, Any]]:
    """Facts about every verb, from the verbs themselves."""
    return [_facts(name, f"bitwright.cli.{module}") for name, module in VERBS.items()]


def _facts(name: str, module: str) -> dict[str, Any]:
    command = real_verb(name, module)
    context = command.context_class(command, info_name=name, **(app.info.context_settings or {}))
    facts: dict[str, Any] = {
        "name": name,
        "module": module,
        "help": command.help,
        "usage": command.collect_usage_pieces(context),
        "arguments": [],
        "options": [],
    }
    for parameter in command.get_params(context):
        argument = parameter.param_type_name == "argument"
        facts["arguments" if argument else "options"].append(_parameter(parameter, context, argument=argument))
    return facts


def _parameter(parameter: Any, context: Any, *, argument: bool) -> dict[str, Any]:
    kind = parameter.type_descriptor.annotation
    return {
        "names": [parameter.metavar or parameter.name.upper()] if argument else sorted(parameter.opts, key=len),
        "off": list(parameter.secondary_opts),
        "flag": bool(getattr(parameter, "is_flag", False)),
        "many": bool(parameter.multiple) or parameter.nargs == -1,
        "choices": [one.value for one in kind] if hasattr(kind, "__members__") else None,
        "help": list(parameter.get_help_record(context)),
    }


def table_text(table: list[dict[str, Any]]) -> str:
    """The file's text."""
    return json.dumps(table, indent=1, ensure_ascii=False) + "\n"


def write() -> None:
    """Both files."""
    table = describe()
    write_text(TABLE, table_text(table))
    MAN.parent.mkdir(exist_ok=True)
    write_text(MAN, man_page(table))


if __name__ == "__main__":
    write()
