"""Bitwright: the precision that every operator of a PyTorch model deserves."""

from bitwright.attach import prepare, set_mode, strip
from bitwright.backends import backend
from bitwright.checkpoint import load_checkpoint, save_checkpoint
from bitwright.deploy import check, export, export_float, measure_latency, open_runtime
from bitwright.errors import BitwrightError, PlanError, Problem
from bitwright.formats import Format
from bitwright.graph import Graph, capture
from bitwright.plan import Plan, SiteSpec
from bitwright.planners import make_plan
from bitwright.ptq import calibrate
from bitwright.recipe import Quantized, quantize
from bitwright.version import __version__
from bitwright.workload import Workload, load_workload, measure

__all__ = [
    "BitwrightError",
    "Format",
    "Graph",
    "Plan",
    "PlanError",
    "Problem",
    "Quantized",
    "SiteSpec",
    "Workload",
    "__version__",
    "backend",
    "calibrate",
    "capture",
    "check",
    "export",
    "export_float",
    "load_checkpoint",
    "load_workload",
    "make_plan",
    "measure",
    "measure_latency",
    "open_runtime",
    "prepare",
    "quantize",
    "save_checkpoint",
    "set_mode",
    "strip",
]
