"""Deployment: export a model to an artefact, run it, check it against the simulation and measure it."""

from bitwright.deployment.artefacts import Stored, read_artefact
from bitwright.deployment.check import Check, check, default_runtime
from bitwright.deployment.distance import Distance, OutputDistance, SiteDistance, measure_distance
from bitwright.deployment.export import Artefact, export, export_float, unexportable
from bitwright.deployment.measurement import Latency, measure_latency, peak_memory, saturates
from bitwright.deployment.parity import OutputCheck, ProbeInfo, SiteCheck
from bitwright.deployment.runtimes.base import Runtime, available_runtimes, open_runtime, readers

__all__ = [
    "Artefact",
    "Check",
    "Distance",
    "Latency",
    "OutputCheck",
    "OutputDistance",
    "ProbeInfo",
    "Runtime",
    "SiteCheck",
    "SiteDistance",
    "Stored",
    "available_runtimes",
    "check",
    "default_runtime",
    "export",
    "export_float",
    "measure_distance",
    "measure_latency",
    "open_runtime",
    "peak_memory",
    "read_artefact",
    "readers",
    "saturates",
    "unexportable",
]
