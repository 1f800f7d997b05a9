"""The site builds without a warning, and needs nothing from elsewhere. Runs where the extra `docs` is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = ("mkdocs", "material", "mkdocstrings", "griffe")


@pytest.mark.skipif(not all(find_spec(name) for name in NEEDED), reason="needs the extra docs: make docs")
def test_strict_build_without_a_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert tmp_path / "reference" / "command-line" / "index.html" in pages
    assert tmp_path / "benchmarks" / "results" / "tune" / "index.html" in pages
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(
            r"<(?:script|img)[^>]*\ssrc=\"?(http[^\s\">]*)|<link[^>]*rel=\"?stylesheet[^>]*(http[^\s\">]*)", text
        )
        assert not loaded, (page, loaded)
    reference = (tmp_path / "reference" / "python" / "index.html").read_text(encoding="utf-8")
    assert 'id="bitwright.ptq.quantize.quantize"' in reference
