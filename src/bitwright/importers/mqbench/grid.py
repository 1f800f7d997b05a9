"""Import `config.yaml` files of MQBench as grids with one row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bitwright.core.errors import PlanError, Problem, did_you_mean
from bitwright.core.registry import WORKLOADS, Importer

#: The workload if the file names no network, as in the example of MQBench's documentation.
DEFAULT_WORKLOAD = "digits"
_QPARAMS = ("w_method", "a_method", "bit", "w_observer", "a_observer")
_KEYS = (
    *("qparams", "backend", "bnfold", "seed", "model", "optimizer", "lr_scheduler", "label_smooth", "ema", "data"),
    *("saver", "dist"),
)
# MQBench's observer classes, and our observers with the same arithmetic
_OBSERVERS = {
    "MinMaxObserver": "minmax",
    "EMAMinMaxObserver": "ema-minmax",
    "EMAQuantileObserver": "ema-quantile",
    "ClipStdObserver": "clip-std",
    "LSQObserver": "lsq",
    "LSQPlusObserver": "lsqplus",
    "MSEObserver": "mse",
    "EMAMSEObserver": "ema-mse",
}


def is_mqbench(data: Mapping[str, Any]) -> bool:
    """Whether the data is that of an MQBench file."""
    return "qparams" in data


def translate(data: Mapping[str, Any], *, where: str, workload: str | None = None) -> dict[str, Any]:
    """The data of the equivalent `GridConfig`. Unused keys are listed in `notes`; unknown keys are errors."""
    problems: list[Problem] = []
    for key in data:
        if key not in _KEYS:
            problems.append(
                Problem(what="unknown key", where=str(key), fix=did_you_mean(str(key), _KEYS), code="unknown-key")
            )
    qparams = _mapping(data, "qparams", problems)
    for key in qparams:
        if key not in _QPARAMS:
            fix = did_you_mean(str(key), _QPARAMS)
            problems.append(Problem(what="unknown key", where=f"qparams.{key}", fix=fix, code="unknown-key"))
    for key in ("w_method", "a_method", "bit"):
        if key not in qparams:
            problems.append(
                Problem(
                    what="is missing",
                    where=f"qparams.{key}",
                    fix="qparams: {w_method, a_method, bit}",
                    code="missing-key",
                )
            )
    if "backend" not in data:
        problems.append(Problem(what="is missing", where="backend", fix="backend: academic", code="missing-key"))
    notes: list[str] = []
    algorithm: dict[str, Any] = {key: qparams[key] for key in ("w_method", "a_method") if key in qparams}
    for theirs, ours in (("a_observer", "observer"), ("w_observer", "weight_observer")):
        if theirs in qparams:
            name = str(qparams[theirs])
            algorithm[ours] = _OBSERVERS.get(name, name)
    model = _model(data, workload, notes, problems)
    training = _training(data, notes, problems)
    if problems:
        raise PlanError(problems, title=f"{where} (an MQBench configuration) has problems")
    made: dict[str, Any] = {
        "name": "mqbench",
        "models": [model],
        "algorithms": [algorithm],
        "backends": [data["backend"]],
        "bits": [qparams["bit"]],
        "seeds": [data.get("seed", 1000)],
        "training": training,
        "beyond": "simulate",  # MQBench also simulates widths that the hardware can't run
        "notes": notes,
    }
    if "bnfold" in data:
        made["bnfold"] = data["bnfold"]
    return made


def _model(data: Mapping[str, Any], workload: str | None, notes: list[str], problems: list[Problem]) -> str:
    section = _mapping(data, "model", problems)
    named = str(section["type"]) if "type" in section else None
    unused = [f"model.{key}" for key in section if key != "type" and section[key]]
    if unused:
        notes.append(f"{', '.join(unused)}: not used, because a workload builds its own model")
    if workload is not None:
        if named is not None:
            notes.append(f"model.type {named} is replaced by {workload}")
        return workload
    if named is None:
        notes.append(f"the file names no model, so the workload {DEFAULT_WORKLOAD} is used (change it with --workload)")
        return DEFAULT_WORKLOAD
    if named not in WORKLOADS and ":" not in named:
        fix = f"choose a workload with --workload; {did_you_mean(named, WORKLOADS.names())}"
        problems.append(Problem(what="unknown workload", where="model.type", value=named, fix=fix, code="unknown-name"))
    return named


def _training(data: Mapping[str, Any], notes: list[str], problems: list[Problem]) -> dict[str, Any]:
    """The training settings; missing ones have the defaults of MQBench."""
    made: dict[str, Any] = {"lr": 0.004, "label_smoothing": 0.1, "weight_decay": 1e-4, "momentum": 0.9}
    optimizer = _mapping(data, "optimizer", problems)
    kind = str(optimizer.get("type", "SGD"))
    if kind.lower() not in ("sgd", "adamw"):
        problems.append(
            Problem(
                what="unknown optimizer", where="optimizer.type", value=kind, fix="SGD or AdamW", code="unknown-name"
            )
        )
    made["optimizer"] = kind.lower()
    options = _mapping(optimizer, "kwargs", problems, "optimizer.")
    made |= {key: options[key] for key in ("lr", "momentum", "weight_decay") if key in options}
    if "nesterov" in options and bool(options["nesterov"]) != (kind.lower() == "sgd"):
        what = "SGD always has Nesterov's momentum here" if kind.lower() == "sgd" else "of SGD only"
        notes.append(f"optimizer.kwargs.nesterov {options['nesterov']} is not used: {what}")
    if "label_smooth" in data:
        made["label_smoothing"] = data["label_smooth"]
    ema = _mapping(data, "ema", problems)
    averaging = _mapping(ema, "kwargs", problems, "ema.")
    if ema.get("enable"):
        made["ema"] = averaging.get("decay", 0.999)
    section = _mapping(data, "data", problems)
    if "batch_size" in section:
        made["batch"] = section["batch_size"]
    made |= _schedule(_mapping(data, "lr_scheduler", problems), section, notes, problems)
    unused = [f"data.{key}" for key in section if key not in ("batch_size", "max_epoch")]
    unused += [key for key in ("saver", "dist") if key in data]
    if unused:
        notes.append(
            f"{', '.join(unused)}: not used, because the workload has its own data and results are kept in the store"
        )
    others = {
        "optimizer": set(optimizer) - {"type", "kwargs"},
        "optimizer.kwargs": set(options) - {"lr", "momentum", "weight_decay", "nesterov"},
        "ema": set(ema) - {"enable", "kwargs"},
        "ema.kwargs": set(averaging) - {"decay"},
    }
    left = [f"{place}.{key}" for place, keys in others.items() for key in sorted(map(str, keys))]
    if left:
        notes.append(f"{', '.join(left)}: not used, because Bitwright has no such setting")
    return made


def _schedule(
    section: Mapping[str, Any], data: Mapping[str, Any], notes: list[str], problems: list[Problem]
) -> dict[str, Any]:
    """Epochs and learning-rate schedule. Steps can't be converted to epochs here: the size of the data is unknown."""
    made: dict[str, Any] = {}
    kind = str(section.get("type", "Cosine"))
    made["schedule"] = next((ours for ours in ("cosine", "constant") if ours in kind.lower()), "cosine")
    if made["schedule"] not in kind.lower():
        notes.append(f"lr_scheduler.type {kind} is not supported: a cosine schedule over all epochs is used")
    options = _mapping(section, "kwargs", problems, "lr_scheduler.")
    if "base_lr" in options:
        made["lr"] = options["base_lr"]
    lengths = [options[key] for key in ("max_epoch", "max_epochs") if key in options]
    lengths += [data["max_epoch"]] if "max_epoch" in data else []
    if lengths:
        made["epochs"] = lengths[-1]
    elif "max_iter" in options:
        notes.append(
            f"lr_scheduler.kwargs.max_iter {options['max_iter']} isn't used: one epoch is trained, since only the "
            "workload knows how many steps that is (say lr_scheduler.kwargs.max_epoch)"
        )
    known = {"base_lr", "max_epoch", "max_epochs"} | ({"max_iter"} if not lengths else set())
    left = [f"lr_scheduler.{key}" for key in sorted(map(str, set(section) - {"type", "kwargs"}))]
    left += [f"lr_scheduler.kwargs.{key}" for key in sorted(map(str, set(options) - known))]
    if left:
        notes.append(f"{', '.join(left)}: not used, because the schedule covers all epochs without a warm-up")
    return made


def _mapping(data: Mapping[str, Any], key: str, problems: list[Problem], prefix: str = "") -> Mapping[str, Any]:
    value = data.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        problems.append(Problem(what="is not a mapping", where=prefix + key, value=value, code="not-a-mapping"))
        return {}
    return value


MQBENCH = Importer(target="grid", recognizes=is_mqbench, translate=translate)
