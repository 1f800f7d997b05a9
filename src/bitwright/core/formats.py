"""Number formats, written as short text: "int8/channel/sym", "uint4/tensor/asym", "int4/group64/sym", "bf16".

An integer format is `[u]intB/granularity/symmetry[/flag…]`:

- granularity: `tensor`, `channel`, `groupN` (blocks of N along the reduction axis), or `token` (activations: each
  vector along the reduction axis has its own scale, which is computed at run time);
- symmetry: `sym` (zero point 0; unsigned: only for numbers that are never negative) or `asym` (any zero point);
- flags: `pot` (scale is a power of two), `narrow` (drop the lowest code: ±127), `adasign` (an input that is
  never negative becomes unsigned and uses all 2^B codes), `dynamic` (scales are computed at run time from the values
  themselves, per `tensor` or per `token`; no calibration), `full` (weights: the value of largest magnitude gets the
  lowest code, −2^(B−1), and the scale has its sign: negative where that value is positive).

Small floating-point formats are also quantized formats: `fp8e4m3` and `fp8e5m2` have one scale per `tensor` (default),
`channel`, `groupN` or `token`, and can be `dynamic`. In the OCP microscaling formats `mxfp8e4m3`, `mxfp8e5m2`,
`mxfp4e2m1` and `mxint8`, blocks of 32 along the reduction axis share a power-of-two scale, which is computed for each
tensor.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from bitwright.core.arguments import strict
from bitwright.core.errors import FormatError, did_you_mean

Granularity = Literal["tensor", "channel", "group", "token"]

# name → bits; formats that leave values unquantized
FLOATS: dict[str, int] = {"float": 32, "fp32": 32, "bf16": 16, "fp16": 16}
MX_BLOCK = 32


@dataclass(frozen=True, kw_only=True)
class MinifloatSpec:
    """The values of a small floating-point format: exponent range, fraction bits and largest value."""

    bits: int
    fraction: int
    lowest: int
    """The exponent of the smallest normal number. Subnormal numbers have the same step."""
    largest: float


MINIFLOATS = {
    "fp8e4m3": MinifloatSpec(bits=8, fraction=3, lowest=-6, largest=448.0),
    "fp8e5m2": MinifloatSpec(bits=8, fraction=2, lowest=-14, largest=57344.0),
    "mxfp8e4m3": MinifloatSpec(bits=8, fraction=3, lowest=-6, largest=448.0),
    "mxfp8e5m2": MinifloatSpec(bits=8, fraction=2, lowest=-14, largest=57344.0),
    "mxfp4e2m1": MinifloatSpec(bits=4, fraction=1, lowest=0, largest=6.0),
    # fixed point: no exponent, so all values are subnormal
    "mxint8": MinifloatSpec(bits=8, fraction=6, lowest=0, largest=127 / 64),
}
FLAGS = ("pot", "narrow", "adasign", "dynamic", "full")
_INTEGER = re.compile(r"^(u?)int([0-9]{1,3})$")
_GROUP = re.compile(r"^group([0-9]{1,9})$")


@strict
@dataclass(frozen=True, kw_only=True)
class Format:
    """A number format of a site.

    >>> f = Format.parse("int8/channel/sym")
    >>> f.qmin, f.qmax, str(f)
    (-128, 127, 'int8/channel/sym')
    >>> Format.parse("bf16").is_float
    True
    """

    name: str
    bits: int
    signed: bool = True
    granularity: Granularity = "tensor"
    group: int = 0
    symmetric: bool = True
    pot: bool = False
    narrow: bool = False
    adasign: bool = False
    dynamic: bool = False
    full: bool = False

    @property
    def is_float(self) -> bool:
        """Whether values stay unquantized."""
        return self.name in FLOATS

    @property
    def minifloat(self) -> MinifloatSpec | None:
        """The definition of a small floating-point format; None for other formats."""
        return MINIFLOATS.get(self.name)

    @property
    def is_mx(self) -> bool:
        """Whether this is a microscaling format: blocks that share a power-of-two scale."""
        return self.minifloat is not None and self.name.startswith("mx")

    @property
    def is_plain_float(self) -> bool:
        """Whether the site keeps the model's own type."""
        return self.name == "float"

    @property
    def qmin(self) -> int:
        """The lowest code."""
        lowest = -(2 ** (self.bits - 1)) if self.signed else 0
        return lowest + 1 if self.narrow else lowest

    @property
    def qmax(self) -> int:
        """The highest code."""
        return int(2 ** (self.bits - 1) - 1) if self.signed else int(2**self.bits - 1)

    @property
    def dtype(self) -> str:
        """The storage type: "int8", "uint4", …"""
        return self.name

    def unsigned(self) -> Format:
        """The unsigned format of the same width."""
        return replace(self, name=f"uint{self.bits}", signed=False)

    def with_bits(self, bits: int) -> Format:
        """The same format with another width.

        >>> str(Format.parse("uint8/tensor/asym").with_bits(4))
        'uint4/tensor/asym'
        """
        if self.is_float or self.minifloat is not None:
            return self
        return Format.parse(str(replace(self, name=f"{'' if self.signed else 'u'}int{bits}", bits=bits)))

    def __str__(self) -> str:
        if self.is_float or self.is_mx:
            return self.name
        grain = f"group{self.group}" if self.granularity == "group" else self.granularity
        if self.minifloat is not None:
            options = [] if self.granularity == "tensor" and not self.dynamic else [grain]
            return "/".join([self.name, *options, *(["dynamic"] if self.dynamic else [])])
        flags = [flag for flag in FLAGS if getattr(self, flag)]
        return "/".join([self.name, grain, "sym" if self.symmetric else "asym", *flags])

    @staticmethod
    def parse(text: str | Format) -> Format:
        """Parse a format. An invalid one raises `FormatError` with a suggestion."""
        if isinstance(text, Format):
            return text
        if not isinstance(text, str):
            raise FormatError(
                "a format must be a string", value=text, fix='for example "int8/tensor/sym"', code="invalid-format"
            )
        parts = [part.strip() for part in text.strip().lower().split("/")]
        if parts[0] in FLOATS:
            if len(parts) > 1:
                raise FormatError(
                    f"the float format {parts[0]!r} takes no options",
                    value=text,
                    fix=f"write {parts[0]!r}",
                    code="invalid-format",
                )
            return Format(name=parts[0], bits=FLOATS[parts[0]])
        if parts[0] in MINIFLOATS:
            return _minifloat(parts[0], parts[1:], text)
        match = _INTEGER.match(parts[0])
        if not match:
            known = [*FLOATS, *MINIFLOATS, "int8", "uint8", "int4", "uint4", "int16", "uint16", "int2"]
            raise FormatError(
                "unknown number format", value=text, fix=did_you_mean(parts[0], known), code="unknown-format"
            )
        bits, signed = int(match[2]), not match[1]
        if not (2 <= bits <= 16 or (bits == 32 and signed)):
            raise FormatError(
                "integer formats have 2 to 16 bits (biases: int32)", value=text, fix="int8", code="invalid-format"
            )
        return _with_options(Format(name=f"{match[1]}int{bits}", bits=bits, signed=signed), parts[1:], text)


