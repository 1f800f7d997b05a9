"""The whole road on every architecture of tests/breadth: `python benchmarks/breadth.py [name …]`.

Each architecture runs in a process of its own, two at a time, one thread each. With names only those run
anew; the others' rows stay as they were in results/breadth.json.

`--automatic [type …]` runs the model types of tests/breadth/automatic.py instead: results/breadth_automatic.md.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
import transformers
from common import RESULTS, environment, save

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/breadth"))
from architectures import ARCHITECTURES
from automatic import AUTOMATIC
from journey import arrive, travel

JOBS, MINUTES = 2, 10
KNOWN = RESULTS / "breadth.json"
LONG = "scaled_dot_product_attention"


def run(name: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    architecture = next(a for a in ARCHITECTURES if a.name == name)
    with tempfile.TemporaryDirectory() as folder:
        try:
            row = asdict(travel(architecture, Path(folder)))
            return {key: None if value == inf else value for key, value in row.items()}  # JSON has no infinity
        except Exception as error:  # what fails is a row of the table, too
            why = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            return {"name": name, "family": architecture.family, "error": why}


def run_automatic(kind: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        try:
            row = asdict(arrive(kind, Path(folder)))
            return {key: None if value == inf else value for key, value in row.items()}
        except Exception as error:
            return {"name": kind, "error": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}


def automatic_line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"| {row['name']} | fails | | | | | {row['error']} |"
    exact = "exact" if row["runtime_db"] is None else f"{row['runtime_db']:.1f}"
    batch = "yes" if row["dynamic_batch"] else "no"
    return (
        f"| {row['name']} | {row['model']} | {row['weights']} | {row['activations']} | {exact} | {batch} "
        f"| {row['seconds']:.0f} |"
    )


def automatic(wanted: list[str]) -> None:
    known = RESULTS / "breadth_automatic.json"
    rows: dict[str, dict[str, Any]] = {}
    if wanted and known.is_file():
        rows = {row["name"]: row for row in json.loads(known.read_text())["rows"]}
    with multiprocessing.get_context("fork").Pool(JOBS, maxtasksperchild=1) as pool:
        for row in pool.imap_unordered(run_automatic, wanted or list(AUTOMATIC)):
            rows[row["name"]] = row
            print(automatic_line(row), flush=True)
    ordered = [rows[name] for name in AUTOMATIC if name in rows]
    passed = sum("error" not in row for row in ordered)
    facts = environment(
        transformers=transformers.__version__, onnx=onnx.__version__, onnxruntime=onnxruntime.__version__
    )
    table = [
        "# Breadth: model types of transformers, built automatically",
        "",
        f"{passed} of {len(ordered)} model types that were run (of {len(AUTOMATIC)} in the list) reach parity on ONNX "
        "Runtime. Settings come from one rule per field of the configuration; mixtures of experts run their default "
        "implementation. runtime: ONNX Runtime against simulated, the worst output. Seconds are of a shared machine.",
        "",
        "| type | model | integer weights | Q/DQ pairs | runtime dB | dynamic batch | seconds |",
        "|---|---|---:|---:|---:|---|---:|",
        *map(automatic_line, ordered),
    ]
    save("breadth_automatic", {"environment": facts, "rows": ordered}, "\n".join(table))


def remark(row: dict[str, Any]) -> str:
    reasons = Counter(why for site, why in row["left_float"].items() if LONG not in site)
    found = [f"{count} × {why}" for why, count in reasons.items()]
    if any(LONG in site for site in row["left_float"]):
        found.append(f"fused attention float ({1 - row['share_of_all']:.0%} of all MACs)")
    if row["simulated_db"] < 15:
        found.append("random network that amplifies noise")
    return "; ".join(found)


def line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"| {row['name']} | {row['family']} | fails | | | | | | {row['error']} |"
    exact = "exact" if row["runtime_db"] is None else f"{row['runtime_db']:.1f}"
    return (
        f"| {row['name']} | {row['family']} | {row['share']:.1%} | {row['simulated_db']:.1f} | {exact} "
        f"| {row['integer_kernels']} of {row['planned_kernels']} | {'yes' if row['dynamic_batch'] else 'no'} "
        f"| {row['seconds']:.0f} | {remark(row)} |"
    )


def main() -> None:
    if sys.argv[1:2] == ["--automatic"]:
        automatic(sys.argv[2:])
        return
    wanted = sys.argv[1:] or [a.name for a in ARCHITECTURES]
    rows: dict[str, dict[str, Any]] = {}
    if sys.argv[1:] and KNOWN.is_file():
        rows = {row["name"]: row for row in json.loads(KNOWN.read_text())["rows"]}
    with multiprocessing.get_context("fork").Pool(JOBS, maxtasksperchild=1) as pool:
        jobs = {name: pool.apply_async(run, (name,)) for name in wanted}
        for name, job in jobs.items():
            rows[name] = job.get(timeout=60 * MINUTES * len(wanted))
            print(line(rows[name]), flush=True)
    ordered = [rows[a.name] for a in ARCHITECTURES if a.name in rows]
    passed = Counter(row["family"] for row in ordered if "error" not in row)
    facts = environment(
        transformers=transformers.__version__, onnx=onnx.__version__, onnxruntime=onnxruntime.__version__
    )
    table = [
        "# Breadth: architectures of transformers, built small",
        "",
        f"{passed.total()} of {len(ordered)} go all the way: "
        + ", ".join(f"{count} {family}" for family, count in passed.items())
        + ". Capture, plan, prepare, calibrate, backward, export, parity on ONNX Runtime, strip.",
        "",
        "MACs: of linears, convolutions and matrix products, what the plan quantizes. simulated: against "
        "float, the worst output. runtime: ONNX Runtime against simulated, the worst output. kernels: integer "
        "kernels in ONNX Runtime's optimized graph, of the convolutions and matrix products that the artefact "
        "quantizes. Models are random: their SQNR says that the arithmetic is right, not what a trained model "
        "would lose. Seconds are of a shared machine.",
        "",
        "| name | family | MACs | simulated dB | runtime dB | kernels | dynamic batch | seconds | remark |",
        "|---|---|---:|---:|---:|---:|---|---:|---|",
        *map(line, ordered),
    ]
    save("breadth", {"environment": facts, "rows": ordered}, "\n".join(table))


if __name__ == "__main__":
    main()
