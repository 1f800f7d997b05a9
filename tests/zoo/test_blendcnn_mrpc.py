"""The bars of BlendCNN on MRPC, after one epoch: `benchmarks/blendcnn_mrpc.py` has them for whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest

import bitwright as bw
from bitwright.training import TrainConfig
from bitwright.workload import evaluate
from bitwright.zoo.mrpc import blendcnn_mrpc


@pytest.mark.slow
@pytest.mark.realdata
def test_float_beats_the_majority_and_int8_keeps_it(data_dir: Path, tmp_path: Path) -> None:
    config = TrainConfig(optimizer="adamw", lr=1e-3, weight_decay=0.01, warmup=0.5, clip=1, batch=32)
    trained = bw.Trainer(blendcnn_mrpc(data=data_dir, judge="held-out"), config=config, out=tmp_path / "run").fit()
    work = blendcnn_mrpc(data=data_dir, weights=tmp_path / "run" / "checkpoint.safetensors")
    plain = evaluate(work, work.model)
    assert plain["top1"] >= plain["majority"] + 3
    assert plain == evaluate(work, trained.model)
    assert work.calibration is not None
    quantized = bw.quantize(work.model, work.calibration(), example=work.inputs)
    assert quantized.plan.sites.keys() >= {f"convs.{index}:weight" for index in range(8)}
    artefact = quantized.export(tmp_path / "int8.onnx").path
    opened = bw.open_runtime("onnxruntime", artefact)
    assert opened.executed() == {"int8": 10, "float": 0}
    assert opened.accuracy(work)["top1"] >= 0.99 * plain["top1"]
