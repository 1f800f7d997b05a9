"""Base class of artefacts that contain integer weights of language models for other tools, without a graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bitwright.core.errors import PlanError, Problem
from bitwright.core.formats import Format
from bitwright.core.registry import ARTEFACTS
from bitwright.deployment.artefacts.base import QDQ
from bitwright.quantizers import CONTAINER, Attachment, Quantizer, attachment_of
from bitwright.quantizers.grid import Grid


@dataclass(frozen=True, kw_only=True)
class IntegerWeight:
    """The weight of one linear layer: its codes, and the grid in float32."""

    site: str
    module: str
    codes: Tensor
    """int32, (outputs, inputs)."""
    grid: Grid
    format: Format

    @property
    def group(self) -> int:
        """The number of weights along the inputs that share a scale."""
        return self.format.group if self.format.granularity == "group" else int(self.codes.shape[1])

    def by_group(self, part: Tensor) -> Tensor:
        """Scale or zero point as (outputs, groups)."""
        rows = self.codes.shape[0]
        return part.reshape(rows, -1) if part.numel() > 1 else part.reshape(1, 1).expand(rows, 1)


class WeightFile(ABC):
    """A file or folder of integer weights. A new format is a class and an entry point in `bitwright.artefacts`."""

    document: ClassVar[None] = None
    """None, because another project defines the format."""

    @abstractmethod
    def write(self, model: nn.Module, weights: Sequence[IntegerWeight], path: Path) -> None:
        """Write the file or folder."""

    @abstractmethod
    def refusal(self, format: Format, shape: torch.Size) -> tuple[str, str] | None:
        """Why this format can't be stored, and the fix; None if it can."""

    def problems(self, model: nn.Module) -> list[Problem]:
        """Sites that can't be stored; the model needs no calibration for this."""
        attachment = attachment_of(model)
        return [problem for site in attachment.quantizers if (problem := self._problem(model, attachment, site))]

    def _problem(self, model: nn.Module, attachment: Attachment, site: str) -> Problem | None:
        quantizer = attachment.quantizers[site]
        reason: tuple[str, str] | None
        linear = linear_at(model, quantizer)
        if not quantizer.weight and quantizer.port != "weight":
            reason = ("it stores only weights", 'quantize with activations="float"')
        elif linear is None:
            reason = ("it stores only weights of linear layers", f'keep_float="{site.rpartition(":")[0]}"')
        elif is_shared(model, linear):
            reason = ("this weight is shared with another layer", f'keep_float="{site.rpartition(":")[0]}"')
        elif not quantizer.exportable:
            reason = ("its levels are not evenly spaced", "use quantizer: plain")
        else:
            reason = self.refusal(quantizer.spec.format, linear.weight.shape)
        if reason is None:
            return None
        what, fix = reason
        name = next(name for name in ARTEFACTS.names() if ARTEFACTS.get(name) is type(self))
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


def is_shared(model: nn.Module, linear: nn.Linear) -> bool:
    """Whether another module has the same weight."""
    return sum(p is linear.weight for _, p in model.named_parameters(remove_duplicate=False)) > 1


@torch.no_grad()
def integer_weights(model: nn.Module) -> list[IntegerWeight]:
    """The integer weights of a calibrated model that has only weight quantizers."""
    found = []
    for site, quantizer in attachment_of(model).quantizers.items():
        linear = linear_at(model, quantizer)
        assert linear is not None  # checked by `problems`
        module = site.rpartition(":")[0]
        codes = quantizer.integers(linear.weight.detach())
        found.append(
            IntegerWeight(site=site, module=module, codes=codes, grid=quantizer.grid(), format=quantizer.format)
        )
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
