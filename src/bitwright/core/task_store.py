"""Where a study lives: tasks with their outcomes, in an embedded file or in PostgreSQL, through Optuna.

A search (`tune`) or a grid (`bench`) asks for tasks in an order that follows from its settings and from earlier
outcomes alone. So a study is resumed, or shared by workers, by asking again from the beginning: what is known is looked
up, the rest is claimed. A trial is identified by its task; of several trials of one task (two workers may create it at
the same moment) the one with the lowest number counts, and the others are never run.
"""

from __future__ import annotations

import json
import os
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

import optuna
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from pydantic import BaseModel
from sqlalchemy import Connection, event, make_url
from sqlalchemy.exc import IntegrityError
from sqlalchemy.pool import StaticPool

from bitwright.core.addresses import address_without_secrets, is_address, message_without_secrets
from bitwright.core.errors import BitwrightError, PlanError, Problem
from bitwright.core.files import boot, born, disk_error, writing
from bitwright.core.interrupts import uninterrupted

_BEAT, _GRACE = 10, 40  # seconds
_RETRIES = 10
_OPENINGS = 20
_KEY, _TASK, _OUTCOME, _WORKER = "key", "candidate", "outcome", "worker"
_INTERRUPTED, _FAILURE = "interrupted", "failure"
_IDENTITY, _MEMO, _SESSION = "identity", "memo:", "session:"


class Task(Protocol):
    """What a study has an outcome of: equal tasks have equal keys."""

    @property
    def key(self) -> str:
        """A short name of its contents."""

    def to_json(self) -> dict[str, Any]:
        """As a store keeps it."""


TaskT = TypeVar("TaskT", bound=Task)
OutcomeT = TypeVar("OutcomeT", bound=BaseModel)


@dataclass(frozen=True)
class Claim:
    """A trial that this process runs."""

    id: int


