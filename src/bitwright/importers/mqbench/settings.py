"""MQBench's settings as quantizers, observers, formats, backends and PTQ steps of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    "MinMaxFloorObserver": "pot-floor",
    "EMAMinMaxFloorObserver": "pot-floor",  # over all batches instead of the last one
    "ModeMinMaxFloorObserver": "pot-mode",
    "PoTModeObserver": "pot-mode",
}
# The options of its quantizers that change the result, and those that calibration or the missing training replaces.
_OPTIONS = {"PACTFakeQuantize": ("alpha",), "DSQFakeQuantize": ("alpha",)}
_INITIAL = ("scale", "zero_point", "use_grad_scaling")
# The backends for which the toolkit reads w_qscheme and a_qscheme; others always have their own formats.
_FREE_SCHEMES = ("academic", "academic_nlp", "tensorrt", "tensorrt_nlp")
# The quantizer and the observers (weights, activations) of backends that have others than MinMax and EMAMinMax.
_DEFAULTS = {
    "nnie": ("nnie", "minmax", "ema-minmax"),
    "vitis": ("tqt", "pot-floor", "pot-mode"),
    "onnx_qnn": ("lsq", "minmax", "minmax"),
    "ppl_cuda": ("lsq", "minmax", "minmax"),
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
_BACKENDS = {"pplw8a16": "ppl_w8a16", "pplcuda": "ppl_cuda", "bnfold_ablation": "academic_fold"}
_EDGE_BITS = 8  # of the first and the last layer
_ROUNDING_LR = 0.001  # Adam's default


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
    """The norm of MSE observers of weights."""
    activation_norm: float = 2.0
    """The norm of MSE observers of activations."""
    quantizer_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the quantizer of activations."""
    weight_quantizer_options: Mapping[str, Any] = field(default_factory=dict)
    keep_float: tuple[str, ...] = ()
    """Modules, with all that they contain, or operators by the names of torch.fx."""
    keep_float_kinds: tuple[str, ...] = ()
    """Functions."""
    keep_float_classes: tuple[str, ...] = ()
    """Classes of modules."""
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


def _format(scheme: QuantizerScheme, backend: str) -> str:
    """Symmetric integers are signed, others unsigned. TensorRT doesn't use the lowest code."""
    kind = "int" if scheme.symmetry else "uint"
    text = f"{kind}{scheme.bit}/{'channel' if scheme.per_channel else 'tensor'}/{'sym' if scheme.symmetry else 'asym'}"
    text += "/pot" if scheme.pot_scale else ""
    return text + ("/narrow" if scheme.symmetry and backend.startswith("tensorrt") else "")


def _toolkit(config: ToolkitConfig) -> MqbenchSettings | None:
    if config.quantize is None:
        return None
    own = config.extra_prepare_dict.extra_qconfig_dict
    placement = config.extra_prepare_dict.extra_quantizer_dict
    backend = _backend(config.backend or config.quantize.backend)
    quantizer, weight_observer, observer = _DEFAULTS.get(backend, ("lsq", "minmax", "ema-minmax"))
    free = backend in _FREE_SCHEMES
    weight, activation = (own.w_qscheme, own.a_qscheme) if free else (None, None)
    notes = []
    if not free and (own.w_qscheme is not None or own.a_qscheme is not None):
        notes.append(f"w_qscheme and a_qscheme have no effect: {backend} always has its own formats, as in MQBench")
    logarithmic = backend == "nnie"
    if logarithmic and {own.w_fakequantize, own.a_fakequantize} - {None, "NNIEFakeQuantize"}:
        notes.append("w_fakequantize and a_fakequantize have no effect: nnie always has logarithmic levels")
    advanced = config.quantize.quantize_type == "advanced_ptq"
    if config.quantize.reconstruction is not None and not advanced:
        notes.append("quantize.reconstruction has no effect: quantize_type is naive_ptq")
    activation_options = _options(own.a_fakequantize, own.a_fakeq_params, "a_fakeq_params", notes)
    weight_options = _options(own.w_fakequantize, own.w_fakeq_params, "w_fakeq_params", notes)
    return MqbenchSettings(
        backend=backend,
        weights=_QUANTIZERS[own.w_fakequantize] if own.w_fakequantize and not logarithmic else quantizer,
        activations=_QUANTIZERS[own.a_fakequantize] if own.a_fakequantize and not logarithmic else quantizer,
        weight_observer=_OBSERVERS[own.w_observer] if own.w_observer else weight_observer,
        observer=_OBSERVERS[own.a_observer] if own.a_observer else observer,
        weight_format=None if weight is None else _format(weight, backend),
        activation_format=None if activation is None else _format(activation, backend),
        fold=0,
        steps=(_step(config.quantize.reconstruction, config.data.batch_size),) if advanced else (),
        notes=tuple(notes),
        norm=2.0 if weight is None else weight.p,
        activation_norm=2.0 if activation is None else activation.p,
        quantizer_options=activation_options,
        weight_quantizer_options=weight_options,
        keep_float=(*placement.exclude_module_name, *placement.exclude_node_name),
        keep_float_kinds=placement.exclude_function_type,
        keep_float_classes=config.extra_prepare_dict.leaf_module,
    )


def _options(name: str | None, given: Mapping[str, Any], where: str, notes: list[str]) -> dict[str, Any]:
    """The options of a quantizer. Initial values are replaced by calibration."""
    known = _OPTIONS.get(name or "", ())
    idle = [key for key in given if key in _INITIAL]
    if idle:
        notes.append(f"{where}: {', '.join(idle)} have no effect: calibration sets scales, and nothing is trained")
    problems = [
        Problem(
            what=f"{name} has no such option here",
            where=f"extra_prepare_dict.extra_qconfig_dict.{where}.{key}",
            value=value,
            fix=f"use one of: {', '.join(known)}" if known else "remove it",
            code="unknown-key",
        )
        for key, value in given.items()
        if key not in (*known, *_INITIAL)
    ]
    if problems:
        raise PlanError(problems, title="the options of a quantizer have problems")
    return {key: value for key, value in given.items() if key in known}


def _step(own: Reconstruction | None, batch: int) -> str:
    """The PTQ step with MQBench's optimizer and penalty.

    Blocks whose activations are sometimes not quantized are QDrop's, others BRECQ's, without Fisher information.
    """
    assert own is not None  # the table checks it
    start, end = own.b_range
    options: dict[str, Any] = {"iterations": own.max_count, "batch": batch, "lr": _ROUNDING_LR, "weight": own.weight}
    options |= {"warmup": own.warm_up, "start": start, "end": end, "decay": "linear"}
    options |= {"activation_lr": own.scale_lr or 0.0, "activation_scale": "linear"}
    name = "qdrop" if own.prob < 1 else "adaround" if own.pattern == "layer" else "brecq"
    if name != "adaround":
        options |= {"fisher": False, "pattern": own.pattern}
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
        weight_format=_format(schemes[0], backend),
        activation_format=_format(schemes[1], backend),
        fold=0,
    )
