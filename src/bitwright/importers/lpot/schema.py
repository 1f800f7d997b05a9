"""The keys of an LPOT file (Neural Compressor 1.x): one model, which is also the table of keys."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from bitwright.importers.key_table import Honoured, Named, Noted, Option, Rejected, Section
from bitwright.importers.lpot.datasets import Loader
from bitwright.importers.lpot.metrics import METRICS, HigherIsBetter, Metric, Postprocess, Weights
from bitwright.importers.lpot.training import Train
from bitwright.importers.lpot.transforms import flags, listed

SectionT = TypeVar("SectionT", bound=Section)

__all__ = ["OTHER_FRAMEWORKS", "ActivationRule", "LpotConfig", "OpRule", "WeightRule"]

_INSTANCES = "Used by `benchmark`."
_SECONDS = Field(ge=0, le=1e10)


def _version(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 1 <= number < 2:
        raise ValueError("files of version 1 are supported; files of Neural Compressor 2 and 3 are Python code")
    return number


def _share(value: float | str) -> float:
    """0.01, "0.01" or "1%"."""
    text = str(value).strip()
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1e12:
        raise ValueError("write a share of the float model's accuracy: 0.01 or 1%")
    return share


def _magnitude_bits(value: float) -> int:
    """LPOT counts the bits without the sign: 7.0 is the full range of int8."""
    if value != int(value):
        raise ValueError("a part of a bit is a narrower range, which no format here has; use a whole number")
    return int(value)


Names = Annotated[tuple[str, ...], BeforeValidator(listed)]
Count = Annotated[int, Field(ge=1, le=10**7)]


def _framework(value: Any) -> Any:
    """The name in lower case."""
    name = str(value).lower()
    system = next((title for part, title in OTHER_FRAMEWORKS.items() if name.startswith(part)), None)
    if system is not None:
        raise ValueError(f"the file is for a {system} model, and Bitwright quantizes PyTorch models")
    return name


OTHER_FRAMEWORKS = {
    "tensorflow": "TensorFlow",
    "inteltensorflow": "TensorFlow",
    "keras": "Keras",
    "mxnet": "MXNet",
    "onnx": "ONNX",
    "engine": "Neural Engine",
}
"""The beginnings of LPOT's names of other frameworks."""


class _Model(Section):
    name: Annotated[str, Honoured("The name of the study.")] = "lpot"
    framework: Annotated[
        Literal["pytorch", "pytorch_fx", "pytorch_ipex"],
        BeforeValidator(_framework),
        Honoured(
            "All three run the same way: Bitwright finds operators while the model runs, on the CPU. Files for "
            "TensorFlow, MXNet or ONNX models are errors."
        ),
    ] = "pytorch"
    inputs: Annotated[Names, Noted("A PyTorch model has no graph whose inputs need names.")] = ()
    outputs: Annotated[Names, Noted("A PyTorch model has no graph whose outputs need names.")] = ()


class TensorRule(Section):
    """The allowed formats of a tensor."""

    granularity: Annotated[
        tuple[Literal["per_channel", "per_tensor"], ...], BeforeValidator(listed), Honoured("Scales to try.")
    ] = ()
    dtype: Annotated[
        tuple[Literal["int8", "uint8", "fp32", "bf16"], ...],
        BeforeValidator(listed),
        Honoured("Types to try. fp32 alone keeps the operator in float. uint8 with sym: as int8, shifted by 128."),
    ] = ()
    bit: Annotated[
        tuple[Annotated[float, Field(ge=1, le=7), AfterValidator(_magnitude_bits)], ...],
        BeforeValidator(listed),
        Honoured("Bits without the sign: 7.0 is int8, 3.0 is int4."),
    ] = ()

    @property
    def is_float(self) -> bool:
        """Whether only float is allowed."""
        return bool(self.dtype) and set(self.dtype) <= {"fp32", "bf16"}


class WeightRule(TensorRule):
    """The allowed formats of weights."""

    scheme: Annotated[
        tuple[Literal["sym", "asym", "asym_float"], ...],
        BeforeValidator(listed),
        Honoured("Zero points to try. asym_float (embeddings): a float zero point, here an integer one."),
    ] = ()
    algorithm: Annotated[
        tuple[Literal["minmax", "kl"], ...], BeforeValidator(listed), Honoured("Observers to try.")
    ] = ()


class ActivationRule(TensorRule):
    """The allowed formats of activations."""

    scheme: Annotated[tuple[Literal["sym", "asym"], ...], BeforeValidator(listed), Honoured("Zero points to try.")] = ()
    algorithm: Annotated[
        tuple[Literal["minmax", "kl", "placeholder"], ...],
        BeforeValidator(listed),
        Honoured("Observers to try. placeholder: the scale is computed at run time."),
    ] = ()
    compute_dtype: Annotated[
        tuple[Literal["int8", "uint8", "fp32", "bf16", "None"], ...],
        BeforeValidator(listed),
        Honoured("The type that activations get at run time (dynamic quantization)."),
    ] = ()


