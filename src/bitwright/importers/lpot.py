"""Import YAML files of LPOT (Neural Compressor 1.x). Keys keep their meaning; unsupported keys are errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from bitwright.core.documents import Strict, validated
from bitwright.core.importer import Importer

_NO_ACCURACY = 1e9  # a drop that no candidate exceeds


def _listed(value: Any) -> Any:
    """A list, one value, or values separated by commas."""
    if isinstance(value, str) and "," in value:
        return [part.strip() for part in value.split(",")]
    return value if isinstance(value, list) else [value]


Listed = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Sizes = Annotated[tuple[Annotated[int, Field(ge=1, le=10**12)], ...], BeforeValidator(_listed)]


class _Model(Strict):
    name: str
    framework: Literal["pytorch", "pytorch_fx"] = "pytorch"


class _Tensor(Strict):
    granularity: Annotated[tuple[Literal["per_channel", "per_tensor"], ...], BeforeValidator(_listed)] = ()
    scheme: Annotated[tuple[Literal["sym", "asym"], ...], BeforeValidator(_listed)] = ()
    dtype: Annotated[tuple[Literal["int8", "uint8", "fp32"], ...], BeforeValidator(_listed)] = ()
    algorithm: Annotated[tuple[Literal["minmax", "kl"], ...], BeforeValidator(_listed)] = ()
    bit: Annotated[tuple[Annotated[int, Field(ge=2, le=16)], ...], BeforeValidator(_listed)] = ()

    @property
    def is_float(self) -> bool:
        """Whether only float is allowed."""
        return self.dtype == ("fp32",)

    def formats(self, *, weight: bool) -> list[str]:
        """The formats in our notation; empty means those of the backend."""
        kinds: list[str] = [kind for kind in self.dtype if kind != "fp32"]
        if not (kinds or self.granularity or self.scheme or self.bit):
            return []
        usual = "int8" if weight else "uint8"
        return [
            f"{kind.rstrip('8')}{bits}/{'channel' if size == 'per_channel' else 'tensor'}/{scheme}"
            for kind in (*kinds,) or (usual,)
            for bits in self.bit or (8,)
            for size in self.granularity or (("per_channel",) if weight else ("per_tensor",))
            for scheme in self.scheme or (("sym",) if weight else ("asym",))
        ]


class _Op(Strict):
    weight: _Tensor = _Tensor()
    activation: _Tensor = _Tensor()

    def rule(self) -> dict[str, Any]:
        """The rule in our notation."""
        if self.weight.is_float or self.activation.is_float:
            return {"keep": "float"}
        keep = None if not self.activation.dtype or "fp32" in self.activation.dtype else "quantized"
        rule = {
            "keep": keep,
            "weights": self.weight.formats(weight=True),
            "activations": self.activation.formats(weight=False),
            "observer": list(self.activation.algorithm),
        }
        return {key: value for key, value in rule.items() if value}


class _Root(Strict, extra="ignore"):
    root: str


class _Dummy(Strict, extra="ignore"):
    shape: tuple[int, ...]


class _Size(Strict, extra="ignore"):
    size: int


class _Normalize(Strict, extra="ignore"):
    mean: tuple[float, ...]
    std: tuple[float, ...]


class _DatasetOf(Strict):
    ImageFolder: _Root | None = None
    dummy: _Dummy | None = None
    npz: _Root | None = None


class _Transforms(Strict):
    Resize: _Size | None = None
    CenterCrop: _Size | None = None
    ToTensor: dict[str, Any] | None = None
    Normalize: _Normalize | None = None


class _Loader(Strict):
    batch_size: int = Field(default=1, ge=1, le=10**6)
    dataset: _DatasetOf
    transform: _Transforms = _Transforms()
    last_batch: Literal["rollover"] = "rollover"
    shuffle: Literal[False] = False

    def ours(self) -> dict[str, Any]:
        """The data set in our notation."""
        data: dict[str, Any] = {"batch_size": self.batch_size}
        if self.dataset.ImageFolder is not None:
            data["images"] = self.dataset.ImageFolder.root
        if self.dataset.npz is not None:
            data["npz"] = self.dataset.npz.root
        if self.dataset.dummy is not None:
            data["random"] = self.dataset.dummy.shape
        transform = self.transform
        if transform.Resize is not None:
            data["resize"] = transform.Resize.size
        if transform.CenterCrop is not None:
            data["crop"] = transform.CenterCrop.size
        if transform.Normalize is not None:
            data |= {"mean": transform.Normalize.mean, "std": transform.Normalize.std}
        return data


class _Calibration(Strict):
    sampling_size: Sizes = (100,)
    dataloader: _Loader | None = None


class _Recipes(Strict):
    first_conv_or_matmul_quantization: bool = True
    fast_bias_correction: bool = False


class _Quantization(Strict):
    approach: Literal["post_training_static_quant"] = "post_training_static_quant"
    calibration: _Calibration = _Calibration()
    recipes: _Recipes = _Recipes()
    model_wise: _Op = _Op()
    optype_wise: dict[str, _Op] = Field(default_factory=dict)
    op_wise: dict[str, _Op] = Field(default_factory=dict)


class _Strategy(Strict):
    name: Literal[
        "basic", "mse", "mse_v2", "hawq_v2", "bayesian", "tpe", "random", "exhaustive", "conservative", "auto"
    ] = "basic"


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


class _Criterion(Strict):
    relative: Annotated[float | str, AfterValidator(_share)] | None = None
    absolute: float | None = Field(default=None, ge=0, le=1e12)
    higher_is_better: bool = True

    @model_validator(mode="after")
    def _one(self) -> _Criterion:
        if self.relative is not None and self.absolute is not None:
            raise ValueError("give one of relative and absolute")
        return self

    def drop(self) -> dict[str, float]:
        """The drop in our notation."""
        if self.absolute is not None:
            return {"absolute": self.absolute}
        return {"relative": 0.01 if self.relative is None else float(self.relative)}


_Objective = Literal["performance", "modelsize", "footprint"]
_OURS = {"performance": "latency", "modelsize": "size", "footprint": "memory"}


class _Several(Strict):
    objective: tuple[_Objective, ...]
    weight: tuple[Annotated[float, Field(gt=0, le=1e9)], ...] = ()
    higher_is_better: tuple[Literal[False], ...] = ()

    @model_validator(mode="after")
    def _same(self) -> _Several:
        if self.weight and len(self.weight) != len(self.objective):
            raise ValueError("give one weight for each objective")
        return self


class _Exit(Strict):
    timeout: float = Field(default=0, ge=0, le=1e10)
    max_trials: int = Field(default=100, ge=1, le=10**9)
    performance_only: bool = False


class _Workspace(Strict):
    path: str | None = None
    resume: str | None = None


class _Tuning(Strict):
    strategy: _Strategy = _Strategy()
    accuracy_criterion: _Criterion = _Criterion()
    objective: _Objective = "performance"
    multi_objectives: _Several | None = None
    exit_policy: _Exit = _Exit()
    random_seed: int = Field(default=1978, ge=0, lt=2**32)
    workspace: _Workspace = _Workspace()


class _Metric(Strict):
    topk: int | dict[str, int] | None = None
    F1: dict[str, Any] | None = None
    MSE: dict[str, Any] | None = None
    MAE: dict[str, Any] | None = None
    RMSE: dict[str, Any] | None = None

    def ours(self) -> dict[str, dict[str, Any]]:
        """The metrics in our notation."""
        found: dict[str, dict[str, Any]] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if value is not None:
                found[name.lower()] = {"k": value} if isinstance(value, int) else dict(value)
        return found


class _Accuracy(Strict):
    metric: _Metric | None = None
    multi_metrics: _Metric | None = None
    dataloader: _Loader | None = None


class _Performance(Strict):
    warmup: int = Field(default=5, ge=0, le=10**7)
    iteration: int | None = Field(default=None, ge=1, le=10**7)


class _Evaluation(Strict):
    accuracy: _Accuracy = _Accuracy()
    performance: _Performance = _Performance()


class LpotFile(Strict):
    """The supported keys of an LPOT file."""

    model: _Model
    quantization: _Quantization = _Quantization()
    tuning: _Tuning = _Tuning()
    evaluation: _Evaluation = _Evaluation()


def is_lpot(data: Mapping[str, Any]) -> bool:
    """Whether the data is that of an LPOT file."""
    return isinstance(data.get("model"), dict) or "tuning" in data or "quantization" in data


def translate(data: dict[str, Any], *, where: str) -> dict[str, Any]:
    """The data of the equivalent `TuneConfig`."""
    file = validated(LpotFile, data, title=f"{where} has problems")
    quantization, tuning = file.quantization, file.tuning
    out: dict[str, Any] = {
        "name": file.model.name,
        "strategy": tuning.strategy.name,
        "seed": tuning.random_seed,
        "goal": _goal(tuning),
        "budget": _budget(tuning.exit_policy),
        "space": _space(quantization),
    }
    workspace = tuning.workspace
    if workspace.path is not None:
        out["store"] = f"{workspace.path.rstrip('/')}/study.db"
    if workspace.resume is not None:
        out |= {"store": workspace.resume, "resume": True}
    if quantization.calibration.dataloader is not None:
        out["calibration"] = quantization.calibration.dataloader.ours()
    accuracy = file.evaluation.accuracy
    if accuracy.dataloader is not None:
        out["evaluation"] = accuracy.dataloader.ours()
    metric = accuracy.metric or accuracy.multi_metrics
    if metric is not None:
        out["metric"] = metric.ours()
    if file.evaluation.performance.iteration is not None:
        out["measuring"] = {"runs": file.evaluation.performance.iteration}
    return out


def _goal(tuning: _Tuning) -> dict[str, Any]:
    criterion = tuning.accuracy_criterion
    drop = {"relative": _NO_ACCURACY} if tuning.exit_policy.performance_only else criterion.drop()
    objective: Any = _OURS[tuning.objective]
    several = tuning.multi_objectives
    if several is not None:
        weights = several.weight or (1.0,) * len(several.objective)
        objective = {_OURS[name]: weight for name, weight in zip(several.objective, weights, strict=True)}
    return {"drop": drop, "lower_is_better": not criterion.higher_is_better, "objective": objective}


def _budget(policy: _Exit) -> dict[str, Any]:
    if policy.timeout == 0:
        return {"trials": policy.max_trials, "stop": "first"}
    return {"trials": policy.max_trials, "minutes": policy.timeout / 60, "stop": "budget"}


def _space(quantization: _Quantization) -> dict[str, Any]:
    whole = quantization.model_wise
    space: dict[str, Any] = {
        "weights": whole.weight.formats(weight=True),
        "activations": whole.activation.formats(weight=False),
        "observer": list(whole.activation.algorithm),
        "weight_observer": list(whole.weight.algorithm),
        "samples": list(quantization.calibration.sampling_size),
        "steps": [["bias-correction"]] if quantization.recipes.fast_bias_correction else [[]],
        "types": {kind.lower(): op.rule() for kind, op in quantization.optype_wise.items()},
        "operators": {f"re:{name}": op.rule() for name, op in quantization.op_wise.items()},
    }
    if not quantization.recipes.first_conv_or_matmul_quantization:
        space["first"] = "float"
    return {key: value for key, value in space.items() if value}


LPOT = Importer(target="tune", recognizes=is_lpot, translate=translate)
