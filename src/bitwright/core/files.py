"""Write files atomically, report disk errors, manage temporary folders, and compute fingerprints of contents."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import socket
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from errno import EISDIR
from hashlib import sha256
from io import StringIO
from pathlib import Path
from stat import S_IMODE
from typing import TYPE_CHECKING, Any

from bitwright.core.errors import BitwrightError, DiskError
from bitwright.core.formatting import size

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = ".bitwright-"
_OWNED = re.compile(re.escape(PREFIX) + r"([0-9a-f]{8})-(\d+)-(\d*)-[0-9a-f]{8}")
#: errno → (code, what, fix)
_REFUSALS = {
    errno.ENOSPC: ("disk-full", "the disk is full", "free some space, or write to another disk; then rerun"),
    errno.EDQUOT: ("quota-exceeded", "your disk quota is used up", "free some space, or write to another disk"),
    errno.EFBIG: ("file-too-large", "the file would exceed the size limit", "raise the limit (ulimit -f)"),
    errno.EROFS: ("read-only", "the file system is read-only", "choose a folder that can be written"),
    errno.EACCES: ("no-permission", "permission denied", "choose a folder that can be written"),
    errno.EPERM: ("no-permission", "permission denied", "choose a folder that can be written"),
    errno.ENAMETOOLONG: ("name-too-long", "the file name is too long", "choose a shorter name"),
    errno.EIO: ("disk-failed", "the disk reported an input/output error", "check the disk and its cables"),
    errno.EISDIR: ("is-a-folder", "a folder with this name exists", "choose another name"),
    errno.ENOTDIR: ("not-a-folder", "a part of this path is a file", "choose another folder"),
    errno.EEXIST: ("not-a-folder", "a file with this name exists", "choose another folder"),
    errno.ENOENT: ("no-such-folder", "the folder does not exist", "create it, or choose another folder"),
    errno.ENXIO: ("not-a-file", "this path can't be written", "choose another name"),
    errno.ELOOP: ("link-loop", "symbolic links form a loop", "choose another folder"),
}
#: Errors that only a disk can cause; they are recognized regardless of their origin.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
_SQLITE = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_CANTOPEN: errno.EACCES,
}
#: torch writes archives with a C++ stream that doesn't report the cause of a failure.
_TORCH_STREAM = ("unexpected pos", "iostream error", "PytorchStreamWriter failed")
_LITTLE = 2**20
_living: set[tuple[int, str]] = set()  # temporary folders of this process, with its pid
written: list[Path] = []  # files that this process has written, for the message after an interruption


def disk_error(
    error: BaseException, path: str | Path | None = None, *, needed: int | None = None, strict: bool = True
) -> DiskError | None:
    """The `DiskError` behind `error`, if a disk caused it. Libraries wrap disk errors in their own types.

    `path` is the file being written, `needed` its size in bytes if known. A missing file or permission may concern
    other files, such as the user's data; with `strict`, only unambiguous causes count, such as a full disk.
    """
    if isinstance(error, DiskError):
        return error
    if isinstance(error, BitwrightError) and error.__cause__ is None:
        return None
    for one in _chain(error):
        if isinstance(one, DiskError):
            return one
        number = _errno(one, path)
        if number is None or (strict and number not in _FULL):
            continue
        named = getattr(one, "filename", None)
        own = path is not None and (not strict or named is None or PREFIX in os.fsdecode(named))
        where = path if own or named is None else named
        if number == errno.ENOENT and where is not None and Path(os.fsdecode(where)).parent.is_dir():
            number = errno.EACCES  # the folder exists: this file system (/proc) creates no files
        return _disk_error(number, None if where is None else Path(os.fsdecode(where)), needed)
    return None


@contextmanager
def writing(path: str | Path, *, needed: int | None = None, strict: bool = False) -> Iterator[None]:
    """Convert disk errors in this block to a `DiskError` about `path`. For `strict`, see `disk_error`."""
    try:
        yield
    except Exception as error:
        found = disk_error(error, path, needed=needed, strict=strict)
        if found is None or found is error:
            raise
        raise found from error


def note_written(path: Path) -> None:
    """Record a completed file. Files in temporary folders are ignored."""
    if not any(part.startswith(PREFIX) for part in path.parts) and path not in written:
        written.append(path)


def free_space(path: Path) -> int | None:
    """Free bytes for this user on the file system of `path`."""
    place = next((one for one in (path, *path.absolute().parents) if one.exists()), None)
    if place is None or not hasattr(os, "statvfs"):
        return None
    try:
        found = os.statvfs(place)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def sync_to_disk(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EROFS):  # unsupported by some network file systems
            raise
    finally:
        os.close(handle)


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Create a hidden folder in `parent`, named after this process. Remove folders of dead processes first.

    The process id in the name lets a later run detect folders that remain after SIGKILL.
    """
    remove_stale_folders(parent)
    name = f"{PREFIX}{_host()}-{os.getpid()}-{process_start(os.getpid())}-{secrets.token_hex(4)}"
    folder = parent / name
    key = (os.getpid(), str(folder))
    _living.add(key)
    try:
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _living.discard(key)


