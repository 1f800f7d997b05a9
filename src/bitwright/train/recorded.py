"""A training run as a part of a report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bitwright.report import Training
from bitwright.train.config import TrainConfig


def recorded(run: str | Path) -> Training | None:
    """What `result.json` of a run's folder says; None: the folder has none, so nothing was trained there."""
    path = Path(run) / "result.json"
    if not path.is_file():
        return None
    facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    usual = TrainConfig().model_dump()
    changed = {key: str(value) for key, value in facts["config"].items() if value != usual.get(key)}
    best = facts.get("best")
    return Training(
        metric=facts["metric"],
        precision=facts["quantize"] or facts["compute"] or "float",
        metrics=tuple(facts["metrics"]),
        best_epoch=None if best is None else int(best["epoch"]),
        steps=facts["steps"],
        processes=facts["processes"],
        config_hash=facts["config_hash"],
        settings=changed,
        init=facts["init"],
        notes=tuple(facts["notes"]),
    )
