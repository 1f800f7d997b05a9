"""`bitwright train`: train in float, or with `--precision` or `--plan` in low precision."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from bitwright.cli.options import (
    DataOption,
    FolderOption,
    IterationsOption,
    PrecisionOption,
    exclude,
    open_workload,
    option,
    require,
)
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
    torchrun --nproc-per-node 2 -m bitwright train my_workload.py:net --adaptive cluster.yaml -o runs/adaptive
    bitwright train config.yaml --data imagenet --checkpoint resnet18.pth -o runs/mqbench
    """,
)
@with_choices
@with_settings(TrainConfig, nested=("recipe",))
def train(
    out: Out,
    output: FolderOption,
    settings: TrainConfig,
    backend: str | None,
    plan: Any,
    choices: Any,
    workload: Annotated[
        str | None,
        typer.Argument(metavar="WORKLOAD", help="A workload, or the config.yaml of MQBench's benchmark."),
    ] = None,
    config: Annotated[Path | None, option("The config.yaml, as in MQBench's command.", "--config")] = None,
    data: DataOption = None,
    iterations: IterationsOption = None,
    precision: PrecisionOption = None,
    device_kind: Annotated[
        str | None,
        option("The device kind of this process in the plan, or one for each rank: fast,slow.", "--device-kind"),
    ] = None,
    simulate: Annotated[bool, option("Round in float instead of running kernels.", "--simulate")] = False,
    adaptive: Annotated[
        Path | None, option("Plan for the ranks that are present, and again if one drifts.", metavar="CLUSTER.YAML")
    ] = None,
    scores: Annotated[Path | None, option("With --adaptive: sensitivity scores (default: plan batches only).")] = None,
    init: Annotated[
        Path | None, option("Float weights to start from: a run's folder, or a file.", "--init", "--checkpoint")
    ] = None,
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

    Quantizers are added before DDP, the optimizer and the compiler. Start several processes with torchrun. After an
    interruption, rerun the command to resume from the last checkpoint; the result is bit-identical.
    A config.yaml of MQBench sets the network, its quantizers and the whole training; --iterations shortens it.
    """
    require("WORKLOAD", workload or config, "file.py:function, a built-in workload, or a config.yaml of MQBench")
    from bitwright.cluster.replanning import ClusterReplanner
    from bitwright.importers.mqbench import train_mqbench
    from bitwright.reports.files import TrainReport
    from bitwright.training import Callback, TensorBoard, Trainer, tensorboard_problem

    speaks = os.environ.get("RANK", "0") == "0"
    if config is None and str(workload).endswith((".yaml", ".yml")):
        config, workload = Path(str(workload)), None
    ours = {"--precision": precision, "--plan": plan, "--backend": backend, "options of plans": choices}
    if config is not None:
        ours |= {"WORKLOAD": workload, "--device-kind": device_kind, "--simulate": simulate, "--adaptive": adaptive}
        exclude("config.yaml", ours)
    else:
        exclude("a workload", {"--data": data, "--iterations": iterations})
    require("--adaptive", adaptive or scores is None, "--adaptive cluster.yaml, to which --scores belong")
    callbacks: list[Callback] = [TrainReport()]
    if tensorboard or (tensorboard is None and tensorboard_problem() is None):
        callbacks.append(TensorBoard(output / "tensorboard"))
    found = None if config is not None else open_workload(out, str(workload))
    with out.progress("training") as progress:
        common: Any = {"config": settings, "out": output, "resume": resume or "auto", "device": device}
        common |= {"callbacks": callbacks, "progress": progress if speaks else None}
        if found is None:
            result = train_mqbench(Path(str(config)), data=data, iterations=iterations, checkpoint=init, **common)
        else:
            own: Any = {"kind": device_kind, "simulate": simulate, "backend": backend, "init": init}
            if adaptive is not None:
                own["adaptive"] = ClusterReplanner(adaptive, scores, keep_float=choices.pop("keep_float", ()))
            kernels = plan is not None and (plan.trains_kernels or adaptive is not None)
            result = Trainer(
                found,
                precision=precision if plan is None or kernels else plan,
                compute=plan if kernels else None,
                **own,
                **common,
                **choices,
            ).fit()
    if speaks:
        out.show(result, output=output)
