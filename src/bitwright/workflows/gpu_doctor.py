"""`doctor --gpu`: whether low-precision kernels are correct on a device, and how fast they are."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from markupsafe import Markup
from torch import Tensor, nn

from bitwright.core import __version__
from bitwright.core.arguments import strict
from bitwright.core.display import Progress, Summarized, Table, bar_chart, phases
from bitwright.core.environment import cpu_name
from bitwright.core.files import write_text
from bitwright.core.formatting import json_text, size
from bitwright.core.registry import KERNELS
from bitwright.kernels import products
from bitwright.kernels.codes import EXACT, Codes, encode, encode_columns, encode_rows
from bitwright.kernels.int8 import encode_rotated
from bitwright.plan import ComputeSpec, Plan
from bitwright.reports.page import document
from bitwright.training.low_precision import LowPrecision

__all__ = ["DeviceFacts", "GpuDiagnosis", "KernelCheck", "Rate", "StepTime", "diagnose_gpu"]


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """The device and its software."""

    name: str
    kind: str
    capability: str | None
    processors: int | None
    memory: int | None
    """Bytes."""
    software: dict[str, str]
    engines: dict[str, str]
    """The library that multiplies in each format, or why it is only simulated."""


@dataclass(frozen=True, kw_only=True)
class KernelCheck:
    """A comparison with the CPU."""

    name: str
    error: float | None
    """The largest difference, relative to the largest value."""
    problem: str | None


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A measured operation."""

    what: str
    format: str
    milliseconds: float
    rate: float
    unit: str
    of_roofline: float | None = None
    """The share of what the measured peak and the memory's bandwidth allow."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A training step."""

    model: str
    format: str
    milliseconds: float
    of_float: float
    peak_bytes: int | None
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class GpuDiagnosis(Summarized):
    """The result of `diagnose_gpu`, as tables, one JSON file and one page.

    Users can send both files: they have no paths, host names or user names.
    """

    device: DeviceFacts
    checks: list[KernelCheck] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)
    steps: list[StepTime] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """What the time limit left out, and what failed, with the reason."""
    seconds: float = 0.0

    def failures(self) -> list[str]:
        """Wrong results."""
        return [f"{check.name}: {check.problem}" for check in self.checks if check.problem is not None]

    def summary(self) -> Iterator[Table | str]:
        """One table for each part."""
        facts = self.device
        rows = [
            ("device", f"{facts.name} ({facts.kind})"),
            ("compute capability", facts.capability),
            ("multiprocessors", facts.processors),
            ("memory", None if facts.memory is None else size(facts.memory)),
            *facts.software.items(),
            *((f"products in {format}", engine) for format, engine in facts.engines.items()),
        ]
        yield Table(["", ""], [row for row in rows if row[1] is not None], title="Device")
        found = [(one.name, one.problem or "correct", _error(one.error)) for one in self.checks]
        yield Table(["result", "compared with the CPU", "#relative error"], found, title="Correctness")
        rates = [
            (
                one.what,
                one.format,
                f"{one.milliseconds:.3f}",
                f"{one.rate:.2f} {one.unit}",
                None if one.of_roofline is None else f"{100 * one.of_roofline:.0f} %",
            )
            for one in self.rates
        ]
        yield Table(["operation", "format", "#ms", "#rate", "#of the roofline"], rates, title="Rates")
        steps = [
            (
                one.model,
                one.format,
                f"{one.milliseconds:.2f}",
                f"{one.of_float:.2f}",
                None if one.peak_bytes is None else size(one.peak_bytes),
            )
            for one in self.steps
        ]
        yield Table(["model", "format", "#ms", "#time of FP32", "#peak memory"], steps, title="Training steps")
        for text in self.skipped:
            yield f"not measured: {text}"
        yield f"{self.seconds:.0f} s"

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {"kind": "bitwright-gpu-doctor", "version": 1, **asdict(self)}

    def save(self, folder: str | Path) -> tuple[Path, Path]:
        """Write `gpu-doctor.json` and `gpu-doctor.html`."""
        text, parts = json_text(self.to_dict()), Markup()
        for part in self.summary():
            if isinstance(part, str):
                parts += Markup("<p>{}</p>").format(part)
            elif part.rows:
                parts += Markup("<section><h2>{}</h2>{}</section>").format(part.title, part.to_html())
        bars = [(f"{one.model}, {one.format}", f"{one.milliseconds:.2f} ms", one.milliseconds) for one in self.steps]
        if bars:
            parts += Markup("<section><h2>Steps</h2>{}</section>").format(
                Markup(bar_chart(bars, label="Milliseconds of a training step")._repr_html_())
            )
        title = f"GPU doctor: {self.device.name}"
        body = Markup("<header><h1>{}</h1></header>").format(title) + parts
        page = document(title, body, data=text, nav=(), scripts=())
        paths = Path(folder) / "gpu-doctor.json", Path(folder) / "gpu-doctor.html"
        return write_text(paths[0], text + "\n"), write_text(paths[1], page)


