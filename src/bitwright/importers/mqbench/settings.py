"""MQBench's settings as quantizers, observers, formats, backends and PTQ steps of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitwright.core.documents import read_settings
from bitwright.core.errors import BitwrightError, PlanError, Problem
from bitwright.importers.key_table import Imported, read
from bitwright.importers.mqbench.toolkit import HuggingFaceConfig, QuantizerScheme, Reconstruction, ToolkitConfig
from bitwright.importers.mqbench.zoo import ZooConfig

__all__ = ["MqbenchConfig", "MqbenchSettings", "load_mqbench", "mqbench_settings", "read_mqbench"]

MqbenchConfig = ZooConfig | ToolkitConfig | HuggingFaceConfig
_OBSERVERS = {
    "MinMaxObserver": "minmax",
    "AverageMinMaxObserver": "average-minmax",
    "EMAMinMaxObserver": "ema-minmax",
    "QuantileMovingAverageObserver": "ema-quantile",
    "EMAQuantileObserver": "ema-quantile",
    "ClipStdObserver": "clip-std",
    "LSQObserver": "lsq",
    "LSQPlusObserver": "lsqplus",
    "MSEObserver": "mse",
    "EMAMSEObserver": "ema-mse",
    "KLDObserver": "kl",
}
# The observers with which MQBench begins, by quantizer: of weights, of activations.
_BEGINNINGS = {
    "lsq": ("lsq", "lsq"),
    "dorefa": ("minmax", "minmax"),
    "pact": ("minmax", "minmax"),
    "dsq": ("clip-std", "average-minmax"),
    "apot": ("minmax", "minmax"),
    "qil": ("minmax", "minmax"),
}
_QUANTIZERS = {
    "FixedFakeQuantize": "fixed",
    "LearnableFakeQuantize": "lsq",
    "NNIEFakeQuantize": "nnie",
    "DoReFaFakeQuantize": "dorefa",
    "DSQFakeQuantize": "dsq",
    "PACTFakeQuantize": "pact",
    "TqtFakeQuantize": "tqt",
    "AdaRoundFakeQuantize": "fixed",  # the step learns the rounding
    "QDropFakeQuantize": "fixed",  # the step drops the quantization
}
_BACKENDS = {"pplw8a16": "ppl_w8a16", "pplcuda": "ppl_cuda", "bnfold_ablation": "academic"}
_NO_SCALES = "quantize.reconstruction.scale_lr: the step adaround doesn't learn the scales of activations"
_EDGE_BITS = 8  # of the first and the last layer


@dataclass(frozen=True, kw_only=True)
class MqbenchSettings:
    """How the model is quantized, in the names of Bitwright."""

    backend: str
    weights: str
    """The quantizer of weights."""
    activations: str
    weight_observer: str
    observer: str
    weight_format: str | None = None
    """The format; None: that of the backend at `bits`."""
    activation_format: str | None = None
    bits: int | None = None
    first_last_bits: int | None = None
    fold: int = -1
    """How batch norms are folded; -1: not at all."""
    steps: tuple[str, ...] = ()
    """PTQ steps with their options."""
    norm: float = 2.0
    """The norm of MSE observers."""
    keep_float: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Settings without a counterpart."""


def read_mqbench(data: Mapping[str, Any], *, where: str) -> Imported[Any]:
    """The settings of a file of MQBench's zoo or of its toolkit. All problems are raised together."""
    title = f"{where} (an MQBench file) has problems"
    if "qparams" in data:
        return read(ZooConfig, data, title=title)
    model = data.get("model")
    if "quant" in data or (isinstance(model, Mapping) and "model_name_or_path" in model):
        return read(HuggingFaceConfig, data, title=title)
    return read(ToolkitConfig, data, title=title)


def load_mqbench(path: str | Path) -> Imported[Any]:
    """Read a file. `root` names another one, for sections that this one doesn't have."""
    file = Path(path)
    data = read_settings(file, "an MQBench configuration", "qparams: …")
    seen, current, here = {file.resolve()}, data, file
    while isinstance(current.get("root"), str):
        here = here.parent / current["root"]
        if here.resolve() in seen:
            raise BitwrightError(
                "the files refer to each other",
                where=str(here),
                value="root",
                fix="remove one root",
                code="cyclic-root",
            )
        seen.add(here.resolve())
        current = read_settings(here, "an MQBench configuration", "model: …")
        data = {**current, **data}
    return read_mqbench(data, where=str(file))


def mqbench_settings(config: MqbenchConfig) -> MqbenchSettings | None:
    """How the model is quantized. None for a float run."""
    if isinstance(config, ZooConfig):
        return _zoo(config)
    return _toolkit(config) if isinstance(config, ToolkitConfig) else _text(config)


