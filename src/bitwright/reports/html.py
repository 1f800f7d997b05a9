"""The Jinja2 environment of all pages, and the frame that they share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bitwright.core import formatting
from bitwright.core.files import yaml_text


@dataclass(frozen=True, kw_only=True)
class Card:
    """One figure at the top of a page."""

    title: str
    value: str
    lines: Sequence[str] = ()
    tone: str = ""


@cache
def templates() -> Environment:
    """The templates of this package; values are escaped."""
    made = Environment(
        loader=PackageLoader("bitwright.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        size=formatting.size,
        counted=formatting.counted,
        decibels=formatting.decibels,
        percent=formatting.percent,
        number=formatting.number,
        repr=repr,
        yaml=yaml_text,
        port=port,
        hashed=lambda name: f"#{name}",
        reasons=_reasons,
    )
    made.globals.update(span=formatting.span, relative_error=formatting.relative_error)
    return made


def port(site: str) -> str:
    """The kind of a site: `input` for `add#0:input1`."""
    return site.rpartition(":")[2].rstrip("0123456789") or "site"


def _reasons(skipped: Mapping[str, str]) -> str:
    return "; ".join(f"{site}: {why}" for site, why in skipped.items())


def all_and(values: Iterable[Any]) -> list[tuple[str, str]]:
    """Options of a filter: all, and each value."""
    return [("", "all"), *((str(value), str(value)) for value in sorted(set(values)))]


def render(template: str, **values: Any) -> Markup:
    """A template of this package, filled in."""
    return Markup(templates().get_template(f"{template}.html.jinja").render(**values))


def document(title: str, body: Markup, *, data: str, nav: Iterable[tuple[str, str]], scripts: Iterable[str]) -> str:
    """A whole page. `scripts` are assets that read `data`, which is JSON; `nav` has ids and names of sections."""
    return render(
        "page",
        title=title,
        body=body,
        nav=nav,
        css=_asset("page.css"),
        script=Markup("\n").join(map(_asset, ("page.js", *scripts))),
        # Only "<" could end the script element; as an escape it is the same JSON.
        data=Markup(data.replace("<", "\\u003c")),
    )


def _asset(name: str) -> Markup:
    return Markup(files("bitwright.reports").joinpath("assets", name).read_text(encoding="utf-8"))
