"""Run one row of a grid: plan, train, verify what ran, and evaluate the simulated model and the artefact.

To verify a row, quantizers, formats and folding are read from the prepared model and compared with the row's settings.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from logging import WARNING, getLogger
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from bitwright.backends import BackendTable, Choices, backend, make_plan
from bitwright.bench.float_networks import FloatNetwork, FloatNetworks
from bitwright.bench.grid import RowTask
from bitwright.bench.leaderboard import Executed, ExecutedSites, Observers, OnDevice, Result, SiteFacts
from bitwright.core.documents import name_problem
from bitwright.core.environment import Machine, machine
from bitwright.core.errors import BitwrightError, DiskError, PlanError, RangeDiverged, TrainDiverged, TrainError
from bitwright.core.files import scratch_folder
from bitwright.core.formats import Format
from bitwright.core.registry import OBSERVERS, QUANTIZERS, ROW_REPORTERS, RUNTIMES
from bitwright.deployment import Runtime, open_runtime, unexportable
from bitwright.graph import Graph, Op
from bitwright.graph.graph import SiteName
from bitwright.plan import NO_FOLDING, Plan
from bitwright.quantizers import Quantizer, attachment_of
from bitwright.quantizers.folding import BY_STRATEGY
from bitwright.quantizers.site_statistics import SiteRow, site_rows
from bitwright.training import TrainConfig, Trainer, TrainResult
from bitwright.workload import Workload, batches, evaluate

_BATCHES = 4  # for clipped shares and histograms


@contextmanager
def quiet_training() -> Iterator[None]:
    """Hide the notes of each training; the rows keep them."""
    log = getLogger("bitwright.training")
    level = log.level
    log.setLevel(WARNING)
    try:
        yield
    finally:
        log.setLevel(level)


def report_folder(reports: Path, row: str) -> Path:
    """The folder of a row's report, which contains `report.html`."""
    wrong = name_problem(row)
    if wrong is not None:
        raise BitwrightError(f"a row can't have this id: {wrong}", where="rows", value=row, code="unsafe-name")
    return reports / row


def first_batches(workload: Workload) -> Iterator[Any]:
    """Inputs for the statistics of sites."""
    return batches(workload.calibration or (lambda: [workload.inputs]), _BATCHES)


def site_facts(sites: Iterable[SiteRow]) -> tuple[SiteFacts, ...]:
    """The main figures of each site with three digits, except biases, which follow from the others."""
    return tuple(
        SiteFacts(
            site=one.site,
            format=one.format,
            low=_short(one.low),
            high=_short(one.high),
            clipped=None if one.clipped is None else _short(one.clipped),
            sqnr_db=None if one.sqnr_db is None else round(one.sqnr_db, 1),
        )
        for one in sites
        if one.quantizer != "product"
    )


def _short(value: float) -> float:
    return float(f"{value:.3g}")


@dataclass(frozen=True, kw_only=True)
class FinishedRow:
    """A finished row with its trained model: the argument of row reporters."""

    task: RowTask
    result: Result
    trained: TrainResult
    workload: Workload
    config: TrainConfig
    sites: tuple[SiteRow, ...]


class RowOutcome(Result):
    """The result of a row in a study."""

    environment: Machine | None = Field(default=None)


def gave_up(reason: str) -> RowOutcome:
    """The outcome of a row whose process ended unexpectedly several times."""
    return RowOutcome(status="failed", reason=reason)


def run_row(task: RowTask, starts: FloatNetworks, *, reports: Path | None = None) -> RowOutcome:
    """Run a row.

    A row that the backend or a quantizer refuses, or that diverges, has a result too. Other errors are raised. A
    finished row writes its report into the folder `reports`.
    """
    begin, cpu = time.perf_counter(), time.process_time()
    with _threads(task.threads):
        try:
            found = _run(task, starts(task), reports)
        except (TrainDiverged, RangeDiverged) as error:
            found = RowOutcome(status="diverged", reason=one_line(error))
        except TrainError:
            raise
        except PlanError as error:
            found = RowOutcome(status="refused", reason=one_line(error))
        facts = {
            "minutes": round((time.perf_counter() - begin) / 60, 4),
            "cpu_minutes": round((time.process_time() - cpu) / 60, 4),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "environment": machine(),
        }
        return found.model_copy(update=facts)


def one_line(error: BaseException) -> str:
    """The problems of an error in one line."""
    if isinstance(error, BitwrightError):
        return "; ".join(
            (f"{p.where}: " if p.where else "") + p.what + (f" ({p.value})" if p.value is not None else "")
            for p in error.problems[:5]
        )
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


