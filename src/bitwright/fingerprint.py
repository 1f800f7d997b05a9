"""Short names for contents: whether a model, data or a file is still the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor


def fingerprint(*parts: bytes | str | Tensor) -> str:
    """Equal for equal contents.

    >>> fingerprint("a", torch.ones(2)) == fingerprint(b"a", torch.ones(2))
    True
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part if isinstance(part, bytes) else _bytes(part))
    return digest.hexdigest()[:16]


def file_fingerprint(path: Path) -> str:
    """That of a file's contents, which needn't fit into memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sample_fingerprints(tensors: Iterable[Tensor], samples: int) -> list[str]:
    """One for each sample of a batch."""
    rows = [t.detach().cpu() for t in tensors if t.dim() and t.shape[0] == samples]
    return [fingerprint(*(row[index] for row in rows)) for index in range(samples)]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
