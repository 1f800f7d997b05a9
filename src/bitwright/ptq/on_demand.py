"""A model of a Hugging Face folder whose weights are in memory only while their block runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bitwright.core.documents import read_json
from bitwright.core.errors import WorkloadError, first_line

__all__ = ["OnDemandModel", "WeightFiles"]

_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class WeightFiles:
    """The tensors of a folder's safetensors files, read one at a time without mapping the files into memory."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*.safetensors"))
        self.places: dict[str, tuple[Path, int, int, str, list[int]]] = {}
        index = folder / "model.safetensors.index.json"
        used = set(read_json(index, what="the index of weights")["weight_map"].values()) if index.is_file() else None
        for path in self.paths:
            if used is not None and path.name not in used:
                continue
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size))
            for name, entry in header.items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    self.places[name] = (path, 8 + size + begin, end - begin, entry["dtype"], entry["shape"])

    @property
    def bytes(self) -> int:
        return sum(place[2] for place in self.places.values())

    def dtype(self, name: str) -> torch.dtype:
        found: torch.dtype = getattr(torch, _TYPES[self.places[name][3]])
        return found

    def read(self, name: str) -> Tensor:
        """The tensor in its own dtype."""
        path, start, length, _, shape = self.places[name]
        data = torch.from_numpy(np.fromfile(path, np.uint8, count=length, offset=start))
        return data.view(self.dtype(name)).reshape(shape)


class OnDemandModel:
    """A model whose parameters have values only while their unit (a block, or another module) runs."""

    def __init__(self, folder: Path) -> None:
        self.files = WeightFiles(folder)
        self.model = _skeleton(folder)
        self.blocks = _blocks(self.model)
        names = {id(p): name for name, p in self.model.named_parameters()}
        self.stored = {name: self._stored_name(name) for name in names.values()}
        self._names = names
        missing = [name for name, stored_name in self.stored.items() if stored_name is None]
        if missing or not self.blocks:
            raise WorkloadError(
                f"{len(missing)} parameters have other names in the files" if missing else "the model has no blocks",
                where=", ".join(missing[:3]) or str(folder),
                fix="quantize the whole model in memory (without --blockwise)",
                code="not-blockwise",
            )
        inside = {id(module) for block in self.blocks.values() for module in block.modules()}
        self.units: dict[str, nn.Module] = {
            path: module
            for path, module in self.model.named_modules()
            if path in self.blocks or (id(module) not in inside and any(True for _ in module.parameters(recurse=False)))
        }
        self.held: set[str] = set()  # units whose weights stay in memory
        self.skip: dict[str, Callable[..., Any]] = {}  # block → what replaces its forward

    def _stored_name(self, name: str) -> str | None:
        places = self.files.places
        prefix = f"{self.model.base_model_prefix}."
        for known in (name, name.removeprefix(prefix), prefix + name):
            if known in places and list(self.model.get_parameter(name).shape) == places[known][4]:
                return known
        return None

    def load(self, path: str) -> None:
        """Read the weights of a unit, in float32."""
        for parameter in self._own(path):
            name = self.stored[self._names[id(parameter)]]
            assert name is not None
            parameter.data = self.files.read(name).to(torch.float32)

    def drop(self, path: str) -> None:
        """Forget the weights of a unit."""
        for parameter in self._own(path):
            parameter.data = torch.zeros(()).expand(parameter.shape)

    def _own(self, path: str) -> list[nn.Parameter]:
        module = self.units[path]
        return [p for p in module.parameters(recurse=path in self.blocks) if id(p) in self._names]

    @contextmanager
    def on_demand(self) -> Iterator[None]:
        """Read weights when their unit starts, and drop them when it ends."""
        with ExitStack() as stack:
            for path, module in self.units.items():
                before = module.register_forward_pre_hook(partial(self._enter, path))
                after = module.register_forward_hook(partial(self._leave, path), always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    def _enter(self, path: str, *_: Any) -> None:
        if path not in self.held and path not in self.skip:
            with torch._C.DisableTorchFunction():  # hidden from recordings
                self.load(path)

    def _leave(self, path: str, *_: Any) -> None:
        if path not in self.held and path not in self.skip:
            with torch._C.DisableTorchFunction():
                self.drop(path)

    @contextmanager
    def replaced(self, forwards: dict[str, Callable[..., Any]]) -> Iterator[None]:
        """Replace the forwards of blocks, whose weights are then not read."""
        self.skip = forwards
        before: dict[str, Any] = {path: self.units[path].__dict__.get("forward") for path in forwards}
        for path, forward in forwards.items():
            self.units[path].__dict__["forward"] = forward
        try:
            yield
        finally:
            self.skip = {}
            for path, forward in before.items():
                if forward is None:
                    del self.units[path].__dict__["forward"]
                else:
                    self.units[path].__dict__["forward"] = forward


def _skeleton(folder: Path) -> Any:
    """The model without weights: parameters share one zero, so they need no memory. Buffers have values."""
    from transformers import AutoConfig, AutoModelForCausalLM

    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[assignment, method-assign]
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        known_models: Any = AutoModelForCausalLM
        model: Any = known_models.from_config(config, dtype=torch.float32)
    except Exception as error:  # transformers raises different types, also those of its dependencies
        raise WorkloadError(
            f"transformers can't build this model: {type(error).__name__}: {first_line(error)}",
            value=str(folder),
            fix="call AutoModelForCausalLM.from_pretrained in Python",
            code="model-not-loadable",
        ) from error
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
    known: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.zeros(()).expand(parameter.shape)
                module._parameters[name] = known.setdefault(id(parameter), nn.Parameter(empty, requires_grad=False))
    model.tie_weights()
    model.config.use_cache = False
    return model.eval()


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a decoder: the elements of its largest list of modules."""
    lists = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        return {}
    path, largest = max(lists, key=lambda pair: sum(p.numel() for p in pair[1].parameters()))
    return {f"{path}.{index}": block for index, block in enumerate(largest)}
