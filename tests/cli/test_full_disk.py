"""A full disk: every verb says so with the space that is missing, and leaves nothing half-written."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bitwright.core.errors import BitwrightError, DiskError
from bitwright.core.files import disk_error, replacing, write_text

Run = Callable[..., Any]
TINY = f"{Path(__file__).parents[1] / 'training' / 'tiny.py'}:workload"
GRID = Path(__file__).parents[1] / "support" / "grid_workloads.py"


@contextmanager
def mounted(place: Path, size: str) -> Iterator[Path]:
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except OSError as error:
        pytest.skip(f"no mount: {error}")
    if done.returncode:
        pytest.skip(f"a small file system needs root: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True, timeout=60)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Of 8 KiB: folders and an empty file fit."""
    with mounted(tmp_path / "disk", "8k") as place:
        yield place


@pytest.fixture
def larger(tmp_path: Path) -> Iterator[Path]:
    """Of 300 KiB: a study and some checkpoints fit, a report doesn't."""
    with mounted(tmp_path / "larger", "300k") as place:
        yield place


def files(place: Path) -> list[str]:
    return sorted(str(file.relative_to(place)) for file in place.rglob("*") if file.is_file())


def full(run: Run, *arguments: object) -> dict[str, str]:
    ran = run(*arguments, "--json")
    assert ran.code == 2, (ran.code, ran.err, ran.out[-500:])
    (problem,) = ran.json["problems"]
    assert problem["code"] == "disk-full", ran.err
    assert "missing" in problem["what"] or "more than" in problem["what"]
    assert "free" in problem["value"]
    return dict(problem)


def test_verbs_that_write_a_folder(run: Run, small: str, made: Path, disk: Path) -> None:
    full(run, "quantize", small, "-o", disk / "out")
    full(run, "deploy", small, made, "-o", disk / "out")
    full(run, "quantize", small, "--step", "bias-correction", "-o", disk / "out")
    assert [name for name in files(disk) if ".steps" not in name] == []
    full(run, "tune", small, "--trials", "1", "--drop", "50%", "-o", disk / "tuned")
    full(run, "train", TINY, "--epochs", "1", "--no-tensorboard", "-o", disk / "run")
    kept = [name for name in files(disk) if ".steps" not in name]  # finished units of steps, to resume from
    assert not any(name.endswith((".onnx", ".safetensors", ".html")) for name in kept), kept


def test_verbs_that_write_a_file(run: Run, small: str, made: Path, disk: Path, tmp_path: Path) -> None:
    (disk / "fill").write_bytes(b"x" * 8192)  # not even a small plan fits
    given = ["--plan", made / "plan.yaml", "--checkpoint", made / "checkpoint.safetensors"]
    full(run, "plan", small, "-o", disk / "plan.yaml")
    full(run, "export", small, *given, "-o", disk / "model.onnx")
    full(run, "export", small, "--float", "-o", disk / "model.onnx")
    full(run, "score", small, "--samples", "8", "--most", "1", "-o", disk / "better.yaml")
    full(run, "report", made, "-o", disk / "page.html")
    full(run, "report", made, "-o", disk / "page.json")
    full(run, "bench", small, "--model", made, "--mode", "performance", "--runs", "2", "-o", disk / "figures.json")
    full(run, "score", small, "--samples", "8", "--most", "1", "--report", disk / "report")
    cache = tmp_path / "samples"
    profile = ["profile", TINY, "--rounds", "3", "--no-casts"]
    full(run, *profile, "--cache", cache, "-o", disk / "device.json")
    full(run, *profile, "--cache", disk / "samples", "-o", tmp_path / "device.json")
    assert run(*profile, "--cache", cache, "-o", tmp_path / "device.json", "--quiet").code == 0
    full(run, "predict", TINY, "--profile", tmp_path / "device.json", "--trace", disk / "trace.json")
    assert [name for name in files(disk) if name not in ("fill", "samples")] == []


@pytest.mark.parametrize("size", ["8k", "16k"])
def test_train_without_a_checkpoint_leaves_nothing(run: Run, tmp_path: Path, size: str) -> None:
    with mounted(tmp_path / "disk", size) as disk:
        problem = full(run, "train", TINY, "--epochs", "1", "-o", disk / "a" / "run")
        assert "/." not in problem["where"]
        assert list(disk.iterdir()) == []


@pytest.mark.parametrize("size", ["28k", "60k", "100k"])
def test_train_keeps_checkpoints_and_no_part_of_the_result(run: Run, tmp_path: Path, size: str) -> None:
    with mounted(tmp_path / "disk", size) as disk:
        problem = full(run, "train", TINY, "--epochs", "2", "-o", disk / "run")
        assert "/." not in problem["where"]
        assert {path.name for path in (disk / "run").iterdir()} == {"checkpoints", "history.jsonl", "tensorboard"}
        assert not list(disk.rglob(".*"))
        subprocess.run(["mount", "-o", "remount,size=1m", str(disk)], check=True, timeout=60)
        resumed = run("train", TINY, "--epochs", "2", "-o", disk / "run", "--json")
        assert resumed.code == 0, resumed.err
        assert resumed.json["steps"] == 8


