"""`export_workload` and `check_workload`: artefacts of a workload's model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bitwright.core import formatting
from bitwright.core.arguments import Count, strict
from bitwright.core.display import Progress, Summarized, phases
from bitwright.core.errors import ArtefactError, BitwrightError, PlanError
from bitwright.core.output_folder import locked_file, replacing_with_siblings
from bitwright.core.registry import ARTEFACTS, RUNTIMES
from bitwright.deployment import Artefact, Check, Runtime, check, default_runtime, export, export_float, open_runtime
from bitwright.deployment import readers as runtimes_that_read
from bitwright.deployment.artefacts.base import QDQ
from bitwright.deployment.artefacts.weights import weight_file
from bitwright.deployment.decoder import is_decoder
from bitwright.deployment.export import is_folder, onnx_path
from bitwright.deployment.onnx_files import stored_bytes
from bitwright.deployment.runtimes.base import suffixes
from bitwright.graph import capture
from bitwright.plan import Plan
from bitwright.ptq.quantize import SavedModel, load_prepared
from bitwright.workload import Workload, open_workload
from bitwright.workload.data import probes, rebatched

__all__ = ["ExportedFile", "check_workload", "export_workload"]


@dataclass(frozen=True, kw_only=True)
class ExportedFile(Summarized):
    """The result of `export_workload`."""

    path: Path
    bytes: int
    runtime: str | None = None
    """The runtime that reads the file, if it isn't ONNX."""
    artefact: Artefact | None = None
    """The content of an ONNX file with a quantized model."""

    def summary(self) -> Iterator[str]:
        """One line: the size and the content."""
        yield f"{formatting.size(self.bytes)}, {self._content()}"

    def _content(self) -> str:
        made = self.artefact
        if made is None:
            return "float" if self.runtime is None else f"for {self.runtime}"
        batch = "any batch" if made.dynamic_batch else "a fixed batch"
        if made.sidecar is not None:
            return f"float with rounded weights, {batch}; its grids: {made.sidecar}"
        return f"{made.activation_pairs} Q/DQ pairs, {made.weights} integer weights, {batch}"

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain data."""
        known = {} if self.artefact is None else self.artefact.to_dict()
        return {**known, "path": str(self.path), "bytes": self.bytes, "runtime": self.runtime}


@strict
def export_workload(
    workload: Workload | str,
    path: str | Path,
    saved: SavedModel | None = None,
    *,
    artefact: str | None = None,
    dynamic_batch: bool = True,
    progress: Progress | None = None,
) -> ExportedFile:
    """Write the artefact of a saved model of a workload, or without `saved` the float model.

    The suffix of `path` determines the runtime: .onnx, .gguf (llama.cpp), .pt2 (inductor), .pte (ExecuTorch), .param
    (ncnn) or .tflite (LiteRT). `artefact` is the kind of artefact, by default the backend's first. Without
    `dynamic_batch`, the batch is that of the example inputs. A folder (no suffix) gets a decoder with its cache and the
    files of onnxruntime-genai.

    >>> import tempfile, torch
    >>> from bitwright import Workload, export_workload
    >>> x = torch.randn(16, 4)
    >>> workload = Workload(
    ...     name="tiny", model=torch.nn.Sequential(torch.nn.Linear(4, 2)), inputs=(x,), calibration=lambda: [x]
    ... )
    >>> export_workload(workload, tempfile.mkdtemp() + "/model.onnx").path.name
    'model.onnx'
    """
    path, begin = Path(path), phases(progress)
    found: Workload | None = None
    if saved is not None and artefact is None and path.suffix == ".gguf":
        artefact = "gguf"
    if saved is not None and artefact is not None and weight_file(artefact) is not None:
        found = _loaded(workload, saved, progress)
        begin("exporting")
        made = export(found.model, path, found.inputs, artefact=artefact)
        return ExportedFile(path=path, bytes=made.bytes, artefact=made)
    if saved is not None and artefact in (None, QDQ) and is_folder(path):
        found = _loaded(workload, saved, progress)
        if is_decoder(found.model):
            begin("exporting")
            decoder = export(found.model, path, found.inputs, artefact=artefact)
            return ExportedFile(path=decoder.path, bytes=decoder.bytes, artefact=decoder)
    if not path.suffix or path.suffix not in {own for own, _ in suffixes().values()}:
        path = onnx_path(path)  # raises
    if path.suffix != ".onnx" and (own := runtimes_that_read(path)) != runtimes_that_read(Path("model.onnx")):
        return _export_for(own[0], workload, path, saved, progress)
    written = None
    with replacing_with_siblings(path) as temporary:  # first, to fail early if the folder can't be written
        found = found or _loaded(workload, saved, progress)
        begin("exporting")
        if saved is None:
            export_float(found.model, temporary, found.inputs, dynamic_batch=dynamic_batch)
        else:
            written = export(found.model, temporary, found.inputs, dynamic_batch=dynamic_batch, artefact=artefact)
    if written is not None:
        beside = None if written.sidecar is None else ARTEFACTS.get(written.kind)().path(path)  # they move together
        written = replace(written, path=path, sidecar=beside)
    return ExportedFile(path=path, bytes=stored_bytes(path), artefact=written)


def _export_for(
    name: str, workload: Workload | str, path: Path, saved: SavedModel | None, progress: Progress | None
) -> ExportedFile:
    """Write the artefact of a runtime that doesn't read ONNX."""
    kind: type[Runtime] = RUNTIMES.get(name)
    with locked_file(path):  # fail early if the folder can't be written, or if another process writes the file
        found = _loaded(workload, saved, progress)
        phases(progress)(f"exporting for {name}")
        with replacing_with_siblings(path) as temporary:
            (kind.write_float if saved is None else kind.write)(found.model, temporary, found.inputs)
    return ExportedFile(path=path, bytes=kind.size(path), runtime=name)


