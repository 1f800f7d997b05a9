"""Our `w8a8-dynamic` ONNX files against onnxruntime.quantization.quantize_dynamic: SQNR, accuracy, CPU time.

    BITWRIGHT_DATA=... python benchmarks/dynamic.py [--runs 40] [--models bert minilm] [--layers 6]

Models: BERT-base's encoder with 6 of its 12 layers and random weights, and all-MiniLM-L6-v2 (examples/minilm_dynamic).
All files come from one torch model, and run on ONNX Runtime with one thread. Sessions take turns in one process; ratios
are medians of the ratios of CPU times within a round, relative to float. The benchmark runs twice: with all the
instructions of this CPU, and in a process that sees AVX2 only (avx2_only.c, compiled here and preloaded: x86 Linux with
a C compiler; AMD's CPUs can't hide instructions). `--emulate` runs the files in QEMU (qemu-x86_64, 7.2 or later) on a
CPU with AVX2, for SQNR and accuracy of two texts or pairs, and adds these rows to the results of the last run.
SQNR is that of the last hidden states against float in torch. Accuracy: `--batches` batches of 16 pairs of MRPC dev for
MiniLM; for random weights, how often the largest of 100 outputs is that of float.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnxruntime
import torch
from common import RESULTS, environment, save
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import Tensor, nn

import bitwright as bw
from bitwright.deployment import saturates

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples" / "minilm_dynamic"))
OURS = {"ours, per token": "int8/token/sym/dynamic", "ours, per tensor": "uint8/tensor/asym/dynamic"}
PEERS: dict[str, dict[str, Any]] = {
    "ORT": {},
    "ORT, per channel": {"per_channel": True},
    "ORT, uint8": {"weight_type": QuantType.QUInt8},
    "ORT, uint8, per channel": {"weight_type": QuantType.QUInt8, "per_channel": True},
    "ORT, reduced range, per channel": {"per_channel": True, "reduce_range": True},
}
TITLES = {"bert": "BERT-base, {} layers", "minilm": "all-MiniLM-L6-v2"}
LENGTHS = {"bert": 128, "minilm": 48}  # tokens
BATCHES = (1, 8)


class Encoder(nn.Module):
    """The last hidden states of an encoder. Token 0 is padding."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor) -> Tensor:
        """The last hidden states."""
        states: Tensor = self.encoder(input_ids=ids, attention_mask=(ids != 0).float())[0]
        return states


