"""The workload of a toolkit file: a network of the registry with its checkpoint, and a folder of images."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import fuse_conv_bn_eval

from bitwright.core.errors import BitwrightError, PlanError, Problem, WorkloadError, did_you_mean, shortened
from bitwright.core.registry import NETWORKS
from bitwright.deployment.checkpoint import read_state
from bitwright.graph import Graph, capture
from bitwright.importers.mqbench.toolkit import ToolkitConfig
from bitwright.workload import Workload
from bitwright.workload.datasets import Dataset

__all__ = ["image_workload", "load_weights"]

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_PARTS = ("state_dict", "model", "net")
"""The keys under which training scripts store the weights."""


def image_workload(
    config: ToolkitConfig, *, data: Path | None = None, checkpoint: Path | None = None
) -> tuple[Workload, list[str]]:
    """The network and the images that a file names, and what differs from the file.

    As in MQBench, batch norms are merged into the convolutions before them, calibration uses random parts of random
    training images, and evaluation the center of validation images. `data` and `checkpoint` replace the paths in the
    file. Without a checkpoint the network is untrained.
    """
    notes: list[str] = []
    problems: list[Problem] = []
    folder = data or Path(config.data.path).expanduser()
    if config.model.type not in NETWORKS:
        fix = did_you_mean(config.model.type, NETWORKS.names())
        problems.append(
            Problem(what="unknown network", where="model.type", value=config.model.type, fix=fix, code="unknown-name")
        )
    if not folder.is_dir():
        fix = "give a folder with train/ and val/, or one folder of images (--data FOLDER)"
        where = "data.path" if data is None else "--data"
        problems.append(
            Problem(what="there is no such folder", where=where, value=str(folder), fix=fix, code="no-data")
        )
    if checkpoint is not None and not checkpoint.is_file():
        problems.append(
            Problem(
                what="the checkpoint doesn't exist",
                where="--checkpoint",
                value=str(checkpoint),
                fix="give a .safetensors or .pth file",
                code="no-such-checkpoint",
            )
        )
    if problems:
        raise PlanError(problems, title="the file can't run")
    calibration, evaluation = _datasets(config, folder, notes)
    classes = 1 + max(label for _, label in (*calibration.files(), *evaluation.files()))
    if classes > config.model.kwargs.num_classes:
        raise WorkloadError(
            f"the images have {classes} classes",
            where="model.kwargs.num_classes",
            value=config.model.kwargs.num_classes,
            fix="raise num_classes, or use other images",
            code="invalid-data",
        )
    model = _network(config, checkpoint, notes)
    size = config.data.input_size
    example = torch.zeros(1, 3, size, size)

    def calibrate() -> Iterator[Tensor]:
        batches = 1 if config.quantize is None else config.quantize.cali_batchsize
        return islice(calibration.inputs(), batches)

    workload = Workload(
        name=config.model.type,
        model=_merge_norms(model, example),
        inputs=(next(calibrate()),),
        calibration=calibrate,
        evaluation=evaluation.labelled,
    )
    return workload, notes


def _datasets(config: ToolkitConfig, folder: Path, notes: list[str]) -> tuple[Dataset, Dataset]:
    """The images for calibration and for evaluation."""
    validation = next((one for one in (folder / "val", folder / "images") if one.is_dir()), folder)
    training = folder / "train"
    if not training.is_dir():
        training = validation
        notes.append(f"{folder} has no folder train, so calibration and evaluation use the same images")
    center = Dataset(
        images=validation,
        resize=config.data.test_resize,
        crop=config.data.input_size,
        batch_size=config.data.batch_size,
        interpolation="bilinear",
        mean=_MEAN,
        std=_STD,
        seed=config.process.seed,
    )
    changes = {"images": training, "resize": None, "crop": None, "flip": True, "shuffle": True}
    return center.model_copy(update={**changes, "random_crop": config.data.input_size}), center


def _network(config: ToolkitConfig, checkpoint: Path | None, notes: list[str]) -> nn.Module:
    path = checkpoint or (None if config.model.path is None else Path(config.model.path).expanduser())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.process.seed)
        model: nn.Module = NETWORKS.get(config.model.type)(
            classes=config.model.kwargs.num_classes, image_size=config.data.input_size
        )
    if path is not None and path.is_file():
        load_weights(model, path)
    else:
        missing = "model.path is missing" if path is None else f"{path} doesn't exist"
        notes.append(f"the network is untrained, because {missing} (give a file with --checkpoint)")
    return model.eval()


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a float checkpoint: a safetensors file, or a PyTorch file with tensors only.

    The weights may be inside `state_dict` or `model`, and their names may begin with `module.`, as DDP writes them.
    """
    if path.suffix == ".safetensors":
        state = read_state(path)
    else:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # pickle, zipfile and torch raise different types
            raise BitwrightError(
                f"the checkpoint can't be read: {shortened(str(error))}",
                where=str(path),
                fix="save a state dict: torch.save(model.state_dict(), path)",
                code="damaged-checkpoint",
            ) from error
        for part in _PARTS:
            found = found[part] if isinstance(found, dict) and isinstance(found.get(part), dict) else found
        state = found if isinstance(found, dict) else {}
    state = {str(name).removeprefix("module."): value for name, value in state.items()}
    try:
        model.load_state_dict(state)
    except (RuntimeError, AttributeError, TypeError) as error:
        raise BitwrightError(
            f"the checkpoint doesn't fit {type(model).__name__}: {shortened(' '.join(str(error).split()))}",
            where=str(path),
            fix="give a checkpoint with torchvision's parameter names",
            code="checkpoint-mismatch",
        ) from error


def _merge_norms(model: nn.Module, example: Tensor) -> nn.Module:
    """Merge batch norms into the convolutions before them; an identity remains in their places."""
    graph: Graph = capture(model, example)
    for op in graph.ops:
        if op.kind != "batch_norm" or op.port("input") is None:
            continue
        (source, *others) = op.ports[0].sources
        before = graph.by_name.get(source.name) if source.kind == "op" else None
        if others or before is None or len(graph.consumers.get(source, ())) != 1:
            continue
        try:
            conv, norm = model.get_submodule(before.module), model.get_submodule(op.module)
        except AttributeError:
            continue
        if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
            _replace(model, before.module, fuse_conv_bn_eval(conv, norm))
            _replace(model, op.module, nn.Identity())
    return model


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module.eval())