def _run(task: RowTask, start: FloatNetwork, reports: Path | None) -> RowOutcome:
    table = backend(task.backend)
    plan, beyond = plan_of(task, table, start.graph, start.workload.name)
    workload = replace(start.workload, model=copy.deepcopy(start.workload.model))
    config = task.training.config(
        seed=task.seed,
        quantizer_lr=task.algorithm.quantizer_lr,
        quantizer_decay=task.algorithm.quantizer_decay,
    )
    # a plan that the table does not allow is checked against the table that allows everything
    trainer = Trainer(workload, precision=plan, backend="academic" if beyond else task.backend, config=config)
    trained = trainer.fit()
    assert trained.quantized is not None
    wrong = mismatches(trained.model, task, trained.quantized.plan, table, start.graph)
    if wrong:
        raise BitwrightError(
            f"the model differs from the row's settings: {'; '.join(wrong[:5])}", where=task.key, code="row-mismatch"
        )
    values = evaluate(workload, trained.model)
    accuracy = values[workload.metric]
    notes = list(trained.notes)
    if not table.fold and task.bnfold != NO_FOLDING:
        notes.append(f"{table.name} does not fold norms: bnfold {task.bnfold} has no effect")
    outcome = RowOutcome(
        status="done",
        metric=workload.metric,
        accuracy=accuracy,
        float_accuracy=start.accuracy,
        samples=start.samples,
        device=on_device(trained.model, table, workload, accuracy, task) if task.runtimes else None,
        executed=read_executed(trained.model, trained.quantized.plan),
        observers=read_observers(trained.model),
        beyond=beyond,
        notes=tuple(notes),
        start=start.fingerprint,
    )
    sites = site_rows(trained.model, first_batches(workload), histograms=reports is not None)
    if reports is not None:
        row = FinishedRow(task=task, result=outcome, trained=trained, workload=workload, config=config, sites=sites)
        for name in ROW_REPORTERS.names():
            ROW_REPORTERS.get(name)(row, report_folder(reports, task.key))
    return outcome.model_copy(update={"sites": site_facts(sites)})


def train_float_on(task: RowTask, start: FloatNetwork) -> float:
    """The float network's accuracy after the training that a row has, without quantizers."""
    workload = replace(start.workload, model=copy.deepcopy(start.workload.model))
    with _threads(task.threads):
        config = task.training.config(seed=task.seed, freeze_observers=None, freeze_bn=None)
        trained = Trainer(workload, config=config).fit()
        return evaluate(workload, trained.model)[workload.metric]


def plan_of(task: RowTask, table: BackendTable, graph: Graph, model: str) -> tuple[Plan, str | None]:
    """The row's plan, and the formats that the backend can't run, if any."""
    algorithm = task.algorithm
    adapt = task.beyond == "adapt"
    weights = _format(table, algorithm.weights, task.bits, weight=True, adapt=adapt)
    activations = _format(table, algorithm.a_method, task.bits, weight=False, adapt=adapt)
    low = task.bits < 8
    beyond = None
    if task.beyond != "refuse":
        wide = [
            (role, f) for role, f in ((table.weights, weights), (table.activations, activations)) if not role.allows(f)
        ]
        if wide:
            names = " and ".join(dict.fromkeys(str(format) for _, format in wide))
            beyond = f"{table.name} can't run {names}: its scheme is simulated"
            anything = {"formats": ("*",)}
            table = table.model_copy(
                update={
                    "weights": table.weights.model_copy(update=anything),
                    "activations": table.activations.model_copy(update=anything),
                }
            )
    choices: Choices = {
        "weights": str(weights),
        "activations": str(activations),
        "quantizer": algorithm.a_method,
        "weight_quantizer": algorithm.weights,
        "observer": algorithm.observer or ("mse" if low else None),
        "weight_observer": algorithm.weight_observer or ("mse" if low else None),
        "fold": task.bnfold if table.fold or task.bnfold == NO_FOLDING else None,
        "first_last_bits": task.edges if task.edges is not None and task.bits < task.edges else None,
        "saturating": True,  # as if no CPU had VNNI, so that a row does not depend on the machine
    }
    plan = make_plan(graph, table, model=model, **choices)
    return replace(plan, backend=task.backend), beyond


