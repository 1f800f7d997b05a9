"""The data, metric and training of an LPOT file, or the objects that replace them in Python, as a workload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from logging import getLogger
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from bitwright.core.errors import BitwrightError, PlanError, Problem, WorkloadError
from bitwright.importers.key_table import InCode, Option
from bitwright.importers.lpot.datasets import Loader
from bitwright.importers.lpot.metrics import Counter, make_evaluate
from bitwright.importers.lpot.schema import LpotConfig
from bitwright.training.data import TrainingData
from bitwright.training.distributed import current_ranks
from bitwright.tuning.config import FileData
from bitwright.workload import Workload

__all__ = ["Given", "LpotData", "as_pair"]

log = getLogger("bitwright")
_ROLES = {
    "calibration": "quantization.calibration.dataloader",
    "evaluation": "evaluation.accuracy.dataloader",
    "training": "quantization.train.dataloader",
}


class _Source(Protocol):
    """Batches of a role, from the file, from Python or from the workload."""

    def epoch(self, number: int = 0, batches: int | None = None) -> Iterator[tuple[Any, Any]]:
        """Batches (inputs, targets)."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """The objects that LPOT's users pass in Python instead of a section of the file."""

    calibration: Iterable[Any] | None = None
    evaluation: Iterable[Any] | None = None
    training: Iterable[Any] | None = None
    evaluate: Callable[[Callable[..., Any]], Any] | None = None
    train: Callable[[nn.Module], object] | None = None
    metrics: dict[str, Callable[[], Counter]] = field(default_factory=dict)
    postprocess: Callable[[Any, Any], tuple[Any, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class LpotData(FileData):
    """The data, metric and training of a search that an LPOT file describes."""

    config: LpotConfig
    given: Given = Given()

    def beside(self, folder: Path) -> LpotData:
        """A copy with paths relative to the folder of the file."""
        return replace(self, config=self.config.with_loaders(lambda loader: loader.beside(folder)))

    def complete(self, workload: Workload | None) -> Workload:
        """The workload with the data and metric of the file. All problems are raised together."""
        if workload is None:
            fix = "--workload file.py:function, whose Workload has the model; or use Quantization(conf) in Python"
            what = "the model is missing: an LPOT file doesn't contain one"
            raise WorkloadError(what, where="model", fix=fix, code="workload-required")
        sources, problems = self.open(workload)
        changes: dict[str, Any] = {}
        calibration, evaluation = sources.get("calibration"), sources.get("evaluation")
        if calibration is not None:
            changes["calibration"] = lambda: (inputs for inputs, _ in calibration.epoch())
        try:
            changes |= self._evaluation(workload, evaluation)
        except BitwrightError as error:
            problems += error.problems
        if self.trains:
            problems += self._training_problems(workload, sources)
        if problems:
            raise PlanError(problems, title="the data of the LPOT file has problems")
        return replace(workload, **changes)

    @property
    def trains(self) -> bool:
        """Whether candidates are trained."""
        return self.config.quantization.approach == "quant_aware_training"

    def training(self, workload: Workload) -> Callable[[nn.Module], object] | None:
        """The training of each candidate; None: no training."""
        if not self.trains:
            return None
        if self.given.train is not None:
            return self.given.train
        sources, problems = self.open(workload)
        train = self.config.quantization.train
        problems += self._training_problems(workload, sources)
        if problems or train is None:
            raise PlanError(problems, title="the training of the LPOT file has problems")
        return _Training(
            train,
            sources["training"].epoch,
            train.model_dump_json(serialize_as_any=True, exclude={"dataloader": {"dataset"}}),
        )

    def open(self, workload: Workload | None) -> tuple[dict[str, _Source], list[Problem]]:
        """The batches of each role, and what is wrong with them. Objects in Python come before sections of the file."""
        found: dict[str, _Source] = {}
        problems: list[Problem] = []
        roles = [role for role in _ROLES if role != "training" or self.trains]
        for role in roles:
            given = getattr(self.given, role)
            loader = self.config.loaders.get(role)
            own = None if workload is None else getattr(workload, role)
            if given is not None:
                found[role] = _Given(given)
            elif loader is None or not loader.dataset:
                if own is not None:
                    found[role] = _of_workload(workload, role, self.config, loader)
            elif loader.in_code is not None:
                if own is None:
                    problems.append(_in_code(loader, role))
                else:
                    log.info("%s: %s is not read; the workload's data is used", _ROLES[role], loader.in_code)
                    found[role] = _of_workload(workload, role, self.config, loader)
            else:
                try:
                    found[role] = loader.open(self.config.tuning.random_seed)
                except BitwrightError as error:
                    problems += [replace(problem, where=_at(_ROLES[role], problem)) for problem in error.problems]
        if "calibration" not in found and "training" in found and not problems:
            found["calibration"] = found["training"]  # LPOT trains without calibration, from the same data
        return found, problems

    def _evaluation(self, workload: Workload, source: _Source | None) -> dict[str, Any]:
        """The changes of the workload: how it is evaluated."""
        accuracy, given = self.config.evaluation.accuracy, self.given
        if given.evaluate is not None:
            return {"evaluate": given.evaluate, "evaluation": None, **self._named("accuracy")}
        counters = given.metrics or {metric.key: metric.counter for metric in accuracy.metrics if not _is_code(metric)}
        steps = accuracy.postprocess.transform if accuracy.postprocess is not None and not given.postprocess else ()
        used: list[Option] = [*(() if given.metrics else accuracy.metrics), *steps]
        in_code = [(option.name, option.about.reason) for option in used if isinstance(option.about, InCode)]
        if not (given.metrics or given.postprocess):
            texts = "it compares texts; set postprocess, which makes them from outputs and labels"
            in_code += [(metric.name, texts) for metric in accuracy.metrics if metric.texts]
        if (in_code or source is None) and workload.evaluate is not None:
            for name, _ in in_code:
                log.info("evaluation.accuracy: %s is not applied; the workload's evaluate= is used", name)
            return {}
        if in_code:
            raise WorkloadError(
                in_code[0][1],
                where="evaluation.accuracy",
                value=in_code[0][0],
                fix="set eval_func, or pass evaluate= to the workload",
                code="cannot-run",
            )
        if source is None:
            if counters:
                fix = "set eval_dataloader or eval_func, or give evaluation.accuracy a dataloader"
                what = "the metric has no data to be measured on"
                raise WorkloadError(what, where="evaluation.accuracy", fix=fix, code="no-evaluation-data")
            return {}
        limit = None if accuracy.iteration < 0 else accuracy.iteration
        shift = 0 if accuracy.postprocess is None or given.postprocess else accuracy.postprocess.label_shift

        def batches() -> Iterator[tuple[Any, Any]]:
            for inputs, target in source.epoch(batches=limit):
                yield inputs, target - shift if shift else target

        names = list(counters) or ["top1"]
        if names == ["top1"] and not given.metrics and given.postprocess is None:
            return {"evaluation": batches, "evaluate": None, **self._named("top1")}  # with access to samples
        if not counters:
            fix = "name a metric in evaluation.accuracy.metric"
            what = "postprocess has no metric to pass its result to"
            raise WorkloadError(what, where="evaluation.accuracy", fix=fix, code="no-metric")
        evaluate = make_evaluate(counters, batches, postprocess=given.postprocess)
        lower = tuple(metric.key for metric in accuracy.metrics if metric.lower)
        changes = {"evaluation": batches, "evaluate": evaluate, **self._named(names[0])}
        return changes if given.metrics else {**changes, "lower_is_better": lower or False}

    def _named(self, metric: str) -> dict[str, Any]:
        return {"metric": metric, "lower_is_better": not self.config.tuning.accuracy_criterion.higher_is_better}

    def _training_problems(self, workload: Workload, sources: Mapping[str, _Source]) -> list[Problem]:
        if self.given.train is not None:
            return []
        train = self.config.quantization.train
        fix = "add it to quantization.train, or use Quantization(conf) in Python and set q_func"
        missing = [name for name in ("optimizer", "criterion") if not getattr(train, name, ())]
        if "training" not in sources and not (train and train.dataloader and train.dataloader.dataset):
            missing.append("dataloader")
        return [
            Problem(what="the training needs it", where=f"quantization.train.{name}", fix=fix, code="training-required")
            for name in missing
        ]


@dataclass(frozen=True)
class _Training:
    """Trains a model as the file says."""

    train: Any
    batches: Callable[[int], Iterable[tuple[Any, Any]]]
    identity: str
    """What must be equal to resume a study."""

    def __call__(self, model: nn.Module) -> None:
        self.train.run(model, self.batches)


class _Given:
    """A loader in Python, which yields (inputs, target) or inputs."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = list(loader) if iter(loader) is loader else loader  # an iterator could be read only once

    def epoch(self, number: int = 0, batches: int | None = None) -> Iterator[tuple[Any, Any]]:
        """The batches of the loader."""
        return (as_pair(batch) for batch in islice(self.loader, batches))


class _TrainingSet:
    """A workload's training data in batches."""

    def __init__(self, workload: Workload, config: LpotConfig, loader: Loader | None) -> None:
        size = None if loader is None else loader.batch_size
        seed = config.tuning.random_seed
        self.data = TrainingData(workload, batch=size, seed=seed, ranks=current_ranks(), workers=0)

    def epoch(self, number: int = 0, batches: int | None = None) -> Iterator[tuple[Any, Any]]:
        """The batches of an epoch, shuffled."""
        return islice(self.data.epoch(number), batches)


def _of_workload(workload: Workload | None, role: str, config: LpotConfig, loader: Loader | None) -> _Source:
    """The workload's own data for a role."""
    assert workload is not None
    if role == "training":
        return _TrainingSet(workload, config, loader)
    read = getattr(workload, role)

    class Own:
        def epoch(self, number: int = 0, batches: int | None = None) -> Iterator[tuple[Any, Any]]:
            found = islice(read(), batches)
            return ((batch, None) for batch in found) if role == "calibration" else iter(found)

    return Own()


def as_pair(batch: Any) -> tuple[Any, Any]:
    """(inputs, target) of a batch. As in LPOT, a pair has a target, and a mapping has it as `labels`."""
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key != "labels"}, batch.get("labels")
    if isinstance(batch, tuple | list) and len(batch) == 2:
        inputs, target = batch
        inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
        return tuple(inputs) if isinstance(inputs, list) else inputs, target
    return tuple(batch) if isinstance(batch, list) else batch, None


def _is_code(option: Any) -> bool:
    return isinstance(option.about, InCode)


def _in_code(loader: Loader, role: str) -> Problem:
    fix = f"set {'calib' if role == 'calibration' else 'eval' if role == 'evaluation' else 'train'}_dataloader of "
    fix += "Quantization(conf) in Python, or pass it to the workload"
    option = next(o for o in (*loader.dataset, *loader.transform, *loader.filter) if _is_code(o))
    assert isinstance(option.about, InCode)
    where = f"{_ROLES[role]}.{'dataset' if option in loader.dataset else 'transform'}"
    return Problem(what=option.about.reason, where=where, value=option.name, fix=fix, code="cannot-run")


def _at(place: str, problem: Problem) -> str:
    return f"{place}: {problem.where}" if problem.where else place
