"""The workloads of toolkit files: a network with a folder of images, or a local Hugging Face model with texts."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import fuse_conv_bn_eval

from bitwright.core.errors import BitwrightError, PlanError, Problem, WorkloadError, did_you_mean, shortened
from bitwright.core.registry import NETWORKS
from bitwright.deployment.checkpoint import read_pickled, read_state
from bitwright.graph import Graph, capture
from bitwright.importers.mqbench.questions import Encoder, evaluate_answers, random_features, read_questions
from bitwright.importers.mqbench.toolkit import HuggingFaceConfig, ToolkitConfig
from bitwright.workload import Workload
from bitwright.workload.data import call, split
from bitwright.workload.datasets import Dataset
from bitwright.workload.metrics import METRICS

__all__ = ["TASKS", "image_workload", "load_weights", "text_workload"]

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_KNOWN = ("seed", "per_device_eval_batch_size", "output_dir")  # of the section `train`
_SUFFIXES = (".tsv", ".csv", ".jsonl", ".json")
_FIRST = ("sentence1", "sentence", "question1", "question", "premise", "#1 String", "text")
_SECOND = ("sentence2", "question2", "sentence", "hypothesis", "#2 String")
_LABEL = ("label", "labels", "gold_label", "is_duplicate", "Quality", "score")
_ANSWERS = "ForQuestionAnswering"  # the end of the names of such models
_COLA = ["source", "label", "mark", "sentence"]  # its files have no header


def image_workload(
    config: ToolkitConfig, *, data: Path | None = None, checkpoint: Path | None = None
) -> tuple[Workload, list[str]]:
    """The network and the images that a file names, and what differs from the file.

    As in MQBench, batch norms are merged into the convolutions before them, calibration uses random parts of random
    training images, and evaluation the center of validation images. `data` and `checkpoint` replace the paths in the
    file. Without a checkpoint the network is untrained.
    """
    notes: list[str] = []
    problems: list[Problem] = []
    folder = data or Path(config.data.path).expanduser()
    if config.model.type not in NETWORKS:
        fix = did_you_mean(config.model.type, NETWORKS.names())
        problems.append(
            Problem(what="unknown network", where="model.type", value=config.model.type, fix=fix, code="unknown-name")
        )
    if not folder.is_dir():
        fix = "give a folder with train/ and val/, or one folder of images (--data FOLDER)"
        where = "data.path" if data is None else "--data"
        problems.append(
            Problem(what="there is no such folder", where=where, value=str(folder), fix=fix, code="no-data")
        )
    if checkpoint is not None and not checkpoint.is_file():
        problems.append(
            Problem(
                what="the checkpoint doesn't exist",
                where="--checkpoint",
                value=str(checkpoint),
                fix="give a .safetensors or .pth file",
                code="no-such-checkpoint",
            )
        )
    if problems:
        raise PlanError(problems, title="the file can't run")
    calibration, evaluation = _datasets(config, folder, notes)
    classes = 1 + max(label for _, label in (*calibration.files(), *evaluation.files()))
    if classes > config.model.kwargs.num_classes:
        raise WorkloadError(
            f"the images have {classes} classes",
            where="model.kwargs.num_classes",
            value=config.model.kwargs.num_classes,
            fix="raise num_classes, or use other images",
            code="invalid-data",
        )
    model = _network(config, checkpoint, notes)
    size = config.data.input_size
    example = torch.zeros(1, 3, size, size)

    def calibrate() -> Iterator[Tensor]:
        batches = 1 if config.quantize is None else config.quantize.cali_batchsize
        return islice(calibration.inputs(), batches)

    workload = Workload(
        name=config.model.type,
        model=_merge_norms(model, example),
        inputs=(next(calibrate()),),
        calibration=calibrate,
        evaluation=evaluation.labelled,
    )
    return workload, notes


def _datasets(config: ToolkitConfig, folder: Path, notes: list[str]) -> tuple[Dataset, Dataset]:
    """The images for calibration and for evaluation."""
    validation = next((one for one in (folder / "val", folder / "images") if one.is_dir()), folder)
    training = folder / "train"
    if not training.is_dir():
        training = validation
        notes.append(f"{folder} has no folder train, so calibration and evaluation use the same images")
    center = Dataset(
        images=validation,
        resize=config.data.test_resize,
        crop=config.data.input_size,
        batch_size=config.data.batch_size,
        interpolation="bilinear",
        mean=_MEAN,
        std=_STD,
        seed=config.process.seed,
    )
    changes = {"images": training, "resize": None, "crop": None, "flip": True, "shuffle": True}
    return center.model_copy(update={**changes, "random_crop": config.data.input_size}), center


def _network(config: ToolkitConfig, checkpoint: Path | None, notes: list[str]) -> nn.Module:
    path = checkpoint or (None if config.model.path is None else Path(config.model.path).expanduser())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.process.seed)
        model: nn.Module = NETWORKS.get(config.model.type)(
            classes=config.model.kwargs.num_classes, image_size=config.data.input_size
        )
    if path is not None and path.is_file():
        load_weights(model, path)
    else:
        missing = "model.path is missing" if path is None else f"{path} doesn't exist"
        notes.append(f"the network is untrained, because {missing} (give a file with --checkpoint)")
    return model.eval()


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a float checkpoint: a safetensors file, or a PyTorch file with tensors only.

    The weights may be inside `state_dict`, `model` or `net`. Their names may begin with `module.`, as DDP writes them.
    """
    state = read_state(path) if path.suffix == ".safetensors" else read_pickled(path)
    try:
        model.load_state_dict(state)
    except (RuntimeError, AttributeError, TypeError) as error:
        raise BitwrightError(
            f"the checkpoint doesn't fit {type(model).__name__}: {shortened(' '.join(str(error).split()))}",
            where=str(path),
            fix="give a checkpoint with torchvision's parameter names",
            code="checkpoint-mismatch",
        ) from error


