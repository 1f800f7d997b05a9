"""What all benchmarks share: the environment that is written beside the numbers, and where results go."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from pathlib import Path
from typing import Any

import numpy
import torch

import bitwright
from bitwright.files import write_text

RESULTS = Path(__file__).parent / "results"


def environment(**more: Any) -> dict[str, Any]:
    """Versions, machine, seed, and a hash of the command that was really run."""
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return {
        "bitwright": bitwright.__version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "seed": torch.initial_seed(),
        "command": " ".join(command),
        "config_hash": hashlib.sha256(json.dumps([command, more], sort_keys=True).encode()).hexdigest()[:16],
        **more,
    }


def save(name: str, data: dict[str, Any], markdown: str) -> None:
    """Print the table and keep it as JSON and Markdown under results/."""
    facts = ", ".join(f"{key} {value}" for key, value in data["environment"].items())
    text = f"{markdown}\n\n{facts}\n"
    write_text(RESULTS / f"{name}.json", json.dumps(data, indent=1, sort_keys=True) + "\n")
    write_text(RESULTS / f"{name}.md", text)
    sys.stdout.write(text)
