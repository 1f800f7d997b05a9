"""Base class of artefacts that contain integer weights of language models for other tools, without a graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bitwright.core.errors import PlanError, Problem
from bitwright.core.formats import Format
from bitwright.core.registry import ARTEFACTS
from bitwright.core.tensor_tree import as_call, call_copied, eval_mode
from bitwright.deployment.artefacts.base import QDQ
from bitwright.graph.interception import bare
from bitwright.quantizers import CONTAINER, Attachment, Quantizer, attachment_of, in_mode
from bitwright.quantizers.grid import Grid


@dataclass(frozen=True, kw_only=True)
class IntegerWeight:
    """The weight of one linear layer: its codes, and the grid in float32."""

    site: str
    module: str
    weight: Tensor
    quantizer: Quantizer
    grid: Grid
    format: Format

    @property
    def codes(self) -> Tensor:
        """int32, (outputs, inputs); computed each time, because the codes of all layers may not fit into memory."""
        with torch.no_grad():
            return self.quantizer.integers(self.weight)

    @property
    def rounded(self) -> Tensor:
        """The values that the simulation uses."""
        with torch.no_grad():
            return self.quantizer.quantize(self.weight)

    @property
    def group(self) -> int:
        """The number of weights along the inputs that share a scale."""
        return self.format.group if self.format.granularity == "group" else int(self.weight.shape[1])

    def by_group(self, part: Tensor) -> Tensor:
        """Scale or zero point as (outputs, groups)."""
        rows = self.weight.shape[0]
        return part.reshape(rows, -1) if part.numel() > 1 else part.reshape(1, 1).expand(rows, 1)


class WeightFile(ABC):
    """A file or folder of integer weights. A new format is a class and an entry point in `bitwright.artefacts`."""

    document: ClassVar[None] = None
    """None, because another project defines the format."""
    unties: ClassVar[bool] = False
    """Whether it can store a quantized head beside the float embedding that has the same weight in the model."""

    @abstractmethod
    def write(
        self, model: nn.Module, weights: Sequence[IntegerWeight], path: Path, *, tokenizer: Any = None, inputs: Any = ()
    ) -> list[Problem]:
        """Write the file or folder; `inputs` is an example call. Returns warnings."""

    @abstractmethod
    def refusal(self, format: Format, shape: torch.Size) -> tuple[str, str] | None:
        """Why this format can't be stored, and the fix; None if it can."""

    def stores_activation(self, format: Format) -> bool:
        """Whether the inputs of its layers can have this format."""
        return False

    def problems(self, model: nn.Module) -> list[Problem]:
        """Sites that can't be stored; the model needs no calibration for this."""
        attachment = attachment_of(model)
        return [problem for site in attachment.quantizers if (problem := self._problem(model, attachment, site))]

    def _problem(self, model: nn.Module, attachment: Attachment, site: str) -> Problem | None:
        quantizer = attachment.quantizers[site]
        reason: tuple[str, str] | None
        linear = linear_at(model, quantizer)
        if not quantizer.weight and quantizer.port != "weight":
            if self.stores_activation(quantizer.spec.format):
                return None
            symmetric = "int8/token/sym/dynamic"
            stored = symmetric if self.stores_activation(Format.parse(symmetric)) else "float"
            reason = ("it doesn't store this format of activations", f'quantize with activations="{stored}"')
        elif linear is None:
            reason = ("it stores only weights of linear layers", f'keep_float="{site.rpartition(":")[0]}"')
        elif is_shared(model, linear, with_embedding=not self.unties):
            reason = ("this weight is shared with another layer", f'keep_float="{site.rpartition(":")[0]}"')
        elif not quantizer.exportable and quantizer.spec.format.minifloat is None:
            reason = ("its levels are not evenly spaced", "use quantizer: plain")
        else:
            reason = self.refusal(quantizer.spec.format, linear.weight.shape)
        if reason is None:
            return None
        what, fix = reason
        name = next(name for name in ARTEFACTS.names() if isinstance(self, ARTEFACTS.get(name)))
        return Problem(
            what=f"{name} can't store this site: {what}",
            where=site,
            value=str(quantizer.spec.format),
            fix=fix,
            code="unsupported-format",
        )


def weight_file(kind: str) -> WeightFile | None:
    """The writer of this kind of artefact, if it has no graph."""
    if kind == QDQ:
        return None
    found: Any = ARTEFACTS.get(kind)()
    return found if isinstance(found, WeightFile) else None


