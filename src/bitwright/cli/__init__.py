"""The command line: thin, each verb calls public functions."""

# Importing a verb's module registers it; their order is that of --help.
from bitwright.cli import (  # noqa: I001
    quickstart,  # noqa: F401
    inspecting,  # noqa: F401
    plan,  # noqa: F401
    quantize,  # noqa: F401
    score,  # noqa: F401
    tune,  # noqa: F401
    train,  # noqa: F401
    profile,  # noqa: F401
    predict,  # noqa: F401
    deploy,  # noqa: F401
    export,  # noqa: F401
    check,  # noqa: F401
    bench,  # noqa: F401
    report,  # noqa: F401
    leaderboard,  # noqa: F401
    listing,  # noqa: F401
    doctor,  # noqa: F401
)
from bitwright.cli.app import app

__all__ = ["app", "main"]


def main() -> None:
    """Entry point of the command `bitwright`."""
    app(prog_name="bitwright")