def _backend(name: str) -> str:
    return _BACKENDS.get(name.lower(), name.lower())


def _zoo(config: ZooConfig) -> MqbenchSettings:
    own = config.qparams
    begin_weights, begin_activations = _BEGINNINGS[own.w_method][0], _BEGINNINGS[own.a_method][1]
    return MqbenchSettings(
        backend=_backend(config.backend),
        weights="dorefa" if own.w_method == "pact" else own.w_method,
        activations=own.a_method,
        weight_observer=_OBSERVERS[own.w_observer] if own.w_observer else begin_weights,
        observer=_OBSERVERS[own.a_observer] if own.a_observer else begin_activations,
        bits=own.bit,
        first_last_bits=_EDGE_BITS,
        fold=-1 if config.backend == "academic" else config.bnfold,
    )


def _format(scheme: QuantizerScheme) -> str:
    """Symmetric integers are signed, others unsigned."""
    kind = "int" if scheme.symmetry else "uint"
    text = f"{kind}{scheme.bit}/{'channel' if scheme.per_channel else 'tensor'}/{'sym' if scheme.symmetry else 'asym'}"
    return text + ("/pot" if scheme.pot_scale else "")


def _toolkit(config: ToolkitConfig) -> MqbenchSettings | None:
    if config.quantize is None:
        return None
    own = config.extra_prepare_dict.extra_qconfig_dict
    placement = config.extra_prepare_dict.extra_quantizer_dict
    weight, activation = own.w_qscheme, own.a_qscheme
    own_steps = config.quantize.reconstruction
    return MqbenchSettings(
        backend=_backend(config.quantize.backend),
        weights=_QUANTIZERS[own.w_fakequantize or "LearnableFakeQuantize"],
        activations=_QUANTIZERS[own.a_fakequantize or "LearnableFakeQuantize"],
        weight_observer=_OBSERVERS[own.w_observer or "MinMaxObserver"],
        observer=_OBSERVERS[own.a_observer or "EMAMinMaxObserver"],
        weight_format=None if weight is None else _format(weight),
        activation_format=None if activation is None else _format(activation),
        fold=0,
        steps=() if own_steps is None else (_step(own_steps),),
        notes=(_NO_SCALES,) if own_steps is not None and own_steps.pattern == "layer" and own_steps.scale_lr else (),
        norm=2.0 if weight is None else weight.p,
        keep_float=(*placement.exclude_module_name, *placement.exclude_node_name),
    )


def _step(own: Reconstruction) -> str:
    """The PTQ step. Blocks whose activations are sometimes not quantized are QDrop's, others BRECQ's."""
    if own.b_range != (20.0, 2.0):
        raise PlanError(
            [
                Problem(
                    what="the exponent of the penalty always goes from 20 to 2",
                    where="quantize.reconstruction.b_range",
                    value=own.b_range,
                    fix="b_range: [20, 2]",
                    code="cannot-run",
                )
            ],
            title="the reconstruction can't run",
        )
    options: dict[str, Any] = {"iterations": own.max_count, "weight": own.weight, "warmup": own.warm_up}
    name = "adaround" if own.pattern == "layer" else "qdrop" if own.prob < 1 else "brecq"
    if name != "adaround":
        options["fisher"] = False
        if own.scale_lr:
            options["activation_lr"] = own.scale_lr
    if name == "qdrop":
        options["drop"] = round(1 - own.prob, 12)
    return f"{name}:" + ",".join(f"{key}={str(value).lower()}" for key, value in options.items())


def _text(config: HuggingFaceConfig) -> MqbenchSettings | None:
    own = config.quant
    if own is None:
        return None
    weight, activation = own.w_qconfig, own.a_qconfig
    schemes = [
        QuantizerScheme(bit=one.bit, symmetry=one.symmetric, per_channel=one.channels, pot_scale=own.pot_scale)
        for one in (weight, activation)
    ]
    backend = _backend(own.backend)
    return MqbenchSettings(
        backend=backend if backend.endswith("_nlp") or backend not in ("academic", "tensorrt") else f"{backend}_nlp",
        weights=_QUANTIZERS[weight.quantizer],
        activations=_QUANTIZERS[activation.quantizer],
        weight_observer=_OBSERVERS[weight.observer or "MinMaxObserver"],
        observer=_OBSERVERS[activation.observer or "EMAMinMaxObserver"],
        weight_format=_format(schemes[0]),
        activation_format=_format(schemes[1]),
        fold=0,
    )
