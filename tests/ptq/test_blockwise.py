"""Quantization of a Hugging Face folder with one block in memory."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import raises_problem

import bitwright as bw

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers

WORDS = ("the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "as", "was", "with", "be", "by")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def write_model(folder: Path, *, kind: str = "Llama", dtype: torch.dtype = torch.float32, **config: Any) -> str:
    """Write a tiny model with a tokenizer, and a text; returns the reference."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    text = folder.parent / "wiki.txt"
    text.write_text(" ".join(random.Random(0).choices(WORDS, k=2000)))
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train([str(text)], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    settings = {**SIZES, "vocab_size": 300, "max_position_embeddings": 128, "initializer_range": 0.2, **config}
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**settings))
    model.to(dtype).save_pretrained(folder)
    return f"hf:{folder},text={text},sequence=24,samples=6"


def loaded(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("steps", [[], ["gptq"], ["signround:iterations=3"]])
def test_the_folder_computes_what_was_measured(tmp_path: Path, steps: list[str]) -> None:
    reference = write_model(tmp_path / "m")
    made = bw.quantize_folder(reference, tmp_path / "out", group=32, steps=steps)
    workload = bw.load_workload(reference)
    measured = bw.evaluate(workload, loaded(tmp_path / "out"))["perplexity"]
    assert made.perplexity == pytest.approx(measured, rel=1e-5)
    assert made.float_perplexity == pytest.approx(bw.evaluate(workload, workload.model)["perplexity"], rel=1e-5)
    assert made.perplexity != pytest.approx(made.float_perplexity, rel=1e-5)
    assert made.bytes < made.float_bytes / 2
    assert not (tmp_path / "out" / ".blocks").exists()
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_the_weights_are_those_of_the_model_in_memory(tmp_path: Path) -> None:
    reference = write_model(tmp_path / "m")
    bw.quantize_folder(reference, tmp_path / "out", group=32)
    workload = bw.load_workload(reference)
    whole = bw.quantize(workload.model, workload.calibration, "w4a16", group=32, measure=False)
    model = loaded(tmp_path / "out")
    model(**workload.inputs)  # decompresses the weights
    quantizers = {site.replace(":", "."): q for site, q in bw.quantizers_of(whole.model).items()}
    different = [
        name
        for name, quantizer in quantizers.items()
        if not torch.equal(model.get_parameter(name), quantizer(whole.model.get_parameter(name)))
    ]
    assert len(quantizers) == 3 * 7 + 1
    assert not different


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
def test_stored_dtypes_and_tied_heads_are_kept(tmp_path: Path, kind: str) -> None:
    reference = write_model(tmp_path / "m", kind=kind, dtype=torch.bfloat16, tie_word_embeddings=True)
    made = bw.quantize_folder(reference, tmp_path / "out", group=32)
    assert made.perplexity == pytest.approx(
        bw.evaluate(bw.load_workload(reference), loaded(tmp_path / "out"))["perplexity"], rel=1e-5
    )
    assert "shared" in made.plan.float["lm_head"]
    files = [p for p in (tmp_path / "out").iterdir() if p.suffix == ".safetensors"]
    from safetensors import safe_open

    dtypes = set()
    for path in files:
        with safe_open(path, framework="pt") as file:
            dtypes |= {file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
    assert dtypes == {torch.bfloat16, torch.int32, torch.int64}


def test_an_interrupted_run_resumes_with_the_same_result(tmp_path: Path) -> None:
    reference = write_model(tmp_path / "m")
    bw.quantize_folder(reference, tmp_path / "whole", group=32, steps=["gptq"])
    stopping = {2}

    def stop(done: int, total: int | None, text: str) -> None:
        units.append(text)
        if done in stopping:
            raise KeyboardInterrupt

    units: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        bw.quantize_folder(reference, tmp_path / "out", group=32, steps=["gptq"], progress=stop)
    stopping.clear()
    bw.quantize_folder(reference, tmp_path / "out", group=32, steps=["gptq"], progress=stop)
    assert units == [
        f"quantizing {unit}" for unit in (*LAYERS, LAYERS[2], "model.embed_tokens", "model.norm", "lm_head")
    ]
    for path in sorted((tmp_path / "whole").glob("*.safetensors")):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_run_resumes_with_the_same_result(tmp_path: Path) -> None:
    reference = write_model(tmp_path / "m")
    bw.quantize_folder(reference, tmp_path / "whole", group=32, steps=["gptq"])
    state = tmp_path / "out" / ".blocks" / "progress.json"
    arguments = f"{reference!r}, {str(tmp_path / 'out')!r}, group=32, steps=['gptq']"
    slow = f"""
    import time
    from bitwright.ptq import blockwise
    save = blockwise._Run._save
    def slowly(self, *args):
        save(self, *args)
        time.sleep(1.0)
    blockwise._Run._save = slowly
    import bitwright as bw
    bw.quantize_folder({arguments})
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(slow)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    while not state.is_file() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=10)
    done = len(json.loads(state.read_text())["done"])
    assert 1 <= done < 6
    units: list[str] = []
    bw.quantize_folder(
        reference, tmp_path / "out", group=32, steps=["gptq"], progress=lambda at, total, text: units.append(text)
    )
    assert len(units) == 6 - done
    for path in sorted((tmp_path / "whole").glob("*.safetensors")):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


def test_other_settings_do_not_resume(tmp_path: Path) -> None:
    reference = write_model(tmp_path / "m")

    def stop(done: int, total: int | None, text: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bw.quantize_folder(reference, tmp_path / "out", group=32, progress=stop)
    with raises_problem(code="resume-mismatch"):
        bw.quantize_folder(reference, tmp_path / "out", group=16)
    shard = tmp_path / "out" / ".blocks" / "unit-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    with raises_problem(code="resume-damaged"):
        bw.quantize_folder(reference, tmp_path / "out", group=32)


def test_what_is_impossible_is_refused_before_any_work(tmp_path: Path) -> None:
    reference = write_model(tmp_path / "m")
    without_text = f"hf:{tmp_path / 'm'}"
    for code, source, options in (
        ("not-blockwise", reference, {"precision": "w8a8-dynamic"}),
        ("not-blockwise", reference, {"steps": ["rotate"]}),
        ("no-text", without_text, {"steps": ["gptq"]}),
        ("not-a-folder", "gguf:model.gguf", {}),
        ("no-such-model", "hf:nowhere", {}),
    ):
        with raises_problem(code=code):
            bw.quantize_folder(source, tmp_path / "out", **options)
    made = bw.quantize_folder(without_text, tmp_path / "out", "w8a16")
    assert made.perplexity is None


def test_models_whose_files_have_other_tensors_are_refused(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    reference = write_model(tmp_path / "m", kind="Qwen2Moe", num_hidden_layers=1, decoder_sparse_step=1, **experts)
    with raises_problem(code="not-blockwise"):  # their files have one matrix per expert
        bw.quantize_folder(reference, tmp_path / "out", group=32)


LAYERS = [f"model.layers.{number}" for number in range(3)]
LIMITED = """
import resource, sys
import torch, transformers, safetensors.torch, compressed_tensors
import bitwright as bw
from bitwright.ptq import blockwise
def data():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) << 10
limit = int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_DATA, (data() + limit, data() + limit))
torch.set_num_threads(1)
if sys.argv[4] == "whole":
    transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1].partition(",")[0][3:], dtype=torch.float32)
else:
    print(bw.quantize_folder(sys.argv[1], sys.argv[2], "w4a16", group=32, steps=sys.argv[4:]))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_is_limited_by_a_block(tmp_path: Path) -> None:
    """A model of 200 M parameters (800 MB) within 400 MB, which are too few to load it."""
    reference = write_model(
        tmp_path / "m",
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=16,
    )

    def run(what: list[str]) -> subprocess.CompletedProcess[str]:
        arguments = [sys.executable, "-c", LIMITED, reference, str(tmp_path / "out"), str(400 << 20), *what]
        return subprocess.run(arguments, capture_output=True, text=True, timeout=800)

    size = sum(path.stat().st_size for path in (tmp_path / "m").glob("*.safetensors"))
    assert size > 800 << 20
    assert run(["whole"]).returncode != 0
    done = run(["imatrix"])
    assert done.returncode == 0, done.stderr[-2000:]
    assert "QuantizedFolder" in done.stdout
