from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitwright.core.errors import BitwrightError, FormatError
from bitwright.core.formats import FLOATS, Format


@pytest.mark.parametrize(
    ("text", "qmin", "qmax"),
    [
        ("int8/tensor/sym", -128, 127),
        ("int8/channel/sym/narrow", -127, 127),
        ("uint8/tensor/asym", 0, 255),
        ("uint4/group32/asym", 0, 15),
        ("int2/tensor/sym", -2, 1),
        ("int16/tensor/sym/pot", -32768, 32767),
        ("uint16/tensor/asym", 0, 65535),
        ("int32/channel/sym", -(2**31), 2**31 - 1),
    ],
)
def test_codes(text: str, qmin: int, qmax: int) -> None:
    format = Format.parse(text)
    assert (format.qmin, format.qmax, str(format)) == (qmin, qmax, text)
    assert not format.is_float


@pytest.mark.parametrize("name", FLOATS)
def test_floats(name: str) -> None:
    format = Format.parse(name)
    assert format.is_float
    assert str(format) == name
    assert format.bits == FLOATS[name]
    assert format.is_plain_float == (name == "float")


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("int8", "int8/tensor/sym"),
        (" INT8 / Channel ", "int8/channel/sym"),
        ("int8/pot/asym/channel".replace("asym", "sym"), "int8/channel/sym/pot"),
        ("int8/adasign", "int8/tensor/sym/adasign"),
    ],
)
def test_short_spellings(text: str, full: str) -> None:
    assert str(Format.parse(text)) == full


def test_a_format_passes_through() -> None:
    format = Format.parse("int4/group64/sym")
    assert Format.parse(format) is format
    assert (format.granularity, format.group) == ("group", 64)


def test_unsigned_twin_uses_all_codes() -> None:
    twin = Format.parse("int8/tensor/sym/adasign").unsigned()
    assert (twin.name, twin.qmin, twin.qmax, twin.signed) == ("uint8", 0, 255, False)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("imt8", "did you mean 'int8'"),
        ("", "unknown number format"),
        ("int1/tensor/sym", "2 to 16 bits"),
        ("int17", "2 to 16 bits"),
        ("uint32", "2 to 16 bits"),
        ("int8/chanel/sym", "did you mean 'channel'"),
        ("int8/group0/sym", "unknown option 'group0'"),
        ("int8/tensor/channel", "contradicts"),
        ("int8/sym/asym", "contradicts"),
        ("int8/pot/pot", "contradicts"),
        ("bf16/channel", "takes no options"),
        ("uint8/tensor/sym/adasign", "signed symmetric"),
        ("int8/tensor/asym/adasign", "signed symmetric"),
        ("uint8/tensor/asym/narrow", "lowest signed code"),
        ("int8/tensor/asym/pot", "power-of-two"),
    ],
)
def test_invalid_formats_suggest_a_fix(text: str, says: str) -> None:
    with pytest.raises(FormatError) as caught:
        Format.parse(text)
    problem = caught.value.problems[0]
    assert says in str(problem)
    assert problem.fix
    assert problem.value == text


@pytest.mark.parametrize("text", [8, None])
def test_a_format_is_text(text: object) -> None:
    with pytest.raises(BitwrightError) as caught:
        Format.parse(text)  # type: ignore[arg-type]
    assert caught.value.codes == ["wrong-argument-type"]


_options = st.tuples(
    st.sampled_from(["tensor", "channel", "group1", "group64", "group128"]),
    st.sampled_from(["sym", "asym"]),
    st.sets(st.sampled_from(["pot", "narrow", "adasign"])),
)


@given(bits=st.integers(2, 16), unsigned=st.booleans(), options=_options)
def test_text_round_trip(bits: int, unsigned: bool, options: tuple[str, str, set[str]]) -> None:
    grain, symmetry, flags = options
    text = "/".join([f"{'u' * unsigned}int{bits}", grain, symmetry, *sorted(flags)])
    try:
        format = Format.parse(text)
    except FormatError:
        # only these can't exist
        assert (flags & {"narrow", "adasign"} and unsigned) or (flags & {"pot", "adasign"} and symmetry == "asym")
        return
    assert Format.parse(str(format)) == format
    assert format.qmax - format.qmin == 2**bits - 1 - ("narrow" in flags)