def _merge_norms(model: nn.Module, example: Tensor) -> nn.Module:
    """Merge batch norms into the convolutions before them; an identity remains in their places."""
    graph: Graph = capture(model, example)
    for op in graph.ops:
        if op.kind != "batch_norm" or op.port("input") is None:
            continue
        (source, *others) = op.ports[0].sources
        before = graph.by_name.get(source.name) if source.kind == "op" else None
        if others or before is None or len(graph.consumers.get(source, ())) != 1:
            continue
        try:
            conv, norm = model.get_submodule(before.module), model.get_submodule(op.module)
        except AttributeError:
            continue
        if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
            _replace(model, before.module, fuse_conv_bn_eval(conv, norm))
            _replace(model, op.module, nn.Identity())
    return model


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module.eval())


@dataclass(frozen=True, kw_only=True)
class Task:
    """The columns of a task of GLUE, and its metric."""

    first: str
    second: str | None = None
    metric: str = "top1"
    part: str = ""
    """A suffix of the file with the development part."""


TASKS = {
    "cola": Task(first="sentence", metric="matthews"),
    "mnli": Task(first="premise", second="hypothesis", part="_matched"),
    "mrpc": Task(first="sentence1", second="sentence2"),
    "qnli": Task(first="question", second="sentence"),
    "qqp": Task(first="question1", second="question2"),
    "rte": Task(first="sentence1", second="sentence2"),
    "sst2": Task(first="sentence"),
    "stsb": Task(first="sentence1", second="sentence2", metric="pearson"),
    "wnli": Task(first="sentence1", second="sentence2"),
}
"""The tasks of GLUE by the names of Hugging Face."""
_ALIASES = {  # in GLUE's own files
    "premise": ("sentence1",),
    "hypothesis": ("sentence2",),
    "sentence1": ("#1 String",),
    "sentence2": ("#2 String",),
}


@dataclass(frozen=True, kw_only=True)
class _Samples:
    texts: list[tuple[str, ...]]
    labels: list[str | float]


