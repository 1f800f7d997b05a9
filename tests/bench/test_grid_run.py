"""Grids that run: what is executed is read, kept, compared, resumed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grid_workloads
import pytest
import torch
from grid_workloads import FILE, algorithm, grid

from bitwright import BitwrightError, GridConfig, Leaderboard, Plan, make_plan, run_grid
from bitwright.bench import RowProgress, rerun_rows
from bitwright.bench.leaderboard import Row
from bitwright.core.environment import revision
from bitwright.deployment.checkpoint import load_checkpoint, save_checkpoint
from bitwright.quantizers import attachment_of
from bitwright.reports.leaderboard import leaderboard_markdown
from bitwright.training import Trainer
from bitwright.workload import load_workload


@pytest.fixture(scope="module", autouse=True)
def starts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Float networks are trained once for all tests here."""
    global _starts
    _starts = tmp_path_factory.mktemp("starts")
    yield
    _starts = None


_starts: Path | None = None


def run(folder: Path, watch: Any = None, work: bool = True, **changes: Any) -> Leaderboard:
    config = GridConfig.parse(grid(folder, **changes), where="grid", folder=folder)
    return run_grid(config, starts=_starts, watch=watch, work=work)


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Leaderboard:
    return run(
        tmp_path_factory.mktemp("grid"),
        algorithms=[algorithm("lsq"), algorithm("tqt")],
        backends=["academic", "tensorrt", "snpe", "onnxruntime"],
        beyond="simulate",
        runtimes="none",
    )


def row(board: Leaderboard, algorithm: str, backend: str) -> Row:
    return next(r for r in board.rows if (r.algorithm, r.backend) == (algorithm, backend))


def test_rows_record_what_was_executed(board: Leaderboard) -> None:
    academic, runtime = row(board, "lsq", "academic"), row(board, "lsq", "onnxruntime")
    assert academic.status == runtime.status == "done"
    assert academic.executed is not None
    assert runtime.executed is not None
    assert {s.quantizer for s in (*academic.executed.weights, *academic.executed.activations)} == {
        "bitwright.quantizers.lsq.Lsq"
    }
    assert {s.format for s in academic.executed.weights} == {"int4/tensor/sym", "int8/tensor/sym"}
    assert all(s.levels <= 16 for s in academic.executed.weights if s.format.startswith("int4"))
    assert max(s.levels for s in academic.executed.activations) > 16  # the edges have 8 bits
    assert academic.executed.folding == {}
    assert any("bnfold 4 has no effect" in note for note in academic.notes)
    assert runtime.executed.folding == {"4": 5}
    assert runtime.executed.biases == 6
    assert runtime.device is None  # it wasn't asked for
    assert academic.float_accuracy is not None
    assert academic.float_accuracy > 50
    assert academic.samples == 250
    assert academic.machine in board.machines


def test_the_gap_to_the_runtime_is_measured_where_it_runs(tmp_path: Path) -> None:
    academic, runtime = run(tmp_path, backends=["academic", "onnxruntime"], bits=[8]).rows
    assert academic.device is None
    device = runtime.device
    assert device is not None
    assert device.runtime == "onnxruntime"
    assert device.kinds == {"int8": 6, "float": 0}
    assert device.accuracy is not None
    assert runtime.accuracy is not None
    assert device.gap == pytest.approx(device.accuracy - runtime.accuracy)
    assert abs(device.gap) <= 1


def test_refused_rows_have_a_reason(board: Leaderboard) -> None:
    refused = row(board, "tqt", "snpe")
    assert refused.status == "refused"
    assert "Tqt supports only symmetric formats" in str(refused.reason)
    simulated = row(board, "lsq", "tensorrt")
    assert simulated.status == "done"
    assert "can't run int4/channel/sym/narrow" in str(simulated.beyond)
    # where the backend has a symmetric format, a symmetric quantizer takes it
    kin = row(board, "tqt", "onnxruntime")
    assert kin.executed is not None
    assert all("/sym" in s.format for s in kin.executed.activations)


def test_a_leaderboard_survives_saving_and_loading(board: Leaderboard, tmp_path: Path) -> None:
    assert Leaderboard.load(board.save(tmp_path / "board.json")) == board
    text = leaderboard_markdown(board)
    assert "Tqt supports only symmetric formats" in text
    assert "| lsq |" in text
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(BitwrightError) as caught:
        Leaderboard.load(tmp_path / "other.json")
    assert set(caught.value.codes) == {"missing-key"}


def test_drops_exclude_the_effect_of_training(board: Leaderboard) -> None:
    (net,) = board.floats
    assert board.drops_from == "trained"
    done = row(board, "lsq", "academic")
    assert done.float_trained == net.trained_on
    assert done.accuracy is not None
    assert net.trained_on is not None
    assert done.drop == net.trained_on - done.accuracy


def test_two_runs_give_the_same_numbers(board: Leaderboard, tmp_path: Path) -> None:
    again = run(tmp_path, backends=["onnxruntime"], beyond="simulate", runtimes="none")
    (one,) = again.rows
    before = row(board, "lsq", "onnxruntime")
    assert one.id == before.id
    assert one.start == before.start
    assert one.accuracy == before.accuracy
    assert one.executed == before.executed
    assert again.floats[0].trained_on == board.floats[0].trained_on


