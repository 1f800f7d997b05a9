"""LPOT's settings as a `TuneConfig`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from bitwright.core.errors import PlanError, Problem, log_warnings
from bitwright.importers.key_table import Imported, read
from bitwright.importers.lpot.datasets import Loader
from bitwright.importers.lpot.file import ActivationRule, LpotConfig, OpRule, WeightRule
from bitwright.importers.lpot.layout import normalized
from bitwright.importers.lpot.metrics import Metric

__all__ = ["is_lpot", "read_lpot", "translate", "tune_settings"]

_NO_ACCURACY = 1e9  # a drop that no candidate exceeds
_OBJECTIVES = {"performance": "latency", "modelsize": "size", "footprint": "memory"}
_METRICS = {"topk": "topk", "F1": "f1", "MSE": "mse", "MAE": "mae", "RMSE": "rmse", "Accuracy": "topk"}
_PLAIN = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\-/]*")  # LPOT reads any other name as a regular expression
_KEYS = ("framework", "quantization", "tuning", "pruning", "distillation", "auto_distillation", "nas")


def is_lpot(data: Mapping[str, Any]) -> bool:
    """Whether the data is that of an LPOT file."""
    return isinstance(data.get("model"), dict) or any(key in data for key in _KEYS)


def read_lpot(data: Mapping[str, Any], *, where: str) -> Imported[LpotConfig]:
    """The settings of an LPOT file of any version 1. All problems are raised together."""
    modern, moved = normalized(data)
    rejected = [key for key in ("pruning", "distillation", "auto_distillation", "nas") if key in modern]
    if rejected:  # one sentence: the other keys of such a file don't matter
        modern = {key: modern[key] for key in rejected}
    found = read(LpotConfig, modern, title=f"{where} (an LPOT file) has problems", moved=moved)
    return replace(found, notes=(*found.notes, *_notes(found.config)))


def _notes(config: LpotConfig) -> Iterator[Problem]:
    """What the reader should know about values, not keys."""
    if config.model.framework == "pytorch_ipex":
        what = "pytorch_ipex runs as pytorch on the CPU"
        yield Problem(what=what, where="model.framework", code="no-effect")
    loader = config.quantization.calibration.dataloader
    names = [step.name for step in loader.transform if step.name.startswith("Random")] if loader else []
    if names:
        what = f"{', '.join(names)}: calibration images are random; the seed is tuning.random_seed"
        yield Problem(what=what, where="quantization.calibration.dataloader.transform", code="random-data")


def translate(data: dict[str, Any], *, where: str) -> dict[str, Any]:
    """The data of the equivalent `TuneConfig`. Keys without effect are logged."""
    found = read_lpot(data, where=where)
    log_warnings(found.notes)
    return tune_settings(found.config, where=where)


def tune_settings(config: LpotConfig, *, where: str = "the LPOT file") -> dict[str, Any]:
    """The data of the `TuneConfig`. What `tune` can't run is one error."""
    problems = list(_not_runnable(config))
    if problems:
        raise PlanError(problems, title=f"`tune` can't run {where}")
    tuning = config.tuning
    out: dict[str, Any] = {
        "name": config.model.name.strip(),
        "strategy": tuning.strategy.name,
        "seed": tuning.random_seed,
        "goal": _goal(config),
        "budget": _budget(config),
        "space": _space(config),
    }
    workspace = tuning.workspace
    if workspace.path is not None:
        out["store"] = f"{workspace.path.rstrip('/')}/study.db"
    if workspace.resume is not None:
        out |= {"store": workspace.resume, "resume": True}
    accuracy, performance = config.evaluation.accuracy, config.evaluation.performance
    loaders = {"calibration": config.quantization.calibration.dataloader, "evaluation": accuracy.dataloader}
    for name, loader in loaders.items():
        if loader is not None and loader.dataset:
            out[name] = _dataset(loader)
    if accuracy.metrics:
        out["metric"] = dict(map(_metric, accuracy.metrics))
    if performance is not None and performance.iteration > 0:
        out["measuring"] = {"runs": performance.iteration}
    return out