def _rule(value: Any) -> Any:
    """`fp32` for a whole operator."""
    return {"weight": {"dtype": [value]}, "activation": {"dtype": [value]}} if isinstance(value, str) else value


class OpRule(Section):
    """The allowed formats of an operator."""

    weight: WeightRule = WeightRule()
    activation: ActivationRule = ActivationRule()

    @property
    def is_float(self) -> bool:
        """Whether the operator stays in float."""
        return self.weight.is_float or self.activation.is_float


class _Calibration(Section):
    sampling_size: Annotated[
        tuple[Annotated[int, Field(ge=1, le=10**12)], ...],
        BeforeValidator(listed),
        Honoured("Numbers of calibration samples to try."),
    ] = (100,)
    iterations: Annotated[tuple[Count, ...], BeforeValidator(listed), Honoured("Numbers of calibration batches.")] = ()
    dataloader: Loader | None = None


class _Recipes(Section):
    scale_propagation_max_pooling: Annotated[bool, Noted("Placement follows the backend's table.")] = True
    scale_propagation_concat: Annotated[bool, Noted("Placement follows the backend's table.")] = True
    pre_post_process_quantization: Annotated[bool, Noted("Placement follows the backend's table.")] = True
    first_conv_or_matmul_quantization: Annotated[bool, Honoured("false keeps the first product in float.")] = True
    last_conv_or_matmul_quantization: Annotated[
        bool, Honoured("Only true runs: false, which keeps the last product in float, stops with `cannot-run`.")
    ] = True
    fast_bias_correction: Annotated[bool, Honoured("The PTQ step bias-correction.")] = False
    weight_correction: Annotated[
        bool, Honoured("Only false runs: there is no such step; true stops with `cannot-run`.")
    ] = False


class _Advance(Section):
    bias_correction: Annotated[Literal["weight_empirical"] | None, Honoured("The PTQ step bias-correction.")] = None


class _Quantization(Section):
    approach: Annotated[
        Literal[
            "post_training_static_quant",
            "post_training_dynamic_quant",
            "post_training_auto_quant",
            "quant_aware_training",
        ],
        Honoured("How the model is quantized."),
    ] = "post_training_static_quant"
    train: Train | None = None
    advance: _Advance = _Advance()
    calibration: _Calibration = _Calibration()
    recipes: _Recipes = _Recipes()
    model_wise: OpRule = OpRule()
    optype_wise: Annotated[
        dict[str, Annotated[OpRule, BeforeValidator(_rule)]], Honoured("Types of modules, such as Linear.")
    ] = Field(default_factory=dict)
    op_wise: Annotated[
        dict[str, Annotated[OpRule, BeforeValidator(_rule)]],
        Honoured(
            "Names of operators, or regular expressions. default_qconfig: operators without a module of their own."
        ),
    ] = Field(default_factory=dict)
    optimization_level: Annotated[Literal[0, 1], Noted("Bitwright has no graph passes to switch off.")] = 1

    @model_validator(mode="after")
    def _expressions(self) -> _Quantization:
        for name in self.op_wise:
            try:
                re.compile(name)
            except re.error as error:
                raise ValueError(f"op_wise: {name!r} is not a regular expression: {error}") from error
        return self


def _strategy(value: Any) -> Any:
    if str(value).lower() == "sigopt":
        raise ValueError("SigOpt is a paid service; use the strategy tpe")
    return str(value).lower()


class _Strategy(Section):
    name: Annotated[
        Literal["basic", "mse", "mse_v2", "hawq_v2", "bayesian", "tpe", "random", "exhaustive", "conservative", "auto"],
        BeforeValidator(_strategy),
        Honoured("The strategy with the same name. sigopt is a paid service and not supported."),
    ] = "basic"
    accuracy_weight: Annotated[
        float, Field(ge=0, le=1e9), Honoured("Only 1 runs (tpe); others stop with `cannot-run`.")
    ] = 1.0
    latency_weight: Annotated[
        float, Field(ge=0, le=1e9), Honoured("Only 1 runs (tpe); others stop with `cannot-run`.")
    ] = 1.0
    confidence_batches: Annotated[
        int, Field(ge=1, le=10**6), Honoured("Only 2 runs (mse_v2); others stop with `cannot-run`.")
    ] = 2
    hawq_v2_loss: Annotated[str | None, Noted("The workload's loss is used.")] = None
    sigopt_api_token: Annotated[str | None, Rejected("SigOpt is a paid service", "use the strategy tpe")] = None
    sigopt_project_id: Annotated[str | None, Rejected("SigOpt is a paid service", "use the strategy tpe")] = None
    sigopt_experiment_name: Annotated[str | None, Rejected("SigOpt is a paid service", "use the strategy tpe")] = None


