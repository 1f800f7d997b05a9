"""The state of a run on disk: model, plan, optimizer, averages, observers; exact to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bitwright.arrays import read_tensors
from bitwright.checkpoint import load_checkpoint, read_state, save_state
from bitwright.errors import BitwrightError, CheckpointError, Problem, TrainError
from bitwright.files import write_text
from bitwright.fingerprint import file_fingerprint
from bitwright.train.checkpoints import STATE, Saved, TrainerState
from bitwright.train.packing import pack, unpack
from bitwright.train.precision import word

if TYPE_CHECKING:
    from bitwright.train.run import Run

_FIX = "remove this folder: the checkpoint before it is used then"
# Settings that change nothing about the numbers: a resumed run may have others.
_FREE = {"save_steps", "log_steps", "workers"}


def identity(run: Run) -> dict[str, Any]:
    """What must be the same for a run to go on."""
    fixed = {key: value for key, value in run.config.model_dump().items() if key not in _FREE}
    return {
        "workload": run.workload.name,
        "quantize": word(run.precision),
        "samples": run.data.size,
        "batch per process": run.data.parts[0] if len(set(run.data.parts)) == 1 else run.data.parts,
        **({} if run.compute is None else {"compute": word(run.compute), "simulate": run.simulate}),
        **({} if run.kind is None else {"kinds": run.kinds}),
        "processes": run.ranks.world,
        "init": None if run.init is None else str(run.init),
        "backend": run.backend,
        **{key: value for key, value in run.choices.items() if value not in (None, [], ())},
        **fixed,
    }


def whole_state(run: Run) -> dict[str, Tensor]:
    """The model's state as one process would have it; all ranks must ask."""
    return {name: run.parallel.whole(tensor) for name, tensor in run.model.state_dict().items()}


def writer(run: Run) -> Callable[[Path], None]:
    """Collect the state (with all ranks, where they share it); gives what writes it."""
    tensors: dict[str, Tensor] = {}
    state = TrainerState(
        version=2,
        identity=identity(run),
        step=run.step,
        epoch=run.epoch,
        stale=run.stale,
        stopped_early=run.stopped_early,
        best=run.best,
        metrics=run.metrics,
        scaler=run.scaler.state_dict(),
        optimizer=pack(run.optimizer.state_dict()["state"], tensors, "optimizer"),
        ema=pack(run.ema.average, tensors, "ema") if run.ema is not None else None,
        observers=pack(_plain(run.qat.observer_state()), tensors, "observers") if run.qat is not None else None,
    )
    tensors = {name: run.parallel.whole(tensor).cpu().contiguous() for name, tensor in tensors.items()}
    model = whole_state(run)

    def write(folder: Path) -> None:
        save_state(model, folder / "model.safetensors")
        if run.qat is not None:
            run.qat.plan.save(folder / "plan.yaml")
        save_file(tensors, folder / "state.safetensors")
        files = {file.name: file_fingerprint(file) for file in sorted(folder.iterdir())}
        known = state.model_copy(update={"files": files}).model_dump()
        write_text(folder / STATE, json.dumps(known, indent=1) + "\n")

    return write


def checked(run: Run, saved: Saved) -> TrainerState:
    """The state of a checkpoint; one of another run is refused, with every difference."""
    state = saved.state()
    before, now = state.identity, json.loads(json.dumps(identity(run)))
    problems = [
        Problem(
            what=f"was {before.get(key)!r} when this run was saved",
            where=key,
            value=now.get(key),
            fix=f"use the same settings, or another folder (--init {saved.folder.parents[1]} starts from its weights)",
        )
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]
    if problems:
        raise TrainError(problems, title=f"can't resume {saved.folder.name}: this is another run")
    return state


def restore(run: Run, saved: Saved, state: TrainerState) -> None:
    """Resume from a checkpoint whose model is loaded already."""
    tensors = _tensors(run, saved)
    try:
        _put(run, state, tensors)
    except BitwrightError as error:
        raise saved.damaged(saved.folder / STATE, f"{error.problems[0].where}: {error.problems[0].what}") from error
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        what = f"the state doesn't fit this run: {type(error).__name__}: {error}"
        raise saved.damaged(saved.folder / STATE, what) from error
    run.step, run.epoch, run.stale = state.step, state.epoch, state.stale
    run.stopped_early, run.best, run.metrics = state.stopped_early, state.best, state.metrics
    run.note(f"resumed {saved.folder.name}: {run.step} of {run.steps} steps are done")


def _put(run: Run, state: TrainerState, tensors: dict[str, Tensor]) -> None:
    """Moments, averages and observers."""
    parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
    moments: dict[int, dict[str, Any]] = {}
    for index, known in unpack(state.optimizer, tensors).items():
        like = parameters[int(index)]
        moments[int(index)] = {
            name: run.parallel.part(value, like) if isinstance(value, Tensor) else value
            for name, value in known.items()
        }
    run.optimizer.load_state_dict({**run.optimizer.state_dict(), "state": moments})
    if run.ema is not None:
        _load_average(run, unpack(state.ema, tensors))
    if run.qat is not None:
        run.qat.load_observer_state(unpack(state.observers, tensors), state.epoch)
    if state.scaler:
        run.scaler.load_state_dict(state.scaler)


def load_best(run: Run, saved: Saved) -> None:
    """The model of another checkpoint of this run, averaged if averages are kept."""
    if not run.parallel.measures_together:
        load_checkpoint(run.model, saved.folder / "model.safetensors")
    else:
        now = run.model.state_dict()
        with torch.no_grad():
            for name, tensor in read_state(saved.folder / "model.safetensors").items():
                now[name].copy_(run.parallel.part(tensor.to(run.device), now[name]))
    if run.ema is not None:
        _load_average(run, unpack(saved.state().ema, _tensors(run, saved)))
        run.ema.put(run.model)


def _load_average(run: Run, average: dict[str, Tensor]) -> None:
    assert run.ema is not None
    run.ema.average = {name: run.parallel.part(average[name], now) for name, now in run.ema.average.items()}


def _tensors(run: Run, saved: Saved) -> dict[str, Tensor]:
    file = saved.folder / "state.safetensors"
    found = read_tensors(file, fix=_FIX, error=CheckpointError, what="the checkpoint")
    return {name: tensor.to(run.device) for name, tensor in found.items()}


def _plain(observers: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Without what the plan says already."""
    return {site: {k: v for k, v in state.items() if k != "format"} for site, state in observers.items()}
