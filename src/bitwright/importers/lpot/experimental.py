"""`Quantization` and `Benchmark` as in `lpot.experimental`: scripts run with another import line."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import islice
from logging import getLogger
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from bitwright.backends import DEFAULT_BACKEND, DEFAULT_RUNTIME
from bitwright.bench.benchmark import benchmark
from bitwright.bench.comparison import Comparison, LatencyRow, Together
from bitwright.core.documents import read_settings
from bitwright.core.errors import BitwrightError, PlanError, Problem, WorkloadError, log_warnings
from bitwright.core.files import scratch_folder
from bitwright.core.schemas import validated
from bitwright.core.tensor_tree import batch_size
from bitwright.importers.lpot.datasets import Batches
from bitwright.importers.lpot.metrics import Counter
from bitwright.importers.lpot.reader import read_lpot, tune_settings
from bitwright.importers.lpot.schema import LpotConfig
from bitwright.importers.lpot.workload import Given, LpotData, as_pair
from bitwright.ptq.quantize import Quantized
from bitwright.quantizers import strip
from bitwright.tuning import TuneConfig, Tuned
from bitwright.workload import Workload

__all__ = ["Benchmark", "Quantization", "QuantizedModel", "common"]

log = getLogger("bitwright")
Conf = str | Path | Mapping[str, Any] | LpotConfig


class QuantizedModel(nn.Module):
    """What LPOT calls its model: the PyTorch model in `model`, and `save`."""

    def __init__(self, model: nn.Module, tuned: Tuned | None = None) -> None:
        super().__init__()
        self.model = model
        self.tuned = tuned
        """The search, with its history; None for a float model."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(*args, **kwargs)

    @property
    def quantized(self) -> Quantized | None:
        """Export, check and report; None for a float model."""
        return None if self.tuned is None else self.tuned.quantized

    def save(self, path: str | Path) -> Path:
        """Write plan.yaml, checkpoint.safetensors and model.onnx, which `bitwright.load` reads, and tuning.json."""
        if self.tuned is None:
            raise BitwrightError("the model is float", fix="quantize it first", code="not-quantized")
        return self.tuned.save(path)


class _Session:
    """What both classes read: the file, the model, and the loaders that replace sections of the file."""

    def __init__(self, conf: Conf | None = None) -> None:
        self.conf, folder = _read(conf)
        self._folder = folder
        self._model: nn.Module | None = None
        self._loaders: dict[str, Iterable[Any]] = {}
        self._metric: tuple[str, Callable[[], Counter]] | None = None
        self._postprocess: Callable[[Any, Any], tuple[Any, Any]] | None = None
        self.eval_func: Callable[[Any], Any] | None = None
        """Gets the model and returns its accuracy."""
        self.q_func: Callable[[Any], Any] | None = None
        """Gets the prepared model and trains it (`quant_aware_training`)."""
        self.tuned: Tuned | None = None

    @property
    def model(self) -> Any:
        """The float model."""
        return self._model

    @model.setter
    def model(self, value: Any) -> None:
        inner = value.model if isinstance(value, QuantizedModel) and value.tuned is None else value
        if not isinstance(inner, nn.Module):
            what, fix = "the model is not an nn.Module", "load it first: LPOT's paths of saved models are not read"
            raise WorkloadError(what, where="model", value=type(value).__name__, fix=fix, code="not-a-module")
        self._model = inner

    @property
    def calib_dataloader(self) -> Any:
        """Batches (inputs, label) or inputs for calibration."""
        return self._loaders.get("calibration")

    @calib_dataloader.setter
    def calib_dataloader(self, loader: Iterable[Any]) -> None:
        self._loaders["calibration"] = _loader(loader, "calib_dataloader")

    q_dataloader = calib_dataloader  # the name in LPOT 1.0

    @property
    def eval_dataloader(self) -> Any:
        """Batches (inputs, label) for the metric of the file."""
        return self._loaders.get("evaluation")

    @eval_dataloader.setter
    def eval_dataloader(self, loader: Iterable[Any]) -> None:
        self._loaders["evaluation"] = _loader(loader, "eval_dataloader")

    @property
    def train_dataloader(self) -> Any:
        """Batches (inputs, label) for `quantization.train`."""
        return self._loaders.get("training")

    @train_dataloader.setter
    def train_dataloader(self, loader: Iterable[Any]) -> None:
        self._loaders["training"] = _loader(loader, "train_dataloader")

    @property
    def metric(self) -> Any:
        """A metric class with `update(outputs, labels)`, `reset()` and `result()`, in `common.Metric(…)`."""
        return None if self._metric is None else self._metric[1]

    @metric.setter
    def metric(self, value: Any) -> None:
        self._metric = _counter(value)

    @property
    def postprocess(self) -> Any:
        """A function of (outputs, labels) that returns both, in `common.Postprocess(…)`."""
        return self._postprocess

    @postprocess.setter
    def postprocess(self, value: Any) -> None:
        made = value.func(**value.options) if isinstance(value, _Wrapped) else value
        self._postprocess = made if _takes_two(made) else lambda outputs, labels: made((outputs, labels))

    def _data(self) -> LpotData:
        metrics = {} if self._metric is None else dict([self._metric])
        given = Given(
            **self._loaders,
            evaluate=None if self.eval_func is None else _evaluate(self.eval_func),
            train=self.q_func,
            metrics=metrics,
            postprocess=self._postprocess,
        )
        data = LpotData(config=self.conf, given=given)
        return data if self._folder is None else data.beside(self._folder)

    def _workload(self, data: LpotData) -> Workload:
        """The model with an example call: the first batch of any loader."""
        if self._model is None:
            raise WorkloadError("the model is missing", where="model", fix="set .model first", code="workload-required")
        sources, problems = data.open(None)
        for role in ("calibration", "training", "evaluation"):
            if role in sources:
                found = next(iter(sources[role].epoch()), None)
                if found is not None:
                    inputs = found[0] if isinstance(found[0], dict | tuple) else (found[0],)
                    return Workload(name=self.conf.model.name.strip(), model=self._model, inputs=inputs)
        if not problems:
            fix = "set calib_dataloader, or give quantization.calibration a dataloader"
            what = "there is no data to calibrate with"
            problems = [Problem(what=what, where="calib_dataloader", fix=fix, code="no-calibration-data")]
        raise PlanError(problems, title="the data has problems")


