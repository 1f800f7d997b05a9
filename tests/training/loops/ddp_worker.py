"""Started twice by torchrun: `transformers.Trainer` (so Accelerate, too) with DDP; both ranks must end alike."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainingArguments

from bitwright.training import Qat
from bitwright.training.distributed import current_ranks, leave_group
from bitwright.training.loops.huggingface import HuggingFaceQatCallback


def main(folder: str, quantizer: str) -> None:
    args = TrainingArguments(  # first: it starts the process group
        folder,
        max_steps=6,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        weight_decay=0.01,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        save_strategy="no",
    )
    args.device  # noqa: B018
    torch.manual_seed(0)
    sizes = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic"}
    model = ResNetForImageClassification(ResNetConfig(num_channels=1, num_labels=3, **sizes))
    images, labels = torch.randn(96, 1, 16, 16), torch.arange(96) % 3
    own = (images * (1 + dist.get_rank()))[dist.get_rank() :: 2].split(16)  # another half, with other ranges
    qat = Qat(model, own, quantizer=quantizer, observer="ema-minmax")
    callback = HuggingFaceQatCallback(qat)
    data = [{"pixel_values": x, "labels": y} for x, y in zip(images, labels, strict=True)]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Trainer(
        model,
        args,
        train_dataset=data,
        callbacks=[callback],
        optimizer_cls_and_kwargs=callback.optimizer(args),
    ).train()
    current_ranks().agree(model)  # raises if ranks have different weights or scales
    moved = [n for n, t in model.state_dict().items() if n.startswith("bitwright.") and not torch.equal(t, before[n])]
    assert current_ranks().world == 2
    assert moved
    if current_ranks().first:
        qat.export(f"{folder}/model.onnx")
        assert qat.quantized.check(f"{folder}/model.onnx").passed
    dist.barrier()
    leave_group()  # its threads must not outlive the interpreter


if __name__ == "__main__":
    main(*sys.argv[1:])
