"""What OpenVINO does to the process that it runs in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import bitwright as bw

pytest.importorskip("openvino")

SESSIONS = """
import signal, sys
from pathlib import Path
from bitwright import open_runtime

signal.signal(signal.SIGUSR1, lambda *_: print("heard", flush=True))
first = open_runtime("openvino", Path(sys.argv[1]))
second = open_runtime("openvino", Path(sys.argv[1]))
del first
del second
import gc; gc.collect()
signal.raise_signal(signal.SIGUSR1)
"""


def test_signals_are_heard_after_several_sessions(tmp_path: Path) -> None:
    """Each of OpenVINO's cores gave the thread a stack for signals, and the last one to go left one that was gone:
    the next signal, Ctrl-C or a child's end, ended the process without a word (CPUs with AVX-512)."""
    torch.manual_seed(0)
    data = torch.randn(8, 4)
    bw.quantize(nn.Sequential(nn.Linear(4, 4)), [data], example=data[:1]).export(tmp_path / "model.onnx")
    command = [sys.executable, "-c", SESSIONS, str(tmp_path / "model.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "heard\n"
