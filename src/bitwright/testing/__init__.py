"""The conformance kit: what a plugin author runs to know that a quantizer or observer fits in everywhere."""

from bitwright.testing.conformance import check_observer, check_quantizer

__all__ = ["check_observer", "check_quantizer"]
