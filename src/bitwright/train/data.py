"""Training data in an order that the seed and the epoch decide: sharded over ranks, resumable at any batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, default_collate

from bitwright.errors import TrainError, WorkloadError
from bitwright.train.ranks import Ranks
from bitwright.train.seeding import seed_all, seed_of
from bitwright.workload import Workload

_DEFAULT_BATCH = 64
_Key = tuple[int, int, int]  # epoch, batch, sample


class TrainingData:
    """A workload's training set as this rank sees it.

    An epoch is a permutation cut into global batches; each rank takes its part of every one. What is left over at
    the end is dropped (another shuffle drops others), so that all ranks have equally many batches, each rank's of one
    size.
    """

    def __init__(self, workload: Workload, *, batch: int | None, seed: int, ranks: Ranks, workers: int) -> None:
        where = f"workload {workload.name!r}"
        assert workload.training is not None  # the trainer has refused it before
        source = workload.training()
        self.collate = workload.collate or default_collate
        if isinstance(source, DataLoader):
            if not isinstance(source.sampler, RandomSampler | SequentialSampler):
                raise WorkloadError(
                    "the trainer shuffles and shards by itself: it can't use this sampler",
                    where=where,
                    value=type(source.sampler).__name__,
                    fix="let the data set hold what the sampler would choose",
                )
            batch = batch or source.batch_size
            workers = workers or source.num_workers
            self.collate = workload.collate or source.collate_fn
            source = source.dataset
        if isinstance(source, IterableDataset) or not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
            raise WorkloadError(
                "training needs a data set with a length and an index: order and resume depend on both",
                where=where,
                value=type(source).__name__,
                fix="return a torch.utils.data.Dataset with __len__ and __getitem__",
            )
        self.batch = batch or _DEFAULT_BATCH
        self.parts: list[int] = ranks.gather(self.batch)
        """The batch of each rank: they may differ."""
        self.size = len(source)
        self.seed = seed
        self.ranks = ranks
        self.workers = workers
        self.samples = _Seeded(source, seed, ranks.rank)
        self.batches = self.size // sum(self.parts)
        if self.batches == 0:
            raise TrainError.single(
                "the training set is smaller than one batch",
                where=where,
                value=f"{self.size} samples, {', '.join(map(str, self.parts))} on {ranks.world} processes",
                fix=f"use a batch of at most {self.size // ranks.world}",
            )

    @property
    def weight(self) -> float:
        """What this rank's mean loss counts, where all ranks' are averaged: so the gradient is the mean of samples."""
        return self.batch * len(self.parts) / sum(self.parts)

    def order(self, epoch: int) -> list[list[_Key]]:
        """The keys of this rank's batches of an epoch."""
        generator = torch.Generator().manual_seed(seed_of(self.seed, "order", epoch))
        shuffled = torch.randperm(self.size, generator=generator).tolist()
        stride, own = sum(self.parts), sum(self.parts[: self.ranks.rank])
        starts = ((number, number * stride + own) for number in range(self.batches))
        return [[(epoch, n, i) for i in shuffled[start : start + self.batch]] for n, start in starts]

    def epoch(self, epoch: int, *, skip: int = 0) -> Iterator[tuple[Any, Any]]:
        """The batches of an epoch, (inputs, target) each, from the one after `skip`."""
        loader: Any = DataLoader(
            self.samples,
            batch_sampler=self.order(epoch)[skip:],
            collate_fn=self.collate,
            num_workers=self.workers,
        )
        for batch in loader:
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise WorkloadError(
                    "a training batch is not (inputs, target)",
                    value=type(batch).__name__,
                    fix="let the data set give pairs; several inputs are a tuple or a dict within the pair",
                )
            yield batch[0], batch[1]


class _Seeded(Dataset[Any]):
    """Samples whose augmentation is seeded by the batch that they are in, whichever process loads it."""

    def __init__(self, samples: Any, seed: int, rank: int) -> None:
        self.samples = samples
        self.seed = seed
        self.rank = rank

    def __getitems__(self, keys: list[_Key]) -> Any:
        epoch, number, _ = keys[0]
        seed_all(self.seed, "data", epoch, number, self.rank)
        indices = [index for _, _, index in keys]
        many = getattr(self.samples, "__getitems__", None)
        return many(indices) if callable(many) else [self.samples[index] for index in indices]

    def __getitem__(self, key: _Key) -> Any:
        return self.__getitems__([key])[0]
