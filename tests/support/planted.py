"""Chains of linear layers of which some lose accuracy when quantized and the others don't."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bitwright import Workload

WIDTH = 32
LOUD = 3000.0


def chain(layers: int, planted: tuple[int, ...], *, seed: int = 0) -> nn.Sequential:
    """The input of each planted layer has one channel that drowns the others; float computes the same as without."""
    generator = torch.Generator().manual_seed(seed)
    made = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)]
    with torch.no_grad():
        for layer in made:
            q, _ = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator))
            layer.weight.copy_(q)
        for index in planted:
            made[index - 1].weight[3] *= LOUD
            made[index].weight[:, 3] /= LOUD
    return nn.Sequential(*made).eval()


def workload(layers: int, planted: tuple[int, ...], *, lower: bool = False, samples: int = 600) -> Workload:
    """The float model is right by definition; `lower`: the metric is an error, of which less is better."""
    model = chain(layers, planted)
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(samples, WIDTH, generator=generator)
    calibration = torch.randn(128, WIDTH, generator=generator)
    with torch.no_grad():
        wanted = model(data)

    def error(predict: object) -> dict[str, float]:
        return {"error": 1.0 + float((predict(data) - wanted).norm() / wanted.norm())}  # type: ignore[operator]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(4 * output, target)

    batches = [(data[i : i + 100], wanted[i : i + 100].argmax(1)) for i in range(0, samples, 100)]
    return Workload(
        name="planted",
        model=model,
        inputs=(data[:1],),
        calibration=lambda: [calibration[:64], calibration[64:]],
        evaluation=lambda: batches,
        evaluate=error if lower else None,
        loss=loss,
        metric="error" if lower else "top1",
    )