class _AccuracyCriterion(Section):
    relative: Annotated[
        Annotated[float | str, AfterValidator(_share)] | None, Honoured("The allowed drop, as a share.")
    ] = None
    absolute: Annotated[
        Annotated[float | str, AfterValidator(_share)] | None, Honoured("The allowed drop, in units of the metric.")
    ] = None
    higher_is_better: Annotated[bool, Honoured("false: the metric is an error.")] = True

    @model_validator(mode="after")
    def _one(self) -> _AccuracyCriterion:
        if self.relative is not None and self.absolute is not None:
            raise ValueError("give one of relative and absolute")
        return self


Objective = Literal["performance", "modelsize", "footprint", "accuracy"]


class _Objectives(Section):
    objective: Annotated[tuple[Objective, ...], BeforeValidator(listed), Honoured("The objectives.")]
    weight: Annotated[
        tuple[Annotated[float, Field(gt=0, le=1e9)], ...], BeforeValidator(listed), Honoured("Their weights.")
    ] = ()
    higher_is_better: Annotated[
        tuple[bool, ...], BeforeValidator(flags), Noted("Time, size and memory are always better when lower.")
    ] = ()

    @model_validator(mode="after")
    def _same(self) -> _Objectives:
        if self.weight and len(self.weight) != len(self.objective):
            raise ValueError("give one weight for each objective")
        return self


class _Exit(Section):
    timeout: Annotated[float, _SECONDS, Honoured("Seconds. 0: stop at the first model that passes.")] = 0
    max_trials: Annotated[int, Field(ge=1, le=10**9), Honoured("The number of trials.")] = 100
    performance_only: Annotated[bool, Honoured("Accuracy doesn't count.")] = False


class _Workspace(Section):
    path: Annotated[str | None, Honoured("The folder of the study.")] = None
    resume: Annotated[str | None, Honoured("Continue this study.")] = None


class _Diagnosis(Section):
    diagnosis_after_tuning: Annotated[bool, Noted("`bitwright report` shows every tensor after the search.")] = False
    op_list: Annotated[Names, Noted("`bitwright report` shows every tensor after the search.")] = ()
    iteration_list: Annotated[
        tuple[int, ...], BeforeValidator(listed), Noted("`bitwright report` shows every tensor after the search.")
    ] = (1,)
    inspect_type: Annotated[
        Literal["all", "activation", "weight"], Noted("`bitwright report` shows every tensor after the search.")
    ] = "all"
    save_to_disk: Annotated[bool, Noted("`bitwright report` shows every tensor after the search.")] = True
    save_path: Annotated[str, Noted("`bitwright report` shows every tensor after the search.")] = ""


class _Tuning(Section):
    strategy: _Strategy = _Strategy()
    accuracy_criterion: _AccuracyCriterion = _AccuracyCriterion()
    objective: Annotated[Objective, Honoured("What is optimized.")] = "performance"
    multi_objectives: _Objectives | None = None
    exit_policy: _Exit = _Exit()
    random_seed: Annotated[int, Field(ge=0, lt=2**32), Honoured("The seed.")] = 1978
    tensorboard: Annotated[bool, Noted("Writes tensors for inspection; `bitwright report` shows them.")] = False
    workspace: _Workspace = _Workspace()
    diagnosis: _Diagnosis | None = None


class Instances(Section):
    """Processes of a benchmark."""

    cores_per_instance: Annotated[Count | None, Honoured(_INSTANCES + " Cores of each process.")] = None
    num_of_instance: Annotated[Count, Honoured(_INSTANCES + " Number of processes.")] = 1
    inter_num_of_threads: Annotated[Count | None, Noted("Operators run one after the other.")] = None
    intra_num_of_threads: Annotated[
        Count | None, Honoured(_INSTANCES + " Threads of an operator; with cores_per_instance, one per core.")
    ] = None
    kmp_blocktime: Annotated[
        int | None, Field(ge=0, le=10**9), Noted("ONNX Runtime has its own threads, not those of OpenMP.")
    ] = None
    kmp_affinity: Annotated[str | None, Noted("Instances are pinned to their cores.")] = None
    kmp_settings: Annotated[Any, Noted("Prints OpenMP's settings.")] = None


