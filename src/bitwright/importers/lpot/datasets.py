"""The data sections of LPOT files: data sets by name, with transforms, in batches."""

from __future__ import annotations

import csv
import gzip
import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from bitwright.core.documents import read_bytes, read_npz, read_picture
from bitwright.core.errors import WorkloadError
from bitwright.importers.key_table import Honoured, InCode, Marker, Named, Noted, Option, Section
from bitwright.importers.lpot.transforms import TRANSFORMS, Floats, Size, Transform, listed, to_tensor
from bitwright.workload.datasets import Dataset as Pictures

__all__ = ["DATASETS", "Batches", "Dataset", "Loader", "Samples"]

_TFRECORD = InCode("TFRecords belong to TensorFlow; convert them to a folder of images, or pass a loader")
_DETECTION = InCode("the targets depend on the detection model; pass a loader")
_MOST_BYTES = 2**31


@dataclass(frozen=True)
class Samples:
    """Samples by index: (image or inputs, label)."""

    count: int
    get: Callable[[int], tuple[Any, Any]]
    padding: Mapping[str, int] = field(default_factory=dict)
    """The values that fill up shorter inputs of a batch."""


class Dataset(Option):
    """Where the samples are."""

    about: ClassVar[Marker] = Honoured("Read from the local folder or file.")
    paths: ClassVar[tuple[str, ...]] = ("root",)
    """The options that are relative to the file."""

    def beside(self, folder: Path) -> Self:
        """The data set with paths relative to a folder."""
        own = {name: str(folder / value) for name in self.paths if (value := getattr(self, name, None))}
        return self.model_copy(update=own)

    def samples(self, seed: int) -> Samples:
        """Open the data set."""
        raise NotImplementedError(self.name)


class _Rooted(Dataset):
    root: Annotated[str, Honoured("The folder or file.")]


class ImageFolder(_Rooted):
    """A folder with one subfolder of images per class."""

    def samples(self, seed: int) -> Samples:
        """Images with the number of their class."""
        files = Pictures(images=Path(self.root)).files()
        return Samples(len(files), lambda index: (read_picture(files[index][0]), files[index][1]))


class npz(_Rooted):
    """A file with the arrays `inputs` and `targets`. Bitwright added this name."""

    def samples(self, seed: int) -> Samples:
        """Rows of both arrays."""
        inputs, targets = read_npz(Path(self.root), ("inputs", "targets"))
        if len(inputs) != len(targets):
            what, fix = "inputs and targets have different lengths", "give one target for each input"
            found = f"{len(inputs)}, {len(targets)}"
            raise WorkloadError(what, where=self.root, value=found, fix=fix, code="invalid-data")
        pictures = inputs.dtype == np.uint8 and inputs.ndim == 4
        return Samples(len(inputs), lambda i: (to_tensor(inputs[i]) if pictures else inputs[i], targets[i]))


class Imagenet(_Rooted):
    """ImageNet's TFRecords."""

    about: ClassVar[Marker] = _TFRECORD


class ImageRecord(_Rooted):
    """ImageNet's TFRecords."""

    about: ClassVar[Marker] = _TFRECORD


class TFRecordDataset(_Rooted):
    """TFRecords."""

    about: ClassVar[Marker] = _TFRECORD


class VOCRecord(_Rooted):
    """Pascal VOC's TFRecords."""

    about: ClassVar[Marker] = _DETECTION


class COCORecord(_Rooted):
    """COCO's TFRecords."""

    about: ClassVar[Marker] = _DETECTION
    num_cores: Annotated[int, Noted("Only changes how many processes read the data.")] = 28


class _Coco(_Rooted):
    anno_dir: Annotated[str, Honoured("The annotations, relative to root.")] = "annotations/instances_val2017.json"
    num_cores: Annotated[int, Noted("Only changes how many processes read the data.")] = 28


class COCORaw(_Coco):
    """COCO as images with one annotation file."""

    about: ClassVar[Marker] = _DETECTION
    img_dir: Annotated[str, Honoured("The images, relative to root.")] = "val2017"


class COCONpy(_Coco):
    """COCO as arrays with one annotation file."""

    about: ClassVar[Marker] = _DETECTION
    npy_dir: Annotated[str, Honoured("The arrays, relative to root.")] = "val2017"


