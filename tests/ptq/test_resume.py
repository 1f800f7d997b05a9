"""A run that is killed goes on from its last unit, and ends with the same bits."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ptq_models import Mobile, images
from safetensors.torch import load_file, save_file

import bitwright as bw
from bitwright.core.errors import BitwrightError, PlanError

COMMAND = [sys.executable, "-c", "from bitwright.cli import main; main()"]
STEPS = ["equalize", "bias-correction", "qdrop:iterations=6,batch=8"]

WORKLOAD = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
from bitwright import Workload
from ptq_models import Mobile, images


def build():
    model = Mobile()
    return Workload(name="mobile", model=model, inputs=(images()[0][:1],), calibration=images)
"""


def command(folder: Path, output: str) -> list[str]:
    steps = [part for step in STEPS for part in ("--step", step)]
    choices = ["--weights", "int4/channel/sym", "--no-saturating", "--json"]
    return [*COMMAND, "quantize", f"{folder / 'work.py'}:build", "-o", str(folder / output), *choices, *steps]


@pytest.mark.slow  # the phases run in one process below; tests/test_interruptions.py kills real ones
def test_a_killed_process_resumes_bit_identical(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(WORKLOAD)
    state = tmp_path / "killed" / ".steps" / "progress.json"
    process = subprocess.Popen(command(tmp_path, "killed"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    done = 0
    while process.poll() is None and done < 8:  # in the middle of the third step
        time.sleep(0.01)
        done = json.loads(state.read_text())["done"] if state.is_file() else 0
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "it was over too soon"
    again = subprocess.run(command(tmp_path, "killed"), capture_output=True, text=True, check=True)
    assert not (tmp_path / "killed" / ".steps").exists()
    assert not list((tmp_path / "killed").glob(".bitwright-*"))
    files = json.loads(again.stdout)["files"]
    assert {"model.onnx", "checkpoint.safetensors", "plan.yaml", "steps.json"} <= set(files)

    model = Mobile()
    bw.quantize(
        model,
        images(),
        example=(images()[0][:1],),
        steps=STEPS,
        weights="int4/channel/sym",
        saturating=False,
        name="mobile",
    )
    unbroken = model.state_dict()
    resumed = load_file(tmp_path / "killed" / "checkpoint.safetensors")
    assert unbroken.keys() == resumed.keys()
    different = [name for name in resumed if not torch.equal(resumed[name], unbroken[name])]
    assert different == []


@pytest.mark.parametrize("after", [1, 3, 8])
def test_every_phase_can_be_resumed(after: int, tmp_path: Path) -> None:
    """Among float steps, in the first step that needs ranges, in a step after it."""

    def stop(done: int, total: int | None, description: str) -> None:
        if total is not None and done == after:
            raise KeyboardInterrupt

    steps = ["equalize", "equalize:margin=2", "bias-correction", "adaround:iterations=4"]
    choices = {"weights": "int4/tensor/sym", "saturating": False}
    broken, whole = Mobile(), Mobile()
    with pytest.raises(KeyboardInterrupt):
        bw.quantize(broken, images(), steps=steps, folder=tmp_path / "state", progress=stop, **choices)
    assert "forward" not in broken.__dict__
    seen: list[int] = []

    def progress(done: int, total: int | None, description: str) -> None:
        if total is not None:
            seen.append(done)

    bw.quantize(broken, images(), steps=steps, folder=tmp_path / "state", progress=progress, **choices)
    assert seen[0] == after
    bw.quantize(whole, images(), steps=steps, **choices)
    assert all(torch.equal(tensor, broken.state_dict()[name]) for name, tensor in whole.state_dict().items())


def test_another_run_is_refused(tmp_path: Path) -> None:
    def stop(done: int, total: int | None, description: str) -> None:
        if total is not None and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bw.quantize(Mobile(), images(), steps=["bias-correction"], folder=tmp_path, progress=stop)
    with pytest.raises(PlanError) as caught:
        bw.quantize(Mobile(), images(), steps=["bias-correction"], folder=tmp_path, seed=1, weights="int4/channel/sym")
    assert {problem.where for problem in caught.value.problems} == {"seed", "plan"}
    assert str(tmp_path) in str(caught.value)


def unfinished(folder: Path, data: list[torch.Tensor] | None = None) -> None:
    """Two units of a run that was interrupted."""

    def stop(done: int, total: int | None, description: str) -> None:
        if total is not None and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bw.quantize(Mobile(), data or images(), steps=["bias-correction"], folder=folder, progress=stop)


def test_resuming_with_other_later_batches_is_rejected(tmp_path: Path) -> None:
    unfinished(tmp_path)
    first, *rest = images()
    for other in ([first, *(batch + 1 for batch in rest)], [first], [first, *rest[::-1], first]):
        with pytest.raises(PlanError) as caught:
            bw.quantize(Mobile(), other, steps=["bias-correction"], folder=tmp_path)
        assert caught.value.codes == ["resume-mismatch"]
        assert [problem.where for problem in caught.value.problems] == ["calibration data"]


DAMAGE = {
    "empty progress": lambda folder, state: (folder / "progress.json").write_text(""),
    "truncated progress": lambda folder, state: (folder / "progress.json").write_text('{"done": 2, "ident'),
    "progress of {}": lambda folder, state: (folder / "progress.json").write_text("{}"),
    "progress is a list": lambda folder, state: (folder / "progress.json").write_text("[]"),
    "no progress": lambda folder, state: (folder / "progress.json").rename(folder / "other.json"),
    "another tensor": lambda folder, state: save_file({"q": torch.zeros(1)}, state),
    "truncated state": lambda folder, state: state.write_bytes(state.read_bytes()[:-9]),
    "flipped bit": lambda folder, state: state.write_bytes(state.read_bytes()[:-1] + b"\x01"),
    "no state": lambda folder, state: state.unlink(),
}


@pytest.mark.parametrize("what", [*DAMAGE, *(f"done {value}" for value in ("-1", "0", "99", "true", '"2"', "1.5"))])
def test_damaged_state_is_rejected_and_names_the_folder_to_remove(what: str, tmp_path: Path) -> None:
    unfinished(tmp_path)
    (state,) = tmp_path.glob("unit-*.safetensors")
    if what in DAMAGE:
        DAMAGE[what](tmp_path, state)
    else:
        known = json.loads((tmp_path / "progress.json").read_text())
        (tmp_path / "progress.json").write_text(json.dumps({**known, "done": json.loads(what.removeprefix("done "))}))
    model = Mobile()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(BitwrightError) as caught:
        bw.quantize(model, images(), steps=["bias-correction"], folder=tmp_path)
    assert caught.value.codes == ["resume-damaged"]
    assert f"remove {tmp_path}" in str(caught.value)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in before.items())
