"""Run PTQ steps unit by unit. With a folder, an interrupted run resumes after the last finished unit."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bitwright.core.display import Progress
from bitwright.core.documents import read_json, read_tensors
from bitwright.core.errors import BitwrightError, CheckpointError, PlanError, Problem
from bitwright.core.files import file_fingerprint, fingerprint, replacing, scratch_folder, write_text, writing
from bitwright.core.interrupts import safe_point, uninterrupted
from bitwright.core.tensor_tree import tensors_in
from bitwright.ptq.calibration import find_ranges
from bitwright.ptq.distributed import is_distributed
from bitwright.ptq.step import PtqContext, Step, require_rereadable
from bitwright.quantizers import CONTAINER

progress_log = getLogger("bitwright.progress")
PROGRESS = "progress.json"
_FLOAT = "float.safetensors"
_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of one step."""

    step: str
    units: int
    seconds: float
    """Time in this process, without units finished by an earlier one."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Skipped operators or sites, with the reason."""


class Backup:
    """The parameters and buffers of a model in temporary files, so that keeping them needs no memory."""

    def __init__(self, model: nn.Module) -> None:
        self._files = ExitStack()
        folder = self._files.enter_context(scratch_folder())
        self._paths: dict[str, Path] = {}
        for number, (name, tensor) in enumerate(_untied(model).items()):
            self._paths[name] = path = folder / str(number)
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            with writing(path, needed=data.numel()):
                data.numpy().tofile(path)

    @torch.no_grad()
    def restore(self, model: nn.Module) -> None:
        """Copy the saved values into the model."""
        state = model.state_dict()
        for name, path in self._paths.items():
            data = np.fromfile(path, np.uint8)
            if data.size:
                tensor = state[name]
                tensor.copy_(torch.from_numpy(data).view(tensor.dtype).reshape(tensor.shape))

    def close(self) -> None:
        """Remove the files."""
        self._files.close()


def run_steps(
    context: PtqContext,
    steps: Sequence[Step],
    *,
    folder: Path | None = None,
    keep: bool = False,
    progress: Progress | None = None,
) -> tuple[StepResult, ...]:
    """Run steps on float weights, calibrate, then run steps on the calibrated model, which is changed in place.

    The random numbers of each unit depend only on the seed. A resumed run is therefore bit-identical if the data comes
    in the same order. `folder` stores the state during the run. With `keep` it remains afterwards, and the caller
    removes it after saving the model.
    """
    if is_distributed(None):
        raise PlanError(
            [
                Problem(
                    what="PTQ steps support a single process only",
                    fix="run them before initializing torch.distributed",
                    code="steps-distributed",
                )
            ]
        )
    require_rereadable(context.data)
    problems = [problem for step in steps for problem in step.problems(context)]
    units = [[str(unit) for unit in step.units(context)] for step in steps]
    if problems:
        raise PlanError(problems, title="the steps can't run on this model")
    state = _State(folder, context, steps, units)
    done, total, number = state.done, sum(map(len, units)), 0
    early = sum(len(names) for step, names in zip(steps, units, strict=True) if not step.needs_ranges)
    if 0 < done <= early:
        state.load(context.model)
    calibrated = False
    results: list[StepResult] = []
    for index, (step, names) in enumerate(zip(steps, units, strict=True)):
        if step.needs_ranges and not calibrated:
            calibrated = True
            _calibrate(context, state, progress, steps, resumed=done > early)
        context.skipped = {}
        context.cache = {}
        step.units(context)  # fills `skipped`
        begin = time.perf_counter()
        try:
            for unit in names:
                number += 1
                if number <= done:
                    continue
                if progress is not None:
                    progress(number - 1, total, f"{step.name}: {unit}")
                safe_point()
                _seed(context, index, unit)
                step.run(context, unit)
                with uninterrupted():
                    state.save(context.model, number)
                progress_log.debug("unit %d of %d finished: %s %s", number, total, step.name, unit)
        finally:
            step.finish(context)
        seconds = time.perf_counter() - begin
        results.append(StepResult(step=str(step), units=len(names), seconds=seconds, skipped=dict(context.skipped)))
    if not calibrated:
        find_ranges(context.model, context.data, progress=progress)
    if progress is not None:
        progress(total, total, "PTQ steps finished")
    if not keep:
        state.forget()
    return tuple(results)