def text_workload(
    config: HuggingFaceConfig, *, data: Path | None = None, checkpoint: Path | None = None
) -> tuple[Workload, list[str]]:
    """The model and the texts that a file names, and what differs from the file.

    The model is a local folder of `save_pretrained`. Texts are in `train_file` and `validation_file`, or in a folder
    (`data` or `dataset_name`) with train and dev (or validation) as TSV, CSV or JSON lines. Calibration uses
    `quant.calibrate` random samples of the training part. Models that answer questions read SQuAD's files.
    """
    notes: list[str] = []
    unused = [f"train.{key}" for key in config.train if key not in _KNOWN]
    if unused:
        notes.append(f"{', '.join(unused)}: no effect, because MQBench's text example only calibrates and evaluates")
    task = _task(config)
    model, tokenizer = _pretrained(config, checkpoint)
    if type(model).__name__.endswith(_ANSWERS):
        return _question_workload(config, model, Encoder(tokenizer, config.data), data, notes)
    train, validation = _files(config, data, task)
    evaluated = _read(validation, task)
    if train is None:
        notes.append("there is no training part, so calibration and evaluation use the same texts")
    calibrated = evaluated if train is None else _read(train, task)
    own = config.data
    numbers = _numbering([*calibrated.labels, *evaluated.labels], model.config, validation)
    calibrated = _limited(calibrated, own.max_train_samples)
    evaluated = _limited(evaluated, own.max_eval_samples)
    count = min(256 if config.quant is None else config.quant.calibrate, len(calibrated.texts))
    chosen = np.random.default_rng(config.seed).permutation(len(calibrated.texts))[:count]
    length = min(own.max_seq_length, int(min(tokenizer.model_max_length, 10**6)))

    def encode(texts: Sequence[tuple[str, ...]]) -> dict[str, Tensor]:
        columns = [list(column) for column in zip(*texts, strict=True)]
        padding = "max_length" if own.pad_to_max_length else "longest"
        return dict(tokenizer(*columns, padding=padding, truncation=True, max_length=length, return_tensors="pt"))

    def calibration() -> Iterator[dict[str, Tensor]]:
        for start in range(0, len(chosen), config.batch_size):
            yield encode([calibrated.texts[index] for index in chosen[start : start + config.batch_size]])

    def evaluation() -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for start in range(0, len(evaluated.texts), config.batch_size):
            part = slice(start, start + config.batch_size)
            yield encode(evaluated.texts[part]), torch.tensor([numbers(label) for label in evaluated.labels[part]])

    regression = model.config.num_labels == 1
    metric = "pearson" if regression else task.metric if task is not None else "top1"
    workload = Workload(
        name=own.task_name or type(model).__name__,
        model=model.eval(),
        inputs=next(calibration()),
        calibration=calibration,
        evaluation=None if regression else evaluation,
        evaluate=_evaluate(metric, evaluation),
        metric=metric,
    )
    return workload, notes


def _question_workload(
    config: HuggingFaceConfig, model: nn.Module, encoder: Encoder, data: Path | None, notes: list[str]
) -> tuple[Workload, list[str]]:
    """A model that answers questions about texts."""
    train, validation = _files(config, data, None, questions=True)
    own = config.data
    if train is None:
        notes.append("there is no training part, so calibration and evaluation use the same questions")
    evaluated = read_questions(validation)
    calibrated = evaluated if train is None else read_questions(train)
    unanswered = sum(not question.answers for question in evaluated)
    if unanswered and not own.version_2_with_negative:
        notes.append(f"{unanswered} questions without an answer are left out (version_2_with_negative is false)")
        evaluated = [question for question in evaluated if question.answers]
    calibrated, evaluated = calibrated[: own.max_train_samples], evaluated[: own.max_eval_samples]
    if not evaluated:
        fix = "set data.version_2_with_negative: true, or use other questions"
        raise WorkloadError("no question has an answer", where=str(validation), fix=fix, code="no-data")
    count = 256 if config.quant is None else config.quant.calibrate

    def calibration() -> Iterator[dict[str, Tensor]]:
        yield from split([random_features(encoder, calibrated, count, config.seed)], config.batch_size)

    workload = Workload(
        name=type(model).__name__,
        model=model.eval(),
        inputs=next(calibration()),
        calibration=calibration,
        evaluate=evaluate_answers(encoder, evaluated, config.batch_size),
        metric="f1",
    )
    return workload, notes


def _task(config: HuggingFaceConfig) -> Task | None:
    name = config.data.task_name
    if name is None:
        return None
    plain = name.lower().replace("-", "").replace("_", "")
    if plain not in TASKS:
        raise WorkloadError(
            "unknown task of GLUE",
            where="data.task_name",
            value=name,
            fix=did_you_mean(plain, TASKS),
            code="unknown-name",
        )
    return TASKS[plain]


