"""Workload: the one thing that every verb is given.

A workload bundles what only its owner knows (the model, how it is called, its data, what "good" means),
so that no verb has an argument of its own for any of it. On the command line it is written as
``file.py:function``, or as the name of a built-in or a plugin.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any, SupportsFloat

import torch
from torch import Tensor, nn

from bitwright.errors import BitwrightError, WorkloadError, did_you_mean
from bitwright.modes import evaluating
from bitwright.owner import first_line, line_of, owners_code
from bitwright.registry import WORKLOADS

__all__ = [
    "Workload",
    "batches",
    "call",
    "can_measure",
    "hits_of",
    "load_object",
    "load_workload",
    "loss_of",
    "measure",
    "pairs",
]


#: Names of metrics of which less is most often better, as whole words: "val_loss", "errors", "RMSE".
_SOUNDS_LOW = re.compile(
    r"(?i)(?<![a-z])(loss(es)?|err(ors?)?|n?r?mse|mae|mape|perplexity|ppl|wer|cer|nll|fid|bpc|bpb)(?![a-z])"
)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What every verb is given: a model, example inputs, and data.

    Loaders are functions, not iterators: each verb walks the data from its beginning, some more than once.
    """

    name: str
    model: nn.Module
    #: One example call of the model: a tuple is positional, a dict is by keyword.
    inputs: tuple[Any, ...] | dict[str, Any]
    #: Gives a fresh iterator over batches of inputs (a tensor, a tuple or a dict each), without targets.
    calibration: Callable[[], Iterable[Any]] | None = None
    #: Gives a fresh iterator over (inputs, target).
    evaluation: Callable[[], Iterable[tuple[Any, Tensor]]] | None = None
    #: The owner's own metric: gets a function that is called as the model is, gives ``{"top1": 91.7}``.
    evaluate: Callable[[Callable[..., Any]], dict[str, float]] | None = None
    #: Gives what is trained on: a map-style data set of (inputs, target), or a DataLoader of one. The trainer
    #: shuffles, shards and batches by itself.
    training: Callable[[], Any] | None = None
    #: Makes a batch (inputs, target) of samples; torch's ``default_collate`` if not given. A data set with
    #: ``__getitems__(indices)`` may give whole batches: then this is ``lambda batch: batch``.
    collate: Callable[[Any], tuple[Any, Any]] | None = None
    #: Gets the model's output and the target; a mean over samples, or those of unequal batches don't count alike.
    loss: Callable[[Any, Any], Tensor] | None = None
    #: The key of the measured values on which goals are set.
    metric: str = "top1"
    #: Whether less of ``metric`` is better, or the names of all measured values of which less is better.
    lower_is_better: bool | Collection[str] | None = None

    def less_is_better(self, metric: str | None = None) -> bool:
        """Whether less of a measured value (by default of ``metric``) is better."""
        said, name = self.lower_is_better, self.metric if metric is None else metric
        return name in said if isinstance(said, Collection) else bool(said) and name == self.metric

    def direction_note(self) -> str | None:
        """What to say where the metric's name sounds as if less were better, and nobody said so."""
        if self.lower_is_better is not None or not can_measure(self) or not _SOUNDS_LOW.search(self.metric):
            return None
        return (
            f"more of {self.metric!r} is taken for better; if less is, give Workload(lower_is_better=True), "
            "else lower_is_better=False"
        )

    def __post_init__(self) -> None:
        """Refuse the usual slips here, where the owner's code is on the stack, and not minutes later."""
        where = f"workload {self.name!r}"
        if not isinstance(self.model, nn.Module):
            raise WorkloadError(
                "the model is not an nn.Module",
                where=where,
                value=type(self.model).__name__,
                fix="pass an instance (Net(), not Net)" if isinstance(self.model, type) else "pass an nn.Module",
            )
        if not isinstance(self.inputs, tuple | dict):
            raise WorkloadError(
                "the example inputs are neither a tuple nor a dict",
                where=where,
                value=type(self.inputs).__name__,
                fix="write inputs=(x,) for model(x), or inputs={'name': x} for model(name=x)",
            )
        if isinstance(self.lower_is_better, str):
            raise WorkloadError(
                "lower_is_better is a text",
                where=where,
                value=self.lower_is_better,
                fix=f"write lower_is_better=({self.lower_is_better!r},), or True for metric=",
            )
        for field in ("calibration", "evaluation", "evaluate", "training", "collate", "loss"):
            value = getattr(self, field)
            if value is not None and not callable(value):
                raise WorkloadError(
                    f"{field} is not a function",
                    where=where,
                    value=type(value).__name__,
                    fix=f"write {field}=lambda: loader, so that each use starts afresh"
                    if field in ("calibration", "evaluation", "training")
                    else f"give {field}= a function",
                )


