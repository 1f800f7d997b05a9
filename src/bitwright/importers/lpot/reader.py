"""The settings of a search (`TuneConfig`) that an LPOT file describes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from bitwright.core.errors import PlanError, Problem, log_warnings
from bitwright.importers.key_table import Imported, InCode, read
from bitwright.importers.lpot.schema import OTHER_FRAMEWORKS, ActivationRule, LpotConfig, OpRule, WeightRule
from bitwright.importers.lpot.workload import LpotData

__all__ = ["is_lpot", "read_lpot", "translate", "tune_settings"]

_NO_ACCURACY = 1e9  # a drop that no candidate exceeds
_OBJECTIVES = {"performance": "latency", "modelsize": "size", "footprint": "memory"}
_APPROACHES = {
    "post_training_static_quant": ("static",),
    "post_training_dynamic_quant": ("dynamic",),
    "post_training_auto_quant": ("static", "dynamic"),
    "quant_aware_training": ("static",),
}
_PLAIN = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\-/]*")  # LPOT reads any other name as a regular expression
_KEYS = ("framework", "quantization", "tuning", "pruning", "distillation", "auto_distillation", "nas")


def is_lpot(data: Mapping[str, Any]) -> bool:
    """Whether the data is that of an LPOT file."""
    return isinstance(data.get("model"), dict) or any(key in data for key in _KEYS)


def read_lpot(data: Mapping[str, Any], *, where: str) -> Imported[LpotConfig]:
    """The settings of an LPOT file of any version 1. All problems are raised together."""
    modern, moved = normalized(data)
    rejected = [key for key in ("pruning", "distillation", "auto_distillation", "nas") if modern.get(key)]
    model = modern.get("model")
    framework = str(model.get("framework", "")).lower() if isinstance(model, Mapping) else ""
    if rejected:  # one sentence: the other keys of such a file don't matter
        modern = {key: modern[key] for key in rejected}
    elif framework.startswith(tuple(OTHER_FRAMEWORKS)):
        modern = {"model": {"framework": framework}}
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
    performance = config.evaluation.performance
    if performance is not None and performance.iteration > 0:
        out["measuring"] = {"runs": performance.iteration}
    return {**out, "data": LpotData(config=config)}


def _not_runnable(config: LpotConfig) -> Iterator[Problem]:
    """The settings that the search has no counterpart for. Nothing is dropped silently."""
    quantization, tuning, accuracy = config.quantization, config.tuning, config.evaluation.accuracy
    train = quantization.train
    if train is not None and any(one.reduce == "none" for one in train.criterion):
        where = "quantization.train.criterion.reduction"
        yield _cannot("one loss per sample can't be minimized", where, "none", "use mean or sum")
    for step in () if train is None or train.postprocess is None else train.postprocess.transform:
        if isinstance(step.about, InCode):
            where = "quantization.train.postprocess.transform"
            yield _cannot(step.about.reason, where, step.name, "set q_func of Quantization(conf) in Python")
    unused = {
        "quantization.recipes.weight_correction": (quantization.recipes.weight_correction, False),
        "quantization.recipes.last_conv_or_matmul_quantization": (
            quantization.recipes.last_conv_or_matmul_quantization,
            True,
        ),
        "tuning.strategy.accuracy_weight": (tuning.strategy.accuracy_weight, 1.0),
        "tuning.strategy.latency_weight": (tuning.strategy.latency_weight, 1.0),
        "tuning.strategy.confidence_batches": (tuning.strategy.confidence_batches, 2),
    }
    for path, (value, usual) in unused.items():
        if value != usual:
            yield _cannot("the search has no such setting", path, value, f"remove it (LPOT's default is {usual})")
    objectives = tuning.multi_objectives.objective if tuning.multi_objectives else (tuning.objective,)
    if "accuracy" in objectives:
        yield _cannot("accuracy is a limit, not an objective", "tuning.objective", "accuracy", "use performance")
    for metric in accuracy.metrics:
        if not getattr(metric, "compare_label", True):
            what, fix = "metrics compare with labels, not with the float model", "pass evaluate= to the workload"
            yield _cannot(what, "evaluation.accuracy.metric", metric.name, fix)
    if len(accuracy.multi_metrics) > len(accuracy.metrics):
        what = "metrics are not added up; the first one decides"
        yield _cannot(what, "evaluation.accuracy.multi_metrics", None, "remove weight and higher_is_better")


def _cannot(what: str, where: str, value: Any, fix: str) -> Problem:
    return Problem(what=what, where=where, value=value, fix=fix, code="cannot-run")


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
    direction = {} if criterion.higher_is_better else {"lower_is_better": True}
    return {"drop": drop, "objective": objective, **direction}


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
    approach = _APPROACHES[quantization.approach]
    space: dict[str, Any] = {
        "weights": _formats(whole.weight, weight=True),
        "activations": _activations(whole.activation, approach, default=True),
        "observer": _observers(whole.activation.algorithm),
        "weight_observer": _observers(whole.weight.algorithm),
        "samples": _samples(config),
        "steps": [["bias-correction"]] if corrects else [[]],
        "types": {kind.lower(): _rule(op, approach) for kind, op in quantization.optype_wise.items()},
        "operators": {pattern(name): _rule(op, approach) for name, op in quantization.op_wise.items()},
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


def _activations(rule: ActivationRule, approach: tuple[str, ...], *, default: bool) -> list[str]:
    """The formats of activations to try; without a `default`, none if the rule doesn't restrict them."""
    static = _formats(rule, weight=False)
    if approach == ("static",):
        return static
    if not (default or static or rule.compute_dtype):
        return []
    kinds = [kind for kind in rule.compute_dtype if kind in ("int8", "uint8")] or ["uint8"]
    # PyTorch's dynamic kernels have one scale per tensor.
    dynamic = [f"{kind}/tensor/{'asym' if kind == 'uint8' else 'sym'}/dynamic" for kind in kinds]
    return [*(static or ["uint8/tensor/asym"]), *dynamic] if "static" in approach else dynamic


def _rule(op: OpRule, approach: tuple[str, ...]) -> dict[str, Any]:
    """The rule in our notation. Activations that are float in memory may get integers at run time."""
    computed = "dynamic" in approach and any(kind in ("int8", "uint8") for kind in op.activation.compute_dtype)
    if op.weight.is_float or (op.activation.is_float and not computed):
        return {"keep": "float"}
    keep = None if not op.activation.dtype or "fp32" in op.activation.dtype else "quantized"
    rule = {
        "keep": keep,
        "weights": _formats(op.weight, weight=True),
        "activations": _activations(op.activation, approach, default=False),
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
        # PyTorch's symmetric uint8 has the zero point 128: the numbers of int8
        f"{'int' if scheme == 'sym' else kind}{bits}/{'channel' if size == 'per_channel' else 'tensor'}/{scheme}"
        for kind in kinds or (["int"] if weight else ["uint"])
        for bits in [int(bit) + 1 for bit in tensor.bit] or [8]
        for size in tensor.granularity or (("per_channel",) if weight else ("per_tensor",))
        for scheme in list(schemes) or (["sym"] if weight else ["asym"])
    ]


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
    elif isinstance(framework, str):
        file.move("framework", "model.framework")
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
