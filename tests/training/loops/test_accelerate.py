"""A plain loop on Accelerate: Qat, then the optimizer, then `accelerator.prepare`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from tests.training.loops import common
from torch.utils.data import DataLoader, TensorDataset

from bitwright.training import Qat


class Loop:
    """What a user of Accelerate writes, with the lines for Qat."""

    def __init__(self, folder: Path, *, precision: str = "no", accumulate: int = 1, **options: Any) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = Accelerator(
            cpu=True,
            mixed_precision=precision,
            gradient_accumulation_steps=accumulate,
            project_dir=str(folder),
        )
        model = common.workload().model
        self.qat = Qat(model, common.samples()[0].split(50), **options)
        optimizer = torch.optim.SGD(self.qat.parameter_groups(weight_decay=1e-3), lr=0.1, momentum=0.9)
        loader = DataLoader(TensorDataset(*common.samples()), batch_size=20)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.accelerator.register_for_checkpointing(self.qat)
        self.settled = 0

    def epochs(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            self.model.train()
            for x, y in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = F.cross_entropy(self.model(x), y)
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                if self.accelerator.sync_gradients:
                    self.qat.after_step()
                    self.settled += 1
                losses.append(loss.item())
            self.qat.after_epoch()
        return losses


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16", "accumulate": 2}])
def test_it_trains_and_deploys(tmp_path: Path, settings: dict[str, Any]) -> None:
    loop = Loop(tmp_path, **settings)
    loop.qat.check_optimizer(loop.optimizer)
    common.optimizer_is_right(loop.optimizer, loop.qat.model)
    before = common.scales(loop.qat.model)
    common.falls(loop.epochs(2))
    assert loop.settled == (10 if settings else 20)
    loop.qat.finish()
    common.trained(before, loop.qat.model)
    common.deploys(loop.qat, tmp_path / "model.onnx", common.samples()[0])


def test_the_unwrapped_model_runs(tmp_path: Path) -> None:
    loop = Loop(tmp_path, precision="bf16")
    loop.epochs(1)
    x = common.samples()[0]
    bare = loop.accelerator.unwrap_model(loop.model, keep_fp32_wrapper=False)
    assert bare is loop.qat.model
    outputs = bare.eval()(x)
    loop.qat.finish()
    torch.testing.assert_close(bare(x), outputs, rtol=0, atol=0.05)
    common.deploys(loop.qat, tmp_path / "model.onnx", x)


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"quantizer": "plain", "observer": "ema-minmax", "freeze_observers": 2}],
)
def test_save_state_resumes_bit_identical(tmp_path: Path, options: dict[str, Any]) -> None:
    loop = Loop(tmp_path, **options)
    loop.epochs(1)
    loop.accelerator.save_state(str(tmp_path / "state"))
    whole = loop.epochs(2)
    again = Loop(tmp_path, **options)
    again.accelerator.load_state(str(tmp_path / "state"))
    assert again.epochs(2) == whole
    assert common.same(common.state(again.qat.model), common.state(loop.qat.model))
