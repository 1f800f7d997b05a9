"""The optimizer that a run's settings ask for."""

from __future__ import annotations

import torch
from torch import nn

from bitwright.train.config import TrainConfig
from bitwright.train.qat import parameter_groups
from bitwright.workload import to_train


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """SGD or AdamW; each group keeps its highest learning rate as `peak`, of which the schedule takes a share."""
    to_train(model)
    groups = parameter_groups(model, weight_decay=config.weight_decay, quantizer_lr=config.quantizer_lr)
    for group in groups:
        if group["name"] == "quantizers":
            group["weight_decay"] = config.quantizer_decay
    if config.optimizer == "adamw":
        made: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(config.momentum, 0.999))
    else:
        made = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.momentum > 0)
    for group in made.param_groups:
        group["peak"] = group["lr"]
    return made
