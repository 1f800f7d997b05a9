"""The trainer on one process: one flag between float and QAT, exact resume, everything that can be asked of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import raises_problem
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from bitwright import BitwrightError, Plan, TrainConfig, Trainer, Workload, evaluate, load_workload, quantizers_of
from bitwright.core.interrupts import Interrupted
from bitwright.training import Callback, Qat
from bitwright.training.run import TrainingRun


def workload() -> Workload:
    return load_workload(f"{Path(__file__).with_name('tiny.py')}:workload")


def settings(**changes: Any) -> TrainConfig:
    return TrainConfig(**{"epochs": 3, "batch": 25, "lr": 0.1, "log_steps": 1, **changes})


class Watch(Callback):
    """Keeps what it sees."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.losses: list[float] = []
        self.epochs: list[dict[str, float]] = []
        self.seen: list[Any] = []
        self.stop_at = stop_at

    def on_log(self, run: TrainingRun, values: dict[str, float]) -> None:
        self.losses.append(values["loss"])

    def on_step(self, run: TrainingRun) -> None:
        if run.step == self.stop_at:
            run.stop.asked = "a test"

    def on_epoch(self, run: TrainingRun, values: dict[str, float]) -> None:
        self.epochs.append(values)


def train(watch: Watch | None = None, **arguments: Any) -> tuple[Watch, Any]:
    watch = watch or Watch()
    arguments.setdefault("config", settings())
    return watch, Trainer(workload(), callbacks=[watch], **arguments).fit()


