from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from problems import raises_problem

from bitwright.core.environment import DATA_VARIABLE
from bitwright.core.errors import WorkloadError
from bitwright.zoo.data import (
    Augmented,
    Images,
    Pairs,
    Words,
    data_folder,
    description_pairs,
    encode_pairs,
    idx_images,
    image_folder,
    npz_images,
)
from bitwright.zoo.workloads import resnet20_cifar10


def test_folder_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    with raises_problem("data-folder-not-set", mentions=DATA_VARIABLE):
        data_folder()
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "none"))
    with raises_problem("data-folder-missing", mentions=DATA_VARIABLE):
        data_folder()
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    assert data_folder() == tmp_path
    with raises_problem("data-file-missing", mentions="test.npz"):
        resnet20_cifar10()


def test_npz_round_trip_and_normalisation(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", images=pixels, labels=np.arange(5, dtype=np.uint8))
    images = npz_images(tmp_path / "a.npz")
    found = list(images.batches(2, mean=(1.0, 2.0, 3.0), std=(4.0, 5.0, 6.0)))
    assert [len(labels) for _, labels in found] == [2, 2, 1]
    expected = (pixels.astype(np.float32) - [1, 2, 3]) / [4, 5, 6]
    batch = torch.cat([images for images, _ in found]).permute(0, 2, 3, 1)
    torch.testing.assert_close(batch, torch.tensor(expected, dtype=torch.float32))
    assert torch.equal(images.take(3, seed=1).labels, images.take(3, seed=1).labels)


def test_npz_that_is_not_what_it_should_be(tmp_path: Path) -> None:
    np.savez(tmp_path / "lacks.npz", images=np.zeros((1, 2, 2, 3), np.uint8))
    with raises_problem("missing-array", where="lacks.npz", mentions="labels") as raised:
        npz_images(tmp_path / "lacks.npz")
    assert raised.value.codes == ["missing-array"]
    np.savez(tmp_path / "floats.npz", images=np.zeros((1, 2, 2, 3)), labels=np.zeros(1))
    with raises_problem("invalid-data", where="floats.npz", mentions="float64"):
        npz_images(tmp_path / "floats.npz")


def test_image_folder(tmp_path: Path) -> None:
    for name, grey in (("0001_0007.jpg", 200), ("0000_0042.jpg", 10)):
        Image.new("L", (8, 8), grey).save(tmp_path / name)
    (tmp_path / "README.txt").write_text("not an image")
    images = image_folder(tmp_path, size=8)
    assert images.labels.tolist() == [42, 7]
    assert images.pixels.shape == (2, 3, 8, 8)
    assert images.pixels.float().mean(dim=(1, 2, 3)).tolist() == [10.0, 200.0]
    with raises_problem("invalid-data", where="0000_0042.jpg", mentions="9x9"):
        image_folder(tmp_path, size=9)


def test_image_folder_without_images(tmp_path: Path) -> None:
    with raises_problem("no-data", mentions="NNNN_CCCC"):
        image_folder(tmp_path)


def test_augmented_images_are_shifted_and_mirrored_and_nothing_else() -> None:
    pixels = torch.randint(0, 256, (3, 3, 6, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images = Images(pixels=pixels, labels=torch.arange(3))
    mean, std = (1.0, 2.0, 3.0), (4.0, 5.0, 6.0)
    data = Augmented(images=images, mean=mean, std=std, shift=2)
    shift, scale = (torch.tensor(v).view(-1, 1, 1) for v in (mean, std))
    padded = torch.nn.functional.pad((pixels.float() - shift) / scale, [2] * 4)
    torch.manual_seed(0)
    kinds = set()
    for _ in range(40):
        batch, labels = data.__getitems__([2, 0])
        assert labels.tolist() == [2, 0]
        for image, index in zip(batch, (2, 0), strict=True):
            found = [
                (top, left, mirrored)
                for top in range(5)
                for left in range(5)
                for mirrored in (False, True)
                for window in [padded[index, :, top : top + 6, left : left + 5]]
                if torch.equal(image, window.flip(2) if mirrored else window)
            ]
            assert found
            kinds.update(found)
    assert {top for top, _, _ in kinds} == set(range(5))
    assert {mirrored for _, _, mirrored in kinds} == {False, True}
    still = Augmented(images=images, mean=mean, std=std, shift=0, mirror=False)
    torch.testing.assert_close(still[1][0], padded[1, :, 2:-2, 2:-2])


def test_idx_files(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 3, 2), dtype=np.uint8)
    header = b"\0\0\x08\x03" + np.array([4, 3, 2], ">u4").tobytes()
    with gzip.open(tmp_path / "i.gz", "wb") as file:
        file.write(header + pixels.tobytes())
    with gzip.open(tmp_path / "l.gz", "wb") as file:
        file.write(b"\0\0\x08\x01" + np.array([4], ">u4").tobytes() + bytes([3, 1, 2, 0]))
    images = idx_images(tmp_path / "i.gz", tmp_path / "l.gz")
    assert torch.equal(images.pixels[:, 0], torch.from_numpy(pixels))
    assert images.labels.tolist() == [3, 1, 2, 0]
    with pytest.raises(WorkloadError) as raised:
        idx_images(tmp_path / "l.gz", tmp_path / "i.gz")
    assert raised.value.codes == ["invalid-data"]
    with gzip.open(tmp_path / "short.gz", "wb") as file:
        file.write(header + pixels.tobytes()[:-1])
    with raises_problem("invalid-data", where="short.gz"):
        idx_images(tmp_path / "short.gz", tmp_path / "l.gz")


def test_segments_mark_words_of_both_texts() -> None:
    words = Words.learn(["the cat sat", "the dog sat"], least=1)
    the, cat, sat, dog = (words.tokens[word] for word in ("the", "cat", "sat", "dog"))
    tokens, segments = encode_pairs(words, [("The cat sat", "the dog, sat")], 12)
    comma = 1  # an unknown word
    assert tokens.tolist() == [[2, the, cat, sat, 3, the, dog, comma, sat, 3, 0, 0]]
    assert segments.tolist() == [[0, 2, 0, 2, 0, 3, 1, 1, 3, 1, 0, 0]]


def test_long_pairs_truncate_the_longer_text() -> None:
    words = Words.learn(["a b c d e f"], least=1)
    tokens, _ = encode_pairs(words, [("a b c d e f", "a b")], 8)
    ids = [words.tokens[word] for word in "abc"]
    assert tokens.tolist() == [[2, *ids, 3, *ids[:2], 3]]


def test_training_pairs_are_swapped_at_random() -> None:
    words = Words.learn(["a b c"], least=1)
    pairs = Pairs(words, [("a", "b c")] * 64, [1] * 64, 8)
    torch.manual_seed(0)
    (tokens, segments), labels = pairs.__getitems__(list(range(64)))
    a, b, c = (words.tokens[word] for word in "abc")
    straight, swapped = [2, a, 3, b, c, 3, 0, 0], [2, b, c, 3, a, 3, 0, 0]
    counts = [sum(row == kind for row in tokens.tolist()) for kind in (straight, swapped)]
    assert sum(counts) == 64
    assert min(counts) > 16
    assert segments[tokens[:, 2] == 3].unique(dim=0).tolist() == [[0, 0, 0, 1, 1, 1, 0, 0]]
    assert labels.tolist() == [1] * 64


def test_parts_of_the_descriptions_are_disjoint() -> None:
    parts = {part: description_pairs(part) for part in ("training", "held-out", "test")}
    texts = {part: {text for pair in pairs for text in pair} for part, (pairs, _) in parts.items()}
    assert [len(pairs) for pairs, _ in parts.values()] == [1600, 320, 320]
    assert all(sum(labels) * 2 == len(labels) for _, labels in parts.values())
    assert not (texts["training"] | texts["test"]) & texts["held-out"]
    assert len(texts["training"] & texts["test"]) <= 1  # one description repeats a passage