def bert(layers: int) -> nn.Module:
    """BERT-base's encoder with fewer layers and random weights."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(num_hidden_layers=layers, attn_implementation="eager", return_dict=False)
    return BertModel(config, add_pooling_layer=False).eval()


def build(
    name: str, folder: Path, count: int, layers: int, size: int | None = None, guards: tuple[bool | None, ...] = (None,)
) -> dict[str, Any]:
    """All files of one model, with the inputs, the float outputs and the labels for the accuracy.

    `size`: texts, or pairs of texts, of each batch. `guards`: whether our weights are guarded against saturating sums;
    None: if this CPU needs it.
    """
    torch.manual_seed(1)
    task: Any = None
    if name == "minilm":
        from workload import minilm, mrpc  # needs the package with its weights

        task = mrpc()
    model = Encoder(bert(layers) if task is None else minilm()).eval()
    if task is None:
        batches = [torch.randint(1, 30000, (size or 4, LENGTHS[name])) for _ in range(min(count, 4))]
        pairs = []
    else:
        pairs = [(tokens[:size], labels[:size]) for tokens, labels in itertools.islice(task.evaluation(), count)]
        batches = [tokens.flatten(0, 1) for tokens, _ in pairs]
    with torch.no_grad():
        expected = [model(ids).numpy() for ids in batches]
    files = {"float": bw.export_float(model, folder / "float.onnx", batches[0])}
    prepared = folder / "prepared.onnx"
    quant_pre_process(str(files["float"]), str(prepared))
    for label, options in PEERS.items():
        files[label] = folder / f"{len(files)}.onnx"
        quantize_dynamic(str(prepared), str(files[label]), **options)
    for (label, activations), guard in itertools.product(OURS.items(), guards):
        quantized = bw.quantize(model, batches[:1], activations=activations, saturating=guard)
        label += ", without the guard" if guard is False else ""
        files[label] = quantized.export(folder / f"{len(files)}.onnx").path
        bw.strip(model)
    head = np.random.default_rng(0).standard_normal((expected[0].shape[-1], 100)).astype(np.float32)

    def accuracy(outputs: list[np.ndarray]) -> float:
        if task is None:
            both = zip(outputs, expected, strict=True)
            return 100 * float(np.mean([(a @ head).argmax(-1) == (b @ head).argmax(-1) for a, b in both]))
        right = []
        for states, (tokens, labels) in zip(outputs, pairs, strict=True):
            task.model.encoder = _Known(torch.from_numpy(states))
            right.append((task.model(tokens).argmax(-1) == labels).float())
        return 100 * float(torch.cat(right).mean())

    return {"files": files, "batches": batches, "expected": expected, "accuracy": accuracy}


class _Known(nn.Module):
    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states

    def forward(self, **_: Tensor) -> tuple[Tensor]:
        """The states that a runtime computed."""
        return (self.states,)


def measure(name: str, runs: int, batches: int, layers: int) -> dict[str, dict[str, float]]:
    """The rows of one model on this CPU."""
    with tempfile.TemporaryDirectory() as folder:
        built = build(name, Path(folder), batches, layers)
        sessions = {label: _session(path) for label, path in built["files"].items()}
        feed = next(iter(sessions.values())).get_inputs()[0].name
        rows: dict[str, dict[str, float]] = {}
        for label, session in sessions.items():
            outputs = [session.run(None, {feed: ids.numpy()})[0] for ids in built["batches"]]
            rows[label] = quality(built, label, outputs)
        for count in BATCHES:
            ids = np.random.default_rng(0).integers(1, 30000, (count, LENGTHS[name]))
            times = _times({label: partial(s.run, None, {feed: ids}) for label, s in sessions.items()}, runs)
            for label, found in times.items():
                rows[label][f"ms batch {count}"] = round(1e3 * median(found), 3)
                rows[label][f"batch {count}"] = round(
                    median(a / b for a, b in zip(found, times["float"], strict=True)), 3
                )
    return rows


def quality(built: dict[str, Any], label: str, outputs: list[np.ndarray]) -> dict[str, float]:
    """What the outputs of a file are worth, and its size."""
    pairs = list(zip(outputs, built["expected"], strict=True))
    noise = sum(float(np.square(a - b, dtype=np.float64).sum()) for a, b in pairs)
    power = sum(float(np.square(b, dtype=np.float64).sum()) for _, b in pairs)
    return {
        "sqnr": round(10 * np.log10(power / max(noise, 1e-30)), 2),
        "accuracy": round(built["accuracy"](outputs), 2),
        "bytes": built["files"][label].stat().st_size,
    }


_RUN = """
import sys, numpy, onnxruntime
folder, options = sys.argv[1], onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
batches = numpy.load(folder + "/batches.npz")
for name in sys.argv[2:]:
    session = onnxruntime.InferenceSession(f"{folder}/{name}", options, providers=["CPUExecutionProvider"])
    feed = session.get_inputs()[0].name
    outputs = {key: session.run(None, {feed: batches[key]})[0] for key in batches.files}
    numpy.savez(f"{folder}/{name}.npz", **outputs)
