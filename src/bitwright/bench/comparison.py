"""Measurements of one model on all runtimes of this machine, as versioned JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import isfinite
from typing import Any, Literal

from markupsafe import Markup, escape
from pydantic import Field

from bitwright.core import display, formatting
from bitwright.core.arguments import strict
from bitwright.core.environment import Environment
from bitwright.core.errors import Problem
from bitwright.core.schemas import ResultModel
from bitwright.deployment import Check, Latency
from bitwright.deployment.measurement import TOO_BUSY, UNSURE

_NAMED = 6  # operators named in a text; the JSON file has all


@strict
class Accuracy(ResultModel):
    """A metric of the model, float, simulated or on a runtime."""

    where: str = Field(description='"float", "simulated", or the name of a runtime.')
    metric: str
    value: float
    samples: int | None = None
    lower_is_better: bool = False

    @property
    def text(self) -> str:
        """The value; top-k accuracies are in percent."""
        return formatting.metric_value(self.metric, self.value) + (" %" if self.metric.startswith("top") else "")

    def change_from(self, reference: Accuracy) -> str:
        """The difference to the reference; where lower is better, the text says which of the two is better."""
        difference = self.value - reference.value
        text = formatting.metric_change(self.metric, difference)
        if self.lower_is_better and difference:
            return f"{text}, {'better' if difference < 0 else 'worse'}"
        return text + (" points" if self.metric.startswith("top") else "")


class Size(ResultModel):
    """Bytes of one form of the model."""

    name: str
    bytes: int


class LatencyRow(ResultModel):
    """Latency of one artefact; both variants of a runtime were measured in turns."""

    runtime: str
    variant: Literal["float", "quantized"]
    batch: int
    threads: int
    median_ms: float = Field(description="p50")
    p10_ms: float
    p90_ms: float
    p99_ms: float | None = Field(default=None, description="None in reports that were made before it was measured.")
    runs: int
    ratio: float = Field(description="Median relative to the float variant in the same run.")
    spread: float | None = Field(
        default=None,
        description="The interquartile range of the times relative to their median: the larger one of both variants.",
    )

    @property
    def unreliable(self) -> bool:
        """Whether the times vary too much to tell which variant is faster."""
        return self.spread is not None and self.spread > UNSURE

    @property
    def doubt_text(self) -> str:
        """A mark for ratios that aren't reliable; empty for others."""
        return " (unreliable)" if self.unreliable else ""

    @property
    def ratio_text(self) -> str:
        """The latency relative to float."""
        doubt = f"; unreliable: {TOO_BUSY}" if self.unreliable else ""
        return f"{self.ratio:.2f}× the time of float{doubt}"

    @property
    def rate_text(self) -> str:
        """The throughput."""
        return f"{self.batch / self.median_ms * 1e3:,.0f} samples/s"

    def cells(self) -> Sequence[object]:
        """The row of a table."""
        rate = f"{self.batch / self.median_ms * 1e3:,.0f}"
        return self.runtime, self.variant, self.batch, *_percentiles(self), f"{self.ratio:.2f}×{self.doubt_text}", rate


class Parity(ResultModel):
    """Outputs of a runtime compared with those of the simulated model."""

    runtime: str
    passed: bool
    samples: int
    sqnr_db: float | None = Field(description="None: no deviation at all.")
    max_error: float
    top1_agreement: float | None
    first_divergence: str | None


def parity(check: Check) -> Parity:
    """One row for all outputs, with the worst values."""
    sqnr = min((output.sqnr_db for output in check.outputs), default=float("inf"))
    agreements = [output.top1_agreement for output in check.outputs if output.top1_agreement is not None]
    return Parity(
        runtime=check.runtime,
        passed=check.passed,
        samples=check.samples,
        sqnr_db=sqnr if isfinite(sqnr) else None,
        max_error=max((output.max_error for output in check.outputs), default=0.0),
        top1_agreement=min(agreements, default=None),
        first_divergence=check.first_divergence,
    )


def timing(
    runtime: str,
    variant: Literal["float", "quantized"],
    batch: int,
    threads: int,
    latency: Latency,
    *,
    yardstick: Latency,
) -> LatencyRow:
    """One row; the ratio is relative to `yardstick`, the latency of the float artefact in the same run."""
    return LatencyRow(
        runtime=runtime,
        variant=variant,
        batch=batch,
        threads=threads,
        median_ms=latency.median_ms,
        p10_ms=latency.p10_ms,
        p90_ms=latency.p90_ms,
        p99_ms=latency.p99_ms,
        runs=latency.runs,
        ratio=latency.median_ms / yardstick.median_ms,
        spread=max(latency.spread, yardstick.spread),
    )


def timings(runtime: str, batch: int, threads: int, *, float: Latency, quantized: Latency) -> list[LatencyRow]:
    """The rows of the float and the quantized artefact."""
    return [
        timing(runtime, "float", batch, threads, float, yardstick=float),
        timing(runtime, "quantized", batch, threads, quantized, yardstick=float),
    ]


