"""Four models as QSync's two examples train them, small: convolutions (resnet, vgg) and encoders (bert, roberta).

The data ship with scikit-learn: its digits, and pairs of passages from its descriptions of data sets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from bitwright import Workload
from bitwright.zoo.data import Words, description_pairs, encode_pairs
from bitwright.zoo.workloads import digits_split

LENGTH = 48  # tokens of a pair


def _stage(channels: int, wider: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, wider, 3, padding=1, bias=False), nn.BatchNorm2d(wider), nn.ReLU())


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = _stage(channels, channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm(self.second(self.first(x))))


def _images(name: str, body: list[nn.Module], channels: int) -> Workload:
    split = digits_split()
    head: list[nn.Module] = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    torch.manual_seed(0)
    model = nn.Sequential(*body, *head, nn.Linear(channels, 10))

    def evaluation() -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(split.test_images.split(100), split.test_labels.split(100), strict=True)

    return Workload(
        name=name,
        model=model,
        inputs=(split.test_images[:1],),
        calibration=lambda: iter(split.train_images[:256].split(64)),
        evaluation=evaluation,
        training=lambda: TensorDataset(split.train_images, split.train_labels),
        loss=F.cross_entropy,
    )


def resnet() -> Workload:
    """A residual network of 128 channels."""
    torch.manual_seed(0)
    return _images("resnet", [_stage(1, 128), Residual(128), Residual(128), nn.MaxPool2d(2), Residual(128)], 128)


def vgg() -> Workload:
    """A plain stack that widens to 256 channels."""
    torch.manual_seed(0)
    narrow = [_stage(1, 64), _stage(64, 128), _stage(128, 128)]
    return _images("vgg", [*narrow, nn.MaxPool2d(2), _stage(128, 256), _stage(256, 256)], 256)


class Batches(Dataset[Any]):
    """Pairs of passages as an encoder takes them."""

    def __init__(self, tokens: Tensor, segments: Tensor, labels: Tensor) -> None:
        self.parts = (tokens, segments, labels)

    def __len__(self) -> int:
        return len(self.parts[2])

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        tokens, segments, labels = (part[index] for part in self.parts)
        return {"input_ids": tokens, "token_type_ids": segments}, labels


def _logits_loss(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, target)


def _encoder(name: str) -> Workload:
    import transformers

    training, targets = description_pairs("training")
    judged, labels = description_pairs("held-out")
    words = Words.learn((text for pair in training for text in pair), least=30)
    sizes: dict[str, Any] = {
        "vocab_size": words.size,
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
        "max_position_embeddings": LENGTH + 8,
        "type_vocab_size": 4,  # which passage, and whether the other one has the word
        "num_labels": 2,
    }
    torch.manual_seed(0)
    kind = {"bert": "Bert", "roberta": "Roberta"}[name]
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config)
    tokens, segments = encode_pairs(words, judged, LENGTH)

    def evaluation() -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for ids, types, answers in zip(*(x.split(32) for x in (tokens, segments, torch.tensor(labels))), strict=True):
            yield {"input_ids": ids, "token_type_ids": types}, answers

    return Workload(
        name=name,
        model=model,
        inputs={"input_ids": tokens[:1], "token_type_ids": segments[:1]},
        evaluation=evaluation,
        training=lambda: Batches(*encode_pairs(words, training, LENGTH), torch.tensor(targets)),
        loss=_logits_loss,
    )


def bert() -> Workload:
    """Two layers of 256, from a configuration of transformers."""
    return _encoder("bert")


def roberta() -> Workload:
    """The same as RoBERTa has it."""
    return _encoder("roberta")
