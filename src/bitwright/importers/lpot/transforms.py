"""The transforms of LPOT files by name, and the values that several sections of these files have."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor, nn

from bitwright.core.errors import WorkloadError
from bitwright.core.tensor_tree import shape_of
from bitwright.importers.key_table import Honoured, InCode, Marker, Noted, Option
from bitwright.workload.datasets import color_jitter, random_part

__all__ = ["TRANSFORMS", "Floats", "Size", "Transform", "flags", "listed", "to_tensor"]

_SIDE = Field(ge=1, le=100_000)
Side = Annotated[int, _SIDE]
_TF = "Decodes a TFRecord. Images are decoded while they are read, so nothing is left to do."


def listed(value: Any) -> Any:
    """A list from a list, one value, or a text with values separated by commas or spaces."""
    if isinstance(value, str):
        return [part.strip() for part in (value.split(",") if "," in value else value.split())]
    return value if isinstance(value, list | tuple) else [value]


def flags(value: Any) -> Any:
    """A list of booleans; LPOT also reads the words True and False."""
    return [part == "True" if part in ("True", "False") else part for part in listed(value)]


def _sides(value: Any) -> Any:
    """A size as (height, width). One number means both sides."""
    return [value, value] if isinstance(value, int) else listed(value)


Size = Annotated[tuple[Side, Side], BeforeValidator(_sides)]
Floats = Annotated[tuple[Annotated[float, Field(ge=-1e9, le=1e9)], ...], BeforeValidator(listed)]
Interpolation = Literal["nearest", "bilinear", "bicubic"]


class Transform(Option):
    """One step from a sample to the input of the model.

    An image is a Pillow image, an array with channels last, or a tensor with channels first.
    """

    about: ClassVar[Marker] = Honoured("Applied in the order of the file.")

    def apply(self, image: Any, random: np.random.Generator) -> Any:
        """The image after this step. `random` is seeded for each sample."""
        return image


class Resize(Transform):
    """Resize to a height and width, or the shorter side to one number."""

    size: Annotated[
        tuple[Side, ...],
        BeforeValidator(listed),
        Field(min_length=1, max_length=2),
        Honoured("One number: the shorter side. Two: height and width."),
    ]
    interpolation: Annotated[Interpolation, Honoured("The filter.")] = "bilinear"

    def apply(self, image: Any, random: np.random.Generator) -> Any:
        size = self.size if len(self.size) == 2 else _shorter_side(_size(image), self.size[0])
        return _resized(image, size, self.interpolation)


class CenterCrop(Transform):
    """Cut out the center."""

    size: Annotated[Size, Honoured("Height and width of the crop.")]

    def apply(self, image: Any, random: np.random.Generator) -> Any:
        return _center(image, self.size)


class RandomResizedCrop(Transform):
    """Cut out a random part and resize it."""

    about: ClassVar[Marker] = Honoured("Random, with the seed `tuning.random_seed`.")
    size: Annotated[Size, Honoured("Height and width of the result.")]
    scale: Annotated[Floats, Honoured("Smallest and largest share of the area.")] = (0.08, 1.0)
    ratio: Annotated[Floats, Honoured("Smallest and largest aspect ratio.")] = (3 / 4, 4 / 3)
    interpolation: Annotated[Interpolation, Honoured("The filter.")] = "bilinear"

    @model_validator(mode="after")
    def _ranges(self) -> RandomResizedCrop:
        for name in ("scale", "ratio"):
            low, *rest = value = getattr(self, name)
            if len(value) != 2 or not 0 < low <= rest[0]:
                raise ValueError(f"{name} has two positive numbers, the smaller one first")
        return self

    def apply(self, image: Any, random: np.random.Generator) -> Any:
        height, width = _size(image)
        left, top, right, bottom = random_part((width, height), random, areas=self.scale, ratios=self.ratio)
        return _resized(_crop(image, top, left, bottom - top, right - left), self.size, self.interpolation)


class RandomCrop(Transform):
    """Cut out a random part."""

    about: ClassVar[Marker] = Honoured("Random, with the seed `tuning.random_seed`.")
    size: Annotated[Size, Honoured("Height and width of the crop.")]

    def apply(self, image: Any, random: np.random.Generator) -> Any:
        (height, width), (down, across) = _size(image), self.size
        top, left = (int(random.integers(max(0, have - want) + 1)) for have, want in ((height, down), (width, across)))
        return _crop(image, top, left, down, across)


class RandomHorizontalFlip(Transform):
    """Mirror every second image."""

    about: ClassVar[Marker] = Honoured("Random, with the seed `tuning.random_seed`.")

    def apply(self, image: Any, random: np.random.Generator) -> Any:
        return _flipped(image, across=True) if random.random() < 0.5 else image


class RandomVerticalFlip(Transform):
    """Turn every second image upside down."""

    about: ClassVar[Marker] = Honoured("Random, with the seed `tuning.random_seed`.")

    def apply(self, image: Any, random: np.random.Generator) -> Any:
        return _flipped(image, across=False) if random.random() < 0.5 else image


class Pad(Transform):
    """Add margins."""

    padding: Annotated[
        tuple[Annotated[int, Field(ge=0, le=10_000)], ...],
        BeforeValidator(listed),
        Field(min_length=1, max_length=4),
        Honoured("One margin; left and right, top and bottom; or left, top, right, bottom."),
    ]
    fill: Annotated[int, Field(ge=0, le=255), Honoured("The value of the margins (constant).")] = 0
    padding_mode: Annotated[
        Literal["constant", "edge", "reflect", "symmetric"], Honoured("What the margins contain.")
    ] = "constant"

    @model_validator(mode="after")
    def _sides(self) -> Pad:
        if len(self.padding) == 3:
            raise ValueError("padding has 1, 2 or 4 numbers")
        return self

    def apply(self, image: Any, random: np.random.Generator) -> Any:
        left, top, right, bottom = self.padding * (4 // len(self.padding))
        found = _array(image)
        margins = ((top, bottom), (left, right), (0, 0))[: found.ndim]
        # torchvision's modes are numpy's
        options = {"constant_values": self.fill} if self.padding_mode == "constant" else {}
        padded = np.pad(found, margins, self.padding_mode, **options)  # type: ignore[call-overload]
        if isinstance(image, Tensor):
            return torch.from_numpy(np.ascontiguousarray(padded.transpose(2, 0, 1) if padded.ndim == 3 else padded))
        return _picture(padded) if _is_picture(image) else padded


_Strength = Annotated[float, Field(ge=0, le=100)]


class ColorJitter(Transform):
    """Change the colors at random."""

    about: ClassVar[Marker] = Honoured("Random, with the seed `tuning.random_seed`.")
    brightness: Annotated[_Strength, Honoured("The largest change of the brightness.")] = 0.0
    contrast: Annotated[_Strength, Honoured("The largest change of the contrast.")] = 0.0
    saturation: Annotated[_Strength, Honoured("The largest change of the saturation.")] = 0.0
    hue: Annotated[float, Field(ge=0, le=0.5), Honoured("The largest shift of the hue.")] = 0.0

    def apply(self, image: Any, random: np.random.Generator) -> Any:
        strengths = (self.brightness, self.contrast, self.saturation, self.hue)
        return color_jitter(_picture(image).convert("RGB"), random, strengths) if any(strengths) else image


class ToTensor(Transform):
    """Pixels to numbers from 0 to 1, channels first."""

    def apply(self, image: Any, random: np.random.Generator) -> Any:
        return to_tensor(image)


class ToPILImage(Transform):
    """Numbers to an image."""

    def apply(self, image: Any, random: np.random.Generator) -> Any:
        return _picture(image)


class ToArray(Transform):
    """An image to numbers from 0 to 255, channels last."""

    def apply(self, image: Any, random: np.random.Generator) -> Any:
        return _array(image)


class ToNDArray(Transform):
    """An image to numbers from 0 to 255, channels last."""

    def apply(self, image: Any, random: np.random.Generator) -> Any:
        return _array(image)


class Rescale(Transform):
    """Divide by 255."""

    def apply(self, image: Any, random: np.random.Generator) -> Any:
        return image / 255 if isinstance(image, Tensor) else _array(image).astype(np.float32) / 255


class Normalize(Transform):
    """(x − mean) / std for each channel."""

    mean: Annotated[Floats, Honoured("Mean of each channel.")] = (0.0,)
    std: Annotated[Floats, Honoured("Standard deviation of each channel.")] = (1.0,)
    rescale: Annotated[Floats, Honoured("First and second number of x·a + b, before the mean.")] = ()

    @model_validator(mode="after")
    def _matching(self) -> Normalize:
        if len(self.mean) != len(self.std):
            raise ValueError("mean and std have different lengths")
        if any(value <= 0 for value in self.std):
            raise ValueError("std must be positive")
        return self

    def apply(self, image: Any, random: np.random.Generator) -> Any:
        image = to_tensor(image) if _is_picture(image) else image
        channels = image.shape[0 if isinstance(image, Tensor) else -1] if image.ndim else 0
        if len(self.mean) not in (1, channels):
            what = f"mean and std have {len(self.mean)} values, but the samples have {channels} channels"
            fix = "give one value for each channel"
            raise WorkloadError(what, where="Normalize", value=self.mean, fix=fix, code="invalid-data")
        if self.rescale:
            image = image * self.rescale[0] + self.rescale[1]
        if isinstance(image, Tensor):
            shape = (-1, *(1,) * (image.ndim - 1))
            return (image.float() - torch.tensor(self.mean).view(shape)) / torch.tensor(self.std).view(shape)
        return (image.astype(np.float32) - _row(self.mean)) / _row(self.std)


class Cast(Transform):
    """Convert the type of the numbers."""

    dtype: Annotated[
        Literal["float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64"], Honoured("The type.")
    ] = "float32"

    def apply(self, image: Any, random: np.random.Generator) -> Any:
        if isinstance(image, Tensor):
            return image.to(getattr(torch, self.dtype))
        if self.dtype == "bfloat16":
            return torch.from_numpy(_array(image)).bfloat16()
        return _array(image).astype(self.dtype)


class Transpose(Transform):
    """Permute the axes."""

    perm: Annotated[tuple[Annotated[int, Field(ge=0, le=8)], ...], Honoured("The order of the axes.")]

    def apply(self, image: Any, random: np.random.Generator) -> Any:
        found = image if isinstance(image, Tensor) else _array(image)
        if sorted(self.perm) != list(range(found.ndim)):
            raise _misfit("Transpose", "perm doesn't permute the axes of the samples", found)
        return found.permute(self.perm) if isinstance(found, Tensor) else found.transpose(self.perm)


class Reshape(Transform):
    """Change the shape."""

    shape: Annotated[tuple[Annotated[int, Field(ge=-1, le=10**9)], ...], Honoured("The shape.")]

    def apply(self, image: Any, random: np.random.Generator) -> Any:
        found = image if isinstance(image, Tensor) else _array(image)
        try:
            return found.reshape(self.shape)
        except (RuntimeError, ValueError):
            raise _misfit("Reshape", f"the samples can't get the shape {self.shape}", found) from None


class CropToBoundingBox(Transform):
    """Cut out a rectangle."""

    offset_height: Annotated[int, Honoured("Top."), Field(ge=0, le=100_000)]
    offset_width: Annotated[int, Honoured("Left."), Field(ge=0, le=100_000)]
    target_height: Annotated[Side, Honoured("Height.")]
    target_width: Annotated[Side, Honoured("Width.")]

    def apply(self, image: Any, random: np.random.Generator) -> Any:
        return _crop(image, self.offset_height, self.offset_width, self.target_height, self.target_width)


class CropResize(Transform):
    """Cut out a rectangle and resize it."""

    x: Annotated[int, Honoured("Left."), Field(ge=0, le=100_000)]
    y: Annotated[int, Honoured("Top."), Field(ge=0, le=100_000)]
    width: Annotated[Side, Honoured("Width of the rectangle.")]
    height: Annotated[Side, Honoured("Height of the rectangle.")]
    size: Annotated[Size, Honoured("Height and width of the result.")]
    interpolation: Annotated[Interpolation, Honoured("The filter.")] = "bilinear"

    def apply(self, image: Any, random: np.random.Generator) -> Any:
        return _resized(_crop(image, self.y, self.x, self.height, self.width), self.size, self.interpolation)


class PaddedCenterCrop(Transform):
    """Cut out a center that leaves a margin, in proportion to the image."""

    size: Annotated[Size, Honoured("Height and width of the crop.")]
    crop_padding: Annotated[int, Honoured("The margin."), Field(ge=0, le=10_000)] = 0

    def apply(self, image: Any, random: np.random.Generator) -> Any:
        shorter, wanted = min(_size(image)), self.size[0]
        side = max(1, int(wanted / (wanted + self.crop_padding) * shorter))
        return _center(image, (side, side))


class ResizeWithRatio(Transform):
    """Resize so that the sides are within limits, and keep the aspect ratio."""

    min_dim: Annotated[Side, Honoured("Limit of the shorter side.")] = 800
    max_dim: Annotated[Side, Honoured("Limit of the longer side.")] = 1365
    padding: Annotated[bool, Honoured("Pad to a square.")] = False
    constant_value: Annotated[int, Honoured("The value of the padding."), Field(ge=0, le=255)] = 0

    def apply(self, image: Any, random: np.random.Generator) -> Any:
        height, width = _size(image)
        ratio = min(self.min_dim / min(height, width), self.max_dim / max(height, width))
        size = (max(1, round(height * ratio)), max(1, round(width * ratio)))
        image = _resized(image, size, "bilinear")
        if not self.padding:
            return image
        found = _array(image)
        side = max(self.max_dim, *size)
        margins = ((0, side - size[0]), (0, side - size[1]), (0, 0))
        return np.pad(found, margins, constant_values=self.constant_value)


class ResizeWithAspectRatio(Transform):
    """Resize and cut out the center, and keep the aspect ratio."""

    height: Annotated[Side, Honoured("Height of the result.")]
    width: Annotated[Side, Honoured("Width of the result.")]

    def apply(self, image: Any, random: np.random.Generator) -> Any:
        height, width = _size(image)
        ratio = max(self.height / height, self.width / width) / 0.875
        size = (max(1, round(height * ratio)), max(1, round(width * ratio)))
        return _center(_resized(image, size, "bilinear"), (self.height, self.width))


class BilinearImagenet(Transform):
    """Cut out a central share, resize, subtract and scale."""

    height: Annotated[Side, Honoured("Height of the result.")]
    width: Annotated[Side, Honoured("Width of the result.")]
    central_fraction: Annotated[float, Honoured("Share of the image."), Field(gt=0, le=1)] = 0.875
    mean_value: Annotated[Floats, Honoured("Subtracted from the pixels.")] = (0.0, 0.0, 0.0)
    scale: Annotated[float, Honoured("Multiplied with the difference."), Field(gt=0, le=1e6)] = 1.0

    def apply(self, image: Any, random: np.random.Generator) -> Any:
        height, width = _size(image)
        part = (max(1, round(height * self.central_fraction)), max(1, round(width * self.central_fraction)))
        found = _array(_resized(_center(image, part), (self.height, self.width), "bilinear")).astype(np.float32)
        return (found / 255 - _row(self.mean_value)) * self.scale


class ResizeCropImagenet(Transform):
    """Resize the shorter side, cut out a part, subtract and scale."""

    height: Annotated[Side, Honoured("Height of the crop.")]
    width: Annotated[Side, Honoured("Width of the crop.")]
    random_crop: Annotated[bool, Honoured("A random part instead of the center.")] = False
    slice_crop: Annotated[bool, Noted("Selects another implementation of the same crop.")] = False
    resize_side: Annotated[Side, Honoured("Length of the shorter side.")] = 256
    resize_method: Annotated[Literal["bilinear", "nearest", "bicubic"], Honoured("The filter.")] = "bilinear"
    random_flip_left_right: Annotated[bool, Honoured("Mirror every second image.")] = False
    data_format: Annotated[Literal["channels_first", "channels_last"], Honoured("The order of the axes.")] = (
        "channels_last"
    )
    subpixels: Annotated[Literal["RGB", "BGR"], Honoured("The order of the channels.")] = "RGB"
    mean_value: Annotated[Floats, Honoured("Subtracted from the pixels.")] = (0.0, 0.0, 0.0)
    scale: Annotated[float, Honoured("Multiplied with the difference."), Field(gt=0, le=1e6)] = 1.0

    def apply(self, image: Any, random: np.random.Generator) -> Any:
        image = _resized(image, _shorter_side(_size(image), self.resize_side), self.resize_method)
        size = (self.height, self.width)
        image = RandomCrop(size=size).apply(image, random) if self.random_crop else _center(image, size)
        if self.random_flip_left_right:
            image = RandomHorizontalFlip().apply(image, random)
        found = _array(image).astype(np.float32)
        found = found[..., ::-1] if self.subpixels == "BGR" else found
        found = (found - _row(self.mean_value)) * np.float32(self.scale)
        return np.ascontiguousarray(found.transpose(2, 0, 1) if self.data_format == "channels_first" else found)


class AlignImageChannel(Transform):
    """Grey images to colour images, and the reverse."""

    dim: Annotated[int, Honoured("The number of channels."), Field(ge=1, le=4)] = 3

    def apply(self, image: Any, random: np.random.Generator) -> Any:
        return _picture(image).convert({1: "L", 3: "RGB", 4: "RGBA"}.get(self.dim, "LA"))


class QuantizedInput(Transform):
    """Round the inputs to 8 bits."""

    about: ClassVar[Marker] = InCode("the exported model quantizes its own input")

    dtype: Annotated[Literal["int8", "uint8"], Honoured("The type.")] = "int8"
    scale: Annotated[float | None, Honoured("The scale; None: that of the first quantizer.")] = Field(
        default=None, gt=0, le=1e9
    )


class ParseDecodeImagenet(Transform):
    """Decode an image of a TFRecord."""

    about: ClassVar[Marker] = Noted(_TF)


class ParseDecodeCoco(Transform):
    """Decode an image of a TFRecord."""

    about: ClassVar[Marker] = Noted(_TF)


class ParseDecodeVoc(Transform):
    """Decode an image of a TFRecord."""

    about: ClassVar[Marker] = Noted(_TF)


TRANSFORMS: dict[str, type[Option]] = {kind.__name__: kind for kind in Transform.__subclasses__()}


# -- what transforms do with an image ---------------------------------------------------------------------------

_FILTERS = {"nearest": 0, "bilinear": 2, "bicubic": 3}  # Pillow's Resampling
_MOST_PIXELS = 40_000_000


def to_tensor(image: Any) -> Tensor:
    """A tensor with channels first; bytes become numbers from 0 to 1."""
    if isinstance(image, Tensor):
        return image
    found = _array(image)
    if found.ndim == 3:
        found = np.ascontiguousarray(found.transpose(2, 0, 1))
    tensor = torch.from_numpy(found)
    return tensor.float() / 255 if found.dtype == np.uint8 else tensor


def _row(values: tuple[float, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(values, np.float32)


def _is_picture(image: Any) -> bool:
    return hasattr(image, "convert")


def _array(image: Any) -> np.ndarray[Any, Any]:
    """An array with channels last."""
    if isinstance(image, Tensor):
        return (image.permute(1, 2, 0) if image.ndim == 3 else image).numpy()
    found = np.array(image) if _is_picture(image) else np.asarray(image)
    return found[..., None] if _is_picture(image) and found.ndim == 2 else found


def _picture(image: Any) -> Any:
    if _is_picture(image):
        return image
    from PIL import Image  # the images were read with it

    found = _array(image)
    if isinstance(image, Tensor) and found.dtype != np.uint8:
        found = (found * 255).round().clip(0, 255).astype(np.uint8)
    if found.ndim not in (2, 3) or found.dtype != np.uint8 or (found.ndim == 3 and found.shape[2] not in (1, 3, 4)):
        raise _misfit("ToPILImage", "the samples are no images", found)
    return Image.fromarray(found[..., 0] if found.ndim == 3 and found.shape[2] == 1 else found)


def _size(image: Any) -> tuple[int, int]:
    """Height and width."""
    if _is_picture(image):
        return image.height, image.width
    if image.ndim != 3:
        raise _misfit("transform", "this transform needs images, with three axes", image)
    return tuple(image.shape[1:] if isinstance(image, Tensor) else image.shape[:2])


def _shorter_side(size: tuple[int, int], side: int) -> tuple[int, int]:
    """The size with this shorter side and, nearly, the same aspect ratio."""
    height, width = size
    return (side, int(side * width / height)) if height <= width else (int(side * height / width), side)


def _resized(image: Any, size: tuple[int, ...], filter: str) -> Any:
    height, width = size
    if height * width > _MOST_PIXELS:
        what, fix = f"an image would have {height} × {width} pixels", "remove it, or reduce the size"
        raise WorkloadError(what, where="transform", fix=fix, code="image-too-large")
    if _is_picture(image):
        return image.resize((width, height), _FILTERS[filter])
    _size(image)
    smooth = filter != "nearest"
    tensor = image if isinstance(image, Tensor) else torch.from_numpy(image).permute(2, 0, 1)
    corners = False if smooth else None
    found = nn.functional.interpolate(
        tensor[None].float(), (height, width), mode=filter, antialias=smooth, align_corners=corners
    )[0]
    if not tensor.is_floating_point():
        found = found.round().clamp(0, 255).to(tensor.dtype)
    return found if isinstance(image, Tensor) else found.permute(1, 2, 0).numpy()


def _crop(image: Any, top: int, left: int, height: int, width: int) -> Any:
    """A rectangle; black where it exceeds the image."""
    if _is_picture(image):
        return image.crop((left, top, left + width, top + height))
    own_height, own_width = _size(image)
    over = (max(0, -top), max(0, top + height - own_height)), (max(0, -left), max(0, left + width - own_width))
    rows, columns = slice(max(0, top), max(0, top + height)), slice(max(0, left), max(0, left + width))
    if isinstance(image, Tensor):
        return nn.functional.pad(image[:, rows, columns], (*over[1], *over[0]))
    return np.pad(image[rows, columns], (*over, (0, 0)))


def _center(image: Any, size: tuple[int, int]) -> Any:
    (height, width), (down, across) = _size(image), size
    return _crop(image, round((height - down) / 2), round((width - across) / 2), down, across)


def _flipped(image: Any, *, across: bool) -> Any:
    if _is_picture(image):
        return image.transpose(0 if across else 1)  # Pillow's Transpose.FLIP_LEFT_RIGHT and FLIP_TOP_BOTTOM
    _size(image)
    if isinstance(image, Tensor):
        return image.flip(2 if across else 1)
    return np.ascontiguousarray(image[:, ::-1] if across else image[::-1])


def _misfit(where: str, what: str, found: Any) -> WorkloadError:
    return WorkloadError(what, where=where, value=shape_of(found), fix="change the transforms", code="invalid-data")
