"""`quantize(model, batches)`: plan, insert quantizers and calibrate them; `load(folder)`: read the saved result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bitwright.backends import (
    DEFAULT_BACKEND,
    Choices,
    default_steps,
    make_plan,
    plan_warnings,
    problems_title,
    reject_choices_with_plan,
    resolve_for_backend,
)
from bitwright.backends import backend as find_backend
from bitwright.backends.precisions import resolve
from bitwright.core import display
from bitwright.core.arguments import Amount, Seed, strict
from bitwright.core.display import Progress
from bitwright.core.errors import BitwrightError, CalibrationError, ExportError, PlanError, Problem, log_warnings
from bitwright.core.formatting import counted
from bitwright.core.output_folder import staged_output
from bitwright.core.registry import WORKLOADS
from bitwright.core.tensor_tree import batch_size
from bitwright.deployment import Artefact, Check, Distance, check, export, measure_distance, unexportable
from bitwright.deployment.checkpoint import load_checkpoint, save_checkpoint
from bitwright.graph import Graph, capture, capture_paths
from bitwright.graph.capture import reject_empty
from bitwright.graph.interception import bare
from bitwright.plan import Plan
from bitwright.ptq.calibration import find_ranges
from bitwright.ptq.step import MEMORY, Data, PtqContext, Step, read_steps, require_rereadable
from bitwright.ptq.step_runner import Backup, StepResult, run_steps
from bitwright.quantizers import find_attachment, in_mode, prepare, strip, warnings_of, weights_may_change
from bitwright.workload import Workload, evaluate, load_workload
from bitwright.workload.data import CalibrationData
from bitwright.workload.language_models import tokenizer_of
from bitwright.workload.metrics import top1

if TYPE_CHECKING:
    from bitwright.reports import Record

log = getLogger(__name__)
_WITHOUT_CACHE = {"no-cache", "fixed-batch", "decoder-differs"}
"""Errors of decoders that can be exported without a cache."""
_FEW = 8  # samples that tell little about an artefact
_RECORDED = 16  # the most batches that are recorded to find paths that only some inputs take


@strict
@dataclass(frozen=True, kw_only=True)
class Quantized(display.Summarized):
    """A quantized model: `model` computes with the formats of `plan`, and the methods save, export and measure it.

    >>> import tempfile, torch, bitwright
    >>> x, folder = torch.randn(16, 8), tempfile.mkdtemp()
    >>> quantized = bitwright.quantize(torch.nn.Sequential(torch.nn.Linear(8, 4)), [x])
    >>> quantized
    <Quantized Sequential for onnxruntime: 3 quantized sites>
    >>> quantized.check(quantized.export(folder + "/model.onnx").path)
    <Check on onnxruntime: passed, 16 samples>
    >>> quantized.save(folder, artefact=False).is_dir()
    True
    >>> sorted(quantized.evaluate([(x, quantized.model(x).argmax(1))]))
    ['n', 'top1']
    >>> len(quantized.report(folder + "/report.html").sites)
    3
    """

    model: nn.Module
    plan: Plan
    graph: Graph
    example: Any
    backend: str
    steps: tuple[StepResult, ...] = ()
    """What each PTQ step did, and the operators that it skipped."""
    distance: Distance | None = None
    """The distance to the float model on a few calibration samples. None: not measured."""
    warnings: tuple[Problem, ...] = ()
    """Problems that didn't stop the quantization. Each was also logged."""
    calibrated_on: Any = None
    """The first calibration batch, on which `check` compares by default. None: not kept."""

    def __repr__(self) -> str:
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        floats = sum(name not in parameters for name in self.plan.float)
        left = f", {counted(floats, 'operator')} in float" if floats else ""
        sites = sum(1 for _ in self.plan.quantized)
        return f"<Quantized {type(self.model).__name__} for {self.backend}: {counted(sites, 'quantized site')}{left}>"

    def summary(self) -> Iterator[display.Table | str]:
        """Warnings, PTQ steps, the distance from float, and the plan."""
        rows = [("warning", f"{one.what}. {one.fix or ''}") for one in self.warnings]
        rows += [("step", ran.step) for ran in self.steps]
        if self.distance is not None:
            rows.append(("SQNR against float", f"{self.distance.sqnr_db:.1f} dB"))
        yield display.Table(["", ""], rows, title=repr(self)[1:-1])
        yield from self.plan.summary()

    def export(
        self,
        path: str | Path,
        *,
        dynamic_batch: bool = True,
        artefact: str | None = None,
        tokenizer: Any = None,
        exact: bool = False,
    ) -> Artefact:
        """Write the artefact that the backend's tools read: the first one of its table, or the one named.

        A path without suffix is a folder for a decoder, as `bitwright.export` describes.
        """
        return export(
            self.model,
            path,
            self.example,
            dynamic_batch=dynamic_batch,
            artefact=artefact,
            tokenizer=tokenizer,
            exact=exact,
        )

    def check(
        self,
        path: str | Path,
        batches: Iterable[Any] | None = None,
        *,
        runtime: str | None = None,
        per_site: bool = False,
        threads: int | None = None,
        measure: bool = True,
    ) -> Check:
        """Run an artefact on the backend's runtime (or on `runtime`) and compare its outputs with this model.

        Without `batches`, they are compared on the first calibration batch if it is known, else on the example.
        """
        if batches is None:
            batches = [own := self._own_batch()]
            if batch_size(own) < _FEW:
                log_warnings([_few_samples(batch_size(own))])
        return check(self.model, path, batches, runtime=runtime, per_site=per_site, threads=threads, measure=measure)

    def _own_batch(self) -> Any:
        """The calibration batch, if an artefact with the example's fixed batch can run it in pieces."""
        fits = self.calibrated_on is not None and batch_size(self.calibrated_on) % max(1, batch_size(self.example)) == 0
        return self.calibrated_on if fits else self.example

    def save(self, folder: str | Path, *, artefact: bool = True) -> Path:
        """Write plan.yaml and checkpoint.safetensors, which `load` reads, and model.onnx unless `artefact` is False."""
        with staged_output(folder) as staged:
            self.write(staged, artefact=artefact)
        return Path(folder)

    def write(self, folder: Path, *, artefact: bool = True) -> Artefact | None:
        """Write the files of `save` into a folder that the caller has locked."""
        self.plan.save(folder / "plan.yaml")
        save_checkpoint(self.model, folder / "checkpoint.safetensors")
        if not artefact:
            return None
        if tokenizer_of(bare(self.model)) is not None:  # a language model
            try:
                return self.export(folder)
            except ExportError as error:
                if not _WITHOUT_CACHE & set(error.codes):
                    raise
                log_warnings(error.problems)  # they say that a plain file is possible
        return self.export(folder / "model.onnx")

    def evaluate(self, data: Workload | Iterable[tuple[Any, Tensor]]) -> dict[str, float]:
        """Measure the metrics of a workload, or top-1 accuracy on batches of (inputs, target)."""
        return evaluate(data, self.model) if isinstance(data, Workload) else top1(data, self.model)

    def report(self, path: str | Path, data: Iterable[Any] | None = None) -> Record:
        """Write a page (.html, .md or .json) about every site, with statistics over the inputs `data`."""
        from bitwright.reports import make_record, write_page

        name = self.plan.model or type(self.model).__name__
        given = [self.example] if data is None else data
        record = make_record(self, given, workload=name, distance=self.distance, warnings=self.warnings)
        write_page(record, path)
        return record

    def to_dict(self) -> dict[str, Any]:
        """The decisions and measurements as plain data."""
        return {
            "backend": self.backend,
            "plan": self.plan.to_dict(),
            "steps": [asdict(step) for step in self.steps],
            "distance": None if self.distance is None else asdict(self.distance),
            "warnings": [asdict(problem) for problem in self.warnings],
        }