def _minifloat(name: str, options: list[str], text: str) -> Format:
    bits = MINIFLOATS[name].bits
    if name.startswith("mx"):
        if options:
            raise FormatError(
                "blocks of an MX format are always 32 numbers", value=text, fix=f"write {name!r}", code="invalid-format"
            )
        return Format(name=name, bits=bits, granularity="group", group=MX_BLOCK)
    if not all(option in ("tensor", "channel", "token", "dynamic") or _GROUP.match(option) for option in options):
        fix = f"write {name}, {name}/channel, {name}/group32 or {name}/token/dynamic"
        raise FormatError(
            "small float formats take only a granularity and dynamic", value=text, fix=fix, code="invalid-format"
        )
    return _with_options(Format(name=name, bits=bits), options, text)


def _with_options(base: Format, options: list[str], text: str) -> Format:
    seen: dict[str, object] = {}
    known = ["tensor", "channel", "group64", "token", "sym", "asym", *FLAGS]
    for option in options:
        group = _GROUP.match(option)
        if group and int(group[1]) > 0:
            new: dict[str, object] = {"granularity": "group", "group": int(group[1])}
        elif option in ("tensor", "channel", "token"):
            new = {"granularity": option}
        elif option in ("sym", "asym"):
            new = {"symmetric": option == "sym"}
        elif option in FLAGS:
            new = {option: True}
        else:
            raise FormatError(
                f"unknown option {option!r} in a format",
                value=text,
                fix=did_you_mean(option, known),
                code="invalid-format",
            )
        if seen.keys() & new.keys():
            raise FormatError(
                f"the option {option!r} contradicts an earlier one", value=text, fix="keep one", code="invalid-format"
            )
        seen.update(new)
    result = replace(base, **seen)  # type: ignore[arg-type]  # keys and types come from the branches above
    if result.granularity == "token":  # the number of tokens is known only at run time
        result = replace(result, dynamic=True)
    if result.dynamic and result.granularity not in ("tensor", "token"):
        raise FormatError(
            "scales that are computed at run time are per tensor or per token",
            value=text,
            fix=f"{result.name}/token/dynamic",
            code="invalid-format",
        )
    if result.dynamic and result.adasign:
        raise FormatError(
            "adasign chooses the sign during calibration, which a dynamic format doesn't have",
            value=text,
            fix="use asym instead of adasign",
            code="invalid-format",
        )
    if result.adasign and not (result.signed and result.symmetric):
        raise FormatError(
            "adasign chooses the sign of a signed symmetric format",
            value=text,
            fix="int8/tensor/sym/adasign",
            code="invalid-format",
        )
    if result.narrow and not result.signed:
        raise FormatError(
            "narrow drops the lowest signed code", value=text, fix="leave out narrow", code="invalid-format"
        )
    if result.full and (not result.signed or not result.symmetric or result.dynamic or result.pot or result.adasign):
        raise FormatError(
            "full gives the scale of a signed symmetric format the sign of the largest value",
            value=text,
            fix=f"int{result.bits}/group32/sym/full",
            code="invalid-format",
        )
    if result.full and result.narrow:
        raise FormatError(
            "full uses the lowest code, which narrow drops", value=text, fix="keep one", code="invalid-format"
        )
    if result.pot and not result.symmetric:
        raise FormatError(
            "power-of-two scales are symmetric", value=text, fix="write sym instead of asym", code="invalid-format"
        )
    return result
