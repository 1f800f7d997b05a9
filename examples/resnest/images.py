"""Write an image folder of generated shapes: `python images.py FOLDER [--per-class 60] [--size 72]`.

Four classes (disc, ring, square, cross) of random color, size and position on noise, in `train/` and `val/`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("cross", "disc", "ring", "square")


def draw(kind: str, size: int, random: np.random.Generator) -> Image.Image:
    """One image."""
    picture = random.uniform(0, 90, (size, size, 3)) + random.uniform(0, 60, 3)
    radius = random.uniform(0.22, 0.36) * size
    center = random.uniform(radius + 1, size - radius - 1, 2)
    y, x = np.mgrid[:size, :size] - center[:, None, None]
    distance = np.hypot(x, y)
    thin = radius * 0.35
    mask = {
        "disc": distance < radius,
        "ring": (distance < radius) & (distance > radius - thin),
        "square": np.maximum(abs(x), abs(y)) < 0.85 * radius,
        "cross": (np.minimum(abs(x), abs(y)) < thin / 2) & (np.maximum(abs(x), abs(y)) < radius),
    }[kind]
    picture[mask] = random.uniform(120, 255, 3) + random.normal(0, 12, (int(mask.sum()), 3))
    return Image.fromarray(picture.clip(0, 255).astype(np.uint8))


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--per-class", type=int, default=120, help="training images of each class; a third for val")
    parser.add_argument("--size", type=int, default=72)
    options = parser.parse_args()
    random = np.random.default_rng(0)
    for part, count in (("train", options.per_class), ("val", max(1, options.per_class // 3))):
        for kind in CLASSES:
            folder = options.folder / part / kind
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                draw(kind, options.size, random).save(folder / f"{number:04}.png")


if __name__ == "__main__":
    main()
