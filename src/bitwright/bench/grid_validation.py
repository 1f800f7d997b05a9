"""Problems of a grid's file, all at once: what the schema refuses must not hide what it can't see."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from bitwright.core.documents import problems_of
from bitwright.core.errors import BitwrightError, Problem
from bitwright.workload import Workload, can_measure

#: What a key that every grid has may look like.
_EXAMPLES: dict[str, tuple[str, Any]] = {
    "models": ("models: [my_workload.py:small]", {"workload": "digits"}),
    "algorithms": ("algorithms: [lsq]", {"a_method": "lsq"}),
    "backends": ("backends: [academic]", "academic"),
    "bits": ("bits: [8, 4]", 8),
    "seeds": ("seeds: [0, 1]", 0),
}
_NAMED = {"models": "workload", "algorithms": "a_method"}


def schema_problems(error: ValidationError, model: type[BaseModel]) -> Iterator[Problem]:
    """What the schema refuses, with an example where something is missing."""
    for one, problem in zip(error.errors(), problems_of(error, model), strict=True):
        if one["type"] == "missing":
            first = str(one["loc"][0])
            fix = _EXAMPLES[first][0] if len(one["loc"]) == 1 and first in _EXAMPLES else f"{one['loc'][-1]}: …"
            yield Problem(what="is missing", where=problem.where, fix=fix)
        else:
            yield problem


def without_invalid_parts(data: dict[str, Any], error: ValidationError) -> dict[str, Any]:
    """A copy with a valid example in each place that the schema rejects, so that the rest can be validated too."""
    made = copy.deepcopy(data)
    for key in _EXAMPLES.keys() & made.keys():
        items = made[key] if isinstance(made[key], list | tuple) else [made[key]]
        named = _NAMED.get(key)
        made[key] = [{named: item} if named and isinstance(item, str) else item for item in items]
    for one in error.errors():
        _mend(made, one["loc"])
    return made


def _mend(made: dict[str, Any], loc: tuple[Any, ...]) -> None:
    first, example = loc[0], _EXAMPLES.get(str(loc[0]))
    if example is None:
        made.pop(first, None) if len(loc) == 1 else made[first].pop(loc[1], None)
    elif len(loc) == 1:  # the key is missing
        made[first] = [example[1]]
    elif len(loc) == 2 or loc[2] in example[1]:
        made[first][loc[1]] = example[1]
    else:
        made[first][loc[1]].pop(loc[2], None)


def file_problem(ref: str) -> Problem | None:
    """What is wrong with `file.py:function`, as far as that can be seen without running the file."""
    path, _, function = ref.rpartition(":")
    file = Path(path).expanduser()
    where_from = "paths in a grid are relative to the grid's file"
    if not file.is_file():
        return Problem(what="there is no such workload file", value=path, fix=where_from)
    try:
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    except (OSError, SyntaxError, ValueError) as error:
        return Problem(what=f"the workload file can't be read: {error}", value=path)
    if function not in set(_bound(nodes)) and not any(isinstance(n, ast.alias) and n.name == "*" for n in nodes):
        return Problem(what="the workload file has no such function", value=ref, fix=f"write def {function}(): …")
    return None


def _bound(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Names that a file gives to something."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name


def loading_problems(refs: Sequence[str], load: Callable[[str], Workload]) -> Iterator[Problem]:
    """Load every workload before the first is trained; say of all that can't be used why."""
    for ref in refs:
        try:
            workload = load(ref)
        except BitwrightError as error:
            yield from (Problem(what=p.what, where=p.where or ref, value=p.value, fix=p.fix) for p in error.problems)
            continue
        if not can_measure(workload):
            yield Problem(
                what="a grid compares accuracies, and the workload has no evaluation data",
                where=ref,
                fix="give Workload(evaluation=...) or Workload(evaluate=...)",
            )
