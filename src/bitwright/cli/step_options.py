"""Options that the verbs about training steps share: profile, predict and plan-cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

BatchOption = Annotated[
    int | None,
    typer.Option("--batch", min=1, help="Samples per step (default: the loader's, else 64).", show_default=False),
]
ClockOption = Annotated[
    str,
    typer.Option("--clock", help="wall, or cpu: the CPU time of one thread, which other processes don't change."),
]
LayoutOption = Annotated[
    bool, typer.Option("--channels-last", help="Keep images as NHWC in memory, as `train --channels-last` does.")
]
PrecisionOption = Annotated[
    str | None,
    typer.Option("--precision", metavar="NAME", help="Quantize the model: int8, w4a8, ….", show_default=False),
]
PlanOption = Annotated[
    Path | None, typer.Option("--plan", metavar="FILE", help="Follow this plan file.", show_default=False)
]
