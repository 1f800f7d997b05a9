"""Run files of MQBench's zoo: as a grid of one row, and the network and images that they name as a workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from bitwright.backends import backend
from bitwright.bench.grid import GridConfig
from bitwright.bench.grid_row import mismatches, plan_of
from bitwright.core.arguments import strict
from bitwright.core.display import Progress
from bitwright.core.errors import BitwrightError, PlanError, Problem, TrainError, did_you_mean
from bitwright.core.registry import NETWORKS, WORKLOADS, Importer
from bitwright.graph import capture
from bitwright.importers.key_table import Imported
from bitwright.importers.mqbench.settings import mqbench_settings, read_mqbench
from bitwright.importers.mqbench.zoo import ZooConfig
from bitwright.importers.mqbench.zoo_workload import file_workload, weights_note, workers, zoo_config, zoo_workload
from bitwright.training import Callback, TrainConfig, Trainer, TrainResult
from bitwright.training.optimizer import Recipe
from bitwright.training.run import TrainingRun
from bitwright.workload import load_workload

__all__ = ["MQBENCH", "is_mqbench", "train_mqbench", "translate"]

#: The workload if the file names no network, as in the example of MQBench's documentation.
DEFAULT_WORKLOAD = "digits"
# The values of the published files, for the sections that a file leaves out.
_USUAL: dict[str, dict[str, Any]] = {
    "optimizer": {"type": "SGD", "kwargs": {"nesterov": True, "momentum": 0.9, "weight_decay": 1e-4}},
    "lr_scheduler": {"type": "Cosine", "kwargs": {"base_lr": 0.004}},
}
_USUAL_SMOOTHING = 0.1

# Settings of a run that a file doesn't have.
_FREE = {"workers", "fuse", "compile", "channels_last", "amp", "parallel", "save_steps", "log_steps"}


def is_mqbench(data: Mapping[str, Any]) -> bool:
    """Whether the data is that of a file of MQBench's zoo."""
    return "qparams" in data


def translate(
    data: Mapping[str, Any],
    *,
    where: str,
    workload: str | None = None,
    images: str | None = None,
    iterations: int | None = None,
) -> dict[str, Any]:
    """The data of the equivalent `GridConfig`, with all settings of the file.

    `images` is the folder of images, instead of the file's paths. `workload` replaces network and data. `iterations`
    replaces `max_iter`.
    """
    absent = [key for key in (*_USUAL, "label_smooth") if key not in data]
    filled = {**_USUAL, "label_smooth": _USUAL_SMOOTHING, **data}
    found: Imported[ZooConfig] = read_mqbench(filled, where=where)
    config = found.config
    notes = [f"{note.where}: {note.what}" for note in found.notes]
    if absent:
        notes.append(f"{', '.join(absent)}: missing, so the usual values of the published files are used")
    model, problems = _model(config, Path(where).name, workload, images, notes)
    try:
        recipe = _recipe(config, iterations)
    except ValueError as error:
        problems.append(Problem(what=str(error), where="optimizer", code="invalid-value"))
    if problems:
        raise PlanError(problems, title=f"{where} (an MQBench file) has problems")
    settings = mqbench_settings(config)
    assert settings is not None  # files with qparams are quantized
    training = {
        "recipe": recipe.model_dump(exclude_defaults=True),
        "batch": config.data.batch_size,
        "label_smoothing": config.label_smooth,
        **({"ema": config.ema.kwargs.decay} if config.ema.enable else {}),
    }
    algorithm = {
        "name": settings.activations,
        "w_method": settings.weights,
        "a_method": settings.activations,
        "observer": settings.observer,
        "weight_observer": settings.weight_observer,
    }
    return {
        "name": "mqbench",
        "models": [model],
        "algorithms": [algorithm],
        "backends": [settings.backend],
        "bits": [settings.bits],
        "edges": settings.first_last_bits,
        "bnfold": settings.fold,
        "seeds": [config.seed],
        "training": training,
        "beyond": "adapt",  # MQBench also simulates what the hardware can't run
        "notes": notes,
    }


def _model(
    config: ZooConfig, file: str, workload: str | None, images: str | None, notes: list[str]
) -> tuple[dict[str, str], list[Problem]]:
    """The grid's model, and its problems."""
    named = None if config.model is None else config.model.type
    if workload is not None or named is None or named not in NETWORKS:
        reference = workload or named or DEFAULT_WORKLOAD
        notes.append(f"the workload {reference} has its own network and data: model and data.train, data.test unused")
        problems = []
        if workload is None and named is not None and named not in WORKLOADS and ":" not in named:
            fix = did_you_mean(named, [*NETWORKS.names(), *WORKLOADS.names()])
            what = "unknown network"
            problems.append(Problem(what=what, where="model.type", value=named, fix=fix, code="unknown-name"))
        if images is not None:
            what, fix = "the workload has its own data", "leave out the folder of images"
            problems.append(Problem(what=what, where="data", value=images, fix=fix, code="ignored-argument"))
        return {"workload": reference}, problems
    return {"name": named, "workload": file if images is None else f"{file}:{images}"}, []


