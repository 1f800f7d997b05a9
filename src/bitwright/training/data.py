"""Training data in an order determined by the seed and the epoch: sharded over ranks, resumable at any batch."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, default_collate

from bitwright.core.errors import TrainError, WorkloadError, user_code
from bitwright.core.formatting import counted
from bitwright.training.distributed import Ranks
from bitwright.training.optimizer import Recipe
from bitwright.workload import Workload, shape_of


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed derived from the arguments.

    >>> seed_of(0, "step", 1) == seed_of(0, "step", 1), seed_of(0, "step", 1) == seed_of(0, "step", 2)
    (True, False)
    """
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def seed_all(*parts: int | str) -> None:
    """Seed Python, NumPy and torch, because augmentation code may use any of them."""
    seed = seed_of(*parts)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


_DEFAULT_BATCH = 64
_EXPECTED = "training() returns a data set with items (inputs, target), which collate combines into a batch"
_FEWEST = 2  # minimum samples per rank in a short batch; batch-norm statistics need two
_END = object()
_Key = tuple[int, int, int]  # epoch, batch, sample


class TrainingData:
    """The part of a workload's training set for this rank.

    An epoch is a permutation divided into global batches, and each rank takes its part of every batch. The remaining
    samples form a short last batch with at least two samples per rank, because norms need two. Fewer samples are added
    to the previous batch. Every sample is therefore used once per epoch, and all ranks have the same number of
    batches. `drop_last` omits the remaining samples, which differ in every epoch.
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
        assert workload.training is not None  # checked by the trainer
        self.name = workload.name
        with self._in_user_code("training"):
            source = workload.training()
        self.collate = workload.collate or default_collate
        if isinstance(source, DataLoader):
            if not isinstance(source.sampler, RandomSampler | SequentialSampler):
                raise WorkloadError(
                    "the trainer shuffles and shards the data, so it can't use this sampler",
                    where=where,
                    value=type(source.sampler).__name__,
                    fix="return a data set that contains only the samples to train on",
                    code="unsupported-sampler",
                )
            batch = batch or source.batch_size
            workers = workers or source.num_workers
            self.collate = workload.collate or source.collate_fn
            source = source.dataset
        if isinstance(source, IterableDataset) or not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
            raise WorkloadError(
                "training requires a data set with a length and an index, for shuffling and resuming",
                where=where,
                value=type(source).__name__,
                fix="return a torch.utils.data.Dataset with __len__ and __getitem__",
                code="unsupported-dataset",
            )
        self.batch = batch or _DEFAULT_BATCH
        self.parts: list[int] = ranks.gather(self.batch)
        """The batch size of each rank; they may differ."""
        self.size = len(source)
        if self.size == 0:
            fix = "check the result of training()"
            raise WorkloadError("the training set is empty", where=where, fix=fix, code="empty-training")
        self.seed = seed
        self.ranks = ranks
        self.workers = workers
        self.drop_last = drop_last
        self.samples = _Seeded(source, seed, ranks.rank)
        self.batches = 0
        self.last = self.parts
        """The number of samples of each rank in the last batch of an epoch."""
        self._divide(where)

    def redistribute(self, parts: list[int], *, batches: int | None = None) -> None:
        """Give each rank another part of the same global batches.

        The order of the samples and the number of batches stay the same, so that a run can change its parts within an
        epoch. `batches` is the number of batches of an epoch that the run began with, perhaps on other ranks.
        """
        batches = batches or self.batches
        self.batch, self.parts, self.batches = parts[self.ranks.rank], list(parts), batches
        self.last = self.parts if self.drop_last else self._last_parts(self.size - (batches - 1) * sum(parts))

    def _last_parts(self, left: int) -> list[int]:
        """The parts of a last batch of any size. If it is too short for all ranks, the last ones get nothing."""
        if left >= sum(self.parts):
            return _sums(self.parts, _shares(left - sum(self.parts), self.parts))
        fewest = [min(_FEWEST, part) for part in self.parts]
        if left < sum(fewest):
            found: list[int] = []
            for _ in self.parts:
                rest = left - sum(found)
                found.append(min(_FEWEST, rest) if rest != _FEWEST + 1 else rest)
            return found
        room = [part - few for part, few in zip(self.parts, fewest, strict=True)]
        return _sums(fewest, _shares(left - sum(fewest), room))

    def _divide(self, where: str) -> None:
        """Set the number of batches of an epoch, and the sizes of the last one."""
        ranks, drop_last = self.ranks, self.drop_last
        self.batches, left = divmod(self.size, sum(self.parts))
        if left and self.batches and not drop_last:
            own = left >= sum(min(_FEWEST, part) for part in self.parts)
            self.batches += own
            self.last = self._last_parts(left if own else left + sum(self.parts))
        if self.batches == 0:
            raise TrainError.single(
                "the training set is smaller than one batch",
                where=where,
                value=f"{self.size} samples, {', '.join(map(str, self.parts))} on {ranks.world} processes",
                fix=f"use a batch of at most {self.size // ranks.world}",
                code="batch-too-large",
            )

    def sizes(self, number: int) -> list[int]:
        """The number of samples of each rank in a batch."""
        return self.last if number == self.batches - 1 else self.parts

    def steps(self, accumulate: int) -> int:
        """The number of steps per epoch; the last step may have fewer batches, unless it is dropped."""
        return (self.batches if self.drop_last else self.batches + accumulate - 1) // accumulate

    def describe(self, accumulate: int) -> str:
        """Describe the steps of an epoch, for the log."""
        steps, whole = self.steps(accumulate), sum(self.parts) * accumulate
        last = sum(sum(self.sizes(number)) for number in self.numbers(steps - 1, accumulate))
        words = f"{counted(self.size, 'sample')}, {steps} steps of {whole} samples per epoch"
        if last != whole:
            words += f", the last one of {last}"
        if self.ranks.several:
            equal = len(set(self.parts)) == 1
            parts = f"{self.parts[0]} on each" if equal else f"{', '.join(map(str, self.parts))} on the ranks"
            words += f" ({parts} of {self.ranks.world} processes; the learning rate isn't scaled)"
        return words

    def numbers(self, step: int, accumulate: int) -> range:
        """The batches of a step within an epoch."""
        return range(step * accumulate, min((step + 1) * accumulate, self.batches))

    def weight(self, number: int, step: range) -> float:
        """The factor of this rank's mean loss for a batch in a step, given that gradients are averaged over ranks.

        With it, the gradient is the mean over all samples of the step, even if ranks have different batch sizes.
        """
        samples = sum(sum(self.sizes(other)) for other in step)
        return self.sizes(number)[self.ranks.rank] * len(self.parts) / samples

    def order(self, epoch: int) -> list[list[_Key]]:
        """The keys of this rank's batches in an epoch."""
        generator = torch.Generator().manual_seed(seed_of(self.seed, "order", epoch))
        shuffled = torch.randperm(self.size, generator=generator).tolist()
        stride, rank = sum(self.parts), self.ranks.rank
        found = []
        for number in range(self.batches):
            sizes = self.sizes(number)
            start = number * stride + sum(sizes[:rank])
            own = shuffled[start : start + sizes[rank]] if sizes[rank] else shuffled[number * stride :][:_FEWEST]
            found.append([(epoch, number, index) for index in own])  # a rank without samples repeats two, with weight 0
        return found

    def epoch(self, epoch: int, *, skip: int = 0) -> Iterator[tuple[Any, Any]]:
        """The batches (inputs, target) of an epoch, without the first `skip` batches."""
        loader: Any = DataLoader(
            self.samples,
            batch_sampler=self.order(epoch)[skip:],
            collate_fn=self.collate,
            num_workers=self.workers,
        )
        loading = iter(loader)
        while True:
            with self._in_user_code("the training set"):
                batch = next(loading, _END)
            if batch is _END:
                return
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise WorkloadError(
                    "a training batch is not (inputs, target)",
                    where=f"workload {self.name!r}",
                    value=shape_of(batch),
                    fix="return pairs from the data set; several inputs are a tuple or a dict within the pair",
                    code="invalid-batch",
                )
            yield batch[0], batch[1]

    def _in_user_code(self, what: str) -> AbstractContextManager[None]:
        fix = "check training()[0] in Python; items of different sizes need Workload(collate=…)"
        return user_code(self.name, what, expected=_EXPECTED, fix=fix)


