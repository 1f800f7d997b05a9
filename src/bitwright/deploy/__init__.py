"""Deployment: export a model to an artefact, run it, check it against the simulation and measure it."""

from bitwright.deploy.agreement import OutputCheck
from bitwright.deploy.artefacts import Stored, read_artefact
from bitwright.deploy.check import Check, check, default_runtime
from bitwright.deploy.distance import Distance, OutputDistance, SiteDistance, measure_distance
from bitwright.deploy.export import Artefact, export, export_float, unexportable
from bitwright.deploy.footprint import peak_memory
from bitwright.deploy.measure import Latency, measure_latency
from bitwright.deploy.runtimes.base import Runtime, available_runtimes, open_runtime, readers
from bitwright.deploy.saturation import saturates
from bitwright.deploy.site_check import Probe, SiteCheck

__all__ = [
    "Artefact",
    "Check",
    "Distance",
    "Latency",
    "OutputCheck",
    "OutputDistance",
    "Probe",
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
