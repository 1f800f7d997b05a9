"""The metrics of LPOT files, and the steps between the outputs of a model and its metric."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from bitwright.core.errors import BitwrightError, WorkloadError
from bitwright.core.tensor_tree import shape_of
from bitwright.importers.key_table import Honoured, InCode, Marker, Named, Option, Section
from bitwright.importers.lpot.transforms import flags, listed
from bitwright.workload.data import call
from bitwright.workload.metrics import METRICS as OURS
from bitwright.workload.metrics import Evaluate

__all__ = ["METRICS", "Counter", "HigherIsBetter", "Metric", "Postprocess", "Weights", "make_evaluate"]

_DETECTION = InCode("the outputs depend on the detection model; pass eval_func")


class Counter(Protocol):
    """Collects outputs and targets, batch by batch."""

    def add(self, output: Any, target: Any) -> None:
        """Count a batch."""

    def value(self) -> float:
        """The metric."""


class Metric(Option):
    """A metric."""

    about: ClassVar[Marker] = Honoured("")
    lower: ClassVar[bool] = False
    """Whether lower is better."""
    texts: ClassVar[bool] = False
    """Whether it compares texts."""

    @property
    def key(self) -> str:
        """The name in results."""
        return self.name.lower()

    def counter(self) -> Counter:
        """A new counter."""
        raise NotImplementedError(self.name)


class topk(Metric):
    """Share of samples with the right class among the k best."""

    shorthand: ClassVar[str | None] = "k"
    k: Annotated[int, Field(ge=1, le=10**6), Honoured("k.")] = 1

    @property
    def key(self) -> str:
        """top1, top5, …"""
        return f"top{self.k}"

    def counter(self) -> Counter:
        """In percent."""
        return _ours("topk", k=self.k)


class _Error(Metric):
    lower: ClassVar[bool] = True
    compare_label: Annotated[
        bool, Honoured("false, which compares with the float model, stops with the code `cannot-run`.")
    ] = True

    def counter(self) -> Counter:
        """Over all numbers of the outputs."""
        return _ours(self.key)


class MSE(_Error):
    """Mean squared error."""


class RMSE(_Error):
    """Root of the mean squared error."""


class MAE(_Error):
    """Mean absolute error."""


class F1(Metric):
    """F1 score."""

    def counter(self) -> Counter:
        """Of class 1, in percent."""
        return _ours("f1")


class Accuracy(Metric):
    """Share of right classes, or of right labels if a sample has several."""

    def counter(self) -> Counter:
        """In percent."""
        return _Score(_accuracy)


class Loss(Metric):
    """The mean of the loss that the model returns."""

    lower: ClassVar[bool] = True

    def counter(self) -> Counter:
        """Of all outputs."""
        return _Score(lambda outputs, targets: float(torch.cat([one.reshape(-1).double() for one in outputs]).mean()))


class BLEU(Metric):
    """BLEU of translations: of texts, which `postprocess` in Python makes from outputs and labels."""

    texts: ClassVar[bool] = True

    def counter(self) -> Counter:
        """In percent."""
        return _Score(_bleu)


class SquadF1(Metric):
    """F1 of answers on SQuAD: of texts, which `postprocess` in Python makes from outputs and labels."""

    texts: ClassVar[bool] = True

    def counter(self) -> Counter:
        """In percent."""
        return _Score(_squad)


class mIOU(Metric):
    """Mean intersection over union."""

    num_classes: Annotated[int, Field(ge=1, le=10**6), Honoured("The number of classes.")] = 21

    def counter(self) -> Counter:
        """In percent."""
        return _Overlap(self.num_classes)


class GLUE(Metric):
    """The metric of a task of GLUE: F1, accuracy, or a correlation (cola, sts-b)."""

    task: Annotated[
        Literal["cola", "mrpc", "sst-2", "sts-b", "mnli", "qqp", "qnli", "rte", "wnli"], Honoured("The task.")
    ] = "mrpc"

    def counter(self) -> Counter:
        """In percent."""
        if self.task in ("mrpc", "qqp"):
            return _ours("f1")
        return _Score({"cola": _matthews, "sts-b": _spearman}.get(self.task, _accuracy))


class ROC(Metric):
    """Area under the ROC curve."""

    task: Annotated[Literal["dlrm"], Honoured("The task.")] = "dlrm"

    def counter(self) -> Counter:
        """In percent."""
        return _Score(_roc)


class _Detection(Metric):
    about: ClassVar[Marker] = _DETECTION
    anno_path: Annotated[str | None, Honoured("The annotations.")] = None


class mAP(_Detection):
    """Mean average precision."""

    iou_thrs: Annotated[float | str, Honoured("Thresholds: one number, or 0.5:0.05:0.95.")] = 0.5
    map_points: Annotated[Literal[0, 11, 101], Honoured("Points of the curve; 0: all.")] = 0


class COCOmAP(_Detection):
    """COCO's mean average precision."""

    map_key: Annotated[str, Honoured("The entry of COCO's result.")] = "DetectionBoxes_Precision/mAP"