def call(model: Callable[..., Any], batch: Any) -> Any:
    """Call the model with one batch: ``model(x)``, ``model(*xs)`` or ``model(**xs)``.

    >>> call(lambda a, b: a - b, (3, 2)), call(lambda a, b: a - b, {"b": 3, "a": 2})
    (1, -1)
    """
    args: tuple[Any, ...] = tuple(batch) if isinstance(batch, tuple | list) else ()
    kwargs: dict[str, Any] = {}
    if isinstance(batch, dict):
        kwargs = batch
    elif not isinstance(batch, tuple | list):
        args = (batch,)
    try:
        return model(*args, **kwargs)
    except TypeError as error:
        # A batch that doesn't fit the signature is the workload's fault; any other TypeError is the model's.
        signature = inspect.signature(model.forward if isinstance(model, nn.Module) else model)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as misfit:
            raise WorkloadError(
                f"a batch doesn't fit the model's arguments {signature}: {misfit}",
                value=_shape_of(batch),
                fix="yield exactly what the model takes; calibration data has inputs without targets",
            ) from error
        raise


def batches(
    loader: Callable[[], Iterable[Any]] | None, limit: int | None = None, *, name: str | None = None
) -> Iterator[Any]:
    """Walk the calibration data of the workload ``name`` from its beginning, at most ``limit`` batches of it.

    >>> [int(x.sum()) for x in batches(lambda: [torch.ones(2), torch.ones(3)], limit=1)]
    [2]
    """
    if loader is None:
        raise WorkloadError(
            "the workload has no calibration data",
            fix="give Workload(calibration=...) a function that yields batches of inputs",
        )
    if limit is not None and limit < 1:
        raise WorkloadError("the number of calibration batches is not positive", value=limit, fix="use 1 or more")
    return _checked(loader, limit, name)


def _checked(loader: Callable[[], Iterable[Any]], limit: int | None, name: str | None) -> Iterator[Any]:
    empty = True
    expected = "calibration() gives an iterator over batches of inputs"
    fix = "walk through the workload's calibration() in Python"
    with owners_code(name, "the calibration loader", expected=expected, fix=fix):
        for index, batch in enumerate(itertools.islice(iter(loader()), limit)):
            if not isinstance(batch, Tensor | tuple | list | dict):
                raise WorkloadError(
                    f"calibration batch {index} is neither a tensor, a tuple nor a dict",
                    value=type(batch).__name__,
                    fix="yield a tensor, a tuple of positional inputs, or a dict of keyword inputs",
                )
            empty = False
            yield batch
    if empty:
        raise WorkloadError(
            "the calibration loader yields no batch",
            fix="check that its data set isn't empty, and that each call gives a new iterator",
        )


def can_measure(workload: Workload) -> bool:
    """Whether the workload says how good a model is."""
    return workload.evaluation is not None or workload.evaluate is not None


def measure(workload: Workload, predict: Callable[..., Any]) -> dict[str, float]:
    """Score ``predict``, which is called as the workload's model is, on the workload's evaluation data.

    The workload's own ``evaluate`` has the say; without it the score is top-1 in percent, with the number of
    samples ``n``. A module is scored in evaluation mode, and left in the modes that it had.
    """
    where = f"workload {workload.name!r}"
    with torch.no_grad(), evaluating(predict):
        if workload.evaluate is not None:
            with owners_code(workload.name, "evaluate", expected=_METRICS, fix="call evaluate(model) in Python"):
                found = workload.evaluate(predict)
            values = _numbers(found, workload)
        elif workload.evaluation is not None:
            values = _top1(pairs(workload), predict, where)
        else:
            raise WorkloadError(
                "nothing says how good the model is",
                where=where,
                fix="give the Workload evaluation= or evaluate=",
            )
    if workload.metric not in values:
        raise WorkloadError(
            f"the metric {workload.metric!r} was not measured",
            where=where,
            value=sorted(values),
            fix="set metric= to one of these, or give an evaluate= that returns it",
        )
    return values