@strict
def quantize(
    model: nn.Module,
    batches: Iterable[Any] | Callable[[], Iterable[Any]],
    precision: str | None = None,
    *,
    backend: str | None = None,
    plan: Plan | str | Path | None = None,
    weights: str | None = None,
    activations: str | None = None,
    group: int | None = None,
    head_bits: int | None = None,
    keep_float: str | Iterable[str] = (),
    observer: str | None = None,
    weight_observer: str | None = None,
    quantizer: str | None = None,
    weight_quantizer: str | None = None,
    first_last_bits: int | None = None,
    fold: int | None = None,
    saturating: bool | None = None,
    graph: Graph | None = None,
    example: Any = None,
    name: str | None = None,
    artefact: bool = False,
    steps: Sequence[str | Step] | None = None,
    seed: Seed = 0,
    memory: Amount = MEMORY,
    folder: str | Path | None = None,
    keep_state: bool = False,
    on_start: Callable[[nn.Module], None] | None = None,
    measure: bool = True,
    progress: Progress | None = None,
) -> Quantized:
    """Quantize `model` in place and calibrate it with `batches` of inputs (tensors, tuples or dicts).

    Without other arguments the model gets the backend's default formats, 8 bits on ONNX Runtime. `precision` is a name
    such as "int8", "int4", "w4a8" (4-bit weights, 8-bit activations), "w4a16" (weights only), "w8a8-dynamic",
    "w4a8-dynamic" (scales of activations at run time) or "fp8". Fewer than 8 bits are simulated on the backend
    "academic" unless you name a backend that runs them, with 8 bits in the first and last operators.

    - `group`: this many values share a scale of a weight ("w4a16" with `group=32`). `head_bits`: bits of the head of a
      language model, 8 by default if a weight-only or dynamic precision has fewer.
    - `weights`, `activations`: formats, e.g. "int4/group32/sym". `keep_float`: patterns of operators to leave in float.
    - `observer`, `weight_observer`: how ranges are found. `quantizer`, `weight_quantizer`: the arithmetic.
    - `first_last_bits`: bits of the first and the last operator. `fold`: batch-norm folding, -1 (none) to 4.
    - `saturating`: whether 8-bit products saturate on the target machine. None: test this machine.
    - `plan`: use this plan (or its path) instead; it excludes `precision` and the arguments above.
    - `steps`: PTQ algorithms, by name ("equalize", "adaround:iterations=500") or as objects. They read the data
      several times, so `batches` must be a list, a loader or a function that returns an iterator. By default, there is
      one for dynamic activations of language models ("smoothquant:alpha=auto"); `steps=()` leaves it out. `seed` seeds
      their random numbers, `memory` (MiB) limits the activations that they keep. With `folder`, an interrupted run
      resumes; `keep_state` leaves the folder in place after the last step.
    - `example`: the call to export (default: the first batch). `graph`: an earlier capture. `name`: of the model.
    - `artefact`: raise before calibration if a quantizer can't be exported. `measure`: compare the result with the
      float model on a few samples (`distance`, `warnings`). `on_start` is called with the unchanged prepared model.

    If anything fails, the model is restored.

    >>> import torch, bitwright
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU())
    >>> quantized = bitwright.quantize(model, [torch.randn(16, 8)], "w4a8")
    >>> quantized.plan.sites["0:weight"].format.bits
    8
    """
    choices = Choices(
        weights=weights,
        activations=activations,
        group=group,
        head_bits=head_bits,
        keep_float=[keep_float] if isinstance(keep_float, str) else list(keep_float),
        observer=observer,
        weight_observer=weight_observer,
        quantizer=quantizer,
        weight_quantizer=weight_quantizer,
        first_last_bits=first_last_bits,
        fold=fold,
        saturating=saturating,
    )
    if plan is not None:
        reject_choices_with_plan({**choices, "precision": precision})
        plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    if precision is not None:
        _, backend, choices, notes = resolve(precision, backend, choices, learned=False)
        for note in notes:
            log.info(note)
    backend = backend or DEFAULT_BACKEND
    table = find_backend(backend)
    model = bare(model)
    wanted = read_steps(steps or ())
    data = Data(batches)
    if wanted:
        require_rereadable(data)
    if find_attachment(model) is not None:
        raise BitwrightError("this model is already quantized", fix="strip(model) first", code="already-prepared")
    seen = CalibrationData()
    stream = map(seen.see, data)
    first = list(islice(stream, 1))
    if not first:
        raise CalibrationError(
            "the calibration loader yielded no batch",
            fix="give a loader (or list) with at least one batch",
            code="no-batches",
        )
    reject_empty(first[0])
    given = [] if example is None else [example]
    if graph is None:
        graph = capture_paths(model, chain(given, first, _kept(stream, first)), most=_RECORDED)
    measured = first[0]
    example = first[0] if example is None else example
    plan = (
        make_plan(graph, backend, model=name, **choices)
        if plan is None
        else resolve_for_backend(plan, table, graph, name=name)
    )
    if name is not None:
        plan = replace(plan, model=name)
    known = plan_warnings(graph, plan)
    log_warnings(known)
    if steps is None and (wanted := read_steps(default_steps(graph, plan))):
        data = Data([*first, *stream]) if data.once else data
        log.info("the model is changed first by %s, which keeps its function", ", ".join(map(str, wanted)))
    backup = Backup(model) if wanted else None
    prepare(model, plan, graph=graph)
    if find_attachment(model) is None:
        raise _nothing_to_quantize(plan, backend)
    try:
        problems = unexportable(model) if artefact else []
        if problems:
            raise PlanError(problems, title="no artefact can represent these levels")
        if on_start is not None:
            with in_mode(model, "float"):
                on_start(model)
        ran: tuple[StepResult, ...] = ()
        if wanted:
            context = PtqContext(model=model, graph=graph, plan=plan, data=data, seed=seed, memory=memory)
            place = None if folder is None else Path(folder)
            with weights_may_change(model):
                ran = run_steps(context, wanted, folder=place, keep=keep_state, progress=progress)
        else:
            find_ranges(model, chain(first, stream), progress=progress)
    except BaseException:
        strip(model)
        if backup is not None:
            backup.restore(model)
        raise
    finally:
        if backup is not None:
            backup.close()
    distance = measure_distance(model, measured) if measure else None
    noted = (*seen.warnings(), *(() if distance is None else distance.warnings))
    log_warnings(noted)
    noted = (*known, *noted)  # the known ones were logged before calibration
    noted += warnings_of(model) if find_attachment(model) is not None else ()  # already logged
    return Quantized(
        model=model,
        plan=plan,
        graph=graph,
        example=example,
        backend=backend,
        steps=ran,
        distance=distance,
        warnings=noted,
        calibrated_on=measured,
    )


