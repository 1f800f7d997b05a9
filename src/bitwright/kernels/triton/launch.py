"""Where Triton runs, and the tile sizes of its kernels, which are measured once for each device."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from bitwright.core.errors import BitwrightError
from bitwright.core.files import cache_folder, write_text

_log = logging.getLogger(__name__)
_CAPABILITY = (7, 5)
"""The first CUDA devices with instructions for 8-bit products (Turing)."""


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on the tensors of any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def missing(device: torch.device) -> str | None:
    """Why the kernels can't run on this device; None if they can."""
    if device.type != "cuda" and not interpreted():
        return f"Triton kernels run on CUDA devices, not on {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install 'bitwright[triton]')"
    if interpreted():
        return None
    if torch.version.hip is not None:
        return "the Triton kernels are not verified on AMD devices"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return _missing_on(torch.cuda.current_device() if str(device) == "cuda" else device.index)


@cache
def _missing_on(index: int) -> str | None:
    capability = torch.cuda.get_device_capability(index)
    if capability < _CAPABILITY:
        needed = ".".join(map(str, _CAPABILITY))
        return f"compute capability {'.'.join(map(str, capability))}, but 8-bit products need {needed}"
    try:
        return _first_product(torch.device("cuda", index))
    except Exception as error:  # compilers and drivers raise many types
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        _log.warning("Triton kernels can't run on cuda:%d: %s: %s", index, type(error).__name__, reason)
        return f"the first kernel failed: {type(error).__name__}: {reason}"


def _first_product(device: torch.device) -> str | None:
    """Multiply small matrices: this compiles for the device and calls its driver."""
    from bitwright.kernels.codes import Codes, Signed
    from bitwright.kernels.triton import gemm

    values = torch.arange(33 * 40, dtype=torch.int64).view(33, 40)
    left, right = (values % 251).to(torch.uint8), (values % 127 - 63).to(torch.int8)
    ones = torch.ones(33, device=device)
    found = gemm.linear(Codes(left.to(device), ones, 128), Signed(right.to(device), ones), None, tune=False)
    wanted = (left.double() - 128) @ right.double().t()
    return None if torch.equal(found.cpu().double(), wanted) else "the first product was wrong"


@dataclass(frozen=True)
class Tile:
    """The part of a product that one program computes, and how: rows × columns, with `depth` terms at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of a launch. Without fused multiply-adds, results are those of the CPU."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": False}


#: The first one is used until tiles are measured. No tile needs more shared memory than Turing has (64 KB).
TILES = (
    Tile(64, 64, 64, 4, 3),
    Tile(128, 64, 64, 4, 3),
    Tile(128, 128, 64, 8, 3),
    Tile(64, 128, 64, 4, 3),
    Tile(128, 64, 64, 8, 3),
    Tile(32, 64, 128, 4, 3),
    Tile(128, 32, 64, 4, 3),
)

#: For sizes that aren't multiples of 16: their loads need more registers.
UNALIGNED = (Tile(64, 64, 64, 4, 3), Tile(64, 64, 64, 8, 3), Tile(32, 64, 64, 4, 3))
#: On Turing, products are computed without tensor cores, and larger tiles don't fit into the registers.
TURING = (Tile(32, 32, 32, 4, 2),)
#: The interpreter's time depends on the number of programs.
INTERPRETED = Tile(256, 32, 64, 1, 1)

Measure = Callable[[Callable[[], None]], float]


@dataclass
class Tuner:
    """Measures the tiles of a product once for each device, and keeps the fastest ones in a file."""

    path: Path
    measure: Measure
    """Milliseconds of a launch."""
    found: dict[str, Tile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.found = _read(self.path)

    def best(self, name: str, sizes: Iterable[int], tiles: Sequence[Tile], run: Callable[[Tile], None]) -> Tile:
        """The fastest tile for these sizes, rounded up to powers of two; measured if it is unknown."""
        key = f"{name} {'x'.join(str(1 << max(size - 1, 0).bit_length()) for size in sizes)}"
        if self.found.get(key) in tiles:
            return self.found[key]
        times = {}
        for tile in tiles:
            try:
                times[tile] = self.measure(lambda tile=tile: run(tile))  # type: ignore[misc]
            except Exception as error:  # a tile may need more registers or shared memory than the device has
                _log.debug("%s: %s failed: %s", key, tile, error)
        # if all fail, so does the call that follows, with an error of its own
        self.found[key] = min(times, key=times.__getitem__) if times else tiles[0]
        if times:
            self._save()
        return self.found[key]

    def _save(self) -> None:
        self.found = {**_read(self.path), **self.found}  # other processes measure as well
        content = {key: list(astuple(tile)) for key, tile in sorted(self.found.items())}
        try:
            write_text(self.path, json.dumps({"tiles": content}, indent=1) + "\n")
        except BitwrightError as error:  # the next process measures again
            _log.warning("the measured tiles can't be kept: %s", error)


def _read(path: Path) -> dict[str, Tile]:
    """The tiles in a file; none if it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))["tiles"]
        return {key: Tile(*map(int, values)) for key, values in content.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def tuning_file(device: str, version: str) -> Path:
    """The file of a device's tiles; another version of Triton may have other fastest tiles."""
    words = re.sub(r"[^A-Za-z0-9.]+", "-", device).strip("-").lower()
    return cache_folder() / "triton" / f"{words}-{version}.json"


@cache
def tuner(device: torch.device) -> Tuner:
    """The tuner of a CUDA device."""
    import triton
    from triton.testing import do_bench

    def milliseconds(run: Callable[[], None]) -> float:
        return float(do_bench(run, warmup=5, rep=20))

    return Tuner(tuning_file(torch.cuda.get_device_name(device), triton.__version__), milliseconds)


def tile_for(
    name: str,
    sizes: Sequence[int],
    device: torch.device,
    run: Callable[[Tile], None],
    *,
    aligned: bool,
    tune: bool = True,
) -> Tile:
    """The tile of a product. In the interpreter and in a captured CUDA graph, nothing can be measured.

    `aligned`: the lengths of contiguous axes, and the strides of others, are multiples of 16.
    """
    if interpreted():
        return INTERPRETED
    tiles = TURING if multiplies_halves(device) else TILES if aligned else UNALIGNED
    if not tune or len(tiles) == 1 or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return tiles[0]
    kind = name if aligned else f"{name}-unaligned"
    return tuner(device).best(kind, sizes, tiles, run)


def are_aligned(*numbers: int) -> bool:
    """Whether all numbers but 1 are multiples of 16; the stride of a contiguous axis is 1."""
    return all(number == 1 or number % 16 == 0 for number in numbers)


def multiplies_halves(device: torch.device) -> bool:
    """Whether products use float16: Triton has no 8-bit products for Turing."""
    if interpreted():
        return False
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Launch on the device of the tensors, which may not be the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def processors(device: torch.device) -> int:
    """The number of multiprocessors. Products with fewer tiles than that are split along their depth."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def splits(programs: int, depth: int, tile: Tile, device: torch.device, most: int) -> tuple[int, int]:
    """Parts of the depth and the length of each, so that sums of `most` terms fit and the device is busy."""
    wanted = min(2 * processors(device) // max(programs, 1), depth // (8 * tile.depth))
    count = max(wanted, -(-depth // most), 1)
    length = -(-depth // count)
    length = min(-(-length // tile.depth) * tile.depth, most)  # all parts but the last are complete tiles
    return -(-depth // length), length
