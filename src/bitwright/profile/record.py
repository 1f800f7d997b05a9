"""`record_step(model, batch, loss)`: run one real training step of a float model and write down what it does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bitwright.arguments import strict
from bitwright.attach import find_attachment
from bitwright.errors import CaptureError
from bitwright.graph.capture import Recorder, untouched
from bitwright.graph.functions import kind_of, locate
from bitwright.graph.intercept import install, uninstall
from bitwright.graph.tree import as_call, batch_size, tensors_in
from bitwright.profile.signature import LOSS, CallSpec, TensorSpec, describe
from bitwright.profile.step import Batch, Loss, StepSettings
from bitwright.profile.stepgraph import StepGraph, StepOp, Storage
from bitwright.workload import fed_with


class _StepRecorder(Recorder):
    """Beside what `capture` writes down: arguments, shared memory, and what backward keeps."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(model, args, kwargs)
        self.made: list[StepOp] = []
        self.alive: list[Tensor] = []  # memory that is given back would be taken for another tensor's
        self.storages: list[Storage] = []
        self.places: dict[int, int] = {}
        self.kept: list[Tensor] = []

    def storage(self, tensor: Tensor, kind: str) -> int:
        """The number of a tensor's memory."""
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place not in self.places:
            self.alive.append(tensor)
            self.places[place] = len(self.storages)
            self.storages.append(Storage(storage.nbytes(), kind))
        return self.places[place]

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Write the call down, and run it."""
        kind = kind_of(func)
        if kind is None:
            return func(*args, **kwargs)
        call = describe(kind, func, args, kwargs)
        tensors = [tensor for _, _, tensor in locate(kind, func, args, kwargs)]
        sources = [self._source(tensor)[0] for tensor in tensors]
        reads = tuple(self.storage(t, source.kind) for t, source in zip(tensors, sources, strict=True))
        self.kept = []
        before = len(self.ops)
        result = super().call(func, args, kwargs)
        if len(self.ops) == before:
            return result
        made = [tensor for _, tensor in tensors_in(result)] or tensors[:1]
        self.alive += made
        self._add(call, tuple(f"{s.kind}:{s.name}" for s in sources), reads, made)
        return result

    def _add(self, call: CallSpec, sources: tuple[str, ...], reads: tuple[int, ...], made: list[Tensor]) -> None:
        writes = tuple(self.storage(tensor, "op") for tensor in made)
        labels = {place: port for place, (port, _) in reversed(list(zip(reads, call.ports, strict=True)))}
        saved, own = self.saved_by(labels, set(writes))
        self.made.append(
            StepOp(
                name=self.ops[-1].name,
                call=call,
                sources=sources,
                reads=reads,
                outputs=tuple(TensorSpec.of(tensor) for tensor in made),
                writes=writes,
                saved=saved,
                saved_own=own,
            )
        )

    def saved_by(self, labels: dict[int, str], outputs: set[int]) -> tuple[tuple[str, ...], int]:
        """What the last call keeps: ports by name, and bytes of its own."""
        found: dict[str, None] = {}
        own = 0
        seen: set[int] = set()
        for tensor in self.kept:
            place = self.places.get(tensor.untyped_storage().data_ptr())
            if place is None:
                own += tensor.untyped_storage().nbytes() if tensor.data_ptr() not in seen else 0
                seen.add(tensor.data_ptr())
                self.alive.append(tensor)
            elif place in labels:
                found[labels[place]] = None
            elif place in outputs:
                found["output"] = None
        return tuple(found), own

    def pack(self, tensor: Tensor) -> Tensor:
        """Backward wants this tensor."""
        self.kept.append(tensor)
        return tensor


@strict
def record_step(
    model: nn.Module, batch: Batch, loss: Loss, settings: StepSettings | None = None, *, name: str = "model"
) -> StepGraph:
    """Record forward, loss and backward of one batch; the model is left as it was."""
    if find_attachment(model) is not None:
        raise CaptureError("a step is recorded from the float model", fix="strip(model) first; plans come later")
    settings = settings or StepSettings()
    inputs, target = batch
    args, kwargs = as_call(inputs)
    recorder = _StepRecorder(model, args, kwargs)
    gradients = [(p, p.grad) for p in model.parameters()]
    order: dict[str, None] = {}
    names = {p: n for n, p in model.named_parameters()}
    hooks = [
        p.register_post_accumulate_grad_hook(lambda p: order.setdefault(names[p])) for p in names if p.requires_grad
    ]
    for parameter in names:
        parameter.grad = None
    try:
        with untouched(model, train=True), torch.enable_grad():
            keeping = torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda tensor: tensor)
            with settings.autocast(), keeping:
                try:
                    install(model, recorder)
                    # the copies that the recorder knows: a model may write into its inputs
                    with fed_with("training", inputs):
                        output = model(*args, **kwargs)
                finally:
                    uninstall(model, recorder)
                value = loss(output, target)
            call = loss_call(loss, output, target)
            sources = tuple(str(recorder._source(tensor)[0]).partition("@")[0] for _, tensor in tensors_in(output))
            reads = tuple(recorder.storage(tensor, "unknown") for _, tensor in tensors_in(output))
            value.backward()
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, gradient in gradients:
            parameter.grad = gradient
    return StepGraph(
        model=name,
        ops=tuple(recorder.made),
        storages=tuple(recorder.storages),
        parameters={name: TensorSpec.of(p) for p, name in names.items()},
        gradient_order=tuple(order),
        loss=call,
        loss_sources=sources,
        loss_reads=reads,
        buffer_bytes=sum(b.numel() * b.element_size() for b in model.buffers()),
        input_bytes=sum(t.numel() * t.element_size() for _, t in tensors_in((inputs, target))),
        samples=batch_size(inputs),
    )


def loss_call(loss: Loss, output: Any, target: Any) -> CallSpec:
    """A loss and what it is given, as an operator call; the model's outputs are its ports."""
    name = getattr(loss, "__qualname__", type(loss).__name__)
    ports = tuple((path or "output", TensorSpec.of(tensor)) for path, tensor in tensors_in(output))
    words = [f"«{number}»" for number in range(len(ports))] + [str(TensorSpec.of(t)) for _, t in tensors_in(target)]
    return CallSpec("loss", ports, f"{LOSS}{name}({', '.join(words)})")
