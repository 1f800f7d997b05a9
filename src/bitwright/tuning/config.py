"""The configuration file of a search: model, data, goal, budget and search space."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, InstanceOf
from pydantic.json_schema import SkipJsonSchema
from torch import nn

from bitwright.backends import DEFAULT_BACKEND, Choices
from bitwright.core.arguments import reject_unknown, strict
from bitwright.core.documents import read_settings
from bitwright.core.errors import BitwrightError, WorkloadError, did_you_mean
from bitwright.core.registry import translated
from bitwright.core.schemas import NonBlank, Strict, validated
from bitwright.core.task_store import is_address
from bitwright.tuning.evaluation import Measuring
from bitwright.tuning.goal import Budget, Drop, Goal
from bitwright.tuning.result import Tuned
from bitwright.tuning.space import Space
from bitwright.tuning.tune import tune
from bitwright.workload import Workload, load_object, load_workload
from bitwright.workload.datasets import Dataset
from bitwright.workload.metrics import METRICS, make_evaluate, metric_name


class FileData(ABC):
    """The data, metric and training of another system's file, which complete a workload."""

    @abstractmethod
    def beside(self, folder: Path) -> FileData:
        """A copy with paths relative to the folder of the file."""

    @abstractmethod
    def complete(self, workload: Workload | None) -> Workload:
        """The workload with the data and metric of the file."""

    @abstractmethod
    def training(self, workload: Workload) -> Callable[[nn.Module], object] | None:
        """The training of each candidate; None: no training."""


