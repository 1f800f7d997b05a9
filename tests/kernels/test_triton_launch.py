"""Where Triton runs, how its tiles are chosen, and which library is reported. Needs neither Triton nor a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bitwright.kernels import products
from bitwright.kernels.codes import Codes, Signed, encode, encode_rows
from bitwright.kernels.int8 import Int8
from bitwright.kernels.triton import launch
from bitwright.kernels.triton.launch import TILES, Tile, Tuner, splits

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
SMALL = Tile(16, 16, 32, 1, 1)


def timed(times: dict[Tile, float], seen: list[Tile]) -> Callable[[Callable[[], None]], float]:
    """Measure a launch: its tile is the one that it runs last."""

    def measure(run: Callable[[], None]) -> float:
        run()
        if seen[-1] not in times:
            raise RuntimeError("out of resource: shared memory")
        return times[seen[-1]]

    return measure


def test_the_fastest_tile_is_kept_for_the_device(tmp_path: Path) -> None:
    path, seen = tmp_path / "device.json", []
    tuner = Tuner(path, timed({TILES[0]: 3.0, TILES[2]: 1.0, TILES[3]: 2.0}, seen))  # the others can't run
    assert tuner.best("gemm", (1000, 64, 3), TILES, seen.append) == TILES[2]
    assert len(seen) == len(TILES)
    assert tuner.best("gemm", (1024, 64, 4), TILES, seen.append) == TILES[2]  # the same powers of two
    later = Tuner(path, timed({}, seen))
    assert later.best("gemm", (1000, 64, 3), TILES, seen.append) == TILES[2]
    assert len(seen) == len(TILES)
    assert list(json.loads(path.read_text())["tiles"]) == ["gemm 1024x64x4"]


def test_processes_add_to_each_others_measurements(tmp_path: Path) -> None:
    path, seen = tmp_path / "device.json", []
    one, other = (Tuner(path, timed({TILES[0]: 1.0, TILES[1]: 2.0}, seen)) for _ in range(2))
    one.best("gemm", (8,), TILES, seen.append)
    other.best("convolution", (8,), TILES, seen.append)
    assert set(json.loads(path.read_text())["tiles"]) == {"gemm 8", "convolution 8"}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"tiles": {"gemm 8": [1]}}', '{"tiles": {"gemm 8": "x"}}'])
def test_a_damaged_file_is_replaced(tmp_path: Path, content: str) -> None:
    path, seen = tmp_path / "device.json", []
    path.write_text(content)
    assert Tuner(path, timed({TILES[1]: 1.0}, seen)).best("gemm", (8,), TILES, seen.append) == TILES[1]
    assert Tuner(path, timed({}, seen)).found == {"gemm 8": TILES[1]}


def test_a_tile_of_another_version_is_measured_again(tmp_path: Path) -> None:
    path, seen = tmp_path / "device.json", []
    path.write_text(json.dumps({"tiles": {"gemm 8": [8, 8, 8, 1, 1]}}))
    assert Tuner(path, timed({TILES[4]: 1.0}, seen)).best("gemm", (8,), TILES, seen.append) == TILES[4]


def test_where_no_tile_can_be_measured_the_call_itself_fails(tmp_path: Path) -> None:
    path, seen = tmp_path / "device.json", []
    assert Tuner(path, timed({}, seen)).best("gemm", (8,), TILES, seen.append) == TILES[0]
    assert not path.exists()


def test_devices_and_versions_have_files_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BITWRIGHT_CACHE", str(tmp_path))
    assert launch.tuning_file("Tesla T4", "3.9.0") == tmp_path / "triton" / "tesla-t4-3.9.0.json"


@pytest.mark.parametrize("programs", [1, 7, 1000])
@pytest.mark.parametrize("depth", [1, 33, 4096, 200_000])
@pytest.mark.parametrize("processors", [1, 40])
def test_parts_cover_the_depth(monkeypatch: pytest.MonkeyPatch, programs: int, depth: int, processors: int) -> None:
    monkeypatch.setattr(launch, "processors", lambda device: processors)
    parts, length = splits(programs, depth, SMALL, CPU, 1 << 16)
    assert (parts - 1) * length < depth <= parts * length
    assert length <= 1 << 16
    assert parts == 1 or not length % SMALL.depth
    if (programs, depth, processors) == (1, 4096, 40):
        assert parts == 16  # as long as each has eight steps


def cuda_device(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], problem: str | None = None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(launch, "_first_product", lambda device: problem)
    launch._missing_on.cache_clear()
    monkeypatch.setattr(torch.version, "hip", None)


@pytest.mark.parametrize(
    ("capability", "problem", "engine"),
    [
        ((9, 0), None, "Triton"),
        ((8, 0), None, "Triton"),
        ((7, 5), None, "cuBLAS and Triton"),
        ((7, 0), None, "cuBLAS"),
        ((8, 0), "the first product was wrong", "cuBLAS"),
    ],
)
def test_the_device_decides_about_the_library(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], problem: str | None, engine: str
) -> None:
    cuda_device(monkeypatch, capability, problem)
    assert Int8.engine(CUDA) == engine
    assert Int8.missing(CUDA) is None
    lacks = Int8.missing_for("conv2d", CUDA)
    assert (lacks is None) == ("Triton" in engine)
    assert problem is None or problem in str(lacks)
    launch._missing_on.cache_clear()


def test_a_compiler_that_fails_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: torch.device) -> None:
        raise RuntimeError("Failed to find C compiler\nat all")

    cuda_device(monkeypatch, (8, 0))
    monkeypatch.setattr(launch, "_first_product", broken)
    assert "RuntimeError: Failed to find C compiler" in str(launch.missing(CUDA))
    launch._missing_on.cache_clear()


def test_without_triton_the_cpu_works_and_the_reason_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    assert "bitwright[triton]" in str(launch.missing(CUDA))
    assert Int8.engine(CPU) == (None if products.missing() else "oneDNN")
    assert Int8.engine(torch.device("mps")) is None


@pytest.mark.parametrize("zero", [0, 128])
@pytest.mark.parametrize("stride", [(1, 1), (2, 1)])
@pytest.mark.parametrize("held", [int, torch.tensor])
def test_unfolded_convolutions_are_those_of_the_cpu(
    zero: int, stride: tuple[int, int], held: Callable[[int], int | torch.Tensor]
) -> None:
    """cuBLAS multiplies the windows of an image as rows."""
    generator = torch.Generator().manual_seed(0)
    x = encode(torch.randn(2, 8, 7, 9, generator=generator).relu() if not zero else torch.randn(2, 8, 7, 9))
    assert x.zero == zero
    weight = encode_rows(torch.randn(16, 8, 3, 3, generator=generator), products.second_limit(CPU))
    bias = torch.linspace(-1, 1, 16)
    shape = (stride, (1, 2), (1, 2))
    found = products.unfolded_conv2d(
        Codes(x.values, x.scales, held(int(x.zero))), Signed(weight.values, weight.scales), bias, *shape
    )
    wanted = torch.nn.functional.conv2d(x.float(), weight.float(), bias, *shape)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
