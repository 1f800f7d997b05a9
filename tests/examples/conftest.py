"""Tests of examples import the modules of an example as its workload file does."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "blendcnn_mrpc"))
