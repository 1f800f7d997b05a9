"""Does a plan keep to what its backend can run?"""

from __future__ import annotations

from bitwright.backends.table import BackendTable
from bitwright.errors import Problem
from bitwright.plan import Plan


def check_plan(plan: Plan, table: BackendTable) -> list[Problem]:
    """Every site whose format the target can't run."""
    problems: list[Problem] = []
    for site, spec in plan.quantized:
        if spec.share is not None or spec.quantizer == "product":
            continue
        # a weight may also stand at an operand's port (x @ w): there either list will do
        if site.endswith(":weight"):
            choices = [table.weights]
        elif site.rpartition(":")[2].startswith("input"):
            choices = [table.activations, table.weights]
        else:
            choices = [table.activations]
        if not any(choice.allows(spec.format) for choice in choices):
            problems.append(
                Problem(
                    what=f"{table.name} can't run this format here",
                    where=site,
                    value=str(spec.format),
                    fix=f"use one of: {', '.join(choices[0].formats)}, float",
                )
            )
    return problems