class IterationData(TrainingData):
    """The training set of a run that counts iterations. An epoch is the iterations between two validations.

    All batches have the same size, so the data is repeated where needed.
    """

    def __init__(self, recipe: Recipe, workload: Workload, **options: Any) -> None:
        self.recipe = recipe
        self.iterations = 0
        self._whole: Tensor | None = None
        super().__init__(workload, **options)

    def _divide(self, where: str) -> None:
        self.iterations = self.recipe.length(self.size, sum(self.parts))
        self.batches = min(self.recipe.validate_every, self.iterations)

    def steps(self, accumulate: int) -> int:
        """The iterations between two validations."""
        return self.batches

    def describe(self, accumulate: int) -> str:
        """Describe the iterations, for the log."""
        whole = sum(self.parts)
        words = f"{self.size} samples, {self.iterations} iterations of {whole} samples"
        words += f" ({self.iterations * whole / self.size:.3g} passes over the data)"
        return (
            f"{words}; metrics every {self.batches} iterations (an epoch)" if self.iterations > self.batches else words
        )

    def order(self, epoch: int) -> list[list[_Key]]:
        """The keys of this rank's batches between two validations."""
        before = sum(self.parts[: self.ranks.rank])
        size, whole = self.parts[self.ranks.rank], sum(self.parts)
        found = []
        for number in range(min(self.batches, self.iterations - epoch * self.batches)):
            start = (epoch * self.batches + number) * whole + before
            found.append([(epoch, number, index) for index in self._samples(start, start + size)])
        return found

    def _samples(self, start: int, end: int) -> list[int]:
        """The samples at these positions of the run."""
        if self._whole is None:
            total = self.iterations * sum(self.parts)
            kind = torch.int32 if total < 2**31 else torch.int64
            passes = -(-total // self.size)
            generator = torch.Generator().manual_seed(seed_of(self.seed, "order", 0))
            if self.recipe.sampler == "epochs":
                parts = [torch.randperm(self.size, generator=generator) for _ in range(passes)]
                self._whole = torch.cat(parts)[:total].to(kind)
            else:
                # each sample occurs as often as the others or once less, in an order for the whole run
                mixed = torch.randperm(total, generator=generator).to(kind)
                self._whole = mixed.remainder_(self.size)
        return [int(index) for index in self._whole[start:end]]


def _shares(count: int, weights: list[int]) -> list[int]:
    """Integers in these proportions that sum to `count`.

    >>> _shares(7, [12, 20, 3])
    [2, 4, 1]
    """
    whole = sum(weights)
    if whole == 0:
        return [0] * len(weights)
    found = [count * weight // whole for weight in weights]
    first = sorted(range(len(weights)), key=lambda i: -(count * weights[i] % whole))  # largest remainder first
    for index in first[: count - sum(found)]:
        found[index] += 1
    return found


def _sums(some: list[int], others: list[int]) -> list[int]:
    return [a + b for a, b in zip(some, others, strict=True)]


class _Seeded(Dataset[Any]):
    """Samples with augmentation seeded by their batch, independent of the process that loads it."""

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
