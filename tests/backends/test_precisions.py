"""Names that stand for kernels by kind of operator."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitwright import TrainConfig, Trainer, capture, load_workload, make_plan, predict, profile
from bitwright.backends.precisions import KERNEL_PRECISIONS, kernel_precision, resolve
from bitwright.core.errors import BitwrightError, PlanError, TrainError
from bitwright.graph import Graph


def graph() -> Graph:
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.Flatten()]
    return capture(nn.Sequential(*layers, nn.Linear(16, 4)).eval(), torch.ones(1, 3, 10, 10))


def test_convolutions_are_integers_and_activations_have_16_bits() -> None:
    plan = make_plan(graph(), precision="qsync-int8", model="mine")
    assert {name: spec.format for name, spec in plan.compute.items()} == {
        "0": "int8",
        "2": "fp16",
        "3": "fp16",
        "4": "int8",
    }
    assert plan.model == "mine"
    assert plan.compute["3"].why == "max_pool2d in qsync-int8"


def test_patterns_are_kept_in_float() -> None:
    plan = kernel_precision("qsync-int8", graph(), {"keep_float": ["[04]"]})
    assert {name for name, spec in plan.compute.items() if not spec.is_low_precision} == {"0", "4"}
    with pytest.raises(PlanError) as error:
        kernel_precision("qsync-int8", graph(), {"keep_float": ["head*"]})
    assert error.value.codes == ["unknown-operator"]


def test_other_choices_have_no_effect_and_are_refused() -> None:
    with pytest.raises(BitwrightError) as error:
        make_plan(graph(), precision="qsync-int8", weights="int4/channel/sym")
    assert error.value.codes == ["ignored-argument"]
    with pytest.raises(TrainError) as refused:
        resolve("qsync-int8", None, {})
    assert refused.value.codes == ["kernel-precision"]


def test_a_model_without_such_operators_is_refused() -> None:
    with pytest.raises(PlanError) as error:
        kernel_precision("qsync-int8", capture(nn.Linear(4, 4), torch.ones(1, 4)))
    assert error.value.codes == ["plan-all-float"]


def test_quantizing_precisions_are_those_of_quantize() -> None:
    made = make_plan(graph(), precision="w4a8", saturating=False)
    assert str(made.sites["4:weight"].format).startswith("int")
    assert made.backend == "academic"


@pytest.mark.parametrize("name", KERNEL_PRECISIONS)
def test_training_and_predictions_follow_it(name: str) -> None:
    work = load_workload("digits-untrained")
    device = profile(work, plans=[name], published="nvidia-t4", batch=8)
    low, plain = predict(work, device, name, batch=8), predict(work, device, batch=8)
    assert low.devices[0].stood_in == 0
    assert low.seconds > 1.1 * plain.seconds  # in a network this small, casts cost more than the kernels gain
    run = Trainer(work, precision=name, config=TrainConfig(batch=512)).fit()
    assert run.notes[0] == "of 19 operators, 5 in int8, 6 in fp16; all others in float"
    with pytest.raises(BitwrightError):
        Trainer(work, precision=name, weights="int4/channel/sym")
