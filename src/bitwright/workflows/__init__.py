"""Workflows with a workload: quantize, score, tune, export, check and deploy it."""

from bitwright.workflows.artefacts import ExportedFile, check_workload, export_workload
from bitwright.workflows.data import calibration, labelled, probes
from bitwright.workflows.deployment import Deployment, accuracy, deploy, finish, quantize_workload, usable_runtimes
from bitwright.workflows.sensitivity import WorkloadScores, score_workload, score_workload_operators
from bitwright.workflows.tuning import tune_workload

__all__ = [
    "Deployment",
    "ExportedFile",
    "WorkloadScores",
    "accuracy",
    "calibration",
    "check_workload",
    "deploy",
    "export_workload",
    "finish",
    "labelled",
    "probes",
    "quantize_workload",
    "score_workload",
    "score_workload_operators",
    "tune_workload",
    "usable_runtimes",
]
