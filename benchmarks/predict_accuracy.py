"""How well a step's time and memory are predicted: single process, float, INT8, AMP and random mixed plans.

    python benchmarks/predict_accuracy.py [--rounds 30] [--models resnet20 bert …] [--kernels]

Each model is profiled in float, in uniform INT8 and in the two halves of that plan. INT8 is simulated (QAT's learned
quantizers), or with `--kernels` computed (training's int8 kernels). Simulated, float and INT8 are profiled also with
autocast to bf16. What is predicted from that: float, INT8, and random mixed plans in which each operator is quantized
or left in float by a coin, two of them under autocast; and a step with AdamW, clipping and two accumulated batches.
Profiling steps (watched) and plain steps of every case are taken in turns; times are CPU seconds of one thread, so that
others on the machine count less; medians over the rounds. ConvNeXt was not looked at while the predictor was written.

The bars are about steps of 40 ms and more; `small` is README's perceptron: most of its 1 ms is the host's.

Memory: what backward keeps, against saved_tensors_hooks; the peak of a process (VmHWM) that builds the model, prepares
the plan and makes a few steps, one new process for each case, against the prediction (`MemoryUse.process`). What a
process needs by itself is, as in `bitwright profile`, what another one had in float that its tensors don't explain; so
float's own error is only that of a second process.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import environment, save
from torch import Tensor, nn

from bitwright.cluster import Predictor
from bitwright.graph import capture
from bitwright.plan import Plan
from bitwright.profiling import DeviceProfile, StepSettings, Variant, halves, open_store, record_step
from bitwright.profiling.microbenchmarks import measure_tensors
from bitwright.profiling.overhead import measure_host
from bitwright.profiling.profiled_step import CLOCKS, TimedStep, restricted
from bitwright.profiling.profiler import assemble, compiler_bytes, peak_resident_bytes
from bitwright.profiling.step_timer import StepTimer, gc_disabled, timer_overhead
from bitwright.quantizers import prepare
from bitwright.sensitivity import spec_of
from bitwright.training import Qat
from bitwright.training.step import autocast
from bitwright.zoo import EfficientNetLite0, ResNet20

CLOCK = "cpu"
MEASURED_ALONE = ("float", "int8", "mixed 1")  # cases whose memory is measured: each takes a process


def logits_loss(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, target)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512, vocab_size=2000
    )
    return BertForSequenceClassification(config)


def convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return ConvNextForImageClassification(
        ConvNextConfig(depths=[2, 2, 2, 2], hidden_sizes=[32, 64, 128, 256], image_size=64, num_labels=10)
    )


Loss = Callable[[Any, Any], Tensor]
MODELS: dict[str, Callable[[], tuple[nn.Module, Any, Loss]]] = {
    "small": lambda: (
        nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4)),
        (torch.randn(64, 16), torch.randint(0, 4, (64,))),
        F.cross_entropy,
    ),
    "resnet20": lambda: (
        ResNet20(),
        (torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))),
        F.cross_entropy,
    ),
    "bert": lambda: (
        bert(),
        ({"input_ids": torch.randint(0, 2000, (16, 64))}, torch.randint(0, 2, (16,))),
        logits_loss,
    ),
    "efficientnet-lite0": lambda: (
        EfficientNetLite0(classes=100, image_size=64),
        (torch.randn(8, 3, 64, 64), torch.randint(0, 100, (8,))),
        F.cross_entropy,
    ),
    "convnext": lambda: (
        convnext(),
        ({"pixel_values": torch.randn(8, 3, 64, 64)}, torch.randint(0, 10, (8,))),
        logits_loss,
    ),
}


def prepared(model: nn.Module, batch: Any, plan: Plan | None, settings: StepSettings) -> Variant:
    """A copy under a plan; None is the uniform INT8 plan."""
    made = copy.deepcopy(model)
    qat = Qat(made, [batch[0]], precision=plan or "int8", example=batch[0])
    return Variant(model=made.train(), plan=qat.plan, settings=settings)


def computed(model: nn.Module, batch: Any, plan: Plan | None) -> Variant:
    """A copy with int8 kernels where the plan says so; None is everywhere."""
    made = copy.deepcopy(model)
    if plan is None:
        plan = Plan(compute={"*": spec_of("int8")}).resolve(capture(made, batch[0]))
    prepare(made, plan, inputs=batch[0])
    return Variant(model=made.train(), plan=plan)


def kernel_cases(model: nn.Module, batch: Any) -> dict[str, Variant]:
    found = {"float": Variant(model=copy.deepcopy(model).train()), "int8": computed(model, batch, None)}
    uniform = found["int8"].plan
    for number, plan in enumerate(halves(uniform)):
        found[f"half {number + 1}"] = computed(model, batch, plan)
    for seed in range(5):
        found[f"mixed {seed + 1}"] = computed(model, batch, coin_plan(uniform, seed))
    return found


def coin_plan(plan: Plan, seed: int) -> Plan:
    """Each operator keeps its quantizers or loses them."""
    coin = random.Random(seed)
    names = sorted({*(site.rpartition(":")[0] for site in plan.sites), *plan.compute})
    return restricted(plan, {name for name in names if coin.random() < 0.5})


def cases(model: nn.Module, batch: Any, with_amp: bool) -> dict[str, Variant]:
    plain, amp = StepSettings(), StepSettings(amp="bf16")
    found = {"float": Variant(model=copy.deepcopy(model).train())}
    found["int8"] = prepared(model, batch, None, plain)
    uniform = found["int8"].plan
    for number, plan in enumerate(halves(uniform)):
        found[f"half {number + 1}"] = prepared(model, batch, plan, plain)
    if with_amp:
        found["float, AMP bf16"] = Variant(model=copy.deepcopy(model).train(), settings=amp)
        found["int8, AMP bf16"] = prepared(model, batch, uniform, amp)
    for seed in range(5):
        low = with_amp and seed >= 3
        settings = amp if low else plain
        words = ", AMP bf16" if low else ""
        found[f"mixed {seed + 1}{words}"] = prepared(model, batch, coin_plan(uniform, seed), settings)
    busy = StepSettings(optimizer="adamw", clip=1.0, accumulate=2)
    found["mixed 1, AdamW, clipped, 2 batches"] = prepared(model, batch, coin_plan(uniform, 0), busy)
    return found


def saved_bytes(variant: Variant, batch: Any, loss: Loss) -> int:
    """What backward keeps beside parameters and buffers, by torch's own hooks."""
    model, seen, alive = variant.model, {}, []
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast(variant.settings.amp):
        inputs = batch[0]
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        loss(output, batch[1])
    return sum(seen.values())


