"""What QSync's predictor publishes: its gradient buckets, how it runs layers, and its allocations on T4 and V100."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright import Plan
from bitwright.cluster import DeviceStep, make_buckets, predict_step
from bitwright.importers.qsync import QSYNC_FORMATS, QSyncExecution
from bitwright.plan import ComputeSpec
from bitwright.profiling import IMPLEMENTATIONS, StepGraph, StepSettings, record_step
from bitwright.profiling.cost_key import TensorSpec
from bitwright.profiling.published_profile import derived_profile
from bitwright.zoo.imagenet import resnet50, vgg16

# `comm_pack_size` in the configuration of QSync's predictor: elements of each bucket.
PACKS = {
    "resnet50": [2049000, 7875584, 6563840, 6637568, 2431040],
    "vgg16": [4097000, 16781312, 102764544, 7079424, 7079936, 555328],
    "bert": [2363138, *[7087872] * 11, 28563456],
    "roberta": [591361, *[7087872] * 12, 39000576],
}
NARROW = {"hidden_size": 12, "num_attention_heads": 12, "intermediate_size": 8}


def text_model(name: str, **sizes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    if name == "bert":
        return transformers.BertForQuestionAnswering(transformers.BertConfig(**sizes))  # type: ignore[no-any-return]
    config = transformers.RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, **sizes)
    return transformers.RobertaForMultipleChoice(config)  # type: ignore[no-any-return]


def narrow_step(name: str) -> StepGraph:
    """A step with the same layers and few channels: the order of gradients is that of the whole model."""
    ids = torch.randint(5, 90, (2, 4, 8))
    if name == "bert":
        return record_step(
            text_model(name, **NARROW),
            ({"input_ids": ids[0]}, torch.zeros(4, dtype=torch.int64)),
            lambda output, target: (output.start_logits + output.end_logits).sum() + 0.0 * target.sum(),
        )
    if name == "roberta":
        batch = ({"input_ids": ids}, torch.zeros(2, dtype=torch.int64))
        return record_step(
            text_model(name, **NARROW), batch, lambda output, target: F.cross_entropy(output.logits, target)
        )
    images = (torch.randn(2, 3, 32, 32), torch.zeros(2, dtype=torch.int64))
    if name == "resnet50":
        return record_step(resnet50(image_size=32), images, F.cross_entropy)
    with torch.device("meta"):
        model = vgg16()
    for index, layer in enumerate(model.classifier):  # the same layers with fewer parameters
        if isinstance(layer, nn.Linear):
            model.classifier[index] = nn.Linear(25088 if layer.in_features == 25088 else 4, 4, device="meta")
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.01)
    return record_step(model, images, F.cross_entropy)


def biases_first(order: tuple[str, ...]) -> Iterator[str]:
    """The order of QSync's own convolutions, whose backward gives the bias before the weight."""
    for name in order:
        if name.endswith(".weight"):
            yield name.replace(".weight", ".bias")
        if not name.endswith(".bias"):
            yield name


@pytest.mark.parametrize("name", PACKS)
def test_buckets_equal_those_that_qsync_recorded(name: str) -> None:
    order = narrow_step(name).gradient_order
    with torch.device("meta"):
        whole = {"resnet50": resnet50, "vgg16": vgg16}[name]() if name in ("resnet50", "vgg16") else text_model(name)
    shapes = {key: TensorSpec(tuple(p.shape), "float32", True) for key, p in whole.named_parameters()}
    assert set(order) == set(shapes)
    ordered = tuple(biases_first(order)) if name == "vgg16" else order
    assert [bucket.bytes // 4 for bucket in make_buckets([(key, shapes[key]) for key in ordered], None)] == PACKS[name]


class Block(nn.Module):
    """A layer, a norm, an activation and another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.norm(self.first(x))))


@pytest.fixture
def as_qsync() -> Iterator[Callable[[dict[str, str]], DeviceStep]]:
    step = record_step(Block(), (torch.randn(8, 64), torch.randn(8, 64)), F.mse_loss)
    IMPLEMENTATIONS.register("qsync", QSyncExecution())

    def local(formats: dict[str, str]) -> DeviceStep:
        plan = Plan(compute={name: ComputeSpec(format=format) for name, format in formats.items()})
        profile = derived_profile("nvidia-t4", step, QSYNC_FORMATS)
        return DeviceStep.build(step, plan, profile, StepSettings())

    yield local
    IMPLEMENTATIONS.unregister("qsync")


def casts_of(local: DeviceStep) -> dict[str, list[str]]:
    return {block.op.name: [placed.cast.kind for placed in block.casts] for block in local.blocks}


def test_types_flow_as_in_qsync(as_qsync: Callable[[dict[str, str]], DeviceStep]) -> None:
    assert not any(casts_of(as_qsync({})).values())
    half = as_qsync({"first": "fp16", "second": "fp16"})
    assert casts_of(half) == {
        "first": ["float32→float16"],  # the weight; the input of the model has no operator
        "norm": ["float16→float32"],
        "/gelu#0": [],
        "second": ["float32→float16", "float32→float16"],
    }
    whole = as_qsync({"first": "fp16", "norm": "fp16", "second": "int8"})
    assert casts_of(whole) == {
        "first": ["float32→float16"],
        "norm": [],
        "/gelu#0": [],
        "second": ["float32→int8", "float16→int8"],
    }
    assert [block.gives for block in whole.blocks] == ["float16", "float16", "float16", "float32"]


def test_casts_have_qsyncs_published_costs(as_qsync: Callable[[dict[str, str]], DeviceStep]) -> None:
    """`predictor.py` of QSync: milliseconds for n elements, on a T4."""
    profile = as_qsync({}).profile
    for kind, per_element, fixed in (
        ("float32→float16", 2.878e-8, 0.00101),
        ("float16→float32", 2.878e-8, 0.00101),
        ("float32→int8", 1.418e-7, 0.0122),
        ("float16→int8", 1.285e-7, 0.00046),
        ("int8→float16", 2.617e-8, 0.0042),
    ):
        line = profile.by_cast[kind].forward[0]
        assert line.per_element * 1e3 == pytest.approx(per_element, rel=1e-3)
        assert line.fixed * 1e3 == pytest.approx(fixed, rel=1e-2)


def test_low_precision_is_derived_with_its_casts(as_qsync: Callable[[dict[str, str]], DeviceStep]) -> None:
    """A plan for every layer needs fewer casts than one for the products alone."""
    names = ("first", "norm", "second")
    products = as_qsync({"first": "fp16", "second": "fp16"}).seconds
    every = as_qsync(dict.fromkeys(names, "fp16")).seconds
    assert every < products
    graph = as_qsync({}).graph
    alone = predict_step(graph, Plan(), derived_profile("nvidia-t4", graph)).seconds
    assert as_qsync({}).seconds == pytest.approx(alone)


@pytest.mark.slow
@pytest.mark.realdata
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", PACKS)
def test_plans_are_at_least_as_good_as_published_mappers(name: str, tmp_path: Path, data_dir: Path) -> None:
    mappers = data_dir / "peers" / "qsync"
    if not mappers.is_dir():
        pytest.skip("no published mappers")
    script = Path(__file__).parents[2] / "benchmarks" / "qsync_allocation.py"
    command = [
        sys.executable,
        str(script),
        "--mappers",
        str(mappers),
        "--models",
        name,
        "--output",
        str(tmp_path / "rows"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2400)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(rows) >= 2
    for row in rows:
        assert row["ours"]["seconds"] <= row["theirs"]["seconds"] * (1 + 1e-9)
        assert row["ours"]["penalty"] < row["theirs"]["penalty"]
