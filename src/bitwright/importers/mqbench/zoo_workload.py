"""The network and the images that a file of MQBench's zoo names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from bitwright.core.errors import BitwrightError, PlanError, Problem
from bitwright.core.registry import NETWORKS
from bitwright.deployment.checkpoint import load_state, read_state
from bitwright.importers.mqbench.settings import load_mqbench
from bitwright.importers.mqbench.zoo import ZooConfig
from bitwright.training.data import seed_all
from bitwright.training.distributed import current_ranks
from bitwright.workload import ImageFiles, TransformedImages, Workload

__all__ = ["file_workload", "weights_note", "workers", "zoo_config", "zoo_network", "zoo_workload"]

Part = Literal["train", "test"]
_FOLDERS = {"train": ("train",), "test": ("val", "test")}


def file_workload(path: Path, *, data: Path | None = None) -> Workload:
    """The workload of a file, for `load_workload`."""
    return zoo_workload(zoo_config(path), folder=path.parent, data=data)


def zoo_config(path: str | Path) -> ZooConfig:
    """Read a file of the zoo. Files of the toolkit are rejected."""
    config = load_mqbench(path).config
    if isinstance(config, ZooConfig):
        return config
    raise BitwrightError(
        "the file has no qparams: it is one of MQBench's toolkit, which doesn't train",
        where=str(path),
        fix="pass a config.yaml of the benchmark",
        code="not-a-zoo-file",
    )


def zoo_workload(config: ZooConfig, *, folder: Path, data: Path | None = None) -> Workload:
    """The network with its images.

    `data` is a folder with `train` and `val` (or only one folder for both), each with a subfolder per class, or with
    lists `train.txt` and `val.txt` of lines `path label` in it or in `meta`. Without `data`, the file's `root_dir` and
    `meta_file` are used; relative paths are relative to `folder`. All problems are reported together.
    """
    problems: list[Problem] = []
    parts: dict[Part, ImageFiles] = {}
    for part in ("train", "test"):
        try:
            parts[part] = _files(config, part, folder, data)
        except BitwrightError as error:
            problems += [one for one in error.problems if one not in problems]
    classes = 1000 if config.model is None else config.model.kwargs.num_classes
    for part, found in parts.items():
        if max(found.labels) >= classes:
            what, fix = f"the network has {classes} classes", "set model.kwargs.num_classes, or use other images"
            where = f"labels of {part}"
            problems.append(Problem(what=what, where=where, value=max(found.labels), fix=fix, code="label-too-large"))
    if problems:
        raise PlanError(problems, title="the images can't be used")
    own, size = config.data, config.data.input_size
    modes = {part: section.transforms.type if (section := getattr(own, part)) else None for part in parts}
    training = TransformedImages(
        parts["train"], transforms=modes["train"] or "STANDARD", size=size, resize=own.test_resize
    )
    testing = TransformedImages(parts["test"], transforms=modes["test"] or "ONECROP", size=size, resize=own.test_resize)
    load, network = _loader(testing, config), zoo_network(config)
    continued = _pretrained(config, folder)
    if continued is not None:
        _continue(network, continued, config)
    return Workload(
        name=config.model.type if config.model is not None else "network",
        model=network,
        inputs=(torch.zeros(1, 3, size, size),),
        calibration=lambda: [_first(training, config)],
        evaluation=load,
        evaluate=partial(_topk, load, own.test.evaluator.kwargs.topk if own.test is not None else (1, 5)),
        training=lambda: training,
        loss=F.cross_entropy,
    )


def zoo_network(config: ZooConfig) -> nn.Module:
    """The network with new weights, which depend on the seed only."""
    assert config.model is not None
    own, options = config.model.kwargs, config.model.kwargs.bn.kwargs
    given = options.model_dump(include={"momentum", "eps", "affine", "track_running_stats"}, exclude_unset=True)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    several = own.bn.use_sync_bn and max(world, current_ranks().world) > 1
    if several and options.group_size not in (None, 0, world):
        raise BitwrightError(
            "statistics are shared by all processes",
            where="model.kwargs.bn.kwargs.group_size",
            value=options.group_size,
            fix=f"use {world}, or remove it",
            code="cannot-run",
        )
    network: Callable[..., nn.Module] = NETWORKS.get(config.model.type)
    arguments: dict[str, Any] = {"dropout": own.dropout} if "dropout" in own.model_fields_set else {}
    state = torch.random.get_rng_state()
    seed_all(config.seed, "model")
    made = network(
        classes=own.num_classes,
        image_size=config.data.input_size,
        **({"norm": partial(nn.BatchNorm2d, **given)} if given else {}),
        **arguments,
    )
    torch.random.set_rng_state(state)
    return nn.SyncBatchNorm.convert_sync_batchnorm(made) if several else made


def _pretrained(config: ZooConfig, folder: Path) -> Path | None:
    """The checkpoint that the file continues, if it exists."""
    named = config.saver.pretrain
    return None if named is None or not (folder / named.path).is_file() else folder / named.path


def _continue(network: nn.Module, file: Path, config: ZooConfig) -> None:
    """Load the weights, except those that the file leaves out."""
    state = network.state_dict()
    ignored = set() if config.saver.pretrain is None else set(config.saver.pretrain.ignore.model)
    given = {name: tensor for name, tensor in read_state(file).items() if name not in ignored}
    kept = {name: tensor for name, tensor in state.items() if name in ignored}
    load_state(network, {**kept, **given}, where=str(file))


def weights_note(config: ZooConfig, folder: Path, checkpoint: Path | None) -> str:
    """Where the weights come from."""
    if checkpoint is not None:
        return f"the weights are those of {checkpoint}"
    continued = _pretrained(config, folder)
    if continued is not None:
        return f"the weights are those of {continued} (saver.pretrain), without the state of its optimizer"
    absent = config.saver.pretrain
    why = "" if absent is None else f" ({absent.path} of saver.pretrain doesn't exist)"
    return f"the network starts untrained{why}; name weights with --checkpoint (checkpoint= in Python)"


def workers(config: ZooConfig) -> int:
    """Processes that load images: as many as the file says, but no more than this machine has cores."""
    return min(config.data.num_workers, os.cpu_count() or 1)


def _files(config: ZooConfig, part: Part, folder: Path, data: Path | None) -> ImageFiles:
    section = getattr(config.data, part)
    if data is not None:
        return _in_folder(data, part)
    where = f"data.{part}"
    if section is None:
        fix = "give the folder of images: --data FOLDER"
        raise BitwrightError("the file names no images", where=where, fix=fix, code="no-data")
    root, listing = folder / section.root_dir, folder / section.meta_file
    missing = [str(path) for path in (root, listing) if not path.exists()]
    if missing:
        raise BitwrightError(
            "the file's images are not on this machine",
            where=where,
            value=", ".join(missing),
            fix="give a folder of images: --data FOLDER",
            code="no-data",
        )
    return ImageFiles.from_list(listing, root)


def _in_folder(data: Path, part: Part) -> ImageFiles:
    if not data.is_dir():
        fix = "give a folder of images"
        raise BitwrightError("the folder doesn't exist", where=str(data), fix=fix, code="no-data")
    names = _FOLDERS[part]
    root = next((data / name for name in names if (data / name).is_dir()), data)
    lists = [place / f"{name}.txt" for place in (data, data / "meta") for name in names]
    listing = next((file for file in lists if file.is_file()), None)
    return ImageFiles.from_folder(root) if listing is None else ImageFiles.from_list(listing, root)


def _loader(images: Dataset[Any], config: ZooConfig) -> Callable[[], Iterator[tuple[Tensor, Tensor]]]:
    def load() -> Iterator[tuple[Tensor, Tensor]]:
        loader = DataLoader(images, batch_size=config.data.batch_size, num_workers=workers(config))
        yield from loader

    return load


def _first(images: TransformedImages, config: ZooConfig) -> Tensor:
    """A training batch, from which ranges start, as in MQBench."""
    state = torch.random.get_rng_state()
    torch.random.manual_seed(config.seed)
    order = torch.randperm(len(images))[: config.data.batch_size].tolist()
    pixels, _ = default_collate([images[index] for index in order])
    torch.random.set_rng_state(state)
    first: Tensor = pixels
    return first


def _topk(
    load: Callable[[], Iterator[tuple[Tensor, Tensor]]], wanted: tuple[int, ...], predict: Callable[..., Any]
) -> dict[str, float]:
    """The share of images whose label is among the k largest outputs, in percent."""
    hits, samples = dict.fromkeys((1, *wanted), 0), 0
    for pixels, labels in load():
        output = predict(pixels)
        found = output.topk(min(max(hits), output.shape[1]), dim=1).indices == labels[:, None]
        found &= ~output.isnan().any(dim=1, keepdim=True)
        samples += len(labels)
        for k in hits:
            hits[k] += int(found[:, :k].sum())
    return {**{f"top{k}": 100 * count / samples for k, count in hits.items()}, "n": float(samples)}
