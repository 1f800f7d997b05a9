"""The keys of MQBench's later toolkit: post-training quantization of ImageNet models, and of Hugging Face models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from bitwright.core.errors import did_you_mean
from bitwright.importers.key_table import Honoured, Noted, Rejected, Section
from bitwright.importers.mqbench.zoo import Count, Names, Observer, Rate

__all__ = ["HuggingFaceConfig", "QuantizerScheme", "Reconstruction", "TextData", "ToolkitConfig"]

FakeQuantize = Literal[
    "FixedFakeQuantize",
    "LearnableFakeQuantize",
    "NNIEFakeQuantize",
    "DoReFaFakeQuantize",
    "DSQFakeQuantize",
    "PACTFakeQuantize",
    "TqtFakeQuantize",
    "AdaRoundFakeQuantize",
    "QDropFakeQuantize",
]
BACKENDS = (
    *("Academic", "Academic_NLP", "Tensorrt", "Tensorrt_NLP", "SNPE", "PPLW8A16", "PPLCUDA", "NNIE", "Vitis"),
    *("ONNX_QNN", "OPENVINO", "STPU", "Tengine_u8"),
)


def _backend(value: Any) -> Any:
    """The toolkit's spelling of a backend; its text example also writes lower-case names."""
    known = {name.lower(): name for name in BACKENDS}
    if str(value).lower() not in known:
        raise ValueError(f"unknown backend {value!r}; {did_you_mean(str(value), BACKENDS)}")
    return known[str(value).lower()]


Backend = Annotated[str, BeforeValidator(_backend)]
_WORKERS = "Only changes how fast the data is read."
_TRACING = "Bitwright doesn't trace models, so nothing must be preserved or replaced."


class QuantizerScheme(Section):
    """The format of a tensor."""

    bit: Annotated[int, Field(ge=2, le=16), Honoured("The number of bits.")] = 8
    symmetry: Annotated[bool, Honoured("Zero point 0.")] = True
    per_channel: Annotated[bool, Honoured("One scale per channel.")] = False
    pot_scale: Annotated[bool, Honoured("Power-of-two scales.")] = False
    p: Annotated[float, Field(gt=0, le=100), Honoured("The norm of MSE observers.")] = 2.0


class _Quantizers(Section):
    w_observer: Annotated[Observer, Honoured("How ranges of weights are found.")] = None
    a_observer: Annotated[Observer, Honoured("How ranges of activations are found.")] = None
    w_fakequantize: Annotated[FakeQuantize | None, Honoured("The quantizer of weights.")] = None
    a_fakequantize: Annotated[FakeQuantize | None, Honoured("The quantizer of activations.")] = None
    w_fakeq_params: Annotated[dict[str, Any], Honoured("Options of the quantizer of weights.")] = Field(
        default_factory=dict
    )
    a_fakeq_params: Annotated[dict[str, Any], Honoured("Options of the quantizer of activations.")] = Field(
        default_factory=dict
    )
    w_qscheme: QuantizerScheme | None = None
    a_qscheme: QuantizerScheme | None = None


_MORE = Rejected("the backend's table says which operators are quantized", "add the operator to a copy of the table")


class _Placement(Section):
    exclude_module_name: Annotated[Names, Honoured("Modules that stay in float, with all that they contain.")] = ()
    exclude_function_type: Annotated[Names, Honoured("Functions that stay in float: add, torch.add, …")] = ()
    exclude_node_name: Annotated[
        Names, Honoured("Operators that stay in float, by the names of torch.fx or ours.")
    ] = ()
    additional_function_type: Annotated[Any, _MORE] = None
    additional_module_type: Annotated[Any, _MORE] = None
    additional_node_name: Annotated[Any, _MORE] = None


class _Prepare(Section):
    extra_qconfig_dict: _Quantizers = _Quantizers()
    extra_quantizer_dict: _Placement = _Placement()
    preserve_attr: Annotated[Any, Noted(_TRACING)] = None
    concrete_args: Annotated[Any, Noted(_TRACING)] = None
    leaf_module: Annotated[
        Names, Honoured("Modules of these classes stay in float, because MQBench sees none of it.")
    ] = ()
    extra_fuse_dict: Annotated[Any, Noted(_TRACING)] = None


_Exponent = Annotated[float, Field(gt=0, le=1000)]


