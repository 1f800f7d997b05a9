"""Why OpenVINO's accuracy isn't the simulated one: sums that saturate without a guard, an add that doesn't round, ties.

    python benchmarks/leaderboard_gaps.py

Part of `make leaderboard`; trains rows of the reference leaderboard as they are and without guards, and compares codes
at single sites. Needs oneDNN held to AVX2, as the Makefile does: with VNNI nothing saturates. Writes
results/leaderboard_gaps.json.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from numpy.typing import NDArray

from bitwright import GridConfig, TrainConfig, Trainer, check
from bitwright.backends import backend
from bitwright.bench.float_networks import FloatNetworks
from bitwright.bench.grid import RowTask
from bitwright.bench.grid_row import RowOutcome, gave_up, on_device, plan_of
from bitwright.core.task_store import open_study
from bitwright.deployment.runtimes.openvino import OpenVino
from bitwright.workload import Workload, evaluate

HERE = Path(__file__).parent
SATURATING = (  # the largest gaps of the leaderboard that had no guards at the first and the last layer
    ("residual-cifar10", "dorefa", 4),
    ("residual-fashion-mnist", "dorefa", 4),
    ("depthwise-fashion-mnist", "lsq", 2),
)
ADDING = ("depthwise-cifar10", "dsq", 8)
TIED = ("depthwise-cifar10", "dorefa", 2)
AT_TIE = 1e-4  # of a code


def train(task: RowTask, starts: FloatNetworks, *, guarded: bool) -> tuple[torch.nn.Module, Workload]:
    start, table = starts(task), backend(task.backend)
    plan, _ = plan_of(task, table, start.graph, start.workload.name)
    if not guarded:
        plan = replace(plan, sites={site: replace(spec, guard=None) for site, spec in plan.sites.items()})
    workload = replace(start.workload, model=copy.deepcopy(start.workload.model))
    own = {"quantizer_lr": task.algorithm.quantizer_lr, "quantizer_decay": task.algorithm.quantizer_decay}
    config = TrainConfig(seed=task.seed, drop_last=True, **own, **task.training.model_dump())
    return Trainer(workload, precision=plan, backend=task.backend, config=config).fit().model, workload


def saturated(task: RowTask, starts: FloatNetworks, folder: Path, *, guarded: bool) -> dict[str, Any]:
    model, workload = train(task, starts, guarded=guarded)
    accuracy = evaluate(workload, model)[workload.metric]
    ran = on_device(model, backend(task.backend), workload, accuracy, task)
    OpenVino.write(model, folder / "model.onnx", workload.inputs)
    seen = check(model, folder / "model.onnx", [first_images(workload)], runtime="openvino", per_site=True)
    others = [site.site for site in seen.sites if site.largest > 1]
    return {
        "row": task.key,
        "guarded": guarded,
        "accuracy": accuracy,
        "gap": None if ran is None else ran.gap,
        "decibels": seen.outputs[0].sqnr_db,
        "first": others[0] if others else None,
    }


def added(task: RowTask, starts: FloatNetworks, folder: Path) -> dict[str, Any]:
    """Whether the codes behind an add are those of a rounded or of an unrounded operand."""
    model, workload = train(task, starts, guarded=True)
    path = folder / "model.onnx"
    OpenVino.write(model, path, workload.inputs)
    graph = ir.load(path).graph
    add, behind = first_add(graph)
    operands = [value.producer().inputs[0].producer() for value in add.inputs]  # each a QuantizeLinear
    fused = next(node for node in operands if node.inputs[0].producer().op_type == "Conv")
    other = next(node for node in operands if node is not fused)
    images = first_images(workload).numpy()
    inside = values(path, [fused.inputs[0].name, fused.outputs[0].name, other.outputs[0].name], images)
    constants = OpenVino.stored(path)

    def grid(node: ir.Node) -> tuple[NDArray[Any], int]:
        return constants[node.inputs[1].name], int(constants[node.inputs[2].name])

    def numbers(node: ir.Node, codes: NDArray[Any]) -> NDArray[Any]:
        scale, zero = grid(node)
        return (codes.astype(np.float32) - zero) * scale

    def codes(total: NDArray[Any]) -> NDArray[Any]:
        scale, zero = grid(behind)
        return np.clip(np.rint(total / scale) + zero, 0, 255)

    rest = numbers(other, inside[2])
    rounded, unrounded = codes(numbers(fused, inside[1]) + rest), codes(inside[0] + rest)
    site, found = seen_on_openvino(path, behind, images)
    return {
        "row": task.key,
        "site": site,
        "codes": int(found.size),
        "unlike rounded": float((found != rounded).mean()),
        "unlike unrounded": float((found != unrounded).mean()),
        "largest": int(np.abs(found - rounded).max()),
    }


def tied(task: RowTask, starts: FloatNetworks, folder: Path) -> dict[str, Any]:
    """How many sums of two grids lie in the middle between two codes, and whether only those codes differ."""
    model, workload = train(task, starts, guarded=True)
    path = folder / "model.onnx"
    OpenVino.write(model, path, workload.inputs)
    add, behind = first_add(ir.load(path).graph)
    images = first_images(workload).numpy()
    total, codes = values(path, [add.outputs[0].name, behind.outputs[0].name], images)
    scale = OpenVino.stored(path)[behind.inputs[1].name]
    site, found = seen_on_openvino(path, behind, images)
    steps, differ = total / scale, found != codes
    tie = np.abs(steps - np.floor(steps) - 0.5) < AT_TIE
    return {
        "row": task.key,
        "site": site,
        "codes": int(found.size),
        "differ": float(differ.mean()),
        "ties": float(tie.mean()),
        "differ elsewhere": float((differ & ~tie).mean()),
    }


def first_add(graph: ir.Graph) -> tuple[ir.Node, ir.Node]:
    """The add, and what rounds its sum: directly, or behind a clip to fewer codes than 8 bits have."""
    add = next(node for node in graph if node.op_type == "Add")
    behind = next(use.node for use in add.outputs[0].uses())
    if behind.op_type == "Clip":
        behind = next(use.node for use in behind.outputs[0].uses())
    assert behind.op_type == "QuantizeLinear"
    return add, behind


def seen_on_openvino(path: Path, rounding: ir.Node, images: NDArray[Any]) -> tuple[str, NDArray[Any]]:
    """A site and its codes; only that one is looked at, so that all else stays fused as it is."""
    site = str(rounding.outputs[0].name).removesuffix(".codes")
    probe = OpenVino.probing(path, [site])
    return site, dict(zip(probe.outputs, probe.run({probe.inputs[0]: images}), strict=True))[f"{site}.codes"]


def values(path: Path, names: list[str], images: NDArray[Any]) -> list[NDArray[Any]]:
    """What these values of an artefact are, computed as it is written: nothing fused."""
    model = ir.load(path)
    for node in model.graph:
        if node.outputs[0].name in names:
            integer = node.op_type == "QuantizeLinear"
            node.outputs[0].dtype = ir.DataType.UINT8 if integer else ir.DataType.FLOAT
            model.graph.outputs.append(node.outputs[0])
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    return session.run(names, {session.get_inputs()[0].name: images})


def first_images(workload: Workload) -> torch.Tensor:
    return next(iter(workload.evaluation()))[0]


def main() -> None:
    torch.set_num_threads(1)
    study = open_study(None, "gaps", {}, resume=True, kind=RowOutcome, gave_up=gave_up)
    starts = FloatNetworks(HERE / "leaderboard.starts", study)
    tasks = {
        (task.model.label, task.algorithm.label, task.bits): task
        for task in GridConfig.load(HERE / "leaderboard.yaml").tasks()
        if (task.backend, task.seed) == ("openvino", 0)
    }
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        found = {
            "saturation": [
                {**dict(zip(("model", "algorithm", "bits"), key, strict=True)), **one}
                for key in SATURATING
                for one in [saturated(tasks[key], starts, place, guarded=guarded) for guarded in (False, True)]
            ],
            "add": added(tasks[ADDING], starts, place),
            "ties": tied(tasks[TIED], starts, place),
        }
    study.close()
    print(json.dumps(found, indent=1))
    (HERE / "results" / "leaderboard_gaps.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