def _not_runnable(config: LpotConfig) -> Iterator[Problem]:
    """The settings that the search has no counterpart for."""
    quantization = config.quantization
    if quantization.approach != "post_training_static_quant":
        training = quantization.approach == "quant_aware_training"
        fix = "`bitwright train` trains quantized models" if training else "use post_training_static_quant"
        yield Problem(
            what="the search only runs post_training_static_quant",
            where="quantization.approach",
            value=quantization.approach,
            fix=fix,
            code="cannot-run",
        )
    if quantization.recipes.weight_correction:
        yield Problem(
            what="there is no PTQ step for it",
            where="quantization.recipes.weight_correction",
            fix="use fast_bias_correction",
            code="cannot-run",
        )
    for path, loader in (
        ("quantization.calibration", quantization.calibration.dataloader),
        ("evaluation.accuracy", config.evaluation.accuracy.dataloader),
    ):
        if loader is not None:
            yield from _unreadable(loader, f"{path}.dataloader")
    for metric in config.evaluation.accuracy.metrics:
        if metric.name not in _METRICS:
            yield Problem(
                what="the metric is not built in",
                where="evaluation.accuracy.metric",
                value=metric.name,
                fix="pass evaluate= to the workload",
                code="cannot-run",
            )


def _unreadable(loader: Loader, path: str) -> Iterator[Problem]:
    for dataset in loader.dataset:
        if dataset.name not in ("ImageFolder", "npz", "dummy"):
            fix = "pass the data in code, or use ImageFolder, npz or dummy"
            yield Problem(
                what="no reader for this data set",
                where=f"{path}.dataset",
                value=dataset.name,
                fix=fix,
                code="cannot-run",
            )
    names = [step.name for step in loader.transform if step.name not in ("ToTensor", "ToPILImage")]
    order = [name for name in ("Resize", "CenterCrop", "Normalize") if name in names]
    if names != order:
        yield Problem(
            what="these transforms can't run in this order",
            where=f"{path}.transform",
            value=names,
            fix="pass the data in code, or use Resize, CenterCrop, ToTensor and Normalize in this order",
            code="cannot-run",
        )


def _dataset(loader: Loader) -> dict[str, Any]:
    """The data set in our notation."""
    (dataset,) = loader.dataset
    options = dataset.model_dump()
    data: dict[str, Any] = {"batch_size": loader.batch_size or 1}
    if dataset.name == "dummy":
        data["random"] = options["shape"][0]
    else:
        data["images" if dataset.name == "ImageFolder" else "npz"] = options["root"]
    for step in loader.transform:
        own = step.model_dump()
        if step.name == "Resize":
            data["resize"] = own["size"][0]
        elif step.name == "CenterCrop":
            data["crop"] = own["size"][0]
        elif step.name == "Normalize":
            data |= {"mean": own["mean"], "std": own["std"]}
    return data


def _metric(metric: Metric) -> tuple[str, dict[str, Any]]:
    options = {"k": metric.model_dump().get("k", 1)} if _METRICS[metric.name] == "topk" else {}
    return _METRICS[metric.name], options


def _goal(config: LpotConfig) -> dict[str, Any]:
    tuning = config.tuning
    criterion = tuning.accuracy_criterion
    if tuning.exit_policy.performance_only:
        drop: dict[str, Any] = {"relative": _NO_ACCURACY}
    elif criterion.absolute is not None:
        drop = {"absolute": criterion.absolute}
    else:
        drop = {"relative": 0.01 if criterion.relative is None else criterion.relative}
    objective: Any = _OBJECTIVES.get(tuning.objective, "latency")
    several = tuning.multi_objectives
    if several is not None:
        weights = several.weight or (1.0,) * len(several.objective)
        objective = {
            _OBJECTIVES[name]: weight
            for name, weight in zip(several.objective, weights, strict=True)
            if name in _OBJECTIVES
        }
    return {"drop": drop, "lower_is_better": not criterion.higher_is_better, "objective": objective}


