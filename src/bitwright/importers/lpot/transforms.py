"""The transforms of LPOT files by name, and the values that several sections of these files have."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from bitwright.importers.key_table import Honoured, Marker, Noted, Option

__all__ = ["TRANSFORMS", "Floats", "Size", "Transform", "flags", "listed"]

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
    """One step from a sample to the input of the model."""

    about: ClassVar[Marker] = Honoured("Applied in the order of the file.")


class Resize(Transform):
    """Resize to a height and width, or the shorter side to one number."""

    size: Annotated[
        tuple[Side, ...],
        BeforeValidator(listed),
        Field(min_length=1, max_length=2),
        Honoured("One number: the shorter side. Two: height and width."),
    ]
    interpolation: Annotated[Interpolation, Honoured("The filter.")] = "bilinear"


class CenterCrop(Transform):
    """Cut out the center."""

    size: Annotated[Size, Honoured("Height and width of the crop.")]


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


class RandomCrop(Transform):
    """Cut out a random part."""

    about: ClassVar[Marker] = Honoured("Random, with the seed `tuning.random_seed`.")
    size: Annotated[Size, Honoured("Height and width of the crop.")]


class RandomHorizontalFlip(Transform):
    """Mirror every second image."""

    about: ClassVar[Marker] = Honoured("Random, with the seed `tuning.random_seed`.")


class RandomVerticalFlip(Transform):
    """Turn every second image upside down."""

    about: ClassVar[Marker] = Honoured("Random, with the seed `tuning.random_seed`.")


class ToTensor(Transform):
    """Pixels to numbers from 0 to 1, channels first."""


class ToPILImage(Transform):
    """Numbers to an image."""


class ToArray(Transform):
    """An image to numbers from 0 to 255, channels last."""


class ToNDArray(Transform):
    """An image to numbers from 0 to 255, channels last."""


class Rescale(Transform):
    """Divide by 255."""


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


class Cast(Transform):
    """Convert the type of the numbers."""

    dtype: Annotated[
        Literal["float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64"], Honoured("The type.")
    ] = "float32"


class Transpose(Transform):
    """Permute the axes."""

    perm: Annotated[tuple[Annotated[int, Field(ge=0, le=8)], ...], Honoured("The order of the axes.")]


class Reshape(Transform):
    """Change the shape."""

    shape: Annotated[tuple[Annotated[int, Field(ge=-1, le=10**9)], ...], Honoured("The shape.")]


class CropToBoundingBox(Transform):
    """Cut out a rectangle."""

    offset_height: Annotated[int, Honoured("Top."), Field(ge=0, le=100_000)]
    offset_width: Annotated[int, Honoured("Left."), Field(ge=0, le=100_000)]
    target_height: Annotated[Side, Honoured("Height.")]
    target_width: Annotated[Side, Honoured("Width.")]


class CropResize(Transform):
    """Cut out a rectangle and resize it."""

    x: Annotated[int, Honoured("Left."), Field(ge=0, le=100_000)]
    y: Annotated[int, Honoured("Top."), Field(ge=0, le=100_000)]
    width: Annotated[Side, Honoured("Width of the rectangle.")]
    height: Annotated[Side, Honoured("Height of the rectangle.")]
    size: Annotated[Size, Honoured("Height and width of the result.")]
    interpolation: Annotated[Interpolation, Honoured("The filter.")] = "bilinear"


class PaddedCenterCrop(Transform):
    """Cut out a center that leaves a margin, in proportion to the image."""

    size: Annotated[Size, Honoured("Height and width of the crop.")]
    crop_padding: Annotated[int, Honoured("The margin."), Field(ge=0, le=10_000)] = 0


class ResizeWithRatio(Transform):
    """Resize so that the sides are within limits, and keep the aspect ratio."""

    min_dim: Annotated[Side, Honoured("Limit of the shorter side.")] = 800
    max_dim: Annotated[Side, Honoured("Limit of the longer side.")] = 1365
    padding: Annotated[bool, Honoured("Pad to a square.")] = False
    constant_value: Annotated[int, Honoured("The value of the padding."), Field(ge=0, le=255)] = 0


class ResizeWithAspectRatio(Transform):
    """Resize and cut out the center, and keep the aspect ratio."""

    height: Annotated[Side, Honoured("Height of the result.")]
    width: Annotated[Side, Honoured("Width of the result.")]


class BilinearImagenet(Transform):
    """Cut out a central share, resize, subtract and scale."""

    height: Annotated[Side, Honoured("Height of the result.")]
    width: Annotated[Side, Honoured("Width of the result.")]
    central_fraction: Annotated[float, Honoured("Share of the image."), Field(gt=0, le=1)] = 0.875
    mean_value: Annotated[Floats, Honoured("Subtracted from the pixels.")] = (0.0, 0.0, 0.0)
    scale: Annotated[float, Honoured("Multiplied with the difference."), Field(gt=0, le=1e6)] = 1.0


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


class AlignImageChannel(Transform):
    """Grey images to colour images, and the reverse."""

    dim: Annotated[int, Honoured("The number of channels."), Field(ge=1, le=4)] = 3


class QuantizedInput(Transform):
    """Round the inputs to 8 bits."""

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
