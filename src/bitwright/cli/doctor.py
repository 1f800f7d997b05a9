"""`bitwright doctor`: what works on this machine."""

from __future__ import annotations

from bitwright.cli.out import Out
from bitwright.cli.verb import verb


@verb(
    "doctor",
    examples="""
    bitwright doctor
    bitwright doctor --json
    """,
)
def doctor(out: Out) -> None:
    """Show which runtimes, kernels, tools, data sets and extras work here, and why the others don't.

    Runtimes are probed for the exactness of 8-bit products; low-precision training kernels are timed against FP32.
    Exits with 1 if no runtime can be used.
    """
    from bitwright.workflows.doctor import diagnose

    with out.progress() as progress:
        diagnosis = diagnose(progress=progress)
    out.show(diagnosis)