def _budget(config: LpotConfig) -> dict[str, Any]:
    policy = config.tuning.exit_policy
    if policy.timeout == 0:
        return {"trials": policy.max_trials, "stop": "first"}
    return {"trials": policy.max_trials, "minutes": policy.timeout / 60, "stop": "budget"}


def _samples(config: LpotConfig) -> list[int]:
    calibration = config.quantization.calibration
    batch = (calibration.dataloader.batch_size if calibration.dataloader else None) or 1
    return [batch * count for count in calibration.iterations] or list(calibration.sampling_size)


def _space(config: LpotConfig) -> dict[str, Any]:
    quantization = config.quantization
    whole, recipes = quantization.model_wise, quantization.recipes
    corrects = recipes.fast_bias_correction or quantization.advance.bias_correction is not None
    space: dict[str, Any] = {
        "weights": _formats(whole.weight, weight=True),
        "activations": _formats(whole.activation, weight=False),
        "observer": _observers(whole.activation.algorithm),
        "weight_observer": _observers(whole.weight.algorithm),
        "samples": _samples(config),
        "steps": [["bias-correction"]] if corrects else [[]],
        "types": {kind.lower(): _rule(op) for kind, op in quantization.optype_wise.items()},
        "operators": {pattern(name): _rule(op) for name, op in quantization.op_wise.items()},
    }
    if not recipes.first_conv_or_matmul_quantization:
        space["first"] = "float"
    return {key: value for key, value in space.items() if value}


def pattern(name: str) -> str:
    r"""A pattern of ours for a name in `op_wise`.

    LPOT compares plain names exactly and matches others as regular expressions at the start of the name. Names begin
    with `module.` where the model is wrapped.

    >>> pattern("layer1.0.conv1"), pattern("layer1.*"), pattern("default_qconfig")
    ('layer1.0.conv1', 're:layer1.*', '*#*')
    >>> print(pattern("module.dense[1-3].cat"))
    re:(?:module\.)?(?:dense[1-3].cat).*
    """
    if name == "default_qconfig":
        return "*#*"  # operators that are functions, not modules
    rest = name.removeprefix("module.").removeprefix(r"module\.")
    optional = r"(?:module\.)?" if rest != name else ""
    if _PLAIN.fullmatch(name):
        return f"re:{optional}{re.escape(rest)}" if optional else name
    return f"re:{optional}{rest}" if rest.endswith(".*") and "|" not in rest else f"re:{optional}(?:{rest}).*"


def _rule(op: OpRule) -> dict[str, Any]:
    """The rule in our notation."""
    if op.is_float:
        return {"keep": "float"}
    keep = None if not op.activation.dtype or "fp32" in op.activation.dtype else "quantized"
    rule = {
        "keep": keep,
        "weights": _formats(op.weight, weight=True),
        "activations": _formats(op.activation, weight=False),
        "observer": _observers(op.activation.algorithm),
    }
    return {key: value for key, value in rule.items() if value}


def _observers(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if name != "placeholder"]


def _formats(tensor: WeightRule | ActivationRule, *, weight: bool) -> list[str]:
    """The formats in our notation; empty means those of the backend."""
    kinds = [kind.rstrip("8") for kind in tensor.dtype if kind in ("int8", "uint8")]
    if not (kinds or tensor.granularity or tensor.scheme or tensor.bit):
        return []
    schemes = dict.fromkeys(scheme.removesuffix("_float") for scheme in tensor.scheme)
    return [
        f"{kind}{bits}/{'channel' if size == 'per_channel' else 'tensor'}/{scheme}"
        for kind in kinds or (["int"] if weight else ["uint"])
        for bits in [int(bit) + 1 for bit in tensor.bit] or [8]
        for size in tensor.granularity or (("per_channel",) if weight else ("per_tensor",))
        for scheme in list(schemes) or (["sym"] if weight else ["asym"])
    ]
