"""Peers of `language_models.py`: each changes the weights of the decoder layers' linear operators.

All of them get the same model, the same calibration samples and the same scope; the head and the embedding stay float.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Samples = list[dict[str, Tensor]]
GROUP = 32


def layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear modules of decoder layers."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {name: module for name, module in found.items() if ".layers." in name}


@contextmanager
def inputs_seen(model: nn.Module, see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call `see` with the inputs of each linear module, as rows."""
    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: see(name, args[0].flatten(0, -2)))
        for name, module in layers(model).items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def run(model: nn.Module, samples: Samples) -> None:
    for sample in samples:
        model(**sample)


# -- llama.cpp ----------------------------------------------------------------------------------------------------


class Ggml:
    """The quantization functions of llama.cpp, from the library in the package xllamacpp."""

    def __init__(self) -> None:
        spec = find_spec("xllamacpp")
        assert spec is not None
        assert spec.origin is not None
        self.library = ctypes.CDLL(str(next(Path(spec.origin).parent.glob("*.so"))))
        self.library.quantize_q4_0.restype = ctypes.c_size_t
        self.library.quantize_q4_0.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2, ctypes.c_void_p]
        self.library.dequantize_row_q4_0.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]

    def q4_0(self, weight: Tensor, importance: Tensor | None) -> Tensor:
        """The weight after Q4_0: groups of 32 with a float16 scale."""
        weight = weight.detach().float().contiguous()
        rows, width = weight.shape
        codes, result = torch.empty(rows * width // 32 * 18, dtype=torch.uint8), torch.empty_like(weight)
        given = None if importance is None else importance.float().contiguous()
        pointer = None if given is None else given.data_ptr()
        self.library.quantize_q4_0(weight.data_ptr(), codes.data_ptr(), rows, width, pointer)
        self.library.dequantize_row_q4_0(codes.data_ptr(), result.data_ptr(), weight.numel())
        return result


@torch.no_grad()
def llama_cpp(model: nn.Module, samples: Samples, *, imatrix: bool) -> nn.Module:
    """Q4_0, with the mean squares of inputs as importance, as llama-imatrix collects them."""
    sums: dict[str, Tensor] = {}

    def see(name: str, rows: Tensor) -> None:
        sums[name] = sums.get(name, torch.zeros(rows.shape[1])) + rows.float().square().sum(0)

    if imatrix:
        with inputs_seen(model, see):
            run(model, samples)
    ggml = Ggml()
    for name, module in layers(model).items():
        module.weight.copy_(ggml.q4_0(module.weight, sums.get(name)))
    return model


# -- torchao ------------------------------------------------------------------------------------------------------


def torchao(model: nn.Module, samples: Samples) -> nn.Module:
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

    inside = {id(module) for module in layers(model).values()}
    config = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP))  # type: ignore[attr-defined]
    quantize_(model, config, filter_fn=lambda module, _: id(module) in inside)
    return model


# -- NNCF ---------------------------------------------------------------------------------------------------------


def nncf(model: nn.Module, samples: Samples, *, group: int = GROUP, **options: Any) -> nn.Module:
    import nncf as peer

    logging.getLogger("nncf").setLevel(logging.ERROR)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)]
    kept = [f".*{name.rpartition('.')[2]}.*" for name in names if ".layers." not in name]
    return peer.compress_weights(  # type: ignore[no-any-return]
        model,
        mode=peer.CompressWeightsMode.INT4_SYM,
        group_size=group,
        all_layers=True,
        dataset=peer.Dataset(samples),
        subset_size=len(samples),
        ignored_scope=peer.IgnoredScope(patterns=kept, validate=False),
        **options,
    )


# -- auto-round ---------------------------------------------------------------------------------------------------


