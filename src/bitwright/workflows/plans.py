"""`plan_workload`: make or validate the plan of a workload, as `bitwright plan` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from bitwright.backends import DEFAULT_BACKEND, Choices, make_plan, plan_warnings, resolve_for_backend
from bitwright.backends import backend as find_backend
from bitwright.core.arguments import strict
from bitwright.core.errors import log_warnings
from bitwright.graph import capture
from bitwright.importers.qsync import load_mapper, plan_of_mapper, summarize_mapper
from bitwright.plan import Plan
from bitwright.sensitivity.weight_costs import CANDIDATES, weight_costs
from bitwright.workload import Workload, open_workload
from bitwright.workload.data import calibration, first

__all__ = ["WorkloadPlan", "plan_workload"]

_SAMPLES = 32  # calibration samples; each needs a gradient


@dataclass(frozen=True, kw_only=True)
class WorkloadPlan:
    """The plan of a workload."""

    plan: Plan
    changes: Sequence[Any] | None = None
    """The changes from the plan that it was compared with."""
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return repr(self.plan)

    def to_dict(self) -> dict[str, Any]:
        """The plan file, the operators in float and the changes, as plain data."""
        return {
            "quantized_sites": len(list(self.plan.quantized)),
            "float_operators": dict(self.plan.float),
            "changes": [vars(change) for change in self.changes or ()],
            "plan": self.plan.to_yaml(),
        }


@strict
def plan_workload(
    workload: Workload | str,
    backend: str | None = None,
    *,
    plan: Plan | None = None,
    precision: str | None = None,
    bits: float | None = None,
    size: str | None = None,
    candidates: Sequence[str] = (),
    samples: int | None = None,
    mapper: Path | None = None,
    against: Plan | None = None,
    **choices: Unpack[Choices],
) -> WorkloadPlan:
    """Choose the format of each site of a workload's model. Warnings are logged.

    `plan` is validated for the workload instead. `bits` or `size` is a budget for the weights, whose formats are
    chosen from `candidates` with gradients on `samples` calibration samples. `mapper` is a mapper file of QSync. The
    result has the changes since the plan `against`.

    >>> import torch
    >>> from bitwright import Workload, plan_workload
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    >>> made = plan_workload(Workload(name="tiny", model=model, inputs=(torch.randn(1, 4),)))
    >>> str(made.plan.sites["0:weight"].format)
    'int8/channel/sym'
    """
    target = backend or (plan.backend if plan is not None else None) or DEFAULT_BACKEND
    table = find_backend(target)  # reject an unknown name before loading the workload
    found = open_workload(workload) if isinstance(workload, str) else workload
    graph = capture(found.model, found.inputs)
    notes: tuple[str, ...] = ()
    if mapper is not None:
        mapped = load_mapper(mapper)
        made = plan_of_mapper(mapped, graph, model=found.model, exclude=tuple(choices.get("keep_float", ())))
        made = replace(made, model=found.name)
        notes = (f"{mapper.name}: {summarize_mapper(mapped)}",)
    elif plan is not None:
        made = resolve_for_backend(plan, table, graph, name=found.name)
    else:
        costs = None
        if bits is not None or size is not None:
            data = first(calibration(found), samples or _SAMPLES)
            keep = choices.get("keep_float", ())
            formats = candidates or CANDIDATES
            costs = weight_costs(found.model, data, target, graph=graph, keep_float=keep, formats=formats)
        made = make_plan(
            graph, target, model=found.name, precision=precision, bits=bits, size=size, costs=costs, **choices
        )
    log_warnings(plan_warnings(graph, made))
    changes = None if against is None else against.resolve(graph).diff(made)
    return WorkloadPlan(plan=made, changes=changes, notes=notes)
