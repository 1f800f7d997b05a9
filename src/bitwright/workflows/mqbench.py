"""`quantize_mqbench`: run a file of MQBench's toolkit from its model and data to the deployed artefact."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from bitwright.backends import BackendTable, Choices, backend, make_plan
from bitwright.bench.comparison import Accuracy
from bitwright.core.arguments import Count, strict
from bitwright.core.display import Progress, Summarized, Table, phases
from bitwright.core.errors import BitwrightError, PlanError, Problem, did_you_mean
from bitwright.core.formats import Format
from bitwright.deployment import Artefact, Check
from bitwright.graph import Graph, capture
from bitwright.importers.mqbench import (
    HuggingFaceConfig,
    MqbenchSettings,
    ToolkitConfig,
    load_mqbench,
    mqbench_settings,
)
from bitwright.importers.mqbench.toolkit_workload import image_workload, text_workload
from bitwright.plan import Plan
from bitwright.ptq import read_steps
from bitwright.workflows.deployment import Deployment, accuracy
from bitwright.workflows.quantization import quantize_workload
from bitwright.workload import Workload
from bitwright.workload.data import probes

__all__ = ["MqbenchRun", "quantize_mqbench"]

_PLACE = "extra_prepare_dict"


@strict
@dataclass(frozen=True, kw_only=True)
class MqbenchRun(Summarized):
    """The result of `quantize_mqbench`."""

    accuracies: tuple[Accuracy, ...]
    """The float model's metric, and unless the file is a float run, that of the quantized model and of its artefact."""
    notes: tuple[str, ...] = ()
    """What differs from the file."""
    deployment: Deployment | None = None
    """The quantized model and its report. None for a float run."""
    artefact: Artefact | None = None
    """What the section `deploy` asked for."""
    check: Check | None = None
    """The parity of this artefact with the model, if a runtime reads it."""

    def __repr__(self) -> str:
        shown = ", ".join(f"{one.where} {one.text}" for one in self.accuracies)
        return f"<MqbenchRun: {shown}>"

    def summary(self) -> Iterator[Table | str]:
        """Accuracies, the deployed artefact, and the notes."""
        first = self.accuracies[0]
        rows = [
            (one.metric, one.where, one.text, one.change_from(first) if one is not first else "")
            for one in self.accuracies
        ]
        yield Table(["metric", "where", "#", "change"], rows)
        if self.artefact is not None:
            verdict = "not checked" if self.check is None else "agrees" if self.check.passed else "diverges"
            yield f"{self.artefact.path.name} ({self.artefact.kind}): {verdict}"
        yield from (f"note: {note}" for note in self.notes)

    def failures(self) -> list[str]:
        """Artefacts that diverge from the simulated model."""
        failed = [] if self.deployment is None else self.deployment.failures()
        if self.check is not None and not self.check.passed:
            failed.append(f"the deployed artefact diverges from the simulation on {self.check.runtime}")
        return failed

    def to_dict(self) -> dict[str, Any]:
        """All results as plain data."""
        return {
            "accuracies": [one.model_dump() for one in self.accuracies],
            "notes": list(self.notes),
            "deployment": None if self.deployment is None else self.deployment.to_dict(),
            "artefact": None if self.artefact is None else self.artefact.to_dict(),
            "check": None if self.check is None else self.check.to_dict(),
        }


