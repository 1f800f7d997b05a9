"""The command line: thin, each verb calls public functions."""

# Importing a verb's module registers it; their order is that of --help.
from bitwright.cli import quickstart, inspecting, plan, quantize, export, check, listing, doctor  # noqa: F401, I001
from bitwright.cli.app import app

__all__ = ["app", "main"]


def main() -> None:
    """Entry point of the command `bitwright`."""
    app(prog_name="bitwright")
