"""Checkpoints of a run that were damaged, edited or exchanged are refused, with the file and the way out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bitwright import BitwrightError, Qat, TrainConfig, Trainer, load_workload
from bitwright.core.errors import TrainError


def trainer(out: Path, **options: Any) -> Trainer:
    config = TrainConfig(epochs=2, batch=25, lr=0.1, save_steps=2, ema=0.9)
    workload = load_workload(f"{Path(__file__).with_name('tiny.py')}:workload")
    return Trainer(workload, precision="int8", quantizer="plain", out=out, config=config, **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    trainer(out).fit()
    return out


def rewrite(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = folder / "trainer.json"
        state = json.loads(file.read_text())
        file.write_text(json.dumps(change(state)))

    return damage


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-40]) and None


def other_tensors(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        save_file({"q": torch.zeros(1)}, folder / name)

    return damage


def one_bit(folder: Path) -> None:
    tensors = load_file(folder / "state.safetensors")
    first = next(tensor for tensor in tensors.values() if tensor.is_floating_point() and tensor.numel() > 1)
    first.view(-1)[0] += 1.0
    save_file(tensors, folder / "state.safetensors")


def without(*keys: str) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {key: value for key, value in state.items() if key not in keys}


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty mapping": rewrite(lambda state: {}),
    "list": rewrite(lambda state: []),
    "no optimizer": rewrite(without("optimizer")),
    "no hashes": rewrite(without("files")),
    "another version": rewrite(lambda state: {**state, "version": 1}),
    "another step": rewrite(lambda state: {**state, "step": state["step"] + 1}),
    "negative epoch": rewrite(lambda state: {**state, "epoch": -1}),
    "step is a text": rewrite(lambda state: {**state, "step": "many"}),
    "unknown parameter": rewrite(lambda state: {**state, "optimizer": {"999": {"step": 1}}}),
    "unknown tensor": rewrite(lambda state: {**state, "ema": {"x": {"$tensor": "nowhere"}}}),
    "no average": rewrite(lambda state: {**state, "ema": None}),
    "observers of others": rewrite(lambda state: {**state, "observers": {}}),
    "truncated json": cut("trainer.json"),
    "truncated state": cut("state.safetensors"),
    "truncated model": cut("model.safetensors"),
    "another state": other_tensors("state.safetensors"),
    "another model": other_tensors("model.safetensors"),
    "one number": one_bit,
    "no state": lambda folder: (folder / "state.safetensors").unlink(),
    "no model": lambda folder: (folder / "model.safetensors").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused(finished: Path, tmp_path: Path, damage: str) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    latest = sorted((out / "checkpoints").glob("step-*"))[-1]
    DAMAGES[damage](latest)
    with pytest.raises(BitwrightError) as caught:
        trainer(out, resume=True).fit()
    problem = caught.value.problems[0]
    assert problem.fix is not None
    assert "remove this folder" in problem.fix
    assert str(latest) in str(caught.value)


def test_all_damaged_files_are_listed(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    latest = sorted((out / "checkpoints").glob("step-*"))[-1]
    cut("state.safetensors")(latest)
    (latest / "model.safetensors").unlink()
    with pytest.raises(BitwrightError) as caught:
        trainer(out, resume=True).fit()
    assert caught.value.codes == ["damaged-checkpoint"] * 2
    assert [Path(str(problem.where)).name for problem in caught.value.problems] == [
        "model.safetensors",
        "state.safetensors",
    ]


def test_an_intact_checkpoint_resumes(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    steps = sorted((out / "checkpoints").glob("step-*"))
    shutil.rmtree(steps[-1])  # as its error advises
    trainer(out, resume=True).fit()
    again, before = load_file(out / "checkpoint.safetensors"), load_file(finished / "checkpoint.safetensors")
    assert again.keys() == before.keys()
    assert all(torch.equal(again[name], before[name]) for name in before)


@pytest.mark.parametrize(
    "state",
    [{}, {"plan": "", "epochs": 1}, {"plan": 3, "epochs": 0, "observers": {}}, "epochs", "observers", "observer"],
    ids=["empty", "no observers", "plan", "negative epochs", "missing observer", "another observer"],
)
def test_state_of_other_loops_is_checked(state: Any) -> None:
    workload = load_workload(f"{Path(__file__).with_name('tiny.py')}:workload")
    qat = Qat(workload.model, workload.calibration(), quantizer="plain", example=workload.inputs)
    good = qat.state_dict()
    site = next(iter(good["observers"]))
    if state == "epochs":
        state = {**good, "epochs": -1}
    elif state == "observers":
        state = {**good, "observers": {}}
    elif state == "observer":
        state = {**good, "observers": {**good["observers"], site: {"q": torch.zeros(1)}}}
    with pytest.raises(TrainError) as caught:
        qat.load_state_dict(state)
    assert caught.value.codes == ["damaged-checkpoint"]
    qat.load_state_dict(good)