class _Accuracy(Section):
    metric: Annotated[tuple[Metric, ...], Named(METRICS, most=1), Honoured("The metric.")] = ()
    multi_metrics: Annotated[
        tuple[Option, ...],
        Named({"weight": Weights, "higher_is_better": HigherIsBetter, **METRICS}),
        Honoured("Several metrics."),
    ] = ()
    configs: Annotated[Instances | None, Noted("All instances have the same accuracy, so one measures it.")] = None
    iteration: Annotated[int, Field(ge=-1, le=10**9), Honoured("Batches; -1: all.")] = -1
    dataloader: Loader | None = None
    postprocess: Postprocess | None = None

    @model_validator(mode="after")
    def _one(self) -> _Accuracy:
        if self.metric and self.multi_metrics:
            raise ValueError("give one of metric and multi_metrics")
        count = len(self.metrics)
        for option in self.multi_metrics:
            if isinstance(option, Weights | HigherIsBetter) and len(option.values) != count:
                raise ValueError("weight and higher_is_better have one value for each metric")
        return self

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics, without their weights."""
        return tuple(one for one in (*self.metric, *self.multi_metrics) if isinstance(one, Metric))


class _Performance(Section):
    warmup: Annotated[int, Field(ge=0, le=10**7), Honoured(_INSTANCES + " Runs before the measurement.")] = 5
    iteration: Annotated[int, Field(ge=-1, le=10**7), Honoured("Runs of a measurement; -1: all.")] = -1
    configs: Instances = Instances()
    dataloader: Loader | None = None
    postprocess: Annotated[Postprocess | None, Noted("Only the model is timed.")] = None


class _Evaluation(Section):
    accuracy: _Accuracy = _Accuracy()
    performance: _Performance | None = None


_PRUNING = Rejected(
    "pruning is not quantization, and Bitwright doesn't prune", "prune with another tool, then tune the pruned model"
)
_DISTILLATION = Rejected(
    "distillation is not quantization, and Bitwright doesn't distil",
    "distil with another tool, then tune the distilled model",
)
_SEARCH = Rejected("Bitwright doesn't search for architectures", "choose the model first, then tune it")
_MIXED = "Operators that can't run in int8 stay in float; bf16 is no choice of the search."


class _Precisions(Section):
    precisions: Annotated[
        tuple[Literal["fp32", "bf16"], ...],
        BeforeValidator(listed),
        Rejected("converts to bf16 without a search", "write a plan with compute: {'*': bf16}"),
    ] = ()
    op_wise: Annotated[Any, Rejected("converts to bf16 without a search", "write a plan with compute: {'*': bf16}")] = (
        None
    )


class LpotConfig(Section):
    """All settings of an LPOT file."""

    version: Annotated[float, BeforeValidator(_version), Honoured("Checked: 1.x.")] = 1.0
    model: _Model = _Model()
    device: Annotated[
        Literal["cpu", "gpu"],
        Noted("The model runs where its parameters are; speed is measured on the backend's runtime."),
    ] = "cpu"
    quantization: _Quantization = _Quantization()
    tuning: _Tuning = _Tuning()
    evaluation: _Evaluation = _Evaluation()
    use_bf16: Annotated[bool, Noted(_MIXED)] = True
    optimization_level: Annotated[Literal[0, 1], Noted("Bitwright has no graph passes to switch off.")] = 1
    model_conversion: Annotated[
        Any, Rejected("converts a trained TensorFlow graph", "remove it: PyTorch models need no conversion")
    ] = None
    graph_optimization: _Precisions | None = None
    mixed_precision: _Precisions | None = None
    pruning: Annotated[Any, _PRUNING] = None
    distillation: Annotated[Any, _DISTILLATION] = None
    auto_distillation: Annotated[Any, _DISTILLATION] = None
    nas: Annotated[Any, _SEARCH] = None
    train: Annotated[Any, Rejected("only pruning and distillation train here", "move it to quantization.train")] = None

    @property
    def loaders(self) -> dict[str, Loader]:
        """The data sections by role: calibration, evaluation, training, performance."""
        train, performance = self.quantization.train, self.evaluation.performance
        found = {
            "calibration": self.quantization.calibration.dataloader,
            "evaluation": self.evaluation.accuracy.dataloader,
            "training": None if train is None else train.dataloader,
            "performance": None if performance is None else performance.dataloader,
        }
        return {role: loader for role, loader in found.items() if loader is not None}

    def with_loaders(self, change: Callable[[Loader], Loader]) -> LpotConfig:
        """A copy with changed data sections."""

        def changed(section: SectionT | None) -> SectionT | None:
            loader = getattr(section, "dataloader", None)
            if section is None or loader is None:
                return section
            return section.model_copy(update={"dataloader": change(loader)})

        quantization, evaluation = self.quantization, self.evaluation
        new = {"calibration": changed(quantization.calibration), "train": changed(quantization.train)}
        measured = {"accuracy": changed(evaluation.accuracy), "performance": changed(evaluation.performance)}
        return self.model_copy(
            update={
                "quantization": quantization.model_copy(update=new),
                "evaluation": evaluation.model_copy(update=measured),
            }
        )
