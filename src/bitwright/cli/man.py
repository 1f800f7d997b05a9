"""The man page, from what is known of the verbs."""

from __future__ import annotations

import re
from typing import Any

from bitwright.version import __version__

_ABOUT = """
Bitwright plans, calibrates, trains, exports and checks quantized PyTorch models. A plan, a small YAML file, says for
each operator which number format it has, and why; every verb makes a plan or obeys one.
""".strip()

_WORKLOAD = """
WORKLOAD is file.py:function, a function that returns a bitwright.Workload (a model with its data), or a name that
"bitwright list workloads" shows.
""".strip()

_COMMON = {"--json", "--quiet", "--debug", "--help"}

_EXITS = {
    "0": "All is well.",
    "1": "A check failed, or a goal was missed; what was made is written all the same.",
    "2": "Wrong usage or input; nothing was written.",
    "70": "An error of Bitwright's own; --debug shows where.",
    "130": "Interrupted.",
}

_ENVIRONMENT = {
    "BITWRIGHT_DATA": "The folder of data sets that reference workloads read.",
    "OMP_NUM_THREADS": "Threads of torch; measure with a fixed number.",
}


def man_page(table: list[dict[str, Any]]) -> str:
    """The page in roff, of the verbs in this table."""
    lines = [
        f'.TH BITWRIGHT 1 "" "Bitwright {__version__}" "User Commands"',
        ".SH NAME",
        r"bitwright \- give every operator of a PyTorch model the precision that it deserves",
        ".SH SYNOPSIS",
        ".B bitwright",
        r".I VERB",
        r"[\fIOPTIONS\fR]",
        ".SH DESCRIPTION",
        _text(_ABOUT),
        ".PP",
        _text(_WORKLOAD),
        ".PP",
        "Start with",
        r'.BR "bitwright quickstart" .',
        ".SH VERBS",
        *(line for facts in table for line in _verb(facts)),
        ".SH OPTIONS OF ALL VERBS",
        *_list({one["help"][0]: one["help"][1] for one in table[0]["options"] if _COMMON & set(one["names"])}),
        ".SH EXIT STATUS",
        *_list(_EXITS),
        ".SH ENVIRONMENT",
        *_list(_ENVIRONMENT),
        ".SH FILES",
        *_list({"plan.yaml": "A plan.", "device.json": "A profile of a device.", "cluster.yaml": "Devices and links."}),
    ]
    return "\n".join(lines) + "\n"


def _verb(facts: dict[str, Any]) -> list[str]:
    about, _, examples = facts["help"].partition("\b\nExamples:\n")
    lines = [f".SS bitwright {_text(facts['name'])} {_text(' '.join(facts['usage']))}"]
    for number, paragraph in enumerate(about.strip().split("\n\n")):
        lines += [".PP"] * (number > 0) + [_text(" ".join(paragraph.split()))]
    for one in [*facts["arguments"], *facts["options"]]:
        left, right = one["help"]
        if not _COMMON & set(one["names"]):
            lines += [".TP", rf"\fB{_text(left)}\fR", _text(right)]
    if examples:
        lines += [".PP", "Examples:", ".PP", ".nf", ".RS", *(_text(line.strip()) for line in examples.splitlines())]
        lines += [".RE", ".fi"]
    return lines


def _list(items: dict[str, str]) -> list[str]:
    return [line for name, text in items.items() for line in (".TP", rf"\fB{_text(name)}\fR", _text(text))]


def _text(text: str) -> str:
    """Backslashes and hyphens mean themselves; a line can't begin a request by chance; any roff reads ASCII."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-")
    escaped = "".join(one if one.isascii() else rf"\[u{ord(one):04X}]" for one in escaped)
    return re.sub(r"^([.'])", r"\\&\1", escaped, flags=re.M)
