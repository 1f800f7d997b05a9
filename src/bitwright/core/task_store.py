"""Store the tasks and outcomes of a study in a local file or in PostgreSQL, with Optuna.

A search (`tune`) or a grid (`bench`) requests tasks in an order that depends only on its settings and on earlier
outcomes. So a study can be resumed, or shared by workers, by requesting all tasks from the beginning: known outcomes
are looked up, other tasks are claimed. A trial is identified by its task. If several trials have the same task (two
workers may create it at the same time), the one with the lowest number counts and the others are never run.

The addresses of stores are displayed without secrets.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import EISDIR
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import unquote, unquote_plus

import optuna
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from pydantic import BaseModel
from sqlalchemy import Connection, event, make_url
from sqlalchemy.exc import IntegrityError
from sqlalchemy.pool import StaticPool

from bitwright.core.errors import BitwrightError, PlanError, Problem, shortened
from bitwright.core.files import boot_id, disk_error, process_start, writing
from bitwright.core.interrupts import uninterrupted

__all__ = [
    "Claim",
    "OutcomeT",
    "Study",
    "Task",
    "TaskT",
    "address_without_secrets",
    "is_address",
    "message_without_secrets",
    "open_storage",
    "open_study",
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


_BEAT, _GRACE = 10, 40  # seconds
_RETRIES = 10
_KEY, _TASK, _OUTCOME, _WORKER = "key", "candidate", "outcome", "worker"
_INTERRUPTED, _FAILURE = "interrupted", "failure"
_IDENTITY, _MEMO, _SESSION = "identity", "memo:", "session:"


class Task(Protocol):
    """A unit of work with an outcome. Equal tasks have equal keys."""

    @property
    def key(self) -> str:
        """A short identifier of its contents."""

    def to_json(self) -> dict[str, Any]:
        """Its JSON representation in the store."""


TaskT = TypeVar("TaskT", bound=Task)
OutcomeT = TypeVar("OutcomeT", bound=BaseModel)


@dataclass(frozen=True)
class Claim:
    """A trial that this process is running, by its id in the storage."""

    id: int


class Study(Generic[TaskT, OutcomeT]):
    """One search or grid: its identity and the known outcomes of its tasks.

    `kind` is the model of outcomes. `gave_up` creates an outcome for a task that repeatedly killed its process. An
    outcome's `objective`, if it has one, is the trial's value.
    """

    def __init__(
        self,
        storage: RDBStorage,
        study: optuna.Study,
        kind: type[OutcomeT],
        gave_up: Callable[[str], OutcomeT],
        store: str | Path | None = None,
    ) -> None:
        self._store = store
        self._storage, self._study = storage, study
        self._study_id = storage.get_study_id_from_name(study.study_name)
        database = storage.engine.url.database if storage.engine.url.drivername.startswith("sqlite") else None
        self._file = None if database in (None, ":memory:") else Path(str(database))
        self._kind, self._gave_up = kind, gave_up
        self._session = f"{_SESSION}{socket.gethostname()}:{os.getpid()}:{time.time_ns()}"
        self._began = time.time()

    def known(self, task: TaskT) -> OutcomeT | None:
        """The outcome of a finished task; None if it isn't finished."""
        with self._guarded():
            trial = self._find(task.key)
            if trial is None or _OUTCOME not in trial.user_attrs:
                return None
            if not trial.state.is_finished():  # killed between writing the outcome and closing the trial
                self._close(self._id(trial))
            return self._kind.model_validate(trial.user_attrs[_OUTCOME])

    def claim(self, task: TaskT) -> Claim | None:
        """Claim a task. Return None if another worker is running it or has just finished it."""
        with self._guarded():
            return self._claim(task)

    def _claim(self, task: TaskT) -> Claim | None:
        self._fail_dead_workers()
        trial = self._find(task.key)
        if trial is None:
            attributes = {_KEY: task.key, _TASK: task.to_json()}
            if self._deaths(task.key) > _RETRIES:
                reason = f"the process that evaluated it died {_RETRIES + 1} times"
                attributes[_OUTCOME] = self._gave_up(reason).model_dump(mode="json")
            state = TrialState.PRUNED if _OUTCOME in attributes else TrialState.WAITING
            self._study.add_trial(optuna.create_trial(state=state, user_attrs=attributes))
            trial = self._find(task.key)
            assert trial is not None
        if trial.state != TrialState.WAITING:
            return None
        trial_id = self._id(trial)
        try:
            # if this process is killed after this line, others detect it by its pid or by missing heartbeats
            self._storage.set_trial_user_attr(trial_id, _WORKER, _who())
            self._storage.record_heartbeat(trial_id)
            if not self._storage.set_trial_state_values(trial_id, TrialState.RUNNING):
                return None
            self._storage.set_trial_user_attr(trial_id, _WORKER, _who())  # another worker may have overwritten it
        except optuna.exceptions.UpdateFinishedTrialError:
            return None
        return Claim(trial_id)

    def finish(self, claim: Claim, outcome: OutcomeT) -> None:
        """Store the outcome, unless other workers have declared this one dead and closed the trial."""
        with self._guarded(), suppress(optuna.exceptions.UpdateFinishedTrialError):
            self._storage.set_trial_user_attr(claim.id, _OUTCOME, outcome.model_dump(mode="json"))
            self._close(claim.id)

    def release(self, claim: Claim) -> None:
        """Release an interrupted task for another worker or the next run."""
        with self._guarded(), suppress(optuna.exceptions.UpdateFinishedTrialError):
            self._storage.set_trial_user_attr(claim.id, _INTERRUPTED, True)
            self._fail(claim.id)

    def fail(self, claim: Claim, failure: OutcomeT) -> None:
        """Record a failure and release the task. `failures` lists all failures of a task."""
        with self._guarded(), suppress(optuna.exceptions.UpdateFinishedTrialError):
            self._storage.set_trial_user_attr(claim.id, _FAILURE, failure.model_dump(mode="json"))
            self._fail(claim.id)

    def failures(self, task: TaskT) -> list[OutcomeT]:
        """The failures of a task so far, in order."""
        with self._guarded():
            own = (t for t in self._all() if t.user_attrs.get(_KEY) == task.key and _FAILURE in t.user_attrs)
            return [self._kind.model_validate(t.user_attrs[_FAILURE]) for t in sorted(own, key=lambda t: t.number)]

    @contextmanager
    def heartbeats(self, claim: Claim) -> Iterator[None]:
        """Send heartbeats to other machines during this block."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(_BEAT):
                with suppress(Exception):  # the server may be briefly unavailable; later calls report a lasting failure
                    self._storage.record_heartbeat(claim.id)

        with self._guarded():
            self._storage.record_heartbeat(claim.id)
        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def recall(self, name: str) -> Any:
        """The value stored under a name, or None."""
        with self._guarded():
            return self._study.user_attrs.get(_MEMO + name)

    def keep(self, name: str, value: Any) -> Any:
        """Store a value that all workers and later runs share. The first stored value counts."""
        with self._guarded():
            if self.recall(name) is None:
                self._study.set_user_attr(_MEMO + name, value)
            return self.recall(name)

    def spent(self) -> float:
        """Seconds during which at least one worker was running this study."""
        with self._guarded():
            self._study.set_user_attr(self._session, [self._began, time.time()])
            spans = sorted(span for name, span in self._study.user_attrs.items() if name.startswith(_SESSION))
            total, reached = 0.0, 0.0
            for begin, end in spans:
                total += max(0.0, end - max(begin, reached))
                reached = max(reached, end)
            return total

    def close(self) -> None:
        """Close the database connection."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Defer signals during a database operation, and report disk errors as such."""
        with uninterrupted(), _store_errors(self._store), writing(self._file or "the store", strict=True):
            yield

    def _all(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)  # Optuna rereads only unfinished trials

    def _id(self, trial: FrozenTrial) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._study_id, trial.number)

    def _find(self, key: str) -> FrozenTrial | None:
        """The trial of this task that counts: a finished one, or the first that has not failed."""
        own = [t for t in self._all() if t.user_attrs.get(_KEY) == key and t.state != TrialState.FAIL]
        return min(own, key=lambda t: (_OUTCOME not in t.user_attrs, t.number), default=None)

    def _close(self, trial_id: int) -> None:
        values = self._storage.get_trial(trial_id).user_attrs[_OUTCOME]
        objective = values.get("objective")
        state = TrialState.COMPLETE if objective is not None else TrialState.PRUNED
        with suppress(optuna.exceptions.UpdateFinishedTrialError):  # another worker has closed it
            self._storage.set_trial_state_values(trial_id, state, None if objective is None else [objective])

    def _fail_dead_workers(self) -> None:
        """Fail trials of dead workers: immediately on this machine, after missing heartbeats on others."""
        with without_experimental_warnings():
            optuna.storages.fail_stale_trials(self._study)
        for trial in self._all():
            if trial.state != TrialState.RUNNING or _alive(trial.user_attrs.get(_WORKER)):
                continue
            if _OUTCOME in trial.user_attrs:
                self._close(self._id(trial))
            else:
                self._fail(self._id(trial))

    def _fail(self, trial_id: int) -> None:
        # another worker may have done this already
        with suppress(optuna.exceptions.UpdateFinishedTrialError):
            self._storage.set_trial_state_values(trial_id, TrialState.FAIL)

    def _deaths(self, key: str) -> int:
        """How many times the process that ran this task died."""
        failed = [t for t in self._all() if t.state == TrialState.FAIL and t.user_attrs.get(_KEY) == key]
        return sum(not {_INTERRUPTED, _FAILURE} & set(trial.user_attrs) for trial in failed)


