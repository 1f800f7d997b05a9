"""The options `--plan` and `--checkpoint` of verbs that load a quantized model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bitwright.core.errors import BitwrightError

if TYPE_CHECKING:
    from bitwright.plan import Plan

PlanOption = Annotated[Path | None, typer.Option("--plan", help="The plan file.", show_default=False)]
CheckpointOption = Annotated[
    Path | None,
    typer.Option("--checkpoint", help="The prepared model's checkpoint (.safetensors).", show_default=False),
]


def read_plan(plan: Path | None, checkpoint: Path | None) -> tuple[Plan, Path]:
    """Read both files; they are checked here as far as possible without the model."""
    if plan is None or checkpoint is None:
        missing = [name for name, value in (("--plan", plan), ("--checkpoint", checkpoint)) if value is None]
        raise BitwrightError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
            fix="`bitwright quantize WORKLOAD -o DIR` writes both",
        )
    if not checkpoint.is_file():
        raise BitwrightError(
            "the checkpoint doesn't exist",
            where=str(checkpoint),
            fix="pass the path of a .safetensors file",
            code="no-such-checkpoint",
        )
    from bitwright.plan import Plan

    return Plan.load(plan), checkpoint
