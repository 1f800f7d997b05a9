from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from problems import raises_problem
from pydantic import ValidationError
from torch import nn

from bitwright import TrainConfig, Trainer, Workload
from bitwright.core.errors import BitwrightError, WorkloadError
from bitwright.workload import ImageFiles, TransformedImages
from bitwright.workload.datasets import Dataset, color_jitter, random_part

MEAN, STD = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


def test_npz_in_batches(tmp_path: Path) -> None:
    inputs, targets = np.arange(14.0).reshape(7, 2), np.arange(7)
    np.savez(tmp_path / "data.npz", x=inputs, y=targets)
    data = Dataset(npz=tmp_path / "data.npz", keys=("x", "y"), batch_size=3, mean=(1.0, 2.0), std=(2.0, 4.0))
    batches = list(data.labelled())
    assert [len(target) for _, target in batches] == [3, 3, 1]
    joined = torch.cat([batch for batch, _ in batches]).numpy()
    assert joined == pytest.approx((inputs - [1, 2]) / [2, 4])
    assert torch.cat([target for _, target in batches]).tolist() == targets.tolist()


def test_pictures_of_an_npz_become_channels_first(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 4, 5, 3), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", inputs=pixels, targets=np.zeros(2, dtype=np.int64))
    [batch] = list(Dataset(npz=tmp_path / "data.npz").inputs())
    assert batch.numpy() == pytest.approx(pixels.transpose(0, 3, 1, 2) / 255)


def test_a_folder_of_pictures_by_class(tmp_path: Path) -> None:
    for index, name in enumerate(("cat", "dog")):
        (tmp_path / name).mkdir()
        for number in range(2):
            Image.new("RGB", (40, 20), (index * 100, 50, 200)).save(tmp_path / name / f"{number}.png")
    data = Dataset(images=tmp_path, resize=10, crop=8, batch_size=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    batches = list(data.labelled())
    assert [tuple(batch.shape) for batch, _ in batches] == [(3, 3, 8, 8), (1, 3, 8, 8)]
    assert torch.cat([target for _, target in batches]).tolist() == [0, 0, 1, 1]
    assert float(batches[1][0][0, 0, 0, 0]) == pytest.approx((100 / 255 - 0.5) / 0.5)


def test_random_parts_depend_on_the_seed_only(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    for number in range(4):
        Image.fromarray(pixels).save(tmp_path / "cat" / f"{number}.png")
    [first], [again], [other], [large] = (
        list(Dataset(images=tmp_path, random_crop=8, flip=True, seed=seed, batch_size=size).inputs())[:1]
        for seed, size in ((3, 4), (3, 4), (4, 4), (3, 2))
    )
    assert torch.equal(first, again)
    assert torch.equal(first[:2], large)  # the batch size doesn't change the images
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])  # the same file, another part
    with pytest.raises(ValidationError, match="random_crop"):
        Dataset(images=tmp_path, random_crop=8, crop=8)


def test_every_second_image_is_mirrored(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    pixels = np.zeros((2, 2, 3), dtype=np.uint8)
    pixels[:, 0] = 255
    for number in range(64):
        Image.fromarray(pixels).save(tmp_path / "cat" / f"{number:02}.png")
    [batch] = list(Dataset(images=tmp_path, flip=True, batch_size=64).inputs())
    mirrored = batch[:, 0, 0, 0] == 0
    assert torch.equal(batch[mirrored].flip(3), batch[~mirrored][:1].expand(int(mirrored.sum()), -1, -1, -1))
    assert 20 <= int(mirrored.sum()) <= 44


@pytest.mark.parametrize("size", [(40, 30), (1, 1), (500, 2), (2, 500)])
def test_random_parts_are_within_the_image(size: tuple[int, int]) -> None:
    parts = [random_part(size, np.random.default_rng(seed)) for seed in range(200)]
    assert all(0 <= left < right <= size[0] and 0 <= top < bottom <= size[1] for left, top, right, bottom in parts)
    areas = [(right - left) * (bottom - top) / (size[0] * size[1]) for left, top, right, bottom in parts]
    if size == (40, 30):
        assert (min(areas) < 0.15, max(areas) > 0.8) == (True, True)


def test_wrong_data_is_reported(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError) as raised:
        list(Dataset(images=tmp_path).labelled())
    assert raised.value.codes == ["no-data"]
    with raises_problem("unreadable-file", mentions="none.npz"):
        list(Dataset(npz=tmp_path / "none.npz").labelled())
    np.savez(tmp_path / "data.npz", input=np.zeros(3), targets=np.zeros(3))
    with raises_problem("missing-array", mentions="'input'"):
        list(Dataset(npz=tmp_path / "data.npz").labelled())
    np.savez(tmp_path / "data.npz", inputs=np.zeros(3), targets=np.zeros(2))
    with pytest.raises(WorkloadError) as raised:
        list(Dataset(npz=tmp_path / "data.npz").labelled())
    assert raised.value.codes == ["invalid-data"]
    with pytest.raises(ValidationError, match="exactly one"):
        Dataset()


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