class Study(Generic[TaskT, OutcomeT]):
    """One search or grid: what was asked for, and what is known of its tasks.

    `kind` is the model of outcomes; `gave_up` makes one for a task whose process died again and again. An outcome's
    `objective`, if it has one, is the trial's value.
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
        database = storage.engine.url.database if storage.engine.url.drivername.startswith("sqlite") else None
        self._file = None if database in (None, ":memory:") else Path(str(database))
        self._kind, self._gave_up = kind, gave_up
        self._session = f"{_SESSION}{socket.gethostname()}:{os.getpid()}:{time.time_ns()}"
        self._began = time.time()

    def known(self, task: TaskT) -> OutcomeT | None:
        """The outcome of a task that was done before."""
        with self._whole():
            trial = self._find(task.key)
            if trial is None or _OUTCOME not in trial.user_attrs:
                return None
            if not trial.state.is_finished():  # killed between writing the outcome and saying so
                self._close(trial._trial_id)
            return self._kind.model_validate(trial.user_attrs[_OUTCOME])

    def claim(self, task: TaskT) -> Claim | None:
        """Take a task; None if another worker is at it, or just finished it."""
        with self._whole():
            return self._claim(task)

    def _claim(self, task: TaskT) -> Claim | None:
        self._bury()
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
        try:
            # whoever is killed from here on is either found dead on this machine, or falls silent
            self._storage.set_trial_user_attr(trial._trial_id, _WORKER, _who())
            self._storage.record_heartbeat(trial._trial_id)
            if not self._storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING):
                return None
            self._storage.set_trial_user_attr(trial._trial_id, _WORKER, _who())  # two may have come here
        except optuna.exceptions.UpdateFinishedTrialError:
            return None
        return Claim(trial._trial_id)

    def finish(self, claim: Claim, outcome: OutcomeT) -> None:
        """Keep what was found, unless we were silent for so long that others gave us up: then it is theirs."""
        with self._whole(), suppress(optuna.exceptions.UpdateFinishedTrialError):
            self._storage.set_trial_user_attr(claim.id, _OUTCOME, outcome.model_dump(mode="json"))
            self._close(claim.id)

    def give_back(self, claim: Claim) -> None:
        """Somebody else, or the next run, shall do it: this one was interrupted."""
        with self._whole(), suppress(optuna.exceptions.UpdateFinishedTrialError):
            self._storage.set_trial_user_attr(claim.id, _INTERRUPTED, True)
            self._fail(claim.id)

    def fail(self, claim: Claim, failure: OutcomeT) -> None:
        """It went wrong, and is free again: `failures` tells how often."""
        with self._whole(), suppress(optuna.exceptions.UpdateFinishedTrialError):
            self._storage.set_trial_user_attr(claim.id, _FAILURE, failure.model_dump(mode="json"))
            self._fail(claim.id)

    def failures(self, task: TaskT) -> list[OutcomeT]:
        """How a task went wrong so far, in order."""
        with self._whole():
            own = (t for t in self._all() if t.user_attrs.get(_KEY) == task.key and _FAILURE in t.user_attrs)
            return [self._kind.model_validate(t.user_attrs[_FAILURE]) for t in sorted(own, key=lambda t: t.number)]

    @contextmanager
    def beating(self, claim: Claim) -> Iterator[None]:
        """Tell other machines that this one is alive."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(_BEAT):
                with suppress(Exception):  # a server that is away for a moment; what comes next tells if it stays away
                    self._storage.record_heartbeat(claim.id)

        with self._whole():
            self._storage.record_heartbeat(claim.id)
        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def recall(self, name: str) -> Any:
        """What was kept under a name, or None."""
        with self._whole():
            return self._study.user_attrs.get(_MEMO + name)

    def keep(self, name: str, value: Any) -> Any:
        """Keep something that all workers and later runs shall agree upon; the first one counts."""
        with self._whole():
            if self.recall(name) is None:
                self._study.set_user_attr(_MEMO + name, value)
            return self.recall(name)

    def spent(self) -> float:
        """Seconds in which anybody worked at this study."""
        with self._whole():
            self._study.set_user_attr(self._session, [self._began, time.time()])
            spans = sorted(span for name, span in self._study.user_attrs.items() if name.startswith(_SESSION))
            total, reached = 0.0, 0.0
            for begin, end in spans:
                total += max(0.0, end - max(begin, reached))
                reached = max(reached, end)
            return total

    def close(self) -> None:
        """Let go of the database."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Finish with the database before a signal counts; what its disk refuses is told as such."""
        with uninterrupted(), _store_errors(self._store), writing(self._file or "the store", strict=True):
            yield

    def _all(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)  # only what may have changed is read again

    def _find(self, key: str) -> FrozenTrial | None:
        """The trial that counts: finished, or the first that isn't given up."""
        own = [t for t in self._all() if t.user_attrs.get(_KEY) == key and t.state != TrialState.FAIL]
        return min(own, key=lambda t: (_OUTCOME not in t.user_attrs, t.number), default=None)

    def _close(self, trial_id: int) -> None:
        values = self._storage.get_trial(trial_id).user_attrs[_OUTCOME]
        objective = values.get("objective")
        state = TrialState.COMPLETE if objective is not None else TrialState.PRUNED
        with suppress(optuna.exceptions.UpdateFinishedTrialError):  # another worker did it
            self._storage.set_trial_state_values(trial_id, state, None if objective is None else [objective])

    def _bury(self) -> None:
        """Give up trials whose worker is dead: at once if it was on this machine, else when it falls silent."""
        with _experimental():
            optuna.storages.fail_stale_trials(self._study)
        for trial in self._all():
            if trial.state != TrialState.RUNNING or _alive(trial.user_attrs.get(_WORKER)):
                continue
            if _OUTCOME in trial.user_attrs:
                self._close(trial._trial_id)
            else:
                self._fail(trial._trial_id)

    def _fail(self, trial_id: int) -> None:
        # another worker may have done it
        with suppress(optuna.exceptions.UpdateFinishedTrialError):
            self._storage.set_trial_state_values(trial_id, TrialState.FAIL)

    def _deaths(self, key: str) -> int:
        """How often the process of this task died."""
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
    """Begin a study, or go on with one; one of another `identity` is refused.

    `store` is a file, a URL (postgresql://…), or None for one that ends with this process.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = _storage(store)
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
        if not resume and not study.get_trials(deepcopy=False):  # whoever began it failed before the first trial
            study.set_user_attr(_IDENTITY, text)
            known = text
        elif not resume:
            raise BitwrightError(
                "there is such a study already",
                where=address_without_secrets(store),
                value=name,
                fix="go on with it (resume=True, --resume), or give another name or store",
                code="study-exists",
            ) from None
        _refuse_changes(known, text)
    return study


@contextmanager
def _store_errors(store: str | Path | None) -> Iterator[None]:
    """A store that is damaged, or that its server takes away, is one clear error; a full disk was told before."""
    try:
        yield
    except BitwrightError:
        raise
    except Exception as error:  # optuna's, sqlalchemy's and its drivers', and what damaged entries lead to
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise BitwrightError(
            f"the store can't be used: {type(error).__name__}: {message_without_secrets(lines[0], store)}",
            where=address_without_secrets(store) if store is not None else "the store in memory",
            fix="check the server or the file; one that is damaged must be replaced by a new one",
            code="store-failed",
        ) from (None if is_address(store) else error)


def _identity(study: optuna.Study, own: dict[str, Any]) -> dict[str, Any]:
    """What the study is about; a process that was killed right after creating it left nothing, so it is ours."""
    for _ in range(20):
        known = study.user_attrs.get(_IDENTITY)
        if known is not None:
            return dict(known)
        time.sleep(0.05)  # another worker may just be writing it
    study.set_user_attr(_IDENTITY, own)
    return own


def _refuse_changes(known: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    before, after = dict(_leaves(known)), dict(_leaves(now))
    problems = [
        Problem(
            what=f"was {_short(before.get(key))}, is {_short(after.get(key))}",
            where=key,
            fix="undo the change, or begin another study (another name or store)",
        )
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    ]
    if problems:
        raise PlanError(problems, title="can't go on: the study is about something else")


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its path: goal.drop.relative."""
    if not isinstance(value, Mapping):
        yield path, value
        return
    for key, item in value.items():
        yield from _leaves(item, f"{path}.{key}" if path else str(key))


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else text[:200] + "…"