"""


def emulated(name: str, layers: int) -> dict[str, dict[str, float]]:
    """The rows of one model on an emulated CPU with AVX2, without times."""
    qemu = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")
    if qemu is None:
        raise SystemExit("qemu-x86_64 is not installed (the package qemu-user)")
    with tempfile.TemporaryDirectory() as folder:
        built = build(name, Path(folder), 1, layers, size=2, guards=(True, False))
        np.savez(Path(folder) / "batches.npz", **{str(i): ids.numpy() for i, ids in enumerate(built["batches"])})
        files = {label: path.name for label, path in built["files"].items() if label != "float"}
        command = [qemu, "-cpu", "Haswell-noTSX", sys.executable, "-c", _RUN, folder, *files.values()]
        subprocess.run(command, stderr=subprocess.DEVNULL, check=True)
        rows = {}
        for label, file in files.items():
            outputs = np.load(Path(folder) / f"{file}.npz")
            rows[label] = quality(built, label, [outputs[str(i)] for i in range(len(built["batches"]))])
    return rows


def _session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _times(calls: dict[str, Any], runs: int) -> dict[str, list[float]]:
    """CPU seconds of each call, in rounds of random order."""
    found: dict[str, list[float]] = {label: [] for label in calls}
    order, shuffler = list(calls), random.Random(0)
    for turn in range(runs + 3):
        shuffler.shuffle(order)
        for label in order:
            start = time.process_time()
            calls[label]()
            spent = time.process_time() - start
            if turn >= 3:
                found[label].append(spent)
    return found


def restricted(arguments: list[str], folder: Path) -> dict[str, Any] | None:
    """The same in a process that sees AVX2 only; None without a C compiler, or if this CPU can't hide instructions."""
    library = folder / "avx2_only.so"
    built = subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, HERE / "avx2_only.c"], check=False)
    if built.returncode:
        return None
    variables = {**os.environ, "LD_PRELOAD": str(library), "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(
        [sys.executable, __file__, *arguments, "--one"], env=variables, stdout=subprocess.PIPE, text=True, check=True
    )
    found = dict(json.loads(done.stdout.strip().splitlines()[-1]))
    return found if found["saturates"] else None  # sums of AVX2's instructions saturate


def table(rows: dict[str, dict[str, float]]) -> str:
    """A Markdown table; times relative to float."""
    times = [f"batch {count}" for count in BATCHES]
    lines = ["| file | SQNR, dB | accuracy, % | MB | " + " | ".join(times) + " |"]
    lines.append("|---" * (4 + len(times)) + "|")
    for label, row in rows.items():
        cells = [f"{row[shape]:.2f}×" if shape in row else "–" for shape in times]
        size = row["bytes"] / 1e6
        lines.append(
            f"| {label} | {row['sqnr']:.1f} | {row['accuracy']:.2f} | {size:.1f} | " + " | ".join(cells) + " |"
        )
    return "\n".join(lines)


def measured(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The rows on this CPU, and without its newer instructions if they can be hidden."""
    found = {name: measure(name, options.runs, options.batches, options.layers) for name in options.models}
    results = {"all instructions": found}
    if options.one:
        return results
    with tempfile.TemporaryDirectory() as folder:
        sizes = [f"--runs={options.runs}", f"--batches={options.batches}", f"--layers={options.layers}"]
        narrow = restricted([*sizes, "--models", *options.models], Path(folder))
    return results | ({"AVX2 only": narrow["rows"]} if narrow else {})


def main() -> None:
    """Measure and keep the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--models", nargs="*", default=["bert", "minilm"])
    parser.add_argument("--batches", type=int, default=26, help="of inputs for SQNR and accuracy")
    parser.add_argument("--layers", type=int, default=6, help="of BERT")
    parser.add_argument("--emulate", action="store_true", help="only on an emulated CPU; other rows stay")
    parser.add_argument("--one", action="store_true", help="only in this process, as JSON")
    options = parser.parse_args()
    os.environ.setdefault("BITWRIGHT_DATA", str(HERE.parents[1] / "shared" / "data"))
    torch.set_num_threads(1)
    facts = environment(onnxruntime=onnxruntime.__version__, load=round(os.getloadavg()[0], 1))
    if options.emulate:
        kept = json.loads((RESULTS / "dynamic.json").read_text())
        rows = {name: emulated(name, options.layers) for name in options.models}
        facts, results = {**kept["environment"], "emulated": facts["command"]}, kept["results"]
        results["AVX2, emulated, two texts or pairs"] = results.get("AVX2, emulated, two texts or pairs", {}) | rows
    else:
        results = measured(options)
        if options.one:
            found = {"rows": results["all instructions"], "saturates": saturates("onnxruntime")}
            sys.stdout.write(json.dumps(found) + "\n")
            return
    parts = [
        f"## {TITLES[name].format(options.layers)}, {LENGTHS[name]} tokens, {where}\n\n{table(rows)}"
        for where, models in results.items()
        for name, rows in models.items()
    ]
    text = "# Dynamic INT8 beside quantize_dynamic\n\nCPU times are relative to float: medians of rounds.\n\n"
    save("dynamic", {"environment": facts, "results": results}, text + "\n\n".join(parts))


if __name__ == "__main__":
    main()
