"""The example `resnest` as a user runs it: tune and benchmark with LPOT's YAML on an image folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bitwright import TuneConfig
from bitwright.core.documents import read_settings
from bitwright.importers.lpot import read_lpot
from bitwright.importers.lpot.workload import LpotData

EXAMPLE = Path(__file__).parents[2] / "examples" / "resnest"
NAME = "image_recognition__resnest__conf@*.yaml"


def python(script: str, *arguments: object) -> str:
    command = [sys.executable, EXAMPLE / script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout


def run(folder: Path, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **variables}
    environment.pop("RESNEST_CHECKPOINT", None)
    command = [EXAMPLE / "run.sh", *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=1500
    )


@pytest.fixture
def images(tmp_path: Path) -> Path:
    pytest.importorskip("PIL")
    python("images.py", tmp_path / "images", "--per-class", 6)
    return tmp_path / "images"


def batches(config: TuneConfig) -> tuple[Any, Any]:
    """The calibration and evaluation data of an LPOT file."""
    assert isinstance(config.data, LpotData)
    sources, problems = config.data.open(None)
    assert problems == []
    return sources["calibration"], sources["evaluation"]


def test_folders_are_filled_in(images: Path, tmp_path: Path) -> None:
    file = tmp_path / "conf.yaml"
    file.write_text(python("folders.py", EXAMPLE / "resnest.yaml", images))
    calibration, evaluation = batches(TuneConfig.load(file))
    assert [Path(one.loader.dataset[0].root) for one in (calibration, evaluation)] == [images / "train", images / "val"]
    assert sum(len(labels) for _, labels in evaluation.epoch()) == 8
    assert next(iter(calibration.inputs())).shape == (24, 3, 56, 56)


@pytest.mark.realdata
def test_published_files_have_the_same_settings(data_dir: Path, images: Path, tmp_path: Path) -> None:
    files = sorted((data_dir / "peers" / "lpot").glob(NAME))
    assert len(files) >= 3
    ours = TuneConfig.load(EXAMPLE / "resnest.yaml")
    for number, published in enumerate(files):
        file = tmp_path / f"{number}.yaml"
        file.write_text(python("folders.py", published, images / "train"))  # a folder without parts
        config = TuneConfig.load(file)
        assert (config.goal, config.metric, config.seed) == (ours.goal, ours.metric, ours.seed)
        for one in batches(config):
            assert Path(one.loader.dataset[0].root) == images / "train"
            assert next(iter(one.inputs())).shape[1:] == (3, 224, 224)


@pytest.mark.realdata
def test_our_file_has_the_keys_of_the_published_one(data_dir: Path) -> None:
    (file,) = (data_dir / "peers" / "lpot").glob(NAME.replace("*", "v1.2-*"))
    published, ours = (
        read_lpot(read_settings(path, "a search", ""), where=path.name).config
        for path in (file, EXAMPLE / "resnest.yaml")
    )
    assert ours.model == published.model
    assert ours.tuning == published.tuning
    assert ours.evaluation.accuracy.metrics == published.evaluation.accuracy.metrics


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_narrow_resnest_reaches_its_goal(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    done = run(tmp_path, EPOCHS="8", RUNS="5")
    assert done.returncode == 0, done.stdout + done.stderr
    out = tmp_path / "runs" / "resnest"
    assert json.loads((out / "float" / "result.json").read_text())["metrics"][-1]["top1"] > 60  # four classes
    tuned = json.loads((out / "int8" / "tuning.json").read_text())
    assert tuned["met_goal"] is True
    (row,) = json.loads((out / "bench.json").read_text())["runtimes"]
    assert row["executed"]["int8"] >= 20
    assert row["parity"]["passed"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_untrained_resnest50_says_so(images: Path, tmp_path: Path) -> None:
    done = run(tmp_path, "--data", images, "--full", RUNS="2")
    assert "no checkpoint is named" in done.stderr
    assert (tmp_path / "runs" / "resnest" / "int8" / "tuning.json").is_file(), done.stdout + done.stderr


def test_unknown_options_are_usage() -> None:
    done = subprocess.run([EXAMPLE / "run.sh", "--epochs"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr[:5]) == (2, "usage")