def unreliable_latency(timings: Iterable[LatencyRow]) -> list[Problem]:
    """A warning if latencies varied too much to compare them."""
    rows = [row for row in timings if row.variant == "quantized" and row.unreliable]
    if not rows:
        return []
    return [
        Problem(
            what=f"the latency relative to float is unreliable: {TOO_BUSY}",
            where=", ".join(f"{row.runtime}, batch {row.batch}" for row in rows),
            value=", ".join(f"{row.ratio:.2f}×" for row in rows),
            fix="measure again on an idle machine",
            code="unreliable-latency",
        )
    ]


def latency_chart(timings: Iterable[LatencyRow]) -> Markup:
    """Float and quantized latency, in groups by runtime and batch; each group has its own scale."""
    parts: list[str] = []
    y = 0
    for (runtime, batch, threads), group in groupby(timings, key=lambda t: (t.runtime, t.batch, t.threads)):
        rows = list(group)
        longest = max(row.median_ms for row in rows)
        title = f"{runtime}, batch {batch}, {threads} {'thread' if threads == 1 else 'threads'}"
        parts.append(f'<text class="head" x="0" y="{y + 14}">{escape(title)}</text>')
        y += 23
        for row in rows:
            value = f"{row.median_ms:.3g} ms ({row.p10_ms:.3g} … {row.p90_ms:.3g})"
            name = row.variant if row.variant == "float" else f"{row.variant}, {row.ratio:.2f}×{row.doubt_text}"
            parts.append(display.bar(y, name, value, row.median_ms / longest, row.variant))
            y += display.BAR_HEIGHT
        y += 12
    return display.svg(parts, y - 12, "Latency: float against quantized")


class OnRuntime(ResultModel):
    """One model on one runtime, float and quantized."""

    runtime: str
    backend: str = Field(description="The table by which the model was quantized for this runtime.")
    executed: dict[str, int] | None = Field(
        description="Number of executed convolutions and matrix products by type. None: unknown."
    )
    left_in_float: tuple[str, ...] | None = Field(
        default=None, description="Names of those that run in float. None: unknown."
    )
    sizes: tuple[Size, ...]
    parity: Parity
    accuracies: tuple[Accuracy, ...]
    timings: tuple[LatencyRow, ...]

    @property
    def executed_text(self) -> str:
        """The types in which the runtime multiplied, and the operators that it left in float."""
        if self.executed is None:
            return f"{self.runtime} doesn't report it"
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.executed.items() if count) or "no products"
        if not self.executed.get("float"):
            return kinds
        if self.left_in_float is None:
            return f"{kinds} ({self.runtime} doesn't name them)"
        names, more = self.left_in_float[:_NAMED], len(self.left_in_float) - _NAMED
        return f"{kinds} ({', '.join(names)}{f' and {more} more' if more > 0 else ''})"

    def cells(self) -> Iterator[Sequence[object]]:
        """A row for each variant: what doesn't depend on the batch size."""
        verdict = f"{'yes' if self.parity.passed else 'no'}, {formatting.decibels(self.parity.sqnr_db)}"
        for size in self.sizes:
            scores = [f"{one.metric} {one.text}" for one in self.accuracies if one.where == size.name]
            told = (self.executed_text, verdict) if size.name == "quantized" else ("float", None)
            yield self.runtime, size.name, ", ".join(scores), formatting.size(size.bytes), *told


class Instance(ResultModel):
    """One of several processes that ran at the same time."""

    cores: tuple[int, ...] = Field(description="The cores that it was bound to.")
    median_ms: float = Field(description="p50")
    p90_ms: float
    p99_ms: float
    throughput: float = Field(description="Samples per second of this process.")


class Together(ResultModel):
    """One artefact in several simultaneous processes, each on its own cores."""

    runtime: str
    variant: Literal["float", "quantized"]
    batch: int
    pinned: bool = Field(description="Whether the processes were bound to their cores.")
    runs: int = Field(description="Runs of each instance.")
    median_ms: float = Field(description="p50 over all runs of all instances.")
    p90_ms: float
    p99_ms: float
    throughput: float = Field(
        description="Samples per second of all instances; a round lasts as long as its slowest one."
    )
    ratio: float = Field(description="Throughput relative to the float variant in the same run.")
    instances: tuple[Instance, ...]

    def cells(self) -> Iterator[Sequence[object]]:
        """A row for each instance, and one for all of them."""
        name = (self.runtime, self.variant, self.batch)
        for one in self.instances:
            cores = f"cores {','.join(map(str, one.cores))}"
            yield *name, cores, *_percentiles(one), f"{one.throughput:,.0f}", None
        yield *name, "all", *_percentiles(self), f"{self.throughput:,.0f}", f"{self.ratio:.2f}×"


def _percentiles(one: LatencyRow | Instance | Together) -> list[str | None]:
    values = (one.median_ms, one.p90_ms, one.p99_ms)
    return [None if value is None else formatting.number(value) for value in values]


