"""Output folders: one process writes at a time, and its files appear together."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bitwright.core.errors import BitwrightError
from bitwright.core.files import (
    PREFIX,
    boot_id,
    made_folder,
    note_written,
    process_start,
    remove_stale_folders,
    replacing,
    sync_to_disk,
    temporary_folder,
    writing,
)
from bitwright.core.interrupts import uninterrupted

try:
    import fcntl
except ImportError:  # Windows: only the owner recorded in the lock file is available
    fcntl = None  # type: ignore[assignment]

__all__ = ["locked", "locked_file", "recover", "replacing_with_siblings", "staged_output", "visible_files"]

LOCK = ".bitwright.lock"
_COMMIT = f"{PREFIX}commit"
_WAIT = 1.0  # seconds; a process that was just killed may still hold its lock
_UNSUPPORTED = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_held: dict[Path, _Held] = {}  # lock file → lock


@dataclasses.dataclass
class _Held:
    """A lock of this process."""

    handle: int
    thread: int
    shared: bool
    count: int = 1


@contextmanager
def locked(folder: str | Path, *, name: str = "", wait: float = _WAIT) -> Iterator[None]:
    """Lock `folder` for this process, or only the file `name` in it.

    Several processes can write different files of a folder, but not while another process has locked the whole folder.
    The operating system releases the lock when this process ends. If another process holds it, the error
    `folder-locked` names that process. The same thread may lock a folder several times.
    """
    folder = Path(folder)
    with ExitStack() as stack:
        with writing(folder):
            stack.enter_context(made_folder(folder))
        stack.enter_context(_lock_held(folder, LOCK, wait, shared=bool(name)))
        if name:
            stack.enter_context(_lock_held(folder, f"{PREFIX}{name}.lock", wait))
        yield


def locked_file(path: str | Path) -> AbstractContextManager[None]:
    """Lock a file that will be written, as `locked` does. Pipes and devices have no lock."""
    path = Path(path)
    if path.exists() and not path.is_file():
        return nullcontext()  # a folder, which is an error later, or a special file
    path = path.resolve() if path.is_symlink() else path
    return locked(path.parent, name=path.name)


@contextmanager
def _lock_held(folder: Path, name: str, wait: float, *, shared: bool = False) -> Iterator[None]:
    """Hold the lock file `name`. With `shared`, other processes that also share it can hold it at the same time."""
    with writing(folder):
        file = folder.resolve() / name
    here = threading.get_ident()
    known = _held.get(file)
    if known is not None and (shared or known.thread == here):
        if known.shared and not shared:
            with writing(folder):
                _make_exclusive(known, file, folder, wait)
        known.count += 1
    else:
        with writing(folder):
            handle = _acquire(file, folder, wait, shared=shared, in_this_process=known is not None)
        known = _held[file] = _Held(handle, here, shared)
    try:
        yield
    finally:
        known.count -= 1
        if not known.count:
            del _held[file]
            # Remove the file only while no other process holds the lock. Waiting processes open the file again.
            if not known.shared or (_lock(known.handle) and _same(known.handle, file)):
                file.unlink(missing_ok=True)
            os.close(known.handle)


def _make_exclusive(held: _Held, file: Path, folder: Path, wait: float) -> None:
    """Turn a shared lock of this process into an exclusive one."""
    until = time.monotonic() + wait
    while not _lock(held.handle):
        if time.monotonic() >= until:
            raise _folder_locked(folder, _read(held.handle))
        time.sleep(0.05)
    if not _same(held.handle, file):  # another process had the lock in between and has removed the file
        handle = _acquire(file, folder, wait, shared=False, in_this_process=False)
        os.close(held.handle)
        held.handle = handle
    held.shared = False


def _acquire(file: Path, folder: Path, wait: float, *, shared: bool, in_this_process: bool) -> int:
    until = time.monotonic() + wait
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if not in_this_process and _lock(handle, shared=shared) and _same(handle, file):
                try:
                    os.truncate(handle, 0)
                    os.pwrite(handle, json.dumps(_owner()).encode(), 0)
                except OSError:  # the disk is full, so no other output would fit either
                    file.unlink(missing_ok=True)
                    raise
                return handle
            owner = _read(handle)
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
        if time.monotonic() >= until:
            raise _folder_locked(folder, owner)
        time.sleep(0.05)


def _folder_locked(folder: Path, owner: dict[str, Any]) -> BitwrightError:
    return BitwrightError(
        "another process is writing to this folder",
        where=str(folder),
        value=_in_words(owner),
        fix="wait until it ends, or choose another folder (-o); workers that share a store need one folder each",
        code="folder-locked",
    )


def _lock(handle: int, *, shared: bool = False) -> bool:
    """Try to lock the file."""
    if fcntl is not None:
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        else:
            return True
    # A file system without locks: use the owner in the file, if its process is alive or can't be checked.
    owner = _read(handle)
    if shared or not owner or owner.get("pid") == os.getpid():
        return True
    return owner.get("boot") == boot_id() and process_start(int(owner.get("pid", 0))) != owner.get("born")


def _same(handle: int, file: Path) -> bool:
    """Whether the locked file still exists under its name: its last owner removes it."""
    try:
        return os.path.samestat(os.fstat(handle), file.stat())
    except FileNotFoundError:
        return False


def _owner() -> dict[str, Any]:
    pid = os.getpid()
    # Omit the full command line because it may contain a password.
    words = [Path(sys.argv[0]).name or "python", *(word for word in sys.argv[1:2] if word.isalpha())]
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return {
        "pid": pid,
        "born": process_start(pid),
        "boot": boot_id(),
        "command": " ".join(words),
        "since": since,
    }


def _read(handle: int) -> dict[str, Any]:
    try:
        found = json.loads(os.pread(handle, 4096, 0))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _in_words(owner: dict[str, Any]) -> str:
    if not owner:
        return "a process that has just started"
    host = str(owner.get("boot", "")).split(" ")[0]
    return f"pid {owner.get('pid')} on {host}, `{owner.get('command')}`, since {owner.get('since')}"


def _close_in_child() -> None:
    """Close the locks in a forked child, which shares them with its parent."""
    for held in _held.values():
        with suppress(OSError):
            os.close(held.handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def staged_output(folder: str | Path, *, name: str = "") -> Iterator[Path]:
    """Yield a temporary folder inside `folder`. Its files move to `folder` if the block succeeds.

    The folder (or with `name`, only that output) is locked meanwhile. A folder that can't be written raises an error
    here, before any long computation. All files are flushed to disk before the first one moves. After a crash between
    two moves, the next run completes them.
    """
    folder = Path(folder)
    with locked(folder, name=name):
        with writing(folder):
            recover(folder, name=name)
        with temporary_folder(folder) as staged:
            with writing(folder, strict=True):
                yield staged
            with writing(folder), uninterrupted():
                _commit(staged, folder, name)


@contextmanager
def replacing_with_siblings(path: str | Path) -> Iterator[Path]:
    """Like `replacing`, and also moves the files that are written next to the temporary path."""
    path = Path(path)
    with writing(path):
        plain = path.is_file() or not path.exists()
        path = path.resolve() if plain and path.is_symlink() else path
    if not plain:
        with replacing(path) as temporary:
            yield temporary
        return
    with staged_output(path.parent, name=path.name) as folder:
        yield folder / path.name


def recover(folder: str | Path, *, name: str = "") -> None:
    """Complete the moves of a killed run and remove files of dead processes. Requires the lock."""
    folder = Path(folder)
    if not folder.is_dir():
        return
    ready = folder / f"{_COMMIT}{name}"
    if ready.is_dir():
        _move(ready, folder)
    remove_stale_folders(folder)


def visible_files(folder: Path) -> list[Path]:
    """The files of a folder without hidden ones, sorted."""
    return sorted(file for file in folder.iterdir() if not file.name.startswith(".bitwright"))


def _commit(staged: Path, folder: Path, name: str) -> None:
    """Rename the staged folder; from then on its files are part of the output."""
    for file in staged.rglob("*"):
        sync_to_disk(file)
    sync_to_disk(staged)
    ready = folder / f"{_COMMIT}{name}"
    staged.rename(ready)
    sync_to_disk(folder)
    _move(ready, folder)


def _move(ready: Path, folder: Path) -> None:
    for file in sorted(file for file in ready.rglob("*") if not file.is_dir()):
        target = folder / file.relative_to(ready)
        target.parent.mkdir(parents=True, exist_ok=True)
        file.replace(target)
        note_written(target)
        sync_to_disk(target.parent)
    shutil.rmtree(ready)
    sync_to_disk(folder)