def _pretrained(config: HuggingFaceConfig, checkpoint: Path | None) -> tuple[Any, Any]:
    try:
        from transformers import (
            AutoConfig,
            AutoModelForQuestionAnswering,
            AutoModelForSequenceClassification,
            AutoTokenizer,
        )
    except ImportError as error:
        raise BitwrightError(
            "the file names a Hugging Face model", fix="pip install transformers", code="missing-package"
        ) from error
    own = config.model
    folder = checkpoint or Path(own.model_name_or_path).expanduser()
    where = "model.model_name_or_path" if checkpoint is None else "--checkpoint"
    if not folder.is_dir():
        raise BitwrightError(
            "there is no such folder; models are not downloaded",
            where=where,
            value=str(folder),
            fix="give a folder of save_pretrained (--checkpoint FOLDER)",
            code="no-such-checkpoint",
        )
    try:
        settings = AutoConfig.from_pretrained(own.config_name or folder, local_files_only=True)
        answers = any(name.endswith(_ANSWERS) for name in settings.architectures or ())
        wrong = _wrong_model(config, answers=answers)
        if wrong is not None:
            fix = f"give a {'ForSequenceClassification' if answers else _ANSWERS} model (--checkpoint FOLDER)"
            raise BitwrightError(wrong, where=where, value=str(folder), fix=fix, code="cannot-run")
        kind = AutoModelForQuestionAnswering if answers else AutoModelForSequenceClassification
        model = kind.from_pretrained(folder, config=settings, local_files_only=True)
        words = own.tokenizer_name or folder
        return model, AutoTokenizer.from_pretrained(words, use_fast=own.use_fast_tokenizer, local_files_only=True)
    except BitwrightError:
        raise
    except Exception as error:  # transformers raises many types
        raise BitwrightError(
            f"the model can't be loaded: {shortened(' '.join(str(error).split()))}",
            where=where,
            value=str(folder),
            fix="save a classifier, or a model that answers questions, and its tokenizer with save_pretrained",
            code="damaged-checkpoint",
        ) from error


def _wrong_model(config: HuggingFaceConfig, *, answers: bool) -> str | None:
    """Why a model doesn't fit the texts of the file."""
    own = config.data
    if answers:
        return None if own.task_name is None else f"the model answers questions, but {own.task_name} is another task"
    asks = own.version_2_with_negative or "squad" in (own.dataset_name or "").lower()
    return "the file asks questions about texts, but the model has no scores of answers" if asks else None


def _files(
    config: HuggingFaceConfig, data: Path | None, task: Task | None, *, questions: bool = False
) -> tuple[Path | None, Path]:
    """The files with the training and the evaluation part."""
    own = config.data
    folder = data or (None if own.dataset_name is None else Path(own.dataset_name).expanduser())
    named = [None if one is None else Path(one).expanduser() for one in (own.train_file, own.validation_file)]
    if folder is None:
        train, validation = named
    else:
        part = "" if task is None else task.part
        if questions:
            part = "-v2.0" if own.version_2_with_negative else "-v1.1"
        kinds = _SUFFIXES[-2:] if questions else _SUFFIXES
        train = named[0] or _found(folder, [f"train{part}", "train"], kinds)
        validation = named[1] or _found(folder, [f"dev{part}", f"validation{part}", "dev", "validation"], kinds)
    missing = [str(one) for one in (train, validation) if one is not None and not one.is_file()]
    if validation is None or missing:
        raise WorkloadError(
            "there are no texts for the evaluation" if not missing else "there is no such file",
            where="data",
            value=", ".join(missing) or (None if folder is None else str(folder)),
            fix=f"give a folder with train and dev as {', '.join(_SUFFIXES[-2 * questions :])} (--data FOLDER)",
            code="no-data",
        )
    return train, validation


def _found(folder: Path, names: Iterable[str], suffixes: Iterable[str]) -> Path | None:
    candidates = (folder / f"{name}{suffix}" for name in names for suffix in suffixes)
    return next((path for path in candidates if path.is_file()), None)