def _format(table: BackendTable, quantizer: str, bits: int, *, weight: bool, adapt: bool) -> Format:
    """The backend's format at this width, or its symmetric variant for a quantizer without a zero point, if allowed.

    With `adapt` it is always allowed.
    """
    choice = table.weights if weight else table.activations
    usual = Format.parse(choice.format).with_bits(bits)
    if usual.symmetric or not QUANTIZERS.get(quantizer).symmetric_only:
        return usual
    signed = replace(usual, name=f"int{bits}", signed=True, symmetric=True)
    variant = signed if weight else replace(signed, adasign=True)
    return variant if adapt or choice.allows(variant) else usual


def on_device(
    model: nn.Module, table: BackendTable, workload: Workload, accuracy: float, task: RowTask
) -> OnDevice | None:
    """Evaluate the trained model as an artefact on the backend's runtime; None for a backend without a runtime."""
    if table.runtime is None:
        return None
    kind: type[Runtime] = RUNTIMES.get(table.runtime)
    missing = kind.missing()
    if missing is None and (problems := unexportable(model)):
        missing = problems[0].what
    if missing is not None:
        return OnDevice(runtime=table.runtime, reason=missing)
    try:
        with scratch_folder() as folder:
            path = folder / f"model{kind.suffix}"
            kind.write(model, path, workload.inputs)
            session = open_runtime(table.runtime, path, threads=task.threads)
            value = session.accuracy(workload)[workload.metric]
            kinds = session.executed()
            del session
    except DiskError:
        raise
    except BitwrightError as error:
        return OnDevice(runtime=table.runtime, reason=one_line(error))
    return OnDevice(runtime=table.runtime, accuracy=value, gap=round(value - accuracy, 6), kinds=kinds)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_POINTS = 4096
_STRATEGY_OF = {kind: strategy for strategy, kind in BY_STRATEGY.items()}


def read_executed(model: nn.Module, plan: Plan) -> Executed:
    """The classes, formats and levels of all quantizers, and the folding of norms."""
    attachment = attachment_of(model)
    found: dict[bool, dict[tuple[str, str], list[int]]] = {True: {}, False: {}}
    biases = 0
    for quantizer in attachment.quantizers.values():
        if quantizer.of:  # a bias on the accumulator's grid, which follows from other quantizers
            biases += 1
            continue
        key = class_name(type(quantizer)), str(quantizer.format)
        found[quantizer.weight].setdefault(key, []).append(levels(model, quantizer))
    folding = Counter(str(_STRATEGY_OF[type(fold)]) for fold in attachment.folds.values())
    return Executed(
        weights=tuple(_sites(found[True])),
        activations=tuple(_sites(found[False])),
        biases=biases,
        folding=dict(sorted(folding.items())),
        kept_float=dict(plan.float),
    )


def _sites(found: dict[tuple[str, str], list[int]]) -> Iterator[ExecutedSites]:
    for (name, format), counts in sorted(found.items()):
        yield ExecutedSites(quantizer=name, format=format, sites=len(counts), levels=max(counts))


