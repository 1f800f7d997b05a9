"""W8A8 quantization-aware training of ResNet-20 by other libraries, for step_time.py.

Every peer takes a float model and an example batch, and gives a model that is ready to train: weights per channel,
activations per tensor, as near to LSQ as the library offers. `available()` says which work here, and why not.
They come with `pip install -e ".[bench]"`.
"""

from __future__ import annotations

import copy
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.zoo.networks import ResNet20

Peer = Callable[[nn.Module, Tensor], nn.Module]


def nncf_resnet20(model: nn.Module, example: Tensor) -> nn.Module:
    """NNCF: `nncf.quantize`, which is also the start of its QAT.

    Scales are learned (symmetric, no gradient scaling of LSQ's kind), and start from the example's range. Rounding is
    a C++ extension that is compiled at the first use. Batch norms aren't folded.
    """
    # the extension is compiled in a minute or two, and by default NNCF gives up after one
    os.environ.setdefault("NNCF_EXTENSION_LOAD_TIMEOUT", "0")
    import nncf

    nncf.set_log_level(logging.ERROR)
    quantized: nn.Module = nncf.quantize(copy.deepcopy(model).eval(), nncf.Dataset([example]), subset_size=1)
    return quantized.train()


def torchao_resnet20(model: nn.Module, example: Tensor) -> nn.Module:
    """torchao's PT2E QAT for its x86 backend, as its documentation has it: no scale is learned.

    Moving-average min-max observers set scales at every step, in one fused operator with the rounding. Activations are
    asymmetric. Batch norms are folded for rounding (as our strategy 4). The model is an exported graph.
    """
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        get_default_x86_inductor_quantization_config as config,
    )

    return _pt2e(model, example, config(is_qat=True))


def torchao_learned_resnet20(model: nn.Module, example: Tensor) -> nn.Module:
    """torchao's PT2E QAT with its `LearnableFakeQuantize` in place of the observers: LSQ(+), gradient scaling included.

    Scales start from the example's range, and of activations zero points learn, too. All else as `torchao_resnet20`.
    """
    from torchao.quantization.pt2e import (
        LearnableFakeQuantize,
        MovingAverageMinMaxObserver,
        MovingAveragePerChannelMinMaxObserver,
        enable_range_learning,
    )
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        get_default_x86_inductor_quantization_config as config,
    )

    start = config(is_qat=True)
    observers = {
        "input_activation": MovingAverageMinMaxObserver,
        "output_activation": MovingAverageMinMaxObserver,
        "weight": MovingAveragePerChannelMinMaxObserver,
    }
    learned = {
        name: replace(
            getattr(start, name),
            observer_or_fake_quant_ctr=LearnableFakeQuantize.with_args(
                observer=observer, use_grad_scaling=True, eps=2**-12
            ),
        )
        for name, observer in observers.items()
    }
    return _pt2e(model, example, replace(start, **learned)).apply(enable_range_learning)


def _pt2e(model: nn.Module, example: Tensor, config: Any) -> nn.Module:
    from torchao.quantization.pt2e import allow_exported_model_train_eval
    from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import X86InductorQuantizer

    quantizer = X86InductorQuantizer().set_global(config)
    exported = torch.export.export(copy.deepcopy(model).train(), (example,)).module()
    prepared: nn.Module = prepare_qat_pt2e(exported, quantizer)
    allow_exported_model_train_eval(prepared)  # else train() raises; now it works, but returns None
    prepared.train()
    with torch.no_grad():
        prepared(example)  # scales come to be, with the shapes that a compiler will see
    return prepared


def brevitas_resnet20(model: nn.Module, example: Tensor) -> nn.Module:
    """Brevitas in graph mode: scales of weights and activations are learned (no gradient scaling).

    Weight scales start from the weights' largest values, activation scales from a percentile of the example. Plain
    tensors pass between layers: Brevitas' own QuantTensor can't be sliced, as the shortcuts do. Batch norms aren't
    folded (Brevitas can only merge them for good).
    """
    import brevitas.nn as qnn
    from brevitas.graph.quantize import preprocess_for_quantize, quantize
    from brevitas.inject.enum import ScalingImplType
    from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat, Uint8ActPerTensorFloat

    class Weight(Int8WeightPerChannelFloat):  # type: ignore[misc]
        scaling_impl_type = ScalingImplType.PARAMETER_FROM_STATS

    class Signed(Int8ActPerTensorFloat):  # type: ignore[misc]
        collect_stats_steps = 1

    class Unsigned(Uint8ActPerTensorFloat):  # type: ignore[misc]
        collect_stats_steps = 1

    plain = {"return_quant_tensor": False}
    layer = {"weight_quant": Weight, "bias_quant": None, **plain}
    graph = preprocess_for_quantize(copy.deepcopy(model), merge_bn=False)
    quantized: nn.Module = quantize(
        graph,
        quant_identity_map={
            "signed": (qnn.QuantIdentity, {"act_quant": Signed, **plain}),
            "unsigned": (qnn.QuantIdentity, {"act_quant": Unsigned, **plain}),
        },
        compute_layer_map={nn.Conv2d: (qnn.QuantConv2d, layer), nn.Linear: (qnn.QuantLinear, layer)},
        quant_act_map={nn.ReLU: (qnn.QuantReLU, {"act_quant": Unsigned, **plain})},
    ).train()
    with torch.no_grad():
        quantized(example)  # the step that collects statistics
        quantized(example)  # and the one that makes parameters of them
    return quantized


PEERS: dict[str, Peer] = {
    "nncf": nncf_resnet20,
    "torchao": torchao_resnet20,
    "torchao learned": torchao_learned_resnet20,
    "brevitas": brevitas_resnet20,
}


@contextmanager
def quiet() -> Iterator[None]:
    """What libraries say about each other's versions, and their progress bars, are no part of a table."""
    logging.getLogger("torchao").setLevel(logging.ERROR)
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@cache
def available() -> dict[str, str | None]:
    """Why a peer can't train here, or None if it can: each is built and takes a step on two images."""
    found: dict[str, str | None] = {}
    for name, build in PEERS.items():
        example = torch.randn(2, 3, 32, 32)
        try:
            with quiet():
                build(ResNet20(), example)(example).square().mean().backward()
            found[name] = None
        except Exception as error:
            found[name] = reason(error)
    return found


def reason(error: Exception) -> str:
    """The first lines of an error, as one."""
    return f"{type(error).__name__}: {' '.join(' '.join(str(error).strip().splitlines()[:2]).split())}"


def versions() -> dict[str, str]:
    """The peers' versions, for the record."""
    found = {}
    for name in ("nncf", "torchao", "brevitas"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