def linear_at(model: nn.Module, quantizer: Quantizer) -> nn.Linear | None:
    """The linear layer whose weight this quantizer rounds."""
    path, _, port = quantizer.site.rpartition(":")
    try:
        module = model.get_submodule(path.split("#")[0])
    except AttributeError:
        return None
    return module if port == "weight" and isinstance(module, nn.Linear) else None


def is_shared(model: nn.Module, linear: nn.Linear, *, with_embedding: bool = True) -> bool:
    """Whether another module has the same weight; without `with_embedding`, those with embeddings don't count."""
    kinds = () if with_embedding else (nn.Embedding,)
    modules = [
        module
        for _, module in model.named_modules(remove_duplicate=False)
        if not isinstance(module, kinds) and any(p is linear.weight for p in module.parameters(recurse=False))
    ]
    return len(modules) > 1


@torch.no_grad()
def integer_weights(model: nn.Module) -> list[IntegerWeight]:
    """The quantized weights of the linear layers of a calibrated model."""
    found = []
    for site, quantizer in attachment_of(model).quantizers.items():
        linear = linear_at(model, quantizer)
        if linear is None:  # an activation; `problems` refuses other weights
            continue
        module = site.rpartition(":")[0]
        found.append(
            IntegerWeight(
                site=site,
                module=module,
                weight=linear.weight.detach(),
                quantizer=quantizer,
                grid=quantizer.grid(),
                format=quantizer.format,
            )
        )
    return found


def quantized_inputs(model: nn.Module, weights: Sequence[IntegerWeight], inputs: Any) -> dict[str, Format]:
    """The formats of activations that `weights` multiply, by layer. Other readers of these activations are an error.

    The model runs on `inputs`, because sites belong to the operator that computes an activation.
    """
    inner = bare(model)
    found: dict[str, Format] = {}
    own = {weight.module for weight in weights}
    sites = {site: one for site, one in attachment_of(model).quantizers.items() if linear_at(model, one) is None}
    if not sites:
        return {}
    rounded: dict[int, tuple[str, Tensor]] = {}  # by address; the tensors stay alive, so that addresses are unique
    read: dict[str, set[str]] = {site: set() for site in sites}

    def record(site: str, quantizer: Quantizer) -> Callable[[Tensor], Tensor]:
        def quantize(x: Tensor) -> Tensor:
            result = quantizer.quantize(x)
            rounded[result.data_ptr()] = (site, result)
            return result

        return quantize

    def look(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            site, _ = rounded.get(args[0].data_ptr(), ("", None))
            if site:
                read[site].add(name)

        return hook

    hooks = [
        module.register_forward_pre_hook(look(name))
        for name, module in inner.named_modules()
        if isinstance(module, nn.Linear)
    ]
    args, kwargs = as_call(inputs)
    try:
        for site, quantizer in sites.items():
            quantizer.stand_in = record(site, quantizer)
        with torch.no_grad(), eval_mode(model), in_mode(model, "quantize"):
            call_copied(model, args, kwargs)
    finally:
        for quantizer in sites.values():
            quantizer.stand_in = None
        for handle in hooks:
            handle.remove()
    problems = [
        Problem(
            what="only inputs of quantized linear layers can be quantized in this artefact",
            where=site,
            value=", ".join(sorted(read[site] - own)) or "no linear layer reads it",
            fix='quantize with activations="float", or export the artefact qdq (ONNX)',
            code="unsupported-format",
        )
        for site in sites
        if not read[site] or read[site] - own
    ]
    if problems:
        raise PlanError(problems, title="this artefact can't store all activations")
    for site, layers in read.items():
        found |= dict.fromkeys(layers, sites[site].spec.format)
    return found


def float_state(model: nn.Module, weights: Sequence[IntegerWeight]) -> dict[str, Tensor]:
    """All tensors of the model that aren't quantized."""
    stored = {f"{weight.module}.weight" for weight in weights}
    state = model.state_dict()
    return {name: t for name, t in state.items() if name not in stored and not name.startswith(f"{CONTAINER}.")}


def config_of(model: nn.Module, kind: str) -> Any:
    """The configuration of a model of transformers."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "save_pretrained"):
        problem = Problem(
            what=f"{kind} stores only models of transformers, and this model has no configuration",
            where="model",
            value=type(model).__name__,
            fix="export the artefact qdq (ONNX) instead",
            code="no-model-config",
        )
        raise PlanError([problem])
    return config
