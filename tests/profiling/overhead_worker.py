"""Rank 1 measures its host while rank 0 knows its own already, as after a profile that it made alone."""

from __future__ import annotations

import torch.distributed as dist
import two_ranks

from bitwright.profiling.overhead import measure_host


def main(rank: int) -> str:
    if rank == 1:
        measure_host("wall", rounds=3)
    dist.barrier()
    return f"rank {rank} is through"


if __name__ == "__main__":
    two_ranks.work(main)
