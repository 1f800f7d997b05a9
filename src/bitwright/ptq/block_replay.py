"""Divide a model into blocks, and run it block by block over the calibration data, quantized and in float."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bitwright.core.errors import BitwrightError
from bitwright.core.files import scratch_folder, writing
from bitwright.core.tensor_tree import as_call, eval_mode, tensors_in
from bitwright.graph import Source
from bitwright.graph.recording import Call, Tape, Values, depends_on_parameters, inputs_of, record, run_call
from bitwright.ptq.step import PtqContext, Weight
from bitwright.quantizers import in_mode

_PASSING = ("batch_norm", "relu", "relu6", "hardtanh", "leaky_relu", "prelu", "dropout", "gelu", "silu", "hardswish")


@dataclass(frozen=True, kw_only=True)
class ReconstructionBlock:
    """The calls `start` to `stop` of a recording, which compute `output`."""

    start: int
    stop: int
    output: Source
    weights: tuple[Weight, ...]

    @property
    def name(self) -> str:
        """The names of the first and last weight."""
        names = [weight.op.name for weight in self.weights]
        return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"


def find_layers(context: PtqContext) -> list[ReconstructionBlock]:
    """One block per weight, including the norm and the activation function after it."""
    weights = context.weights()
    starts = {context.tape.position(weight.op.name) for weight in weights}
    return [_layer(context, weight, starts) for weight in weights]


def _layer(context: PtqContext, weight: Weight, starts: set[int]) -> ReconstructionBlock:
    start = end = context.tape.position(weight.op.name)
    source = Source("op", weight.op.name)
    while source not in context.graph.output_sources and len(readers := context.graph.consumers.get(source, ())) == 1:
        op = readers[0][0]
        if op.kind not in _PASSING or context.graph.partial(op):
            break
        position = context.tape.position(op.name)
        if any(start < other <= position for other in starts):  # another branch starts before this call
            break
        end, source = position, Source("op", op.name)
    return ReconstructionBlock(start=start, stop=end + 1, output=source, weights=(weight,))


def find_blocks(context: PtqContext, chain: int) -> list[ReconstructionBlock]:
    """Blocks that cover the whole model; a chain is divided into blocks of at most `chain` weights."""
    tape = context.tape
    positions = {tape.position(weight.op.name): weight for weight in context.weights()}
    found: list[ReconstructionBlock] = []
    open_: list[tuple[int, int, Source]] = []  # stretches that may still be extended

    def close() -> None:
        weights = _between(positions, open_)
        if weights:
            found.append(
                ReconstructionBlock(start=open_[0][0], stop=open_[-1][1], output=open_[-1][2], weights=weights)
            )
            open_.clear()

    for stretch in _stretches(tape):
        inside = _between(positions, [stretch])
        here = _between(positions, open_)
        trails = not inside and all(call.op.kind in _PASSING for call in tape.calls[stretch[0] : stretch[1]])
        if here and not trails and (len(inside) > 1 or not inside or len(here) + len(inside) > chain):
            close()
        open_.append(stretch)
        if len(inside) > 1 and not _followed_by_passing(tape, stretch[1]):
            close()
    close()
    return found


def _followed_by_passing(tape: Tape, position: int) -> bool:
    return position < len(tape.calls) and tape.calls[position].op.kind in _PASSING


def _between(positions: dict[int, Weight], stretches: Sequence[tuple[int, int, Source]]) -> tuple[Weight, ...]:
    return tuple(
        weight for at, weight in sorted(positions.items()) if any(start <= at < stop for start, stop, _ in stretches)
    )


def _stretches(tape: Tape) -> list[tuple[int, int, Source]]:
    """Calls between neighbouring cuts, with the single tensor that later calls read."""
    relevant = depends_on_parameters(tape.calls)
    alive: set[Source] = set()
    found: list[tuple[int, int, Source]] = []
    start = 0
    for position, call in enumerate(tape.calls, 1):
        if call.op.name in relevant:
            alive |= {Source("op", call.op.name, n) for n in range(len(call.op.outputs))}
        alive = {source for source in alive if tape.last_read.get(source, -1) >= position}
        last = position == len(tape.calls)
        if len(alive) == 1 or (last and alive):
            found.append((start, position, next(iter(alive)) if len(alive) == 1 else tape.outputs[0]))
            start = position
    return found


_MIB = 1 << 20


class Replay:
    """The intermediate tensors of all calibration pieces at one call, for the quantized and the float model."""

    def __init__(self, context: PtqContext, batch: int, *, targets: bool = True) -> None:
        self.work = context
        self.position = 0
        self.targets = targets
        self.tapes: list[Tape] = []
        self._live = context.current_tensors()  # read once: steps modify parameters in place and never replace them
        self._files = ExitStack()
        self._folder = self._files.enter_context(scratch_folder())
        self._held: dict[tuple[int, str], Values | Path] = {}
        self._bytes = 0
        known: dict[tuple[Any, ...], Tape] = {}
        for index, piece in enumerate(context.data.pieces(batch)):
            shape = tuple((path, tuple(t.shape)) for path, t in tensors_in(as_call(piece)))
            if shape not in known:
                known[shape] = _checked(context, piece)
            if known[shape].names != context.tape.names:
                raise BitwrightError(
                    "inputs of different shapes take different paths through the model, so blocks would differ",
                    where=f"calibration batch of {[size for _, size in shape]}",
                    fix="calibrate with batches of one shape",
                    code="shape-dependent-path",
                )
            self.tapes.append(known[shape])
            inputs = inputs_of(context.model, piece)
            self.keep(index, "quantized", inputs)
            if targets:
                self.keep(index, "float", inputs)

    def __len__(self) -> int:
        return len(self.tapes)

    @property
    def tape(self) -> Tape:
        """The recording of the first piece; the others differ only in sizes."""
        return self.tapes[0]

    def values(self, index: int, kind: str) -> Values:
        """The tensors of a piece at the current position, of the `quantized` or the `float` model."""
        held = self._held[index, kind]
        if isinstance(held, Path):
            return {_source(name): tensor for name, tensor in load_file(held).items()}
        return held

    def quantized(self, index: int, stop: int, values: Values | None = None) -> Values:
        """Run a piece up to `stop` with the current quantizers."""
        start = self.values(index, "quantized") if values is None else values
        tape = self.tapes[index]
        fixed = {**tape.constants, **self._live}
        return tape.run(self.position, stop, start, fixed, self._hooked)

    def float(self, index: int, stop: int, values: Values | None = None, start: int | None = None) -> Values:
        """Run a piece up to `stop` in the float model, as it was before the first step that needs ranges."""
        given = self.values(index, "float") if values is None else values
        tape = self.tapes[index]
        fixed = {**tape.constants, **self.work.reference}
        return tape.run(self.position if start is None else start, stop, given, fixed, run_call)

    @torch.no_grad()
    def advance(self, stop: int) -> None:
        """Run all pieces up to `stop` and store the results."""
        if stop <= self.position:
            return
        with eval_mode(self.work.model), in_mode(self.work.model, "quantize"):
            for index in range(len(self)):
                for kind, run in (("quantized", self.quantized), ("float", self.float)):
                    if (index, kind) in self._held:
                        self.keep(index, kind, run(index, stop))
        self.position = stop

    def forget(self, *kinds: str) -> None:
        """Discard the stored tensors of these kinds."""
        for index, kind in [key for key in self._held if key[1] in kinds]:
            self._discard(index, kind)

    def close(self) -> None:
        """Remove the temporary files."""
        self._files.close()

    def _hooked(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.work.attachment.run(call.op, call.func, args, kwargs)

    def keep(self, index: int, kind: str, values: Values) -> None:
        """Store tensors of a piece, in memory if the limit allows, otherwise in a file."""
        self._discard(index, kind)
        size = _size(values)
        if self._bytes + size <= self.work.memory * _MIB:
            self._held[index, kind] = values
            self._bytes += size
            return
        path = self._folder / f"{index}-{kind}.safetensors"
        with writing(path, needed=size):
            save_file({_name(s): t.contiguous().clone() for s, t in values.items()}, path)
        self._held[index, kind] = path

    def _discard(self, index: int, kind: str) -> None:
        before = self._held.pop((index, kind), None)
        if isinstance(before, Path):
            before.unlink()
        elif before is not None:
            self._bytes -= _size(before)


def _size(values: Values) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in values.values())


def _name(source: Source) -> str:
    return f"{source.kind}\n{source.name}\n{source.index}"


def _source(name: str) -> Source:
    kind, source, index = name.split("\n")
    return Source(kind, source, int(index))  # type: ignore[arg-type]  # written by `_name`


def _checked(context: PtqContext, piece: Any) -> Tape:
    """Record a call with this input shape, and verify that the recording reproduces the model's output."""
    args, kwargs = as_call(piece)
    with eval_mode(context.model), torch.no_grad(), in_mode(context.model, "float"):
        tape, inputs = record(context.model, piece)
        expected = [tensor for _, tensor in tensors_in(context.model(*args, **kwargs))]
        fixed = {**tape.constants, **context.current_tensors()}
        values = tape.run(0, len(tape.calls), inputs, fixed, run_call)
    found = [values.get(source) for source in tape.outputs]
    if not all(_same(a, b) for a, b in zip(found, expected, strict=True)):
        raise BitwrightError(
            "the model can't run block by block, because it writes into views of tensors or uses random numbers",
            value=type(context.model).__name__,
            fix="use steps that don't need blocks (equalize), or remove the side effects from these operators",
            code="not-replayable",
        )
    return tape


def _same(a: Tensor | None, b: Tensor) -> bool:
    if a is None or a.shape != b.shape:
        return False
    near = 1e-5 * min(1.0, float(b.float().abs().max()) if b.numel() else 1.0)  # all outputs may be small
    return torch.allclose(a.float(), b.float(), rtol=1e-4, atol=near)


def by_channel(values: Tensor, kind: str) -> Tensor:
    """Reshape an operator's output to (channels, everything else)."""
    axis = -1 if kind in ("linear", "addmm", "matmul") else 1
    return values.movedim(axis, 0).flatten(1)
