"""Import files of MQBench: the configurations of its paper's zoo and of its later toolkit."""

from bitwright.importers.mqbench.quantize_base import MqbenchQuantizer, QuantizeBase, RangeObserver, pot_quantization
from bitwright.importers.mqbench.run import MQBENCH, train_mqbench
from bitwright.importers.mqbench.settings import MqbenchSettings, load_mqbench, mqbench_settings, read_mqbench
from bitwright.importers.mqbench.toolkit import HuggingFaceConfig, ToolkitConfig
from bitwright.importers.mqbench.zoo import ZooConfig

__all__ = [
    "MQBENCH",
    "HuggingFaceConfig",
    "MqbenchQuantizer",
    "MqbenchSettings",
    "QuantizeBase",
    "RangeObserver",
    "ToolkitConfig",
    "ZooConfig",
    "load_mqbench",
    "mqbench_settings",
    "pot_quantization",
    "read_mqbench",
    "train_mqbench",
]
