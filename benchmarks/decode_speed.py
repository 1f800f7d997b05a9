"""Prefill and decode speed: our w4a16 ONNX file against ONNX Runtime's own MatMulNBits export, and other runtimes.

    python benchmarks/decode_speed.py [--layers 30] [--prompt 128] [--tokens 32] [--runs 5] [--all]

A Llama of the size of SmolLM2-135M with random weights (speed doesn't depend on them). The peer is
`MatMulNBitsQuantizer` (4 bits, blocks of 32) on the float decoder that we export, with the head at 4 bits as well; ours
is written with head_bits=4 for the same work. Both run in turns in one process with one thread. `--all` adds OpenVINO,
llama.cpp (GGUF) and transformers (compressed-tensors), with the memory that each adds to a process.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import environment, save
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from transformers import LlamaConfig, LlamaForCausalLM

import bitwright as bw
from bitwright.deployment.measurement import measure_generation, peak_memory

OTHERS = {"openvino": "ours/model.onnx", "llamacpp": "m.gguf", "transformers": "packed"}


def build(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    config = LlamaConfig(vocab_size=49152, num_hidden_layers=layers, max_position_embeddings=2048, **sizes)
    model = LlamaForCausalLM(config).eval()
    model.config.use_cache = False
    return model


def write_peer(source: Path, path: Path) -> None:
    import onnx

    quantizer = MatMulNBitsQuantizer(onnx.load(source), block_size=32, is_symmetric=True, accuracy_level=4)
    quantizer.process()
    quantizer.model.save_model_to_file(str(path), use_external_data_format=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, value in (("layers", 30), ("prompt", 128), ("tokens", 32), ("runs", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--all", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = build(given.layers)
    ids = torch.randint(49152, (1, given.prompt), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source = bw.export_float(model, folder / "float", {"input_ids": ids})
        (folder / "peer").mkdir()
        write_peer(source, folder / "peer" / "model.onnx")
        quantized = bw.quantize(model, [{"input_ids": ids}], "w4a16", group=32, head_bits=4, measure=False)
        quantized.export(folder / "ours")
        files = {
            "ours": ("onnxruntime", folder / "ours" / "model.onnx"),
            "MatMulNBitsQuantizer": ("onnxruntime", folder / "peer" / "model.onnx"),
            "float32": ("onnxruntime", source),
        }
        if given.all:
            quantized.export(folder / "m.gguf")
            quantized.export(folder / "packed", artefact="compressed-tensors")
            files |= {f"ours, {name}": (name, folder / path) for name, path in OTHERS.items()}
        opened = {name: bw.open_runtime(runtime, path, threads=1) for name, (runtime, path) in files.items()}
        speeds = measure_generation(opened, ids.numpy(), tokens=given.tokens, runs=given.runs)
        feeds = {name: runtime.feed(ids) for name, runtime in opened.items()}
        del opened
        rows: dict[str, dict[str, Any]] = {}
        for name, (runtime, path) in files.items():
            speed = speeds[name]
            rows[name] = {
                "prefill_tokens_per_s": round(speed.prefill, 1),
                "decode_tokens_per_s": round(speed.decode, 2),
                "decode_spread": round(speed.spread, 3),
                "memory_mb": round(peak_memory(runtime, path, feeds[name]) / 1e6),
            }
    peer = rows["MatMulNBitsQuantizer"]
    lines = [
        f"# Decoding a Llama of {given.layers} layers like SmolLM2-135M, {given.prompt} tokens of prompt, one thread\n",
        "| artefact | prefill, tokens/s | of the peer | decode, tokens/s | of the peer | memory, MB |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        shares = [f"{row[key] / peer[key]:.2f}×" for key in ("prefill_tokens_per_s", "decode_tokens_per_s")]
        lines.append(
            f"| {name} | {row['prefill_tokens_per_s']} | {shares[0]} | {row['decode_tokens_per_s']} | {shares[1]} "
            f"| {row['memory_mb']} |"
        )
    facts = environment(layers=given.layers, prompt=given.prompt, tokens=given.tokens, runs=given.runs)
    save("decode_speed", {"environment": facts, "rows": rows}, "\n".join(lines))


if __name__ == "__main__":
    main()
