"""Quantization-aware training in any loop: add quantizers before the optimizer, and two calls in the loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from logging import getLogger
from math import isfinite
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from bitwright.backends import DEFAULT_BACKEND, Choices, make_plan
from bitwright.backends.precisions import Precision, resolve
from bitwright.core.arguments import Amount, strict
from bitwright.core.display import Progress
from bitwright.core.errors import (
    CalibrationError,
    Problem,
    RangeDiverged,
    TrainDiverged,
    TrainError,
    log_warnings,
)
from bitwright.core.formatting import counted
from bitwright.core.tensor_tree import map_tensors, tensors_in
from bitwright.deployment import Artefact
from bitwright.graph import capture
from bitwright.plan import Plan
from bitwright.ptq import settle_ranges, settle_weights
from bitwright.ptq.quantize import Quantized, quantize
from bitwright.quantizers import (
    Quantizer,
    attachment_of,
    compile_arithmetic,
    find_attachment,
    prepare,
    replaced_modules,
    unwrap_forward,
)
from bitwright.quantizers.grid import is_finite
from bitwright.quantizers.state import parameter_problems
from bitwright.training.distributed import current_ranks, keep_groups, share_buffers
from bitwright.training.optimizer import OptimizerWatch, first_of, learned_parameter_problems

log = getLogger(__name__)
_RECORDED = 4
_GPU_INTERVAL = 10  # steps between checks of learned scales on devices that a check would have to wait for


@strict
class Qat:
    """A model that trains with quantizers.

    Create it before the optimizer, DDP and torch.compile. Call `after_step()` after each optimizer step,
    `after_epoch()` at the end of each epoch, and `finish()` at the end of training. With a process group, each rank
    passes its own calibration batches, and ranges are merged over all ranks. `fuse` compiles the quantizers' arithmetic
    in a model that isn't compiled itself.

    `state_dict()` contains what the checkpoints of the model and the optimizer don't. To resume, create the same Qat,
    then load all three.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> batches = [torch.randn(16, 4) for _ in range(2)]
    >>> qat = Qat(model, batches, precision="int8")
    >>> optimizer = torch.optim.SGD(qat.parameter_groups(weight_decay=1e-4), lr=0.01)
    >>> for batch in batches:
    ...     optimizer.zero_grad()
    ...     model(batch).square().mean().backward()
    ...     optimizer.step()
    ...     qat.after_step()
    >>> qat.after_epoch()
    >>> qat.finish()
    <Quantized Sequential for onnxruntime: 6 quantized sites>
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        *,
        precision: Precision = "int8",
        backend: str | None = None,
        example: Any = None,
        name: str | None = None,
        freeze_observers: Amount | None = None,
        freeze_bn: Amount | None = None,
        fuse: bool = True,
        progress: Progress | None = None,
        **choices: Unpack[Choices],
    ) -> None:
        plan, target, made, self.notes = resolve(precision, backend, choices)
        self.quantized = _quantized(model, iter(batches), plan, target, example, name, progress, made)
        self._begin(freeze_observers, freeze_bn, fuse)

    @classmethod
    def resumed(
        cls,
        model: nn.Module,
        plan: Plan,
        example: Any,
        *,
        freeze_observers: Amount | None = None,
        freeze_bn: Amount | None = None,
        fuse: bool = True,
    ) -> Qat:
        """Create quantizers without ranges, which a checkpoint provides next."""
        self = cls.__new__(cls)
        self.notes = []
        graph = capture(model, example)
        prepare(model, plan, graph=graph)
        backend = plan.backend or DEFAULT_BACKEND
        self.quantized = Quantized(model=model, plan=plan, graph=graph, example=example, backend=backend)
        self._begin(freeze_observers, freeze_bn, fuse)
        return self

    @classmethod
    def of(cls, quantized: Quantized, *, fuse: bool = True) -> Qat:
        """Train a model that is already quantized and calibrated."""
        self = cls.__new__(cls)
        self.notes = []
        self.quantized = quantized
        self._begin(None, None, fuse)
        return self

    def _begin(self, freeze_observers: int | None, freeze_bn: int | None, fuse: bool) -> None:
        if find_attachment(self.model) is None:
            raise TrainError.single(
                "the plan has no quantized site",
                fix="set the format of at least one site, or train in float",
                code="plan-all-float",
            )
        compile_arithmetic(self.model, fuse)
        self.epochs = self.steps = 0
        self._optimizers: OptimizerWatch | None = OptimizerWatch(self.model)
        self._initial = [(site, p, p.detach().clone()) for site, p in self._learned() if p.requires_grad]
        self.freeze_observers = freeze_observers
        self.freeze_bn = freeze_bn
        self.raised: set[str] = set()
        self.following = [
            q for q in attachment_of(self.model).quantizers.values() if not (q.learned or q.of or q.spec.format.dynamic)
        ]
        for quantizer in self.following:
            quantizer.following = True
            if quantizer.observer is None or quantizer.weight:  # otherwise keep the observer of calibration
                quantizer.observer = quantizer.new_observer()
        self._freeze_when_due()

    # -- in the loop ---------------------------------------------------------------------------------------

    def after_step(self) -> None:
        """Update the ranges that aren't learned with the data of this step.

        It raises an error if a quantizer became NaN or infinite, and warns if the optimizer doesn't train the scales.
        """
        self.steps += 1
        if self.following:
            try:
                settle_ranges(self.following)
            except RangeDiverged as error:
                found = error.problems[0]
                what = f"{found.what}, at step {self.steps}"
                raise RangeDiverged(what, where=found.where, fix=found.fix, code=found.code) from error
        self._check_scales()
        if self._optimizers is not None and self._optimizers.found:
            self._warn(learned_parameter_problems(self._learned(), self._optimizers.found))
            self._optimizers.stop()
            self._optimizers = None

    def after_epoch(self) -> None:
        """Settle the model as for deployment, and freeze what is configured."""
        keep_groups()  # the framework may leave the process group before its DDP modules are freed
        self.settle()
        self.at_epoch(self.epochs + 1)

    def at_epoch(self, epochs: int) -> None:
        """Set the number of finished epochs and freeze what is configured; for trainers that count epochs."""
        self.epochs = epochs
        self._freeze_when_due()

    def settle(self, *, alone: bool = False) -> None:
        """Refit the ranges of weights, and restore guards that training violated.

        All ranks must call it: in DDP each rank has its own statistics of norms, which folded weights depend on, so
        rank 0's statistics are sent to all first. With `alone`, the other ranks don't take part.
        """
        self._find_replaced()
        self._check_parameters()
        self._follow_device()
        if current_ranks().several and not alone:
            share_buffers(self.model)
        raised = set(settle_weights(self.model, self.quantized.example))
        if raised - self.raised and current_ranks().first:
            log.info("raised %d weight scales that training had moved beyond their guard", len(raised))
        self.raised |= raised

    def finish(self) -> Quantized:
        """End training and return the model for export, without a trainer's autocast wrapper."""
        keep_groups()
        self._warn_unchanged()
        self.stop_following()
        unwrap_forward(self.model)
        compile_arithmetic(self.model, False)
        self.settle()
        return self.quantized

    def export(self, path: str | Path, *, dynamic_batch: bool = True) -> Artefact:
        """Write the artefact for the backend's runtime."""
        return self.quantized.export(path, dynamic_batch=dynamic_batch)

    # -- for trainers --------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The prepared model."""
        return self.quantized.model

    @property
    def plan(self) -> Plan:
        """The plan of the model."""
        return self.quantized.plan

    def parameter_groups(self, *, weight_decay: float, lr: float | None = None) -> list[dict[str, Any]]:
        """Optimizer groups: weights; norms and biases, and quantizer state, without decay (`lr` is for the last)."""
        return parameter_groups(self.model, weight_decay=weight_decay, quantizer_lr=lr)

    def check_optimizer(self, *optimizers: torch.optim.Optimizer) -> None:
        """Raise an error if the optimizers omit learned quantizer state or apply weight decay to it."""
        self._find_replaced()
        if problems := learned_parameter_problems(self._learned(), optimizers):
            raise TrainError(problems)

    def state_dict(self) -> dict[str, Any]:
        """The plan, the number of epochs and the state of observers, as plain values and tensors."""
        observers = {
            site: {name: value for name, value in state.items() if name != "format"}
            for site, state in self.observer_state().items()
        }
        return {"plan": self.plan.to_yaml(), "epochs": self.epochs, "observers": observers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the result of `state_dict`. A damaged state, or one of another plan, is rejected."""
        kinds = {"plan": str, "epochs": int, "observers": dict}
        wrong = [key for key, kind in kinds.items() if not isinstance(state.get(key), kind)]
        if wrong or state["epochs"] < 0:
            raise _damaged(
                ", ".join(wrong) or "epochs", "this entry of the saved quantization state is missing or invalid"
            )
        changes = Plan.from_yaml(state["plan"], where="the checkpoint's plan").diff(self.plan)
        if changes:
            first, more = changes[0], f"; {len(changes) - 1} more differ" if len(changes) > 1 else ""
            raise TrainError.single(
                f"the checkpoint was trained with another plan{more}",
                where=first.where,
                value=first.after,
                fix="save qat.plan with the first run, and resume with precision=Plan.load(...)",
                code="resume-mismatch",
            )
        self.load_observer_state(state["observers"], state["epochs"])

    def stop_following(self) -> None:
        """Freeze all ranges."""
        for quantizer in self.following:
            quantizer.following, quantizer.observer = False, None
        self.following = []

    def observer_state(self) -> dict[str, dict[str, Any]]:
        """The state of the observers, for a checkpoint."""
        return {q.site: dict(vars(q.observer)) for q in self.following if q.observer is not None}

    def load_observer_state(self, state: dict[str, dict[str, Any]], epochs: int) -> None:
        """Restore the state of the observers after this many epochs."""
        self.at_epoch(epochs)
        for quantizer in self.following:
            assert quantizer.observer is not None
            known = state.get(quantizer.site)
            if not isinstance(known, dict):
                raise _damaged(quantizer.site, "the saved state doesn't contain this observer")
            if not known.keys() <= vars(quantizer.observer).keys():
                raise _damaged(quantizer.site, "the saved state belongs to another kind of observer")
            device = quantizer.scale.device
            seen = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in known.items()}
            vars(quantizer.observer).update(seen, format=quantizer.spec.format)

    def _learned(self) -> list[tuple[str, nn.Parameter]]:
        return [(q.site, p) for q in attachment_of(self.model).quantizers.values() for p in q.parameters()]

    def _warn(self, problems: list[Problem]) -> None:
        """Log warnings and keep them for the report."""
        self.quantized = replace(self.quantized, warnings=(*self.quantized.warnings, *problems))
        if current_ranks().first:
            log_warnings(problems)

    def _warn_unchanged(self) -> None:
        """Warn if training didn't change learned parameters, which also finds optimizers without torch's hooks."""
        same = [(site, p) for site, p, before in self._initial if _same(p, before)]
        known = {problem.code for problem in self.quantized.warnings}
        some = [site for site, p in same if p.grad is not None and bool(_local(p.grad).any())]
        sites = [site for site, _ in same] if len(same) == len(self._initial) else some
        if self.steps == 0 or not sites or "not-in-optimizer" in known:
            return
        what = f"learned quantizer parameters didn't change in {counted(self.steps, 'step')}"
        fix = "create the optimizer after Qat(...), with qat.parameter_groups(weight_decay=...), or raise their lr"
        self._warn([Problem(what=what, where=first_of(sites), fix=fix, code="scales-unchanged")])

    @torch.no_grad()
    def _check_scales(self) -> None:
        """Raise an error if a learned quantizer parameter isn't finite."""
        learned = self._learned()
        if not learned or (self.steps % _GPU_INTERVAL and learned[0][1].device.type != "cpu"):
            return
        if isfinite(sum(_local(p).sum().item() for _, p in learned)):
            return
        for site, parameter in learned:
            if not is_finite(_local(parameter)):
                raise self._diverged(site, "a learned quantizer parameter")

    def _check_parameters(self) -> None:
        """Raise an error if a parameter isn't finite, instead of settling a model that is lost."""
        for site, parameter in self._learned():
            if not is_finite(_local(parameter)):
                raise self._diverged(site, "a learned quantizer parameter")
        own = {id(p) for _, p in self._learned()}
        named = ((name, _local(p)) for name, p in self.model.named_parameters() if id(p) not in own)
        for problem in parameter_problems(attachment_of(self.model).quantizers, named):
            raise self._diverged(problem.where, "a parameter")

    def _diverged(self, where: str | None, what: str) -> TrainError:
        return TrainDiverged.single(
            f"{what} became NaN or infinite in training, noticed after step {self.steps}",
            where=where,
            fix="lower the learning rate, clip gradients, or skip the step if the loss isn't finite; "
            "then train again from the last valid checkpoint",
            code="training-diverged",
        )

    def _find_replaced(self) -> None:
        if replaced := replaced_modules(self.model):
            raise TrainError.single(
                "modules were replaced after Qat added quantizers, so they would run in float",
                where=first_of(replaced),
                fix="change the model first (convert_sync_batchnorm, adapters, …), then create Qat",
                code="modules-replaced",
            )

    def _follow_device(self) -> None:
        """Move the example to the model's device, which a trainer may have changed."""
        device = next((p.device for p in self.model.parameters()), None)
        example = self.quantized.example
        if device is not None and any(tensor.device != device for _, tensor in tensors_in(example)):
            self.quantized = replace(self.quantized, example=map_tensors(example, lambda t: t.to(device)))

    def _freeze_when_due(self) -> None:
        if self.freeze_observers is not None and self.epochs >= self.freeze_observers:
            self.stop_following()
        if self.freeze_bn is not None and self.epochs >= self.freeze_bn:
            freeze_norms(self.model)


@strict
def parameter_groups(
    model: nn.Module, *, weight_decay: float, quantizer_lr: float | None = None
) -> list[dict[str, Any]]:
    """Optimizer groups in which only weights decay; decay would pull scales to zero."""
    own = {p for module in model.modules() if isinstance(module, Quantizer) for p in module.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {
            "name": "weights",
            "params": [p for p in trained if p not in own and p.dim() > 1],
            "weight_decay": weight_decay,
        },
        {
            "name": "norms and biases",
            "params": [p for p in trained if p not in own and p.dim() <= 1],
            "weight_decay": 0.0,
        },
        {"name": "quantizers", "params": [p for p in trained if p in own], "weight_decay": 0.0},
    ]
    if quantizer_lr is not None:
        groups[2]["lr"] = quantizer_lr
    return [group for group in groups if group["params"]]


def freeze_norms(model: nn.Module) -> None:
    """Make batch norms use running statistics, even in training mode; γ and β still train."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
            module.__dict__["train"] = partial(_stay, module)


def _damaged(where: str, what: str) -> TrainError:
    fix = "resume from another checkpoint"
    return TrainError.single(what, where=where, fix=fix, code="damaged-checkpoint")


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded parameter."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _same(parameter: Tensor, before: Tensor) -> bool:
    now, then = _local(parameter.detach()), _local(before)
    return now.shape == then.shape and torch.equal(now.to(then.device), then)


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    return module


def _quantized(
    model: nn.Module,
    batches: Iterator[Any],
    plan: Plan | None,
    backend: str,
    example: Any,
    name: str | None,
    progress: Progress | None,
    choices: Choices,
) -> Quantized:
    """Like `bitwright.quantize`; with several ranks, all use rank 0's plan, because hosts may differ."""
    ranks = current_ranks()
    if plan is None and ranks.several:
        first = list(islice(batches, _RECORDED))
        if not first:
            raise CalibrationError(
                "this rank has no calibration batch",
                where=f"rank {ranks.rank}",
                fix="pass at least as many batches as there are processes",
                code="no-calibration-data",
            )
        graph = capture(model, *(first if example is None else [example, *first]))
        text = make_plan(graph, backend, model=name, **choices).to_yaml() if ranks.first else None
        plan = Plan.from_yaml(ranks.tell(text), where="rank 0's plan")
        batches = chain(first, batches)
    given: dict[str, Any] = {"backend": backend, "example": example, "name": name, "progress": progress}
    given |= {"measure": False, "steps": ()}  # training changes the weights anyway
    if plan is not None:
        return quantize(model, batches, plan=plan, **given)
    return quantize(model, batches, **given, **choices)
