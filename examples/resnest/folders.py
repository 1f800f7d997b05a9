"""Print an LPOT file with other image folders: `python folders.py FILE FOLDER`.

Calibration reads FOLDER/train and evaluation FOLDER/val, or FOLDER if these don't exist. Everything else stays.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path


def with_folders(text: str, folder: Path) -> str:
    """The text with each `root` replaced: the one before `evaluation:` is for calibration."""
    train, val = (folder / part if (folder / part).is_dir() else folder for part in ("train", "val"))
    start = text.index("\nevaluation:")
    parts = [(text[:start], train), (text[start:], val)]
    return "".join(re.sub(r"(\broot: *)\S+", rf"\g<1>{json.dumps(str(path))}", part) for part, path in parts)


if __name__ == "__main__":
    sys.stdout.write(with_folders(Path(sys.argv[1]).read_text(encoding="utf-8"), Path(sys.argv[2])))
