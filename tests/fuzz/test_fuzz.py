"""A few hundred mutations of every format; `make fuzz` runs ten thousand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(600)
def test_mutated_files_raise_our_errors_only() -> None:
    command = [sys.executable, str(Path(__file__).with_name("run.py")), "--cases", "400", "--workers", "1"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "| all | 400 |" in ran.stdout
