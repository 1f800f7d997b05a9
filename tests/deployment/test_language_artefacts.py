"""Artefacts of language models: what other tools load computes what the simulation computes."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("precision", "options", "layout"),
    [
        ("w4a16", {"group": 32}, "pack-quantized"),
        ("w4a16", {"weights": "int4/group32/sym"}, "pack-quantized"),
        ("w4a16", {"weights": "uint4/group32/asym", "head_bits": 4}, "pack-quantized"),
        ("w4a16", {"weights": "int4/group16/asym", "keep_float": ["lm_head"]}, "pack-quantized"),
        ("w4a16", {"group": 32, "keep_float": ["model.layers.0.mlp.*"]}, "pack-quantized"),
        ("w8a16", {}, "pack-quantized"),
        ("w8a8-dynamic", {}, "mixed-precision"),
        ("w8a8-dynamic", {"activations": "int8/token/sym/dynamic"}, "mixed-precision"),
        ("w4a8-dynamic", {"group": 32}, "pack-quantized"),
        ("fp8", {}, "float-quantized"),
        (None, {"weights": "int3/channel/sym", "activations": "float", "backend": "academic"}, "pack-quantized"),
    ],
)
def test_transformers_reproduces_the_logits(
    precision: str | None, options: dict[str, Any], layout: str, tied: bool, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    made = bw.quantize(llama(tie_word_embeddings=tied), text(), precision, measure=False, **options)
    artefact = made.export(tmp_path / "out", artefact="compressed-tensors")
    assert artefact.kind == "compressed-tensors"
    assert artefact.warnings == ()
    assert artefact.bytes == sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    known = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert known["format"] == layout
    assert known["ignore"] == [name.removesuffix(":weight") for name in floats(made)]
    check = made.check(tmp_path / "out", text())
    assert check.runtime == "transformers"
    assert not check.damages
    assert [output.name for output in check.outputs] == ["logits", "prompt", "decoding"]
    assert min(output.sqnr_db for output in check.outputs) > 100
    if precision in ("w4a16", "w8a16"):  # the same without our runtime
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        for batch in text():
            with torch.no_grad():
                torch.testing.assert_close(loaded(**batch).logits, made.model(**batch).logits, rtol=1e-4, atol=1e-4)


def floats(made: bw.Quantized) -> list[str]:
    """The linear layers that are in float, in the order of the model."""
    sites = bw.quantizers_of(made.model)
    linears = [f"{name}:weight" for name, module in made.model.named_modules() if isinstance(module, nn.Linear)]
    return [site for site in linears if site not in sites]


def test_compressed_tensors_that_transformers_does_not_load_are_reported(tmp_path: Path) -> None:
    made = bw.quantize(llama(), text(), "w4a16", weights="uint4/group32/asym", measure=False)  # the head has 8 bits
    assert [one.code for one in made.export(tmp_path / "out", artefact="compressed-tensors").warnings] == [
        "zero-points-not-loadable"
    ]


def test_a_damaged_folder_fails_the_check(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    made = quantized(llama())
    made.export(tmp_path / "out", artefact="compressed-tensors")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors["model.layers.0.mlp.up_proj.weight_packed"][3, 1] ^= 1
    save_file(tensors, file, metadata=metadata)
    check = made.check(tmp_path / "out", text())
    assert not check.passed
    assert "model.layers.0.mlp.up_proj:weight" in [damage.site for damage in check.damages]
    save_file(tensors, file)
    with safe_open(file, "pt") as opened:
        assert not opened.metadata()
    assert "no-digests" in [one.code for one in made.check(tmp_path / "out", text()).warnings]


def test_activations_of_other_operators_cannot_be_stored(tmp_path: Path) -> None:
    plan = bw.quantize(llama(), text(), "w8a8-dynamic", measure=False).plan
    sites = {name: spec for name, spec in plan.sites.items() if "up_proj" not in name}
    reasons = {**plan.float, "model.layers.0.mlp.up_proj": "a test", "model.layers.1.mlp.up_proj": "a test"}
    made = bw.quantize(llama(), text(), plan=bw.Plan(sites=sites, float=reasons, backend=plan.backend), measure=False)
    with raises_problem("unsupported-format", mentions="model.layers.0.mlp.up_proj"):
        made.export(tmp_path / "out", artefact="compressed-tensors")


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
    net = nn.Sequential(nn.Linear(32, 8)).eval()
    with raises_problem("no-model-config"):
        bw.quantize(net, [torch.randn(4, 32)], weights="int4/group32", activations="float").export(
            tmp_path / "c", artefact="compressed-tensors"
        )
    assert not list(tmp_path.iterdir())