def _storage(store: str | Path | None) -> RDBStorage:
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
            with _experimental():
                storage = RDBStorage(url, engine_kwargs=options, heartbeat_interval=_BEAT, grace_period=_GRACE)
            if store is not None and url.startswith("sqlite"):
                _one_at_a_time(storage)
            return storage
        except Exception as error:  # drivers have their own, and sqlalchemy has several
            # two workers make the tables, or write their version, at the same moment
            if left and (isinstance(error, IntegrityError) or "already exists" in str(error)):
                time.sleep(0.2)
                continue
            refused = None if store is None or is_address(store) else disk_error(error, store, strict=False)
            if refused is not None:
                raise refused from error
            lines = str(error).strip().splitlines() or [type(error).__name__]
            # a driver's own message may have the password: it isn't shown, not even with --debug
            raise BitwrightError(
                f"the store can't be opened: {message_without_secrets(lines[0], store)}",
                where=address_without_secrets(store),
                fix="check the address and the server; PostgreSQL needs pip install 'bitwright[postgresql]'",
                code="store-unreachable",
            ) from None
    raise AssertionError("the last attempt returns or raises")


def _store_file(store: str | Path) -> Path:
    """The file of a store, in a folder that is there."""
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
    """An address that isn't one says so before any driver is asked."""
    try:
        parts = make_url(url)
        memory = parts.database in (None, "", ":memory:") or parts.query.get("mode") == "memory"
        if parts.get_backend_name() == "sqlite" and (memory or parts.host or parts.username):
            raise ValueError("a store in memory can't be shared, and a file has no host")
    except Exception:  # sqlalchemy's, and ValueError for a port that is no number; both repeat the address
        raise _not_a_store(store) from None


def _one_at_a_time(storage: RDBStorage) -> None:
    """Let a SQLite transaction lock the file when it begins.

    Python begins one only at its first change: two workers could read that a trial is waiting, and then both take it.
    """

    @event.listens_for(storage.engine, "connect")
    def leave_to_us(connection: Any, _: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(storage.engine, "begin")
    def lock(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    storage.remove_session()
    storage.engine.dispose()  # connections that were made before


@contextmanager
def _experimental() -> Iterator[None]:
    """Optuna calls its heartbeats experimental, in a warning each time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


def _who() -> dict[str, Any]:
    return {"host": boot(), "pid": os.getpid(), "born": born(os.getpid())}


def _alive(worker: Mapping[str, Any] | None) -> bool:
    """Whether a worker of this machine still runs; one of another machine is taken at its heartbeat's word."""
    if worker is None or worker["host"] != boot():
        return True
    return born(int(worker["pid"])) == str(worker["born"])
