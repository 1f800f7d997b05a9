"""Files: written whole or not at all (into a temporary file beside the target, then renamed over it), settings read."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EISDIR
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from bitwright.errors import BitwrightError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to; it becomes `path` if the block ends well, else it vanishes.

    A link stays, and its target is replaced. What is no file, such as /dev/null or a pipe, is written to.
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder) / path.name
            with path.open("wb") as stream:
                stream.write((Path(folder) / path.name).read_bytes())
        return
    path = path.resolve() if path.is_symlink() else path
    try:
        if path.is_dir():
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    except OSError as error:
        raise BitwrightError(
            f"can't write there: {error.strerror}", where=str(path), fix="choose a folder that can be written"
        ) from error
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> Path:
    """Write a text file, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Path(path)


def yaml_text(data: dict[str, Any]) -> str:
    """Settings as the text of a YAML file."""
    writer = YAML()
    writer.default_flow_style = False
    out = StringIO()
    writer.dump(data, out)
    return out.getvalue()


def read_settings(file: Path, what: str, begin: str) -> dict[str, Any]:
    """The mapping of a YAML file; `what` is in it and `begin` is its first line, for those who gave another file."""
    try:
        data = YAML(typ="safe", pure=True).load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BitwrightError(f"can't read the file: {error}", where=str(file), fix="give a YAML file") from error
    except YAMLError as error:
        raise BitwrightError(f"not valid YAML: {error}", where=str(file), fix="mend the file") from error
    if not isinstance(data, dict):
        raise BitwrightError(f"{what} is a mapping", where=str(file), value=data, fix=f"begin with `{begin}`")
    return data
