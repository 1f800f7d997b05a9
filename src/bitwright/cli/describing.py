"""Write down what the verbs say of themselves: the table of `known`, and the man page. `make verbs` runs this."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from bitwright.cli import VERBS
from bitwright.cli.app import app
from bitwright.cli.known import TABLE, real_verb
from bitwright.cli.man import man_page
from bitwright.core.files import write_text

#: In a checkout; a wheel carries the page to share/man, where `man` finds it.
MAN = Path(__file__).parents[3] / "man" / "bitwright.1"


#: What a value is, in a reader's words. Choices (`<a|b>`) say it themselves.
_WORDS = {
    "<list[int]>": "N",
    "<list[str]>": "TEXT",
    "<int range>": "N",
    "<int>": "N",
    "<float range>": "NUMBER",
    "<float>": "NUMBER",
    "<path>": "PATH",
    "<str>": "TEXT",
}


def in_words(text: str) -> str:
    """Types of values as readers call them; an argument's own name says what it is.

    >>> in_words("--batch <int range>"), in_words("FOLDER… <list[Path]>")
    ('--batch N', 'FOLDER…')
    """
    text = re.sub(r"^(\s*[^-\s]\S*) <[a-z\[A-Z\] ]+>", r"\1", text, flags=re.MULTILINE)
    for kind, word in _WORDS.items():
        text = text.replace(kind, word)
    return text


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
        "help": [in_words(parameter.get_help_record(context)[0]), parameter.get_help_record(context)[1]],
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
