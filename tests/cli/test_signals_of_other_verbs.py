"""Ctrl-C and SIGTERM end `profile`, `predict` and `deploy` cleanly, in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

WORKLOAD = """
import os, time
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset
from bitwright import Workload

HERE = os.path.dirname(__file__)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x):
        if os.path.exists(os.path.join(HERE, "armed")) and not torch.compiler.is_compiling():
            open(os.path.join(HERE, "ready"), "w").close()
            time.sleep(0.2)
        return self.head(x)


def build():
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    y = (x[:, 0] > 0).long()
    return Workload(name="waits", model=Net(), inputs=(x[:2],), loss=F.cross_entropy, calibration=lambda: [x[:8]],
                    training=lambda: TensorDataset(x, y),
                    evaluation=lambda: [(x[i:i + 1], y[i:i + 1]) for i in range(64)])
"""


def _default_signals() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "bitwright", *arguments]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("verb", ["profile", "predict", "deploy"])
def test_a_signal_is_told_and_no_output_is_left(verb: str, number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(WORKLOAD)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "BITWRIGHT_CACHE": str(tmp_path / "cache")}
    preparing = {
        "profile": None,
        "predict": ["profile", "work.py:build", "--published", "nvidia-t4", "-o", "device.json"],
        "deploy": ["quantize", "work.py:build", "-o", "quantized"],
    }[verb]
    if preparing is not None:
        subprocess.run(
            _command(*preparing), cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=180
        )
    before = {file for file in tmp_path.rglob("*") if file.name not in ("armed", "ready")}
    (tmp_path / "armed").touch()
    arguments = {
        "profile": ["profile", "work.py:build", "-o", "out/device.json"],
        "predict": ["predict", "work.py:build", "--profile", "device.json", "--trace", "out/step.json"],
        "deploy": ["deploy", "work.py:build", "quantized", "-o", "out"],
    }[verb]
    process = subprocess.Popen(
        _command(*arguments),
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_default_signals,
    )
    until = time.monotonic() + 120
    while not (tmp_path / "ready").exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number, err
    assert f"interrupted by {number.name}" in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()
    after = {file for file in tmp_path.rglob("*") if file.name not in ("armed", "ready")}
    left = [str(file.relative_to(tmp_path)) for file in after - before if "__pycache__" not in file.parts]
    assert [name for name in left if not name.startswith("cache")] == []
