"""The data sections of LPOT files: data sets by name, with transforms, in batches."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from bitwright.importers.key_table import Honoured, Marker, Named, Noted, Option, Section
from bitwright.importers.lpot.transforms import TRANSFORMS, Floats, Size, Transform, listed

__all__ = ["DATASETS", "Dataset", "Loader"]


class Dataset(Option):
    """Where the samples are."""

    about: ClassVar[Marker] = Honoured("Read from the local folder or file.")


class _Rooted(Dataset):
    root: Annotated[str, Honoured("The folder or file.")]


class ImageFolder(_Rooted):
    """A folder with one subfolder of images per class."""


class npz(_Rooted):
    """A file with the arrays `inputs` and `targets`. Bitwright added this name."""


class Imagenet(_Rooted):
    """ImageNet's TFRecords."""


class ImageRecord(_Rooted):
    """ImageNet's TFRecords."""


class TFRecordDataset(_Rooted):
    """TFRecords."""


class VOCRecord(_Rooted):
    """Pascal VOC's TFRecords."""


class COCORecord(_Rooted):
    """COCO's TFRecords."""

    num_cores: Annotated[int, Noted("Only changes how many processes read the data.")] = 28


class _Coco(_Rooted):
    anno_dir: Annotated[str, Honoured("The annotations, relative to root.")] = "annotations/instances_val2017.json"
    num_cores: Annotated[int, Noted("Only changes how many processes read the data.")] = 28


class COCORaw(_Coco):
    """COCO as images with one annotation file."""

    img_dir: Annotated[str, Honoured("The images, relative to root.")] = "val2017"


class COCONpy(_Coco):
    """COCO as arrays with one annotation file."""

    npy_dir: Annotated[str, Honoured("The arrays, relative to root.")] = "val2017"


class _Vision(_Rooted):
    train: Annotated[bool, Honoured("The training part instead of the test part.")] = False
    download: Annotated[bool, Noted("Files are local; nothing is downloaded.")] = True


class CIFAR10(_Vision):
    """CIFAR-10 in its Python format."""


class CIFAR100(_Vision):
    """CIFAR-100 in its Python format."""


class MNIST(_Vision):
    """MNIST in its IDX format."""


class FashionMNIST(_Vision):
    """Fashion-MNIST in its IDX format."""


class ImagenetRaw(Dataset):
    """A folder of images with a list of file names and labels."""

    data_path: Annotated[str, Honoured("The folder.")]
    image_list: Annotated[str | None, Honoured("Lines `name label`.")] = None


def _shapes(value: Any) -> Any:
    """One shape, or the shapes of several inputs."""
    value = listed(value)
    return value if value and isinstance(value[0], list | tuple) else [value]


Shapes = Annotated[
    tuple[tuple[Annotated[int, Field(ge=1, le=10**9)], ...], ...], BeforeValidator(_shapes), Field(min_length=1)
]


class _Random(Dataset):
    about: ClassVar[Marker] = Honoured("Random numbers.")
    low: Annotated[Floats, Honoured("Lower limit, for all inputs or each of them.")] = ()
    high: Annotated[Floats, Honoured("Upper limit, for all inputs or each of them.")] = ()
    dtype: Annotated[tuple[str, ...], BeforeValidator(listed), Honoured("Type, for all inputs or each of them.")] = ()


class dummy(_Random):
    """Random inputs of this shape; the first axis counts samples."""

    shape: Annotated[Shapes, Honoured("(samples, …), or one such shape for each input.")]
    label: Annotated[bool, Honoured("Whether there are labels (0).")] = False


class dummy_v2(_Random):
    """Random inputs of this shape without the axis of samples."""

    input_shape: Annotated[Shapes, Honoured("The shape of one sample, or one shape for each input.")]
    label_shape: Annotated[Shapes, Honoured("The shape of one label.")] = ((1,),)


class sparse_dummy_v2(_Random):
    """Random inputs with zeros."""

    dense_shape: Annotated[Shapes, Honoured("The shape of one sample, or one shape for each input.")]
    label_shape: Annotated[Shapes, Honoured("The shape of one label.")] = ((1,),)
    sparse_ratio: Annotated[Floats, Honoured("The share of zeros.")] = (0.5,)


class bert(Dataset):
    """Questions and answers, or sentences, as token numbers."""

    root: Annotated[str, Honoured("The file of features.")]
    label_file: Annotated[str, Honoured("The file of labels.")]
    task: Annotated[Literal["classifier", "squad"], Honoured("The task.")] = "classifier"
    model_type: Annotated[Literal["bert", "xlnet", "xlm"], Honoured("The inputs of this kind of model.")] = "bert"


class mzbert(bert):
    """As `bert`, in the layout of Intel's model zoo."""


class GLUE(Dataset):
    """A task of GLUE, as token numbers."""

    data_dir: Annotated[str, Honoured("The folder with train.tsv and dev.tsv.")]
    model_name_or_path: Annotated[str, Honoured("The tokenizer: a local folder.")]
    max_seq_length: Annotated[int, Honoured("The length in tokens."), Field(ge=1, le=10**6)] = 128
    do_lower_case: Annotated[bool, Honoured("Whether texts become lower case.")] = True
    task: Annotated[str, Honoured("The task of GLUE.")] = "mrpc"
    model_type: Annotated[str, Honoured("The inputs of this kind of model.")] = "bert"
    dynamic_length: Annotated[bool, Honoured("Pad each batch to its longest text.")] = False
    evaluate: Annotated[bool, Honoured("The development part instead of the training part.")] = True


class style_transfer(Dataset):
    """Pairs of a content image and a style image."""

    content_folder: Annotated[str, Honoured("The content images.")]
    style_folder: Annotated[str, Honoured("The style images.")]
    crop_ratio: Annotated[float, Honoured("Share of the content image that is used."), Field(gt=0, le=1)] = 0.1
    resize_shape: Annotated[Size, Honoured("Height and width.")] = (256, 256)
    image_format: Annotated[str, Honoured("The suffix of the files.")] = "jpg"


def _leaves(kind: type[Dataset]) -> list[type[Dataset]]:
    below = [leaf for one in kind.__subclasses__() for leaf in _leaves(one)]
    return below if kind.__name__.startswith("_") or kind is Dataset else [kind, *below]


DATASETS: dict[str, type[Option]] = {kind.__name__: kind for kind in _leaves(Dataset)}


class _LabelBalance(Option):
    """Keep the images with this number of objects."""

    about: ClassVar[Marker] = Honoured("Keeps the samples with this number of labels.")
    size: Annotated[int, Honoured("The number of labels."), Field(ge=1, le=10**6)]


class Loader(Section):
    """A data set with its transforms, in batches."""

    batch_size: Annotated[int | None, Honoured("Samples per batch.")] = Field(default=None, ge=1, le=10**6)
    dataset: Annotated[tuple[Dataset, ...], Named(DATASETS, most=1), Honoured("The data set.")] = ()
    transform: Annotated[tuple[Transform, ...], Named(TRANSFORMS), Honoured("Steps from a sample to an input.")] = ()
    filter: Annotated[tuple[Option, ...], Named({"LabelBalance": _LabelBalance}), Honoured("Samples to keep.")] = ()
    last_batch: Annotated[Literal["rollover", "discard"], Honoured("Whether a smaller last batch is used.")] = (
        "rollover"
    )
    shuffle: Annotated[bool, Honoured("Shuffle with the seed `tuning.random_seed`.")] = False
    distributed: Annotated[bool, Noted("One process reads all data.")] = False
