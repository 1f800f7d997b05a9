"""The application. A verb's module is imported when the verb is used, so that help and completion are fast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from bitwright.cli.verb import REGISTERED
from bitwright.core import __version__

#: Name → module, and the line of --help.
VERBS: dict[str, tuple[str, str]] = {
    "quickstart": ("quickstart", "Train a small model, quantize it and write a report. Needs no download."),
    "inspect": ("inspect", "Show the operators of a model."),
    "plan": ("plan", "Choose a number format for each site of a model."),
    "plan-cluster": ("plan_cluster", "Choose precisions and batches for a cluster of unequal devices."),
    "quantize": ("quantize", "Quantize a model: plan, calibrate, export, check, report."),
    "score": ("score", "Measure the accuracy cost of each quantized site."),
    "tune": ("tune", "Search for the fastest model that meets an accuracy goal."),
    "train": ("train", "Train a model in float, or with quantizers (QAT)."),
    "profile": ("profile", "Measure the operators of a training step on this device."),
    "predict": ("predict", "Predict the time of a training step on a cluster."),
    "deploy": ("deploy", "Export a trained model, check it, and measure it on the real runtime."),
    "export": ("export", "Write the artefact of a quantized model or of the float model."),
    "check": ("check", "Compare an artefact on the real runtime with the simulated model."),
    "bench": ("bench", "Compare runtimes: latency, accuracy, size."),
    "grid": ("grid", "Train a grid of algorithms, backends and bit widths; make a leaderboard."),
    "report": ("report", "Write one page from several runs."),
    "list": ("list", "List quantizers, observers, backends, runtimes and other plugins."),
    "doctor": ("doctor", "Show which runtimes, kernels and tools work on this machine."),
}
#: The verbs of a group.
GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "grid": {
        "run": ("grid", "Run the rows of a grid that are not finished, and make the leaderboard."),
        "show": ("grid", "Show the finished rows of a grid."),
        "rerun": ("grid", "Run rows of a leaderboard again and compare the results."),
        "leaderboard": ("grid", "Write the leaderboard as an HTML page."),
    },
}


class LazyVerb(TyperCommand):
    """A verb that is imported when it is called, or when its options are completed."""

    def __init__(self, *, module: str, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.module = module

    def real(self) -> Any:
        """The command of the verb's module."""
        import_module(f"bitwright.cli.{self.module}")
        return REGISTERED[str(self.name)]()

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse the arguments by the real command."""
        return self.real().make_context(info_name, args, parent=parent, **extra)


class Verbs(TyperGroup):
    """A group of verbs, none of them imported."""

    def __init__(self, *, verbs: Mapping[str, tuple[str, str]] = VERBS, prefix: str = "", **settings: Any) -> None:
        super().__init__(**{"no_args_is_help": True, "rich_markup_mode": None, **settings})
        for name, (module, summary) in verbs.items():
            full = f"{prefix}{name}"
            words = {"name": full, "help": summary, "short_help": summary}
            inner = GROUPS.get(full)
            self.commands[name] = (
                LazyVerb(module=module, **words) if inner is None else Verbs(verbs=inner, prefix=f"{full} ", **words)
            )

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write whole sentences; click shortens them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help or "") for name, command in self.commands.items()])


app = typer.Typer(
    name="bitwright",
    cls=Verbs,
    help="Choose the numeric precision of every operator of a PyTorch model.",
    epilog="Start with: bitwright quickstart. The --help of each command has examples.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # `verb` prints all errors
    rich_markup_mode=None,  # boxes are too wide for a terminal with 80 columns
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bitwright {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def all_commands() -> Iterator[tuple[str, Any]]:
    """All verbs with their full names and click commands, for the documentation and tests; imports all of them."""
    for name, (module, _) in VERBS.items():
        for inner, (own, _) in GROUPS.get(name, {"": (module, "")}).items():
            full = f"{name} {inner}".strip()
            yield full, LazyVerb(name=full, module=own).real()
