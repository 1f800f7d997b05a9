"""One of two ranks that joins, trains and leaves again and again in one process.

A callback keeps the run, as users do; some runs fail halfway, and the error's traceback keeps the run as well; some
are sharded.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from bitwright import TrainConfig, Trainer
from bitwright.core.errors import BitwrightError
from bitwright.training import Callback


class Keeps(Callback):
    def __init__(self) -> None:
        self.run: Any = None

    def on_start(self, run: Any) -> None:
        self.run = run


class Loss:
    def __init__(self, breaks_at: int | None) -> None:
        self.breaks_at, self.calls = breaks_at, 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        if self.calls == self.breaks_at:
            raise OSError("broken")
        return F.cross_entropy(*args)


def main(count: int) -> None:
    from tiny import workload  # beside this script; pytest, which looks for doctests here, has other paths

    torch.set_num_threads(1)
    kept: list[Any] = []
    for number in range(count):
        breaks = number % 3 == 1
        callback = Keeps()
        config = TrainConfig(epochs=1, batch=50, parallel="fsdp" if number % 10 == 9 else "ddp")
        task = replace(workload(), loss=Loss(2 if breaks else None))
        trainer = Trainer(task, config=config, callbacks=[callback], device="cpu")
        # as torchrun does at a restart, so that each group has a name of its own in the store
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        try:
            trainer.fit()
        except (OSError, BitwrightError) as error:
            kept = [error]
        finally:
            os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
        assert bool(kept) == (number >= 1)
        assert task.loss.calls == (2 if breaks else 3)  # type: ignore[union-attr]
        assert not dist.is_initialized()
        sys.stdout.write(f"{number + 1}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
