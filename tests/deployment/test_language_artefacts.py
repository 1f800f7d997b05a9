"""Artefacts of language models: what other tools load computes what the simulation computes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems import raises_problem
from torch import Tensor, nn

import bitwright as bw
from bitwright.deployment.artefacts.compressed_tensors import packed

transformers = pytest.importorskip("transformers")


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 96,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "use_cache": False,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | options))).eval()


def text() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [{"input_ids": torch.randint(0, 96, (2, 16), generator=generator)} for _ in range(2)]


def quantized(model: Any, **options: Any) -> bw.Quantized:
    options = {"weights": "int4/group32", "activations": "float", **options}
    return bw.quantize(model, text(), measure=False, **options)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("columns", [32, 40, 100])
def test_codes_are_packed_densely_from_the_lowest_bit(bits: int, columns: int) -> None:
    codes = torch.randint(0, 2**bits, (3, columns), generator=torch.Generator().manual_seed(bits))
    words = packed(codes, bits).numpy().view(np.uint32)
    assert words.shape == (3, -(-columns * bits // 32))
    stream = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : columns * bits]
    found = (stream.reshape(3, columns, bits) * (1 << np.arange(bits))).sum(-1)
    np.testing.assert_array_equal(found, codes.numpy())


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")  # of transformers, with dequantize
@pytest.mark.parametrize(
    "weights",
    [
        "int4/group32",
        "int4/group32/sym",
        "uint4/group32/asym",
        "int4/group16/asym",
        "int8/channel/sym",
        "int3/channel/sym",
    ],
)
def test_transformers_reproduces_the_logits(weights: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    backend = "onnxruntime" if weights.startswith(("int4", "int8")) else "academic"
    first_last = None if backend == "onnxruntime" else int(weights.split("/")[0][-1])
    made = quantized(llama(), weights=weights, backend=backend, keep_float="lm_head", first_last_bits=first_last)
    artefact = made.export(tmp_path / "out", artefact="compressed-tensors")
    assert (artefact.kind, artefact.weights) == ("compressed-tensors", 14)
    assert artefact.bytes == sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    # transformers 5.23 expects unpacked zero points unless it dequantizes while it loads
    how = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
    options = how if weights.endswith("asym") else {}  # an explicit None would leave the weights out
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", **options).eval()
    for batch in text():
        with torch.no_grad():
            torch.testing.assert_close(loaded(**batch).logits, made.model(**batch).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("weights", "kind"),
    [
        ("int4/group32", "Q4_0"),
        ("int4/group32/sym", "Q4_0"),
        ("uint4/group32/asym", "Q4_1"),
        ("int4/group32/asym", "Q4_1"),
        ("int8/group32", "Q8_0"),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_gguf_files_have_the_weights(weights: str, kind: str, tied: bool, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    made = quantized(llama(tie_word_embeddings=tied), weights=weights, keep_float="lm_head")
    artefact = made.export(tmp_path / "model.gguf", artefact="gguf")
    reader = gguf.GGUFReader(artefact.path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert ("output.weight" in tensors) != tied
    down = tensors["blk.1.ffn_down.weight"]
    assert down.tensor_type.name == kind
    linear = made.model.model.layers[1].mlp.down_proj
    expected = bw.quantizers_of(made.model)["model.layers.1.mlp.down_proj:weight"](linear.weight).detach()
    found = gguf.quants.dequantize(down.data, down.tensor_type)
    np.testing.assert_allclose(found, expected.numpy(), rtol=2e-3, atol=2e-4)  # scales are float16


@pytest.mark.parametrize("weights", ["int4/group32", "uint4/group32/asym", "int8/group32"])
def test_transformers_loads_gguf_files(weights: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    made = quantized(llama(), weights=weights, keep_float="lm_head")
    made.export(tmp_path / "model.gguf", artefact="gguf")
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf").eval()
    with torch.no_grad():
        found, wanted = loaded(**text()[0]).logits, made.model(**text()[0]).logits
    assert float((found - wanted).norm() / wanted.norm()) < 2e-3
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))


def test_llama_cpp_loads_gguf_files(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("xllamacpp")
    path = tmp_path / "model.gguf"
    quantized(llama(), keep_float="lm_head").export(path, artefact="gguf")
    code = (
        "import os, sys, xllamacpp\n"
        "params = xllamacpp.CommonParams()\n"
        "params.model.path, params.n_ctx, params.warmup = sys.argv[1], 64, False\n"
        "server = xllamacpp.Server(params)\n"
        "print('loaded', flush=True)\n"
        "os._exit(0)  # the server's threads don't end\n"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=120)
    assert "loaded" in ran.stdout, ran.stderr[-2000:]


def test_gguf_refuses_other_blocks_and_models(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    with raises_problem("unsupported-format", where="model.layers.0.mlp.up_proj:weight", mentions="int4/group32"):
        quantized(llama(), weights="int4/group16", keep_float="lm_head").export(tmp_path / "m.gguf", artefact="gguf")
    model = llama(hidden_act="gelu")
    with raises_problem("unsupported-model", where="hidden_act"):
        quantized(model, keep_float="lm_head").export(tmp_path / "m.gguf", artefact="gguf")
    assert not list(tmp_path.iterdir())


def test_mixed_formats_and_tied_embeddings(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    model = llama(tie_word_embeddings=True)
    graph = bw.capture(model, text()[0])
    costs = bw.weight_costs(model, text(), formats=["int4/group32", "int8/group32"], graph=graph, keep_float="lm_head")
    plan = bw.make_plan(graph, bits=6, costs=costs, keep_float="lm_head")
    made = bw.quantize(model, text(), plan=plan, measure=False)
    made.export(tmp_path / "out", artefact="compressed-tensors")
    known = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert sorted(group["weights"]["num_bits"] for group in known["config_groups"].values()) == [4, 8]
    assert known["ignore"] == ["lm_head"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(**text()[0]).logits, made.model(**text()[0]).logits, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_stored_is_named(tmp_path: Path) -> None:
    with raises_problem("unsupported-format", mentions="model.layers.0.input_layernorm/mul#1:output"):
        made = bw.quantize(llama(), text(), activations="uint8/tensor/asym", measure=False)
        made.export(tmp_path / "a", artefact="compressed-tensors")
    with raises_problem("unsupported-format", where="lm_head:weight"):
        quantized(llama(tie_word_embeddings=True)).export(tmp_path / "b", artefact="compressed-tensors")
    net = nn.Sequential(nn.Linear(32, 8)).eval()
    with raises_problem("no-model-config"):
        bw.quantize(net, [torch.randn(4, 32)], weights="int4/group32", activations="float").export(
            tmp_path / "c", artefact="compressed-tensors"
        )
    assert not list(tmp_path.iterdir())