class _Vision(_Rooted):
    train: Annotated[bool, Honoured("The training part instead of the test part.")] = False
    download: Annotated[bool, Noted("Files are local; nothing is downloaded.")] = True

    def samples(self, seed: int) -> Samples:
        """Images, as Pillow reads them from files."""
        from PIL import Image

        pixels, labels = self.arrays(Path(self.root))
        if len(pixels) != len(labels) or not len(pixels):
            raise _damaged(self.root, f"{len(pixels)} images and {len(labels)} labels")
        return Samples(len(labels), lambda index: (Image.fromarray(pixels[index]), int(labels[index])))

    def arrays(self, root: Path) -> tuple[Any, Any]:
        """All pixels and labels."""
        raise NotImplementedError(self.name)


class CIFAR10(_Vision):
    """CIFAR-10 in its Python format."""

    def arrays(self, root: Path) -> tuple[Any, Any]:
        """The batches of cifar-10-batches-py."""
        names = [f"data_batch_{number}" for number in range(1, 6)] if self.train else ["test_batch"]
        return _cifar([root / "cifar-10-batches-py" / name for name in names], "labels")


class CIFAR100(_Vision):
    """CIFAR-100 in its Python format."""

    def arrays(self, root: Path) -> tuple[Any, Any]:
        """The file of cifar-100-python."""
        return _cifar([root / "cifar-100-python" / ("train" if self.train else "test")], "fine_labels")


class MNIST(_Vision):
    """MNIST in its IDX format."""

    def arrays(self, root: Path) -> tuple[Any, Any]:
        """The files of MNIST/raw."""
        return _idx(root / "MNIST" / "raw", "train" if self.train else "t10k")


class FashionMNIST(_Vision):
    """Fashion-MNIST in its IDX format."""

    def arrays(self, root: Path) -> tuple[Any, Any]:
        """The files of FashionMNIST/raw."""
        return _idx(root / "FashionMNIST" / "raw", "train" if self.train else "t10k")


class ImagenetRaw(Dataset):
    """A folder of images with a list of file names and labels."""

    data_path: Annotated[str, Honoured("The folder.")]
    image_list: Annotated[str | None, Honoured("Lines `name label`; by default val_map.txt in the folder.")] = None

    paths: ClassVar[tuple[str, ...]] = ("data_path", "image_list")

    def samples(self, seed: int) -> Samples:
        """The images of the list."""
        folder = Path(self.data_path)
        file = folder / "val_map.txt" if self.image_list is None else Path(self.image_list)
        fix = "write one line `name label` for each image"
        lines = read_bytes(file, what="the list of images", fix=fix, most=_MOST_BYTES).decode("utf-8", "replace")
        rows = [line.rsplit(maxsplit=1) for line in lines.splitlines() if line.strip()]
        if not rows or any(len(row) != 2 or not row[1].isdecimal() for row in rows):
            raise WorkloadError("the list of images has other lines", where=str(file), fix=fix, code="invalid-data")
        return Samples(len(rows), lambda index: (read_picture(folder / rows[index][0]), int(rows[index][1])))


def _shapes(value: Any) -> Any:
    """One shape, or the shapes of several inputs."""
    value = listed(value)
    return value if value and isinstance(value[0], list | tuple) else [value]


Shapes = Annotated[
    tuple[tuple[Annotated[int, Field(ge=1, le=10**9)], ...], ...], BeforeValidator(_shapes), Field(min_length=1)
]


