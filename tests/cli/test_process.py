"""Real processes: exit codes, Ctrl-C, clean streams."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

COMMAND = [sys.executable, "-c", "from bitwright.cli import main; main()"]

SLOW = """
import time, torch
from bitwright import Workload
def build():
    def calibration():
        for step in range(1000):
            if step == 2:
                open(marker, "w").close()
            time.sleep(0.05)
            yield torch.ones(1, 4)
    return Workload(name="slow", model=torch.nn.Linear(4, 2), inputs=(torch.ones(1, 4),),
                    calibration=calibration)
"""


def test_errors_go_to_stderr_without_traceback(tmp_path: Path) -> None:
    ran = subprocess.run(
        [*COMMAND, "quantize", "nowhere.py:f", "-o", str(tmp_path / "out"), "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert ran.returncode == 2
    assert ran.stderr.startswith("error: ")
    assert "Traceback" not in ran.stderr
    assert json.loads(ran.stdout)["problems"][0]["value"] == "nowhere.py"
    assert not list(tmp_path.iterdir())


def test_ctrl_c(tmp_path: Path) -> None:
    marker = tmp_path / "started"
    (tmp_path / "slow.py").write_text(f"marker = {str(marker)!r}\n{SLOW}")
    process = subprocess.Popen(
        [*COMMAND, "quantize", f"{tmp_path / 'slow.py'}:build", "-o", str(tmp_path / "results" / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job ignores SIGINT, and hands that down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    for _ in range(600):
        if marker.exists() or process.poll() is not None:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (out, err)
    assert err == "error: interrupted by SIGINT: nothing was written\n"
    assert not (tmp_path / "results").exists()


def test_a_closed_pipe_is_a_quiet_end() -> None:
    for verb in (["list"], ["list", "--json"]):
        with subprocess.Popen([*COMMAND, *verb], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.returncode == 141
