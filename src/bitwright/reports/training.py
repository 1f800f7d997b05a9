"""The result of `bitwright train` in a record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from bitwright.core.documents import ResultModel, read_json, validated
from bitwright.training.config import TrainConfig


class TrainingRecord(ResultModel):
    """A training run."""

    metric: str
    precision: str
    metrics: tuple[dict[str, float], ...] = Field(description="After each epoch.")
    best_epoch: int | None = Field(description="From 1.")
    steps: int
    processes: int
    config_hash: str
    settings: dict[str, str] = Field(description="Those that differ from the defaults.")
    init: str | None = Field(description="The initial weights.")
    notes: tuple[str, ...]


class _Best(BaseModel):
    epoch: int = Field(ge=0)


class _Result(BaseModel):
    """The fields of `result.json` that a report needs."""

    metric: str
    quantize: str | None
    compute: str | None
    metrics: tuple[dict[str, float], ...]
    best: _Best | None = None
    steps: int = Field(ge=0)
    processes: int = Field(ge=1)
    config_hash: str
    config: dict[str, Any]
    init: str | None
    notes: tuple[str, ...]


def training_record(run: str | Path) -> TrainingRecord | None:
    """The training in a run's folder, from its `result.json`; None if there is no such file."""
    path = Path(run) / "result.json"
    if not path.is_file():
        return None
    fix = "train again, or remove the file to omit the training from the report"
    data = read_json(path, what="the training's result", fix=fix, finite=False)
    facts = validated(_Result, data, title=f"{path} is not the result of a training", fix=fix)
    usual = TrainConfig().model_dump()
    return TrainingRecord(
        metric=facts.metric,
        precision=facts.quantize or facts.compute or "float",
        metrics=facts.metrics,
        best_epoch=None if facts.best is None else facts.best.epoch,
        steps=facts.steps,
        processes=facts.processes,
        config_hash=facts.config_hash,
        settings={key: str(value) for key, value in facts.config.items() if value != usual.get(key)},
        init=facts.init,
        notes=facts.notes,
    )


def weights_before(run: str | Path) -> Path | None:
    """The initial float weights of a run, if the file still exists."""
    path = Path(run) / "result.json"
    data = read_json(path, what="the training's result", finite=False) if path.is_file() else None
    init = data.get("init") if isinstance(data, dict) else None
    return Path(init) if isinstance(init, str) and "\0" not in init and Path(init).exists() else None