@strict
def quantize_mqbench(
    config: str | Path,
    output: str | Path | None = None,
    *,
    data: str | Path | None = None,
    checkpoint: str | Path | None = None,
    iterations: Count | None = None,
    progress: Progress | None = None,
) -> MqbenchRun:
    """Run a file of MQBench's toolkit: evaluate the float model, quantize it, evaluate again, deploy.

    The folder `output` gets the files of `quantize_workload`, and the artefact of the section `deploy`; by default it
    is the file's `deploy.output_path`. A file without the section `quantize` (or `quant`) evaluates only. `data` and
    `checkpoint` replace the paths in the file. `iterations` replaces `reconstruction.max_count`.

    Raises all problems of the file before any computation.
    """
    begin = phases(progress)
    imported = load_mqbench(config)
    settings = imported.config
    if not isinstance(settings, ToolkitConfig | HuggingFaceConfig):
        raise BitwrightError(
            "this file of MQBench's zoo trains a model",
            where=str(config),
            fix="run it with `bitwright grid run`",
            code="not-a-toolkit-file",
        )
    notes = [str(note) for note in imported.notes]
    if isinstance(settings, ToolkitConfig) and iterations is not None:
        settings = _shortened(settings, iterations, notes)
    ours = mqbench_settings(settings)
    folder = _folder(settings, output, needed=ours is not None, notes=notes)
    begin("loading the model and the data")
    paths = {"data": _path(data), "checkpoint": _path(checkpoint)}
    if isinstance(settings, ToolkitConfig):
        workload, said = image_workload(settings, **paths)
    else:
        workload, said = text_workload(settings, **paths)
    notes += said
    if ours is None:
        measured = accuracy(workload, workload.model, "float", begin)
        return MqbenchRun(accuracies=tuple(measured), notes=tuple(notes))
    assert folder is not None
    begin("planning")
    plan, target = _plan(workload, ours, notes)
    notes += ours.notes
    seed = settings.process.seed if isinstance(settings, ToolkitConfig) else settings.seed
    deployment = quantize_workload(
        workload, folder, plan=plan, backend=target, steps=read_steps(ours.steps), seed=seed, progress=progress
    )
    wanted = settings.quantize.deploy if isinstance(settings, ToolkitConfig) and settings.quantize else None
    artefact = check = None
    if wanted is not None:
        begin("deploying")
        kind = _artefact_kind(backend(target), wanted.deploy_to_qlinear, notes)
        artefact = deployment.quantized.export(folder / f"{wanted.model_name}_deploy_model.onnx", artefact=kind)
        if artefact.sidecar is None:
            check = deployment.quantized.check(artefact.path, probes(workload))
        else:
            notes.append(f"{artefact.path.name} isn't checked, because no runtime here reads {artefact.sidecar.name}")
    return MqbenchRun(
        accuracies=deployment.record.accuracies,
        notes=tuple(notes),
        deployment=deployment,
        artefact=artefact,
        check=check,
    )


def _path(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path).expanduser()


def _shortened(config: ToolkitConfig, iterations: int, notes: list[str]) -> ToolkitConfig:
    """The same settings with another number of optimizer steps."""
    if config.quantize is None or config.quantize.reconstruction is None:
        notes.append("--iterations has no effect: the file has no reconstruction")
        return config
    own = config.quantize.reconstruction
    notes.append(f"{iterations} iterations instead of {own.max_count}")
    shorter = own.model_copy(update={"max_count": iterations})
    return config.model_copy(update={"quantize": config.quantize.model_copy(update={"reconstruction": shorter})})


def _folder(
    config: ToolkitConfig | HuggingFaceConfig, output: str | Path | None, *, needed: bool, notes: list[str]
) -> Path | None:
    """Where the results go."""
    named = config.output
    if not needed:
        if output is not None:
            notes.append("a float run writes no files")
        return None
    if output is None and named is None:
        raise BitwrightError(
            "the file names no folder for the results",
            where="output",
            fix="give one: --output FOLDER",
            code="option-missing",
        )
    if output is not None and named is not None:
        notes.append(f"the results are in {output}, not in {named}")
    return Path(output or named or "").expanduser()