def scratch_folder() -> AbstractContextManager[Path]:
    """A temporary folder in the system's default location. The next run removes it if this process is killed."""
    return temporary_folder(Path(tempfile.gettempdir()))


def remove_own_folders() -> None:
    """Remove the temporary folders of this process before an exit that skips `finally` blocks."""
    for pid, folder in list(_living):
        if pid == os.getpid():
            shutil.rmtree(folder, ignore_errors=True)


def remove_stale_folders(parent: Path) -> None:
    """Remove temporary folders of dead processes in `parent`. Folders of other machines stay."""
    try:
        names = [path.name for path in parent.iterdir() if path.name.startswith(PREFIX)]
    except OSError:
        return
    for name in names:
        match = _OWNED.fullmatch(name)
        if match is not None and match[1] == _host() and process_start(int(match[2])) != match[3]:
            shutil.rmtree(parent / name, ignore_errors=True)


def process_start(pid: int) -> str | None:
    """The start time of a process, which distinguishes processes with the same id. None: there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        try:
            os.kill(pid, 0)
        except PermissionError:
            return ""
        except OSError:
            return None
        return ""


def boot_id() -> str:
    """An identifier of this machine and its current boot. Process ids are valid within it."""
    identity = ""
    with suppress(OSError):
        identity = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {identity}".strip()


def _host() -> str:
    # containers share a kernel but have their own process ids
    space = ""
    with suppress(OSError):
        space = str(Path("/proc/self/ns/pid").readlink())
    return sha256(f"{boot_id()} {space}".encode()).hexdigest()[:8]


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        todo += [one.__cause__, one.__context__, getattr(one, "orig", None)]


def _errno(error: BaseException, path: str | Path | None) -> int | None:
    if isinstance(error, OSError):
        return error.errno if error.errno in _REFUSALS else None
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", None)
        return None if code is None else _SQLITE.get(code & 0xFF)
    text = str(error)
    # safetensors and other Rust libraries: "I/O error: No space left on device (os error 28)"
    match = re.search(r"\(os error (\d+)\)", text)
    if match is not None:
        number = int(match[1])
        return number if number in _REFUSALS else None
    for number in _FULL - {errno.EIO}:
        if os.strerror(number).lower() in text.lower():
            return number
    if isinstance(error, RuntimeError) and any(words in text for words in _TORCH_STREAM):
        free = None if path is None else free_space(Path(path))
        return errno.EIO if free is not None and free > _LITTLE else errno.ENOSPC
    return None


def _disk_error(number: int, path: Path | None, needed: int | None) -> DiskError:
    code, what, fix = _REFUSALS[number]
    value = None
    if path is not None:  # the temporary file is removed: name the final one
        path = _final(path)
    if number in (errno.ENOSPC, errno.EDQUOT) and path is not None:
        free = free_space(path)
        if free is not None:
            own = _own(path)
            have = free + own
            if needed is not None and needed > have:
                what = f"{what}: {size(needed - have)} are missing"
                value = f"{size(needed)} needed, {size(have)} free"
            else:
                what = f"{what}: more than {size(max(have, 0))} are needed"
                value = f"{size(have)} free"
    return DiskError(what, where=None if path is None else str(path), value=value, fix=fix, code=code)


def _final(path: Path) -> Path:
    """The path that a file in temporary folders gets in the end."""
    return Path(*(part for part in path.parts if not part.startswith(PREFIX)))


def _own(path: Path) -> int:
    """The bytes of `path` that this process has written to temporary folders so far; the error removes them."""
    above = path.absolute().parents
    files: set[Path] = set()  # a temporary folder may be inside another one
    for pid, folder in list(_living):
        if pid == os.getpid() and _final(Path(folder).absolute()) in above:
            with suppress(OSError):
                files |= {file for file in Path(folder).rglob("*") if file.is_file()}
    total = 0
    for file in files:
        with suppress(OSError):
            total += file.stat().st_blocks * 512
    return total


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Create a folder with its parents; if the block fails, remove those that were created and are still empty."""
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for one in made:
            with suppress(OSError):
                one.rmdir()
        raise


