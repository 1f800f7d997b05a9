"""Files: written whole or not at all (into a temporary file beside the target, then renamed over it)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from errno import EISDIR
from io import StringIO
from pathlib import Path
from stat import S_IMODE
from typing import Any

from ruamel.yaml import YAML

from bitwright.disk import note_written, temporary_folder, to_disk, writing


@contextmanager
def replacing(path: Path, *, needed: int | None = None) -> Iterator[Path]:
    """Yields a temporary path to write to; it becomes `path` if the block ends well, else it vanishes.

    The file is on the disk before it gets its name, so that a crash leaves the old file or the new one. A link stays,
    and its target is replaced. What is no file, such as /dev/null or a pipe, is written to. What the disk refuses is a
    `DiskError`; with `needed` bytes known, it says how much space is missing.
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
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = stack.enter_context(temporary_folder(path.parent)) / path.name
            temporary.touch()  # with the mode of any new file; reading the umask by setting it is not thread-safe
            mode = temporary.stat().st_mode
        with writing(path, needed=needed, strict=True):  # the block may also read files of the user
            yield temporary
        with writing(path, needed=needed):
            temporary.chmod(S_IMODE(mode))  # libraries that replace the file use modes of their own
            to_disk(temporary)
            temporary.replace(path)
            to_disk(path.parent)
            note_written(path)


def write_text(path: Path, text: str) -> Path:
    """Write a text file, whole or not at all."""
    data = text.encode()
    with replacing(path, needed=len(data)) as temporary:
        temporary.write_bytes(data)
    return Path(path)


def yaml_text(data: dict[str, Any]) -> str:
    """Settings as the text of a YAML file."""
    writer = YAML()
    writer.default_flow_style = False
    out = StringIO()
    writer.dump(data, out)
    return out.getvalue()
