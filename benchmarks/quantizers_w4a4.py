"""All quantizers at W4A4, first and last layer at 8 bits: accuracy after the same training from the same float weights.

    python benchmarks/quantizers_w4a4.py [--seeds 3] [--only lsq ...]

A narrow residual network on Fashion-MNIST (BITWRIGHT_DATA; 20,000 images to train on, 10,000 to test on): wide networks
and easier data lose nothing at 4 bits, so nothing can be told from them. Float weights are trained to a plateau first,
and the float row goes on for as long as the others train. Weights are per channel, activations per tensor; batch norms
stay behind their convolutions, as quantizers that squeeze weights (DoReFa, QIL) want them.

Rows below the line say why some quantizers stay behind: QIL squeezes what the last layer reads into [0, 1], and no norm
follows that undoes it; DoReFa clips activations to [0, 1] (PACT has its weights, and learns the clip); APoT takes the
mean out of each filter, which costs as much without any rounding; NNIE has one level per octave left.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from common import environment, save
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from bitwright import TrainConfig, Trainer, Workload, evaluate
from bitwright.zoo.data import Augmented, Images, data_folder, idx_images, whole

TRAINED_ON, FLOAT, QAT = 20_000, {"epochs": 12, "lr": 4e-3}, {"epochs": 3, "lr": 1e-3}
MEAN, STD = (0.286 * 255,), (0.353 * 255,)
AFFINE = {"activations": "uint4/tensor/asym"}

# What a quantizer needs beside its name: where it starts, and how fast its own state learns.
RECIPES: dict[str, dict[str, Any]] = {
    "lsq": {"rate": 3e-4},
    "lsqplus": {"rate": 3e-4, **AFFINE},  # with a zero point to learn
    "tqt": {"rate": 1e-2},  # the logarithm of a threshold
    "pact": {"observer": "minmax", "rate": 1e-2, "decay": 1e-2},  # α is pulled down: else only clipping moves it
    "qil": {"observer": "minmax", "weight_observer": "minmax", "rate": 3e-4},
    "apot": {"observer": "minmax", "weight_observer": "minmax", "rate": 3e-3},
    "dsq": {"rate": 3e-4},
    "dorefa": {},
    "nnie": {"observer": "minmax", "weight_observer": "minmax"},
    "fixed": {},
}

REASONS: dict[str, dict[str, Any]] = {
    "qil, head in float": {"name": "qil", **RECIPES["qil"], "keep_float": ["head*"]},
    "dorefa, head in float": {"name": "dorefa", "keep_float": ["head*"]},
    "nnie, weights lsq": {"name": "nnie", "weight_quantizer": "lsq", "observer": "minmax", "rate": 3e-4},
    "lsq, weights nnie": {"name": "lsq", "weight_quantizer": "nnie", "weight_observer": "minmax", "rate": 3e-4},
}
CENTRED, SCALED = "float weights, mean taken out as APoT does", "float weights, scaled as APoT does"

ROWS = [*RECIPES, *REASONS, CENTRED, SCALED]


class Standardised(nn.Module):
    """A filter as APoT sees it, without rounding."""

    def __init__(self, *, centred: bool) -> None:
        super().__init__()
        self.centred = centred

    def forward(self, weight: Tensor) -> Tensor:
        std, mean = torch.std_mean(weight.detach().flatten(1), dim=1, correction=0)
        shape = (-1, *[1] * (weight.dim() - 1))
        return (weight - mean.view(shape) * self.centred) / std.view(shape)


class Narrow(nn.Module):
    """A stem, a residual block and two convolutions with few channels: there is nothing to spare at 4 bits."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        sizes = [("stem", 1, width, 2), ("conv1", width, width, 1), ("conv2", width, width, 1)]
        sizes += [("conv3", width, 2 * width, 2), ("conv4", 2 * width, 4 * width, 2)]
        for name, before, after, stride in sizes:
            self.add_module(name, nn.Conv2d(before, after, 3, stride, padding=1, bias=False))
            self.add_module(f"{name}_bn", nn.BatchNorm2d(after))
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem_bn(self.stem(x)))
        y = self.conv2_bn(self.conv2(F.relu(self.conv1_bn(self.conv1(x)))))
        x = F.relu(self.conv3_bn(self.conv3(F.relu(x + y))))
        x = F.relu(self.conv4_bn(self.conv4(x)))
        logits: Tensor = self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))
        return logits