class _Order(Section):
    num_detections: Annotated[int, Honoured("Position in the outputs.")] = -1
    boxes: Annotated[int, Honoured("Position in the outputs.")] = 0
    scores: Annotated[int, Honoured("Position in the outputs.")] = 1
    classes: Annotated[int, Honoured("Position in the outputs.")] = 2


class COCOmAPv2(COCOmAP):
    """COCO's mean average precision."""

    output_index_mapping: _Order = _Order()


class VOCmAP(_Detection):
    """Pascal VOC's mean average precision."""


def _leaves(kind: type[Option]) -> list[type[Option]]:
    below = [leaf for one in kind.__subclasses__() for leaf in _leaves(one)]
    return below if kind.__name__.startswith("_") or kind is Metric else [kind, *below]


METRICS: dict[str, type[Option]] = {kind.__name__: kind for kind in _leaves(Metric)}


class Weights(Option):
    """Weights of several metrics."""

    about: ClassVar[Marker] = InCode("the first metric decides; pass eval_func, which adds them up")
    shorthand: ClassVar[str | None] = "values"
    values: Annotated[
        tuple[Annotated[float, Field(ge=0, le=1e9)], ...], BeforeValidator(listed), Honoured("One for each metric.")
    ]


class HigherIsBetter(Option):
    """Directions of several metrics."""

    about: ClassVar[Marker] = InCode("the first metric decides; pass eval_func, which adds them up")
    shorthand: ClassVar[str | None] = "values"
    values: Annotated[tuple[bool, ...], BeforeValidator(flags), Honoured("One for each metric.")]


class _PostTransform(Option):
    about: ClassVar[Marker] = InCode("it depends on the files of TensorFlow's models; pass postprocess")


class LabelShift(_PostTransform):
    """Shift the class numbers."""

    about: ClassVar[Marker] = Honoured("Applied to the labels.")
    shorthand: ClassVar[str | None] = "label_shift"
    label_shift: Annotated[int, Honoured("Subtracted from the labels."), Field(ge=-(10**6), le=10**6)] = 0


class Collect(_PostTransform):
    """Collect outputs until there are so many."""

    length: Annotated[int, Honoured("The number."), Field(ge=1, le=10**9)]


class _Squad(_PostTransform):
    label_file: Annotated[str, Honoured("The labels.")]
    vocab_file: Annotated[str, Honoured("The vocabulary.")]
    do_lower_case: Annotated[bool, Honoured("Whether texts become lower case.")] = True
    max_seq_length: Annotated[int, Honoured("The length in tokens."), Field(ge=1, le=10**6)] = 384
    max_query_length: Annotated[int, Honoured("Tokens of a question."), Field(ge=1, le=10**6)] = 64
    max_answer_length: Annotated[int, Honoured("Tokens of an answer."), Field(ge=1, le=10**6)] = 30
    n_best_size: Annotated[int, Honoured("Answers to compare."), Field(ge=1, le=10**6)] = 20
    doc_stride: Annotated[int, Honoured("Tokens between parts."), Field(ge=1, le=10**6)] = 128


class SquadV1(_Squad):
    """Answers from the scores of tokens."""


class SquadV1ModelZoo(_Squad):
    """Answers from the scores of tokens, in the layout of Intel's model zoo."""


_POST: dict[str, type[Option]] = {kind.__name__: kind for kind in (LabelShift, Collect, SquadV1, SquadV1ModelZoo)}


class Postprocess(Section):
    """Steps after the model."""

    transform: Annotated[tuple[_PostTransform, ...], Named(_POST), Honoured("Steps from an output to a result.")] = ()

    @property
    def label_shift(self) -> int:
        """What to subtract from labels."""
        return sum(step.label_shift for step in self.transform if isinstance(step, LabelShift))


Batches = Callable[[], Iterable[tuple[Any, Any]]]


def make_evaluate(
    counters: dict[str, Callable[[], Counter]],
    batches: Batches,
    *,
    postprocess: Callable[[Any, Any], tuple[Any, Any]] | None = None,
) -> Evaluate:
    """A workload's `evaluate` that measures these metrics on batches (inputs, targets)."""

    def evaluate(predict: Callable[..., Any]) -> dict[str, float]:
        found = {name: counter() for name, counter in counters.items()}
        n = 0
        for inputs, target in batches():
            with torch.no_grad():
                output = call(predict, inputs)
            output = getattr(output, "logits", output)
            n += len(target)
            output, target = (output, target) if postprocess is None else postprocess(output, target)
            for name, counter in found.items():
                try:
                    counter.add(output, target)
                except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
                    if isinstance(error, BitwrightError):
                        raise
                    raise _wrong(name, "other outputs or targets", output, target) from error
        if not n:
            raise WorkloadError("the evaluation loader yields no samples", fix="check its data set", code="no-data")
        return {**{name: counter.value() for name, counter in found.items()}, "n": float(n)}

    return evaluate


def _ours(name: str, **options: Any) -> Counter:
    made: Counter = OURS[name][0](**options)
    return made