def _few_samples(samples: int) -> Problem:
    return Problem(
        what=f"the artefact is compared on {counted(samples, 'sample')} only, which may hide differences",
        fix="pass batches: quantized.check(path, batches)",
        code="few-samples",
    )


def _nothing_to_quantize(plan: Plan, backend: str) -> PlanError:
    """The error for a plan that leaves every operator in float, with all reasons."""
    reasons: dict[str, list[str]] = {}
    for operator, why in plan.float.items():
        reasons.setdefault(why, []).append(operator)
    fix = "use another backend or plan, or export the float model: export_float(model, path, inputs)"
    problems = [
        Problem(what=why, where=", ".join(operators), fix=fix, code="nothing-to-quantize")
        for why, operators in reasons.items()
    ] or [Problem(what="no operator has a weight or multiplies", fix=fix, code="nothing-to-quantize")]
    return PlanError(problems, title=f"nothing in this model can be quantized for {backend}")


def _kept(stream: Iterator[Any], kept: list[Any]) -> Iterator[Any]:
    """Keep the recorded batches for calibration."""
    for batch in stream:
        kept.append(batch)
        yield batch


@torch.no_grad()
def put_back(model: nn.Module, before: dict[str, Tensor]) -> None:
    """Restore the weights that PTQ steps have changed."""
    for name, tensor in model.state_dict().items():
        if name in before:
            tensor.copy_(before[name])


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """The files of a saved model."""

    plan: Plan
    checkpoint: Path
    artefact: Path | None = None  # None: exported again when it is needed

    @classmethod
    def read(cls, folder: str | Path) -> SavedModel:
        """Find the files of an output folder, and read the plan."""
        folder = Path(folder)
        missing = [name for name in ("plan.yaml", "checkpoint.safetensors") if not (folder / name).is_file()]
        if missing:
            raise BitwrightError(
                f"the folder has no {' and no '.join(missing)}",
                where=str(folder),
                fix="give the output folder of `bitwright quantize`, or of Quantized.save",
                code="no-saved-model",
            )
        artefact = folder / "model.onnx"
        return cls(
            plan=Plan.load(folder / "plan.yaml"),
            checkpoint=folder / "checkpoint.safetensors",
            artefact=artefact if artefact.is_file() else None,
        )

    @classmethod
    def of(cls, plan: Path, checkpoint: Path) -> SavedModel:
        """Read the plan of a checkpoint."""
        if not checkpoint.is_file():
            what, fix = "the checkpoint doesn't exist", "pass the path of a .safetensors file"
            raise BitwrightError(what, where=str(checkpoint), fix=fix, code="no-such-checkpoint")
        return cls(plan=Plan.load(plan), checkpoint=checkpoint)


