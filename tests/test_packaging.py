"""The wheel contains every file of the package, and works in an environment that has nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources: a build leaves files behind."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "sources" / "src", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "sources")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), "sources"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    source = ROOT / "src"
    expected = {
        file.relative_to(source).as_posix()
        for file in (source / "bitwright").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert "bitwright/py.typed" in expected
    assert expected <= set(ZipFile(wheel).namelist())


def test_the_wheel_has_the_entry_points(wheel: Path) -> None:
    archive = ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
    parser = ConfigParser(delimiters="=")
    parser.read_string(archive.read(name).decode())
    assert parser["console_scripts"]["bitwright"] == "bitwright.cli:main"
    files = set(archive.namelist())
    groups = [section for section in parser.sections() if section.startswith("bitwright.")]
    assert groups
    for group in groups:
        for target in parser[group].values():
            module = target.partition(":")[0].replace(".", "/")
            assert {f"{module}.py", f"{module}/__init__.py"} & files, target


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_quickstart_runs_from_the_wheel_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    subprocess.run([sys.executable, "-m", "venv", "empty"], cwd=tmp_path, check=True)
    pip = [str(tmp_path / "empty" / "bin" / "pip"), "install", "--quiet"]
    subprocess.run([*pip, "torch==2.13.0"], cwd=tmp_path, check=True, env=environment)
    subprocess.run([*pip, str(wheel)], cwd=tmp_path, check=True, env=environment)
    command = [str(tmp_path / "empty" / "bin" / "bitwright"), "quickstart", "-o", "out"]
    subprocess.run(command, cwd=tmp_path, check=True, env=environment, timeout=600)
    assert (tmp_path / "out" / "report.html").is_file()
    assert (tmp_path / "out" / "model.onnx").is_file()