def test_a_float_run_learns_and_a_quantized_one_differs_by_the_flag_alone(tmp_path: Path) -> None:
    floating, result = train(out=tmp_path / "float")
    assert floating.losses[-1] < 0.5 * floating.losses[0]
    assert result.quantized is None
    assert result.metrics[-1]["top1"] > 80
    assert f"{result.epochs} epochs, {result.steps} steps" in repr(result)
    assert json.loads(json.dumps(result.to_dict()))["metrics"] == result.metrics
    _, again = train(out=tmp_path / "int8", precision="int8", init=tmp_path / "float")
    assert again.metrics[-1]["top1"] > result.metrics[-1]["top1"] - 3
    sites = quantizers_of(again.model)
    assert {q.spec.quantizer for q in sites.values()} == {"lsq", "product"}
    assert sites["conv:weight"].scale.shape == (6,)
    files = {file.name for file in (tmp_path / "int8").iterdir()}
    assert files == {"checkpoint.safetensors", "checkpoints", "history.jsonl", "plan.yaml", "result.json"}
    assert Plan.load(tmp_path / "int8" / "plan.yaml") == again.quantized.plan
    again.quantized.export(tmp_path / "model.onnx")  # guards hold: export would refuse
    assert again.quantized.check(tmp_path / "model.onnx").passed


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        pytest.param({}, {}, id="float"),
        pytest.param({"precision": "int8"}, {}, id="lsq"),
        pytest.param({"precision": "int8", "quantizer": "plain", "observer": "ema-minmax"}, {}, id="followed"),
        pytest.param({"precision": "int4"}, {"ema": 0.9, "distill": 0.5, "accumulate": 2}, id="ema-distill"),
        pytest.param({"precision": "int8"}, {"optimizer": "adamw", "lr": 0.01, "amp": "bf16"}, id="adamw-bf16"),
        pytest.param({"precision": "int8", "quantizer": "plain"}, {"amp": "fp16", "freeze_observers": 1}, id="fp16"),
        pytest.param({"precision": "int8"}, {"freeze_bn": 1, "clip": 1.0, "warmup": 1}, id="freeze-clip"),
    ],
)
@pytest.mark.parametrize("stop_at", [7, 10])
def test_a_stopped_run_resumes_bit_identical(
    tmp_path: Path, arguments: dict[str, Any], changes: dict[str, Any], stop_at: int
) -> None:
    config = settings(epochs=2, **changes)
    whole, _ = train(out=tmp_path / "whole", config=config, **arguments)
    steps = len(whole.losses)
    stop_at = min(stop_at, steps // 2 + (stop_at == 7))
    first = Watch(stop_at=stop_at)
    with pytest.raises(Interrupted, match=f"after step {stop_at} of {steps}"):
        train(first, out=tmp_path / "parts", config=config, **arguments)
    second, result = train(out=tmp_path / "parts", config=config, resume=True, **arguments)
    assert first.losses + second.losses == whole.losses  # bit-equal
    ours, theirs = (load_file(tmp_path / run / "checkpoint.safetensors") for run in ("parts", "whole"))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    rows = [(tmp_path / run / "history.jsonl").read_text() for run in ("parts", "whole")]
    assert rows[0] == rows[1]
    assert any("resumed" in note for note in result.notes)


def test_data_order_and_noise_depend_on_no_worker_process(tmp_path: Path) -> None:
    alone, _ = train(config=settings(epochs=1))
    helped, _ = train(config=settings(epochs=1, workers=2))
    other, _ = train(config=settings(epochs=1, seed=1))
    assert alone.losses == helped.losses
    assert alone.losses != other.losses


def test_a_killed_write_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    train(out=tmp_path, config=settings(epochs=1))
    left = tmp_path / "checkpoints" / ".step-00000011"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    watch, result = train(out=tmp_path, config=settings(epochs=1), resume=True)
    assert watch.losses == []
    assert result.steps == 10


def test_rerunning_a_finished_run_returns_its_result(tmp_path: Path) -> None:
    _, before = train(out=tmp_path, config=settings(epochs=1), precision="int8", resume="auto")
    files = {name: (tmp_path / name).read_bytes() for name in ("checkpoint.safetensors", "history.jsonl", "plan.yaml")}
    watch, result = train(out=tmp_path, config=settings(epochs=1), precision="int8", resume="auto")
    assert watch.losses == []
    assert (result.steps, result.metrics, result.best) == (before.steps, before.metrics, before.best)
    assert {name: (tmp_path / name).read_bytes() for name in files} == files
    with pytest.raises(BitwrightError) as error:
        train(out=tmp_path, config=settings(epochs=1), precision="int8", weights="int8/tensor/sym", resume="auto")
    assert [problem.where for problem in error.value.problems] == ["weights"]


def test_another_run_is_refused_with_every_difference(tmp_path: Path) -> None:
    train(out=tmp_path, config=settings(epochs=1))
    with pytest.raises(BitwrightError) as used:
        train(out=tmp_path, config=settings(epochs=1))
    assert "run-exists" in used.value.codes
    assert "resume=True" in str(used.value)
    with pytest.raises(BitwrightError) as error:
        train(out=tmp_path, config=settings(epochs=2, lr=0.2, log_steps=5), resume=True, precision="int8")
    assert "resume-mismatch" in error.value.codes
    assert {problem.where for problem in error.value.problems} == {"epochs", "lr", "quantize"}


def test_all_problems_at_once_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(BitwrightError) as wrong:
        TrainConfig(epochs=0, lr=-1, amp="int8", lerning=3)
    assert {problem.where for problem in wrong.value.problems} == {"epochs", "lr", "amp", "lerning"}
    assert "did you mean 'workers'?" in str(wrong_config(worker=1))
    bare = replace(workload(), training=None, loss=None, evaluation=None)
    with pytest.raises(BitwrightError) as error:
        Trainer(
            bare,
            backend="openvino",
            init=tmp_path / "none",
            config=settings(patience=1, warmup=3, freeze_observers=1),
        )
    expected = {"no-training-data", "no-loss", "metric-required", "out-required", "warmup-too-long"}
    assert {*expected, "no-such-checkpoint", "ignored-argument"} == set(error.value.codes)
    assert {"backend", "freeze_observers"} < {problem.where for problem in error.value.problems}
    with raises_problem("unknown-precision", where="precision"):
        Trainer(workload(), precision="int8x")


def wrong_config(**values: Any) -> BitwrightError:
    with pytest.raises(BitwrightError) as error:
        TrainConfig(**values)
    return error.value


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_scales_are_float32_and_per_channel_at_every_step_of_amp(tmp_path: Path, amp: str) -> None:
    class Scales(Watch):
        def on_step(self, run: TrainingRun) -> None:
            for site, quantizer in quantizers_of(run.model).items():
                for name, tensor in quantizer.state_dict().items():
                    assert tensor.dtype == torch.float32, (site, name)
            self.seen.append(quantizers_of(run.model)["conv:weight"].scale.detach().clone())

    watch = Scales()
    _, result = train(watch, out=tmp_path, precision="int8", config=settings(amp=amp))
    assert watch.losses[-1] < watch.losses[0]
    assert all(scale.shape == (6,) for scale in watch.seen)
    assert not torch.equal(watch.seen[0], watch.seen[-1])
    saved = load_file(tmp_path / "checkpoint.safetensors")
    assert all(tensor.dtype == torch.float32 for name, tensor in saved.items() if name.startswith("bitwright."))
    used = result.model.conv.weight
    assert used.dtype == torch.float32


def test_ranges_follow_the_data_until_they_are_frozen() -> None:
    class Ranges(Watch):
        def on_step(self, run: TrainingRun) -> None:
            sites = quantizers_of(run.model)
            self.seen.append({site: q.scale.clone() for site, q in sites.items() if not q.of})

    watch = Ranges()
    train(
        watch,
        precision="int8",
        quantizer="plain",
        observer="ema-minmax",
        config=settings(epochs=2, freeze_observers=1),
    )
    activations = [site for site in watch.seen[0] if not site.endswith("weight")]
    assert any(not torch.equal(watch.seen[0][s], watch.seen[9][s]) for s in activations)
    assert all(torch.equal(watch.seen[10][s], watch.seen[19][s]) for s in activations)
    assert not torch.equal(watch.seen[0]["conv:weight"], watch.seen[9]["conv:weight"])


def test_ranges_after_a_relu_use_the_relu_output() -> None:
    _, result = train(precision="int8", quantizer="plain", observer="minmax", activations="int8/tensor/sym/adasign")
    behind = [q for site, q in quantizers_of(result.model).items() if "relu" in site]
    assert behind
    assert all(q.qmin == 0 for q in behind)


def test_observed_weight_ranges_match_the_final_weights() -> None:
    _, result = train(precision="int8", quantizer="plain", saturating=False, fold=-1, backend="academic")
    weight = result.model.second.weight.detach()
    scale = quantizers_of(result.model)["second:weight"].scale
    torch.testing.assert_close(scale, torch.maximum(weight.max() / 127, -weight.min() / 128))


def test_batch_norms_are_frozen_from_the_chosen_epoch() -> None:
    class Means(Watch):
        def on_step(self, run: TrainingRun) -> None:
            self.seen.append((run.model.norm.running_mean.clone(), run.model.norm.weight.detach().clone()))

    watch = Means()
    train(watch, precision="int8", config=settings(epochs=2, freeze_bn=1))
    assert not torch.equal(watch.seen[0][0], watch.seen[9][0])
    assert torch.equal(watch.seen[9][0], watch.seen[19][0])
    assert not torch.equal(watch.seen[9][1], watch.seen[19][1])  # γ trains on


def test_stopping_early_gives_the_best_epoch(tmp_path: Path) -> None:
    scores = iter([50.0, 60.0, 55.0, 54.0, 99.0])
    states: list[dict[str, torch.Tensor]] = []

    class Keep(Watch):
        def on_epoch(self, run: TrainingRun, values: dict[str, float]) -> None:
            states.append({k: v.clone() for k, v in run.model.state_dict().items()})

    work = replace(workload(), evaluate=lambda predict: {"top1": next(scores)})
    result = Trainer(work, config=settings(epochs=5, patience=2), out=tmp_path, callbacks=[Keep()]).fit()
    assert (result.stopped_early, result.epochs, result.best) == (True, 4, {"top1": 60.0, "epoch": 2.0})
    assert all(torch.equal(result.model.state_dict()[k], v) for k, v in states[1].items())


def test_metrics_where_lower_is_better(tmp_path: Path) -> None:
    scores = iter([float("nan"), 6.0, 5.0, 7.0, 8.0, 1.0])
    work = replace(
        workload(), evaluate=lambda predict: {"errors": next(scores)}, metric="errors", lower_is_better={"errors"}
    )
    result = Trainer(work, config=settings(epochs=6, patience=2), out=tmp_path).fit()
    assert (result.epochs, result.best) == (5, {"errors": 5.0, "epoch": 3.0})


def test_averaged_weights_are_evaluated_and_saved() -> None:
    class Last(Watch):
        def on_epoch(self, run: TrainingRun, values: dict[str, float]) -> None:
            super().on_epoch(run, values)
            self.seen.append(run.model.head.weight.detach().clone())

    watch = Last()
    work = workload()
    result = Trainer(work, config=settings(ema=0.95), callbacks=[watch]).fit()
    assert not torch.equal(result.model.head.weight, watch.seen[-1])
    assert evaluate(work, result.model)["top1"] == watch.epochs[-1]["top1"]


def test_smoothing_and_distillation_are_in_the_loss() -> None:
    plain, _ = train(config=settings(epochs=1))
    smooth, _ = train(config=settings(epochs=1, label_smoothing=0.2))
    taught, _ = train(config=settings(epochs=1, distill=1.0, temperature=2.0))
    assert plain.losses[0] != smooth.losses[0]
    # a float student that is its own teacher has nothing to learn at first, but for dropout and batch statistics
    assert taught.losses[0] < 0.2 * plain.losses[0]
    with pytest.raises(BitwrightError) as caught:
        Trainer(replace(workload(), loss=F.mse_loss), config=settings(label_smoothing=0.1)).fit()
    assert "smoothing-unsupported" in caught.value.codes


def test_two_accumulated_batches_make_the_step_of_a_twice_as_large_one() -> None:
    class Plain(nn.Module):  # without norms and dropout the split of a batch changes nothing
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.head(x.flatten(1))
            return logits

    x, y = torch.randn(40, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3

    def run(batch: int, accumulate: int) -> torch.Tensor:
        torch.manual_seed(3)
        work = replace(workload(), model=Plain(), training=lambda: TensorDataset(x, y))
        made = Trainer(work, config=TrainConfig(epochs=2, batch=batch, accumulate=accumulate, lr=0.1)).fit()
        return made.model.head.weight.detach()  # type: ignore[union-attr,return-value]

    torch.testing.assert_close(run(20, 1), run(10, 2), rtol=1e-5, atol=1e-6)


def test_decay_spares_scales_norms_and_biases() -> None:
    work = workload()
    qat = Qat(work.model, work.calibration(), precision="int8")
    groups = {group["name"]: group for group in qat.parameter_groups(weight_decay=0.1, lr=1e-3)}
    assert {name: group["weight_decay"] for name, group in groups.items()} == {
        "weights": 0.1,
        "norms and biases": 0.0,
        "quantizers": 0.0,
    }
    assert groups["quantizers"]["lr"] == 1e-3
    assert sum(len(group["params"]) for group in groups.values()) == len(list(work.model.parameters()))


def test_a_loss_that_is_not_a_number_ends_the_run_and_is_not_saved(tmp_path: Path) -> None:
    work = replace(workload(), loss=lambda output, target: F.cross_entropy(output, target) / (output.mean() * 0))
    with pytest.raises(BitwrightError) as error:
        Trainer(work, config=settings(save_steps=1, log_steps=10), out=tmp_path).fit()
    assert "loss-not-finite" in error.value.codes
    assert "step 1" in str(error.value)
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_a_user_dataloader_is_converted() -> None:
    x, y = torch.randn(30, 1, 8, 8), torch.arange(30) % 3
    loader = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
    result = Trainer(replace(workload(), training=lambda: loader), config=TrainConfig()).fit()
    assert result.steps == 3
    weighted = DataLoader(TensorDataset(x, y), sampler=WeightedRandomSampler([1.0] * 30, 30))
    with pytest.raises(BitwrightError) as caught:
        Trainer(replace(workload(), training=lambda: weighted)).fit()
    assert "unsupported-sampler" in caught.value.codes

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([])

    with pytest.raises(BitwrightError) as caught:
        Trainer(replace(workload(), training=Stream)).fit()
    assert "unsupported-dataset" in caught.value.codes
    with pytest.raises(BitwrightError) as caught:
        Trainer(workload(), config=settings(batch=1000)).fit()
    assert "batch-too-large" in caught.value.codes


def test_without_calibration_data_ranges_start_from_training_batches() -> None:
    result = Trainer(replace(workload(), calibration=None), precision="int8", config=settings(epochs=1)).fit()
    assert any("training batches" in note for note in result.notes)


def test_low_bits_keep_eight_at_both_ends() -> None:
    _, result = train(precision="w4a4", config=settings(epochs=1))
    bits = {site: spec.format.bits for site, spec in result.quantized.plan.quantized}
    assert bits == {
        "conv:input": 8,
        "conv:weight": 8,
        "/relu#0:output": 4,
        "second:weight": 4,
        "drop:output": 8,
        "head:weight": 8,
    }


# inductor imports what torch deprecates
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.slow
@pytest.mark.parametrize("quantizer", ["lsq", "plain"])
def test_a_compiled_run_computes_what_an_eager_one_does(quantizer: str) -> None:
    losses: dict[bool, list[float]] = {}
    for compiled in (False, True):
        work, watch = workload(), Watch()
        work.model.drop.p = 0.0  # compiled dropout draws other numbers
        Trainer(
            work,
            precision="int8",
            quantizer=quantizer,
            observer="ema-minmax",
            callbacks=[watch],
            config=settings(epochs=1, compile=compiled),
        ).fit()
        losses[compiled] = watch.losses
    assert losses[True][:3] == pytest.approx(losses[False][:3], rel=1e-3)
    assert sum(losses[True][-3:]) < 3 * losses[True][0]


def test_the_result_describes_the_run(tmp_path: Path) -> None:
    train(out=tmp_path, precision="int8", config=settings(epochs=1))
    facts = json.loads((tmp_path / "result.json").read_text())
    assert facts["config"]["lr"] == 0.1
    assert (facts["quantize"], facts["backend"], facts["steps"]) == ("int8", "onnxruntime", 10)
    assert facts["metrics"][0]["n"] == 300


def test_tensorboard_has_losses_ranges_scales_and_clipped_shares(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from bitwright.training import TensorBoard

    Trainer(workload(), precision="int8", config=settings(epochs=2), callbacks=[TensorBoard(tmp_path)]).fit()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"train/loss", "train/lr", "evaluation/top1"} <= tags
    for kind in ("scale", "range/low", "range/high", "clipped"):
        assert f"{kind}/conv:weight" in tags
    assert [event.step for event in events.Scalars("scale/conv:weight")] == [0, 10, 20]
    values = [event.value for event in events.Scalars("scale/conv:weight")]
    assert values[0] != values[-1]
    assert all(0 <= event.value <= 1 for event in events.Scalars("clipped/conv:input"))


@pytest.mark.slow
@pytest.mark.realdata
def test_a_few_steps_of_qat_keep_resnet20(data_dir: Path, tmp_path: Path) -> None:
    from bitwright.zoo.data import npz_images
    from bitwright.zoo.workloads import resnet20_cifar10

    work = resnet20_cifar10(data_dir)
    test = npz_images(data_dir / "cifar10" / "test.npz").take(1000, seed=0)
    base = work.training()
    work = replace(
        work,
        training=lambda: replace(base, images=base.images.take(640, seed=0)),
        evaluation=lambda: test.batches(250, mean=base.mean, std=base.std),
    )
    floating = evaluate(work, work.model)["top1"]
    result = Trainer(work, precision="int8", config=TrainConfig(lr=2e-4, batch=64), out=tmp_path).fit()
    # of 1,000 images; ten steps end 0.6 to 1.1 below, by the seed and by last bits of ranges
    assert result.metrics[-1]["top1"] >= floating - 1.5
    artefact = result.quantized.export(tmp_path / "model.onnx").path
    parity = result.quantized.check(artefact, [images for images, _ in work.evaluation()])
    assert parity.passed
    assert parity.outputs[0].top1_agreement >= 0.995
