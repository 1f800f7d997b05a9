"""`bitwright train`: train in float, or with `--precision` or `--plan` in low precision."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from bitwright.cli.options import FolderOption, PrecisionOption, WorkloadArg, open_workload, option
from bitwright.cli.out import Out
from bitwright.cli.settings import with_choices, with_settings
from bitwright.cli.verb import verb
from bitwright.training.config import TrainConfig


@verb(
    "train",
    examples="""
    bitwright train digits-untrained --epochs 6 --lr 0.05 -o runs/float
    bitwright train digits-untrained --epochs 2 --init runs/float --precision int8 -o runs/int8
    bitwright train my_workload.py:net --precision int4 --distill 0.5 --epochs 3 -o runs/int4
    bitwright train my_workload.py:net --plan kernels.yaml --channels-last -o runs/kernels
    torchrun --nproc-per-node 2 -m bitwright train my_workload.py:net --precision int8 -o runs/two
    """,
)
@with_choices
@with_settings(TrainConfig)
def train(
    out: Out,
    workload: WorkloadArg,
    output: FolderOption,
    settings: TrainConfig,
    backend: str | None,
    plan: Any,
    choices: Any,
    precision: PrecisionOption = None,
    device_kind: Annotated[
        str | None,
        option("The device kind of this process in the plan, or one for each rank: fast,slow.", "--device-kind"),
    ] = None,
    simulate: Annotated[bool, option("Round in float instead of running kernels.", "--simulate")] = False,
    init: Annotated[Path | None, option("Float weights to start from: a run's folder, or a file.")] = None,
    resume: Annotated[
        bool, option("Continue the run in this folder (the default for equal settings).", "--resume")
    ] = False,
    tensorboard: Annotated[
        bool | None,
        option(
            "Write TensorBoard logs into the folder (default: if it is installed).", "--tensorboard/--no-tensorboard"
        ),
    ] = None,
    device: Annotated[str | None, option("cpu, cuda, cuda:1, … (default: an accelerator if there is one).")] = None,
) -> None:
    """Train a workload, in float, with quantizers (--precision, --plan) or with low-precision kernels (--plan).

    Quantizers are in place before DDP, the optimizer and the compiler. Several processes: start it with torchrun.
    Rerun the same command after an interruption or a kill: it resumes from the last checkpoint, to the bit.
    """
    from bitwright.reports.files import TrainReport
    from bitwright.training import Callback, TensorBoard, Trainer, tensorboard_problem

    speaks = os.environ.get("RANK", "0") == "0"
    found = open_workload(out, workload)
    callbacks: list[Callback] = [TrainReport()]
    missing = tensorboard_problem()
    if tensorboard or (tensorboard is None and missing is None):
        callbacks.append(TensorBoard(output / "tensorboard"))
    elif tensorboard is None and speaks:
        out.note(f"no TensorBoard logs: {missing}")
    with out.progress("training") as progress:
        result = Trainer(
            found,
            precision=precision if plan is None or plan.trains_kernels else plan,
            compute=plan if plan is not None and plan.trains_kernels else None,
            kind=device_kind,
            simulate=simulate,
            backend=backend,
            config=settings,
            out=output,
            init=init,
            resume=resume or "auto",
            callbacks=callbacks,
            progress=progress if speaks else None,
            device=device,
            **choices,
        ).fit()
    if speaks:
        out.show(result, output=output)