class Quantization(_Session):
    """Quantize a model until the goal of an LPOT file is met.

    `conf` is the path of a file, its content as a mapping, or None for the defaults. Set `model`, and what the file
    doesn't contain: `calib_dataloader`, `eval_dataloader` (the metric comes from the file), `eval_func`, `q_func`. Then
    call the object. `tuned` is the search with its history.

    >>> import torch
    >>> x = torch.randn(64, 8)
    >>> quantizer = Quantization({"model": {"name": "tiny", "framework": "pytorch"}})
    >>> quantizer.model = torch.nn.Sequential(torch.nn.Linear(8, 4))
    >>> quantizer.calib_dataloader = [(x, torch.zeros(64))]
    >>> q_model = quantizer()
    >>> q_model(x).shape, q_model.quantized
    (torch.Size([64, 4]), <Quantized Sequential for onnxruntime: 3 quantized sites>)
    """

    def __call__(self, *, backend: str = DEFAULT_BACKEND, output: str | Path | None = None) -> QuantizedModel:
        """Search, and return the best model. LPOT returns None if the goal is missed; this returns the best model."""
        data = self._data()
        settings = {**tune_settings(self.conf), "data": data}
        config = validated(TuneConfig, settings, title="the settings of the search have problems")
        workload = self._workload(data)
        self.tuned = config.tune(workload, backend=backend, output=output)
        for failure in self.tuned.failures():
            log.warning("%s: %s; the best model is returned", workload.name, failure)
        return QuantizedModel(workload.model, self.tuned)

    fit = __call__


