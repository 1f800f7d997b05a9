"""From `file.py:function`, or a name, to the workload that it makes."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bitwright.core.arguments import UnknownArgument, strict
from bitwright.core.errors import BitwrightError, WorkloadError, did_you_mean
from bitwright.core.modes import eval_mode
from bitwright.core.registry import WORKLOADS
from bitwright.core.tensor_tree import tensors_in
from bitwright.core.user_code import first_line, line_of
from bitwright.workload.data import call
from bitwright.workload.workload import Workload


@strict
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


def open_workload(ref: str) -> Workload:
    """Load a workload and call its model once, so that a model that fails on its own inputs is reported as such."""
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
    except UnknownArgument as error:
        problems = [replace(problem, what=f"{problem.what}{line_of(error)}") for problem in error.problems]
        raise UnknownArgument(problems) from error
    except BitwrightError:
        raise  # it says what is wrong already, and what to do
    except (Exception, SystemExit) as error:
        raise WorkloadError(
            f"the workload function raised {type(error).__name__}: {error}{line_of(error)}",
            value=ref,
            fix="call it without arguments in Python",
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
