"""The metrics of LPOT files, and the steps between the outputs of a model and its metric."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from bitwright.importers.key_table import Honoured, Marker, Named, Option, Section
from bitwright.importers.lpot.transforms import flags, listed

__all__ = ["METRICS", "HigherIsBetter", "Metric", "Postprocess", "Weights"]


class Metric(Option):
    """A metric."""

    about: ClassVar[Marker] = Honoured("")


class topk(Metric):
    """Share of samples with the right class among the k best."""

    shorthand: ClassVar[str | None] = "k"
    k: Annotated[int, Field(ge=1, le=10**6), Honoured("k.")] = 1


class _Error(Metric):
    compare_label: Annotated[bool, Honoured("Compare with the labels, not with the float model.")] = True


class MSE(_Error):
    """Mean squared error."""


class RMSE(_Error):
    """Root of the mean squared error."""


class MAE(_Error):
    """Mean absolute error."""


class F1(Metric):
    """F1 score."""


class Accuracy(Metric):
    """Share of right classes."""


class Loss(Metric):
    """The mean of the loss that the model returns."""


class BLEU(Metric):
    """BLEU of translations."""


class SquadF1(Metric):
    """F1 of answers on SQuAD."""


class mIOU(Metric):
    """Mean intersection over union."""

    num_classes: Annotated[int, Field(ge=1, le=10**6), Honoured("The number of classes.")] = 21


class GLUE(Metric):
    """The metric of a task of GLUE."""

    task: Annotated[str, Honoured("The task.")] = "mrpc"


class ROC(Metric):
    """Area under the ROC curve."""

    task: Annotated[str, Honoured("The task.")] = "dlrm"


class _Detection(Metric):
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

    about: ClassVar[Marker] = Honoured("")
    shorthand: ClassVar[str | None] = "values"
    values: Annotated[
        tuple[Annotated[float, Field(ge=0, le=1e9)], ...], BeforeValidator(listed), Honoured("One for each metric.")
    ]


class HigherIsBetter(Option):
    """Directions of several metrics."""

    about: ClassVar[Marker] = Honoured("")
    shorthand: ClassVar[str | None] = "values"
    values: Annotated[tuple[bool, ...], BeforeValidator(flags), Honoured("One for each metric.")]


class _PostTransform(Option):
    about: ClassVar[Marker] = Honoured("Applied to outputs and labels.")


class LabelShift(_PostTransform):
    """Shift the class numbers."""

    shorthand: ClassVar[str | None] = "shift"
    shift: Annotated[int, Honoured("Added to the labels."), Field(ge=-(10**6), le=10**6)] = 0


class Collect(_PostTransform):
    """Collect outputs until there are so many."""

    length: Annotated[int, Honoured("The number."), Field(ge=1, le=10**9)]


class _Squad(_PostTransform):
    label_file: Annotated[str, Honoured("The labels.")]
    vocab_file: Annotated[str, Honoured("The vocabulary.")]
    do_lower_case: Annotated[bool, Honoured("Whether texts become lower case.")] = True
    max_seq_length: Annotated[int, Honoured("The length in tokens."), Field(ge=1, le=10**6)] = 384


class SquadV1(_Squad):
    """Answers from the scores of tokens."""


class SquadV1ModelZoo(_Squad):
    """Answers from the scores of tokens, in the layout of Intel's model zoo."""


_POST: dict[str, type[Option]] = {kind.__name__: kind for kind in (LabelShift, Collect, SquadV1, SquadV1ModelZoo)}


class Postprocess(Section):
    """Steps after the model."""

    transform: Annotated[tuple[_PostTransform, ...], Named(_POST), Honoured("Steps from an output to a result.")] = ()