_METRICS = 'evaluate(model) calls model as the model is called, and gives numbers by name: {"top1": 91.7}'


def _numbers(found: Any, workload: Workload) -> dict[str, float]:
    """What `evaluate` gave, as floats by name; a number alone is the metric."""
    values = found if isinstance(found, Mapping) else {workload.metric: found}
    wrong = [value for value in values.values() if not _is_number(value)]
    if wrong:
        raise WorkloadError(
            f"evaluate gave no numbers; expected: {_METRICS}",
            where=f"workload {workload.name!r}",
            value=_shape_of(wrong[0]),
            fix=f"return {{{workload.metric!r}: number}}",
        )
    return {str(name): float(value) for name, value in values.items()}


def _is_number(value: object) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, SupportsFloat)


def pairs(workload: Workload) -> Iterator[tuple[Any, Tensor]]:
    """The evaluation data from its beginning: (inputs, target) each."""
    assert workload.evaluation is not None
    expected = "evaluation() gives an iterator over pairs (inputs, target)"
    fix = "walk through the workload's evaluation() in Python"
    with owners_code(workload.name, "the evaluation loader", expected=expected, fix=fix):
        batch: Any
        for index, batch in enumerate(workload.evaluation()):
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise WorkloadError(
                    f"evaluation batch {index} is no pair; expected: {expected}",
                    where=f"workload {workload.name!r}",
                    value=_shape_of(batch),
                    fix="yield (inputs, target); a tuple of inputs is one item: ((a, b), target)",
                )
            yield batch[0], batch[1]


def loss_of(workload: Workload) -> Callable[[Any, Any], Tensor]:
    """The workload's loss; what it raises is told as its own."""
    loss = workload.loss
    assert loss is not None
    expected = "loss(output, target) gives a tensor of one number"

    @functools.wraps(loss, assigned=("__name__", "__doc__", "reduction"), updated=())
    def guarded(output: Any, target: Any) -> Tensor:
        got = f"output: {_shape_of(output)}; target: {_shape_of(target)}"
        fix = f"call loss(model(inputs), target) in Python ({got})"
        with owners_code(workload.name, "loss", expected=expected, fix=fix):
            value: Any = loss(output, target)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise WorkloadError(
                f"loss gave something else; expected: {expected}",
                where=f"workload {workload.name!r}",
                value=_shape_of(value),
                fix="return the mean over samples",
            )
        found: Tensor = value
        return found

    return guarded


def _top1(data: Iterable[tuple[Any, Tensor]], predict: Callable[..., Any], where: str) -> dict[str, float]:
    hits = n = 0
    for right, _ in hits_of(data, predict, where=where):
        hits += int(right.sum())
        n += len(right)
    return {"top1": 100.0 * hits / n, "n": float(n)}


