"""Workflows with a workload: quantize, score, tune, export, check and deploy it."""

from bitwright.workflows.artefacts import ExportedFile, check_workload, export_workload
from bitwright.workflows.deployment import Deployment, deploy
from bitwright.workflows.mqbench import MqbenchRun, quantize_mqbench
from bitwright.workflows.quantization import (
    WorkloadPlan,
    plan_workload,
    quantize_workload,
    run_quickstart,
    tune_workload,
)
from bitwright.workflows.sensitivity import WorkloadScores, score_workload, score_workload_operators

__all__ = [
    "Deployment",
    "ExportedFile",
    "MqbenchRun",
    "WorkloadPlan",
    "WorkloadScores",
    "check_workload",
    "deploy",
    "export_workload",
    "plan_workload",
    "quantize_mqbench",
    "quantize_workload",
    "run_quickstart",
    "score_workload",
    "score_workload_operators",
    "tune_workload",
]
