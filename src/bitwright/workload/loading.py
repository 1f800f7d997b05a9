"""Load a workload from `file.py:function` or from a registered name."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bitwright.core.arguments import UnknownArgument, strict
from bitwright.core.documents import read_settings
from bitwright.core.errors import BitwrightError, Problem, WorkloadError, did_you_mean, first_line, line_of
from bitwright.core.registry import IMPORTERS, WORKLOADS, Importer
from bitwright.core.tensor_tree import eval_mode, tensors_in
from bitwright.workload.data import call
from bitwright.workload.language_models import (
    is_language_model,
    language_model_problem,
    load_language_model,
    with_text,
)
from bitwright.workload.workload import Workload

_SETTINGS = re.compile(r"(?P<file>.+?\.ya?ml)(?::(?P<data>.+))?")


@strict
def load_workload(
    ref: str, *, text: str | Path | None = None, sequence: int | None = None, samples: int | None = None
) -> Workload:
    """Load a workload by ``file.py:function``, or by the name of a built-in or plugin.

    ``hf:FOLDER`` and ``gguf:FILE`` are language models. `text` is a file for calibration and perplexity, which is split
    into `samples` of `sequence` tokens (default: 32 of 256 for each of both). The options can also be part of the
    reference: ``hf:FOLDER,text=wiki.txt,sequence=512,samples=8,batch=2``.

    ``config.yaml:FOLDER`` is the network that another system's file names, with the data in a folder. Without FOLDER,
    the file defines where the data is.

    `bitwright list workloads` shows all names.

    >>> load_workload("digits-untrained")
    <Workload digits-untrained: DigitsNet with calibration, evaluation, training data>
    """
    ref = with_text(ref, text=text, sequence=sequence, samples=samples)
    if is_language_model(ref):
        return load_language_model(ref)
    is_file = ":" in ref or ref.endswith(".py")
    settings = _SETTINGS.fullmatch(ref)
    if settings is not None:
        return _imported(Path(settings["file"]).expanduser(), settings["data"])
    workload = load_object(ref) if is_file else _called(WORKLOADS.get(ref), ref)
    if not isinstance(workload, Workload):
        raise WorkloadError(
            "the workload function did not return a Workload",
            value=f"{ref} returned {type(workload).__name__}",
            fix="return bitwright.Workload(name=..., model=..., inputs=...)",
            code="not-a-workload",
        )
    return workload


def _imported(file: Path, data: str | None) -> Workload:
    found = read_settings(file, "a file that names a network", "model: {type: resnet18}")
    for name in IMPORTERS.names():
        importer: Importer = IMPORTERS.get(name)
        if importer.workload is not None and importer.recognizes(found):
            workload: Workload = importer.workload(file, data=None if data is None else Path(data).expanduser())
            return workload
    raise WorkloadError(
        "the file doesn't name a network with data",
        value=str(file),
        fix="pass file.py:function, or a file of MQBench's zoo",
        code="invalid-reference",
    )


def open_workload(ref: str) -> Workload:
    """Load a workload and call its model once, so that a model that fails on its example inputs is reported clearly."""
    workload = load_workload(ref)
    where = f"workload {workload.name!r}"
    try:
        with eval_mode(workload.model), torch.no_grad():
            result = call(workload.model, workload.inputs)
    except BitwrightError:
        raise
    except Exception as error:
        raise WorkloadError(
            f"the model fails on its own example inputs: {type(error).__name__}: {first_line(error)}{line_of(error)}",
            where=where,
            fix="call model(*inputs) in Python, and fix the model or the inputs",
            code="model-fails",
        ) from error
    if not any(True for _ in tensors_in(result)):
        raise WorkloadError(
            "the model returned no tensor",
            where=where,
            value=type(result).__name__,
            fix="return a tensor, or tuples, lists, dicts or dataclasses of tensors",
            code="no-tensor",
        )
    return workload


def load_object(ref: str) -> Any:
    """The return value of a function in a user's file: ``file.py:function``."""
    path, colon, function = ref.rpartition(":")
    if not colon:
        raise WorkloadError(
            "the reference contains no function name", value=ref, fix=f"write {ref}:function", code="invalid-reference"
        )
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise WorkloadError(
            "the workload file does not exist",
            value=path,
            fix="write file.py:function, with a path relative to the current folder",
            code="workload-file-missing",
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
                code="unknown-function",
            )
        return _called(build, ref)


def _called(function: Callable[[], object], ref: str) -> object:
    try:
        return function()
    except UnknownArgument as error:
        problems = [replace(problem, what=f"{problem.what}{line_of(error)}") for problem in error.problems]
        raise UnknownArgument(problems) from error
    except BitwrightError:
        raise  # already has a clear message
    except (Exception, SystemExit) as error:
        raise WorkloadError(
            f"the workload function raised {type(error).__name__}: {error}{line_of(error)}",
            value=ref,
            fix="call it without arguments in Python",
            code="user-code-failed",
        ) from error


def _import_file(file: Path) -> ModuleType:
    """Import a file under a unique module name, so that it can't be confused with another module."""
    name = next(n for i in itertools.count() if (n := f"bitwright_workload_{file.stem}_{i}") not in sys.modules)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise WorkloadError(
            "the workload file is not a Python file",
            value=file.name,
            fix="give it the suffix .py",
            code="invalid-reference",
        )
    module = importlib.util.module_from_spec(spec)
    # The module stays in sys.modules: torch.compile, pickle and inspect look up a model's module by name.
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
            code="user-code-failed",
        ) from error
    return module


#: Modules that workload files imported from their own folders, by name.
_brought: dict[str, Path] = {}


@contextlib.contextmanager
def _siblings(folder: Path) -> Iterator[None]:
    """Let a workload file import modules from its own folder, as if it were run as a script.

    A ``model.py`` that an earlier workload imported from another folder must not be used for this one.
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


def reference_problem(ref: str) -> Problem | None:
    """The problem of a reference that can be found without running the file or loading the model."""
    if is_language_model(ref):
        return language_model_problem(ref)
    path, _, function = ref.rpartition(":")
    file = Path(path).expanduser()
    if not file.is_file():
        return Problem(
            what="the workload file does not exist",
            value=path,
            fix="give an existing file; paths in a grid are relative to the grid's file",
            code="workload-file-missing",
        )
    try:
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    except (OSError, SyntaxError, ValueError) as error:
        return Problem(what=f"the workload file can't be read: {error}", value=path, code="unreadable-file")
    if function not in set(_defined_names(nodes)) and not any(
        isinstance(n, ast.alias) and n.name == "*" for n in nodes
    ):
        return Problem(
            what="the workload file has no such function",
            value=ref,
            fix=f"write def {function}(): …",
            code="unknown-function",
        )
    return None


def _defined_names(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """The names that a file defines."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
