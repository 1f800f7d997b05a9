"""A folder of results that appears at once: an interrupted run leaves nothing."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bitwright.errors import BitwrightError


@contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """Give a temporary folder beside `folder`; its files move there if the block ends well, else they vanish.

    A place that can't be written is an error here, before any long work.
    """
    staged: Path | None = None
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    kept = False
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            staged = Path(tempfile.mkdtemp(dir=folder, prefix=".bitwright-"))
        except OSError as error:
            raise BitwrightError(
                f"can't write there: {error.strerror}",
                where=str(folder),
                fix="choose a folder that can be written",
            ) from error
        yield staged
        for file in sorted(staged.iterdir()):
            file.replace(folder / file.name)
        kept = True
    finally:
        if staged is not None:
            shutil.rmtree(staged, ignore_errors=True)
        if not kept:
            for parent in made:  # deepest first
                if parent.is_dir() and not any(parent.iterdir()):
                    parent.rmdir()
