"""Precisions of one kind of device by integer programming: least penalty within memory, or within time (HiGHS)."""

from __future__ import annotations

import numpy as np

from bitwright.errors import PlanError, Problem
from bitwright.planners.machine import Machine


def ilp(
    machine: Machine,
    kind: str,
    *,
    batch: int | None = None,
    seconds: float | None = None,
    memory: int | None = None,
) -> dict[str, str]:
    """The plan with the least penalty whose work and memory stay within what is given.

    Costs of operators are taken as independent: each is measured against the plan with everything in its first format.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # takes most of a second; only planners wait for it

    batch = batch or machine.batch
    operators = list(machine.operators)
    pairs = [(op, format) for op in operators for format in machine.formats(kind, op)]
    first = {op: machine.formats(kind, op)[0] for op in operators}
    base_work, base_memory = machine.work(kind, first, batch), machine.memory(kind, first, batch)
    penalties = np.array([machine.penalty(op, format) for op, format in pairs])
    works = np.array([machine.work(kind, {**first, op: f}, batch) - base_work for op, f in pairs])
    bytes_ = np.array([float(machine.memory(kind, {**first, op: f}, batch) - base_memory) for op, f in pairs])
    one_each = np.array([[float(op == name) for op, _ in pairs] for name in operators])
    constraints = [LinearConstraint(one_each, 1, 1)]
    if seconds is not None:
        constraints.append(LinearConstraint(works[None], -np.inf, seconds - base_work))
    if memory is not None:
        constraints.append(LinearConstraint(bytes_[None], -np.inf, float(memory - base_memory)))
    scale = float(penalties.max()) or 1.0  # tolerances are absolute
    found = milp(penalties / scale, constraints=constraints, integrality=np.ones(len(pairs)), bounds=Bounds(0, 1))
    if found.x is None:
        raise PlanError([_infeasible(machine, kind, batch, seconds, memory)], title="no plan fits")
    return {op: format for (op, format), taken in zip(pairs, found.x, strict=True) if taken > 0.5}


def _infeasible(machine: Machine, kind: str, batch: int, seconds: float | None, memory: int | None) -> Problem:
    formats = {op: machine.formats(kind, op) for op in machine.operators}
    quick = {op: min(fs, key=lambda f: machine.work(kind, {op: f}, batch)) for op, fs in formats.items()}
    small = {op: min(fs, key=lambda f: machine.memory(kind, {op: f}, batch)) for op, fs in formats.items()}
    words = []
    if seconds is not None:
        words.append(f"needs {machine.work(kind, quick, batch):.4g} s at its fastest, {seconds:.4g} are allowed")
    if memory is not None:
        needs = machine.memory(kind, small, batch)
        words.append(f"needs {needs / 1e9:.3g} GB at its smallest, {memory / 1e9:.3g} are allowed")
    return Problem(what="; ".join(words), where=kind, fix="allow more, or give it a smaller batch")
