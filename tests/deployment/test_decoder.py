"""Decoders with a cache: the exported folder generates what the simulated model generates."""

from __future__ import annotations

import json
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from tests.support.language_models import VOCABULARY, make_llama, write_folder, write_text
from tests.support.problems import raises_problem
from torch import Tensor

import bitwright
from bitwright.deployment.decoder import EXACT
from bitwright.deployment.runtimes.decoding import DecoderSession
from bitwright.deployment.runtimes.onnxruntime import OnnxRuntime

pytestmark = pytest.mark.slow
TOKENS = 64


def prompts() -> Tensor:
    return torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[bitwright.Quantized, bitwright.Artefact]:
    folder = tmp_path_factory.mktemp("decoder")
    source = write_folder(folder / "tiny")
    text = write_text(folder / "text.txt")
    workload = bitwright.load_workload(f"hf:{source},text={text},sequence=32,samples=4")
    assert workload.calibration is not None
    batches = list(workload.calibration())
    quantized = bitwright.quantize(workload.model, batches, "w4a16", group=32, example=workload.inputs)
    return quantized, quantized.export(folder / "out", exact=True)


def generated(model: Any, ids: Tensor) -> list[int]:
    with torch.no_grad():
        found = model.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, use_cache=True)
    return found[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


def test_the_file_has_a_cache_and_dynamic_sizes(exported: Any) -> None:
    _, artefact = exported
    assert artefact.dynamic_batch
    assert artefact.inputs[:4] == ("input_ids", "attention_mask", "position_ids", "past_key_values.0.key")
    assert artefact.outputs == ("logits", *(f"present.{n}.{part}" for n in range(2) for part in ("key", "value")))
    graph = onnx.load(artefact.path, load_external_data=False).graph
    shapes = {
        value.name: [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    assert shapes["input_ids"] == ["batch_size", "sequence_length"]
    assert shapes["past_key_values.1.value"] == ["batch_size", 2, "past_sequence_length", 16]
    assert shapes["present.1.value"] == ["batch_size", 2, "total_sequence_length", 16]


def test_all_weights_are_multiplied_as_blocks(exported: Any) -> None:
    quantized, artefact = exported
    kinds = Counter(node.op_type for node in OnnxRuntime(artefact.path)._optimized)
    assert kinds["MatMulNBits"] == artefact.weights == 15
    assert kinds["DequantizeLinear"] == 0
    assert artefact.bytes < 4 * sum(parameter.numel() for parameter in quantized.model.parameters()) / 2


def test_our_loop_generates_the_tokens_of_the_simulated_model(exported: Any) -> None:
    quantized, artefact = exported
    real = OnnxRuntime(artefact.path, config=EXACT)
    assert len(prompts()) > 0
    for prompt in prompts():
        expected = generated(quantized.model, prompt[None])
        assert DecoderSession(real).generate(prompt[None].numpy(), TOKENS)[0].tolist() == expected
        assert len(set(expected)) > 10


def test_samples_of_a_batch_are_independent_of_padding(exported: Any) -> None:
    _, artefact = exported
    real, ids = OnnxRuntime(artefact.path, config=EXACT), prompts().numpy()
    alone = DecoderSession(real).feed(ids[:1, 5:])[0, -1]
    padded, mask = ids.copy(), np.ones_like(ids)
    mask[0, :5] = 0
    session = DecoderSession(real)
    together = session.feed(padded, mask)[0, -1]
    np.testing.assert_allclose(together, alone, atol=1e-3)
    assert session.length == 16


@pytest.mark.skipif(find_spec("onnxruntime_genai") is None, reason="onnxruntime-genai isn't installed")
def test_onnxruntime_genai_generates_the_same_tokens(exported: Any) -> None:
    import onnxruntime_genai as genai

    quantized, artefact = exported
    prompt = prompts()[:1]
    model = genai.Model(str(artefact.path.parent))
    settings = genai.GeneratorParams(model)
    settings.set_search_options(max_length=16 + TOKENS, do_sample=False)
    generator = genai.Generator(model, settings)
    generator.append_tokens(prompt.numpy().astype(np.int32))
    found: list[int] = []
    while len(found) < TOKENS:
        generator.generate_next_token()
        found.append(int(generator.get_next_tokens()[0]))
    assert found == generated(quantized.model, prompt)
    tokenizer = genai.Tokenizer(model)
    assert tokenizer.decode(tokenizer.encode("the of and")) == "the of and"


def test_check_compares_whole_samples_prompts_and_steps(exported: Any) -> None:
    quantized, artefact = exported
    check = quantized.check(artefact.path, [{"input_ids": prompts()[:, :length]} for length in (9, 16)])
    assert check.passed
    assert [output.name for output in check.outputs] == ["logits", "prompt", "decoding"]


def test_check_finds_a_broken_cache(exported: Any, tmp_path: Path) -> None:
    quantized, artefact = exported
    model = onnx.load(artefact.path)
    swapped = {"present.0.key": "present.1.key", "present.1.key": "present.0.key"}
    for node in model.graph.node:
        for side in (node.input, node.output):
            side[:] = [swapped.get(name, name) for name in side]
    onnx.save(model, tmp_path / "broken.onnx")
    check = quantized.check(tmp_path / "broken.onnx", [{"input_ids": prompts()}])
    assert [output.name for output in check.outputs if not output.passed] == ["decoding"]
    assert not check.passed


def test_openvino_runs_the_same_file(exported: Any) -> None:
    quantized, artefact = exported
    check = quantized.check(artefact.path, [{"input_ids": prompts()}], runtime="openvino")
    assert check.passed
    assert [output.name for output in check.outputs] == ["logits", "prompt", "decoding"]
    real = bitwright.open_runtime("openvino", artefact.path)
    found = DecoderSession(real).generate(prompts()[:1].numpy(), 8)[0].tolist()
    assert found == generated(quantized.model, prompts()[:1])[:8]


def test_the_folder_describes_the_model(exported: Any) -> None:
    _, artefact = exported
    described = json.loads((artefact.path.parent / "genai_config.json").read_text())["model"]
    decoder = described["decoder"]
    assert (decoder["num_hidden_layers"], decoder["num_key_value_heads"], decoder["head_size"]) == (2, 2, 16)
    assert decoder["session_options"]["session.qdq_matmulnbits_accuracy_level"] == "0"
    assert (artefact.path.parent / "tokenizer.json").is_file()


def test_a_workload_becomes_a_folder_in_one_call(tmp_path: Path) -> None:
    source, text = write_folder(tmp_path / "tiny", num_hidden_layers=1), write_text(tmp_path / "text.txt")
    reference = f"hf:{source},text={text},sequence=24,samples=4"
    deployed = bitwright.quantize_workload(reference, tmp_path / "out", precision="w8a8-dynamic", histograms=False)
    assert deployed.passed
    assert {"model.onnx", "genai_config.json", "tokenizer.json", "plan.yaml"} <= set(deployed.files)
    metrics = {(one.where, one.metric) for one in deployed.record.accuracies}
    assert {("float", "perplexity"), ("simulated", "perplexity"), ("onnxruntime", "perplexity")} <= metrics


def _refuse(*_: Any, **__: Any) -> None:
    raise NotImplementedError("this layer has a state of its own")


def test_models_without_keys_and_values_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_llama()
    model.config.use_cache = False
    quantized = bitwright.quantize(model, [{"input_ids": prompts()}], "w8a16", measure=False)

    with monkeypatch.context() as changed:
        changed.setattr("transformers.DynamicCache.__init__", _refuse)
        with raises_problem("no-cache", mentions="state of its own"):
            quantized.export(tmp_path / "out")
    with raises_problem("ignored-argument", where="tokenizer, exact"):
        quantized.export(tmp_path / "model.onnx", exact=True)
