"""Run functions in processes whose Triton interprets its kernels, or compiles them without a device.

Triton reads TRITON_INTERPRET when it decorates a kernel, so a process can only do one of both. Tests share processes
with other tests and must not set it.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch import Tensor

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
Remote = Callable[..., Any]
_TYPES = {torch.uint8: "u8", torch.int8: "i8", torch.int32: "i32", torch.int64: "i64", torch.float32: "fp32"}


def _start(environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)


def _run(content: bytes) -> Any:
    function, args, kwargs = pickle.loads(content)
    return pickle.dumps(function(*args, **kwargs))


@contextmanager
def process(**environment: str) -> Iterator[Remote]:
    """A function that calls another one in a new process. Tensors are copied, not shared."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=_start, initargs=(environment,)) as pool:

        def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return pickle.loads(pool.submit(_run, pickle.dumps((function, args, kwargs))).result(timeout=900))

        yield call


def integers(name: str, *args: Any, half: bool = False, most: int | None = None, **kwargs: Any) -> Any:
    """A function of the Triton modules. `half`: as on Turing; `most`: the terms of a sum before it is split."""
    from bitwright.kernels.triton import convolution, gemm, launch

    module: Any = gemm if hasattr(gemm, name) else convolution
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "INTERPRETED", launch.Tile(16, 16, 32, 1, 1))
        for each in (gemm, convolution):
            patch.setattr(each, "multiplies_halves", lambda device: half)
            patch.setattr(each, "MOST", most or gemm.MOST)
        return getattr(module, name)(*args, **kwargs)


def compiled(capability: int, group: str) -> list[dict[str, Any]]:
    """Compile the kernels of a group for a device, as launches do: their registers, spilled bytes and instructions."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    from bitwright.kernels.triton import convolution, gemm, launch

    found: list[dict[str, Any]] = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        source, options = _source(self, args, kwargs)
        log = StringIO()
        with redirect_stdout(log):
            kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        found.append({"name": self.fn.__name__, "ptx": kernel.asm["ptx"], "log": log.getvalue()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", record)
        patch.setattr(knobs.nvidia, "dump_ptxas_log", True)
        half = capability < 80
        for module in (gemm, convolution, launch):
            patch.setattr(module, "multiplies_halves", lambda device: half)
        tiles = {"aligned tiles": launch.TILES, "unaligned tiles": launch.UNALIGNED}.get(group, launch.TILES[:1])
        odd = {"channels": 3, "kernel": 7, "side": 13} if group == "unaligned tiles" else {}
        for tile in launch.TURING if half else tiles:
            for name in ("TILES", "UNALIGNED", "TURING"):
                patch.setattr(launch, name, (tile,))
            if group != "codes":
                launch_products(**odd)
        if group == "codes":
            launch_codes()
    return found


def launch_products(channels: int = 64, kernel: int = 3, side: int = 16) -> None:
    """Every kernel of a product, as for a common layer. Sizes that are multiples of 16 have code of their own."""
    from bitwright.kernels.codes import Codes, Signed
    from bitwright.kernels.triton import convolution, gemm

    def unsigned(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.uint8)

    zero, ones = torch.zeros((), dtype=torch.int32), torch.ones(64)
    depth = channels * kernel**2
    rows, weight = Codes(unsigned(256, depth), torch.ones(256), zero), torch.zeros(64, depth, dtype=torch.int8)
    gemm.linear(rows, Signed(weight, ones), ones, activation="gelu")
    gemm.transposed(Codes(unsigned(256, 64), ones[:1], 128), rows)
    image, grad = Codes(unsigned(2, channels, side, side), torch.ones(2), zero), unsigned(2, 64, side, side)
    shape, taps = ((1, 1), (kernel // 2,) * 2, (1, 1), 1), torch.zeros(64, channels, kernel, kernel, dtype=torch.int8)
    convolution.conv2d(image, Signed(taps, ones), ones, *shape)
    convolution.conv2d_weight(Codes(grad, ones[:1], 128), image, (kernel, kernel), *shape)


def launch_codes() -> None:
    """Every kernel that encodes."""
    from bitwright.kernels.triton import gemm

    x, ones, zero = torch.zeros(64, 1000), torch.ones(64), torch.zeros(())
    gemm.ranges(x)
    for seed in (None, 3):
        gemm.codes(x, ones, zero, seed)
    gemm.signed_codes(x.t(), torch.ones(1000), 127)


def _source(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The specialized source of a launch, and its compiler options."""
    from triton.compiler import ASTSource

    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
    signature, constants, aligned = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        if parameter.is_constexpr or (type(value) is int and value == 1 and not parameter.do_not_specialize):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name] = f"*{_TYPES[value.dtype]}"
            aligned[place,] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and not value % 16 and not parameter.do_not_specialize:
                aligned[place,] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, aligned), options


def gradients(name: str, backward: tuple[str, ...], simulate: bool, last: bool = False) -> tuple[Tensor, ...]:
    """Output and gradients of a call of tests/kernels/int8_calls.py."""
    from int8_calls import run

    from bitwright.plan import ComputeSpec

    return run(name, ComputeSpec(format="int8", backward=backward), simulate=simulate, last=last)


def train(seed: int) -> tuple[list[float], list[str], dict[str, Tensor]]:
    """Train a tiny network with a strided and a grouped convolution: float losses before and after, notes, weights."""
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import TensorDataset

    from bitwright import Plan, TrainConfig, Trainer, Workload
    from bitwright.plan import ComputeSpec

    torch.manual_seed(seed)
    data = torch.randn(24, 3, 6, 6)
    target = (data.mean((1, 2, 3)) > 0).long()
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(72, 2),
    )
    workload = Workload(
        name="tiny",
        model=model,
        inputs=(data[:1],),
        training=lambda: TensorDataset(data, target),
        evaluation=lambda: [(data, target)],
        loss=F.cross_entropy,
    )
    spec = ComputeSpec(format="int8", backward=("input", "weight"), stochastic=True)
    config = TrainConfig(epochs=2, batch=12, lr=0.1, schedule="constant")
    losses = [float(F.cross_entropy(model(data), target).detach())]
    result = Trainer(workload, config=config, compute=Plan(compute={"*": spec})).fit()
    losses.append(float(F.cross_entropy(result.model(data), target).detach()))
    return losses, result.notes, {name: tensor.detach() for name, tensor in result.model.state_dict().items()}
