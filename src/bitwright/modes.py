"""Hold a model in evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: object) -> Iterator[None]:
    """Evaluation mode while this lasts (else looking on would move batch-norm statistics); then each module's own.

    What isn't a module (a runtime, a function) has no modes.
    """
    if not isinstance(model, nn.Module):
        yield
        return
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
