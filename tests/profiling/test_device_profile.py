from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from problems import raises_problem
from schemas import json_schema
from step_cases import profile_of

from bitwright.profiling import DeviceProfile, SampleStore
from bitwright.profiling.device_profile import Line, at
from bitwright.profiling.execution import Cast
from bitwright.profiling.microbenchmarks import _CAST_SIZES, _lines, measure_casts
from bitwright.profiling.overhead import measure_host
from bitwright.profiling.profiler import assemble
from bitwright.profiling.step_timer import fit
from bitwright.quantizers.compiled import SMALL


def test_a_profile_round_trips_and_matches_its_schema(tmp_path: Path) -> None:
    made = profile_of([("add(f32[2])", "float32")])
    path = made.save(tmp_path / "device.json")
    assert DeviceProfile.load(path) == made
    jsonschema.validate(json.loads(path.read_text()), json_schema("device-profile-1"))


@pytest.mark.parametrize(
    ("text", "code", "where"),
    [
        ("{}", "missing-key", "{path}, bitwright_profile"),
        ('{"bitwright_profile": 2, "device": "x"}', "invalid-value", "{path}, bitwright_profile"),
        ('{"bitwright_profile": 1, "device": "x", "speed": 3}', "unknown-key", "{path}, speed"),
        ("hello", "invalid-json", "{path}:1:1"),
    ],
)
def test_invalid_profile_files_are_rejected(text: str, code: str, where: str, tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    path.write_text(text)
    with raises_problem(code, where=where.format(path=path)):
        DeviceProfile.load(path)
    with raises_problem("unreadable-file", mentions="other.json"):
        DeviceProfile.load(tmp_path / "other.json")


def test_fitted_lines_apply_from_their_start() -> None:
    lines = [Line(per_element=1.0, fixed=0.0), Line(per_element=0.5, fixed=100.0, start=1000)]
    assert at(lines, 10) == 10.0
    assert at(lines, 2000) == 1100.0
    assert at([], 10) is None


def test_fits_are_non_negative_and_report_their_error() -> None:
    sizes = [2.0**k for k in range(8, 20)]
    noise = np.random.default_rng(0).normal(1.0, 0.02, len(sizes))
    found = fit([(n, 1.0) for n in sizes], [(3e-9 * n + 2e-6) * e for n, e in zip(sizes, noise, strict=True)])
    assert found.coefficients == pytest.approx((3e-9, 2e-6), rel=0.1)
    assert found.r2 > 0.99
    assert found.held_out is not None
    assert 0 < found.held_out < 0.1
    falling = fit([(n, 1.0) for n in sizes], [1.0 / n for n in sizes])
    assert min(falling.coefficients) >= 0


def test_casts_are_measured_by_size() -> None:
    (cast,) = measure_casts([Cast("input", "float32→bfloat16")], "cpu", rounds=3)
    small, large = (at(cast.forward, n) for n in (1 << 12, 1 << 21))
    assert small is not None
    assert large is not None
    assert 0 < small < large
    assert cast.forward[0].r2 is not None


def test_host_overhead_is_measured() -> None:
    host = measure_host("cpu", rounds=3)
    assert host.engine > 0
    assert host.schedule > 0
    assert host.hooked > 0  # a quantizer's operator costs more than one that is only seen


def test_groups_of_other_sizes_are_kept_apart() -> None:
    def fact(world: int) -> dict[str, object]:
        return {"operation": "all_reduce", "backend": "gloo", "world": world, "latency": 1e-4, "per_byte": 1e-9}

    store = SampleStore()
    for world in (2, 3, 2):
        ddp = {"ddp_forward": 1e-3 * world, "contention": 0.1}
        store.add({"facts": {f"collectives gloo {world}": [fact(world)], f"ddp gloo {world}": ddp}})
    made = assemble(store, "wall")
    assert [cost.world for cost in made.collectives] == [2, 3]
    assert made.host.ddp_forward == 3e-3


def test_both_lines_of_a_fused_quantizer_report_their_error() -> None:
    lines = _lines([(size, 1e-6 + 1e-9 * size) for size in _CAST_SIZES], broken=True)
    assert [line.start for line in lines] == [0, SMALL]
    assert all(line.held_out is not None for line in lines)
