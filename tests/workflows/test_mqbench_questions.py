"""Files of MQBench's toolkit for SQuAD run on local models that answer questions, and local files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from problems import raises_problem
from transformers import BertConfig, BertForQuestionAnswering, BertForSequenceClassification, BertTokenizerFast

from bitwright.importers.mqbench.questions import Encoder, Question, evaluate_answers, read_questions, score_answer
from bitwright.importers.mqbench.toolkit import TextData
from bitwright.workflows import MqbenchRun, quantize_mqbench

FILE = """\
quant:
  a_qconfig: {quantizer: FixedFakeQuantize, observer: EMAMinMaxObserver, bit: 8, symmetric: false, ch_axis: -1}
  w_qconfig: {quantizer: FixedFakeQuantize, observer: MinMaxObserver, bit: 8, symmetric: true, ch_axis: 0}
  calibrate: 4
  backend: academic
data:
  dataset_name: squad
  dataset_config_name:
  max_seq_length: 24
  doc_stride: 4
  n_best_size: 5
  max_answer_length: 6
  pad_to_max_length: true
  version_2_with_negative: false
model: {model_name_or_path: MODEL, use_fast_tokenizer: true}
train: {seed: 3, output_dir: OUT, per_device_eval_batch_size: 4, do_eval: true}
progress: {log_level: passive}
"""
_WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "mat",
    "home",
    "today",
    "and",
    "slept",
    "who",
    "where",
    "?",
    ".",
]
_CONTEXT = "The cat sat on the mat. The dog ran home today and slept."


def _save(model: Any, folder: Path) -> None:
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_WORDS]))
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model(BertConfig(vocab_size=len(_WORDS) + 5, max_position_embeddings=32, **sizes)).save_pretrained(folder)
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    _save(BertForQuestionAnswering, folder)
    return folder


def _asked() -> list[dict[str, Any]]:
    """Questions about a context that doesn't fit into one feature."""
    context = " ".join([_CONTEXT] * 3)
    asked = []
    for number, (question, answer) in enumerate((("Who sat?", "The cat"), ("Where?", "home"), ("Who ran?", "The dog"))):
        answers = [{"text": answer, "answer_start": context.index(answer)}]
        asked.append({"id": str(number), "question": question, "context": context, "answers": answers})
    return asked


def _official(asked: list[dict[str, Any]]) -> str:
    """The layout of SQuAD's own files."""
    qas = [{key: value for key, value in one.items() if key != "context"} for one in asked]
    return json.dumps(
        {"version": "1.1", "data": [{"title": "x", "paragraphs": [{"context": asked[0]["context"], "qas": qas}]}]}
    )


@pytest.fixture(scope="module")
def squad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("squad")
    (folder / "train-v1.1.json").write_text(_official(_asked()))
    (folder / "dev-v1.1.json").write_text(_official(_asked()))
    unanswered = {**_asked()[0], "answers": [], "is_impossible": True}
    (folder / "dev-v2.0.json").write_text(_official([*_asked(), unanswered]))
    return folder


def run(text: str, folder: Path, model: Path, **options: Any) -> MqbenchRun:
    file = folder / "config.yaml"
    file.write_text(text.replace("MODEL", str(model)).replace("OUT", str(folder / "out")))
    return quantize_mqbench(file, **options)


FLOAT = FILE[FILE.index("data:") :]


@pytest.mark.slow
def test_a_model_is_quantized_evaluated_and_checked(tmp_path: Path, model: Path, squad: Path) -> None:
    result = run(FILE, tmp_path, model, data=squad)
    found = [(one.where, one.metric, one.samples) for one in result.accuracies]
    assert found == [("float", "f1", 3), ("simulated", "f1", 3), ("onnxruntime", "f1", 3)]
    assert result.failures() == []
    assert result.deployment is not None
    plan = result.deployment.quantized.plan
    assert str(plan.sites["qa_outputs:weight"].format) == "int8/channel/sym"
    activations = {str(spec.format) for name, spec in plan.sites.items() if not name.endswith(":weight")}
    assert activations == {"uint8/tensor/asym"}


def test_a_float_run_on_questions_with_and_without_answers(tmp_path: Path, model: Path, squad: Path) -> None:
    result = run(FLOAT, tmp_path, model, data=squad)
    assert [(one.where, one.metric, one.samples) for one in result.accuracies] == [("float", "f1", 3)]
    both = run(FLOAT.replace("negative: false", "negative: true"), tmp_path, model, data=squad)
    assert both.accuracies[0].samples == 4


