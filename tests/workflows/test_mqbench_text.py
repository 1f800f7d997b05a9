"""Hugging Face files of MQBench's toolkit run on local models and local texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

from bitwright.core.errors import BitwrightError
from bitwright.importers.mqbench import read_mqbench
from bitwright.importers.mqbench.toolkit_workload import text_workload
from bitwright.workflows import MqbenchRun, quantize_mqbench
from bitwright.workload import evaluate

FILE = """\
quant:
  a_qconfig: {quantizer: FixedFakeQuantize, observer: EMAMinMaxObserver, bit: 8, symmetric: false, ch_axis: -1}
  w_qconfig: {quantizer: FixedFakeQuantize, observer: MinMaxObserver, bit: 8, symmetric: true, ch_axis: 0}
  calibrate: 6
  backend: academic
data: {task_name: mrpc, max_seq_length: 12, pad_to_max_length: true}
model: {model_name_or_path: MODEL, use_fast_tokenizer: true}
train: {seed: 3, output_dir: OUT, per_device_eval_batch_size: 4, do_eval: true, learning_rate: 0.1}
progress: {log_level: passive}
"""
_WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "mat", "home", "today", "and", "slept"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with its tokenizer."""
    folder = tmp_path_factory.mktemp("bert")
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_WORDS]))
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=len(_WORDS) + 5, max_position_embeddings=32, num_labels=2, **sizes)
    BertForSequenceClassification(config).save_pretrained(folder)
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def _sentence(index: int) -> str:
    return " ".join(_WORDS[(index * step) % len(_WORDS)] for step in range(2, 7))


@pytest.fixture(scope="module")
def glue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Paraphrases in GLUE's own columns."""
    folder = tmp_path_factory.mktemp("glue")
    for part, count in (("train", 12), ("dev", 8)):
        rows = [f'{n % 2}\t{n}\t{n}\t{_sentence(n)} "\t{_sentence(n + n % 2)}' for n in range(1, count + 1)]
        (folder / f"{part}.tsv").write_text("\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n" + "\n".join(rows))
    return folder


def run(text: str, folder: Path, model: Path, **options: Any) -> MqbenchRun:
    file = folder / "config.yaml"
    file.write_text(text.replace("MODEL", str(model)).replace("OUT", str(folder / "out")))
    return quantize_mqbench(file, **options)


def config(text: str, model: Path) -> Any:
    from bitwright.core.documents import parse_yaml

    return read_mqbench(parse_yaml(text.replace("MODEL", str(model)), where="a"), where="a").config


@pytest.mark.slow
def test_a_classifier_is_quantized_evaluated_and_checked(tmp_path: Path, model: Path, glue: Path) -> None:
    result = run(FILE, tmp_path, model, data=glue)
    assert [(one.where, one.samples) for one in result.accuracies] == [
        ("float", 8),
        ("simulated", 8),
        ("onnxruntime", 8),
    ]
    assert result.failures() == []
    assert (tmp_path / "out" / "model.onnx").is_file()
    assert result.deployment is not None
    plan = result.deployment.quantized.plan
    assert str(plan.sites["classifier:weight"].format) == "int8/channel/sym"
    activations = {str(spec.format) for name, spec in plan.sites.items() if not name.endswith(":weight")}
    assert activations == {"uint8/tensor/asym"}
    assert not any("embeddings.word" in name for name in plan.sites)
    assert any("train.do_eval, train.learning_rate: no effect" in note for note in result.notes)


def test_a_float_run_only_evaluates(tmp_path: Path, model: Path, glue: Path) -> None:
    result = run(FILE[FILE.index("data:") :], tmp_path, model, data=glue)
    assert [one.where for one in result.accuracies] == ["float"]


def test_calibration_takes_random_training_samples(model: Path, glue: Path) -> None:
    def samples(text: str) -> torch.Tensor:
        workload, _ = text_workload(config(text, model), data=glue)
        assert workload.calibration is not None
        batches = list(workload.calibration())
        assert [len(batch["input_ids"]) for batch in batches] == [4, 2]
        return torch.cat([batch["input_ids"] for batch in batches])

    assert torch.equal(samples(FILE), samples(FILE))
    assert not torch.equal(samples(FILE), samples(FILE.replace("seed: 3", "seed: 4")))


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_texts_are_read_from_files(suffix: str, tmp_path: Path, model: Path) -> None:
    rows = [{"sentence": _sentence(n), "label": ("no", "yes")[n % 2]} for n in range(1, 6)]
    file = tmp_path / f"texts{suffix}"
    if suffix == ".csv":
        file.write_text("sentence,label\n" + "\n".join(f'"{row["sentence"]}",{row["label"]}' for row in rows))
    else:
        file.write_text("\n".join(json.dumps(row) for row in rows))
    text = FILE.replace("task_name: mrpc", f"validation_file: {file}, max_eval_samples: 4")
    workload, notes = text_workload(config(text, model))
    assert workload.evaluation is not None
    assert torch.cat([label for _, label in workload.evaluation()]).tolist() == [1, 0, 1, 0]
    assert any("no training part" in note for note in notes)
    assert evaluate(workload, workload.model)["n"] == 4


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("MODEL", "/none", "no-such-checkpoint"),
        ("task_name: mrpc", "task_name: mrcp", "unknown-name"),
        ("task_name: mrpc", "task_name: mrpc, validation_file: /none.tsv", "no-data"),
        ("task_name: mrpc", "task_name: qqp", "invalid-data"),
        ("per_device_eval_batch_size: 4", "per_device_eval_batch_size: 0", "invalid-value"),
        ("backend: academic", "backend: academik", "invalid-value"),
    ],
)
def test_problems_have_a_code(old: str, new: str, code: str, tmp_path: Path, model: Path, glue: Path) -> None:
    with pytest.raises(BitwrightError) as caught:
        run(FILE.replace(old, new), tmp_path, model, data=glue)
    assert caught.value.codes == [code]
    assert not (tmp_path / "out").exists()
