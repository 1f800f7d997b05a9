"""Run steps one unit after the other; with a folder, a killed run goes on from the last unit that was finished."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bitwright.errors import PlanError, Problem
from bitwright.files import replacing, write_text
from bitwright.fingerprint import fingerprint
from bitwright.graph.tree import tensors_in
from bitwright.ptq.calibrate import calibrate
from bitwright.ptq.ranks import several
from bitwright.ptq.step import Step
from bitwright.ptq.work import Work, need_data

PROGRESS = "progress.json"
_FLOAT = "float.safetensors"
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What became of one step."""

    step: str
    units: int
    seconds: float
    """In this process; units that were finished before aren't counted."""
    skipped: dict[str, str] = field(default_factory=dict)
    """What was left alone, with the reason."""


@dataclass(frozen=True, kw_only=True)
class At:
    """Where the work stands, for a progress bar."""

    done: int
    total: int
    step: str
    unit: str


Watch = Callable[[At], None]


def run_steps(
    work: Work,
    steps: Sequence[Step],
    *,
    folder: Path | None = None,
    calibrating: Callable[[int], None] | None = None,
    watch: Watch | None = None,
) -> tuple[Ran, ...]:
    """Steps on float weights, calibration, steps on the calibrated model; the model is changed in place.

    Every unit has random numbers of its own, from the seed: whether a run was interrupted makes no difference to the
    last bit, if the data comes in the same order again. `folder` has the state while the run lasts.
    """
    if several(None):
        what = "PTQ steps run in one process"
        raise PlanError([Problem(what=what, fix="run them before torch.distributed is initialised")])
    need_data(work.data)
    problems = [problem for step in steps for problem in step.problems(work)]
    units = [[str(unit) for unit in step.units(work)] for step in steps]
    if problems:
        raise PlanError(problems, title="the steps can't run on this model")
    state = _State(folder, work, steps, units)
    done, total, number = state.done, sum(map(len, units)), 0
    early = sum(len(names) for step, names in zip(steps, units, strict=True) if not step.needs_ranges)
    if 0 < done <= early:
        state.load(work.model)
    calibrated = False
    results: list[Ran] = []
    for index, (step, names) in enumerate(zip(steps, units, strict=True)):
        if step.needs_ranges and not calibrated:
            calibrated = True
            _calibrate(work, state, calibrating, resumed=done > early)
        work.skipped = {}
        work.kept = {}
        step.units(work)  # notes what it leaves alone
        begin = time.perf_counter()
        try:
            for unit in names:
                number += 1
                if number <= done:
                    continue
                if watch is not None:
                    watch(At(done=number - 1, total=total, step=step.name, unit=unit))
                _seed(work, index, unit)
                step.run(work, unit)
                state.save(work.model, number)
        finally:
            step.finish(work)
        seconds = time.perf_counter() - begin
        results.append(Ran(step=str(step), units=len(names), seconds=seconds, skipped=dict(work.skipped)))
    if not calibrated:
        calibrate(work.model, work.data, progress=calibrating)
    if watch is not None:
        watch(At(done=total, total=total, step="", unit=""))
    state.forget()
    return tuple(results)


def _calibrate(work: Work, state: _State, progress: Callable[[int], None] | None, *, resumed: bool) -> None:
    """Ranges, and the float model as it is now: what later steps are to come near to."""
    if resumed:
        state.load(work.model, _FLOAT)
    work.reference = {source: tensor.detach().clone() for source, tensor in work.live().items()}
    if not resumed:
        state.keep_float(work.model)
    calibrate(work.model, work.data, progress=progress)
    if resumed:
        state.load(work.model)


def _seed(work: Work, index: int, unit: str) -> None:
    digest = hashlib.sha256(f"{work.seed} {index} {unit}".encode()).digest()
    work.generator.manual_seed(int.from_bytes(digest[:7], "big"))


class _State:
    """The folder of a run: how far it is, and the model as it was then."""

    def __init__(self, folder: Path | None, work: Work, steps: Sequence[Step], units: list[list[str]]) -> None:
        self.folder = folder
        self.done = 0
        if folder is None:
            return
        self.identity = _identity(work, steps, units)
        file = folder / PROGRESS
        if file.is_file():
            known = json.loads(file.read_text(encoding="utf-8"))
            problems = [
                Problem(
                    what="was another one when this run was begun",
                    where=key,
                    value=value,
                    fix=f"run the same again, or remove {folder} to begin anew",
                )
                for key, value in self.identity.items()
                if known["identity"].get(key) != value
            ]
            if problems:
                raise PlanError(problems, title="can't go on: the unfinished steps there are those of another run")
            self.done = known["done"]

    def save(self, model: nn.Module, done: int) -> None:
        """The state first, then that it counts: a process may be killed between any two lines."""
        if self.folder is None:
            return
        name = f"unit-{done:06d}.safetensors"
        self._write(model, name)
        write_text(self.folder / PROGRESS, json.dumps({"done": done, "identity": self.identity}, indent=1) + "\n")
        for old in self.folder.glob("unit-*.safetensors"):
            if old.name != name:
                old.unlink()

    def keep_float(self, model: nn.Module) -> None:
        """The float model that later steps compare with."""
        if self.folder is not None:
            self._write(model, _FLOAT)

    def load(self, model: nn.Module, name: str | None = None) -> None:
        """Put a saved state into the model."""
        assert self.folder is not None
        model.load_state_dict(load_file(self.folder / (name or f"unit-{self.done:06d}.safetensors")), strict=False)

    def forget(self) -> None:
        """All is done."""
        if self.folder is not None and self.folder.is_dir():
            shutil.rmtree(self.folder)

    def _write(self, model: nn.Module, name: str) -> None:
        assert self.folder is not None
        with replacing(self.folder / name) as temporary:
            save_file(_untied(model), temporary)


def _untied(model: nn.Module) -> dict[str, Tensor]:
    """Each tensor once: what is tied comes back with its other name."""
    seen: set[tuple[int, torch.Size]] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape)
        if tensor.numel() == 0 or key not in seen:
            seen.add(key)
            found[name] = tensor.detach().clone().contiguous()
    return found


def _identity(work: Work, steps: Sequence[Step], units: list[list[str]]) -> dict[str, Any]:
    """What must be the same for a run to go on."""
    return {
        "version": _VERSION,
        "steps": [f"{step.name} {step.model_dump_json()}" for step in steps],
        "units": fingerprint(json.dumps(units)),
        "seed": work.seed,
        "plan": fingerprint(work.plan.to_yaml()),
        "weights": fingerprint(*work.model.state_dict().values()),
        "first batch": fingerprint(*(tensor for _, tensor in tensors_in(next(iter(work.data))))),
    }
