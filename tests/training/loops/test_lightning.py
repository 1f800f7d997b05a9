"""The callback in a real Lightning Trainer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import FSDPStrategy
from tests.training.loops import common
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bitwright import BitwrightError
from bitwright.training import parameter_groups
from bitwright.training.loops.lightning import LightningQatCallback

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",  # few workers, few batches
    "ignore:.*does not have many workers",
    "ignore:.*LeafSpec.*is deprecated",  # Lightning's own use of torch's pytree
    "ignore:Checkpoint directory .* exists and is not empty",
)


class Module(L.LightningModule):
    def __init__(self, *, decay_all: bool = False) -> None:
        super().__init__()
        self.net = common.workload().model
        self.losses: list[float] = []
        self.validated: list[float] = []
        self.decay_all = decay_all

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: Any, index: int) -> Tensor:
        torch.manual_seed(self.global_step)  # dropout: Lightning's checkpoints hold no random state
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        assert not self.net.training
        self.validated.append(F.cross_entropy(self(batch[0]), batch[1]).item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = self.parameters() if self.decay_all else parameter_groups(self, weight_decay=0.01)
        return torch.optim.AdamW(groups, lr=0.01)


class Watch(L.Callback):
    def __init__(self, part: str) -> None:
        self.part = part

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert not trainer.optimizers[0].state or trainer.global_step
        model = pl_module.get_submodule(self.part)
        common.optimizer_is_right(trainer.optimizers[0], model)
        self.before = common.scales(model)


def loader(batch: int = 20) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*common.samples()), batch_size=batch)


def fit(
    folder: Path,
    module: Module,
    part: str = "net",
    *,
    resume: Path | None = None,
    watch: Watch | None = None,
    **given: Any,
) -> LightningQatCallback:
    options = {key: given.pop(key) for key in ("quantizer", "observer", "freeze_observers") if key in given}
    settings = {"max_epochs": 2, "accelerator": "cpu", "logger": False, "enable_progress_bar": False, **given}
    callback = LightningQatCallback(lambda: common.samples()[0].split(50), module=part, **options)
    extra = [watch] if watch else []
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        default_root_dir=folder, enable_model_summary=False, callbacks=[*extra, callback], devices=1, **settings
    )
    trainer.fit(module, loader(), loader(50), ckpt_path=resume)
    return callback


@pytest.mark.parametrize(
    ("part", "settings"),
    [("net", {}), ("", {"accumulate_grad_batches": 2}), ("net", {"precision": "bf16-mixed"})],
)
def test_it_trains_and_deploys(tmp_path: Path, part: str, settings: dict[str, Any]) -> None:
    module, watch = Module(), Watch(part)
    qat = fit(tmp_path, module, part, watch=watch, **settings).qat
    common.falls(module.losses)
    assert module.validated[-1] < module.validated[0]
    common.trained(watch.before, qat.model)
    assert (qat.epochs, qat.following) == (2, [])
    common.deploys(qat, tmp_path / "model.onnx", common.samples()[0])


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"quantizer": "plain", "observer": "ema-minmax", "freeze_observers": 1}],
)
def test_resuming_is_bit_identical(tmp_path: Path, options: dict[str, Any]) -> None:
    whole = fit(tmp_path / "whole", Module(), **options)
    fit(tmp_path / "parts", Module(), max_epochs=1, **options)
    saved = next((tmp_path / "parts").rglob("*.ckpt"))
    module = Module()
    again = fit(tmp_path / "parts", module, resume=saved, **options)
    assert len(module.losses) == 10  # the second epoch
    assert common.same(common.state(whole.qat.model), common.state(again.qat.model))


def test_unsupported_setups_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(BitwrightError) as caught:
        fit(tmp_path, Module(decay_all=True))
    assert "scales-decay" in caught.value.codes

    class Late(Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Identity()

    with pytest.raises(BitwrightError) as caught:
        fit(tmp_path, Late())
    assert "no-parameters" in caught.value.codes
    trainer: Any = SimpleNamespace(strategy=FSDPStrategy())  # Lightning itself wants GPUs for it
    with pytest.raises(BitwrightError) as caught:
        LightningQatCallback([]).setup(trainer, Module(), "fit")
    assert "unsupported-parallelism" in caught.value.codes
    module = Module()
    module.net.eval()
    with pytest.raises(BitwrightError) as caught:
        fit(tmp_path, module, quantizer="plain")
    assert "evaluation-mode" in caught.value.codes
