"""Open the database of a store, recognize store addresses, and display them without secrets."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EISDIR
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_plus

import optuna
from optuna.storages import RDBStorage
from sqlalchemy import Connection, event, make_url
from sqlalchemy.exc import IntegrityError
from sqlalchemy.pool import StaticPool

from bitwright.core.errors import BitwrightError, shortened
from bitwright.core.files import disk_error, writing

__all__ = [
    "address_without_secrets",
    "is_address",
    "message_without_secrets",
    "open_storage",
    "without_experimental_warnings",
]

_OPENINGS = 20

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


def open_storage(store: str | Path | None, *, heartbeat: int, grace: int) -> RDBStorage:
    """Open the database of a store: a file, a URL, or None for a database in memory. Times are in seconds."""
    options: dict[str, Any] = {}
    if store is None:
        url = "sqlite:///:memory:"
        options = {"poolclass": StaticPool, "connect_args": {"check_same_thread": False}}
    elif is_address(store):
        url = (
            str(store).replace("postgresql://", "postgresql+psycopg://").replace("postgres://", "postgresql+psycopg://")
        )
        options = {"pool_pre_ping": True}
    else:
        path = _store_file(store)
        url = f"sqlite:///{path}"
        options = {"connect_args": {"timeout": 60}}
    if store is not None and is_address(store):
        _refuse_malformed(url, store)
    for left in reversed(range(_OPENINGS)):
        try:
            with without_experimental_warnings():
                storage = RDBStorage(url, engine_kwargs=options, heartbeat_interval=heartbeat, grace_period=grace)
            if store is not None and url.startswith("sqlite"):
                _one_at_a_time(storage)
            return storage
        except Exception as error:  # drivers and SQLAlchemy raise different types
            # two workers may create the tables, or write their version, at the same time
            if left and (isinstance(error, IntegrityError) or "already exists" in str(error)):
                time.sleep(0.2)
                continue
            refused = None if store is None or is_address(store) else disk_error(error, store, strict=False)
            if refused is not None:
                raise refused from error
            lines = str(error).strip().splitlines() or [type(error).__name__]
            # a driver's message may contain the password, so it is not chained, even with --debug
            raise BitwrightError(
                f"the store can't be opened: {message_without_secrets(lines[0], store)}",
                where=address_without_secrets(store),
                fix="check the address and the server; PostgreSQL needs pip install 'bitwright[postgresql]'",
                code="store-unreachable",
            ) from None
    raise AssertionError("the last attempt returns or raises")


def _store_file(store: str | Path) -> Path:
    """The file of a store. Its folder is created if necessary."""
    path = Path(store)
    if is_address(store):
        raise _not_a_store(store)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
        if path.exists() and not path.is_file():
            raise _not_a_store(store)
    return path


def _not_a_store(store: str | Path) -> BitwrightError:
    fix = "write FILE, sqlite:///FILE or postgresql://user:password@host:5432/database"
    return BitwrightError(
        "this is not the address of a store", where=address_without_secrets(store), fix=fix, code="invalid-store"
    )


def _refuse_malformed(url: str, store: str | Path) -> None:
    """Reject a malformed address before any driver is loaded."""
    try:
        parts = make_url(url)
        memory = parts.database in (None, "", ":memory:") or parts.query.get("mode") == "memory"
        if parts.get_backend_name() == "sqlite" and (memory or parts.host or parts.username):
            raise ValueError("a store in memory can't be shared, and a file has no host")
    except Exception:  # SQLAlchemy's, and ValueError for an invalid port; both messages contain the address
        raise _not_a_store(store) from None


def _one_at_a_time(storage: RDBStorage) -> None:
    """Let a SQLite transaction lock the file when it begins.

    By default Python begins a transaction at the first change, so two workers could both read that a trial is waiting
    and then claim it.
    """

    @event.listens_for(storage.engine, "connect")
    def leave_to_us(connection: Any, _: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(storage.engine, "begin")
    def lock(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    storage.remove_session()
    storage.engine.dispose()  # close earlier connections


@contextmanager
def without_experimental_warnings() -> Iterator[None]:
    """Suppress Optuna's warning that heartbeats are experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield
