"""QSync's four models with its tasks: recorded steps of any batch, its published times, its buckets and its rules.

The times are those that QSync publishes in comments of its predictor (bytedance/QSync, analyse.py), in milliseconds per
step on an NVIDIA T4. Convolutional networks train with SGD, the others with AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.plan import ComputeSpec, Plan
from bitwright.profiling import StepGraph, StepSettings, record_step
from bitwright.profiling.step_graph import extrapolate
from bitwright.zoo.imagenet import resnet50, vgg16

MODELS = ("resnet50", "vgg16", "bert", "roberta")
LENGTHS = {"bert": 384, "roberta": 128}
CHOICES = 4  # of RoBERTa's questions
LAYERS = ("linear", "conv2d", "embedding", "layer_norm", "batch_norm", "max_pool2d", "relu")
_INTEGER = ("linear", "conv2d")

# model, precision, batch, milliseconds
MEASURED: tuple[tuple[str, str, int, float], ...] = (
    ("bert", "fp32", 12, 504),
    ("bert", "fp16", 12, 261),
    ("bert", "linear16", 12, 278),
    ("bert", "embedding16", 12, 508),
    ("bert", "linear+embedding16", 12, 274),
    ("bert", "linear+norm16", 12, 259),
    ("roberta", "fp32", 14, 1248),
    ("roberta", "fp16", 14, 371),
    ("roberta", "linear16", 14, 401),
    ("roberta", "linear+norm16", 14, 367),
    ("resnet50", "fp32", 128, 769),
    ("resnet50", "fp16", 64, 192),
    ("resnet50", "int8", 64, 517),
    ("vgg16", "fp32", 128, 3811),
    ("vgg16", "fp16", 128, 1089),
    ("vgg16", "int8", 128, 1494),
)
_KINDS = {
    "fp32": (),
    "fp16": LAYERS,
    "linear16": ("linear",),
    "embedding16": ("embedding",),
    "linear+embedding16": ("linear", "embedding"),
    "linear+norm16": ("linear", "layer_norm"),
}


def settings(name: str) -> StepSettings:
    return StepSettings(optimizer="sgd" if name in ("resnet50", "vgg16") else "adamw")


def plan_of(precision: str, graph: StepGraph) -> Plan:
    """The plan of one of the precisions above."""
    compute = {}
    for op in graph.ops:
        kind = op.call.kind
        if precision == "int8" and kind in _INTEGER:
            compute[op.name] = ComputeSpec(format="int8")
        elif kind in (LAYERS if precision == "int8" else _KINDS[precision]):
            compute[op.name] = ComputeSpec(format="fp16")
    return Plan(compute=compute)


def model_of(name: str) -> nn.Module:
    """The model, with random weights."""
    torch.manual_seed(0)
    if name == "resnet50":
        return resnet50()
    if name == "vgg16":
        return vgg16()
    import transformers

    if name == "bert":
        config = transformers.BertConfig(attn_implementation="eager")
        return transformers.BertForQuestionAnswering(config)
    sizes = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
    return transformers.RobertaForMultipleChoice(transformers.RobertaConfig(**sizes, attn_implementation="eager"))


def batch_of(name: str, samples: int) -> tuple[Any, Tensor]:
    """Random data of the model's task."""
    torch.manual_seed(1)
    if name in ("resnet50", "vgg16"):
        return torch.randn(samples, 3, 224, 224), torch.arange(samples)
    shape = (samples, LENGTHS[name]) if name == "bert" else (samples, CHOICES, LENGTHS[name])
    ids = torch.randint(5, 30000, shape)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if name == "bert":
        inputs["token_type_ids"] = torch.zeros_like(ids)
    return inputs, torch.arange(samples) % CHOICES


def loss_of(name: str) -> Callable[[Any, Tensor], Tensor]:
    def span(output: Any, target: Tensor) -> Tensor:
        return (F.cross_entropy(output.start_logits, target) + F.cross_entropy(output.end_logits, target)) / 2

    def choice(output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output.logits, target)

    return {"bert": span, "roberta": choice}.get(name, F.cross_entropy)


class Steps:
    """Recorded steps of the four models for any batch. They are kept in a folder, because recording takes a minute."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.recorded: dict[str, tuple[StepGraph, StepGraph]] = {}
        self.known: dict[tuple[str, int], StepGraph] = {}

    def of(self, name: str, samples: int) -> StepGraph:
        """One step with this batch, extrapolated from batches of 2 and 3."""
        if (name, samples) not in self.known:
            self.known[name, samples] = extrapolate(*self._pair(name), samples)
        return self.known[name, samples]

    def _pair(self, name: str) -> tuple[StepGraph, StepGraph]:
        if name not in self.recorded:
            files = [self.folder / f"{name}-{count}.json" for count in (2, 3)] if self.folder is not None else []
            if files and all(file.exists() for file in files):
                self.recorded[name] = (StepGraph.load(files[0]), StepGraph.load(files[1]))
            else:
                model, loss = model_of(name), loss_of(name)
                small, large = (record_step(model, batch_of(name, count), loss, name=name) for count in (2, 3))
                for file, graph in zip(files, (small, large), strict=False):
                    file.parent.mkdir(parents=True, exist_ok=True)
                    graph.save(file)
                self.recorded[name] = (small, large)
        return self.recorded[name]