class Reconstruction(Section):
    """The optimization of roundings and scales."""

    pattern: Annotated[Literal["layer", "block"], Honoured("layer: AdaRound. block: BRECQ. QDrop if prob < 1.")] = (
        "block"
    )
    scale_lr: Annotated[Rate | None, Honoured("Adam's learning rate of activation scales.")] = None
    warm_up: Annotated[float, Field(ge=0, lt=1), Honoured("The share of iterations without a penalty.")] = 0.2
    weight: Annotated[float, Field(gt=0, le=1e6), Honoured("The weight of the penalty.")] = 0.01
    max_count: Annotated[int, Field(ge=1, le=10**9), Honoured("The number of iterations.")] = 20_000
    b_range: Annotated[tuple[_Exponent, _Exponent], Honoured("The first and the last exponent of the penalty.")] = (
        20.0,
        2.0,
    )
    keep_gpu: Annotated[bool, Noted("Only changes where calibration data is kept.")] = True
    round_mode: Annotated[Literal["learned_hard_sigmoid"], Honoured("How the rounding is learned.")] = (
        "learned_hard_sigmoid"
    )
    prob: Annotated[float, Field(ge=0, le=1), Honoured("The share of activations that is quantized (QDrop).")] = 1.0


class _Deploy(Section):
    output_path: Annotated[str, Honoured("The folder of the result.")] = "./"
    model_name: Annotated[str, Honoured("The name of the result.")] = "model"
    deploy_to_qlinear: Annotated[bool, Honoured("Operators of ONNX for integers instead of ranges.")] = False


class _Quantize(Section):
    quantize_type: Annotated[
        Literal["naive_ptq", "advanced_ptq"], Honoured("Calibration only, or with reconstruction.")
    ] = "naive_ptq"
    cali_batchsize: Annotated[int, Field(ge=1, le=10**6), Honoured("The number of calibration batches.")] = 16
    backend: Annotated[Backend, Honoured("The backend.")] = "Academic"
    deploy: _Deploy | None = None
    reconstruction: Reconstruction | None = None

    @model_validator(mode="after")
    def _complete(self) -> _Quantize:
        if self.quantize_type == "advanced_ptq" and self.reconstruction is None:
            raise ValueError("advanced_ptq needs the section reconstruction")
        return self


class _ModelOptions(Section):
    num_classes: Annotated[int, Field(ge=1, le=10**7), Honoured("The number of classes.")] = 1000


class _Model(Section):
    type: Annotated[str, Honoured("The network, with torchvision's parameter names where torchvision has it.")]
    kwargs: _ModelOptions = _ModelOptions()
    path: Annotated[str | None, Honoured("The checkpoint.")] = None


class _Data(Section):
    path: Annotated[str, Honoured("A folder with train/ and val/, one subfolder per class.")]
    batch_size: Annotated[int, Field(ge=1, le=10**6), Honoured("Samples per batch.")] = 64
    num_workers: Annotated[Count, Noted(_WORKERS)] = 4
    pin_memory: Annotated[bool, Noted(_WORKERS)] = True
    input_size: Annotated[int, Field(ge=1, le=10_000), Honoured("Height and width of inputs.")] = 224
    test_resize: Annotated[int, Field(ge=1, le=10_000), Honoured("The shorter side before the center crop.")] = 256


class _Process(Section):
    seed: Annotated[int, Field(ge=0, lt=2**32), Honoured("The seed.")] = 1005


class ToolkitConfig(Section):
    """All settings of a file of the ImageNet example. Without `quantize`, the float model is evaluated."""

    root: Annotated[str | None, Honoured("Another file, for sections that this one doesn't have.")] = None
    extra_prepare_dict: _Prepare = _Prepare()
    backend: Annotated[Backend | None, Honoured("The backend, as quantize.backend.")] = None
    quantize: _Quantize | None = None
    model: _Model
    data: _Data
    process: _Process = _Process()

    @property
    def is_float(self) -> bool:
        """Whether the file only evaluates the float model."""
        return self.quantize is None

    @property
    def output(self) -> str | None:
        """The folder of the results that the file names."""
        return None if self.quantize is None or self.quantize.deploy is None else self.quantize.deploy.output_path


class _TextScheme(Section):
    quantizer: Annotated[FakeQuantize, Honoured("The quantizer.")] = "FixedFakeQuantize"
    observer: Annotated[Observer, Honoured("How ranges are found.")] = None
    bit: Annotated[int, Field(ge=2, le=16), Honoured("The number of bits.")] = 8
    symmetric: Annotated[bool, Honoured("Zero point 0.")] = True
    per_channel: Annotated[bool | None, Honoured("One scale per channel.")] = None
    ch_axis: Annotated[int, Field(ge=-1, le=8), Honoured("-1: one scale. 0: one per output channel.")] = -1

    @property
    def channels(self) -> bool:
        """Whether each channel has a scale."""
        return self.ch_axis >= 0 if self.per_channel is None else self.per_channel