def _loaded(workload: Workload | str, saved: SavedModel | None, progress: Progress | None) -> Workload:
    if isinstance(workload, str):
        phases(progress)(f"loading {workload}")
        workload = open_workload(workload)
    if saved is not None:
        load_prepared(workload, saved.plan, saved.checkpoint)
    return workload


@strict
def check_workload(
    workload: Workload | str,
    artefact: str | Path,
    saved: SavedModel,
    *,
    runtime: str | None = None,
    per_site: bool = False,
    samples: Count | None = None,
    progress: Progress | None = None,
) -> list[Check]:
    """Compare an artefact with the saved model of a workload on one runtime, or on `all` that read the file.

    Where a runtime diverges, the sites are compared as well, to find the first that differs.

    >>> import tempfile, torch
    >>> from bitwright import Workload, check_workload, quantize_workload
    >>> x = torch.randn(16, 4)
    >>> workload = Workload(
    ...     name="tiny", model=torch.nn.Sequential(torch.nn.Linear(4, 2)), inputs=(x,), calibration=lambda: [x]
    ... )
    >>> folder = tempfile.mkdtemp()
    >>> files = quantize_workload(workload, folder).files
    >>> workload = Workload(name="tiny", model=torch.nn.Sequential(torch.nn.Linear(4, 2)), inputs=(x,))
    >>> check_workload(workload, files["model.onnx"], SavedModel.read(folder))
    [<Check on onnxruntime: passed, 16 samples>]
    """
    path, begin = Path(artefact), phases(progress)
    names = runtimes_that_read(path) if runtime == "all" else [runtime or default_runtime(saved.plan.backend, path)[0]]
    # a damaged artefact ends this before the workload is loaded
    sizes = {name: open_runtime(name, path).batch for name in names}
    found = _loaded(workload, saved, progress)
    results: list[Check] = []
    for name, size in sizes.items():
        begin(f"checking on {name}")
        chosen = (
            name if runtime else None
        )  # without a name, `check` reports why it uses another runtime than the backend's
        data = rebatched(probes(found, samples), size)
        result = check(found.model, path, data, runtime=chosen, per_site=per_site)
        if not result.passed and not per_site:
            data = rebatched(probes(found, size or 1), size)
            with suppress_hidden():
                sites = check(found.model, path, data, runtime=name, per_site=True, measure=False)
                result = replace(result, sites=sites.sites, unseen=sites.unseen, probe=sites.probe)
        results.append(result)
    return results


@contextmanager
def suppress_hidden() -> Iterator[None]:
    """Leave this block if a runtime doesn't expose the sites of its artefacts."""
    try:
        yield
    except ArtefactError as error:
        if "contents-not-accessible" not in error.codes:
            raise


def read_plan(path: Path, workload: str | None) -> Plan:
    """A plan file. If it has problems, they include those of its names, which only the workload's model tells."""
    try:
        return Plan.load(path)
    except PlanError as error:
        if error.plan is None or workload is None:
            raise
        try:
            found = open_workload(workload)
            problems = error.plan.validate(capture(found.model, found.inputs))
        except BitwrightError:  # the plan's own problems come first
            raise error from None
        known = {(one.where, one.code) for one in error.problems}
        more = [one for one in problems if (one.where, one.code) not in known]
        raise PlanError([*error.problems, *more], title=error.title) from error