def _calibrate(
    context: PtqContext, state: _State, progress: Progress | None, steps: Sequence[Step], *, resumed: bool
) -> None:
    """Set ranges, and store the current float model as the reference of later steps that need it."""
    if resumed:
        state.load(context.model, _FLOAT)
    if any(step.needs_ranges and step.needs_reference for step in steps):
        context.reference = {source: tensor.detach().clone() for source, tensor in context.current_tensors().items()}
    if not resumed:
        state.keep_float(context.model)
    find_ranges(context.model, context.data, progress=progress)
    if resumed:
        state.load(context.model)


def _seed(context: PtqContext, index: int, unit: str) -> None:
    digest = hashlib.sha256(f"{context.seed} {index} {unit}".encode()).digest()
    context.generator.manual_seed(int.from_bytes(digest[:7], "big"))


class _State:
    """The folder of a run: its progress and the model state at that point."""

    def __init__(self, folder: Path | None, context: PtqContext, steps: Sequence[Step], units: list[list[str]]) -> None:
        self.folder = folder
        self.done = 0
        self.files: dict[str, str] = {}
        """File name → fingerprint of the valid state."""
        if folder is None:
            return
        self.identity = _identity(context, steps, units)
        file = folder / PROGRESS
        if file.is_file():
            known = self._read(file, sum(map(len, units)))
            problems = [
                Problem(
                    what="differs from the interrupted run",
                    where=key,
                    value=value,
                    fix=f"rerun with the same settings, or remove {folder} to start over",
                    code="resume-mismatch",
                )
                for key, value in self.identity.items()
                if known["identity"].get(key) != value
            ]
            if problems:
                raise PlanError(problems, title="can't resume: the folder contains another unfinished run")
            self.done, self.files = known["done"], known["files"]
            for name in self.files:
                self._verify(name)
        elif any(old.name != _unit_file(1) for old in folder.glob("unit-*.safetensors")):
            # a single first file is left by a process killed before it wrote the progress file
            raise self._damaged(file, "saved state exists, but the progress file is missing")

    def _read(self, file: Path, units: int) -> dict[str, Any]:
        """Read and validate the progress file."""
        try:
            known: Any = read_json(file, what="the progress of these steps")
        except BitwrightError as error:
            raise self._damaged(file, error.problems[0].what) from error
        if not isinstance(known, dict) or not isinstance(known.get("identity"), dict):
            raise self._damaged(file, "it doesn't identify a run")
        version = known["identity"].get("version")
        if version != _VERSION:
            raise self._damaged(file, f"it has version {version!r}, but this Bitwright reads version {_VERSION}")
        done, files = known.get("done"), known.get("files")
        if type(done) is not int or not 0 < done <= units:
            raise self._damaged(file, f"done is {done!r}, but there are {units} units")
        if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
            raise self._damaged(file, "it has no hashes of the saved state")
        wanted = _unit_file(done)
        if wanted not in files or not set(files) <= {wanted, _FLOAT}:
            raise self._damaged(file, f"it lists {sorted(files)} instead of {wanted}")
        found: dict[str, Any] = known
        return found

    def _verify(self, name: str) -> None:
        """Compare the file with its recorded hash."""
        assert self.folder is not None
        path = self.folder / name
        try:
            same = file_fingerprint(path) == self.files[name]
        except OSError as error:
            raise self._damaged(path, f"it can't be read: {error}") from error
        if not same:
            raise self._damaged(path, "its contents changed after it was saved")

    def _damaged(self, path: Path, what: str) -> CheckpointError:
        return CheckpointError(
            f"can't resume: {what}",
            where=str(path),
            fix=f"remove {self.folder} to start over",
            code="resume-damaged",
        )

    def save(self, model: nn.Module, done: int) -> None:
        """Write the state, then the progress file: the process may be killed between any two lines."""
        if self.folder is None:
            return
        name = _unit_file(done)
        self._write(model, name)
        self.files = {kept: text for kept, text in self.files.items() if kept in (name, _FLOAT)}
        known = {"done": done, "identity": self.identity, "files": self.files}
        write_text(self.folder / PROGRESS, json.dumps(known, indent=1) + "\n")
        for old in self.folder.glob("unit-*.safetensors"):
            if old.name != name:
                old.unlink()

    def keep_float(self, model: nn.Module) -> None:
        """Store the float model that later steps compare with."""
        if self.folder is not None:
            self._write(model, _FLOAT)

    def load(self, model: nn.Module, name: str | None = None) -> None:
        """Load a saved state into the model."""
        assert self.folder is not None
        path = self.folder / (name or _unit_file(self.done))
        if path.name not in self.files:
            raise self._damaged(path, "the progress file doesn't list it")
        try:
            state = read_tensors(path, fix="", what="the saved state of these steps")
        except BitwrightError as error:
            raise self._damaged(path, error.problems[0].what) from error
        now = _untied(model)
        missing = [key for key in now if key not in state]
        other = [key for key in state if key in now and _kind(state[key]) != _kind(now[key]) and not _ours(key)]
        strange = [key for key in state if key not in now and not _ours(key)]
        for keys, what in ((missing, "lacks"), (strange, "has unknown"), (other, "has another shape or dtype of")):
            if keys:
                raise self._damaged(path, f"it {what} {', '.join(keys[:3])}")
        model.load_state_dict(state, strict=False)

    def forget(self) -> None:
        """Remove the folder."""
        if self.folder is not None and self.folder.is_dir():
            shutil.rmtree(self.folder)

    def _write(self, model: nn.Module, name: str) -> None:
        assert self.folder is not None
        state = _untied(model)
        needed = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        with replacing(self.folder / name, needed=needed) as temporary:
            save_file({key: tensor.clone().contiguous() for key, tensor in state.items()}, temporary)
            self.files[name] = file_fingerprint(Path(temporary))


