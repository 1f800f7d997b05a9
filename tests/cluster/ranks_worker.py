"""One of two ranks: measures the group, its own steps, and DDP's steps by turns."""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

import torch.distributed as dist
import two_ranks
from step_cases import digits
from torch.nn.parallel import DistributedDataParallel

from bitwright.plan import Plan
from bitwright.profiling import StepSettings, open_store
from bitwright.profiling.microbenchmarks import measure_tensors
from bitwright.profiling.overhead import measure_group, measure_host
from bitwright.profiling.profiled_step import CLOCKS, TimedStep
from bitwright.profiling.profiler import assemble
from bitwright.profiling.step_timer import StepTimer, gc_disabled


def main(rank: int) -> dict[str, Any]:
    model, batch, loss = digits()
    settings = StepSettings(bucket_cap_mb=0.1)
    store = open_store(None, "wall")
    host = measure_host("wall", rounds=5)
    store.add({"facts": {"host": host.model_dump()}})
    store.add({"facts": measure_group()})
    own = TimedStep(model.train(), [batch], loss, settings)
    timer = StepTimer(model, Plan(), settings, CLOCKS["wall"], host=host)
    shared = copy.deepcopy(model)
    net = DistributedDataParallel(shared, gradient_as_bucket_view=True, bucket_cap_mb=0.1)  # type: ignore[arg-type]
    step = TimedStep(shared, [batch], loss, settings, net=net)
    taken = []
    with gc_disabled():
        for number in range(18):
            dist.barrier()
            sample = timer.run(own)
            dist.barrier()
            step()
            start = time.perf_counter()
            step()
            if number >= 3:
                store.add_round(sample, wanted=30)
                taken.append(time.perf_counter() - start)
    store.add({"facts": {"tensors": [cost.model_dump() for cost in measure_tensors("wall", rounds=3)]}})
    buckets = net._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    return {"profile": assemble(store, "wall").to_json(), "step": statistics.median(taken), "buckets": buckets}


if __name__ == "__main__":
    two_ranks.work(main)
