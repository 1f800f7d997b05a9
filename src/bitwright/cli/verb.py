"""`@verb`: the options that all verbs have, and how errors are printed."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any

import typer

from bitwright.cli.completion import add_completion
from bitwright.cli.out import Out
from bitwright.cli.settings import with_text
from bitwright.core.errors import BitwrightError
from bitwright.core.files import disk_error, written
from bitwright.core.interrupts import Interrupted, Stop, exit_code, signals
from bitwright.core.output_folder import locked_file

Verb = Callable[..., None]
#: The verbs that were imported, by name; each makes its click command.
REGISTERED: dict[str, Callable[[], Any]] = {}

USAGE, INTERNAL = 2, 70
CLOSED = 141  # as a process that SIGPIPE ended

_COMMON: dict[str, tuple[str, str]] = {
    "json": ("--json", "Print the result as JSON to stdout."),
    "quiet": ("--quiet", "Print only errors and the requested result."),
    "debug": ("--debug", "Show the traceback of an error."),
}


def verb(name: str, *, examples: str, writes: Sequence[str] = ()) -> Callable[[Verb], Verb]:
    """Register a function as a verb. Its first argument is an `Out`; the others are command-line arguments.

    `writes` names the arguments with single files that the verb writes. They are locked while it runs, so that a second
    process with the same file fails at once. Verbs that write folders lock these themselves.
    """

    def register(function: Verb) -> Verb:
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        flags = {key: Annotated[bool, typer.Option(flag, help=text)] for key, (flag, text) in _COMMON.items()}
        keyword = inspect.Parameter.KEYWORD_ONLY
        common = [inspect.Parameter(key, keyword, default=False, annotation=kind) for key, kind in flags.items()]
        call, own = with_text(function, own)

        @functools.wraps(function)
        def run(*, json: bool, quiet: bool, debug: bool, **arguments: Any) -> None:
            out = Out(json=json, quiet=quiet)
            with signals(out.note) as stop, _telling(out, stop, debug=debug), ExitStack() as stack:
                for key in writes:
                    if arguments[key] is not None:
                        stack.enter_context(locked_file(arguments[key]))
                call(out, **arguments)

        keywords = [parameter.replace(kind=keyword) for parameter in own]
        parameters = [*keywords, *common]
        for parameter in parameters:
            add_completion(parameter)
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        lines = "\n".join(f"  {line.strip()}" for line in examples.strip().splitlines())
        text = f"{inspect.getdoc(function)}\n\n\b\nExamples:\n{lines}"
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        alone.command(name, help=text)(run)
        REGISTERED[name] = functools.partial(typer.main.get_command, alone)
        return function

    return register


def _tell_interrupt(out: Out, error: BaseException, stop: Stop) -> None:
    """Print the signal, the files that are kept, and how to resume."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    if isinstance(error, Interrupted) and error.kept is not None:
        out.error(str(error), [])
        return
    cause = f"interrupted by {stop.asked}" if stop.received else "interrupted"
    shown = ", ".join(map(str, written[:3])) + (f" and {len(written) - 3} more" if len(written) > 3 else "")
    out.error(f"{cause}: {f'complete files are kept: {shown}' if written else 'nothing was written'}", [])


@contextmanager
def _telling(out: Out, stop: Stop, *, debug: bool) -> Iterator[None]:
    """Print one message for every error and set the exit code."""
    handler = _Notes(out)
    written.clear()
    log = logging.getLogger("bitwright")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except BrokenPipeError:
        # The reader of the pipe has closed it (`| head`): end quietly, and flush nothing into the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(CLOSED) from None
    except (KeyboardInterrupt, Exception, SystemExit) as error:
        if debug:
            out.stderr.print(traceback.format_exc(), end="")
        if isinstance(error, KeyboardInterrupt) or (stop.received and isinstance(error, Exception)):
            _tell_interrupt(out, error, stop)
            raise typer.Exit(exit_code(stop)) from None
        refused = disk_error(error)
        if refused is not None:  # each library has its own error for a full disk
            error = refused
        if isinstance(error, BitwrightError):
            _tell(out, error)
            raise typer.Exit(USAGE) from None
        if isinstance(error, OSError) and error.filename is not None:
            out.error(f"{error.filename}: {error.strerror}", [])
            raise typer.Exit(USAGE) from None
        words = " ".join(str(error).split())
        hint = "" if debug else "; run with --debug for the traceback"
        out.error(f"internal error: {type(error).__name__}: {words}{hint}", [])
        raise typer.Exit(INTERNAL) from None
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _tell(out: Out, error: BitwrightError) -> None:
    """Print an error once per host under torchrun, unless it concerns the data of one rank."""
    rank, local = os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK", "0")
    if local == "0":
        out.error(str(error), error.problems)
    elif error.rank is not None:
        out.stderr.print(f"rank {rank}: {str(error).splitlines()[0]}")


class _Notes(logging.Handler):
    """Print log lines of the library as notes."""

    def __init__(self, out: Out) -> None:
        super().__init__(logging.INFO)
        self.out = out

    def emit(self, record: logging.LogRecord) -> None:
        self.out.note(record.getMessage())