def _unit_file(done: int) -> str:
    return f"unit-{done:06d}.safetensors"


def _ours(key: str) -> bool:
    """Whether the key belongs to a quantizer; its shape depends on calibration, and the quantizer validates it."""
    return key.startswith(f"{CONTAINER}.")


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _untied(model: nn.Module) -> dict[str, Tensor]:
    """Each tensor once: loading one name of a tied tensor sets the others."""
    seen: set[tuple[int, torch.Size]] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape)
        if tensor.numel() == 0 or key not in seen:
            seen.add(key)
            found[name] = tensor.detach()
    return found


def _data_fingerprint(context: PtqContext) -> str:
    """A hash of all calibration data in order; one pass over the data without computation."""
    digest = hashlib.sha256()
    for batch in context.data:
        for path, tensor in tensors_in(batch):
            digest.update(f"{path} {tuple(tensor.shape)} {tensor.dtype} {fingerprint(tensor)}\n".encode())
        digest.update(b"batch\n")
    return digest.hexdigest()[:16]


def _identity(context: PtqContext, steps: Sequence[Step], units: list[list[str]]) -> dict[str, Any]:
    """The properties that must be equal to resume a run."""
    return {
        "version": _VERSION,
        "steps": [f"{step.name} {step.model_dump_json()}" for step in steps],
        "units": fingerprint(json.dumps(units)),
        "seed": context.seed,
        "plan": fingerprint(context.plan.to_yaml()),
        "weights": fingerprint(*context.model.state_dict().values()),
        "calibration data": _data_fingerprint(context),
    }
