"""BlendCNN: eight 1-D convolutions over a pair of sentences. The features of all layers are used for the output.

`scores` states accuracy and F1 next to the accuracy of always predicting the most frequent class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.workload import call

__all__ = ["BlendCNN", "scores"]

_KERNEL = 5


class BlendCNN(nn.Module):
    """Token, position and segment embeddings → `layers` × (convolution, ReLU) → each layer's mean → two linears.

    Padding (token 0) is zero at the first convolution and excluded from the means, so features don't depend on the
    amount of padding. Further convolutions see the biases at padded positions: masking them would need a multiplication
    after each convolution.
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        width: int = 128,
        channels: int = 100,
        layers: int = 8,
        length: int = 128,
        segments: int = 4,
        classes: int = 2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width, padding_idx=0)
        self.position = nn.Embedding(length, width)
        self.segment = nn.Embedding(segments, width)
        self.norm = nn.LayerNorm(width)
        ends = [width] + [channels] * layers
        self.convs = nn.ModuleList(nn.Conv1d(a, b, _KERNEL, padding=_KERNEL // 2) for a, b in pairwise(ends))
        self.hidden = nn.Linear(channels * layers, 100)
        self.head = nn.Linear(100, classes)
        self.dropout = nn.Dropout(dropout)
        # The sum of the three is normalized. Tokens start small, so that segments matter from the first step.
        for table, spread in ((self.token, 0.05), (self.position, 0.05), (self.segment, 0.1)):
            nn.init.normal_(table.weight, std=spread)
        with torch.no_grad():
            self.token.weight[0] = 0.0

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        """The logits of token and segment ids, both (N, length)."""
        words = (tokens != 0).to(self.norm.weight.dtype).unsqueeze(1)
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]] + self.segment(segments)
        x = self.dropout(self.norm(x)).transpose(1, 2) * words
        share = words / words.sum(2, keepdim=True)
        means = []
        for conv in self.convs:
            x = F.relu(conv(x))
            means.append((x * share).sum(2))
        x = F.relu(self.hidden(self.dropout(torch.cat(means, 1))))
        logits: Tensor = self.head(self.dropout(x))
        return logits


def scores(data: Iterable[tuple[Any, Tensor]], predict: Callable[..., Any]) -> dict[str, float]:
    """Accuracy (`top1`) and share of the majority class in percent, F1 of class 1 for two classes, and samples `n`.

    >>> data = [(torch.eye(3)[[0, 1, 1, 1]], torch.tensor([0, 0, 1, 1]))]
    >>> scores(data, lambda x: x[:, :2])
    {'top1': 75.0, 'f1': 80.0, 'majority': 50.0, 'n': 4.0}
    """
    outputs = [(call(predict, inputs), target) for inputs, target in data]
    logits, target = torch.cat([output for output, _ in outputs]), torch.cat([target for _, target in outputs])
    # argmax treats NaN as the largest value; count it as wrong so that a broken model doesn't score by chance
    answers = torch.where(logits.isnan().any(1), -1, logits.argmax(1))
    counts, n = torch.bincount(target), len(target)
    values = {"top1": 100.0 * int((answers == target).sum()) / n}
    if logits.shape[1] == 2:
        found = int(((answers == 1) & (target == 1)).sum())
        values["f1"] = 200.0 * found / max(1, int((answers == 1).sum()) + int((target == 1).sum()))
    return {**values, "majority": 100.0 * int(counts.max()) / n, "n": float(n)}
