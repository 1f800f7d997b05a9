"""Architectures of `transformers`, built small, all the way from the model to ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import pytest
from architectures import ARCHITECTURES, Architecture
from automatic import AUTOMATIC
from journey import arrive, finer, travel

from bitwright.core.errors import ExportError

# Their code is not ours: what transformers warns about (torch.jit.script in deberta-v2) is no error here.
pytestmark = pytest.mark.filterwarnings("ignore")

# One or two of each family, and what is special: a transposed weight (falcon), a weight computed by weight norm
# (wav2vec2), attention with a learned bias (t5), folded norms (resnet), two towers (clip).
FAST = {"bert", "llama", "falcon", "t5", "vit", "resnet", "wav2vec2", "clip"}

# A mixture of experts with the default implementation of its experts.
FAST_AUTOMATIC = {"qwen3_moe"}

DATA_DEPENDENT = "Could not guard on data-dependent expression"
# name → (error, what it says, why); whoever is mended must leave this list.
FAILS: dict[str, tuple[type[Exception], str, str]] = {
    "longformer": (ExportError, DATA_DEPENDENT, "asks `is_index_global_attn.any().item()`, in an `if`"),
    "led": (ExportError, DATA_DEPENDENT, "the same: its encoder is Longformer's"),
}
# Less than 90 % of the multiply-accumulates of linears, convolutions and matrix products are quantized.
LOW_SHARE = {
    "funnel": "its relative attention is an einsum, which ONNX Runtime has no integer kernel for",
}
# In 8 bits the outputs of these random networks are more noise than signal; 16 bits show that it's only noise.
NOISY = {
    "levit": "norms over a few positions amplify",
    "mobilenet-v1": "13 depthwise blocks of random weights in a row",
    "mobilenet-v2": "17 depthwise blocks of random weights in a row",
    "mobilevit": "depthwise blocks of random weights",
}
MIN_DB, MAX_DB, MIN_FINER_DB = 15.0, 60.0, 40.0

_working = [a for a in ARCHITECTURES if a.name not in FAILS]


def _cases(architectures: list[Architecture]) -> list[object]:
    return [pytest.param(a, id=a.name, marks=[] if a.name in FAST else [pytest.mark.slow]) for a in architectures]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", _cases(_working))
def test_from_the_model_to_the_runtime(architecture: Architecture, tmp_path: Path) -> None:
    journey = travel(architecture, tmp_path)
    assert (journey.share >= 0.9) == (journey.name not in LOW_SHARE), journey.left_float
    assert journey.simulated_db < MAX_DB, "nothing changed: is it quantized at all?"
    if journey.name in NOISY:
        # no upper limit here: with other vector instructions mobilevit has 14 or 17 dB
        assert finer(architecture) >= MIN_FINER_DB
    else:
        assert journey.simulated_db >= MIN_DB
    assert journey.dynamic_batch
    assert journey.integer_kernels == journey.planned_kernels > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FAILS)
def test_what_fails_fails_for_the_stated_reason(name: str, tmp_path: Path) -> None:
    error, message, _ = FAILS[name]
    with pytest.raises(error, match=message):
        travel(next(a for a in ARCHITECTURES if a.name == name), tmp_path)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if k in FAST_AUTOMATIC else [pytest.mark.slow]) for k in AUTOMATIC]
)
def test_automatically_built_models_reach_the_runtime(kind: str, tmp_path: Path) -> None:
    arrive(kind, tmp_path)


def test_the_list_is_broad() -> None:
    families = {family: sum(a.family == family for a in _working) for family in {a.family for a in _working}}
    assert len(_working) >= 30
    assert all(families[f] >= 3 for f in ("encoder", "decoder", "encoder-decoder", "vision")), families
    assert {a.name for a in ARCHITECTURES} >= FAST | set(FAILS) | set(LOW_SHARE) | set(NOISY)