class _TextQuantization(Section):
    a_qconfig: _TextScheme = _TextScheme()
    w_qconfig: _TextScheme = _TextScheme()
    calibrate: Annotated[int, Field(ge=1, le=10**9), Honoured("The number of calibration samples.")] = 256
    backend: Annotated[Backend, Honoured("The backend.")] = "Academic_NLP"
    pot_scale: Annotated[bool, Honoured("Power-of-two scales.")] = False


_HUB = Noted("Models and tokenizers are read from local folders.")
_PREDICTIONS = Noted("MQBench's text example predicts nothing without labels.")
_LIMIT = Annotated[int | None, Field(ge=1, le=10**9), Honoured("Use only so many samples.")]


class _TextModel(Section):
    model_name_or_path: Annotated[str, Honoured("The local folder of the model.")]
    config_name: Annotated[str | None, Honoured("The local folder of the configuration.")] = None
    tokenizer_name: Annotated[str | None, Honoured("The local folder of the tokenizer.")] = None
    cache_dir: Annotated[str | None, _HUB] = None
    use_fast_tokenizer: Annotated[bool, Honoured("Use the fast tokenizer.")] = True
    model_revision: Annotated[str | None, _HUB] = None
    use_auth_token: Annotated[bool | None, _HUB] = None


class TextData(Section):
    """The texts, and how they become inputs. The last keys are for models that answer questions."""

    task_name: Annotated[str | None, Honoured("The task of GLUE.")] = None
    dataset_name: Annotated[str | None, Honoured("The local folder of the data set, such as SQuAD's.")] = None
    dataset_config_name: Annotated[str | None, Noted("A local folder has one data set.")] = None
    train_file: Annotated[str | None, Honoured("The training data.")] = None
    validation_file: Annotated[str | None, Honoured("The evaluation data.")] = None
    test_file: Annotated[str | None, _PREDICTIONS] = None
    max_seq_length: Annotated[int, Field(ge=1, le=10**6), Honoured("The length in tokens.")] = 128
    pad_to_max_length: Annotated[bool, Honoured("Pad all texts to this length.")] = True
    overwrite_cache: Annotated[bool, Noted("There is no cache of tokens.")] = False
    preprocessing_num_workers: Annotated[Count | None, Noted(_WORKERS)] = None
    max_train_samples: _LIMIT = None
    max_eval_samples: _LIMIT = None
    max_predict_samples: Annotated[int | None, Field(ge=1, le=10**9), _PREDICTIONS] = None
    doc_stride: Annotated[
        int, Field(ge=0, le=10**6), Honoured("Questions: tokens that parts of a long context share.")
    ] = 128
    n_best_size: Annotated[
        int, Field(ge=1, le=10**6), Honoured("Questions: first and last tokens of an answer to try.")
    ] = 20
    max_answer_length: Annotated[int, Field(ge=1, le=10**6), Honoured("Questions: tokens of an answer at most.")] = 30
    null_score_diff_threshold: Annotated[
        float, Field(ge=-1e9, le=1e9), Honoured("Questions: how much better no answer must score to be chosen.")
    ] = 0.0
    version_2_with_negative: Annotated[bool, Honoured("Questions: some have no answer (SQuAD 2).")] = False


class HuggingFaceConfig(Section):
    """All settings of a file of the text example, which quantizes a Hugging Face model."""

    quant: _TextQuantization | None = None
    model: _TextModel
    data: TextData = TextData()
    train: Annotated[
        dict[str, Any],
        Honoured("seed, per_device_eval_batch_size, output_dir. Others have no effect: MQBench only evaluates here."),
    ] = Field(default_factory=dict)
    progress: Annotated[dict[str, Any], Noted("Messages, folders of messages, and names of runs.")] = Field(
        default_factory=dict
    )
    deploy: Annotated[Any, Rejected("text models have no deploy section in MQBench", "use `bitwright export`")] = None

    @model_validator(mode="after")
    def _numbers(self) -> HuggingFaceConfig:
        for key, low in (("seed", 0), ("per_device_eval_batch_size", 1)):
            value = self.train.get(key, low)
            if type(value) is not int or not low <= value < 2**32:
                raise ValueError(f"train.{key} must be a whole number of at least {low}")
        return self

    @property
    def seed(self) -> int:
        """The seed of the calibration samples."""
        return int(self.train.get("seed", 42))

    @property
    def batch_size(self) -> int:
        """Samples per batch."""
        return int(self.train.get("per_device_eval_batch_size", 8))

    @property
    def output(self) -> str | None:
        """The folder of the results that the file names."""
        named = self.train.get("output_dir")
        return None if named is None else str(named)