def hits_of(
    data: Iterable[tuple[Any, Tensor]], predict: Callable[..., Any], *, where: str | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each batch, which samples `predict` gets right, and their targets."""
    empty = True
    for inputs, target in data:
        try:
            output = call(predict, inputs)
        except BitwrightError:
            raise
        except Exception as error:
            raise WorkloadError(
                f"the model fails on evaluation data: {type(error).__name__}: {first_line(error)}{line_of(error)}",
                where=where,
                value=_shape_of(inputs),
                fix="let evaluation yield (inputs, target) with inputs as the model takes them",
            ) from error
        logits = getattr(output, "logits", output)  # the outputs of Hugging Face's classifiers
        if not isinstance(logits, Tensor) or logits.ndim != 2 or target.shape != logits.shape[:1]:
            raise WorkloadError(
                "top-1 needs an output of (samples, classes) and a target of (samples,)",
                where=where,
                value=f"{_shape_of(logits)}, {_shape_of(target)}",
                fix="give the Workload an evaluate= of its own",
            )
        # argmax calls NaN the largest, so a broken model would score by chance: NaN is a miss.
        sound = ~logits.isnan().any(dim=1)
        empty = empty and not len(target)
        yield (logits.argmax(dim=1) == target) & sound, target
    if empty:
        raise WorkloadError(
            "the evaluation loader yields no sample",
            where=where,
            fix="check its data set, and that each call starts afresh",
        )


def _shape_of(value: object) -> str:
    """A word for a batch in an error message: its shape, never its contents."""
    if isinstance(value, Tensor):
        return f"tensor {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {len(value)}"
    return f"dict of {sorted(map(str, value))}" if isinstance(value, dict) else type(value).__name__


def load_workload(ref: str) -> Workload:
    """Build the workload that a user names: ``file.py:function``, or a built-in's or a plugin's name."""
    is_file = ":" in ref or ref.endswith(".py")
    workload = load_object(ref) if is_file else _called(WORKLOADS.get(ref), ref)
    if not isinstance(workload, Workload):
        raise WorkloadError(
            "the workload function returned something else",
            value=f"{ref} gave {type(workload).__name__}",
            fix="return bitwright.Workload(name=..., model=..., inputs=...)",
        )
    return workload


def load_object(ref: str) -> Any:
    """What a function of a user's file returns: ``file.py:function``."""
    path, colon, function = ref.rpartition(":")
    if not colon:
        raise WorkloadError("the reference names no function", value=ref, fix=f"write {ref}:function")
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise WorkloadError(
            "there is no such workload file",
            value=path,
            fix="write file.py:function, with the file relative to where you are",
        )
    with _siblings(file.parent):
        module = _import_file(file)
        build = getattr(module, function, None)
        if not callable(build):
            own = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
            raise WorkloadError(
                f"{file.name} has no function {function!r}",
                value=ref,
                fix=did_you_mean(function, own) if own else "define it, without arguments",
            )
        return _called(build, ref)


def _called(function: Callable[[], object], ref: str) -> object:
    try:
        return function()
    except BitwrightError:
        raise  # it says what is wrong already, and what to do
    except (Exception, SystemExit) as error:
        unknown = re.search(r"Workload\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
        raise WorkloadError(
            f"the workload function raised {type(error).__name__}: {error}{line_of(error)}",
            value=ref,
            fix=did_you_mean(unknown[1], (field.name for field in fields(Workload)))
            if unknown
            else "call it without arguments in Python",
        ) from error


def _import_file(file: Path) -> ModuleType:
    """Import a file under a name of its own, so that no other module can stand in for it."""
    name = next(n for i in itertools.count() if (n := f"bitwright_workload_{file.stem}_{i}") not in sys.modules)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise WorkloadError("the workload file is not a Python file", value=file.name, fix="give it the suffix .py")
    module = importlib.util.module_from_spec(spec)
    # It stays there: torch.compile, pickle and inspect look a model's module up by its name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        if isinstance(error, BitwrightError):
            raise
        raise WorkloadError(
            f"importing the workload file raised {type(error).__name__}: {error}{line_of(error)}",
            value=file.name,
            fix=f"run: python {file.name}",
        ) from error
    return module


#: Modules that workload files brought in from their own folder, by name.
_brought: dict[str, Path] = {}


@contextlib.contextmanager
def _siblings(folder: Path) -> Iterator[None]:
    """Let a workload file import its neighbours, as if it were run as a script.

    A ``model.py`` next to an earlier workload, in another folder, must not answer for this one's ``model``.
    """
    for name, origin in list(_brought.items()):
        top = name.partition(".")[0]
        if origin != folder and ((folder / f"{top}.py").exists() or (folder / top).is_dir()):
            sys.modules.pop(name, None)
            del _brought[name]
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            source = getattr(sys.modules[name], "__file__", None)
            if source and Path(source).is_relative_to(folder):
                _brought[name] = folder
