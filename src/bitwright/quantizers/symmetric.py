"""Some quantizers have levels around zero only: they say so before anything is calibrated."""

from __future__ import annotations

from dataclasses import replace

from bitwright.attach import Quantizer
from bitwright.errors import FormatError


def symmetric_only(quantizer: Quantizer, name: str) -> None:
    """An error that names the site, its format and one that will do."""
    format = quantizer.spec.format
    if not format.symmetric:
        near = replace(format, name=f"int{format.bits}", signed=True, symmetric=True)
        raise FormatError(
            f"{name} is symmetric", where=quantizer.site, value=str(format), fix=f"use {near}, or {near}/adasign"
        )
