"""`bitwright doctor`: what works on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from bitwright.cli.out import Out
from bitwright.cli.verb import CHECK_FAILED, verb

if TYPE_CHECKING:
    from bitwright.backends import BackendTable
    from bitwright.profiling.microbenchmarks import KernelSpeed

#: Tried with torch 2.13 and Python 3.11; the whole story is in docs/runtimes.md.
NOT_OFFERED = {
    "tvm": {
        "tried": "apache-tvm 0.27.0.post1",
        "why": "reads QDQ files, but runs their convolutions in float32: no integer lowering",
    },
    "litert": {
        "tried": "ai-edge-litert 2.3.0, litert-torch 0.10.0",
        "why": "its converter refuses integer weights, or leaves convolutions in float between Q and DQ",
    },
}


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
    from bitwright.cli import examining
    from bitwright.deployment import available_runtimes
    from bitwright.profiling.microbenchmarks import BATCH, WIDTH, kernel_speeds
    from bitwright.reports import environment

    found = environment()
    missing = available_runtimes()
    with out.steps("probing the runtimes"):
        runtimes = {name: _runtime(name, reason, found.packages) for name, reason in missing.items()}
    with out.steps("timing the kernels"):
        kernels = kernel_speeds()
    tools, extras = examining.tools(), examining.extras()
    out.data(
        {
            "environment": found.model_dump(),
            "runtimes": runtimes,
            "kernels": [speed.to_dict() for speed in kernels],
            "tools": tools,
            "extras": extras,
            "not_offered": NOT_OFFERED,
        }
    )
    out.table(
        ["", ""],
        [
            ("bitwright", found.bitwright),
            ("python", found.python),
            ("machine", f"{found.cpu} ({found.platform})"),
            ("CPU features", ", ".join(found.cpu_features) or "none known"),
            ("cores, threads", f"{found.cores} cores, torch uses {found.threads}"),
            *found.packages.items(),
        ],
        title="Environment",
    )
    out.table(
        ["runtime", "version", "u8 × s8", "what follows"],
        [
            (
                name,
                str(facts["version"] or facts["problem"]),
                _exactness(facts["saturates"]),
                facts["follows"],
            )
            for name, facts in runtimes.items()
        ],
        title="Runtimes",
    )
    out.table(
        ["kernel", "works here", "#time of FP32"],
        [(speed.kernel, speed.problem or "yes", _speed(speed)) for speed in kernels],
        title=f"Kernels, in a linear layer of {WIDTH} × {WIDTH}, batch {BATCH}, forward and backward, CPU time",
    )
    out.table(
        ["tool", "found", "for", "fix"],
        [(row["tool"], row["found"] or "no", row["for"], row["fix"] or "") for row in tools],
        title="Tools and data",
    )
    out.table(
        ["extra", "found", "missing", "install"],
        [
            (
                row["extra"],
                ", ".join(f"{package} {version}" for package, version in row["found"].items()) or "–",
                ", ".join(row["missing"]) or "–",
                row["fix"] or "all is there",
            )
            for row in extras
        ],
        title="Extras",
    )
    out.table(
        ["not offered", "tried", "why"],
        [(name, facts["tried"], facts["why"]) for name, facts in NOT_OFFERED.items()],
        title="Runtimes that Bitwright can't use (docs/runtimes.md)",
    )
    if all(reason is not None for reason in missing.values()):
        out.error("no runtime can be used: artefacts can be written, but not checked", [])
        raise typer.Exit(CHECK_FAILED)


def _speed(speed: KernelSpeed) -> str:
    if speed.of_float is None:
        return speed.doubt or ""
    return f"{speed.of_float:.2f}" + (": slower" if speed.of_float > 1.05 else "")


def _exactness(saturating: bool | None) -> str:
    return "" if saturating is None else "saturates" if saturating else "exact"


def _runtime(name: str, problem: str | None, packages: dict[str, str]) -> dict[str, Any]:
    if problem is not None:
        return {
            "version": None,
            "problem": problem,
            "saturates": None,
            "follows": "artefacts aren't checked on it",
        }
    from bitwright.backends import backend as find_backend
    from bitwright.core.registry import BACKENDS
    from bitwright.deployment import saturates

    lossy = saturates(name)
    tables = [find_backend(backend) for backend in BACKENDS.names()]
    return {
        "version": packages.get("torch" if name == "inductor" else name),
        "problem": None,
        "saturates": lossy,
        "follows": _consequence(lossy, [table for table in tables if table.runtime == name]),
    }


def _consequence(lossy: bool, tables: list[BackendTable]) -> str:
    guarded = [table for table in tables if table.guard is not None]
    if not lossy:
        return "8-bit weights use their full range"
    if not guarded:
        return "8-bit sums may saturate: prefer another runtime"
    names = ", ".join(f"{table.name} ({table.guard.name})" for table in guarded if table.guard is not None)
    return f"plans guard 8-bit weights for {names}; use --no-saturating if another machine runs the model"
