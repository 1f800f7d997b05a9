from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from problems import raises_problem
from pydantic import ValidationError

from bitwright.core.errors import WorkloadError
from bitwright.workload.datasets import Dataset, random_part


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
