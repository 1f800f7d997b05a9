"""Bitwright chooses the numeric precision of every operator of a PyTorch model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bitwright.backends import WeightCosts, backend, make_plan
    from bitwright.bench import GridConfig, Leaderboard, benchmark, rerun_rows
    from bitwright.bench.comparison import Comparison
    from bitwright.bench.grid_run import run_grid
    from bitwright.cluster import Cluster, Prediction
    from bitwright.cluster.cluster_plan import plan_cluster
    from bitwright.cluster.measurement import profile
    from bitwright.cluster.predictor import predict
    from bitwright.cluster.replanning import ClusterReplanner
    from bitwright.core import __version__
    from bitwright.core.display import Progress
    from bitwright.core.errors import BitwrightError, PlanError, Problem
    from bitwright.core.formats import Format
    from bitwright.deployment import Artefact, Check, check, export, export_float, measure_latency, open_runtime
    from bitwright.deployment.checkpoint import load_checkpoint, save_checkpoint
    from bitwright.graph import Graph, capture
    from bitwright.importers.key_listing import list_keys
    from bitwright.plan import Plan, SiteSpec
    from bitwright.profiling import DeviceProfile
    from bitwright.ptq import calibrate
    from bitwright.ptq.blockwise import QuantizedFolder, quantize_folder
    from bitwright.ptq.quantize import Quantized, load, quantize
    from bitwright.quantizers import compile_arithmetic, prepare, quantizers_of, set_mode, strip
    from bitwright.reports.files import report
    from bitwright.reports.record import Record
    from bitwright.sensitivity import OperatorScores, score, score_operators, suggest, weight_costs
    from bitwright.training import DriftSettings, Qat, TrainConfig, Trainer
    from bitwright.tuning import Budget, Goal, Space, TuneConfig, Tuned, tune
    from bitwright.workflows import (
        Deployment,
        check_workload,
        deploy,
        export_workload,
        plan_workload,
        quantize_workload,
        score_workload,
        tune_workload,
    )
    from bitwright.workflows.doctor import diagnose, list_plugins
    from bitwright.workflows.gpu_doctor import diagnose_gpu
    from bitwright.workload import Workload, evaluate, load_workload

# Names are fetched when they are first used: `bitwright --help` shouldn't wait seconds for torch.
_HOMES = {
    "bitwright.quantizers": (
        "compile_arithmetic",
        "prepare",
        "quantizers_of",
        "set_mode",
        "strip",
    ),
    "bitwright.backends": ("WeightCosts", "backend", "make_plan"),
    "bitwright.workflows": (
        "Deployment",
        "check_workload",
        "deploy",
        "export_workload",
        "plan_workload",
        "quantize_workload",
        "score_workload",
        "tune_workload",
    ),
    "bitwright.bench": (
        "GridConfig",
        "Leaderboard",
        "benchmark",
        "rerun_rows",
        "run_grid",
    ),
    "bitwright.cluster": ("Cluster", "Prediction"),
    "bitwright.cluster.cluster_plan": ("plan_cluster",),
    "bitwright.cluster.predictor": ("predict",),
    "bitwright.cluster.replanning": ("ClusterReplanner",),
    "bitwright.cluster.measurement": ("profile",),
    "bitwright.profiling": ("DeviceProfile",),
    "bitwright.deployment.checkpoint": (
        "load_checkpoint",
        "save_checkpoint",
    ),
    "bitwright.deployment": (
        "Artefact",
        "Check",
        "check",
        "export",
        "export_float",
        "measure_latency",
        "open_runtime",
    ),
    "bitwright.core": ("__version__",),
    "bitwright.core.errors": (
        "BitwrightError",
        "PlanError",
        "Problem",
    ),
    "bitwright.core.formats": ("Format",),
    "bitwright.graph": (
        "Graph",
        "capture",
    ),
    "bitwright.plan": (
        "Plan",
        "SiteSpec",
    ),
    "bitwright.ptq": ("calibrate",),
    "bitwright.ptq.blockwise": ("QuantizedFolder", "quantize_folder"),
    "bitwright.ptq.quantize": (
        "Quantized",
        "load",
        "quantize",
    ),
    "bitwright.bench.comparison": ("Comparison",),
    "bitwright.reports.record": ("Record",),
    "bitwright.reports.files": ("report",),
    "bitwright.core.display": ("Progress",),
    "bitwright.sensitivity": (
        "OperatorScores",
        "score_operators",
        "score",
        "suggest",
        "weight_costs",
    ),
    "bitwright.training": (
        "DriftSettings",
        "Qat",
        "TrainConfig",
        "Trainer",
    ),
    "bitwright.tuning": (
        "Budget",
        "Goal",
        "Space",
        "TuneConfig",
        "Tuned",
        "tune",
    ),
    "bitwright.importers.key_listing": ("list_keys",),
    "bitwright.workflows.doctor": ("diagnose", "list_plugins"),
    "bitwright.workflows.gpu_doctor": ("diagnose_gpu",),
    "bitwright.workload": (
        "Workload",
        "load_workload",
        "evaluate",
    ),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'bitwright' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


__all__ = [
    "Artefact",
    "BitwrightError",
    "Budget",
    "Check",
    "Cluster",
    "ClusterReplanner",
    "Comparison",
    "Deployment",
    "DeviceProfile",
    "DriftSettings",
    "Format",
    "Goal",
    "Graph",
    "GridConfig",
    "Leaderboard",
    "OperatorScores",
    "Plan",
    "PlanError",
    "Prediction",
    "Problem",
    "Progress",
    "Qat",
    "Quantized",
    "QuantizedFolder",
    "Record",
    "SiteSpec",
    "Space",
    "TrainConfig",
    "Trainer",
    "TuneConfig",
    "Tuned",
    "WeightCosts",
    "Workload",
    "__version__",
    "backend",
    "benchmark",
    "calibrate",
    "capture",
    "check",
    "check_workload",
    "compile_arithmetic",
    "deploy",
    "diagnose",
    "diagnose_gpu",
    "evaluate",
    "export",
    "export_float",
    "export_workload",
    "list_keys",
    "list_plugins",
    "load",
    "load_checkpoint",
    "load_workload",
    "make_plan",
    "measure_latency",
    "open_runtime",
    "plan_cluster",
    "plan_workload",
    "predict",
    "prepare",
    "profile",
    "quantize",
    "quantize_folder",
    "quantize_workload",
    "quantizers_of",
    "report",
    "rerun_rows",
    "run_grid",
    "save_checkpoint",
    "score",
    "score_operators",
    "score_workload",
    "set_mode",
    "strip",
    "suggest",
    "tune",
    "tune_workload",
    "weight_costs",
]