def _error(value: float | None) -> str | None:
    return None if value is None else f"{value:.1e}"


_FORMATS = ("int8", "fp8", "bf16", "fp16")
Run = Callable[[], object]
Case = Callable[[torch.device, bool], Tensor]


@strict
def diagnose_gpu(
    device: str | torch.device | None = None, *, minutes: float = 10.0, progress: Progress | None = None
) -> GpuDiagnosis:
    """Check and measure the low-precision kernels on a device: by default CUDA, or else the CPU.

    Every part stops at the time limit; what was left out is in the result.

    >>> found = diagnose_gpu("cpu", minutes=0)
    >>> found.failures(), found.rates, found.steps
    ([], [], [])
    """
    start = time.monotonic()
    begin = phases(progress)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    found = GpuDiagnosis(device=device_facts(where))
    measure = _Measurement(where, start + 60 * minutes, found)
    begin("comparing results with the CPU")
    measure.check()
    begin("measuring rates")
    measure.rate()
    begin("measuring training steps")
    measure.step()
    return GpuDiagnosis(**{**vars(found), "seconds": time.monotonic() - start})


def device_facts(device: torch.device) -> DeviceFacts:
    """The properties of a device, and what multiplies on it."""
    software = {"bitwright": __version__, "torch": torch.__version__, "cuda": torch.version.cuda}
    try:
        software["triton"] = version("triton")
    except PackageNotFoundError:
        software["triton"] = None
    engines = {}
    for format in _FORMATS:
        kernel = KERNELS.get(format)
        lacks = kernel.missing_for("linear", device)
        engines[format] = f"simulated: {lacks}" if lacks else kernel.engine(device) or "torch"
    lacks = KERNELS.get("int8").missing_for("conv2d", device)
    engines["int8, convolutions"] = lacks or products.engine(device) or "simulated"
    known = {name: text for name, text in software.items() if text is not None}
    if device.type != "cuda":
        return DeviceFacts(
            name=cpu_name(),
            kind=device.type,
            capability=None,
            processors=torch.get_num_threads(),
            memory=None,
            software=known,
            engines=engines,
        )
    facts = torch.cuda.get_device_properties(device)
    return DeviceFacts(
        name=facts.name,
        kind="cuda",
        capability=f"{facts.major}.{facts.minor}",
        processors=facts.multi_processor_count,
        memory=facts.total_memory,
        software=known,
        engines=engines,
    )


