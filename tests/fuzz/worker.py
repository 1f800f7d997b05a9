"""One process of the fuzzer: it takes numbers of cases from stdin, and says on stdout what became of each."""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from formats import FORMATS
from mutations import mutate

from bitwright.core.errors import BitwrightError

SECONDS, MEGABYTES = 2.0, 500
show_traceback = False


class _TooLong(BaseException):
    """More than the time that a case may take."""


def run_case(seeds: Path, seed: str, number: int) -> dict[str, Any]:
    """Mutate one file of a valid folder and read it. Everything depends on `seed` and `number` only."""
    draw = random.Random(f"{seed}:{number}")
    name = list(FORMATS)[number % len(FORMATS)]
    format = FORMATS[name]
    with tempfile.TemporaryDirectory(prefix="bitwright-fuzz-") as temporary:
        folder = Path(temporary) / "case"
        shutil.copytree(seeds / name, folder)
        file = draw.choice(format.mutated)
        mutate(folder / file, draw)
        case = {"number": number, "format": name, "file": file}
        begin = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                format.read(folder)
            outcome = {"outcome": "read"}
        except BitwrightError as error:
            outcome = {"outcome": "refused", "text": len(str(error)), "codes": error.codes[:3]}
            if hidden := _memory_error(error):
                outcome = {"outcome": "too much memory", "error": hidden}
        except _TooLong:
            outcome = {"outcome": "too long", "error": _here()}
        except BaseException as error:  # what the fuzzer looks for
            outcome = {"outcome": "raised", "error": f"{type(error).__name__}: {error}"[:300], "at": _here()}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        return {**case, **outcome, "seconds": round(time.process_time() - begin, 3)}


def _memory_error(error: BaseException | None) -> str | None:
    """A MemoryError behind one of our errors: the file was refused, but only after the limit was reached."""
    while error is not None:
        if isinstance(error, MemoryError):
            return _here()
        error = error.__cause__ or error.__context__
    return None


def _here() -> str:
    """The last lines of ours in the traceback."""
    if show_traceback:
        traceback.print_exc()
    frames = traceback.extract_tb(sys.exc_info()[2])
    ours = [frame for frame in frames if f"{os.sep}bitwright{os.sep}" in frame.filename] or frames
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(ours[-3:]))


def _limit(*_: Any) -> None:
    raise _TooLong


def main(seeds: Path, seed: str) -> None:
    """Answer until stdin ends. A case that needs more memory than allowed gets a MemoryError."""
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGPROF, _limit)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for name, format in FORMATS.items():  # what is imported on first use isn't a case's own memory
        with tempfile.TemporaryDirectory() as temporary:
            shutil.copytree(seeds / name, Path(temporary) / "case")
            format.read(Path(temporary) / "case")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEGABYTES * 10**6
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(run_case(seeds, seed, int(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
