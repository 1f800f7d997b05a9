"""Recognize store addresses and display them without secrets."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, unquote_plus

from bitwright.core.errors import shortened

__all__ = ["address_without_secrets", "is_address", "message_without_secrets"]

_ADDRESS = re.compile(r"(?:\w*sql\w*(?:\+\w+)?|postgres|oracle|redis)(?::|//)|[^/\\@]+:[^/\\@]*@", re.IGNORECASE)
"""The start of an address, including incomplete ones: a file with such a name would expose the password."""
_SECRET = re.compile(r"([^=?&;#\s]*(?:pass|pwd|secret|token|key|credential)[^=?&;#\s]*\s*=\s*)[^&;#]*", re.IGNORECASE)
_HARMLESS = {"host", "port", "dbname", "user", "sslmode", "connect_timeout", "timeout", "application_name", "uri"}
"""Options with values that may appear in a driver's message."""


def is_address(store: object) -> bool:
    """Whether `store` is, or was meant to be, the address of a server or database. Otherwise it is a file."""
    return "://" in str(store) or _ADDRESS.match(str(store)) is not None


def address_without_secrets(store: str | Path | None) -> str:
    """The store's address without user, password and option values."""
    text = str(store)
    if not is_address(text):
        return text
    scheme, mark, rest = text.partition("://" if "://" in text else ":")
    address, query, options = rest.partition("?")
    _, at, tail = address.rpartition("@")
    if "@" in options:  # ambiguous: a password with a question mark, or an option with an @
        return f"{scheme}{mark}…"
    known = (re.match(r"\w+=", option) for option in options.split("&"))
    names = "&".join(f"{name[0] if name else ''}…" for name in known) if query else ""
    return f"{scheme}{mark}{'…@' if at else ''}{_SECRET.sub(_masked, tail)}{query}{names}"


def _masked(match: re.Match[str]) -> str:
    return f"{match[1]}…"


def message_without_secrets(words: str, store: str | Path | None) -> str:
    """A driver's message without the password or parts of it."""
    text = str(store)
    words = words.replace(text, address_without_secrets(store))
    for secret in sorted(_secrets(text), key=len, reverse=True):
        # match short secrets only as separate words
        pattern = re.escape(secret) if len(secret) > 3 else rf"(?<!\w){re.escape(secret)}(?!\w)"
        words = re.sub(pattern, "…", words)
    return shortened(_SECRET.sub(_masked, words), 400)


def _secrets(text: str) -> set[str]:
    """The secrets in an address: raw, decoded, and split at separators, because drivers may cut the text anywhere."""
    rest = text.partition("://")[2]
    found = {
        rest.rpartition("@")[0].partition(":")[2],
        *(one[0].removeprefix(one[1]) for one in _SECRET.finditer(text)),
    }
    for option in rest.partition("?")[2].split("&"):
        name, _, value = option.partition("=")
        if name not in _HARMLESS:
            found.add(value)
    whole = {form for secret in found for form in (secret, unquote(secret), unquote_plus(secret))}
    parts = {part for secret in whole for part in re.split(r"[@:/?#&=;]", secret)}
    return {secret for secret in whole | parts if secret}