def open_study(
    store: str | Path | None,
    name: str,
    identity: Mapping[str, Any],
    *,
    resume: bool,
    kind: type[OutcomeT],
    gave_up: Callable[[str], OutcomeT],
) -> Study[Any, OutcomeT]:
    """Create a study or resume one. A study with a different `identity` raises an error.

    `store` is a file, a URL (postgresql://…), or None for a store in memory.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = open_storage(store, heartbeat=_BEAT, grace=_GRACE)
    text = json.loads(json.dumps(dict(identity)))
    file = None if store is None or is_address(store) else Path(store)
    with _store_errors(store), writing(file or "the store", strict=True):
        study = _begun(storage, store, name, text, resume=resume)
    return Study(storage, study, kind, gave_up, store)


def _begun(
    storage: RDBStorage, store: str | Path | None, name: str, text: dict[str, Any], *, resume: bool
) -> optuna.Study:
    try:
        study = optuna.create_study(storage=storage, study_name=name, load_if_exists=False)
        study.set_user_attr(_IDENTITY, text)
    except optuna.exceptions.DuplicatedStudyError:
        study = optuna.load_study(storage=storage, study_name=name)
        known = _identity(study, text)
        if not resume and not study.get_trials(deepcopy=False):  # its creator failed before the first trial
            study.set_user_attr(_IDENTITY, text)
            known = text
        elif not resume:
            raise BitwrightError(
                f"study {name!r} already exists",
                where=address_without_secrets(store),
                fix="resume it (resume=True, --resume), or choose another name or store",
                code="study-exists",
            ) from None
        _refuse_changes(known, text)
    return study


@contextmanager
def _store_errors(store: str | Path | None) -> Iterator[None]:
    """Report a damaged or unreachable store as one error. Disk errors are reported separately."""
    try:
        yield
    except BitwrightError:
        raise
    except Exception as error:  # from Optuna, SQLAlchemy and its drivers, or caused by damaged entries
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise BitwrightError(
            f"the store can't be used: {type(error).__name__}: {message_without_secrets(lines[0], store)}",
            where=address_without_secrets(store) if store is not None else "the store in memory",
            fix="check the server or the file; use a new store if this one is damaged",
            code="store-failed",
        ) from (None if is_address(store) else error)


def _identity(study: optuna.Study, own: dict[str, Any]) -> dict[str, Any]:
    """The settings that identify the study. If its creator was killed before storing them, store `own`."""
    for _ in range(20):
        known = study.user_attrs.get(_IDENTITY)
        if known is not None:
            return dict(known)
        time.sleep(0.05)  # another worker may be writing it
    study.set_user_attr(_IDENTITY, own)
    return own


def _refuse_changes(known: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    before, after = dict(_leaves(known)), dict(_leaves(now))
    problems = [
        Problem(
            what=f"was {_short(before.get(key))}, is {_short(after.get(key))}",
            where=key,
            fix="undo the change, or start another study (another output folder, name or store)",
            code="study-changed",
        )
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    ]
    if problems:
        raise PlanError(problems, title="can't resume: the study has different settings")


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf value with its path, such as goal.drop.relative."""
    if not isinstance(value, Mapping):
        yield path, value
        return
    for key, item in value.items():
        yield from _leaves(item, f"{path}.{key}" if path else str(key))


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else text[:200] + "…"


def _who() -> dict[str, Any]:
    return {"host": boot_id(), "pid": os.getpid(), "process_start": process_start(os.getpid())}


def _alive(worker: Mapping[str, Any] | None) -> bool:
    """Whether a worker of this machine is still running. Workers of other machines are checked by their heartbeats."""
    if worker is None or worker["host"] != boot_id():
        return True
    return process_start(int(worker["pid"])) == str(worker["process_start"])