def auto_round(model: nn.Module, samples: Samples, *, iterations: int, tokenizer: Any, **options: Any) -> nn.Module:
    from auto_round import AutoRound

    ids = torch.cat([sample["input_ids"] for sample in samples])
    data = [{"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]} for row in ids]
    rounder = AutoRound(
        model,
        tokenizer,
        scheme="W4A16",
        group_size=GROUP,
        sym=True,
        iters=iterations,
        nsamples=len(data),
        seqlen=ids.shape[1],
        batch_size=min(8, len(data)),
        dataset=data,
        device_map="cpu",
        **options,
    )
    made, _ = rounder.quantize()
    return made  # type: ignore[no-any-return]


# -- a textbook GPTQ ----------------------------------------------------------------------------------------------


@torch.no_grad()
def textbook_gptq(model: nn.Module, samples: Samples, *, damp: float = 0.01, width: int = 128) -> nn.Module:
    """GPTQ as its paper describes it, layer by layer with the quantized inputs of the layers before.

    The inputs of one decoder layer are kept, and its four groups of modules that read the same tensor are rounded one
    after the other, each after a pass over the data. Groups take their scale from the largest value, mapped to −8.
    """
    blocks = next(m for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and name.endswith("layers"))
    states: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    class Caught(Exception):
        pass

    def catch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states.append((args, kwargs))
        raise Caught

    hook = blocks[0].register_forward_pre_hook(catch, with_kwargs=True)
    for sample in samples:
        with suppress(Caught):
            model(**sample)
    hook.remove()
    for block in blocks:
        inside = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}
        for group in (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)):
            modules = [module for name, module in inside.items() if name.rpartition(".")[2] in group]
            hessian = torch.zeros(modules[0].in_features, modules[0].in_features)

            def add(_: nn.Module, args: tuple[Tensor, ...], hessian: Tensor = hessian) -> None:
                rows = args[0].flatten(0, -2)
                hessian.addmm_(rows.T, rows)

            hook = modules[0].register_forward_pre_hook(add)
            for args, kwargs in states:
                block(*args, **kwargs)
            hook.remove()
            hessian.diagonal().add_(damp * float(hessian.diagonal().mean()))
            inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
            upper = torch.linalg.cholesky(inverse, upper=True)
            for module in modules:
                module.weight.copy_(_compensated(module.weight.float().clone(), upper, width))
        for index, (args, kwargs) in enumerate(states):
            out = block(*args, **kwargs)
            states[index] = ((out[0] if isinstance(out, tuple) else out, *args[1:]), kwargs)
    return model


def _compensated(weight: Tensor, upper: Tensor, width: int) -> Tensor:
    rounded = torch.zeros_like(weight)
    scale = torch.ones(len(weight))
    for start in range(0, weight.shape[1], width):
        stop = min(start + width, weight.shape[1])
        block, errors = weight[:, start:stop].clone(), torch.zeros(len(weight), stop - start)
        for i in range(stop - start):
            if (start + i) % GROUP == 0:
                part = block[:, i : i + GROUP]
                largest = part.gather(1, part.abs().argmax(dim=1, keepdim=True))[:, 0]
                scale = torch.where(largest == 0, 1.0, largest / -8)
            column = block[:, i]
            value = torch.clamp(torch.round(column / scale), -8, 7) * scale
            error = (column - value) / upper[start + i, start + i]
            block[:, i:] -= error[:, None] * upper[start + i, start + i : stop][None]
            rounded[:, start + i], errors[:, i] = value, error
        weight[:, stop:] -= errors @ upper[start:stop, stop:]
    return rounded


PACKAGES: Mapping[str, str] = {
    "NNCF": "nncf",
    "torchao": "torchao",
    "auto-round": "auto_round",
    "llama.cpp": "xllamacpp",
}


def installed(peer: str) -> str | None:
    """The version of a peer's package, or None."""
    return version(PACKAGES[peer].replace("_", "-")) if find_spec(PACKAGES[peer]) is not None else None


def mean_bits(groups: Iterable[tuple[int, float]]) -> float:
    """The mean bits per weight of (elements, bits)."""
    pairs = list(groups)
    return sum(count * bits for count, bits in pairs) / sum(count for count, _ in pairs)