@contextmanager
def replacing(path: Path, *, needed: int | None = None) -> Iterator[Path]:
    """Yield a temporary path. It replaces `path` if the block succeeds and is removed otherwise.

    The file is flushed before the rename, so a crash leaves either the old or the new file. If `path` is a link, its
    target is replaced. Special files such as /dev/null and pipes are written directly. Disk errors raise a `DiskError`;
    if `needed` bytes are known, it states how much space is missing.
    """
    path = Path(path)
    with writing(path):
        special = path.exists() and not path.is_file() and not path.is_dir()
        path = path.resolve() if path.is_symlink() and not special else path
    if special:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder) / path.name
            with writing(path), path.open("wb") as stream:
                stream.write((Path(folder) / path.name).read_bytes())
        return
    with ExitStack() as stack:
        with writing(path):
            if path.is_dir():
                raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
            stack.enter_context(made_folder(path.parent))
            temporary = stack.enter_context(temporary_folder(path.parent)) / path.name
            temporary.touch()  # with the default mode; reading the umask means setting it, which isn't thread-safe
            mode = temporary.stat().st_mode
        with writing(path, needed=needed, strict=True):  # the block may also read the user's files
            yield temporary
        with writing(path, needed=needed):
            temporary.chmod(S_IMODE(mode))  # libraries that replace the file set their own modes
            sync_to_disk(temporary)
            temporary.replace(path)
            sync_to_disk(path.parent)
            note_written(path)


def cache_folder() -> Path:
    """The folder for measurements that later runs use: `BITWRIGHT_CACHE`, or by default in the user's cache folder."""
    named = os.environ.get("BITWRIGHT_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bitwright"


def write_text(path: Path, text: str) -> Path:
    """Write a text file atomically."""
    data = text.encode()
    with replacing(path, needed=len(data)) as temporary:
        temporary.write_bytes(data)
    return Path(path)


def yaml_text(data: dict[str, Any]) -> str:
    """Settings as YAML text."""
    from ruamel.yaml import YAML

    writer = YAML()
    writer.default_flow_style = False
    out = StringIO()
    writer.dump(data, out)
    return out.getvalue()


def fingerprint(*parts: bytes | str | Tensor) -> str:
    """A hash of the contents.

    >>> import torch
    >>> fingerprint("a", torch.ones(2)) == fingerprint(b"a", torch.ones(2))
    True
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part if isinstance(part, bytes) else _bytes(part))
    return digest.hexdigest()[:16]


def file_fingerprint(path: Path) -> str:
    """A hash of a file's contents, computed in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sample_fingerprints(tensors: Iterable[Tensor], samples: int) -> list[str]:
    """One hash per sample of a batch."""
    rows = [t.detach().cpu() for t in tensors if t.dim() and t.shape[0] == samples]
    return [fingerprint(*(row[index] for row in rows)) for index in range(samples)]


def _bytes(tensor: Tensor) -> bytes:
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
