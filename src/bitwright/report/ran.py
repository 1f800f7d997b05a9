"""What a row of a grid asked for, and what really ran, as a part of a record."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from bitwright.report.parts import Frozen


class Sites(Frozen):
    """Sites of a prepared model at which the same thing ran, as read from that model."""

    quantizer: str = Field(description="The class: bitwright.quantizers.lsq.Lsq.")
    format: str = Field(description="The format in force, e.g. int4/channel/sym.")
    sites: int
    levels: int = Field(description="The most different values that one scale of any of them gave.")


class Executed(Frozen):
    """What a prepared and trained model says of itself."""

    weights: tuple[Sites, ...]
    activations: tuple[Sites, ...]
    biases: int = Field(default=0, description="Biases on the grid of the integer accumulator.")
    folding: dict[str, int] = Field(
        default_factory=dict, description="Folding strategy → how many norms; empty: norms run as they are."
    )
    kept_float: dict[str, str] = Field(default_factory=dict, description="Operators that stayed float, and why.")


class OnDevice(Frozen):
    """The same model on the backend's runtime."""

    runtime: str
    accuracy: float | None = None
    gap: float | None = Field(default=None, description="On the runtime minus simulated, in points.")
    kinds: dict[str, int] | None = Field(
        default=None, description="Products by the type in which the runtime really ran them; None: it doesn't tell."
    )
    reason: str | None = Field(default=None, description="Why there is no accuracy.")


class GridRow(Frozen):
    """One row of a grid of `bitwright bench`."""

    id: str = Field(description="The hash of `config`.")
    config: dict[str, Any] = Field(description="A grid of this row alone: `bitwright bench` runs it as it is.")
    executed: Executed
    device: OnDevice | None = Field(default=None, description="None: not asked for, or the backend has no runtime.")
    beyond: str | None = Field(
        default=None, description="Where the backend's scheme was simulated at a width that it can't run: which."
    )
    notes: tuple[str, ...] = ()
    start: str = Field(description="The fingerprint of the float weights.")