def _read(path: Path, task: Task | None) -> _Samples:
    rows = _rows(path, cola=task is TASKS["cola"])
    columns = list(rows[0]) if rows else []
    label = next((name for name in _LABEL if name in columns), None)
    if task is None:
        texts = [name for name in columns if name != label and isinstance(rows[0][name], str)]
        first = next((name for name in _FIRST if name in columns), texts[0] if texts else None)
        second = next((name for name in _SECOND if name in columns and name != first), None)
        wanted = [name for name in (first, second) if name is not None]
    else:
        wanted = [_column(columns, name) for name in (task.first, task.second) if name is not None]
    if label is None or not wanted or any(name not in columns for name in wanted):
        raise WorkloadError(
            "the file has no column of labels or of texts",
            where=str(path),
            value=columns[:10],
            fix=f"name the columns label and {' and '.join(wanted) or 'sentence1'}",
            code="invalid-data",
        )
    complete = [row for row in rows if all(row.get(name) not in (None, "") for name in (*wanted, label))]
    if not complete:
        raise WorkloadError("the file has no samples", where=str(path), fix="add rows", code="no-data")
    return _Samples(
        texts=[tuple(str(row[name]) for name in wanted) for row in complete], labels=[row[label] for row in complete]
    )


def _column(columns: Sequence[str], name: str) -> str:
    """The column of a text, by the name of Hugging Face or that in GLUE's own file."""
    return next((one for one in (name, *_ALIASES.get(name, ())) if one in columns), name)


def _rows(path: Path, *, cola: bool) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix in (".json", ".jsonl"):
            found = (
                json.loads(text) if text.lstrip().startswith("[") else [json.loads(x) for x in text.splitlines() if x]
            )
            if not all(isinstance(row, dict) for row in found):
                raise ValueError("a row is not an object")
            return found
        plain = path.suffix == ".tsv"
        lines = text.split("\n") if plain else text.splitlines(keepends=True)
        if cola and plain and not text.startswith("sentence"):
            lines = ["\t".join(_COLA), *lines]
        return list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE) if plain else csv.DictReader(lines))
    except (ValueError, csv.Error, UnicodeError) as error:
        raise WorkloadError(
            f"the file can't be read: {error}", where=str(path), fix="give TSV, CSV or JSON lines", code="invalid-data"
        ) from error


def _limited(samples: _Samples, most: int | None) -> _Samples:
    return _Samples(texts=samples.texts[:most], labels=samples.labels[:most])


def _numbering(labels: Sequence[str | float], settings: Any, path: Path) -> Callable[[str | float], int | float]:
    """How labels become targets: numbers as they are, names by the model's `label2id`, else in sorted order."""
    if settings.num_labels == 1:
        return float
    distinct = sorted({str(label).strip() for label in labels})
    known = {str(name).lower(): int(number) for name, number in (settings.label2id or {}).items()}
    if all(label.lstrip("-").isdigit() for label in distinct):
        table = {label: int(label) for label in distinct}
    elif all(label.lower() in known for label in distinct):
        table = {label: known[label.lower()] for label in distinct}
    else:
        table = {label: number for number, label in enumerate(distinct)}
    wrong = [label for label, number in table.items() if not 0 <= number < settings.num_labels]
    if wrong:
        raise WorkloadError(
            f"the model has {settings.num_labels} classes",
            where=str(path),
            value=wrong[:5],
            fix="use a model of this task",
            code="invalid-data",
        )
    return lambda label: table[str(label).strip()]


def _evaluate(
    metric: str, data: Callable[[], Iterable[tuple[dict[str, Tensor], Tensor]]]
) -> Callable[[Callable[..., Any]], dict[str, float]]:
    """Measure the metric; two classes also have an F1 score."""

    def evaluate(predict: Callable[..., Any]) -> dict[str, float]:
        outputs, targets = [], []
        for inputs, target in data():
            found = call(predict, inputs)
            logits = getattr(found, "logits", found)
            outputs.append(logits[0] if isinstance(logits, tuple | list) else logits)
            targets.append(target)
        logits, target = torch.cat(outputs).float(), torch.cat(targets)
        if metric == "pearson":
            pair = torch.stack([logits.flatten().double(), target.double()])
            return {"pearson": _finite(float(torch.corrcoef(pair)[0, 1])), "n": float(len(target))}
        values = {name: METRICS[kind][0]() for name, kind in (("top1", "topk"), ("f1", "f1"))}
        for counter in values.values():
            counter.add(logits, target)
        matthews = torch.corrcoef(torch.stack([logits.argmax(dim=1).double(), target.double()]))[0, 1]
        return {
            **{name: counter.value() for name, counter in values.items()},
            "matthews": _finite(float(matthews)),  # for two classes, it is their correlation
            "n": float(len(target)),
        }

    return evaluate


def _finite(value: float) -> float:
    """0 where the correlation is undefined, because a side is constant."""
    return value if np.isfinite(value) else 0.0