class GenerationRow(ResultModel):
    """How fast a decoder reads prompts and generates tokens, and its memory."""

    runtime: str
    variant: Literal["float", "quantized"]
    prompt: int = Field(description="Tokens of the prompt.")
    threads: int
    prefill: float = Field(description="Tokens of the prompt per second.")
    decode: float = Field(description="Generated tokens per second.")
    spread: float = Field(description="The interquartile range of a generated token's time relative to its median.")
    memory: int = Field(description="Bytes that loading it and reading the prompt add to a process at most.")

    def cells(self) -> Sequence[object]:
        """The row of a table."""
        doubt = " (unreliable)" if self.spread > UNSURE else ""
        speeds = f"{self.prefill:,.0f}", f"{self.decode:,.0f}{doubt}"
        return self.runtime, self.variant, self.prompt, *speeds, formatting.size(self.memory)


class Skipped(ResultModel):
    """A runtime that was not measured."""

    runtime: str
    why: str


class Fastest(ResultModel):
    """The fastest runtime for one batch size, among those that agree with the simulated model."""

    batch: int
    runtime: str
    variant: Literal["float", "quantized"]
    median_ms: float
    throughput: float | None = Field(
        default=None, description="Throughput of several instances, which are compared by it."
    )


@strict
class Comparison(display.Summarized, ResultModel):
    """Accuracy, size and latency on several runtimes, measured in turns in one process. `benchmark` returns it.

    >>> import torch, bitwright
    >>> x = torch.randn(16, 8)
    >>> workload = bitwright.Workload(
    ...     name="tiny", model=torch.nn.Linear(8, 4), inputs=(x[:1],), calibration=lambda: [x]
    ... )
    >>> comparison = bitwright.benchmark(workload, ["onnxruntime"], evaluate=False, runs=5)
    >>> comparison.workload, [one.runtime for one in comparison.runtimes]
    ('tiny', ['onnxruntime'])
    """

    version: Literal[1] = 1
    workload: str
    created: str
    environment: Environment
    runtimes: tuple[OnRuntime, ...]
    skipped: tuple[Skipped, ...]
    fastest: tuple[Fastest, ...]
    together: tuple[Together, ...] = Field(default=(), description="Instead of timings, if instances were asked for.")
    generation: tuple[GenerationRow, ...] = Field(default=(), description="Only for decoders.")

    def __repr__(self) -> str:
        """One line: the fastest runtime."""
        best = ", ".join(f"{one.runtime} {one.variant} {one.median_ms:.3g} ms" for one in self.fastest[:1])
        return f"<Comparison {self.workload}: {len(self.runtimes)} runtimes{', fastest ' + best if best else ''}>"

    __str__ = __repr__

    def to_dict(self) -> dict[str, Any]:
        """The results as plain data."""
        return self.model_dump(mode="json")

    def summary(self) -> Iterator[display.Table | str]:
        """Accuracy, size and agreement of each runtime, then latencies and the fastest runtime."""
        heads = ["runtime", "variant", "metric", "#size", "ran as", "agrees"]
        rows = [cells for row in self.runtimes for cells in row.cells()]
        yield display.Table(heads, rows, title=f"{self.workload} on {self.environment.cpu}")
        timings = [timing for row in self.runtimes for timing in row.timings]
        if timings:
            heads = ["runtime", "variant", "#batch", "#p50", "#p90", "#p99", "#of float", "#samples/s"]
            title = f"latency in ms, {formatting.counted(timings[0].threads, 'thread')}"
            yield display.Table(heads, [timing.cells() for timing in timings], title=title)
        if self.generation:
            heads = ["runtime", "variant", "#prompt", "#prefill, tokens/s", "#decode, tokens/s", "#memory"]
            title = f"generation, {formatting.counted(self.generation[0].threads, 'thread')}"
            yield display.Table(heads, [row.cells() for row in self.generation], title=title)
        if self.together:
            one = self.together[0]
            cores = formatting.counted(len(one.instances[0].cores), "core")
            share = f"{formatting.counted(len(one.instances), 'instance')} × {cores}"
            heads = ["runtime", "variant", "#batch", "instance", "#p50", "#p90", "#p99", "#samples/s", "#of float"]
            rows = [cells for row in self.together for cells in row.cells()]
            title = f"latency in ms and throughput, {share}{'' if one.pinned else ' (not bound)'}"
            yield display.Table(heads, rows, title=title)
        for skip in self.skipped:
            yield f"skipped {skip.runtime}: {skip.why}"
        for pick in self.fastest:
            speed = f"{pick.median_ms:.3g} ms" if pick.throughput is None else f"{pick.throughput:,.0f} samples/s"
            yield f"fastest with batch {pick.batch}: {pick.runtime}, {pick.variant}, {speed}"

    def failures(self) -> list[str]:
        """Runtimes that don't run the quantized model as it was simulated."""
        failed = ", ".join(row.runtime for row in self.runtimes if not row.parity.passed)
        if not failed and self.runtimes:
            return []
        return [f"{failed or 'every runtime'} can't run the quantized model as it was simulated"]

    def plot(self) -> display.Chart:
        """The latency of each runtime, float and quantized."""
        return display.Chart(latency_chart(timing for one in self.runtimes for timing in one.timings))
