"""Tiny workloads, and one run of the quickstart for all tests that look at its results."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from bitwright.cli import app
from bitwright.cli.out import Out
from bitwright.core.errors import Problem

WORKLOAD = """
import torch
from torch import nn
from bitwright import Workload


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.relu(self.bn(self.conv(x))).mean((2, 3)))


def data(seed=0):
    return torch.randn(32, 2, 6, 6, generator=torch.Generator().manual_seed(seed))


def small(**changes):
    torch.manual_seed(0)
    model = Net().eval()
    target = model(data(1)).argmax(1)
    fields = dict(
        name="small",
        model=model,
        inputs=(data()[:2],),
        calibration=lambda: data().split(8),
        evaluation=lambda: zip(data(1).split(16), target.split(16)),
    )
    return Workload(**{**fields, **changes})


def with_loss():
    return small(loss=torch.nn.functional.cross_entropy)


def no_metric():
    return small(evaluation=None)


def no_calibration():
    return small(calibration=None)


def empty():
    return small(calibration=lambda: [])


def nan():
    return small(calibration=lambda: [torch.full((4, 2, 6, 6), float("nan"))])


def broken_loader():
    def loader():
        yield data()[:2]
        raise FileNotFoundError("images/0001.jpg")
    return small(calibration=loader)


class Words(Net):
    def forward(self, x):
        return str(super().forward(x))


def words():
    return small(model=Words().eval())


class Fails(Net):
    def forward(self, x):
        return super().forward(x[:, :1])


def fails():
    return small(model=Fails().eval())
"""


@dataclass
class Ran:
    """What one call of the command line gave."""

    code: int
    out: str
    err: str
    problems: list[Problem]

    @property
    def codes(self) -> list[str | None]:
        return [problem.code for problem in self.problems]

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ran]


def _run(*arguments: object) -> Ran:
    problems: list[Problem] = []
    print_error = Out.error

    def error(out: Out, text: str, found: Sequence[Problem]) -> None:
        problems.extend(found)
        print_error(out, text, found)

    with patch.object(Out, "error", error):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    return Ran(result.exit_code, result.stdout, result.stderr, problems)


@pytest.fixture(scope="session")
def run() -> Run:
    return _run


@pytest.fixture(scope="session")
def workloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("workloads") / "tiny.py"
    path.write_text(WORKLOAD)
    return path


@pytest.fixture(scope="session")
def small(workloads: Path) -> str:
    return f"{workloads}:small"


@pytest.fixture(scope="session")
def made(small: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that `quantize` wrote."""
    folder = tmp_path_factory.mktemp("made") / "out"
    ran = _run("quantize", small, "-o", folder, "--quiet")
    assert ran.code == 0, ran.err
    return folder


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, Path]:
    folder = tmp_path_factory.mktemp("quickstart") / "demo"
    return _run("quickstart", "--output", folder, "--json"), folder
