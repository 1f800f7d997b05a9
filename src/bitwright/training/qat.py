"""Quantization within anybody's training loop: quantizers before the optimizer, two calls within the loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from logging import getLogger
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from bitwright.backends import Choices, make_plan
from bitwright.backends.precisions import Precision, resolve
from bitwright.core.arguments import strict
from bitwright.core.errors import CalibrationError, Problem, TrainError
from bitwright.core.process_group import keep_groups
from bitwright.core.progress import Progress
from bitwright.core.tensor_tree import map_tensors, tensors_in
from bitwright.deploy import Artefact
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
from bitwright.training.distributed import here, share_buffers

log = getLogger(__name__)
_RECORDED = 4


@strict
class Qat:
    """A model that trains with quantizers in it.

    Make it before the optimizer, DDP and torch.compile; call `after_step()` after each step of the optimizer,
    `after_epoch()` at the end of each epoch, and `finish()` at the end of all. With a process group each rank gives
    its own calibration batches, and ranges are reduced over all. `fuse` compiles the quantizers' arithmetic, in a model
    that isn't compiled itself.

    `state_dict()` is what the model's and the optimizer's checkpoints lack: to resume, make the same Qat again, then
    load all three.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        *,
        quantize: Precision = "int8",
        backend: str | None = None,
        example: Any = None,
        name: str | None = None,
        freeze_observers: int | None = None,
        freeze_bn: int | None = None,
        fuse: bool = True,
        progress: Progress | None = None,
        **choices: Unpack[Choices],
    ) -> None:
        plan, target, made, self.notes = resolve(quantize, backend, choices)
        self.quantized = _quantized(model, iter(batches), plan, target, example, name, progress, made)
        self._begin(freeze_observers, freeze_bn, fuse)

    @classmethod
    def resumed(
        cls,
        model: nn.Module,
        plan: Plan,
        example: Any,
        *,
        freeze_observers: int | None = None,
        freeze_bn: int | None = None,
        fuse: bool = True,
    ) -> Qat:
        """Quantizers without ranges: a checkpoint is about to bring them."""
        self = cls.__new__(cls)
        self.notes = []
        graph = capture(model, example)
        prepare(model, plan, graph=graph)
        backend = plan.backend or "onnxruntime"
        self.quantized = Quantized(model=model, plan=plan, graph=graph, example=example, backend=backend)
        self._begin(freeze_observers, freeze_bn, fuse)
        return self

    def _begin(self, freeze_observers: int | None, freeze_bn: int | None, fuse: bool) -> None:
        if find_attachment(self.model) is None:
            raise TrainError.single(
                "the plan quantizes nothing", fix="give at least one site a format, or train without quantize"
            )
        compile_arithmetic(self.model, fuse)
        self.epochs = 0
        self.freeze_observers = freeze_observers
        self.freeze_bn = freeze_bn
        self.raised: set[str] = set()
        self.following = [q for q in attachment_of(self.model).quantizers.values() if not (q.learned or q.of)]
        for quantizer in self.following:
            quantizer.following = True
            if quantizer.observer is None or quantizer.weight:  # else calibration's goes on
                quantizer.observer = quantizer.new_observer()
        self._freeze_when_due()

    # -- in the loop ---------------------------------------------------------------------------------------

    def after_step(self) -> None:
        """Ranges that aren't learned follow what this step has seen."""
        if self.following:
            settle_ranges(self.following)

    def after_epoch(self) -> None:
        """Make the model what would be deployed now, and freeze what is due."""
        keep_groups()  # of DDPs that the loop's framework made: it may leave the group before they are freed
        self.settle()
        self.at_epoch(self.epochs + 1)

    def at_epoch(self, epochs: int) -> None:
        """So many epochs are behind us: freeze what is due. A trainer that resumes says so by itself."""
        self.epochs = epochs
        self._freeze_when_due()

    def settle(self, *, alone: bool = False) -> None:
        """Ranges of weights as they are now; guards that training has broken hold again.

        All ranks call it: in DDP the statistics of norms are each rank's own, and folded weights depend on them, so
        rank 0's are given to all first. `alone`: this rank only looks, the others don't take part.
        """
        self._find_replaced()
        self._follow_device()
        if here().several and not alone:
            share_buffers(self.model)
        raised = set(settle_weights(self.model, self.quantized.example))
        if raised - self.raised and here().first:
            log.info("%d weight scales were raised: training had moved them beyond their guard", len(raised))
        self.raised |= raised

    def finish(self) -> Quantized:
        """No more training: what is exported is what was trained, without a trainer's autocast around it."""
        keep_groups()
        self.stop_following()
        unwrap_forward(self.model)
        compile_arithmetic(self.model, False)
        self.settle()
        return self.quantized

    def export(self, path: str | Path, *, dynamic_batch: bool = True) -> Artefact:
        """Write the artefact for the backend's runtime."""
        return self.quantized.export(path, dynamic_batch=dynamic_batch)

    # -- what a trainer asks -------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The prepared model."""
        return self.quantized.model

    @property
    def plan(self) -> Plan:
        """The plan that is trained under."""
        return self.quantized.plan

    def parameter_groups(self, *, weight_decay: float, lr: float | None = None) -> list[dict[str, Any]]:
        """Groups for an optimizer: weights; norms and biases, and quantizer state, without decay (`lr` is theirs)."""
        return parameter_groups(self.model, weight_decay=weight_decay, quantizer_lr=lr)

    def check_optimizer(self, *optimizers: torch.optim.Optimizer) -> None:
        """Raise if the optimizers don't train what is learned here, or would let it decay; call it before a step."""
        self._find_replaced()
        decay = {
            parameter: float(group.get("weight_decay", 0.0))
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        learned = [(q.site, p) for q in attachment_of(self.model).quantizers.values() for p in q.parameters()]
        absent = [site for site, p in learned if p.requires_grad and p not in decay]
        decaying = [site for site, p in learned if decay.get(p, 0.0) > 0.0]
        problems = []
        if absent:
            fix = "make the optimizer after Qat(...), of all parameters of the model"
            problems.append(Problem(what="what is learned here isn't in the optimizer", where=_some(absent), fix=fix))
        if decaying:
            fix = "make the optimizer of parameter_groups(model, weight_decay=...), which spares quantizers"
            problems.append(Problem(what="weight decay would pull scales to zero", where=_some(decaying), fix=fix))
        if problems:
            raise TrainError(problems)

    def state_dict(self) -> dict[str, Any]:
        """Plan, epochs, and what observers have seen: plain values and tensors."""
        observers = {
            site: {name: value for name, value in state.items() if name != "format"}
            for site, state in self.observer_state().items()
        }
        return {"plan": self.plan.to_yaml(), "epochs": self.epochs, "observers": observers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state_dict` gave. A damaged state, or one of another plan, is refused as a whole."""
        kinds = {"plan": str, "epochs": int, "observers": dict}
        wrong = [key for key, kind in kinds.items() if not isinstance(state.get(key), kind)]
        if wrong or state["epochs"] < 0:
            raise _damaged(
                ", ".join(wrong) or "epochs", "the saved state of quantization lacks this, or has no such value"
            )
        changes = Plan.from_yaml(state["plan"], where="the checkpoint's plan").diff(self.plan)
        if changes:
            first, more = changes[0], f"; {len(changes) - 1} more differ" if len(changes) > 1 else ""
            raise TrainError.single(
                f"the checkpoint was trained under another plan{more}",
                where=first.where,
                value=first.after,
                fix="save qat.plan with the first run, and resume with quantize=Plan.load(...)",
            )
        self.load_observer_state(state["observers"], state["epochs"])

    def stop_following(self) -> None:
        """Ranges stand still from now on."""
        for quantizer in self.following:
            quantizer.following, quantizer.observer = False, None
        self.following = []

    def observer_state(self) -> dict[str, dict[str, Any]]:
        """What observers have seen so far, for a checkpoint."""
        return {q.site: dict(vars(q.observer)) for q in self.following if q.observer is not None}

    def load_observer_state(self, state: dict[str, dict[str, Any]], epochs: int) -> None:
        """Resume after so many epochs."""
        self.at_epoch(epochs)
        for quantizer in self.following:
            assert quantizer.observer is not None
            known = state.get(quantizer.site)
            if not isinstance(known, dict):
                raise _damaged(quantizer.site, "the saved state has nothing of this observer")
            if not known.keys() <= vars(quantizer.observer).keys():
                raise _damaged(quantizer.site, "the saved state is not that of this observer")
            device = quantizer.scale.device
            seen = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in known.items()}
            vars(quantizer.observer).update(seen, format=quantizer.spec.format)

    def _find_replaced(self) -> None:
        if replaced := replaced_modules(self.model):
            raise TrainError.single(
                "modules were replaced after quantizers were put on: these would run in float",
                where=_some(replaced),
                fix="change the model first (convert_sync_batchnorm, adapters, …), then make Qat",
            )

    def _follow_device(self) -> None:
        """Trainers move the model after Qat was made: the example call goes with it."""
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
    """Weights decay; norms, biases and quantizer state don't: decay would pull a scale to zero, not to a better one."""
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
    """Batch norms use running statistics from now on, whatever mode the model is put into; γ and β train on."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
            module.__dict__["train"] = partial(_stay, module)


def _damaged(where: str, what: str) -> TrainError:
    fix = "resume from another checkpoint"
    return TrainError.single(what, where=where, fix=fix, code="damaged-checkpoint")


def _some(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


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
    """As `bitwright.quantize`; with several ranks, rank 0's plan is everybody's, as hosts may differ."""
    ranks = here()
    if plan is None and ranks.several:
        first = list(islice(batches, _RECORDED))
        if not first:
            raise CalibrationError(
                "this rank has no calibration batch",
                where=f"rank {ranks.rank}",
                fix="give at least as many batches as there are processes",
            )
        graph = capture(model, *(first if example is None else [example, *first]))
        text = make_plan(graph, backend, model=name, **choices).to_yaml() if ranks.first else None
        plan = Plan.from_yaml(ranks.tell(text), where="rank 0's plan")
        batches = chain(first, batches)
    if plan is not None:
        return quantize(model, batches, backend=backend, plan=plan, example=example, progress=progress, measure=False)
    return quantize(
        model, batches, backend=backend, example=example, name=name, progress=progress, measure=False, **choices
    )