class Benchmark(_Session):
    """Measure a model as `evaluation.accuracy` and `evaluation.performance` of an LPOT file say.

    Set `model`: a float model, which is measured with its quantized version, or the result of `Quantization`.
    `b_dataloader` replaces the data of the file. Calling the object returns, for each measured mode, LPOT's triple
    (accuracy, batch size, seconds per run). `comparison` has all measurements.
    """

    comparison: Comparison | None = None
    notes: tuple[str, ...] = ()
    """What this machine could not do as the file says."""
    results: dict[str, tuple[Any, int, list[float]]]

    def __init__(self, conf: Conf | None = None) -> None:
        super().__init__(conf)
        self.results = {}
        self._saved: QuantizedModel | None = None

    @property
    def model(self) -> Any:
        """The model to measure."""
        return self._saved or self._model

    @model.setter
    def model(self, value: Any) -> None:
        self._saved = value if isinstance(value, QuantizedModel) and value.tuned is not None else None
        if self._saved is None:
            _Session.model.fset(self, value)  # type: ignore[attr-defined]

    @property
    def b_dataloader(self) -> Any:
        """Batches (inputs, label)."""
        return self._loaders.get("evaluation")

    @b_dataloader.setter
    def b_dataloader(self, loader: Iterable[Any]) -> None:
        self._loaders["evaluation"] = _loader(loader, "b_dataloader")

    def __call__(self, mode: str | None = None) -> dict[str, tuple[Any, int, list[float]]]:
        """Measure accuracy and performance, or one of them; by default what the file has a section for."""
        evaluation = self.conf.evaluation
        sections = {"accuracy": bool(evaluation.accuracy.metrics), "performance": evaluation.performance is not None}
        modes = [mode] if mode else [name for name, given in sections.items() if given] or ["performance"]
        if unknown := [name for name in modes if name not in sections]:
            fix = "use accuracy or performance"
            raise BitwrightError("unknown mode", where="mode", value=unknown[0], fix=fix, code="invalid-value")
        self.results = {name: self._accuracy() if name == "accuracy" else self._performance() for name in modes}
        return self.results

    fit = __call__

    def _accuracy(self) -> tuple[float, int, list[float]]:
        """On the runtime of the artefact."""
        data = self._data()
        workload = data.complete(self._workload(data))
        loader = self.conf.loaders.get("evaluation")
        batch = (loader.batch_size if loader is not None else None) or _batch_of(self.b_dataloader) or 1
        self.comparison = self._measured(workload, batch, evaluate=True, time=False)
        metrics = {one.where: one.value for one in reversed(self.comparison.runtimes[0].accuracies)}
        return metrics["float" if self._saved is None else "quantized"], batch, []

    def _performance(self) -> tuple[None, int, list[float]]:
        """Instances × cores, in processes of their own if the file has them."""
        section = self.conf.evaluation.performance
        loader = self.conf.loaders.get("performance")
        if "evaluation" in self._loaders or loader is None or not loader.dataset:
            data = self._data()
            workload = self._workload(data)
            sources, _ = data.open(None)
            inputs = list(_first(x for x, _ in (sources.get("evaluation") or sources["calibration"]).epoch()))
        else:
            here = loader if self._folder is None else loader.beside(self._folder)
            opened: Batches = here.open(self.conf.tuning.random_seed)
            inputs = list(_first(opened.inputs()))
            first = inputs[0] if isinstance(inputs[0], dict | tuple) else (inputs[0],)
            workload = Workload(name=self.conf.model.name.strip(), model=self._float_model(), inputs=first)
        batch = (loader.batch_size if loader is not None else None) or batch_size(inputs[0])
        workload = replace(workload, calibration=lambda: inputs)
        configs = None if section is None else section.configs
        options: dict[str, Any] = {}
        if configs is not None and (configs.cores_per_instance is not None or configs.num_of_instance > 1):
            options = self._places(configs.num_of_instance, configs.cores_per_instance)
        elif configs is not None and configs.intra_num_of_threads is not None:
            options = {"threads": configs.intra_num_of_threads}
        if section is not None:
            options |= {"warmup": section.warmup, **({"runs": section.iteration} if section.iteration > 0 else {})}
        self.comparison = self._measured(workload, batch, evaluate=False, time=True, **options)
        variant = "float" if self._saved is None else "quantized"
        rows: list[Together | LatencyRow] = [*self.comparison.together, *self.comparison.runtimes[0].timings]
        row = next(row for row in rows if row.variant == variant)
        if isinstance(row, Together):
            return None, batch, [one.median_ms / 1e3 for one in row.instances]
        return None, batch, [row.median_ms / 1e3]

    def _places(self, instances: int, cores: int | None) -> dict[str, int]:
        """As many of the instances as this machine has cores for."""
        free = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        each = cores or max(1, free // instances)
        if instances * each > free:
            possible = {"cores": min(each, free), "instances": max(1, free // each)}
            note = (
                f"the file asks for {instances} instances × {each} cores, this process may use {free}: measured "
                f"{possible['instances']} × {possible['cores']} instead"
            )
            log.warning("%s", note)
            self.notes = (*self.notes, note)
            return possible
        return {"cores": each, "instances": instances}

    def _float_model(self) -> nn.Module:
        if self._saved is not None:
            found: nn.Module = strip(copy.deepcopy(self._saved.model))
            return found
        if self._model is None:
            raise WorkloadError("the model is missing", where="model", fix="set .model first", code="workload-required")
        return self._model

    def _workload(self, data: LpotData) -> Workload:
        self._model = self._float_model()
        return super()._workload(data)

    def _measured(self, workload: Workload, batch: int, **options: Any) -> Comparison:
        saved = self._saved
        if saved is None or saved.quantized is None:
            return benchmark(workload, [DEFAULT_RUNTIME], batch_sizes=[batch], **options)
        with scratch_folder() as folder:
            made = saved.quantized.save(folder / "model")
            return benchmark(workload, batch_sizes=[batch], saved=made, **options)


class _Wrapped:
    """A user's class with its options, as in LPOT's `common`."""

    def __init__(self, func: Any, name: str | None = None, **options: Any) -> None:
        self.func, self.options = func, options
        self.name: str = name or getattr(func, "__name__", None) or "metric"


class _UserMetric:
    """A metric class of LPOT's users as a counter."""

    def __init__(self, metric: Any) -> None:
        self.metric = metric
        self.metric.reset()

    def add(self, output: Any, target: Any) -> None:
        self.metric.update(output, target)

    def value(self) -> float:
        return float(self.metric.result())


def _batches(dataset: Any, batch_size: int = 1, **options: Any) -> DataLoader[Any]:
    """LPOT's loader: PyTorch's, with LPOT's names of options."""
    last = options.pop("last_batch", "rollover")
    for name in ("distributed",):
        options.pop(name, None)
    return DataLoader(dataset, batch_size=batch_size, drop_last=last == "discard", **options)


common = SimpleNamespace(Model=QuantizedModel, DataLoader=_batches, Metric=_Wrapped, Postprocess=_Wrapped)
"""LPOT's `common`: Model, DataLoader, Metric and Postprocess."""


def _read(conf: Conf | None) -> tuple[LpotConfig, Path | None]:
    """The settings, and the folder that paths are relative to."""
    if isinstance(conf, LpotConfig):
        return conf, None
    folder = None
    if isinstance(conf, str | Path):
        where, folder = str(conf), Path(conf).parent
        data: Any = read_settings(Path(conf), "an LPOT file", "model: …")
    else:
        where, data = "the configuration", {} if conf is None else dict(conf)
    found = read_lpot(data, where=where)
    log_warnings(found.notes)
    return found.config, folder


def _loader(loader: Any, name: str) -> Any:
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        fix = "pass a DataLoader, a list of batches, or an object with __iter__"
        raise WorkloadError(
            "can't iterate over it", where=name, value=type(loader).__name__, fix=fix, code="not-a-loader"
        )
    return loader


def _batch_of(loader: Any) -> int | None:
    if loader is None:
        return None
    found = getattr(loader, "batch_size", None)
    return found if isinstance(found, int) else batch_size(as_pair(next(iter(loader)))[0])


def _first(batches: Iterable[Any], most: int = 16) -> Iterable[Any]:
    """A few batches, which are enough for the time of a run."""
    return islice(batches, most)


def _counter(value: Any) -> tuple[str, Callable[[], Counter]]:
    wrapped = value if isinstance(value, _Wrapped) else _Wrapped(value)
    if isinstance(wrapped.func, type):
        return wrapped.name.lower(), lambda: _UserMetric(wrapped.func(**wrapped.options))
    return type(wrapped.func).__name__.lower(), lambda: _UserMetric(wrapped.func)


def _takes_two(function: Any) -> bool:
    """Whether it takes outputs and labels; LPOT's functions take both as a pair."""
    try:
        signature = inspect.signature(function)
        signature.bind(None, None)
    except (TypeError, ValueError):
        return False
    return True


class _Predictor(nn.Module):
    """A runtime as a module, because eval_func may call `model.eval()`."""

    def __init__(self, predict: Callable[..., Any]) -> None:
        super().__init__()
        self.predict = predict

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.predict(*args, **kwargs)


def _evaluate(eval_func: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """eval_func, which gets a module in any case and returns a number or numbers by name."""
    return lambda predict: eval_func(predict if isinstance(predict, nn.Module) else _Predictor(predict))