@strict
class TuneConfig(Strict, populate_by_name=True):
    r"""The settings of a search. The model and data come from a workload, or from `model` with the data given here.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     file = Path(folder, "tune.yaml")
    ...     _ = file.write_text("workload: digits\ngoal: {drop: 1%}\nbudget: {minutes: 5}\n")
    ...     config = TuneConfig.load(file)
    >>> config.workload, str(config.goal.drop), config.budget.minutes
    ('digits', '1%', 5.0)
    """

    version: Literal[1] = Field(default=1, alias="bitwright-tune")
    workload: str | None = Field(default=None, description="file.py:function, or the name of a built-in workload.")
    model: NonBlank | None = Field(default=None, description="file.py:function that returns an nn.Module.")
    name: NonBlank | None = Field(default=None, description="Name of the study; by default the workload's.")
    calibration: Dataset | None = None
    evaluation: Dataset | None = None
    metric: str | dict[str, dict[str, Any]] | None = Field(
        default=None, description="topk, f1, mse, mae, rmse, or several with their options."
    )
    goal: Goal = Goal()
    budget: Budget = Budget()
    strategy: str = "bisect"
    backend: str = DEFAULT_BACKEND
    space: Space = Space()
    keep_float: tuple[NonBlank, ...] = ()
    store: NonBlank | None = None
    resume: bool = False
    seed: int = Field(default=0, ge=0, lt=2**32)
    samples: int | None = Field(default=None, gt=0, le=10**12, description="Number of calibration samples.")
    measuring: Measuring = Measuring()
    data: SkipJsonSchema[InstanceOf[FileData] | None] = Field(
        default=None, description="Data and training of another system's file; set by importers only."
    )
    early: bool = Field(
        default=True, description="Stop evaluating candidates that can't pass after a part of the data."
    )

    @staticmethod
    def load(path: str | Path) -> TuneConfig:
        """Read a file of Bitwright or LPOT; all problems are reported together. Paths are relative to the file."""
        file = Path(path)
        data = read_settings(file, "a search", "workload: …")
        ours = translated(data, "tune", where=str(file)) or data
        config = validated(TuneConfig, ours, title=f"{file} has problems")
        return config._with_absolute_paths(file.parent)

    def _with_absolute_paths(self, folder: Path) -> TuneConfig:
        """Resolve paths relative to the folder of the file."""

        def of(data: Dataset | None) -> Dataset | None:
            if data is None:
                return None
            moved = {key: folder / path for key in ("npz", "images") if (path := getattr(data, key)) is not None}
            return data.model_copy(update=moved)

        def code(ref: str | None) -> str | None:
            return ref if ref is None or ".py:" not in ref else str(folder / ref)

        store = self.store if self.store is None or is_address(self.store) else str(folder / self.store)
        return self.model_copy(
            update={
                "calibration": of(self.calibration),
                "evaluation": of(self.evaluation),
                "workload": code(self.workload),
                "model": code(self.model),
                "store": store,
                "data": None if self.data is None else self.data.beside(folder),
            }
        )

    def updated(
        self,
        changes: Mapping[str, Any],
        *,
        goal: Mapping[str, Any] | None = None,
        budget: Mapping[str, Any] | None = None,
    ) -> TuneConfig:
        """A copy with other settings. A value of None leaves a setting as it is."""
        reject_unknown("TuneConfig.updated", changes, TuneConfig.model_fields)
        title = "the options of the search have problems"
        drop = (goal or {}).get("drop")
        try:
            Drop.read(drop)
        except ValueError as error:
            what, fix = (
                "the drop is neither a percentage nor a number",
                "give 1% (of float) or 0.5 (in its units)",
            )
            raise BitwrightError(what, where="drop", value=drop, fix=fix, code="invalid-drop") from error
        goals = {**self.goal.model_dump(exclude_unset=True), **_given(goal or {})}
        limits = {**self.budget.model_dump(exclude_unset=True), **_given(budget or {})}
        return self.model_copy(
            update={
                **_given(changes),
                "goal": validated(Goal, goals, title=title),
                "budget": validated(Budget, limits, title=title),
            }
        )

    def make_workload(self, given: Workload | None = None) -> Workload:
        """The given or the configured workload, with the data and metric of this configuration."""
        if given is None and self.workload is not None:
            given = load_workload(self.workload)
        if self.data is not None:
            return self.data.complete(given)
        if given is None:
            given = self._from_model()
        changes: dict[str, Any] = {}
        if self.calibration is not None:
            changes["calibration"] = self.calibration.inputs
        if self.evaluation is not None:
            changes |= {
                "evaluation": self.evaluation.labelled,
                "evaluate": None,
                "metric": "top1",
                "lower_is_better": False,
            }
        given = replace(given, **changes)
        return given if self.metric is None else self._measured(given)

    def _from_model(self) -> Workload:
        if self.model is None or self.calibration is None:
            missing = "model" if self.model is None else "calibration"
            raise WorkloadError(
                f"neither a workload nor a {missing} is given",
                where=missing,
                fix="set workload (file.py:function), or model, calibration and evaluation",
                code="workload-required",
            )
        model = load_object(self.model)
        if not isinstance(model, nn.Module):
            raise WorkloadError(
                "the function didn't return an nn.Module",
                where="model",
                value=type(model).__name__,
                fix="return the model",
                code="not-a-module",
            )
        example = next(iter(self.calibration.inputs()))[:1]
        name = self.name or self.model.rpartition(":")[2]
        return Workload(name=name, model=model, inputs=(example,), loss=torch.nn.functional.cross_entropy)

    def _measured(self, workload: Workload) -> Workload:
        """The workload with the metrics of this configuration, on its own data."""
        if workload.evaluation is None:
            raise WorkloadError(
                "the metric has no data to be measured on",
                where="metric",
                fix="set evaluation= or evaluation:",
                code="no-evaluation-data",
            )
        wanted = {self.metric: {}} if isinstance(self.metric, str) else dict(self.metric or {})
        unknown = [name for name in wanted if name not in METRICS]
        if unknown:
            raise WorkloadError(
                "unknown metric",
                where="metric",
                value=unknown[0],
                fix=did_you_mean(unknown[0], METRICS),
                code="unknown-metric",
            )
        names = [metric_name(name, options) for name, options in wanted.items()]
        if names == ["top1"]:  # the built-in metric has access to samples, for pairing and early stopping
            return replace(workload, evaluate=None, metric="top1", lower_is_better=False)
        evaluate = make_evaluate(wanted, workload.evaluation)
        return replace(workload, evaluate=evaluate, metric=names[0], lower_is_better=self.lower_is_better)

    @property
    def lower_is_better(self) -> tuple[str, ...]:
        """The configured metrics for which lower is better."""
        wanted = {self.metric: {}} if isinstance(self.metric, str) else dict(self.metric or {})
        return tuple(metric_name(n, o) for n, o in wanted.items() if n in METRICS and not METRICS[n][1])

    def tune(self, workload: Workload | None = None, **others: Any) -> Tuned:
        """Run the search; `others` are arguments of `tune` that override this configuration."""
        reject_unknown("TuneConfig.tune", others, inspect.signature(tune).parameters)
        lower = self.lower_is_better
        goal = self.goal
        if lower and goal.lower_is_better is False:
            goal = goal.model_copy(update={"lower_is_better": lower})
        choices: Choices = {"keep_float": self.keep_float} if self.keep_float else {}
        arguments: dict[str, Any] = {
            "goal": goal,
            "budget": self.budget,
            "strategy": self.strategy,
            "store": self.store,
            "space": self.space,
            "backend": self.backend,
            "name": self.name,
            "resume": self.resume,
            "seed": self.seed,
            "samples": self.samples,
            "measuring": self.measuring,
            "early": self.early,
            **choices,
        }
        made = self.make_workload(workload)
        if self.data is not None:
            arguments["train"] = self.data.training(made)
        return tune(made, **{**arguments, **others})


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
