"""What every loop must show: the loss falls, scales are trained in float32 and without decay, the result deploys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitwright import Workload, load_workload, quantizers_of
from bitwright.training import Qat


def workload() -> Workload:
    return load_workload(f"{Path(__file__).parents[1] / 'tiny.py'}:workload")


def samples(count: int = 200) -> tuple[Tensor, Tensor]:
    """Fixed samples: without noise that is drawn anew, a resumed run can be compared to the bit."""
    work = workload()
    assert work.evaluation is not None
    pairs = list(work.evaluation())
    return torch.cat([x for x, _ in pairs])[:count], torch.cat([y for _, y in pairs])[:count]


def scales(model: nn.Module) -> dict[str, Tensor]:
    return {site: q.scale.detach().clone() for site, q in quantizers_of(model).items() if "scale" in q.learned}


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def optimizer_is_right(optimizer: Any, model: nn.Module) -> None:
    """All learned state is in the optimizer, and doesn't decay, while weights do."""
    decay = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    learned = [p for q in quantizers_of(model).values() for p in q.parameters()]
    assert learned
    assert {decay[p] for p in learned} == {0.0}
    assert max(decay.values()) > 0


def trained(before: dict[str, Tensor], model: nn.Module) -> None:
    after = scales(model)
    assert before.keys() == after.keys()
    assert all(scale.dtype == torch.float32 for scale in after.values())
    moved = [site for site in before if not torch.equal(before[site], after[site])]
    assert len(moved) > 0.8 * len(before), set(before) - set(moved)


def deploys(qat: Qat, path: Path, inputs: Any) -> None:
    qat.export(path)
    assert qat.quantized.check(path, [inputs]).passed


def falls(losses: list[float], share: float = 0.8) -> None:
    assert sum(losses[-3:]) < share * sum(losses[:3]), losses
