"""One of two ranks: DDP's own buckets for a model with folded norms and learned quantizers."""

from __future__ import annotations

import two_ranks
from step_cases import digits, int8_plan, prepared
from torch.nn.parallel import DistributedDataParallel

CAPS = (0.002, 0.01, 0.03)


def main(rank: int) -> dict[float, str]:
    model, batch, loss = digits()
    found = {}
    for cap in CAPS:
        variant = prepared(model, batch, int8_plan(model, batch))
        net = DistributedDataParallel(variant.model, gradient_as_bucket_view=True, bucket_cap_mb=cap)  # type: ignore[arg-type]
        for _ in range(3):
            loss(net(batch[0]), batch[1]).backward()
        found[cap] = net._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    return found


if __name__ == "__main__":
    two_ranks.work(main)
