"""The command line: each verb parses its arguments, calls public functions and prints the result."""

from bitwright.cli.app import VERBS, app
from bitwright.core.interrupts import starting

__all__ = ["VERBS", "app", "main"]


def main() -> None:
    """Entry point of the command `bitwright`."""
    with starting():
        app(prog_name="bitwright")