def test_a_grid_goes_on_where_it_was_left_and_may_grow(tmp_path: Path) -> None:
    told: list[RowProgress] = []
    one = run(tmp_path, told.append)
    assert run(tmp_path, told.append).rows == one.rows
    assert len(told) == 1
    assert run(tmp_path, told.append, work=False, seeds=[0, 1]).rows[1].status == "pending"
    grown = run(tmp_path, told.append, seeds=[0, 1])
    assert [t.task.seed for t in told] == [0, 1]
    assert grown.rows[0] == one.rows[0]
    assert grown.rows[1].start != one.rows[0].start


def test_a_model_that_differs_from_its_row_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*arguments: Any, **choices: Any) -> Plan:
        return make_plan(*arguments, **{**choices, "quantizer": "plain", "weight_quantizer": "plain"})

    monkeypatch.setattr("bitwright.bench.grid_row.make_plan", other)
    (failed,) = run(tmp_path, attempts=1).rows
    assert failed.status == "failed"
    words = "bitwright.quantizers.plain.Plain runs instead of bitwright.quantizers.lsq.Lsq"
    assert words in str(failed.reason)

    def wide(*arguments: Any, **choices: Any) -> Plan:
        return make_plan(*arguments, **{**choices, "weights": "int6/channel/sym", "fold": None})

    monkeypatch.setattr("bitwright.bench.grid_row.make_plan", wide)
    (failed,) = run(tmp_path, attempts=1, backends=["onnxruntime"], runtimes="none", bnfold=2).rows
    assert "6 bits, the row has 4" in str(failed.reason)


def test_more_bits_than_the_row_says_are_for_its_edges_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wide(*arguments: Any, **choices: Any) -> Plan:
        """Eight bits, where the row has four and eight at its edges."""
        eight = {key: choices[key].replace("int4", "int8") for key in ("weights", "activations")}
        return make_plan(*arguments, **{**choices, **eight, "first_last_bits": None})

    monkeypatch.setattr("bitwright.bench.grid_row.make_plan", wide)
    (failed,) = run(tmp_path, attempts=1).rows
    assert failed.status == "failed"
    assert ": 8 bits, the row has 4" in str(failed.reason)


def test_bits_that_the_plan_does_not_have_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Trainer.fit

    def narrow(trainer: Trainer) -> Any:
        """The edges as trained, but with a width of the row where the plan has eight bits."""
        result = fit(trainer)
        if result.quantized is not None:
            for quantizer in attachment_of(result.model).quantizers.values():
                quantizer.spec = replace(quantizer.spec, format=quantizer.spec.format.with_bits(4))
        return result

    monkeypatch.setattr(Trainer, "fit", narrow)
    (failed,) = run(tmp_path, attempts=1).rows
    assert "4 bits, the row has 8" in str(failed.reason)
    assert "the plan has" in str(failed.reason)


def test_other_observers_than_the_row_says_are_an_error(
    board: Leaderboard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = row(board, "lsq", "academic").observers
    assert seen is not None
    assert seen.weights.keys() == seen.activations.keys() == {"bitwright.quantizers.observers.minmax.MinMax"}

    def other(*arguments: Any, **choices: Any) -> Plan:
        return make_plan(*arguments, **{**choices, "observer": "mse"})

    monkeypatch.setattr("bitwright.bench.grid_row.make_plan", other)
    (failed,) = run(tmp_path, attempts=1).rows
    assert failed.status == "failed"
    observers = "bitwright.quantizers.observers"
    assert f"{observers}.histogram.Mse set the range instead of {observers}.minmax.MinMax" in str(failed.reason)


def test_quantizers_that_follow_their_ranges_are_read_too(tmp_path: Path) -> None:
    made = {"a_method": "dsq", "observer": "lsq", "weight_observer": "minmax"}
    (done,) = run(tmp_path, algorithms=[made], start=None, attempts=1).rows
    assert done.status == "done", done.reason
    assert done.observers is not None
    assert list(done.observers.weights) == ["bitwright.quantizers.observers.minmax.MinMax"]
    assert list(done.observers.activations) == ["bitwright.quantizers.observers.moments.LsqStart"]


def test_rows_that_are_done_say_where_and_with_which_ranges(board: Leaderboard) -> None:
    assert any(one.status == "done" for one in board.rows)
    for one in board.rows:
        assert bool(one.sites) == (one.status == "done")
        where = board.machines[str(one.machine)]
        assert where.isa == torch.backends.cpu.get_cpu_capability()
        assert where.revision == revision()


def test_norms_that_are_folded_otherwise_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*arguments: Any, **choices: Any) -> Plan:
        return make_plan(*arguments, **{**choices, "fold": 1})

    monkeypatch.setattr("bitwright.bench.grid_row.make_plan", other)
    (failed,) = run(tmp_path, attempts=1, backends=["tvm"]).rows
    assert "norms are folded {1: 5}" in str(failed.reason)