def _plan(workload: Workload, ours: MqbenchSettings, notes: list[str]) -> tuple[Plan, str]:
    """The plan, and the backend that can run it: MQBench simulates formats that its backends can't run."""
    graph = capture(workload.model, workload.inputs)
    table = backend(ours.backend)
    wide = [
        text
        for choice, text in ((table.weights, ours.weight_format), (table.activations, ours.activation_format))
        if text is not None and not choice.allows(Format.parse(text))
    ]
    target = table.name
    if wide:
        notes.append(f"{table.name} can't run {' and '.join(dict.fromkeys(wide))}: its scheme is simulated")
        table, target = _permissive(table), "academic"
    choices: Choices = {
        "weights": ours.weight_format,
        "activations": ours.activation_format,
        "observer": ours.observer,
        "weight_observer": ours.weight_observer,
        "quantizer": ours.activations,
        "weight_quantizer": ours.weights,
        "first_last_bits": ours.first_last_bits,
        "keep_float": _kept(workload.model, graph, ours),
    }
    given: Choices = {key: value for key, value in choices.items() if value}  # type: ignore[assignment]
    plan = make_plan(graph, table, model=workload.name, **given)
    weights = {op.site(port.name) for op in graph.ops for port in op.ports if port.role == "weight"}
    sites = {}
    for name, spec in plan.sites.items():
        weight = name in weights
        if spec.quantizes and spec.observer in ("mse", "ema-mse"):
            spec = replace(spec, observer_options={"p": ours.norm if weight else ours.activation_norm})
        options = ours.weight_quantizer_options if weight else ours.quantizer_options
        if options and spec.quantizer == (ours.weights if weight else ours.activations):
            spec = replace(spec, quantizer_options=options)
        sites[name] = spec
    return replace(plan, sites=sites, backend=target), target


def _permissive(table: BackendTable) -> BackendTable:
    """The same placement for any format."""
    anything = {"formats": ("*",)}
    changed = {"weights": table.weights.model_copy(update=anything)}
    changed["activations"] = table.activations.model_copy(update=anything)
    return table.model_copy(update=changed)


def _kept(model: nn.Module, graph: Graph, ours: MqbenchSettings) -> list[str]:
    """The operators that stay in float. A name that matches nothing is an error."""
    kept: list[str] = []
    problems: list[Problem] = []
    for name in ours.keep_float:
        found = [
            op.name
            for op in graph.ops
            if op.name == name
            or op.module == name
            or op.module.startswith(f"{name}.")
            or re.sub(r"\W+", "_", op.name).strip("_") == name
        ]
        kept += found
        if not found:
            fix = did_you_mean(name, graph.by_name)
            problems.append(
                Problem(
                    what="no module or operator has this name",
                    where=_PLACE,
                    value=name,
                    fix=fix,
                    code="unknown-operator",
                )
            )
    for function in ours.keep_float_kinds:
        kind = function.rpartition(".")[2].strip("'<>_ ")
        found = [op.name for op in graph.ops if op.kind == kind]
        kept += found
        if not found:
            fix = did_you_mean(kind, {op.kind for op in graph.ops})
            problems.append(
                Problem(what="no operator of this kind", where=_PLACE, value=function, fix=fix, code="unknown-operator")
            )
    for kind in ours.keep_float_classes:
        modules = [name for name, module in model.named_modules() if type(module).__name__ == kind.rpartition(".")[2]]
        kept += [op.name for op in graph.ops if any(op.module == m or op.module.startswith(f"{m}.") for m in modules)]
    if problems:
        raise PlanError(problems, title="the file names operators that the model doesn't have")
    return list(dict.fromkeys(kept))


def _artefact_kind(table: BackendTable, integer: bool, notes: list[str]) -> str:
    """QDQ, whose operators a runtime computes in integers, or the backend's own file of ranges."""
    if integer and "qdq" not in table.artefacts:
        notes.append(f"quantize.deploy.deploy_to_qlinear has no effect: {table.title} reads {table.artefacts[0]}")
        return table.artefacts[0]
    if integer:
        return "qdq"
    return next((kind for kind in table.artefacts if kind != "qdq"), "qdq")