def test_a_file_that_does_not_fit_leaves_no_new_folders(disk: Path) -> None:
    with pytest.raises(DiskError):
        write_text(disk / "a" / "b" / "text", "x" * 100_000)
    assert list(disk.iterdir()) == []


def test_tune_keeps_trials_and_no_partial_result(run: Run, small: str, larger: Path) -> None:
    """A study fits, but not the model with its report: what was tried is kept, and no file of the result is there."""
    (larger / "fill").write_bytes(b"x" * 120 * 2**10)
    full(run, "tune", small, "--trials", "1", "--drop", "50%", "-o", larger / "tuned")
    assert set(files(larger)) <= {"fill", "tuned/study.db"}
    (larger / "fill").unlink()


def test_a_grid_does_not_blame_its_rows(run: Run, disk: Path, tmp_path: Path) -> None:
    text = f"""
bitwright-grid: 1
name: small
models: ["{GRID}:tiny"]
algorithms: [{{a_method: lsq, observer: minmax, weight_observer: minmax}}]
backends: [academic]
bits: [8]
start: {{epochs: 1, batch: 128, optimizer: adamw, lr: 0.01}}
training: {{epochs: 1, batch: 128, optimizer: adamw, lr: 0.001}}
store: {tmp_path / "grid.db"}
"""
    (tmp_path / "grid.yaml").write_text(text)
    full(run, "grid", "run", tmp_path / "grid.yaml", "--starts", disk / "starts", "-o", tmp_path / "board.json")
    full(run, "grid", "run", tmp_path / "grid.yaml", "--starts", tmp_path / "starts", "--reports", disk / "reports")
    grid = ("grid", "run", tmp_path / "grid.yaml", "--starts", tmp_path / "starts")
    ran = run(*grid, "-o", disk / "board.json", "--json")
    assert ran.json["problems"][0]["code"] == "disk-full"
    assert not any(name.startswith("board") for name in files(disk))
    ran = run("grid", "run", tmp_path / "grid.yaml", "--starts", tmp_path / "starts", "-o", tmp_path / "board.json")
    assert ran.code == 0, ran.err
    (row,) = json.loads((tmp_path / "board.json").read_text())["rows"]
    assert (row["status"], row["attempts"]) == ("done", 1)


def test_a_store_on_a_full_disk(run: Run, small: str, disk: Path, tmp_path: Path) -> None:
    full(run, "tune", small, "--trials", "1", "--store", disk / "study.db", "-o", tmp_path / "tuned")


def test_how_much_is_missing(disk: Path) -> None:
    with pytest.raises(BitwrightError) as caught:
        write_text(disk / "text", "x" * 100_000)
    problem = caught.value.problems[0]
    assert (problem.code, problem.where) == ("disk-full", str(disk / "text"))
    assert problem.what == "the disk is full: 91.8 kB are missing"
    assert problem.value == "100.0 kB needed, 8.2 kB free"
    with pytest.raises(BitwrightError) as caught, replacing(disk / "tensors") as temporary:
        save_file({"x": torch.zeros(10_000)}, temporary)
    assert caught.value.codes == ["disk-full"]
    with pytest.raises(BitwrightError) as caught, replacing(disk / "archive") as temporary:
        torch.save(torch.zeros(10_000), temporary)
    assert caught.value.codes == ["disk-full"]
    assert files(disk) == []


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "disk-full"),
        (errno.EDQUOT, "quota-exceeded"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "no-permission"),
        (errno.ENAMETOOLONG, "name-too-long"),
    ],
)
def test_refusals_have_codes(tmp_path: Path, number: int, code: str) -> None:
    error = disk_error(OSError(number, os.strerror(number)), tmp_path / "file", strict=False)
    assert error is not None
    assert error.codes == [code]
    assert error.problems[0].where == str(tmp_path / "file")


def test_errors_of_libraries_are_recognised_and_others_are_not() -> None:
    wrapped = ValueError("could not save")
    wrapped.__cause__ = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    rust = RuntimeError("Error while serializing: I/O error: Disk quota exceeded (os error 122)")
    assert disk_error(wrapped) is not None
    assert disk_error(rust) is not None
    assert disk_error(FileNotFoundError(errno.ENOENT, "no such file", "images/1.jpg")) is None
    assert disk_error(PermissionError(errno.EACCES, "denied", "images/1.jpg")) is None
    assert disk_error(sqlite3.OperationalError("no such table: x")) is None
    assert disk_error(BitwrightError("something else")) is None