class _Measurement:
    """Adds results to a diagnosis until the deadline."""

    def __init__(self, device: torch.device, deadline: float, found: GpuDiagnosis) -> None:
        self.device, self.deadline, self.found = device, deadline, found
        self.large = device.type == "cuda"
        self.generator = torch.Generator().manual_seed(0)

    def late(self, what: str) -> bool:
        """Whether the time is over; notes what is left out."""
        over = time.monotonic() >= self.deadline
        if over:
            self.found.skipped.append(f"{what}: the time limit")
        return over

    def random(self, *shape: int) -> Tensor:
        """Normal numbers on the CPU, so that every device gets the same."""
        return torch.randn(shape, generator=self.generator)

    def check(self) -> None:
        """Compare codes with those of the CPU, and products with simulated ones."""
        for name, compare in self._cases():
            if self.late(name):
                continue
            try:
                wanted, found = compare(torch.device("cpu"), True), compare(self.device, False)
                largest = max(float(wanted.abs().nan_to_num().max()), 1e-30)
                invalid = not torch.equal(wanted.isnan(), found.cpu().isnan())
                error = float((wanted.nan_to_num() - found.cpu().nan_to_num()).abs().max()) / largest
                limit = 0.0 if name.startswith("codes") else 1e-3 if name.startswith("fp8") else 1e-5
                problem = "NaN differs" if invalid else f"the error exceeds {limit:g}" if error > limit else None
                self.found.checks.append(KernelCheck(name=name, error=error, problem=problem))
            except Exception as failure:  # one broken kernel must not hide the others
                text = str(failure).partition("\n")[0]
                problem = f"{type(failure).__name__}: {text}"
                self.found.checks.append(KernelCheck(name=name, error=None, problem=problem))

    def _cases(self) -> Iterator[tuple[str, Case]]:
        """Names of results, and functions of a device, which can simulate products."""
        x, weight, grad = self.random(61, 200), self.random(72, 200), self.random(61, 72)
        finite = x.clone()
        x[3], x[5, 7] = 0, float("nan")  # row 5 has no meaningful codes

        def linear(at: torch.device, simulate: bool) -> Tensor:
            return products.linear(
                encode(x.to(at)), encode_rows(weight.to(at), EXACT), grad[0].to(at), simulate=simulate
            )

        def of_weight(at: torch.device, simulate: bool) -> Tensor:
            signed = encode(grad.to(at), signed=True, limit=EXACT, whole=True)
            return products.transposed(signed, encode(finite.to(at)), simulate=simulate)

        yield "codes", lambda at, simulate: encode(x.to(at)).values[[0, 1, 2, 3, 4, 6]].float()
        yield "codes, stochastic", lambda at, simulate: encode(grad.to(at), 7, signed=True).values.float()
        yield "codes of a weight", lambda at, simulate: encode_rows(weight.to(at), EXACT).values.float()
        yield "codes of columns", lambda at, simulate: encode_columns(weight.to(at), EXACT).values.float()
        yield "linear", linear
        yield "linear, gradient of the weight", of_weight
        fp8 = KERNELS.get("fp8")
        if fp8.missing(self.device) is None:
            spec, operands = ComputeSpec(format="fp8"), (finite[:48, :192], weight[:64, :192])
            yield (
                "fp8",
                lambda at, simulate: fp8(spec, simulate=simulate)(F.linear, [one.to(at) for one in operands], {}),
            )
        for name, kernel, stride, padding, dilation, groups in (
            ("convolution", 3, 1, 1, 1, 1),
            ("strided convolution", 3, 2, 1, 1, 1),
            ("pointwise convolution", 1, 1, 0, 1, 1),
            ("dilated convolution", 3, 1, 2, 2, 1),
            ("grouped convolution", 3, 1, 1, 1, 4),
            ("depthwise convolution", 5, 2, 2, 1, 16),
        ):
            yield from self._convolution(name, kernel, (stride,) * 2, (padding,) * 2, (dilation,) * 2, groups)

    def _convolution(
        self,
        name: str,
        kernel: int,
        stride: tuple[int, ...],
        padding: tuple[int, ...],
        dilation: tuple[int, ...],
        groups: int,
    ) -> Iterator[tuple[str, Case]]:
        shape = (stride, padding, dilation, groups)
        x, weight = self.random(3, 16, 15, 13), self.random(32, 16 // groups, kernel, kernel)
        grad = self.random(*F.conv2d(x, weight, None, *shape).shape)

        def codes(tensor: Tensor, at: torch.device, **options: Any) -> Codes:
            return encode(tensor.to(at).contiguous(memory_format=torch.channels_last), **options)

        def forward(at: torch.device, simulate: bool) -> Tensor:
            rows = encode_rows(weight.to(at), EXACT)
            return products.conv2d(codes(x, at), rows, None, *shape, simulate=simulate)

        def of_input(at: torch.device, simulate: bool) -> Tensor:
            turned, signed = encode_rotated(weight.to(at), groups, EXACT), codes(grad, at, signed=True)
            return products.conv2d_input(signed, turned, x.shape[2:], *shape, simulate=simulate)

        def of_weight(at: torch.device, simulate: bool) -> Tensor:
            signed, window = codes(grad, at, signed=True, limit=EXACT, whole=True), weight.shape[2:]
            return products.conv2d_weight(signed, codes(x, at), window, *shape, simulate=simulate)

        yield name, forward
        yield f"{name}, gradient of the input", of_input
        yield f"{name}, gradient of the weight", of_weight

    def seconds(self, run: Run) -> float:
        """The median time of a call."""
        run()  # compiles, and measures tiles
        self.wait()
        times: list[float] = []
        begun = time.perf_counter()
        while len(times) < 3 or (len(times) < 30 and time.perf_counter() - begun < 0.5):
            start = time.perf_counter()
            run()
            self.wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def rate(self) -> None:
        """The memory's bandwidth, the peak of each format, and layers relative to both."""
        count = (64 << 20) if self.large else (4 << 20)
        bandwidth = None
        if not self.late("bandwidth"):
            source = torch.zeros(count, device=self.device)
            target = torch.empty_like(source)
            spent = self.seconds(lambda: target.copy_(source))
            bandwidth = 8 * count / spent
            self._add("copy", "float32", spent, bandwidth / 1e9, "GB/s")
        side = 4096 if self.large else 384
        peaks = {
            format: self._product(f"linear {side} → {side}", format, side, side, side) for format in self._formats()
        }
        tokens, scale = (4096, 1) if self.large else (128, 8)
        for columns, depth in ((4096 // scale, 1024 // scale), (1024 // scale, 1024 // scale)):
            for format, peak in peaks.items():
                self._product(f"linear {depth} → {columns}", format, tokens, columns, depth, peak, bandwidth)

    def _formats(self) -> list[str]:
        """The formats that aren't simulated."""
        real = [format for format in _FORMATS if KERNELS.get(format).missing_for("linear", self.device) is None]
        return ["float32", *real]

    def _product(
        self,
        name: str,
        format: str,
        rows: int,
        columns: int,
        depth: int,
        peak: float | None = None,
        bandwidth: float | None = None,
    ) -> float | None:
        """Operations per second of a linear layer, with the encoding of its operands."""
        what = f"{name}, {rows} rows"
        if self.late(f"{what} in {format}"):
            return None
        x, weight = self.random(rows, depth).to(self.device), self.random(columns, depth).to(self.device)
        run = _layer(format)
        try:
            with torch.no_grad():
                spent = self.seconds(lambda: run(x, weight))
        except Exception as failure:
            self.found.skipped.append(f"{what} in {format}: {type(failure).__name__}: {failure}".partition("\n")[0])
            return None
        operations = 2 * rows * columns * depth
        share = None
        if peak is not None and bandwidth is not None:
            least = max(operations / peak, 4 * (rows * depth + columns * depth + rows * columns) / bandwidth)
            share = least / spent
        self._add(what, format, spent, operations / spent / 1e12, "TFLOP/s", share)
        return operations / spent

    def _add(self, what: str, format: str, spent: float, rate: float, unit: str, share: float | None = None) -> None:
        one = Rate(what=what, format=format, milliseconds=1e3 * spent, rate=rate, unit=unit, of_roofline=share)
        self.found.rates.append(one)

    def step(self) -> None:
        """Training steps in each format."""
        for name, build in (("convolutions", self._convolutions), ("linear layers", self._linears)):
            plain = None
            for format in self._formats():
                if self.late(f"{name} in {format}"):
                    continue
                try:
                    model, x = build()
                    spent, peak, notes = self._step(model, x, format)
                except Exception as failure:
                    text = f"{name} in {format}: {type(failure).__name__}: {failure}".partition("\n")[0]
                    self.found.skipped.append(text)
                    continue
                plain = spent if plain is None else plain
                self.found.steps.append(
                    StepTime(
                        model=name,
                        format=format,
                        milliseconds=1e3 * spent,
                        of_float=spent / plain,
                        peak_bytes=peak,
                        notes=notes,
                    )
                )

    def _convolutions(self) -> tuple[nn.Module, Tensor]:
        """Residual stages with the layers of ResNet-18, and a small version for CPUs."""
        width, side, batch = (64, 56, 64) if self.large else (8, 12, 8)
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Conv2d(3, width, 7, stride=2, padding=3), nn.ReLU()]
        for stage in range(3):
            ins, outs = width << max(stage - 1, 0), width << stage
            layers += [nn.Conv2d(ins, outs, 3, stride=min(1 + stage, 2), padding=1), nn.BatchNorm2d(outs), nn.ReLU()]
            layers += [nn.Conv2d(outs, outs, 3, padding=1), nn.BatchNorm2d(outs), nn.ReLU()]
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(outs, 16))
        return model.to(self.device), self.random(batch, 3, 2 * side, 2 * side).to(self.device)

    def _linears(self) -> tuple[nn.Module, Tensor]:
        """The linear layers of transformer blocks."""
        width, rows = (1024, 4096) if self.large else (64, 64)
        torch.manual_seed(0)
        block = [nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width), nn.ReLU()]
        return nn.Sequential(*block, nn.Linear(width, 16)).to(self.device), self.random(rows, width).to(self.device)

    def _step(self, model: nn.Module, x: Tensor, format: str) -> tuple[float, int | None, list[str]]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        target = torch.zeros(len(x), dtype=torch.long, device=self.device)
        spec = ComputeSpec(format=format, backward=("input", "weight"))
        low = None
        if format != "float32":
            low = LowPrecision(model, Plan(compute={"*": spec}), None, x, simulate=False)

        def run() -> None:
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(model(x).float(), target).backward()
            optimizer.step()

        if self.large:
            torch.cuda.reset_peak_memory_stats(self.device)
        spent = self.seconds(run)
        peak = torch.cuda.max_memory_allocated(self.device) if self.large else None
        return spent, peak, [] if low is None else low.notes


def _layer(format: str) -> Callable[[Tensor, Tensor], object]:
    """A linear layer in a format; 16-bit operands are cast with it, as in training."""
    if format == "float32":
        return F.linear
    kernel = KERNELS.get(format)(ComputeSpec(format=format))
    return lambda x, weight: kernel(F.linear, (x, weight), {})
