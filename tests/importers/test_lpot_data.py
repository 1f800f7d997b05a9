"""The data sets, transforms and metrics of LPOT files, on small files in their real formats."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from bitwright.core.documents import parse_yaml
from bitwright.core.errors import BitwrightError, PlanError, WorkloadError
from bitwright.importers.key_table import InCode
from bitwright.importers.lpot import LpotConfig, read_lpot
from bitwright.importers.lpot.datasets import DATASETS, Batches
from bitwright.importers.lpot.metrics import METRICS, make_evaluate
from bitwright.importers.lpot.transforms import TRANSFORMS, to_tensor
from bitwright.importers.lpot.workload import Given, LpotData
from bitwright.workload import Workload, evaluate

RANDOM = np.random.default_rng(0)


def config_of(text: str) -> LpotConfig:
    return read_lpot(parse_yaml(text, where="a.yaml"), where="a.yaml").config


def batches_of(loader: str, *, folder: Path | None = None) -> Batches:
    config = config_of(f"evaluation: {{accuracy: {{dataloader: {{{loader}}}}}}}")
    found = config.loaders["evaluation"]
    return (found if folder is None else found.beside(folder)).open(config.tuning.random_seed)


def pictures(folder: Path, count: int = 4) -> np.ndarray[Any, Any]:
    """Two classes of images; the result has their pixels in the order of the data set."""
    pixels = RANDOM.integers(0, 256, (2 * count, 40, 60, 3), np.uint8)
    for index, image in enumerate(pixels):
        place = folder / "images" / f"class{index // count}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{index:03}.png")
    return pixels


def image(height: int = 40, width: int = 60) -> Any:
    return Image.fromarray(RANDOM.integers(0, 256, (height, width, 3), np.uint8))


# -- data sets -------------------------------------------------------------------------------------------------


def test_image_folder(tmp_path: Path) -> None:
    pixels = pictures(tmp_path)
    found = list(batches_of("batch_size: 3, dataset: {ImageFolder: {root: images}}", folder=tmp_path).epoch())
    assert [len(target) for _, target in found] == [3, 3, 2]
    assert torch.cat([target for _, target in found]).tolist() == [0] * 4 + [1] * 4
    assert torch.equal(found[0][0], torch.from_numpy(pixels[:3]).permute(0, 3, 1, 2) / 255)


def test_discarding_the_last_batch_and_shuffling(tmp_path: Path) -> None:
    pictures(tmp_path)
    batches = batches_of(
        "batch_size: 3, last_batch: discard, shuffle: true, dataset: {ImageFolder: {root: images}}", folder=tmp_path
    )
    first, again, second = (torch.cat([x for x, _ in batches.epoch(number)]) for number in (0, 0, 1))
    assert len(first) == 6
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_a_list_of_images(tmp_path: Path) -> None:
    pixels = pictures(tmp_path)
    lines = [f"class{i // 4}/{i:03}.png {i * 10}" for i in (5, 2)]
    (tmp_path / "images" / "val_map.txt").write_text("\n".join(lines) + "\n")
    ((x, target),) = batches_of("batch_size: 2, dataset: {ImagenetRaw: {data_path: images}}", folder=tmp_path).epoch()
    assert target.tolist() == [50, 20]
    assert torch.equal(x[0], torch.from_numpy(pixels[5]).permute(2, 0, 1) / 255)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(("name", "label"), [("CIFAR10", b"labels"), ("CIFAR100", b"fine_labels")])
def test_cifar(tmp_path: Path, name: str, label: bytes, protocol: int) -> None:
    rows = RANDOM.integers(0, 256, (4, 3072), np.uint8)
    place = "cifar-10-batches-py/test_batch" if name == "CIFAR10" else "cifar-100-python/test"
    (tmp_path / place).parent.mkdir()
    (tmp_path / place).write_bytes(pickle.dumps({b"data": rows, label: [3, 1, 2, 0]}, protocol=protocol))
    ((x, target),) = batches_of(f"batch_size: 4, dataset: {{{name}: {{root: .}}}}", folder=tmp_path).epoch()
    assert target.tolist() == [3, 1, 2, 0]
    assert torch.equal(x, torch.from_numpy(rows).view(4, 3, 32, 32) / 255)


def test_a_pickle_with_code_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cifar-10-batches-py" / "test_batch"
    file.parent.mkdir()
    file.write_bytes(pickle.dumps({b"data": print, b"labels": []}))
    with pytest.raises(WorkloadError) as caught:
        batches_of("dataset: {CIFAR10: {root: .}}", folder=tmp_path)
    assert caught.value.codes == ["damaged-file"]


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("name", ["MNIST", "FashionMNIST"])
def test_idx(tmp_path: Path, name: str, zipped: bool) -> None:
    pixels, labels = RANDOM.integers(0, 256, (3, 28, 28), np.uint8), np.uint8([7, 0, 9])
    folder = tmp_path / name / "raw"
    folder.mkdir(parents=True)
    for kind, array in (("images-idx3", pixels), ("labels-idx1", labels)):
        raw = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()
        file = folder / f"t10k-{kind}-ubyte{'.gz' if zipped else ''}"
        file.write_bytes(gzip.compress(raw) if zipped else raw)
    ((x, target),) = batches_of(f"batch_size: 3, dataset: {{{name}: {{root: .}}}}", folder=tmp_path).epoch()
    assert target.tolist() == [7, 0, 9]
    assert torch.equal(x, torch.from_numpy(pixels)[:, None] / 255)


def test_random_inputs_have_their_limits_and_types() -> None:
    options = "shape: [[8, 3], [8, 2]], low: [0, 5], high: [1, 9], dtype: [float32, int64]"
    ((x, y), target) = next(batches_of(f"batch_size: 8, dataset: {{dummy: {{{options}}}}}").epoch())
    assert (x.dtype, y.dtype, target.tolist()) == (torch.float32, torch.int64, [0] * 8)
    assert 0 <= float(x.min()) < float(x.max()) <= 1
    assert 5 <= int(y.min()) <= int(y.max()) <= 9
    wide = torch.cat([x for x, _ in batches_of("batch_size: 4, dataset: {dummy_v2: {input_shape: [50]}}").epoch()])
    assert wide.shape == (128, 50)
    assert float(wide.min()) < -100 < 100 < float(wide.max())  # LPOT's defaults: -128 to 127
    options = "dense_shape: [100], sparse_ratio: 0.75"
    ((sparse, _), *_) = batches_of(f"batch_size: 9, dataset: {{sparse_dummy_v2: {{{options}}}}}").epoch()
    assert 0.7 < float((sparse == 0).float().mean()) < 0.8


@pytest.mark.parametrize(
    ("task", "file", "row", "header", "label"),
    [
        ("mrpc", "dev", "1\t10\t11\ta b\tc", True, 1),
        ("sst-2", "dev", "a b c\t0", True, 0),
        ("cola", "dev", "x\t1\t*\ta c", False, 1),
        ("sts-b", "dev", "0\t1\t2\t3\t4\t5\t6\ta\tb\t2.5", True, 2.5),
        ("qqp", "dev", "0\t1\t2\ta\tb\t1", True, 1),
        ("qnli", "dev", "0\ta\tb\tnot_entailment", True, 1),
        ("rte", "dev", "0\ta\tb\tentailment", True, 0),
        ("wnli", "dev", "0\ta\tb\t1", True, 1),
        ("mnli", "dev_matched", "\t".join("01234567") + "\ta\tb\tx\tneutral", True, 2),
    ],
)
def test_glue(tmp_path: Path, task: str, file: str, row: str, header: bool, label: float) -> None:
    tokenizer(tmp_path / "tokenizer")
    (tmp_path / f"{file}.tsv").write_text(("header\n" if header else "") + f"{row}\n{row}\n")
    options = f"data_dir: ., model_name_or_path: tokenizer, task: {task}, max_seq_length: 12"
    ((inputs, target),) = batches_of(f"batch_size: 2, dataset: {{GLUE: {{{options}}}}}", folder=tmp_path).epoch()
    assert target.tolist() == [label] * 2
    assert inputs["input_ids"].shape == inputs["attention_mask"].shape == (2, 12)
    assert int(inputs["attention_mask"][0].sum()) < 12


def tokenizer(folder: Path) -> None:
    from transformers import BertTokenizer

    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdef"]) + "\n")
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)


def test_texts_are_padded_to_the_longest_of_a_batch(tmp_path: Path) -> None:
    tokenizer(tmp_path / "tokenizer")
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\na\t0\na b c\t1\n")
    options = "data_dir: ., model_name_or_path: tokenizer, task: sst-2, dynamic_length: true"
    ((inputs, _),) = batches_of(f"batch_size: 2, dataset: {{GLUE: {{{options}}}}}", folder=tmp_path).epoch()
    assert inputs["attention_mask"].sum(1).tolist() == [3, 5]
    assert inputs["input_ids"].shape == (2, 5)


@pytest.mark.parametrize(
    ("dataset", "code"),
    [
        ("ImageFolder: {root: none}", "no-data"),
        ("npz: {root: none.npz}", None),
        ("CIFAR10: {root: none}", None),
        ("MNIST: {root: none}", None),
        ("ImagenetRaw: {data_path: none}", None),
        ("GLUE: {data_dir: none, model_name_or_path: none}", "no-data"),
        ("GLUE: {data_dir: none, model_name_or_path: none, task: other}", "unknown-name"),
    ],
)
def test_missing_data_is_a_clear_error(tmp_path: Path, dataset: str, code: str | None) -> None:
    with pytest.raises(BitwrightError) as caught:
        batches_of(f"dataset: {{{dataset}}}", folder=tmp_path)
    assert code is None or caught.value.codes == [code]


def test_every_data_set_is_read_or_refused_with_a_reason() -> None:
    readers = {name for name, kind in DATASETS.items() if not isinstance(kind.about, InCode)}
    assert readers == {
        *("ImageFolder", "npz", "CIFAR10", "CIFAR100", "MNIST", "FashionMNIST", "ImagenetRaw"),
        *("dummy", "dummy_v2", "sparse_dummy_v2", "GLUE"),
    }


# -- transforms ------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "Resize": {"size": [20, 30]},
    "CenterCrop": {"size": 16},
    "RandomResizedCrop": {"size": 16},
    "RandomCrop": {"size": 16},
    "Pad": {"padding": [1, 2]},
    "Transpose": {"perm": [2, 0, 1]},
    "Reshape": {"shape": [-1]},
    "CropToBoundingBox": {"offset_height": 1, "offset_width": 2, "target_height": 5, "target_width": 6},
    "CropResize": {"x": 1, "y": 2, "width": 8, "height": 9, "size": 7},
    "PaddedCenterCrop": {"size": 16, "crop_padding": 4},
    "ResizeWithRatio": {"min_dim": 20, "max_dim": 28, "padding": True},
    "ResizeWithAspectRatio": {"height": 16, "width": 20},
    "BilinearImagenet": {"height": 16, "width": 16},
    "ResizeCropImagenet": {"height": 16, "width": 18, "resize_side": 20, "data_format": "channels_first"},
}
SHAPES = {  # of a tensor that is made from the result for an image of 40 × 60
    "Resize": (3, 20, 30),
    "CenterCrop": (3, 16, 16),
    "RandomResizedCrop": (3, 16, 16),
    "RandomCrop": (3, 16, 16),
    "Pad": (3, 44, 62),
    "CropToBoundingBox": (3, 5, 6),
    "CropResize": (3, 7, 7),
    "PaddedCenterCrop": (3, 32, 32),
    "ResizeWithRatio": (3, 28, 28),
    "ResizeWithAspectRatio": (3, 16, 20),
    "BilinearImagenet": (3, 16, 16),
}


@pytest.mark.parametrize("name", [name for name, kind in TRANSFORMS.items() if not isinstance(kind.about, InCode)])
def test_every_transform_runs_on_images_arrays_and_tensors(name: str) -> None:
    step = TRANSFORMS[name].model_validate(OPTIONS.get(name, {}))
    given = image()
    for value in (given, np.array(given), to_tensor(given)):
        found = step.apply(value, np.random.default_rng(0))  # type: ignore[attr-defined]
        if name in SHAPES:
            assert tuple(to_tensor(found).shape) == SHAPES[name]
    assert name not in OPTIONS or tuple(np.shape(found)) != np.shape(value) or name == "Reshape"


def test_transforms_of_a_photo_equal_their_definition() -> None:
    given = image()
    steps = "Resize: {size: 20}, CenterCrop: {size: 16}, ToTensor: , Normalize: {mean: [0.1, 0.2, 0.3], std: [2, 4, 8]}"
    config = config_of(f"evaluation: {{accuracy: {{dataloader: {{transform: {{{steps}}}}}}}}}")
    found = given
    for step in config.loaders["evaluation"].transform:
        found = step.apply(found, np.random.default_rng(0))
    cropped = np.array(given.resize((30, 20), 2).crop((7, 2, 23, 18)))
    wanted = (cropped / 255 - [0.1, 0.2, 0.3]) / [2, 4, 8]
    assert np.allclose(found.permute(1, 2, 0).numpy(), wanted, atol=1e-6)


def test_random_transforms_depend_on_the_seed_sample_and_epoch(tmp_path: Path) -> None:
    pictures(tmp_path)
    loader = "batch_size: 8, dataset: {ImageFolder: {root: images}}, transform: {RandomResizedCrop: {size: 16}}"
    batches = batches_of(loader, folder=tmp_path)
    first, again, second = (next(batches.epoch(number))[0] for number in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    flips = [TRANSFORMS["RandomHorizontalFlip"]().apply(1, _Fixed(value)) for value in (0.9,)]  # type: ignore[attr-defined]
    assert flips == [1]


class _Fixed:
    def __init__(self, value: float) -> None:
        self.value = value

    def random(self) -> float:
        return self.value


def test_a_wrong_number_of_channels_is_an_error(tmp_path: Path) -> None:
    pictures(tmp_path)
    loader = "dataset: {ImageFolder: {root: images}}, transform: {Normalize: {mean: [0, 0], std: [1, 1]}}"
    with pytest.raises(WorkloadError) as caught:
        next(batches_of(loader, folder=tmp_path).epoch())
    assert caught.value.codes == ["invalid-data"]


# -- metrics ---------------------------------------------------------------------------------------------------


def measured(metric: str, outputs: Any, targets: Any, **given: Any) -> float:
    """The metric of a model that returns these outputs, in two batches."""
    config = config_of(f"evaluation: {{accuracy: {{metric: {{{metric}}}}}}}")
    half = len(outputs) // 2
    batches = [(outputs[:half], targets[:half]), (outputs[half:], targets[half:])]
    work = Workload(name="a", model=nn.Identity(), inputs=(outputs[:1],), evaluation=lambda: batches)
    made = LpotData(config=config, given=Given(**given)).complete(work)
    return evaluate(made, made.model)[made.metric]


def test_metrics_equal_their_definition() -> None:
    scores = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4], [0.2, 0.8], [0.9, 0.1]])
    labels = torch.tensor([1, 1, 0, 0, 1, 0])  # predicted: 1 0 1 0 1 0
    assert measured("topk: 1", scores, labels) == pytest.approx(400 / 6)
    assert measured("topk: 2", scores, labels) == 100
    assert measured("Accuracy: {}", scores, labels) == pytest.approx(400 / 6)
    assert measured("F1: {}", scores, labels) == pytest.approx(400 / 6)
    assert measured("GLUE: {task: mrpc}", scores, labels) == pytest.approx(400 / 6)
    assert measured("GLUE: {task: sst-2}", scores, labels) == pytest.approx(400 / 6)
    assert measured("GLUE: {task: cola}", scores, labels) == pytest.approx(100 / 3)
    # of 9 pairs of a 1 and a 0, the ones with 0.9, 0.8 and 0.2 rank higher in 3 + 3 + 1
    assert measured("ROC: {}", scores, labels) == pytest.approx(700 / 9)
    x, y = torch.tensor([[1.0], [2.0], [3.0], [5.0]]), torch.tensor([[1.0], [2.0], [5.0], [4.0]])
    assert measured("MSE: {}", x, y) == pytest.approx(5 / 4)
    assert measured("RMSE: {}", x, y) == pytest.approx((5 / 4) ** 0.5)
    assert measured("MAE: {}", x, y) == pytest.approx(3 / 4)
    assert measured("Loss: {}", x, y) == pytest.approx(11 / 4)
    assert measured("GLUE: {task: sts-b}", x, y) == pytest.approx(80)
    pixels = torch.tensor([[[0, 1], [1, 1]], [[0, 0], [1, 255]]])
    predicted = torch.tensor([[[0, 1], [1, 0]], [[0, 0], [1, 1]]])
    assert measured("mIOU: {num_classes: 3}", predicted, pixels) == pytest.approx(100 * (3 / 4 + 3 / 4) / 2)


def test_labels_can_be_shifted_and_batches_limited() -> None:
    scores, labels = torch.eye(4), torch.tensor([1, 2, 3, 0])
    post = "}, postprocess: {transform: {LabelShift: 1}"
    assert measured("topk: 1" + post, scores, labels) == 75
    assert measured("topk: 1}, iteration: 1, postprocess: {transform: {LabelShift: 1}", scores, labels) == 100


def test_metrics_of_texts_need_a_function_that_makes_them() -> None:
    tokens = torch.tensor([[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]])
    words = ["the", "cat", "sat", "on", "mats"]

    def texts(output: Tensor, target: Tensor) -> tuple[list[str], list[str]]:
        made = [[" ".join(words[i] for i in row) for row in one.tolist()] for one in (output, target)]
        return made[0], made[1]

    for name in ("BLEU", "SquadF1"):
        with pytest.raises(PlanError) as caught:
            measured(f"{name}: {{}}", tokens, tokens)
        assert caught.value.codes == ["cannot-run"]
        assert measured(f"{name}: {{}}", tokens, tokens, postprocess=texts) == pytest.approx(100)
        assert measured(f"{name}: {{}}", tokens, tokens.flip(0), postprocess=texts) < 101


@pytest.mark.parametrize("name", ["mAP", "COCOmAP", "COCOmAPv2", "VOCmAP"])
def test_metrics_of_detection_need_eval_func(name: str) -> None:
    with pytest.raises(PlanError) as caught:
        measured(f"{name}: {{}}", torch.zeros(2, 2), torch.zeros(2))
    assert [(problem.where, problem.code) for problem in caught.value.problems] == [
        ("evaluation.accuracy", "cannot-run")
    ]
    assert measured(f"{name}: {{}}", torch.zeros(2, 2), torch.zeros(2), evaluate=lambda model: 12.5) == 12.5


@pytest.mark.parametrize("name", [name for name, kind in METRICS.items() if not isinstance(kind.about, InCode)])
def test_every_metric_reports_outputs_of_another_shape(name: str) -> None:
    counter = METRICS[name]().counter()  # type: ignore[attr-defined]
    predict = make_evaluate({"m": lambda: counter}, lambda: [(torch.zeros(2, 7, 3), torch.zeros(2, 5))])
    if name == "Loss":  # any number is a loss
        assert predict(nn.Identity())["m"] == 0
    else:
        with pytest.raises(BitwrightError) as caught:
            predict(nn.Identity())
        assert caught.value.codes == ["invalid-output"]


def test_problems_of_all_sections_are_reported_together() -> None:
    text = """
quantization:
  approach: quant_aware_training
  calibration: {dataloader: {dataset: {ImageFolder: {root: none}}}}
evaluation: {accuracy: {metric: {topk: 1}, dataloader: {dataset: {COCORaw: {root: x}}}}}
"""
    work = Workload(name="a", model=nn.Linear(2, 2), inputs=(torch.zeros(1, 2),))
    with pytest.raises(PlanError) as caught:
        LpotData(config=config_of(text)).complete(work)
    assert {(str(problem.where).partition(":")[0], problem.code) for problem in caught.value.problems} == {
        ("quantization.calibration.dataloader", "no-data"),
        ("evaluation.accuracy.dataloader.dataset", "cannot-run"),
        ("evaluation.accuracy", "no-evaluation-data"),
        ("quantization.train.optimizer", "training-required"),
        ("quantization.train.criterion", "training-required"),
        ("quantization.train.dataloader", "training-required"),
    }
