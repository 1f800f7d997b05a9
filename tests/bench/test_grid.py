"""Grids as files: ours and MQBench's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
from problems import raises_problem
from schemas import json_schema

from bitwright import GridConfig, PlanError, capture, load_workload
from bitwright.backends import backend as find_backend
from bitwright.bench.grid import Training
from bitwright.bench.grid_row import plan_of
from bitwright.training import TrainConfig

ROOT = Path(__file__).parents[2]

# the snippet of MQBench's documentation, as it is
MQBENCH = """\
qparams:
    w_method: lsq
    a_method: lsq
    bit: 4

backend: academic
bnfold: 4
"""


def load(folder: Path, text: str, **options: Any) -> GridConfig:
    (folder / "grid.yaml").write_text(text, encoding="utf-8")
    return GridConfig.load(folder / "grid.yaml", **options)


def test_rows_are_the_product_and_a_seed_is_complete_before_the_next(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "models: [digits, digits-untrained]\nalgorithms: [lsq, pact]\nbackends: [academic, tvm]\nbits: [8, 4]\n"
        "seeds: [3, 1]\nruntimes: first-seed\n",
    )
    tasks = config.tasks()
    assert len(tasks) == 2 * 2 * 2 * 2 * 2
    assert [task.seed for task in tasks] == [3] * 16 + [1] * 16
    assert [task.runtimes for task in tasks] == [True] * 16 + [False] * 16
    assert len({task.key for task in tasks}) == 32
    pact = next(task for task in tasks if task.algorithm.a_method == "pact")
    assert pact.algorithm.weights == "dorefa"
    assert config.store == str(tmp_path / "grid.db")


def test_a_row_is_a_grid_of_its_own(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "models: digits\nalgorithms: {a_method: lsq, w_method: dorefa, quantizer_lr: 0.1}\nbackends: tvm\nbits: 4\n"
        "seeds: 7\ntraining: {epochs: 3}\nstart: {}\nedges: null\nbeyond: simulate\nruntimes: none\n",
    )
    (task,) = config.tasks()
    again = GridConfig.parse(task.grid(), where="row", folder=tmp_path)
    assert [one.key for one in again.tasks()] == [task.key]
    assert task.algorithm.label == "dorefa+lsq"


def test_all_problems_at_once_with_path_and_nearest_key(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        load(
            tmp_path,
            "models: [digits]\nalgorithms: [{a_method: lsq, w_metod: lsq}]\nbackends: [tvm]\nbits: [four]\n"
            "training: {epoch: 3}\nbakends: [x]\n",
        )
    found = {problem.where: problem.fix for problem in caught.value.problems}
    assert found.keys() == {"algorithms.0.w_metod", "bits.0", "training.epoch", "bakends"}
    assert found["algorithms.0.w_metod"] == "did you mean 'w_method', 'a_method'?"
    assert "'epochs'" in str(found["training.epoch"])
    assert "'backends'" in str(found["bakends"])


def test_names_are_checked_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        load(
            tmp_path,
            "models: [digit]\nalgorithms: [lsk, {name: lsk, a_method: lsq, observer: mze}]\n"
            "backends: [tensort, tvm, tvm]\nbits: [4, 99]\nseeds: [-1]\nbnfold: 9\ntraining: {warmup: 2}\n",
        )
    found = {problem.where: problem.fix for problem in caught.value.problems}
    assert found.keys() == {
        *("models.0", "algorithms.0.a_method", "algorithms.1.observer", "backends.0", "bits.1", "seeds.0", "bnfold"),
        *("training.warmup", "algorithms", "backends"),
    }
    assert "'tensorrt'" in str(found["backends.0"])
    assert "'mse'" in str(found["algorithms.1.observer"])


def test_schema_errors_do_not_hide_other_problems(tmp_path: Path) -> None:
    (tmp_path / "w.py").write_text("def there():\n    ...\n")
    with pytest.raises(PlanError) as caught:
        load(
            tmp_path,
            "models: [digits, 'nofile.py:x', 'w.py:nofunc', 'w.py:there']\nbackends: [tensort, 7]\nbits: [four, 99]\n"
            "seeds: [-1]\nbnfold: 9\ntraning: {}\ntraining: {epochs: 0, warmup: 9}\n",
        )
    found = {problem.where: problem for problem in caught.value.problems}
    assert found.keys() == {
        *("models.1", "models.2", "algorithms", "backends.0", "backends.1", "bits.0", "bits.1", "seeds.0", "traning"),
        *("training.epochs", "training.warmup", "bnfold"),
    }
    assert (found["algorithms"].code, found["algorithms"].fix) == ("missing-key", "algorithms: [lsq]")
    assert found["models.1"].code == "workload-file-missing"
    assert "relative to the grid's file" in str(found["models.1"].fix)
    assert found["models.2"].code == "unknown-function"
    assert "Field required" not in str(caught.value)


@pytest.mark.parametrize("text", ["models: {name: x}\nbits: []\n", "algorithms: 3\n", "training: 3\nbits: {a: 1}\n"])
def test_files_that_are_not_grids_are_rejected(tmp_path: Path, text: str) -> None:
    with raises_problem("missing-key", where="backends"):
        load(tmp_path, text)


def test_mqbenchs_file_runs_as_a_grid_of_one_row(tmp_path: Path) -> None:
    config = load(tmp_path, MQBENCH)
    (task,) = config.tasks()
    assert (task.algorithm.weights, task.algorithm.a_method) == ("lsq", "lsq")
    assert (task.algorithm.weight_observer, task.algorithm.observer) == ("lsq", "lsq")
    assert (task.bits, task.backend, task.bnfold, task.seed) == (4, "academic", -1, 1000)
    assert task.model.workload == "digits"
    assert task.training.label_smoothing == 0.1
    recipe = task.training.recipe
    assert recipe is not None
    assert (recipe.epochs, recipe.optimizer.momentum, recipe.schedule.top) == (1, 0.9, 0.004)
    notes = " ".join(config.notes)
    assert "optimizer, lr_scheduler, label_smooth: missing" in notes
    assert "the workload digits has its own network and data" in notes
    (other,) = load(tmp_path, MQBENCH, workload="digits-untrained").tasks()
    assert other.model.workload == "digits-untrained"


def test_a_whole_mqbench_file_is_honoured(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "model: {type: resnet18, kwargs: {num_classes: 10}}\n"
        "qparams: {w_method: dorefa, a_method: pact, bit: 8, a_observer: EMAMinMaxObserver}\n"
        "backend: tensorrt\nbnfold: 1\nseed: 5\nlabel_smooth: 0.0\nema: {enable: True, kwargs: {decay: 0.99}}\n"
        "optimizer: {type: Adam, kwargs: {betas: [0.8, 0.9]}, pconfig: {bn_w: {weight_decay: 0.0}}}\n"
        "lr_scheduler: {type: Cosine, kwargs: {base_lr: 0.02, warmup_lr: 0.1, warmup_steps: 10, max_iter: 30}}\n"
        "data: {batch_size: 32, num_workers: 2}\nsaver: {val_freq: 7, save_many: True}\n",
        data=str(tmp_path),
    )
    (task,) = config.tasks()
    training, recipe = task.training, task.training.recipe
    assert recipe is not None
    assert (recipe.iterations, recipe.validate_every, recipe.keep_checkpoints) == (30, 7, True)
    assert (recipe.optimizer.name, recipe.optimizer.options) == ("Adam", {"betas": (0.8, 0.9)})
    assert recipe.groups["bn_w"].weight_decay == 0.0
    assert (recipe.schedule.start, recipe.schedule.top, recipe.schedule.warmup) == (0.02, 0.1, 10)
    assert (training.batch, training.ema, training.label_smoothing) == (32, 0.99, 0.0)
    assert (task.algorithm.observer, task.bnfold, task.seed) == ("ema-minmax", 1, 5)
    assert task.model.workload == f"{tmp_path}/grid.yaml:{tmp_path}"
    assert "data.num_workers" in " ".join(config.notes)
    settings = training.config(seed=task.seed)
    assert settings.recipe == recipe
    again = GridConfig.parse(task.grid(), where="row", folder=tmp_path)
    assert again.tasks()[0].key == task.key  # a row can be rerun from its own config
    (shorter,) = load(tmp_path, (tmp_path / "grid.yaml").read_text(), iterations=3).tasks()
    assert shorter.training.recipe is not None
    assert shorter.training.recipe.iterations == 3


def test_iterations_are_only_for_mqbenchs_files(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        load(tmp_path, "models: [digits]\nalgorithms: [lsq]\nbackends: [academic]\nbits: [8]\n", iterations=3)
    assert caught.value.codes == ["ignored-argument"]


@pytest.mark.parametrize("backend", ["tensorrt", "fbgemm"])
def test_mqbench_simulates_what_hardware_cannot_run_and_so_do_we(tmp_path: Path, backend: str) -> None:
    (task,) = load(tmp_path, MQBENCH.replace("academic", backend).replace("lsq", "qil")).tasks()
    assert (task.bits, task.backend, task.beyond) == (4, backend, "adapt")
    workload = load_workload("digits-untrained")
    plan, beyond = plan_of(task, find_backend(backend), capture(workload.model, workload.inputs), "digits")
    assert beyond is not None
    found = {(site.quantizer, site.format.bits, site.format.symmetric) for site in plan.sites.values()}
    assert ("qil", 4, True) in found
    assert not any(name == "qil" and not symmetric for name, _, symmetric in found)


def test_rows_without_a_recipe_keep_their_keys() -> None:
    (task,) = GridConfig(models=["digits"], algorithms=["lsq"], backends=["academic"], bits=[8]).tasks()
    assert "recipe" not in task.to_json()["training"]
    assert "recipe" not in repr(task.training)


def test_mqbench_files_with_problems_list_them(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        load(tmp_path, "qparams: {w_metod: lsq, a_method: lsq, bit: 4}\nbnfolt: 4\nmodel: {type: resnet18}\n")
    places = {problem.where for problem in caught.value.problems}
    assert places == {"bnfolt", "qparams.w_metod", "qparams.w_method", "backend"}
    with pytest.raises(PlanError) as caught:
        load(tmp_path, MQBENCH + "model: {type: resnet19}\n")
    assert [(problem.where, problem.code) for problem in caught.value.problems] == [("model.type", "unknown-name")]
    assert "resnet18" in str(caught.value)


def test_the_schema_rejects_unknown_keys() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"bitwright-grid": 1, "modells": []}, json_schema("grid-1"))


def test_training_settings_are_those_of_the_trainer() -> None:
    assert set(Training.model_fields) <= set(TrainConfig.model_fields)
    Training().config(seed=1)


def test_the_published_grid_has_the_required_size() -> None:
    config = GridConfig.load(ROOT / "benchmarks" / "leaderboard.yaml")
    assert len(config.tasks()) == 10 * 6 * 3 * 2 * 4
    nets, data = ({model.label.split("-", 1)[part] for model in config.models} for part in (0, 1))
    assert len(config.models) == len(nets) * len(data)  # each network on each data set
    assert any("2,000 to test on" in note for note in config.notes)  # sizes are in the head of leaderboard.md
