"""`hf:FOLDER` and `gguf:FILE`: the model, its text, perplexity, and errors in references."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.support.language_models import make_llama, write_folder, write_gguf, write_text
from tests.support.problems import raises_problem
from typer.testing import CliRunner

import bitwright
from bitwright.cli import app
from bitwright.workload.language_models import TextModel, with_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_folder(tmp_path_factory.mktemp("llama") / "tiny")
    write_text(made / "text.txt")
    return made


def test_a_folder_is_a_workload(folder: Path) -> None:
    workload = bitwright.load_workload(f"hf:{folder}", text=folder / "text.txt", sequence=32, samples=8)
    assert workload.name == "tiny"
    assert workload.metric == "perplexity"
    assert workload.less_is_better()
    assert workload.calibration is not None
    batches = list(workload.calibration())
    assert [tuple(batch["input_ids"].shape) for batch in batches] == [(4, 32), (4, 32)]


def test_perplexity_is_that_of_next_tokens(folder: Path) -> None:
    workload = bitwright.load_workload(f"hf:{folder},text={folder / 'text.txt'},sequence=32,samples=6,batch=4")
    found = bitwright.evaluate(workload, workload.model)
    assert workload.evaluation is not None
    losses = []
    for inputs, target in workload.evaluation():
        with torch.no_grad():
            logits = workload.model(**inputs).logits.double()
        for row, tokens in zip(logits, target, strict=True):
            losses += [float(F.cross_entropy(row[at], tokens[at + 1])) for at in range(31)]
    assert found["n"] == 6
    assert found["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)


def test_evaluation_and_calibration_have_different_samples(folder: Path) -> None:
    workload = bitwright.load_workload(f"hf:{folder},text={folder / 'text.txt'},sequence=32,samples=8")
    assert workload.evaluation is not None
    assert workload.calibration is not None
    held = {tuple(row.tolist()) for inputs, _ in workload.evaluation() for row in inputs["input_ids"]}
    used = {tuple(row.tolist()) for batch in workload.calibration() for row in batch["input_ids"]}
    assert len(held) == len(used) == 8
    assert held.isdisjoint(used)


def test_samples_begin_with_the_token_of_the_tokenizer(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny", begin=True)
    text = write_text(tmp_path / "text.txt")
    workload = bitwright.load_workload(f"hf:{folder}", text=text, sequence=16, samples=4)
    assert workload.calibration is not None
    rows = torch.cat([batch["input_ids"] for batch in workload.calibration()])
    assert rows.shape == (4, 16)
    assert set(rows[:, 0].tolist()) == {0}
    assert 0 not in rows[:, 1:]


def test_a_gguf_file_is_a_workload(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file, text = write_gguf(tmp_path / "tiny.gguf"), write_text(tmp_path / "text.txt")
    workload = bitwright.load_workload(f"gguf:{file}", text=text, sequence=32, samples=4)
    ids = torch.arange(20)[None] + 40
    with torch.no_grad():
        ours, original = workload.model(input_ids=ids).logits, make_llama()(input_ids=ids).logits
    assert torch.allclose(ours, original, atol=1e-4)
    assert bitwright.evaluate(workload, workload.model)["perplexity"] > 1


def test_without_text_the_graph_is_captured_but_nothing_calibrates(folder: Path) -> None:
    workload = bitwright.load_workload(f"hf:{folder}")
    assert "lm_head" in bitwright.capture(workload.model, workload.inputs).by_name
    assert workload.calibration is not None
    with raises_problem("no-text", where="text", mentions="--text"):
        list(workload.calibration())


def test_training_has_a_loss(folder: Path) -> None:
    workload = bitwright.load_workload(f"hf:{folder}", text=folder / "text.txt", sequence=32, samples=4)
    assert workload.training is not None
    assert workload.loss is not None
    inputs, target = workload.training()[0]
    with torch.no_grad():
        loss = workload.loss(workload.model(input_ids=inputs["input_ids"][None]), target[None])
    assert 2 < float(loss) < 10


def test_options_of_references() -> None:
    wanted = TextModel.parse("hf:a,b,text=c.txt,sequence=64,batch=2")
    assert (wanted.path, wanted.text, wanted.sequence, wanted.samples, wanted.batch) == (
        Path("a,b"),
        Path("c.txt"),
        64,
        32,
        2,
    )
    assert with_text("hf:a,sequence=64,samples=2", text="t", sequence=8) == "hf:a,sequence=8,samples=2,text=t"


@pytest.mark.parametrize(
    ("ref", "code", "where"),
    [
        ("hf:", "invalid-reference", None),
        ("hf:folder,sequenc=3", "unknown-name", None),
        ("hf:folder,sequence=0", "invalid-value", "sequence"),
        ("hf:folder,samples=many", "invalid-value", "samples"),
        ("hf:no-such-folder", "no-such-model", None),
        ("gguf:no-such-file.gguf", "no-such-model", None),
    ],
)
def test_wrong_references(ref: str, code: str, where: str | None) -> None:
    with raises_problem(code, where=where):
        bitwright.load_workload(ref)


def test_wrong_files(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with raises_problem("model-not-loadable"):
        bitwright.load_workload(f"hf:{tmp_path / 'empty'}")
    with raises_problem("unreadable-file", where="text"):
        bitwright.load_workload(f"hf:{folder}", text=tmp_path / "nowhere.txt")
    (tmp_path / "short.txt").write_text("the of and")
    with raises_problem("text-too-short", where="text"):
        bitwright.load_workload(f"hf:{folder}", text=tmp_path / "short.txt")
    with raises_problem("sequence-too-long", where="sequence", mentions=256):
        bitwright.load_workload(f"hf:{folder}", text=folder / "text.txt", sequence=300)


def test_other_workloads_have_no_text() -> None:
    with raises_problem("ignored-option", where="text"):
        bitwright.load_workload("digits-untrained", text="text.txt")


def test_the_command_line_takes_text(folder: Path) -> None:
    run = partial(CliRunner().invoke, app)
    done = run(["inspect", f"hf:{folder}", "--text", str(folder / "text.txt"), "--sequence", "24", "--json"])
    assert done.exit_code == 0
    assert '"lm_head"' in done.stdout
    refused = run(["inspect", "digits-untrained", "--text", "text.txt", "--json"])
    assert refused.exit_code == 2
    assert "only language models have text" in refused.output