def fashion(seed: int) -> Workload:
    folder = data_folder() / "fashion-mnist"
    train = idx_images(folder / "train-images-idx3-ubyte.gz", folder / "train-labels-idx1-ubyte.gz").take(
        TRAINED_ON, seed=0
    )
    test = idx_images(folder / "t10k-images-idx3-ubyte.gz", folder / "t10k-labels-idx1-ubyte.gz")
    torch.manual_seed(seed)
    batches = partial(Images.batches, mean=MEAN, std=STD)
    return Workload(
        name="fashion-mnist",
        model=Narrow(),
        inputs=(next(batches(test, 1))[0],),
        calibration=lambda: (images for images, _ in batches(train.take(1000, seed=0), 100)),
        evaluation=lambda: batches(test, 500),
        training=lambda: Augmented(images=train, mean=MEAN, std=STD, shift=1),
        collate=whole,
        loss=F.cross_entropy,
    )


def settings(seed: int, **changes: Any) -> TrainConfig:
    return TrainConfig(optimizer="adamw", batch=100, seed=seed, **changes)


def run(name: str, seed: int, weights: Path) -> dict[str, Any]:
    """Train one quantizer from the float weights of a seed."""
    workload = fashion(seed)
    if name == "float":
        result = Trainer(workload, config=settings(seed, **QAT), init=weights).fit()
        return {"after": result.metrics[-1]["top1"], "executed": ["float"]}
    if name in (CENTRED, SCALED):
        made = Trainer(workload, config=settings(seed, epochs=1, lr=1e-9), init=weights).fit().model
        for module in (*made.modules(),):
            if isinstance(module, nn.Conv2d | nn.Linear):
                register_parametrization(module, "weight", Standardised(centred=name == CENTRED))
        result = Trainer(replace(workload, model=made), config=settings(seed, **QAT)).fit()
        return {"after": result.metrics[-1]["top1"], "executed": ["float"]}
    recipe = {"name": name, **RECIPES.get(name, {}), **REASONS.get(name, {})}
    name = recipe.pop("name")
    rate, decay = recipe.pop("rate", None), recipe.pop("decay", 0.0)
    config = settings(seed, **QAT, quantizer_lr=rate, quantizer_decay=decay)
    options = {"weights": "int4/channel/sym", "activations": "int4/tensor/sym/adasign", **recipe}
    trainer = Trainer(
        workload, precision="int4", backend="academic", quantizer=name, config=config, init=weights, **options
    )
    result = trainer.fit()
    kinds = {type(module).__name__ for module in result.model.bitwright.modules() if hasattr(module, "spec")}
    return {"after": result.metrics[-1]["top1"], "executed": sorted(kinds), "epochs": result.metrics}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=ROWS, choices=ROWS)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows: dict[str, dict[str, Any]] = {}
    with TemporaryDirectory() as folder:
        starts = []
        for seed in range(arguments.seeds):
            made = Trainer(fashion(seed), config=settings(seed, **FLOAT), out=Path(folder) / str(seed)).fit()
            starts.append(evaluate(fashion(seed), made.model)["top1"])
        for name in ["float", *arguments.only]:
            begin = time.perf_counter()
            runs = [run(name, seed, Path(folder) / str(seed)) for seed in range(arguments.seeds)]
            rows[name] = {
                "after": [one["after"] for one in runs],
                "executed": runs[0]["executed"],
                "seconds": time.perf_counter() - begin,
            }
            print(line(name, rows[name]), flush=True)
    reasons = {*REASONS, CENTRED, SCALED}
    text = [
        "# Quantizers at W4A4: a narrow residual network on Fashion-MNIST, first and last layer at 8 bits",
        "",
        f"Top-1 of 10,000 test images in per cent, mean ± deviation over {arguments.seeds} seeds, after "
        f"{QAT['epochs']} epochs from the float weights of that seed ({spread(starts)}); float: trained on as long.",
        "",
        "| quantizer | what ran | top-1 | seeds | seconds |",
        "|---|---|---:|---|---:|",
        *(line(name, rows[name]) for name in sorted(set(rows) - reasons, key=lambda n: -mean(rows[n]["after"]))),
        "| **why** | | | | |",
        *(line(name, rows[name]) for name in rows if name in reasons),
    ]
    facts = environment(seeds=arguments.seeds, float=FLOAT, qat=QAT, recipes=RECIPES, reasons=REASONS)
    save("quantizers_w4a4", {"environment": facts, "starts": starts, "rows": rows}, "\n".join(text))


def line(name: str, row: dict[str, Any]) -> str:
    each = ", ".join(f"{value:.2f}" for value in row["after"])
    return f"| {name} | {', '.join(row['executed'])} | {spread(row['after'])} | {each} | {row['seconds']:.0f} |"


def spread(values: list[float]) -> str:
    return f"{mean(values):.2f} ± {stdev(values) if len(values) > 1 else 0.0:.2f}"


if __name__ == "__main__":
    main()
