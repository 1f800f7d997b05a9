"""The layouts of LPOT 1.0a and 1.0b, as the layout of later versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["normalized"]


def normalized(data: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The data in the layout of LPOT 1.1 and later, and the original paths of the keys that moved.

    The first versions read a list of mappings as one mapping, so `- relative: 0.01` and `relative: 0.01` were the same.
    """
    file = _Moving({key: _merged(value) for key, value in data.items()})
    framework = file.data.get("framework")
    if isinstance(framework, Mapping):
        file.move("framework.name", "model.framework")
        for key in ("inputs", "outputs"):
            file.move(f"framework.{key}", f"model.{key}")
    for role in ("weight", "activation"):
        file.move(f"quantization.{role}", f"quantization.model_wise.{role}")
        file.move(f"calibration.algorithm.{role}", f"quantization.model_wise.{role}.algorithm")
    file.move("calibration", "quantization.calibration")
    if isinstance(file.at("tuning.strategy"), str):
        file.move("tuning.strategy", "tuning.strategy.name")
    file.move("tuning.timeout", "tuning.exit_policy.timeout")
    file.move("tuning.max_trials", "tuning.exit_policy.max_trials")
    file.move("tuning.metric", "evaluation.accuracy.metric")
    file.move("tuning.ops", "quantization.op_wise")
    file.move("evaluation.dataloader", "evaluation.accuracy.dataloader")
    file.move("evaluation.postprocess", "evaluation.accuracy.postprocess")
    file.move("snapshot.path", "tuning.workspace.path")
    for section in ("quantization.calibration", "quantization.train", "evaluation.accuracy", "evaluation.performance"):
        _name_dataset(file.at(f"{section}.dataloader.dataset"))
    return file.data, file.moved


class _Moving:
    """A document whose keys can move."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.moved: dict[str, str] = {}

    def at(self, path: str) -> Any:
        """The value at a path, or None."""
        here: Any = self.data
        for part in path.split("."):
            here = here.get(part) if isinstance(here, Mapping) else None
        return here

    def move(self, old: str, new: str) -> None:
        """Move a value, unless the file has both keys: then the old one is reported as unknown."""
        value, there = self.at(old), self.at(new)
        if value is None or (there is not None and not new.startswith(f"{old}.")):
            return
        *parents, key = old.split(".")
        del (self.at(".".join(parents)) if parents else self.data)[key]
        self._remove_empty(parents)
        here = self.data
        *parents, key = new.split(".")
        for part in parents:
            inner = here.get(part)
            if inner is not None and not isinstance(inner, dict):
                inner = {}
            here[part] = inner if inner is not None else {}
            here = here[part]
        here[key] = value
        self.moved[new] = old

    def _remove_empty(self, parents: list[str]) -> None:
        if parents and self.at(".".join(parents)) == {}:
            *above, key = parents
            del (self.at(".".join(above)) if above else self.data)[key]
            self._remove_empty(above)


def _merged(value: Any) -> Any:
    """Lists of mappings become one mapping."""
    if isinstance(value, Mapping):
        return {key: _merged(item) for key, item in value.items()}
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return {key: _merged(item) for part in value for key, item in part.items()}
    return value


def _name_dataset(dataset: Any) -> None:
    """`{type: ImageFolder, root: …}` becomes `{ImageFolder: {root: …}}`."""
    if isinstance(dataset, dict) and isinstance(dataset.get("type"), str):
        options = {key: value for key, value in dataset.items() if key != "type"}
        name = dataset["type"]
        dataset.clear()
        dataset[name] = options
