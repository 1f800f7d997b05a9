"""Workload files of users, and errors in them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from bitwright.tuning.search import open_study

OWN = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from bitwright import Workload

torch.manual_seed(0)
x = torch.randn(64, 16)
y = torch.randint(0, 4, (64,))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = nn.Linear(16, 32), nn.Linear(4, 32), nn.Linear(32, 4)

    def forward(self, a, b):
        h = torch.relu(self.left(a) + self.right(b))
        return {"digit": self.head(h), "hidden": h}


def two():
    def evaluate(model):
        out = model(x, x[:, :4])
        right = (out["digit"].argmax(1) == y).float().mean()
        return {"digit_acc": 100 * right, "hidden": float(out["hidden"].mean())}

    return Workload(
        name="two", model=Two().eval(), inputs=(x[:2], x[:2, :4]), metric="digit_acc", evaluate=evaluate,
        calibration=lambda: [(x, x[:, :4])],
    )


def W(**changes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    fields = dict(
        name="b", model=model, inputs=(x[:1],), calibration=lambda: x.split(16), loss=F.cross_entropy,
        evaluation=lambda: zip(x.split(16), y.split(16)), training=lambda: TensorDataset(x, y),
    )
    return Workload(**{**fields, **changes})


def wrong_shape(): return W(calibration=lambda: x[:, :8].split(16))
def with_targets(): return W(calibration=lambda: zip(x.split(16), y.split(16)))
def no_targets(): return W(evaluation=lambda: x.split(16))
def own_number(): return W(evaluate=lambda model: 0.9, metric="share")
def own_words(): return W(evaluate=lambda model: "good")
def raises():
    def evaluate(model):
        return {"top1": model(x).foo}  # the line
    return W(evaluate=evaluate)
def float_labels(): return W(training=lambda: TensorDataset(x, y.float()))
def one_argument(): return W(loss=lambda output: output.sum())
def no_mean(): return W(loss=lambda output, target: F.cross_entropy(output, target, reduction="none"))
def typo(): return Workload(name="b", model=nn.Linear(2, 2), inputs=(x[:1],), calibraton=lambda: x.split(16))
def crashes(): return W(model=torch.load("missing.pt"))
def only_training(): return W(evaluation=None, evaluate=lambda model: {"top1": 1.0})
def errors(**changes):
    # quantized models are wrong more often: with the direction reversed the worst one would pass
    def evaluate(model):
        return {"errors": float((model(x) - W().model(x)).abs().sum())}
    return W(evaluate=evaluate, evaluation=None, metric="errors", **changes)
def less_errors(): return errors(lower_is_better=True)
def no_metric(): return W(evaluation=None)
def no_pairs(): return W(evaluation=None, training=None)
"""

LINE = 1 + OWN.splitlines().index(next(line for line in OWN.splitlines() if "# the line" in line))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(OWN)
    return file


def test_metrics_receive_the_same_dict_from_model_and_runtime(run, own: Path, tmp_path: Path) -> None:
    ran = run("quantize", f"{own}:two", "-o", tmp_path / "out", "--json")
    assert ran.code == 0, ran.err
    rows = {row["where"]: row["value"] for row in ran.json["report"]["accuracies"]}
    assert rows["onnxruntime"] == pytest.approx(rows["simulated"], abs=2)


@pytest.mark.parametrize(
    ("verb", "name", "code", "facts"),
    [
        ("quantize", "wrong_shape", "model-failed", ["RuntimeError", "(16, 8) float32", "fix: "]),
        ("quantize", "with_targets", "model-failed", ["TypeError", "targets"]),
        ("quantize", "no_targets", "invalid-batch", ["workload 'b': ", "batch 0", "tensor (16, 16)"]),
        ("quantize", "own_words", "invalid-metrics", ["workload 'b': evaluate ", "{'top1': number}"]),
        ("quantize", "raises", "user-code-failed", ["workload 'b': evaluate ", "AttributeError", f"own.py:{LINE}"]),
        ("train", "float_labels", "user-code-failed", ["workload 'b': loss ", "RuntimeError", "target: tensor (64,)"]),
        ("train", "one_argument", "user-code-failed", ["TypeError", "loss(output, target)", "fix: "]),
        ("train", "no_mean", "invalid-loss", ["workload 'b': loss ", "tensor (64,)"]),
        ("quantize", "typo", "unknown-argument", ["'calibraton'", "at own.py:", "'calibration'"]),
        ("quantize", "crashes", "user-code-failed", ["FileNotFoundError", "missing.pt", "at own.py:"]),
    ],
)
def test_errors_in_user_code_name_their_cause(
    run, own: Path, tmp_path: Path, verb: str, name: str, code: str, facts: list[str]
) -> None:
    ran = run(verb, f"{own}:{name}", "-o", tmp_path / "out")
    assert (ran.code, ran.codes) == (2, [code]), ran.err
    for fact in facts:
        assert fact in ran.err