class _Random(Dataset):
    about: ClassVar[Marker] = Honoured("Random numbers.")
    low: Annotated[Floats, Honoured("Lower limit, for all inputs or each of them; -128 if missing.")] = ()
    high: Annotated[Floats, Honoured("Upper limit, for all inputs or each of them; 127 if missing.")] = ()
    dtype: Annotated[
        tuple[Literal["float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "bool"], ...],
        BeforeValidator(listed),
        Honoured("Type, for all inputs or each of them."),
    ] = ()

    def values(self, shape: tuple[int, ...], position: int, random: np.random.Generator) -> Any:
        """Numbers for the input at this position."""
        low, high = (
            float(own[position if len(own) > 1 else 0]) if own else usual
            for own, usual in ((self.low, -128.0), (self.high, 127.0))
        )
        kind = (self.dtype[position] if len(self.dtype) > 1 else self.dtype[0]) if self.dtype else "float32"
        return random.uniform(low, high, shape).astype("float32" if kind == "bfloat16" else kind)

    @model_validator(mode="after")
    def _each(self) -> Self:
        """Options are given once, or for each input."""
        shapes = (getattr(self, name, None) for name in ("shape", "input_shape", "dense_shape"))
        count = len(next(shape for shape in shapes if shape))
        for name in ("low", "high", "dtype"):
            if len(getattr(self, name)) not in (0, 1, count):
                raise ValueError(f"{name} has one value, or one for each of {count} inputs")
        low, high = self.low or (-128.0,), self.high or (127.0,)
        if any(low[i % len(low)] > high[i % len(high)] for i in range(count)):
            raise ValueError("low is larger than high")
        return self


class dummy(_Random):
    """Random inputs of this shape; the first axis counts samples."""

    shape: Annotated[Shapes, Honoured("(samples, …), or one such shape for each input.")]
    label: Annotated[bool, Noted("Labels are 0 in any case.")] = False

    def samples(self, seed: int) -> Samples:
        """As many samples as the first axis has."""

        def get(index: int) -> tuple[Any, Any]:
            random = np.random.default_rng([seed, index])
            made = tuple(self.values(shape[1:], i, random) for i, shape in enumerate(self.shape))
            return made[0] if len(made) == 1 else made, 0

        return Samples(min(shape[0] for shape in self.shape), get)


class dummy_v2(_Random):
    """128 random inputs of this shape, which has no axis of samples."""

    input_shape: Annotated[Shapes, Honoured("The shape of one sample, or one shape for each input.")]
    label_shape: Annotated[Shapes, Honoured("The shape of one label.")] = ((1,),)

    def samples(self, seed: int) -> Samples:
        """Inputs and labels of these shapes."""
        return _random_samples(self, self.input_shape, self.label_shape, seed)


class sparse_dummy_v2(_Random):
    """128 random inputs with zeros."""

    dense_shape: Annotated[Shapes, Honoured("The shape of one sample, or one shape for each input.")]
    label_shape: Annotated[Shapes, Honoured("The shape of one label.")] = ((1,),)
    sparse_ratio: Annotated[Floats, Honoured("The share of zeros.")] = (0.5,)

    def samples(self, seed: int) -> Samples:
        """Dense inputs in which a share of the numbers is 0."""
        shares = self.sparse_ratio if len(self.sparse_ratio) > 1 else self.sparse_ratio * len(self.dense_shape)
        return _random_samples(self, self.dense_shape, self.label_shape, seed, shares)


class bert(Dataset):
    """Questions and answers, or sentences, as token numbers."""

    about: ClassVar[Marker] = InCode("LPOT takes it from code, too; pass a loader, or use GLUE with a local folder")
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
    model_type: Annotated[str, Noted("The tokenizer knows the inputs of its model.")] = "bert"
    dynamic_length: Annotated[bool, Honoured("Pad each batch to its longest text.")] = False
    evaluate: Annotated[bool, Honoured("The development part instead of the training part.")] = True

    paths: ClassVar[tuple[str, ...]] = ("data_dir", "model_name_or_path")

    def samples(self, seed: int) -> Samples:
        """Sentences as the keyword arguments of a Hugging Face model, without `labels`."""
        columns = _GLUE_TASKS.get(self.task.lower())
        if columns is None:
            fix = f"use one of {', '.join(_GLUE_TASKS)}"
            raise WorkloadError("unknown task of GLUE", where="task", value=self.task, fix=fix, code="unknown-name")
        tokenizer = _tokenizer(self.model_name_or_path, lower=self.do_lower_case)
        rows = columns.rows(Path(self.data_dir), evaluate=self.evaluate)
        length = "do_not_pad" if self.dynamic_length else "max_length"

        def get(index: int) -> tuple[Any, Any]:
            texts, label = rows[index]
            made = tokenizer(*texts, truncation=True, max_length=self.max_seq_length, padding=length)
            return {name: torch.tensor(value) for name, value in made.items()}, label

        return Samples(len(rows), get, {"input_ids": tokenizer.pad_token_id or 0})


class style_transfer(Dataset):
    """Pairs of a content image and a style image."""

    about: ClassVar[Marker] = InCode("there is no metric for pictures in another style; pass a loader and eval_func")
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

    about: ClassVar[Marker] = InCode("only detection data has several labels")
    size: Annotated[int, InCode("only detection data has several labels"), Field(ge=1, le=10**6)]


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

    @property
    def in_code(self) -> str | None:
        """The part of this section that needs a loader in Python, or None."""
        for option in (*self.dataset, *self.transform, *self.filter):
            if isinstance(option.about, InCode):
                return option.name
        return None

    def beside(self, folder: Path) -> Loader:
        """The loader with paths relative to a folder."""
        return self.model_copy(update={"dataset": tuple(dataset.beside(folder) for dataset in self.dataset)})

    def open(self, seed: int) -> Batches:
        """Find the samples. Files are read later, batch by batch."""
        (dataset,) = self.dataset
        return Batches(self, dataset.samples(seed), seed)


@dataclass(frozen=True)
class Batches:
    """The batches of a loader."""

    loader: Loader
    samples: Samples
    seed: int

    @property
    def size(self) -> int:
        """Samples per batch."""
        return self.loader.batch_size or 1

    def inputs(self) -> Iterator[Any]:
        """Batches of inputs."""
        return (inputs for inputs, _ in self.epoch())

    def epoch(self, number: int = 0, batches: int | None = None) -> Iterator[tuple[Any, Tensor]]:
        """Batches (inputs, targets). Each epoch has its own order and random transforms."""
        count = self.samples.count
        order = np.arange(count)
        if self.loader.shuffle:
            np.random.default_rng([self.seed, number]).shuffle(order)
        if self.loader.last_batch == "discard":
            order = order[: count - count % self.size]
        for start in range(0, len(order), self.size)[:batches]:
            found = [self._sample(int(index), number) for index in order[start : start + self.size]]
            yield (
                _joined([x for x, _ in found], self.samples.padding),
                torch.as_tensor(np.array([target for _, target in found])),
            )

    def _sample(self, index: int, epoch: int) -> tuple[Any, Any]:
        inputs, target = self.samples.get(index)
        random = np.random.default_rng([self.seed, index, epoch])
        for step in self.loader.transform:
            inputs = step.apply(inputs, random)
        return to_tensor(inputs) if hasattr(inputs, "convert") else inputs, target


def _joined(parts: list[Any], padding: Mapping[str, int]) -> Any:
    """A batch of samples, which are tensors, arrays, tuples or dicts of them."""
    if isinstance(parts[0], dict):
        return {
            name: torch.nn.utils.rnn.pad_sequence(
                [part[name] for part in parts], batch_first=True, padding_value=padding.get(name, 0)
            )
            for name in parts[0]
        }
    if isinstance(parts[0], tuple):
        return tuple(_joined(list(same), padding) for same in zip(*parts, strict=True))
    tensors = [part if isinstance(part, Tensor) else torch.from_numpy(np.ascontiguousarray(part)) for part in parts]
    sizes = {tuple(tensor.shape) for tensor in tensors}
    if len(sizes) > 1:
        shown = "; ".join(str(size) for size in sorted(sizes)[:3])
        what, fix = "the samples of a batch have different sizes", "add Resize and CenterCrop, or batch_size: 1"
        raise WorkloadError(what, where="transform", value=shown, fix=fix, code="invalid-data")
    batch = torch.stack(tensors)
    return batch.float() if batch.dtype == torch.float64 else batch


_RANDOM_SAMPLES = 128


def _random_samples(kind: _Random, shapes: Any, label_shapes: Any, seed: int, zeros: tuple[float, ...] = ()) -> Samples:
    def get(index: int) -> tuple[Any, Any]:
        random = np.random.default_rng([seed, index])
        made = []
        for position, shape in enumerate(shapes):
            values = kind.values(shape, position, random)
            if zeros:
                values[random.random(shape) < zeros[position % len(zeros)]] = 0
            made.append(values)
        labels = random.integers(0, 2, label_shapes[0])
        return made[0] if len(made) == 1 else tuple(made), labels[0] if labels.shape == (1,) else labels

    return Samples(_RANDOM_SAMPLES, get)


# -- file formats ------------------------------------------------------------------------------------------------


def _damaged(where: str, what: str) -> WorkloadError:
    fix = "download it again; LPOT's data sets have the layout of torchvision's"
    return WorkloadError(f"can't read the data set: {what}", where=where, fix=fix, code="damaged-file")


class _ArrayUnpickler(pickle.Unpickler):
    """Only creates what the files of CIFAR contain: numbers, texts, lists, dicts and arrays."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {
            ("numpy.core.multiarray", "_reconstruct"): np.ndarray.__reduce__(np.zeros(0))[0],
            ("numpy._core.multiarray", "_reconstruct"): np.ndarray.__reduce__(np.zeros(0))[0],
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("_codecs", "encode"): lambda text, coding="latin1": text.encode("latin1"),
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"it calls {module}.{name}, which is not data")
        return allowed[module, name]


def _cifar(files: list[Path], labels: str) -> tuple[Any, Any]:
    pixels, found = [], []
    for file in files:
        raw = read_bytes(file, what="the data set", fix="give the folder that contains it", most=_MOST_BYTES)
        try:
            content = _ArrayUnpickler(io.BytesIO(raw), encoding="bytes").load()
            pixels.append(np.asarray(content[b"data"], np.uint8).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
            found.append(np.asarray(content[labels.encode()], np.int64))
        except Exception as error:  # damaged pickles raise many kinds of errors
            raise _damaged(str(file), f"{type(error).__name__}: {error}") from error
    return np.concatenate(pixels), np.concatenate(found)


def _idx(folder: Path, part: str) -> tuple[Any, Any]:
    """Images and labels in the IDX format, compressed or not."""
    found = []
    for kind, axes in (("images-idx3", 3), ("labels-idx1", 1)):
        file = folder / f"{part}-{kind}-ubyte"
        file = file if file.exists() else file.with_name(f"{file.name}.gz")
        raw = read_bytes(file, what="the data set", fix="give the folder that contains it", most=_MOST_BYTES)
        try:
            raw = gzip.decompress(raw) if file.suffix == ".gz" else raw
            shape = np.frombuffer(raw, ">u4", axes, 4)
            found.append(np.frombuffer(raw, np.uint8, -1, 4 + 4 * axes).reshape(shape))
            if raw[:4] != bytes([0, 0, 8, axes]):
                raise ValueError("it has another header")
        except Exception as error:
            raise _damaged(str(file), str(error)) from error
    return found[0], found[1]


@dataclass(frozen=True)
class _GlueTask:
    """The columns of a task's table."""

    texts: tuple[int, ...]
    label: int
    names: tuple[str, ...] = ()
    """Labels in the order of their numbers; empty: the column has numbers."""
    number: bool = False
    header: bool = True
    part: str = "dev"

    def rows(self, folder: Path, *, evaluate: bool) -> list[tuple[list[str], int | float]]:
        """The texts and labels."""
        file = folder / f"{self.part if evaluate else 'train'}.tsv"
        raw = read_bytes(file, what="the table", fix="give the folder of the task", most=_MOST_BYTES)
        lines = list(
            csv.reader(io.StringIO(raw.decode("utf-8-sig", "replace")), delimiter="\t", quoting=csv.QUOTE_NONE)
        )
        found: list[tuple[list[str], int | float]] = []
        for number, line in enumerate(lines[self.header :], start=1 + self.header):
            try:
                text = line[self.label]
                label = self.names.index(text) if self.names else float(text) if self.number else int(text)
                found.append(([line[column] for column in self.texts], label))
            except (IndexError, ValueError):
                raise _damaged(str(file), f"line {number} has other columns") from None
        if not found:
            raise WorkloadError("the table has no rows", where=str(file), fix="give the task's data", code="no-data")
        return found


_ENTAILMENT = ("entailment", "not_entailment")
_GLUE_TASKS = {
    "cola": _GlueTask((3,), 1, header=False),
    "sst-2": _GlueTask((0,), 1),
    "mrpc": _GlueTask((3, 4), 0),
    "sts-b": _GlueTask((7, 8), -1, number=True),
    "qqp": _GlueTask((3, 4), 5),
    "mnli": _GlueTask((8, 9), -1, ("contradiction", "entailment", "neutral"), part="dev_matched"),
    "qnli": _GlueTask((1, 2), -1, _ENTAILMENT),
    "rte": _GlueTask((1, 2), -1, _ENTAILMENT),
    "wnli": _GlueTask((1, 2), -1),
}


def _tokenizer(folder: str, *, lower: bool) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        fix = "pip install 'bitwright[huggingface]'"
        raise WorkloadError("transformers is required for GLUE", fix=fix, code="missing-package") from error
    fix = "give a local folder that save_pretrained wrote; nothing is downloaded"
    if not Path(folder).is_dir():
        what = "the tokenizer's folder doesn't exist"
        raise WorkloadError(what, where="model_name_or_path", value=folder, fix=fix, code="no-data")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, do_lower_case=lower)
    except Exception as error:  # transformers raises many kinds of errors
        what = f"can't read the tokenizer: {str(error).splitlines()[0][:200]}"
        raise WorkloadError(what, where="model_name_or_path", value=folder, fix=fix, code="damaged-file") from error
