"""The conformance kit: checks that a plugin's quantizer or observer works with the rest of Bitwright."""

from bitwright.testing.conformance import check_observer, check_quantizer

__all__ = ["check_observer", "check_quantizer"]
