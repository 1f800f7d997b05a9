"""Training with low-precision kernels, with a plan section for each kind of device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitwright.core.errors import Problem, TrainError, did_you_mean
from bitwright.core.tensor_tree import eval_mode
from bitwright.graph import capture
from bitwright.plan import Device, Plan
from bitwright.quantizers import attachment_of, find_attachment, in_mode, prepare, strip
from bitwright.training.distributed import Ranks
from bitwright.workload import call

_SHOWN = 3
"""Maximum number of operators listed in a note."""


def load_compute_plan(plan: Plan | str | Path) -> Plan:
    """Load a plan; it must not quantize sites, because the quantizer state would differ between ranks."""
    found = plan if isinstance(plan, Plan) else Plan.load(plan)
    quantized = [site for site, _ in found.quantized]
    quantized += [site for device in found.devices.values() for site, spec in device.sites.items() if spec.quantizes]
    problems = [
        Problem(
            what="a plan for low-precision training can't quantize sites",
            where=site,
            fix="set kernels of operators in `compute`, or train with precision=",
            code="plan-quantizes-sites",
        )
        for site in quantized[:10]
    ]
    problems += found.validate()
    if problems:
        raise TrainError(problems, title="the plan can't be used for training")
    if not found.compute and not found.devices:  # a planner may find that float is best on every kind of device
        what, fix = "the plan has no operator in low precision", "train without it"
        raise TrainError.single(what, where="compute", fix=fix, code="plan-all-float")
    return found


def device_kind_of(plan: Plan, kinds: str | None, ranks: Ranks) -> str | None:
    """The device kind of this rank: from a list such as "fast,slow", or the plan's only kind."""
    if not plan.devices:
        if kinds is not None:
            what, fix = "the plan has no devices", "omit it"
            raise TrainError.single(what, where="kind", value=kinds, fix=fix, code="unknown-device-kind")
        return None
    if kinds is None:
        if len(plan.devices) == 1:
            return next(iter(plan.devices))
        first, every = next(iter(plan.devices)), ",".join(plan.devices)
        fix = f"specify the kind of this device: --device-kind {first}, or one kind per rank: {every}"
        what = "the plan has several kinds of device"
        raise TrainError.single(what, where="kind", value=[*plan.devices], fix=fix, code="device-kind-required")
    names = [name.strip() for name in kinds.split(",")]
    for name in names:
        if name not in plan.devices:
            fix = did_you_mean(name, plan.devices)
            what = "the plan has no such device"
            raise TrainError.single(what, where="kind", value=name, fix=fix, code="unknown-device-kind")
    if len(names) not in (1, ranks.world):
        there = "1 process" if ranks.world == 1 else f"{ranks.world} processes"
        raise TrainError.single(
            f"{len(names)} kinds, but there {'is' if ranks.world == 1 else 'are'} {there}",
            where="kind",
            value=kinds,
            fix=f"start {len(names)} (torchrun --nproc-per-node {len(names)} -m bitwright train …), or name one kind",
            code="device-kind-count",
        )
    return names[0] if len(names) == 1 else names[ranks.rank]


class LowPrecision:
    """Kernels in a model during training. Weights, their gradients and exchanged tensors stay in float32."""

    def __init__(self, model: nn.Module, plan: Plan, kind: str | None, example: Any, *, simulate: bool) -> None:
        self.model = model
        graph = capture(model, example)
        # validate every section on every rank, because a failing rank would leave the others waiting
        problems = replace(plan, backend=None).validate(graph)
        if problems:
            raise TrainError(problems, title="the plan doesn't match the model")
        own = plan if kind is None else plan.for_device(kind)
        own = replace(own, devices={}, backend=None).resolve(graph)
        prepare(model, own, graph=graph, simulate=simulate)
        self.notes: list[str] = []
        where = "" if kind is None else f"{kind}: "
        if find_attachment(model) is None:
            self.notes.append(f"{where}all operators run in float, as planned")
            return
        kernels = attachment_of(model).kernels
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        counts: dict[str, int] = {}
        engines: list[str] = []
        for name, kernel in kernels.items():
            missing = None if simulate else kernel.missing_for(graph.by_name[name].kind, device)
            how = f"{kernel.name}, simulated" if simulate or missing else kernel.name
            counts[how] = counts.get(how, 0) + 1
            if missing and (text := f"{kernel.name} is only simulated: {missing}") not in self.notes:
                self.notes.append(text)
            engine = None if simulate or missing else kernel.engine(device)
            if engine and (text := f"products of {kernel.name} run in {engine}") not in engines:
                engines.append(text)
        words = ", ".join(f"{count} in {how}" for how, count in counts.items())
        self.notes.insert(0, f"{where}of {len(graph.ops)} operators, {words}; all others in float")
        self.notes += engines
        self.notes += [f"{where}{text}" for text in self._in_float(kernels, example)]

    def _in_float(self, kernels: Mapping[str, Any], example: Any) -> Iterator[str]:
        """Gradients that stay in float although the plan lowers them; kernels report them after a call."""
        with eval_mode(self.model), torch.no_grad(), torch.random.fork_rng(devices=[]):
            call(self.model, example)
        found: dict[tuple[str, str, str], list[str]] = {}
        for name, kernel in kernels.items():
            for product, reason in kernel.floats.items():
                found.setdefault((kernel.name, product, reason), []).append(name)
        for (format, product, reason), names in found.items():
            which = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
            yield f"{format}: gradients of the {product} stay in float in {len(names)} operators, {reason}: {which}"

    @property
    def uncompiled(self) -> list[str]:
        """Kernels that torch.compile of the model doesn't include."""
        attachment = find_attachment(self.model)
        kernels = {} if attachment is None else attachment.kernels
        return sorted({kernel.name for kernel in kernels.values() if not kernel.compiles})

    @contextmanager
    def float(self) -> Iterator[None]:
        """Run the model in float: the trained weights are used in float."""
        if find_attachment(self.model) is None:
            yield
            return
        with in_mode(self.model, "float"):
            yield

    def finish(self) -> None:
        """Remove the kernels."""
        strip(self.model)


def batch_size_of(device: Device | None, usual: int | None) -> int | None:
    """The batch size of this rank: that of its section, or by default `usual`."""
    return usual if device is None or device.batch is None else device.batch