@pytest.mark.parametrize("lines", [True, False])
def test_the_layout_of_hugging_face_gives_the_same_questions(lines: bool, tmp_path: Path, squad: Path) -> None:
    rows = [{**one, "answers": {"text": [one["answers"][0]["text"]], "answer_start": [0]}} for one in _asked()]
    file = tmp_path / "dev.json"
    file.write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps({"data": rows}))
    assert read_questions(file) == read_questions(squad / "dev-v1.1.json")


def encoder(model: Path, **options: Any) -> Encoder:
    data = TextData(**{"max_seq_length": 24, "doc_stride": 4, "max_answer_length": 6, **options})
    return Encoder(BertTokenizerFast.from_pretrained(model), data)


def test_a_perfect_model_finds_all_answers_in_parts_of_the_context(model: Path, squad: Path) -> None:
    """Scores that point at the answer give 100 %, wherever the answer is."""
    questions = [
        Question(text="who ran?", context=f"{'the cat sat ' * before}the dog slept on the mat", answers=("dog",))
        for before in range(0, 20, 3)
    ]
    made = encoder(model)
    dog = made.tokenizer.convert_tokens_to_ids("dog")
    widths = []

    def predict(**inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.where(inputs["input_ids"] == dog, 5.0, 0.0)
        widths.append(inputs["input_ids"].shape)
        return scores, scores

    found = evaluate_answers(made, questions, 2)(predict)
    assert found == {"f1": 100.0, "exact_match": 100.0, "n": 7.0}
    assert sum(rows for rows, _ in widths) > 7  # long contexts have several parts
    assert {width for _, width in widths} == {24}
    assert max(rows for rows, _ in widths) <= 2


@pytest.mark.parametrize(("threshold", "expected"), [(-20.0, 50.0), (0.0, 100.0), (100.0, 50.0)])
def test_no_answer_is_chosen_by_the_threshold(threshold: float, expected: float, model: Path) -> None:
    made = encoder(model, version_2_with_negative=True, null_score_diff_threshold=threshold)
    dog = made.tokenizer.convert_tokens_to_ids("dog")
    asked = [
        Question(text="who?", context="the dog ran", answers=("dog",)),
        Question(text="who?", context="mat home", answers=()),
    ]

    def predict(**inputs: Any) -> dict[str, torch.Tensor]:
        scores = torch.where(inputs["input_ids"] == dog, 5.0, 0.0)
        scores[:, 0] = 2.0
        return {"start_logits": scores, "end_logits": scores}

    assert evaluate_answers(made, asked, 4)(predict)["exact_match"] == expected


def test_scores_are_those_of_torchmetrics() -> None:
    squad = pytest.importorskip("torchmetrics.functional.text").squad
    random = np.random.default_rng(0)
    words = ["the", "A", "cat", "cat,", "sat.", "on", "an", "mat"]
    for _ in range(50):
        ours, right = (" ".join(random.choice(words, random.integers(0, 5))) for _ in range(2))
        found = squad(
            [{"prediction_text": ours, "id": "0"}], [{"answers": {"answer_start": [0], "text": [right]}, "id": "0"}]
        )
        f1, same = score_answer(ours, right)
        assert (100 * f1, 100.0 * same) == pytest.approx((float(found["f1"]), float(found["exact_match"])), abs=1e-3)


@pytest.mark.parametrize(
    ("old", "new", "code", "where"),
    [
        ("doc_stride: 4", "doc_stride: 24", "invalid-value", "data.doc_stride"),
        ("dataset_name: squad", "task_name: mrpc", "cannot-run", "model.model_name_or_path"),
        ("dataset_name: squad", "validation_file: /none.json", "no-data", "data"),
    ],
)
def test_problems_have_a_place(
    old: str, new: str, code: str, where: str, tmp_path: Path, model: Path, squad: Path
) -> None:
    with raises_problem(code, where=where):
        run(FLOAT.replace(old, new), tmp_path, model, data=squad)


def test_tokenizers_without_positions_are_refused() -> None:
    with raises_problem("cannot-run", where="model.use_fast_tokenizer"):
        Encoder(SimpleNamespace(is_fast=False), TextData())


def test_a_classifier_cannot_answer(tmp_path: Path, squad: Path) -> None:
    _save(BertForSequenceClassification, tmp_path)
    with raises_problem("cannot-run", where="model.model_name_or_path"):
        run(FLOAT, tmp_path, tmp_path, data=squad)


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"data": [{"paragraphs": [{}]}]}', '[{"question": 1}]', "no json", "[1]"]
)
def test_other_files_are_rejected(text: str, tmp_path: Path, model: Path) -> None:
    (tmp_path / "dev.json").write_text(text)
    code = "no-data" if text == "[]" else "invalid-data"
    with raises_problem(code, where=str(tmp_path / "dev.json")):
        run(FLOAT, tmp_path, model, data=tmp_path)
