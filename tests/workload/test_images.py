"""Labelled images on disk: their order, their transforms, and how results depend on the seed only."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from bitwright import TrainConfig, Trainer, Workload
from bitwright.core.errors import BitwrightError
from bitwright.workload import ImageFiles, TransformedImages
from bitwright.workload.datasets import color_jitter

MEAN, STD = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve pictures of different sizes in three class folders."""
    generator = np.random.default_rng(0)
    for number in range(12):
        place = tmp_path / f"class{number % 3}"
        place.mkdir(exist_ok=True)
        pixels = generator.integers(0, 256, (20 + number, 28, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number:02d}.png")
    return tmp_path


def test_class_folders_are_labelled_in_the_order_of_their_names(folder: Path) -> None:
    found = ImageFiles.from_folder(folder)
    assert found.labels == (0,) * 4 + (1,) * 4 + (2,) * 4
    assert [file.name for file in found.files[:2]] == ["00.png", "03.png"]
    with pytest.raises(BitwrightError) as caught:
        ImageFiles.from_folder(folder / "class0")
    assert caught.value.codes == ["no-data"]


def test_a_list_names_paths_and_labels(folder: Path) -> None:
    listing = folder / "train.txt"
    (folder / "class0" / "00.png").rename(folder / "class0" / "with space.png")
    listing.write_text("class2/02.png 7\n\nclass0/with space.png 0\n")
    found = ImageFiles.from_list(listing, folder)
    assert found.files == (folder / "class2" / "02.png", folder / "class0" / "with space.png")
    assert found.labels == (7, 0)


def test_all_problems_of_a_list_are_reported(folder: Path) -> None:
    listing = folder / "train.txt"
    listing.write_text("class2/02.png\nclass0/00.png 1\nclass0/none.png 2\nclass0/03.png -1\n")
    with pytest.raises(BitwrightError) as caught:
        ImageFiles.from_list(listing, folder)
    places = [(problem.where, problem.code) for problem in caught.value.problems]
    assert places == [(f"{listing}:1", "invalid-line"), (f"{listing}:4", "invalid-line"), (str(listing), "no-data")]
    listing.write_text("\n")
    with pytest.raises(BitwrightError) as caught:
        ImageFiles.from_list(listing, folder)
    assert caught.value.codes == ["no-data"]


def test_onecrop_is_the_center_of_the_resized_image(folder: Path) -> None:
    files = ImageFiles.from_folder(folder)
    images = TransformedImages(files, transforms="ONECROP", size=16, resize=18)
    pixels, label = images[0]
    with Image.open(files.files[0]) as opened:  # 28 x 20
        resized = opened.convert("RGB").resize((25, 18), Image.Resampling.BILINEAR)
    cropped = np.asarray(resized, dtype=np.float32)[1:17, 4:20]
    torch.testing.assert_close(pixels, (torch.tensor(cropped).permute(2, 0, 1) / 255 - MEAN) / STD)
    assert label == 0
    with pytest.raises(BitwrightError) as caught:
        TransformedImages(files, transforms="ONECROP", size=16, resize=12)
    assert caught.value.codes == ["invalid-value"]


def test_standard_is_random_and_depends_on_torchs_seed_only(folder: Path) -> None:
    files = ImageFiles.from_folder(folder)

    def one(kind: Literal["STANDARD", "LINEAR"], seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return TransformedImages(files, transforms=kind, size=16)[0][0]

    assert one("STANDARD", 1).shape == (3, 16, 16)
    assert torch.equal(one("STANDARD", 1), one("STANDARD", 1))
    assert not torch.equal(one("STANDARD", 1), one("STANDARD", 2))
    assert not torch.equal(one("STANDARD", 1), one("LINEAR", 1))  # jitter
    flips = [one("LINEAR", seed) for seed in range(20)]
    assert len({float(pixels.sum()) for pixels in flips}) > 15


def test_jitter_stays_within_its_strengths() -> None:
    picture = Image.new("RGB", (4, 4), (200, 100, 50))
    seen = [np.asarray(color_jitter(picture, np.random.default_rng(seed)))[0, 0] for seed in range(50)]
    assert len({tuple(pixel) for pixel in seen}) > 40
    same = color_jitter(picture, np.random.default_rng(0), (0.0, 0.0, 0.0, 0.0))
    assert np.abs(np.asarray(same).astype(int)[0, 0] - [200, 100, 50]).max() <= 2  # HSV has 8 bits

    def jittered(*strengths: float) -> list[Any]:
        return [color_jitter(picture, np.random.default_rng(seed), strengths) for seed in range(50)]

    brightness = [np.asarray(one)[0, 0, 0] for one in jittered(0.2, 0.0, 0.0, 0.0)]
    assert 155 <= min(brightness) < 175
    assert 225 < max(brightness) <= 243
    hues = [np.asarray(one.convert("HSV"))[0, 0, 0] for one in jittered(0.0, 0.0, 0.0, 0.1)]
    start = int(np.asarray(picture.convert("HSV"))[0, 0, 0])
    around = [(int(hue) - start + 128) % 256 - 128 for hue in hues]
    assert -28 <= min(around) < -10
    assert 10 < max(around) <= 28


def test_batches_do_not_depend_on_the_number_of_workers(folder: Path) -> None:
    images = TransformedImages(ImageFiles.from_folder(folder), transforms="STANDARD", size=16)
    weights = []
    for workers in (0, 2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 14 * 14, 3))
        workload = Workload(
            name="pictures",
            model=model,
            inputs=(torch.zeros(1, 3, 16, 16),),
            training=lambda: images,
            loss=F.cross_entropy,
        )
        Trainer(workload, config=TrainConfig(batch=4, seed=5, workers=workers)).fit()
        weights.append(model[0].weight.detach().clone())
    assert torch.equal(*weights)