def class_name(kind: type) -> str:
    """The full name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


@torch.no_grad()
def levels(model: nn.Module, quantizer: Quantizer) -> int:
    """The largest number of different values that a quantizer returns for one of its scales, counted by running it."""
    if quantizer.weight:
        values: Tensor = getattr(model.get_submodule(SiteName.parse(quantizer.site).path), quantizer.port).detach()
    else:
        # values up to twice the range, dense around zero, where non-uniform levels are
        end = 2.0 * float(quantizer.scale.abs().max()) * (quantizer.qmax + 1)
        positive = end * torch.cat([torch.linspace(0, 1, _POINTS), torch.logspace(-6, 0, _POINTS)])
        values = torch.cat([-positive, positive])
    given = quantizer.quantize(values.to(torch.float32))
    return max(int(row.unique().numel()) for row in quantizer.layout.rows(given))


def read_observers(model: nn.Module) -> Observers:
    """The classes of the observers that set the ranges."""
    found: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for quantizer in attachment_of(model).quantizers.values():
        if not quantizer.of:
            found[quantizer.weight][_observer(quantizer)] += 1
    return Observers(weights=dict(sorted(found[True].items())), activations=dict(sorted(found[False].items())))


def _observer(quantizer: Quantizer) -> str:
    """The class that set the range. Quantizers that follow the range while training have dropped their observer."""
    return class_name(type(quantizer.observer or quantizer.new_observer()))


def mismatches(model: nn.Module, task: RowTask, plan: Plan, table: BackendTable, graph: Graph) -> list[str]:
    """The differences between the model and the settings of the row."""
    attachment = attachment_of(model)
    wrong: list[str] = []
    kinds = {True: QUANTIZERS.get(task.algorithm.weights), False: QUANTIZERS.get(task.algorithm.a_method)}
    observers = {True: _asked_observer(task, table, weight=True), False: _asked_observer(task, table, weight=False)}
    bits = _bits(task, plan, table, graph)
    seen: set[bool] = set()
    for site, quantizer in attachment.quantizers.items():
        if quantizer.of:
            continue
        seen.add(quantizer.weight)
        wanted = kinds[quantizer.weight]
        if type(quantizer) is not wanted:
            wrong.append(f"{site}: {class_name(type(quantizer))} runs instead of {class_name(wanted)}")
        if _observer(quantizer) != observers[quantizer.weight]:
            wrong.append(f"{site}: {_observer(quantizer)} set the range instead of {observers[quantizer.weight]}")
        if quantizer.format.bits not in (allowed := bits.get(site, (task.bits,))):
            wrong.append(f"{site}: {quantizer.format.bits} bits, the row has {' or '.join(map(str, allowed))}")
        wrong += _format_problems(model, site, quantizer, plan)
    wrong += [f"no {'weight' if role else 'activation'} is quantized" for role in (True, False) if role not in seen]
    folded = Counter(_STRATEGY_OF[type(fold)] for fold in attachment.folds.values())
    expected = {} if task.bnfold == NO_FOLDING or not table.fold else {task.bnfold: len(plan.folds)}
    if {k: v for k, v in expected.items() if v} != dict(folded):
        wrong.append(f"norms are folded {dict(folded)} (strategy: count), the row has {expected}")
    return wrong


def _asked_observer(task: RowTask, table: BackendTable, *, weight: bool) -> str:
    """The observer of the row; by default mse below 8 bits, and the backend's observer at 8 bits."""
    asked = task.algorithm.weight_observer if weight else task.algorithm.observer
    usual = table.weights.observer if weight else table.activations.observer
    return class_name(OBSERVERS.get(asked or ("mse" if task.bits < 8 else usual)))


def _bits(task: RowTask, plan: Plan, table: BackendTable, graph: Graph) -> dict[str, tuple[int, ...]]:
    """The allowed widths of the first and the last operator with a weight. All other sites have the row's width."""
    asked = task.edges if task.edges is not None and task.bits < task.edges else table.edges
    if asked is None or asked <= task.bits:
        return {}
    found: dict[str, tuple[int, ...]] = {}
    weighted = [op for op in graph.ops if op.site("weight") in plan.sites]
    for op in (*weighted[:1], *weighted[-1:]):
        if (fed := _fed_by(op, plan, graph)) is not None:
            found[fed] = (asked, task.bits)  # a tensor that other operators read too can keep its width
        weight = op.site("weight")
        found[plan.sites[weight].share or weight] = (asked,)
    return found


def _fed_by(op: Op, plan: Plan, graph: Graph) -> str | None:
    """The site that quantizes the input of an operator: its own, or the output of the operator that produces it."""
    port = op.port("input") or op.port("input0")
    while port is not None:
        here = op.site(port.name)
        source = port.sources[0] if len(port.sources) == 1 else None
        before = graph.by_name[source.name] if source is not None and source.kind == "op" else None
        made = "" if before is None else before.site("output")
        if (site := next((s for s in (here, made) if s in plan.sites), None)) is not None:
            return plan.sites[site].share or site
        if before is None:
            return None
        op, port = before, before.port("input") or before.port("input0")
    return None


def _format_problems(model: nn.Module, site: str, quantizer: Quantizer, plan: Plan) -> Iterator[str]:
    """Differences between a quantizer and its format."""
    format = quantizer.format
    if str(plan.sites[site].format) != str(quantizer.spec.format):
        yield f"{site}: {quantizer.spec.format}, the plan has {plan.sites[site].format}"
    most = 2**format.bits
    if quantizer.qmax - quantizer.qmin + 1 > most:
        yield f"{site}: codes {quantizer.qmin} to {quantizer.qmax} in {format}"
    count = levels(model, quantizer)
    if count > most:
        yield f"{site}: {count} different values in {format}"
    scale = quantizer.grid().scale
    if format.granularity == "tensor" and scale.numel() != 1:
        yield f"{site}: {scale.numel()} scales in {format}"
    if format.pot and quantizer.exportable and not bool((torch.log2(scale) == torch.log2(scale).round()).all()):
        yield f"{site}: a scale isn't a power of two in {format}"
    zero_point = quantizer.grid().zero_point
    if format.symmetric and bool((zero_point != 0).any()):
        yield f"{site}: a zero point in {format}"
