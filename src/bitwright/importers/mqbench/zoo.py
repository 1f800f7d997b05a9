"""The keys of `config.yaml` files of MQBench's paper: quantization-aware training of one model on one backend."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, model_validator

from bitwright.importers.key_table import Honoured, Noted, Rejected, Section
from bitwright.training.optimizer import GroupSettings, Kind, OptimizerSettings, RateSchedule

__all__ = ["OBSERVERS", "Optimizer", "Schedule", "ZooConfig"]

OBSERVERS = (
    *("MinMaxObserver", "AverageMinMaxObserver", "EMAMinMaxObserver", "ClipStdObserver"),
    *("LSQObserver", "LSQPlusObserver", "QuantileMovingAverageObserver", "EMAQuantileObserver"),
    *("MSEObserver", "EMAMSEObserver", "KLDObserver"),
    *("MinMaxFloorObserver", "EMAMinMaxFloorObserver", "ModeMinMaxFloorObserver", "PoTModeObserver"),
)
"""Observer classes of MQBench that have a counterpart."""
Count = Annotated[int, Field(ge=0, le=10**9)]
Rate = Annotated[float, Field(ge=0, le=1e6)]
Share = Annotated[float, Field(ge=0, lt=1)]
_UNDECAYED: tuple[Kind, ...] = ("conv_b", "linear_b", "bn_w", "bn_b")
_WORKERS = "Only changes how fast the data is read."


def _names(value: Any) -> Any:
    """A list of names; published files write {} for none."""
    return [] if value in ({}, None) else [value] if isinstance(value, str) else value


def _observer(value: Any) -> Any:
    if value is not None and value not in OBSERVERS:
        raise ValueError(f"no observer here has the arithmetic of {value!r}; use one of: {', '.join(OBSERVERS)}")
    return value


Observer = Annotated[str | None, BeforeValidator(_observer)]
Names = Annotated[tuple[str, ...], BeforeValidator(_names)]


class _NormOptions(Section):
    group_size: Annotated[Count | None, Honoured("Processes that share statistics.")] = None
    var_mode: Annotated[Literal["L2"], Honoured("L2: the variance.")] = "L2"
    sync_stats: Annotated[bool, Noted("Running statistics are those of the group.")] = True
    momentum: Annotated[Share, Honoured("Momentum of the running statistics.")] = 0.1
    eps: Annotated[Rate, Honoured("ε of batch norms.")] = 1e-5
    affine: Annotated[bool, Honoured("Whether norms have weights.")] = True
    track_running_stats: Annotated[bool, Honoured("Whether norms have running statistics.")] = True


class _Norm(Section):
    use_sync_bn: Annotated[bool, Honoured("Batch norms share statistics between processes.")] = False
    kwargs: _NormOptions = _NormOptions()


class _ModelOptions(Section):
    bn: _Norm = _Norm()
    dropout: Annotated[Share, Honoured("Dropout before the classifier.")] = 0.0
    num_classes: Annotated[int, Field(ge=1, le=10**7), Honoured("The number of classes.")] = 1000


class _Model(Section):
    type: Annotated[str, Honoured("The network, with torchvision's parameter names where torchvision has it.")]
    kwargs: _ModelOptions = _ModelOptions()


class _Dist(Section):
    sync: Annotated[bool, Noted("Gradients are averaged after backward in both cases; only the time differs.")] = True


class _Quantizers(Section):
    w_method: Annotated[
        Literal["lsq", "dorefa", "dsq", "apot", "qil", "pact"],
        Honoured("The quantizer of weights. PACT has none of its own and uses DoReFa's."),
    ]
    a_method: Annotated[
        Literal["lsq", "dorefa", "dsq", "apot", "qil", "pact"], Honoured("The quantizer of activations.")
    ]
    bit: Annotated[int, Field(ge=2, le=8), Honoured("Bits of weights and activations. First and last layer: 8.")]
    w_observer: Annotated[Observer, Honoured("How ranges of weights begin.")] = None
    a_observer: Annotated[Observer, Honoured("How ranges of activations begin.")] = None


class _OptimizerOptions(Section):
    lr: Annotated[Rate | None, Noted("MQBench replaces it with lr_scheduler.kwargs.base_lr.")] = None
    momentum: Annotated[Share, Honoured("The momentum (SGD, RMSprop).")] = 0.0
    nesterov: Annotated[bool, Honoured("Nesterov's momentum (SGD).")] = False
    dampening: Annotated[Share, Honoured("The dampening (SGD).")] = 0.0
    weight_decay: Annotated[Rate, Honoured("The weight decay.")] = 0.0
    betas: Annotated[tuple[Share, Share], Honoured("β (Adam, AdamW).")] = (0.9, 0.999)
    eps: Annotated[Rate, Honoured("ε (Adam, AdamW, RMSprop).")] = 1e-8
    amsgrad: Annotated[bool, Honoured("AMSGrad (Adam, AdamW).")] = False


class _Group(Section):
    weight_decay: Annotated[Rate | None, Honoured("The weight decay of these parameters.")] = None
    lr: Annotated[Rate | None, Honoured("The learning rate of these parameters, scaled by the same schedule.")] = None
    momentum: Annotated[Share | None, Honoured("The momentum of these parameters.")] = None


class _Groups(Section):
    bn_w: _Group | None = None
    bn_b: _Group | None = None
    conv_b: _Group | None = None
    linear_b: _Group | None = None
    linear_w: _Group | None = None
    conv_dw_w: _Group | None = None
    conv_dw_b: _Group | None = None
    conv_dense_w: _Group | None = None
    conv_dense_b: _Group | None = None


class Optimizer(Section):
    """The optimizer and its parameter groups."""

    type: Annotated[Literal["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta"], Honoured("The optimizer.")] = (
        "SGD"
    )
    kwargs: _OptimizerOptions = _OptimizerOptions()
    pconfig: _Groups = _Groups()
    no_wd: Annotated[bool, Honoured("No weight decay of biases and batch norms.")] = False

    @property
    def groups(self) -> dict[Kind, GroupSettings]:
        """The settings of each kind of parameter that differ from `kwargs`."""
        found: dict[Kind, dict[str, float]] = {}
        if self.no_wd:
            found = {kind: {"weight_decay": 0.0} for kind in _UNDECAYED}
        for name in type(self.pconfig).model_fields:
            group: _Group | None = getattr(self.pconfig, name)
            if group is not None:
                found[cast(Kind, name)] = group.model_dump(exclude_none=True)
        return {kind: GroupSettings(**values) for kind, values in found.items()}

    @property
    def settings(self) -> OptimizerSettings:
        """The optimizer with the options that the file gives."""
        options = self.kwargs.model_dump(exclude_unset=True, exclude={"lr"})
        return OptimizerSettings(name=self.type, **options)

    @model_validator(mode="after")
    def _valid(self) -> Optimizer:
        _ = self.settings  # unknown options of this optimizer are errors
        return self


class _ScheduleOptions(Section):
    base_lr: Annotated[Rate, Honoured("The learning rate at the first iteration.")] = 0.004
    warmup_lr: Annotated[Rate | None, Honoured("The learning rate after warm-up; base_lr if missing.")] = None
    warmup_steps: Annotated[Count, Honoured("Iterations of warm-up.")] = 0
    max_iter: Annotated[int | None, Field(ge=1, le=10**9), Honoured("The number of iterations.")] = None
    max_epoch: Annotated[int | None, Field(ge=1, le=10**6), Honoured("The number of epochs.")] = None
    min_lr: Annotated[Rate, Honoured("The last learning rate (Cosine).")] = 0.0
    lr_steps: Annotated[tuple[Count, ...], Honoured("Iterations at which the rate changes (Step).")] = ()
    lr_mults: Annotated[tuple[Rate, ...], Honoured("Factors of these changes (Step).")] = ()
    step_size: Annotated[int | None, Field(ge=1, le=10**9), Honoured("Iterations between changes (StepDecay).")] = None
    decay: Annotated[Rate | None, Honoured("The factor of each change (StepDecay).")] = None
    power: Annotated[Rate | None, Honoured("The exponent (Poly).")] = None

    @model_validator(mode="after")
    def _consistent(self) -> _ScheduleOptions:
        if self.warmup_steps == 1:
            raise ValueError("warmup_steps must be 0 or at least 2")
        if self.warmup_steps and self.base_lr == 0:
            raise ValueError("base_lr must be positive for a warm-up")
        if len(self.lr_steps) != len(self.lr_mults) or list(self.lr_steps) != sorted(self.lr_steps):
            raise ValueError("lr_steps must increase, and lr_mults must have one factor for each")
        return self


class Schedule(Section):
    """The learning rate at each iteration."""

    type: Annotated[Literal["Cosine", "Step", "StepDecay", "Poly"], Honoured("The schedule.")] = "Cosine"
    kwargs: _ScheduleOptions = _ScheduleOptions()

    @model_validator(mode="after")
    def _complete(self) -> Schedule:
        needed = {"Step": ("lr_steps",), "StepDecay": ("step_size", "decay"), "Poly": ("power",)}.get(self.type, ())
        missing = [name for name in needed if not getattr(self.kwargs, name)]
        if missing:
            raise ValueError(f"{self.type} needs kwargs.{missing[0]}")
        return self

    @property
    def rates(self) -> RateSchedule:
        """The learning rate at each iteration."""
        own = self.kwargs
        return RateSchedule(
            kind=self.type,
            start=own.base_lr,
            top=own.base_lr if own.warmup_lr is None else own.warmup_lr,
            last=own.min_lr,
            warmup=own.warmup_steps,
            steps=own.lr_steps,
            factors=own.lr_mults,
            every=own.step_size,
            decay=own.decay,
            power=own.power,
        )


class _EmaOptions(Section):
    decay: Annotated[Share, Honoured("The decay of the average.")] = 0.999


class _Ema(Section):
    enable: Annotated[bool, Honoured("Average the weights.")] = False
    kwargs: _EmaOptions = _EmaOptions()


class _Reader(Section):
    type: Annotated[Literal["pil"], Honoured("Pillow reads images.")] = "pil"


class _TrainSampler(Section):
    type: Annotated[
        Literal["distributed_iteration", "distributed_epoch", "distributed"], Honoured("The order of samples.")
    ] = "distributed_iteration"


class _TestSampler(Section):
    type: Annotated[Literal["distributed"], Honoured("All samples once.")] = "distributed"


class _Transforms(Section):
    type: Annotated[
        Literal["STANDARD", "LINEAR", "ONECROP"],
        Honoured("STANDARD: random resized crop, flip, color jitter. LINEAR: without jitter. ONECROP: center crop."),
    ]


class _Images(Section):
    root_dir: Annotated[str, Honoured("The folder of images.")]
    meta_file: Annotated[str, Honoured("Lines `path label`.")]
    image_reader: _Reader = _Reader()


class _TrainData(_Images):
    sampler: _TrainSampler = _TrainSampler()
    transforms: _Transforms = _Transforms(type="STANDARD")


class _EvaluatorOptions(Section):
    topk: Annotated[tuple[Annotated[int, Field(ge=1, le=10**6)], ...], Honoured("The metrics.")] = (1, 5)


class _Evaluator(Section):
    type: Annotated[Literal["imagenet"], Honoured("Top-k accuracy.")] = "imagenet"
    kwargs: _EvaluatorOptions = _EvaluatorOptions()


class _TestData(_Images):
    sampler: _TestSampler = _TestSampler()
    transforms: _Transforms = _Transforms(type="ONECROP")
    evaluator: _Evaluator = _Evaluator()


class _Data(Section):
    type: Annotated[Literal["imagenet"], Honoured("Images with labels.")] = "imagenet"
    read_from: Annotated[Literal["mc", "fs", "petrel", "ceph"], Noted("Files are read from the local file system.")] = (
        "fs"
    )
    use_dali: Annotated[bool, Noted("Pillow and torch prepare images.")] = False
    batch_size: Annotated[int, Field(ge=1, le=10**6), Honoured("Samples per process and iteration.")] = 64
    num_workers: Annotated[Count, Noted(_WORKERS)] = 4
    pin_memory: Annotated[bool, Noted(_WORKERS)] = True
    input_size: Annotated[int, Field(ge=1, le=10_000), Honoured("Height and width of inputs.")] = 224
    test_resize: Annotated[int, Field(ge=1, le=10_000), Honoured("The shorter side before the center crop.")] = 256
    max_epoch: Annotated[int | None, Field(ge=1, le=10**6), Honoured("The number of epochs.")] = None
    max_iter: Annotated[int | None, Field(ge=1, le=10**9), Honoured("The number of iterations.")] = None
    train: _TrainData | None = None
    test: _TestData | None = None


class _Ignore(Section):
    key: Annotated[Names, Noted("Only the weights of the checkpoint are loaded.")] = ()
    model: Annotated[Names, Honoured("Parameters that are not loaded.")] = ()


class _Pretrain(Section):
    path: Annotated[str, Honoured("A checkpoint to continue. A missing file begins a new run, as in MQBench.")]
    ignore: _Ignore = _Ignore()


class _Saver(Section):
    print_freq: Annotated[int, Field(ge=1, le=10**9), Honoured("Iterations between messages.")] = 10
    val_freq: Annotated[int, Field(ge=1, le=10**9), Honoured("Iterations between validations.")] = 1000
    save_many: Annotated[bool, Honoured("Keep every checkpoint, not only the last one.")] = False
    pretrain: _Pretrain | None = None


class ZooConfig(Section):
    """All settings of a file of MQBench's zoo."""

    model: _Model | None = None
    dist: _Dist = _Dist()
    qparams: _Quantizers
    backend: Annotated[
        Literal["academic", "acl", "fbgemm", "snpe", "tensorrt", "tvm", "tflitemicro", "bnfold_ablation"],
        Honoured("The backend with the same name; academic_fold for bnfold_ablation, which folds norms by bnfold."),
    ]
    bnfold: Annotated[int, Field(ge=-1, le=4), Honoured("How batch norms are folded. academic doesn't fold.")] = 1
    freeze_step: Annotated[Any, Rejected("batch norms can't be frozen at an iteration", "remove it")] = None
    optimizer: Optimizer = Optimizer()
    lr_scheduler: Schedule = Schedule()
    label_smooth: Annotated[Share, Honoured("Label smoothing.")] = 0.0
    ema: _Ema = _Ema()
    data: _Data = _Data()
    saver: _Saver = _Saver()
    seed: Annotated[int, Field(ge=0, lt=2**32), Honoured("The seed.")] = 1000
    mixup: Annotated[Any, Rejected("mixup is not supported", "remove it")] = None
    cutmix: Annotated[Any, Rejected("cutmix is not supported", "remove it")] = None
