"""Import YAML files of LPOT (Neural Compressor 1.x). Keys keep their meaning; keys without one are errors."""

from bitwright.core.registry import Importer
from bitwright.importers.lpot.experimental import Benchmark, Quantization, QuantizedModel, common
from bitwright.importers.lpot.reader import is_lpot, read_lpot, translate, tune_settings
from bitwright.importers.lpot.schema import LpotConfig

__all__ = [
    "LPOT",
    "Benchmark",
    "LpotConfig",
    "Quantization",
    "QuantizedModel",
    "common",
    "is_lpot",
    "read_lpot",
    "translate",
    "tune_settings",
]

LPOT = Importer(target="tune", recognizes=is_lpot, translate=translate)