@strict
def load(
    folder: str | Path, workload: Workload | str | None = None, *, model: nn.Module | None = None, inputs: Any = None
) -> Quantized:
    """Load a quantized model from an output folder of `Quantized.save`, `bitwright quantize`, `tune` or `train`.

    The folder has no code, so the float model comes from a `workload` (an object, a registered name or
    "file.py:function"), or from `model` with example `inputs`. By default it is the workload that the plan names.

    >>> import torch, bitwright, tempfile
    >>> folder, x = tempfile.mkdtemp(), torch.randn(16, 8)
    >>> bitwright.quantize(torch.nn.Sequential(torch.nn.Linear(8, 4)), [x]).save(folder) and None
    >>> bitwright.load(folder, model=torch.nn.Sequential(torch.nn.Linear(8, 4)), inputs=(x,))
    <Quantized Sequential for onnxruntime: 3 quantized sites>
    """
    saved = SavedModel.read(folder)
    if model is not None:
        if workload is not None or inputs is None:
            what = "give either a workload, or a model with inputs"
            raise BitwrightError(what, fix="load(folder, model=Net(), inputs=(x,))", code="ambiguous-model")
        example = inputs if isinstance(inputs, tuple | dict) else (inputs,)
        workload = Workload(name=saved.plan.model or type(model).__name__, model=model, inputs=example)
    elif workload is None:
        if saved.plan.model is None or saved.plan.model not in WORKLOADS:
            raise BitwrightError(
                "the folder doesn't name a registered workload",
                where=str(folder),
                value=saved.plan.model,
                fix='load(folder, "file.py:function"), or load(folder, model=Net(), inputs=(x,))',
                code="no-workload",
            )
        workload = saved.plan.model
    found = load_workload(workload) if isinstance(workload, str) else workload
    return load_prepared(found, saved.plan, saved.checkpoint)


def load_prepared(workload: Workload, plan: Plan, checkpoint: Path) -> Quantized:
    """Insert the plan's quantizers into the workload's model in place, and load the checkpoint."""
    graph = capture(workload.model, workload.inputs)
    if problems := plan.validate(graph):
        raise PlanError(problems, title=problems_title(plan, workload.name))
    prepare(workload.model, plan, graph=graph)
    attachment = find_attachment(workload.model)
    if attachment is None:
        raise BitwrightError(
            "the plan quantizes nothing",
            fix="give at least one site a format, or export with --float",
            code="nothing-to-quantize",
        )
    load_checkpoint(workload.model, checkpoint)
    problems = [
        Problem(
            what="the checkpoint has no range for this site",
            where=site,
            fix="calibrate with this plan",
            code="no-range",
        )
        for site, quantizer in attachment.quantizers.items()
        if not quantizer.ready
    ]
    if problems:
        raise PlanError(problems, title=f"{checkpoint} doesn't have all ranges of the plan")
    return Quantized(
        model=workload.model,
        plan=plan,
        graph=graph,
        example=workload.inputs,
        backend=plan.backend or DEFAULT_BACKEND,
    )