def test_failed_rows_are_tried_again_and_shown(tmp_path: Path) -> None:
    grid_workloads._failed.clear()
    changes = {"start": None, "models": [f"{FILE}:flaky"]}
    told: list[RowProgress] = []
    (mended,) = run(tmp_path, told.append, **changes).rows
    assert [t.result.status for t in told] == ["failed", "done"]
    assert (mended.status, mended.attempts) == ("done", 2)
    changes["models"] = [f"{FILE}:broken"]
    (failed,) = run(tmp_path, **changes).rows
    assert (failed.status, failed.attempts) == ("failed", 2)
    assert failed.reason is not None
    assert "loss raised RuntimeError: it always goes wrong, at grid_workloads.py" in failed.reason
    assert run(tmp_path, attempts=3, **changes).rows[0].attempts == 3


def test_what_diverges_is_a_result(tmp_path: Path) -> None:
    training = {"epochs": 1, "batch": 64, "optimizer": "sgd", "lr": 1e6}
    (diverged,) = run(tmp_path, training=training, start=None).rows
    assert diverged.status == "diverged"
    assert diverged.attempts == 1


def test_a_workload_that_was_changed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path)
    original = grid_workloads.tiny()
    changed = replace(original, inputs=(original.inputs[0] + 1,))  # type: ignore[index]
    monkeypatch.setattr("bitwright.bench.float_networks.load_workload", lambda _: changed)
    with pytest.raises(BitwrightError) as caught:
        run(tmp_path, seeds=[0], bits=[3])
    assert caught.value.codes == ["workload-changed"]


def test_all_workloads_are_loaded_before_the_first_is_trained(tmp_path: Path) -> None:
    (tmp_path / "w.py").write_text(
        "def raises():\n    raise ValueError('no data here')\n\n\ndef other():\n    return 3\n"
    )
    models = [f"{FILE}:tiny", f"{tmp_path}/w.py:raises", f"{tmp_path}/w.py:other"]
    told: list[RowProgress] = []
    with pytest.raises(BitwrightError) as caught:
        run(tmp_path, told.append, models=models)
    assert [(problem.code, problem.where) for problem in caught.value.problems] == [
        ("user-code-failed", models[1]),
        ("not-a-workload", models[2]),
    ]
    assert not told


def test_a_changed_label_of_the_last_batch_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = grid_workloads.tiny()
    assert original.evaluation is not None
    ((images, labels),) = original.evaluation()
    changed = labels.clone()
    changed[-1] = (changed[-1] + 1) % 10

    def halves(targets: torch.Tensor) -> Any:
        seeded = grid_workloads.tiny()
        pairs = list(zip(images.split(125), targets.split(125), strict=True))
        return replace(seeded, evaluation=lambda: pairs)

    monkeypatch.setattr("bitwright.bench.float_networks.load_workload", lambda _: halves(labels))
    run(tmp_path)
    monkeypatch.setattr("bitwright.bench.float_networks.load_workload", lambda _: halves(changed))
    with pytest.raises(BitwrightError) as caught:
        run(tmp_path, bits=[3])
    assert caught.value.codes == ["workload-changed"]


def test_rows_of_other_float_weights_do_not_join_a_grid(tmp_path: Path) -> None:
    run(tmp_path)
    config = GridConfig.parse(grid(tmp_path, bits=[3]), where="grid", folder=tmp_path)
    other = tmp_path / "other"
    run_grid(GridConfig.parse(grid(other), where="grid", folder=other), starts=other)
    (file,) = other.glob("*.safetensors")
    model = load_workload(f"{FILE}:tiny").model
    load_checkpoint(model, file)
    with torch.no_grad():
        next(model.parameters()).mul_(1.0001)  # as a CPU with wider vectors would
    save_checkpoint(model, file)
    with pytest.raises(BitwrightError) as caught:
        run_grid(config, starts=other)
    assert caught.value.codes == ["weights-differ"]
    assert "ATEN_CPU_CAPABILITY" in str(caught.value)


def test_rows_do_not_depend_on_the_cpu_that_runs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are guarded against products that saturate, also where this CPU's don't."""
    found = []
    for saturates in (False, True):
        monkeypatch.setattr(
            sys.modules["bitwright.deployment.measurement"], "saturates", lambda _, answer=saturates: answer
        )
        one = run(tmp_path / str(saturates), backends=["onnxruntime"], bits=[8], seeds=[0], runtimes="none").rows[0]
        assert one.executed is not None
        found.append((one.accuracy, one.executed))
    assert found[0] == found[1]


def test_rows_of_a_grid_made_in_python_can_be_rerun(tmp_path: Path) -> None:
    config = GridConfig(
        models=["digits-untrained"],
        algorithms=["lsq"],
        backends=["tensorrt"],  # refuses 4 bits, so nothing is trained
        bits=[4],
        store=str(tmp_path / "grid.db"),
    )
    board = run_grid(config, work=False)
    [rerun] = rerun_rows(board, [board.rows[0].id])
    assert rerun.result.status == "refused"
    assert board.rows[0].config["models"] == [{"name": "digits-untrained", "workload": "digits-untrained"}]