def test_evaluate_may_return_a_single_number(run, own: Path, tmp_path: Path) -> None:
    ran = run("quantize", f"{own}:own_number", "-o", tmp_path / "out", "--json")
    assert ran.code == 0, ran.err
    assert {row["metric"]: row["value"] for row in ran.json["report"]["accuracies"]} == {"share": 0.9}


def test_an_indicator_takes_training_data_where_there_is_no_evaluation(run, own: Path) -> None:
    ran = run("score", f"{own}:only_training", "--indicator", "gradient-variance")
    assert ran.code == 0, ran.err
    assert "training data" in ran.err
    ran = run("score", f"{own}:no_pairs", "--indicator", "gradient-variance")
    assert (ran.code, ran.codes) == (2, ["no-evaluation-data"]), ran.err
    assert "loss" not in ran.err


def test_tune_knows_that_less_is_better(run, own: Path, tmp_path: Path) -> None:
    options = ["--drop", "0.001", "--trials", "1", "--json"]
    more = run("tune", f"{own}:errors", "-o", tmp_path / "more", *options)
    assert "higher values of 'errors' are taken as better" in more.err
    assert more.code == 0, more.err  # the direction of the metric is not stated, so more errors count as better
    for name, flag in (("errors", ["--lower-is-better"]), ("less_errors", [])):
        less = run("tune", f"{own}:{name}", "-o", tmp_path / name, *options, *flag)
        assert less.code == 1, less.err
        assert "are taken as better" not in less.err
        assert "the goal was missed by" in less.err


def test_tune_requires_a_metric_and_a_valid_drop(run, own: Path, tmp_path: Path) -> None:
    ran = run("tune", f"{own}:no_metric", "-o", tmp_path / "out", "--drop", "1%")
    assert ran.code == 2
    assert "--drop needs a metric" in ran.err
    ran = run("tune", f"{own}:errors", "-o", tmp_path / "out", "--drop", "a bit")
    assert ran.code == 2
    assert [(problem.code, problem.where, problem.value) for problem in ran.problems] == [
        ("invalid-drop", "drop", "a bit")
    ]


def test_deploy_rejects_folders_without_a_run_of_this_model(run, own: Path, tmp_path: Path) -> None:
    nowhere = run("deploy", f"{own}:two", tmp_path / "nowhere", "-o", tmp_path / "out")
    assert (nowhere.code, nowhere.codes) == (2, ["no-saved-model"]), nowhere.err
    assert "bitwright train --precision" in nowhere.err
    assert run("quantize", f"{own}:two", "-o", tmp_path / "two").code == 0
    ran = run("deploy", f"{own}:only_training", tmp_path / "two", "-o", tmp_path / "out")
    assert (ran.code, ran.codes) == (2, ["other-workload"]), ran.err
    assert "'two'" in ran.err
    assert len(ran.err.splitlines()) == 2


def test_under_torchrun_one_process_tells_an_error(
    run, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    ran = run("train", f"{own}:no_such", "-o", tmp_path / "out")
    assert (ran.code, ran.err) == (2, "")


def test_a_search_that_failed_before_its_first_trial_is_not_in_the_way(run, own: Path, tmp_path: Path) -> None:
    with closing(open_study(tmp_path / "out" / "study.db", "b", {"goal": "another"}, resume=False)):
        pass
    ran = run("tune", f"{own}:less_errors", "-o", tmp_path / "out", "--trials", "1", "--drop", "100")
    assert ran.code == 0, ran.err


def test_what_was_made_of_another_workload_is_replaced_with_a_note(run, own: Path, tmp_path: Path) -> None:
    for name, noted in (("two", False), ("two", False), ("own_number", True)):
        ran = run("quantize", f"{own}:{name}", "-o", tmp_path / "out")
        assert ran.code == 0, ran.err
        assert ("has the results of 'two': they are replaced" in ran.err) is noted


def test_bench_names_what_stays_in_float(run, own: Path, tmp_path: Path) -> None:
    assert run("quantize", f"{own}:two", "-o", tmp_path / "out", "--keep-float", "left").code == 0
    bench = ["bench", f"{own}:two", "--model", tmp_path / "out", "--runtimes", "onnxruntime", "--mode", "accuracy"]
    ran = run(*bench)
    assert ran.code == 0, ran.err
    assert "float (left)" in ran.out
