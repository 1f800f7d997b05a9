"""The prepared model as `torch.export` sees it: with a marker at each site, and nothing lost on the way."""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.attach import Attachment, Fold, Quantizer, attachment_of, in_mode, tapped
from bitwright.deploy.qdq import Recorded
from bitwright.errors import ExportError
from bitwright.graph.tree import map_tensors
from bitwright.modes import evaluating

log = logging.getLogger("bitwright")


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A program with markers, and what a real forward of the model says about it."""

    program: torch.export.ExportedProgram
    recorded: Recorded
    dynamic_batch: bool


def trace(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, dynamic_batch: bool, codes: bool = True
) -> Traced:
    """The prepared model with a marker at each site, and the integers (`codes`) or numbers of what is constant.

    A program that doesn't pass the quantizers that the model passes is refused.
    """
    attachment = attachment_of(model)
    with evaluating(model):
        with _marking(attachment), in_mode(model, "quantize"):
            program, dynamic = export_program(model, args, kwargs, dynamic_batch)
        recorded = _record(model, attachment, args, kwargs, _constant_sites(program), codes=codes)
    _assert_complete(program, recorded)
    return Traced(program=program, recorded=recorded, dynamic_batch=dynamic)


def _record(
    model: nn.Module,
    attachment: Attachment,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    constant: set[str],
    *,
    codes: bool,
) -> Recorded:
    """One real forward: which sites are passed, and the integers (or rounded numbers) of those that are constant."""
    recorded = Recorded()

    def remember(site: str, quantizer: Quantizer, x: Tensor) -> None:
        recorded.passed[site, str(x.dtype), x.dim()] += 1
        if site in constant and codes:
            recorded.weights[site] = quantizer.integers(x)
        elif site in constant:
            recorded.values[site] = quantizer.quantize(x.to(torch.float32)).to(x.dtype)

    with tapped(model, remember), torch.no_grad(), in_mode(model, "quantize"):
        model(*args, **kwargs)
    for site, fold in attachment.folds.items():
        if fold.bias is not None:
            recorded.constants[site] = fold.bias
            fold.bias = None
    return recorded


@contextlib.contextmanager
def _marking(attachment: Attachment) -> Iterator[None]:
    holders: list[Quantizer | Fold] = [*attachment.quantizers.values(), *attachment.folds.values()]
    for holder in holders:
        holder.marking = True
    try:
        yield
    finally:
        for holder in holders:
            holder.marking = False


def export_program(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_batch: bool
) -> tuple[torch.export.ExportedProgram, bool]:
    """`torch.export`, with any batch if the model's code lets it; says whether it does."""
    # Views into one tensor, as examples often are, would be taken for inputs that depend on each other.
    args, kwargs = map_tensors((args, kwargs), Tensor.clone)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own notes about its internals; failures raise
        if dynamic_batch:
            try:
                # A batch of one would be taken for a constant.
                wide_args, wide_kwargs = _at_least_two(args), _at_least_two(kwargs)
                shapes = (_dynamic(wide_args), _dynamic(wide_kwargs))
                program = torch.export.export(
                    model,
                    wide_args,
                    wide_kwargs,
                    dynamic_shapes=_by_parameter(model, *shapes),
                    strict=False,
                )
                return program, _has_dynamic_inputs(program)
            except Exception as error:
                log.warning("no dynamic batch: the model's own code fixes it (%s)", str(error).strip().split("\n")[0])
        try:
            return torch.export.export(model, args, kwargs, strict=False), False
        except Exception as error:
            raise ExportError(
                f"torch.export can't follow the model: {type(error).__name__}: {str(error).strip().splitlines()[0]}",
                fix="data-dependent control flow can't be exported; export the part without it",
            ) from error


def _at_least_two(nest: Any) -> Any:
    def widen(tensor: Tensor) -> Tensor:
        if tensor.dim() and tensor.shape[0] == 1:
            return tensor.repeat(2, *[1] * (tensor.dim() - 1))
        return tensor

    return map_tensors(nest, widen)


def _dynamic(nest: Any) -> Any:
    def mark(value: Any) -> Any:
        if isinstance(value, Tensor):
            return {0: torch.export.Dim.AUTO} if value.dim() else None
        if isinstance(value, dict):
            return {key: mark(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(mark(item) for item in value)
        return None

    return mark(nest)


def _by_parameter(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Positional and keyword specs as torch.export wants them: by parameter name if there are keywords."""
    if not kwargs:
        return args
    bound = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    flat: dict[str, Any] = {}
    for name, value in bound.items():
        parameter = inspect.signature(model.forward).parameters[name]
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            flat[name] = dict(value)
        else:
            flat[name] = value
    return flat


def _has_dynamic_inputs(program: torch.export.ExportedProgram) -> bool:
    names = set(program.graph_signature.user_inputs)
    for node in program.graph.nodes:
        value = node.meta.get("val") if node.op == "placeholder" and node.name in names else None
        if isinstance(value, Tensor) and any(not isinstance(size, int) for size in value.shape[:1]):
            return True
    return False


def _constant_sites(program: torch.export.ExportedProgram) -> set[str]:
    """Sites whose numbers no input can change, not even by its size: weights, stored or computed."""
    signature = program.graph_signature
    mutable = set(signature.buffers_to_mutate.values())
    moving: set[torch.fx.Node] = set()
    marked: dict[str, set[torch.fx.Node]] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            if node.name in signature.user_inputs or signature.inputs_to_buffers.get(node.name) in mutable:
                moving.add(node)
        elif any(source in moving for source in node.all_input_nodes):
            moving.add(node)
        if node.op == "call_function" and node.target is torch.ops.bitwright.site.default:
            marked.setdefault(str(node.args[1]), set()).add(node.args[0])
    return {
        site
        for site, sources in marked.items()
        # a weight is folded anew at each of its uses; another site that is passed twice sees two tensors
        if not sources & moving and (len(sources) == 1 or site.endswith((":weight", ":bias")))
    }


def _assert_complete(program: torch.export.ExportedProgram, recorded: Recorded) -> None:
    """The program passes the quantizers that the model passes, with tensors of the same kind."""
    markers = [
        (str(node.args[1]), node.args[0].meta["val"])
        for node in program.graph.nodes
        if node.op == "call_function" and node.target is torch.ops.bitwright.site.default
    ]
    found = Counter((site, str(x.dtype), x.dim()) for site, x in markers if site not in recorded.constants)
    if found != recorded.passed:
        differ = {site for site, _, _ in (found - recorded.passed) + (recorded.passed - found)}
        raise ExportError(
            f"the exported program passes {found.total()} quantizers, the model {recorded.passed.total()}",
            value=sorted(differ)[:8],
            fix="under torch.export the model's code takes another path there: keep these sites in float",
        )
