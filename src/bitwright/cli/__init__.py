"""The command line: thin, each verb calls public functions."""

from bitwright.cli.app import app
from bitwright.cli.signals import starting

__all__ = ["VERBS", "app", "main"]

#: Verbs and their modules, in the order of --help. After a change of a verb's options or words: `make verbs`.
VERBS = {
    "quickstart": "quickstart",
    "inspect": "inspecting",
    "plan": "plan",
    "plan-cluster": "plan_cluster",
    "quantize": "quantize",
    "score": "score",
    "tune": "tune",
    "train": "train",
    "profile": "profile",
    "predict": "predict",
    "deploy": "deploy",
    "export": "export",
    "check": "check",
    "bench": "bench",
    "report": "report",
    "leaderboard": "leaderboard",
    "list": "listing",
    "doctor": "doctor",
}


def main() -> None:
    """Entry point of the command `bitwright`."""
    with starting():
        app(prog_name="bitwright")
