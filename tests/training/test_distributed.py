"""The trainer under torchrun: real processes, one of which is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

TINY = f"{Path(__file__).with_name('tiny.py')}:workload"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def launch(out: Path, *options: str, restarts: int = 0, processes: int = 2) -> subprocess.Popen[str]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", str(processes), "--max-restarts", str(restarts), "--monitor-interval", "0.2"),
        *("-m", "bitwright", "train", TINY, "--batch", "10", "--lr", "0.1", "--log-steps", "1", "--no-tensorboard"),
        *("-o", str(out), *options),
    ]
    return subprocess.Popen(
        command,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_default_signals,
    )


def _default_signals() -> None:
    """Tests that run in the background of a shell would hand ignored signals down."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        words, errors = process.communicate(timeout=110)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return words, errors


def history(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]


def state(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "checkpoint.safetensors")


@pytest.mark.parametrize("quantizer", ["lsq", pytest.param("plain", marks=pytest.mark.slow)])
def test_two_processes_train_one_model(tmp_path: Path, quantizer: str) -> None:
    # `Ranks.agree` compares every scale and weight bit by bit after each epoch: a difference would end the run
    options = ("--epochs", "2", "--precision", "int8", "--quantizer", quantizer, "--observer", "ema-minmax")
    words, notes = finish(launch(tmp_path, *options))
    assert (words + notes).count("epoch 2/2") == 1  # rank 0 speaks for all
    steps = "13 steps of 20 samples per epoch, the last one of 10"
    assert f"{steps} (10 on each of 2 processes; the learning rate isn't scaled)" in notes
    rows = history(tmp_path)
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 26
    assert losses[-1] < 0.7 * losses[0]
    assert rows[0]["lr"] == 0.1
    assert [path.name for path in sorted((tmp_path / "checkpoints").glob("step-*"))] == [
        "step-00000013",
        "step-00000026",
    ]


@pytest.mark.slow
def test_sharded_training_equals_replicated_training(tmp_path: Path) -> None:
    common = ("--epochs", "2", "--precision", "int8", "--clip", "5", "--ema", "0.9", "--accumulate", "2")
    runs = {kind: launch(tmp_path / kind, *common, "--parallel", kind) for kind in ("ddp", "fsdp")}
    for process in runs.values():
        finish(process)
    ours, theirs = state(tmp_path / "fsdp"), state(tmp_path / "ddp")
    assert ours.keys() == theirs.keys()
    losses = [[row["loss"] for row in history(tmp_path / kind) if "loss" in row] for kind in ("fsdp", "ddp")]
    assert losses[0][:4] == pytest.approx(losses[1][:4], rel=1e-4)  # sums differ in their order
    assert losses[0][-1] == pytest.approx(losses[1][-1], rel=0.2)


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_processes_can_train_again_and_again(count: int, tmp_path: Path) -> None:
    """A DDP that outlived its group used to hang its process, now and then, on a busy machine."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    worker = [sys.executable, str(Path(__file__).with_name("fits_worker.py")), str(count)]
    said = [tmp_path / f"{rank}.txt" for rank in (0, 1)]
    processes = []
    try:
        for rank in (0, 1):
            ours = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            with said[rank].open("w") as words:
                processes.append(
                    subprocess.Popen(
                        worker, env={**ENVIRONMENT, **agent, **ours}, stdout=words, stderr=subprocess.PIPE, text=True
                    )
                )
        for rank, process in enumerate(processes):
            try:
                _, errors = process.communicate(timeout=90 + 3 * count)
            except subprocess.TimeoutExpired:
                pytest.fail(f"rank {rank} hangs after {len(said[rank].read_text().split())} of {count} runs")
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=60)
    assert [path.read_text().split()[-1] for path in said] == [str(count)] * 2


@pytest.mark.slow
def test_sharded_runs_resume_bit_identical(tmp_path: Path) -> None:
    options = ("--epochs", "2", "--precision", "int8", "--parallel", "fsdp", "--ema", "0.9", "--save-steps", "5")
    finish(launch(tmp_path / "whole", *options))
    process = launch(tmp_path / "killed", *options, restarts=1)
    try:
        os.kill(_worker_at_step(process, tmp_path / "killed", 7), signal.SIGKILL)
    finally:
        _, notes = finish(process)
    assert re.search(r"resumed step-000000(05|10)", notes)
    ours, theirs = state(tmp_path / "killed"), state(tmp_path / "whole")
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.slow
def test_a_run_whose_worker_is_killed_ends_as_an_unbroken_one(tmp_path: Path) -> None:
    options = ("--epochs", "2", "--save-steps", "5", "--precision", "int8")
    finish(launch(tmp_path / "whole", *options))
    process = launch(tmp_path / "killed", *options, restarts=1)
    try:
        victim = _worker_at_step(process, tmp_path / "killed", 7)
        os.kill(victim, signal.SIGKILL)
    finally:
        _, notes = finish(process)
    assert re.search(r"resumed step-000000(05|10)", notes)  # in mid-epoch: an epoch has 12 steps
    ours, theirs = state(tmp_path / "killed"), state(tmp_path / "whole")
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    assert history(tmp_path / "killed") == history(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("number", "target"),
    [(signal.SIGINT, "group"), (signal.SIGTERM, "launcher"), (signal.SIGTERM, "rank"), (signal.SIGINT, "rank")],
)
def test_an_interrupted_run_keeps_its_work_on_all_ranks(tmp_path: Path, number: signal.Signals, target: str) -> None:
    """Ctrl-C and SIGTERM through torchrun, and a signal that only one rank receives."""
    options = ("--epochs", "5", "--precision", "int8")
    finish(launch(tmp_path / "whole", *options))
    process = launch(tmp_path / "out", *options)
    rank = _worker_at_step(process, tmp_path / "out", 7)
    children = [int(one) for one in _children(process)]
    if target == "group":
        os.killpg(process.pid, number)
    else:
        os.kill(rank if target == "rank" else process.pid, number)
    _, notes = process.communicate(timeout=110)
    assert process.returncode != 0
    (told,) = [line for line in notes.splitlines() if line.startswith("error: interrupted")]
    found = re.search(r"after step (\d+) of \d+: the run is saved; rerun the command to resume", told)
    assert found is not None, notes
    step = int(found[1])
    assert step >= 7
    assert (tmp_path / "out" / "checkpoints" / f"step-{step:08d}").is_dir()
    assert [child for child in children if Path(f"/proc/{child}").exists()] == []
    _, notes = finish(launch(tmp_path / "out", *options))
    assert f"resumed step-{step:08d}" in notes
    ours, theirs = state(tmp_path / "out"), state(tmp_path / "whole")
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    assert history(tmp_path / "out") == history(tmp_path / "whole")


def _children(launcher: subprocess.Popen[str]) -> list[str]:
    return Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()


def _worker_at_step(launcher: subprocess.Popen[str], out: Path, step: int) -> int:
    """A child of torchrun, as soon as the run has logged that step."""
    end = time.monotonic() + 100  # a process that imports torch and opens a group needs long on a busy machine
    while time.monotonic() < end:
        done = len((out / "history.jsonl").read_text().splitlines()) if (out / "history.jsonl").exists() else 0
        if done >= step:
            return int(_children(launcher)[-1])
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.05)
    raise AssertionError("the run didn't get that far")
