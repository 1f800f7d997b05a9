"""Training data in an order that the seed and the epoch decide: sharded over ranks, resumable at any batch."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, default_collate

from bitwright.core.errors import TrainError, WorkloadError
from bitwright.core.user_code import user_code
from bitwright.training.distributed import Ranks
from bitwright.workload import Workload, shape_of


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed from a few words.

    >>> seed_of(0, "step", 1) == seed_of(0, "step", 1), seed_of(0, "step", 1) == seed_of(0, "step", 2)
    (True, False)
    """
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def seed_all(*parts: int | str) -> None:
    """Seed Python, NumPy and torch: augmentation code uses any of them."""
    seed = seed_of(*parts)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


_DEFAULT_BATCH = 64
_EXPECTED = "training() gives a data set with items (inputs, target), which collate makes a batch of"
_FEWEST = 2  # samples of a rank in a short batch: batch norm's statistics need two
_END = object()
_Key = tuple[int, int, int]  # epoch, batch, sample


class TrainingData:
    """A workload's training set as this rank sees it.

    An epoch is a permutation cut into global batches; each rank takes its part of every one. What is left over makes a
    last, short one, in which each rank has two samples at least (norms can't do with one); fewer go with the batch
    before. So each sample is seen once, and all ranks have equally many batches. `drop_last` leaves it out: another
    shuffle leaves out others.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        batch: int | None,
        seed: int,
        ranks: Ranks,
        workers: int,
        drop_last: bool = False,
    ) -> None:
        where = f"workload {workload.name!r}"
        assert workload.training is not None  # the trainer has refused it before
        self.name = workload.name
        with self._owners_code("training"):
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
        if self.size == 0:
            raise WorkloadError("the training set is empty", where=where, fix="look at what training() gives")
        self.seed = seed
        self.ranks = ranks
        self.workers = workers
        self.drop_last = drop_last
        self.samples = _Seeded(source, seed, ranks.rank)
        self.batches, left = divmod(self.size, sum(self.parts))
        self.last = self.parts
        """The samples of each rank in an epoch's last batch."""
        if left and self.batches and not drop_last:
            fewest = [min(_FEWEST, part) for part in self.parts]
            if left >= sum(fewest):
                self.batches += 1
                room = [part - few for part, few in zip(self.parts, fewest, strict=True)]
                self.last = _sums(fewest, _shares(left - sum(fewest), room))
            else:
                self.last = _sums(self.parts, _shares(left, self.parts))
        if self.batches == 0:
            raise TrainError.single(
                "the training set is smaller than one batch",
                where=where,
                value=f"{self.size} samples, {', '.join(map(str, self.parts))} on {ranks.world} processes",
                fix=f"use a batch of at most {self.size // ranks.world}",
            )

    def sizes(self, number: int) -> list[int]:
        """How many samples each rank has in a batch of an epoch."""
        return self.last if number == self.batches - 1 else self.parts

    def steps(self, accumulate: int) -> int:
        """Of an epoch, where so many batches make one; the last may have fewer, unless it is dropped."""
        return (self.batches if self.drop_last else self.batches + accumulate - 1) // accumulate

    def numbers(self, step: int, accumulate: int) -> range:
        """The batches of an epoch's step."""
        return range(step * accumulate, min((step + 1) * accumulate, self.batches))

    def weight(self, number: int, step: range) -> float:
        """What the mean loss of this rank's batch counts in a step of these batches, where all ranks' are averaged.

        So the gradient is the mean of the step's samples, whoever has however many of them.
        """
        samples = sum(sum(self.sizes(other)) for other in step)
        return self.sizes(number)[self.ranks.rank] * len(self.parts) / samples

    def order(self, epoch: int) -> list[list[_Key]]:
        """The keys of this rank's batches of an epoch."""
        generator = torch.Generator().manual_seed(seed_of(self.seed, "order", epoch))
        shuffled = torch.randperm(self.size, generator=generator).tolist()
        stride, rank = sum(self.parts), self.ranks.rank
        found = []
        for number in range(self.batches):
            sizes = self.sizes(number)
            start = number * stride + sum(sizes[:rank])
            found.append([(epoch, number, index) for index in shuffled[start : start + sizes[rank]]])
        return found

    def epoch(self, epoch: int, *, skip: int = 0) -> Iterator[tuple[Any, Any]]:
        """The batches of an epoch, (inputs, target) each, from the one after `skip`."""
        loader: Any = DataLoader(
            self.samples,
            batch_sampler=self.order(epoch)[skip:],
            collate_fn=self.collate,
            num_workers=self.workers,
        )
        loading = iter(loader)
        while True:
            with self._owners_code("the training set"):
                batch = next(loading, _END)
            if batch is _END:
                return
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise WorkloadError(
                    "a training batch is not (inputs, target)",
                    where=f"workload {self.name!r}",
                    value=shape_of(batch),
                    fix="let the data set give pairs; several inputs are a tuple or a dict within the pair",
                )
            yield batch[0], batch[1]

    def _owners_code(self, what: str) -> AbstractContextManager[None]:
        fix = "look at training()[0] in Python; items of unequal sizes need a Workload(collate=…)"
        return user_code(self.name, what, expected=_EXPECTED, fix=fix)


def _shares(count: int, weights: list[int]) -> list[int]:
    """Whole numbers in these proportions that sum up to the count.

    >>> _shares(7, [12, 20, 3])
    [2, 4, 1]
    """
    whole = sum(weights)
    if whole == 0:
        return [0] * len(weights)
    found = [count * weight // whole for weight in weights]
    first = sorted(range(len(weights)), key=lambda i: -(count * weights[i] % whole))  # who lost most by rounding
    for index in first[: count - sum(found)]:
        found[index] += 1
    return found


def _sums(some: list[int], others: list[int]) -> list[int]:
    return [a + b for a, b in zip(some, others, strict=True)]


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