def alone(name: str, plan: Path | None, settings: StepSettings, kernels: bool, steps: int) -> None:
    """In a process of its own: the model, its plan and some steps; says how much memory that took at most."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, batch, loss = MODELS[name]()
    if plan is not None and kernels:
        prepare(model, Plan.load(plan), inputs=batch[0])
    elif plan is not None:
        Qat(model, [batch[0]], precision=Plan.load(plan), example=batch[0])
    step = TimedStep(model.train(), [batch], loss, settings)
    for _ in range(steps):
        step()
    print(peak_resident_bytes())


def in_new_process(name: str, variant: Variant, kernels: bool, steps: int) -> int:
    """What `alone` says."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--alone", name, "--steps", str(steps)]
        command += ["--settings", variant.settings.model_dump_json(), *(["--kernels"] if kernels else [])]
        if variant.plan != Plan():
            command += ["--plan", str(variant.plan.save(Path(folder) / "plan.yaml"))]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def measure(name: str, rounds: int, with_amp: bool, kernels: bool, compiler: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model, batch, loss = MODELS[name]()
    graph = record_step(model, batch, loss, name=name)
    store = open_store(None, CLOCK)
    host = measure_host(CLOCK)
    store.add({"facts": {"host": host.model_dump()}})
    variants = kernel_cases(model, batch) if kernels else cases(model, batch, with_amp)
    read = CLOCKS[CLOCK]
    steps = {n: TimedStep(v.model, [batch], loss, v.settings, clock=CLOCK) for n, v in variants.items()}
    watches = {
        n: StepTimer(v.model, v.plan, v.settings, read, host=host)
        for n, v in variants.items()
        if n.startswith(("float", "int8", "half"))
    }
    for n, timer in watches.items():
        store.add_saved(timer.run(steps[n], saving=True))
    taken: dict[str, list[float]] = {n: [] for n in steps}
    with gc_disabled():
        for number in range(rounds + 3):
            for n, step in steps.items():
                if n in watches:  # another model has run meanwhile
                    plain, sample = step.settled(), watches[n].run(step)
                    if number >= 3:
                        store.add_round(sample, wanted=2 * rounds, overhead=timer_overhead(watches[n], sample, plain))
                spent = sum(step.settled().values())
                if number >= 3:
                    taken[n].append(spent)
    store.add({"facts": {"tensors": [cost.model_dump() for cost in measure_tensors(CLOCK)]}})
    # as `bitwright profile` does: a training process of this model in float, less what is predicted of its tensors
    used = Predictor.make(graph, Plan(), assemble(store, CLOCK), None, StepSettings()).predict().devices[0].memory
    assert used is not None
    own = in_new_process(name, variants["float"], kernels, 4) - used.peak
    store.add({"facts": {"process": own, "compiler": compiler}})
    profile = assemble(store, CLOCK)
    return [
        row(name, n, v, graph, profile, taken[n], batch, loss, kernels)
        for n, v in variants.items()
        if not n.startswith("half")
    ]


def row(
    model: str,
    case: str,
    variant: Variant,
    graph: Any,
    profile: DeviceProfile,
    taken: list[float],
    batch: Any,
    loss: Loss,
    kernels: bool,
) -> dict[str, Any]:
    predictor = Predictor.make(graph, variant.plan, profile, None, variant.settings)
    predicted, measured = predictor.seconds, statistics.median(taken)
    use = predictor.predict().devices[0].memory
    assert use is not None
    saved = saved_bytes(variant, batch, loss)
    peak = in_new_process(model, variant, kernels, 4) if case in MEASURED_ALONE else None
    return {
        "model": model,
        "case": case,
        "predicted_ms": 1e3 * predicted,
        "measured_ms": 1e3 * measured,
        "error_percent": 100 * (predicted / measured - 1),
        "saved_predicted": use.saved,
        "saved_measured": saved,
        "saved_error_percent": 100 * (use.saved / saved - 1),
        "tensors_peak": use.peak,
        "process_predicted": use.process,
        "process_measured": peak,
        "process_error_percent": None if peak is None else 100 * (use.process / peak - 1),
    }


def process_words(r: dict[str, Any]) -> str:
    if r["process_measured"] is None:
        return ""
    without = 100 * ((r["process_predicted"] - r["tensors_peak"]) / r["process_measured"] - 1)
    return (
        f"{r['process_measured'] / 1e6:.0f} MB, {r['process_error_percent']:+.1f} % (without tensors {without:+.0f} %)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--amp", nargs="*", default=["bert"], help="models with AMP (slow where bf16 is emulated)")
    parser.add_argument("--kernels", action="store_true", help="computed INT8 instead of simulated")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--settings", default="{}", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.alone:
        settings = StepSettings.model_validate(json.loads(chosen.settings))
        alone(chosen.alone, chosen.plan, settings, chosen.kernels, chosen.steps)
        return
    torch.set_num_threads(1)
    compiler = compiler_bytes()
    rows = []
    for name in chosen.models:
        rows += measure(name, chosen.rounds, name in chosen.amp, chosen.kernels, compiler)
        print(name, [f"{row['error_percent']:+.1f} %" for row in rows if row["model"] == name], flush=True)
    lines = [
        "| model | plan | predicted | measured | error | saved for backward | error | process at its peak |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r['model']} | {r['case']} | {r['predicted_ms']:.1f} ms | {r['measured_ms']:.1f} ms "
            f"| {r['error_percent']:+.1f} % | {r['saved_measured'] / 1e6:.1f} MB | {r['saved_error_percent']:+.2f} % "
            f"| {process_words(r)} |"
        )
    bars = (
        "Bars: float and uniform INT8 5 %, mixed plans 8 % (goal 3 %); saved bytes 5 %, process peak 10 %. "
        f"Medians of {chosen.rounds} rounds, CPU seconds of one thread."
    )
    data = {"environment": environment(rounds=chosen.rounds, models=chosen.models), "rows": rows}
    name = "predict_kernels" if chosen.kernels else "predict_accuracy"
    words = "# Predicted and measured steps" + (" with int8 kernels" if chosen.kernels else "")
    save(name, data, "\n".join([words, "", bars, "", *lines]))


if __name__ == "__main__":
    main()