class _Score:
    """A function of all outputs and targets, as lists of batches."""

    def __init__(self, score: Callable[[list[Any], list[Any]], float]) -> None:
        self.score = score
        self.outputs: list[Any] = []
        self.targets: list[Any] = []

    def add(self, output: Any, target: Any) -> None:
        self.outputs.append(output.detach().cpu() if isinstance(output, Tensor) else output)
        self.targets.append(target)

    def value(self) -> float:
        return self.score(self.outputs, self.targets)


class _Overlap:
    """Mean intersection over union of segmented images."""

    def __init__(self, classes: int) -> None:
        self.counts = torch.zeros(classes, classes, dtype=torch.int64)

    def add(self, output: Any, target: Any) -> None:
        classes = len(self.counts)
        predicted = output.argmax(1) if output.ndim == target.ndim + 1 else output
        if predicted.shape != target.shape:
            raise _wrong("mIOU", "one class for each pixel", output, target)
        known = (target >= 0) & (target < classes)  # others, such as 255, are borders
        pairs = target[known].long() * classes + predicted[known].long().clamp(0, classes - 1)
        self.counts += torch.bincount(pairs, minlength=classes**2).view(classes, classes)

    def value(self) -> float:
        hits = self.counts.diagonal().double()
        union = self.counts.sum(0) + self.counts.sum(1) - hits
        present = union > 0
        return 100.0 * float((hits[present] / union[present]).mean()) if bool(present.any()) else 0.0


def _wrong(metric: str, wanted: str, output: Any, target: Any) -> WorkloadError:
    found = f"output {shape_of(output)}, target {shape_of(target)}"
    fix = "pass eval_func, or postprocess"
    return WorkloadError(f"{metric} needs {wanted}", where=metric, value=found, fix=fix, code="invalid-output")


def _classes(outputs: Sequence[Tensor], targets: Sequence[Tensor], metric: str) -> tuple[Tensor, Tensor]:
    """Predicted and right classes."""
    output, target = torch.cat(list(outputs)), torch.cat(list(targets))
    if output.ndim == target.ndim + 1 and output.shape[0] == target.shape[0]:
        output = output[:, 0].round() if output.shape[1] == 1 else output.argmax(1)
    elif output.is_floating_point():
        output = output.round()
    if output.shape != target.shape:
        raise _wrong(metric, "scores of classes, or one class for each label", outputs[0], targets[0])
    return output, target


def _accuracy(outputs: list[Any], targets: list[Any]) -> float:
    predicted, right = _classes(outputs, targets, "Accuracy")
    return 100.0 * float((predicted == right).double().mean())


def _matthews(outputs: list[Any], targets: list[Any]) -> float:
    predicted, right = _classes(outputs, targets, "GLUE")
    return 100.0 * float(_package("sklearn.metrics").matthews_corrcoef(right.numpy(), predicted.numpy()))


def _numbers(outputs: list[Any], targets: list[Any], metric: str) -> tuple[Any, Any]:
    output, target = torch.cat(outputs).double().squeeze(), torch.cat(targets).squeeze()
    if output.shape != target.shape or output.ndim != 1:
        raise _wrong(metric, "one number for each sample", outputs[0], targets[0])
    return output.numpy(), target.numpy()


def _spearman(outputs: list[Any], targets: list[Any]) -> float:
    from scipy.stats import spearmanr

    predicted, right = _numbers(outputs, targets, "GLUE")
    found = float(spearmanr(predicted, right).statistic)
    return 0.0 if np.isnan(found) else 100.0 * found


def _roc(outputs: list[Any], targets: list[Any]) -> float:
    two = outputs[0].ndim == 2 and outputs[0].shape[1] == 2
    scores, right = _numbers([one[:, 1] - one[:, 0] for one in outputs] if two else outputs, targets, "ROC")
    if len(set(right.tolist())) != 2:
        raise _wrong("ROC", "samples of two classes", outputs[0], targets[0])
    return 100.0 * float(_package("sklearn.metrics").roc_auc_score(right, scores))


def _texts(metric: str, batches: list[Any]) -> list[str]:
    texts = [text for batch in batches for text in ([batch] if isinstance(batch, str) else batch)]
    if not all(isinstance(text, str) for text in texts):
        raise _wrong(metric, "texts", batches[0], None)
    return texts


def _bleu(outputs: list[Any], targets: list[Any]) -> float:
    predicted, right = _texts("BLEU", outputs), _texts("BLEU", targets)
    bleu = _package("torchmetrics.functional.text").bleu_score
    return 100.0 * float(bleu(predicted, [[text] for text in right]))


def _squad(outputs: list[Any], targets: list[Any]) -> float:
    predicted, right = _texts("SquadF1", outputs), _texts("SquadF1", targets)
    preds = [{"prediction_text": text, "id": str(number)} for number, text in enumerate(predicted)]
    answers = [{"answers": {"answer_start": [0], "text": [text]}, "id": str(i)} for i, text in enumerate(right)]
    return float(_package("torchmetrics.functional.text").squad(preds, answers)["f1"])


def _package(name: str) -> Any:
    """A module of an optional package."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        what = f"this metric needs {name.partition('.')[0]}"
        raise WorkloadError(what, fix="pip install 'bitwright[metrics]'", code="missing-package") from error