def _recipe(config: ZooConfig, iterations: int | None) -> Recipe:
    own = config.lr_scheduler.kwargs
    count = iterations or own.max_iter or config.data.max_iter
    epochs = own.max_epoch or config.data.max_epoch
    train = config.data.train
    by_iteration = train is None or train.sampler.type == "distributed_iteration"
    return Recipe(
        iterations=count,
        epochs=None if count else epochs or 1,
        validate_every=config.saver.val_freq,
        sampler="iterations" if by_iteration else "epochs",
        optimizer=config.optimizer.settings,
        groups=config.optimizer.groups,
        schedule=config.lr_scheduler.rates,
        keep_checkpoints=config.saver.save_many,
    )


MQBENCH = Importer(target="grid", recognizes=is_mqbench, translate=translate, workload=file_workload)


@strict
def train_mqbench(
    path: str | Path,
    *,
    data: str | Path | None = None,
    checkpoint: str | Path | None = None,
    iterations: int | None = None,
    workload: str | None = None,
    config: TrainConfig | None = None,
    out: str | Path | None = None,
    resume: bool | Literal["auto"] = False,
    callbacks: Sequence[Callback] = (),
    progress: Progress | None = None,
    device: str | None = None,
) -> TrainResult:
    """Train as a `config.yaml` of MQBench's benchmark says: its network, images, quantizers, schedule and seed.

    `data` is a folder of images, if the file's `root_dir` and `meta_file` are on another machine: it has `train` and
    `val` (or serves for both) with one subfolder per class, or with lists `train.txt` and `val.txt` of lines
    `path label`. `checkpoint` has the float weights; without one, the network starts untrained, and a note says so.
    `iterations` replaces `max_iter`: the warm-up keeps its length, and the curve after it ends at the last iteration.
    `workload` replaces network and images. `config` may set what the file doesn't: the number of workers (by default
    the file's), amp, compile and when to save. The other arguments are those of `Trainer`.
    """
    file = Path(path)
    own = zoo_config(file)
    grid = GridConfig.load(file, workload=workload, data=data, iterations=iterations)
    (task,) = grid.tasks()
    settings = task.training.config(
        seed=task.seed,
        workers=workers(own) if workload is None else 0,
        log_steps=own.saver.print_freq,
        **_chosen(config),
    )
    if workload is None and task.model.name == (None if own.model is None else own.model.type):
        images = None if data is None else Path(data)
        found = zoo_workload(own, folder=file.parent, data=images)
        weights = weights_note(own, file.parent, None if checkpoint is None else Path(checkpoint))
    else:
        found = load_workload(task.model.workload)
        weights = "the weights are those of the workload" if checkpoint is None else f"the weights are {checkpoint}'s"
    table = backend(task.backend)
    graph = capture(found.model, found.inputs)
    plan, beyond = plan_of(task, table, graph, found.name)
    notes = [weights, *grid.notes, *([] if beyond is None else [beyond]), *_length(own, task.training.recipe)]
    result = Trainer(
        found,
        precision=plan,
        backend=task.backend if beyond is None else "academic",  # the table that allows everything
        config=settings,
        out=out,
        init=checkpoint,
        resume=resume,
        callbacks=[_Notes(notes), *callbacks],
        progress=progress,
        device=device,
    ).fit()
    assert result.quantized is not None
    wrong = mismatches(result.model, task, result.quantized.plan, table, graph)
    if wrong:
        what = f"the model differs from the file's settings: {'; '.join(wrong[:5])}"
        raise BitwrightError(what, where=str(file), code="row-mismatch")
    return result


def _chosen(config: TrainConfig | None) -> dict[str, Any]:
    """The settings that the caller has set. The file's can't be replaced."""
    given = {} if config is None else {name: getattr(config, name) for name in config.model_fields_set}
    fix = "change the file"
    problems = [
        Problem(what="the file has this setting", where=name, value=value, fix=fix, code="ignored-argument")
        for name, value in given.items()
        if name not in _FREE
    ]
    if problems:
        raise TrainError(problems)
    return given


def _length(config: ZooConfig, recipe: Recipe | None) -> list[str]:
    """How the run differs from that of the file."""
    own = config.lr_scheduler.kwargs
    if recipe is None or recipe.iterations is None or recipe.iterations == own.max_iter:
        return []
    whole = "the file has no max_iter" if own.max_iter is None else f"the file has {own.max_iter}"
    ends = f"{own.warmup_steps} iterations of warm-up as in the file, and the rest of the schedule ends at the last one"
    if own.warmup_steps >= recipe.iterations:
        ends = f"the run ends within the warm-up of {own.warmup_steps} iterations"
    return [f"{recipe.iterations} iterations instead of max_iter ({whole}): {ends}"]


class _Notes(Callback):
    """Adds notes to a run."""

    def __init__(self, notes: Sequence[str]) -> None:
        self.notes = notes

    def on_start(self, run: TrainingRun) -> None:
        """Add the notes."""
        for note in self.notes:
            run.note(note)
