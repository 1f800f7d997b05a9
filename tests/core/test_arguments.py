"""Unknown and ignored arguments are refused by every public function, with the nearest name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems import raises_problem
from torch import nn

import bitwright
from bitwright import BitwrightError, PlanError, Qat, capture, make_plan, quantize, quantizers_of
from bitwright.core.arguments import Amount, Count, ImpossibleArgument, Seed, Share, UnknownArgument, strict
from bitwright.deployment.measurement import measure_latency

# Shown in docs/, but not in `bitwright.__all__`.
SHOWN = {
    "bitwright.deployment.checkpoint": ["checkpoint_file"],
    "bitwright.deployment": ["read_artefact"],
    "bitwright.plan": ["ComputeSpec"],
    "bitwright.cluster.cost_model": ["TableCost", "TableCostModel"],
    "bitwright.cluster.planners": [
        *("all_float", "allocation", "equal_batches", "recover", "recover_and_split", "uniform")
    ],
    "bitwright.cluster": ["Cluster", "Link", "Predictor", "predict_step", "write_trace"],
    "bitwright.profiling": [
        "Cast",
        "OperatorUnderPlan",
        "StepSettings",
        "Variant",
        "Execution",
        "profile_variants",
        "record_step",
    ],
    "bitwright.reports": ["Accuracy", "add_to_report", "make_record", "network", "sensitivity", "write_report"],
    "bitwright.training": ["parameter_groups"],
}


def _public() -> Iterator[tuple[str, Any]]:
    for name in bitwright.__all__:
        yield name, getattr(bitwright, name)
    for module, names in SHOWN.items():
        yield from ((f"{module}.{name}", getattr(importlib.import_module(module), name)) for name in names)


def _callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public function, constructor and method."""
    for name, value in _public():
        if not (inspect.isroutine(value) or isinstance(value, type)):  # such as the alias Progress
            continue
        yield name, value
        if isinstance(value, type) and not issubclass(value, Exception):
            for method, member in vars(value).items():
                if method.startswith("_"):
                    continue
                if inspect.isfunction(member):
                    yield f"{name}.{method}", member
                elif isinstance(member, classmethod | staticmethod):
                    yield f"{name}.{method}", getattr(value, method)


CALLABLES = dict(_callables())
WITH_LIMITS = "bitwright.cluster.cost_model.TableCostModel.with_limits"  # its keywords are the names of devices
ERRORS = ("BitwrightError", "PlanError", "Problem")  # Python's own TypeError is enough for these


def _keywords(call: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(call).parameters.values()
    return [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name != "self"]


@pytest.mark.parametrize("name", [name for name in CALLABLES if name not in (*ERRORS, WITH_LIMITS)])
def test_every_public_callable_refuses_unknown_arguments(name: str) -> None:
    call = CALLABLES[name]
    required = {
        p.name: None
        for p in inspect.signature(call).parameters.values()
        if p.default is p.empty and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
    }
    keywords = _keywords(call) if "**" not in str(inspect.signature(call)) else []
    for wrong in ("nonsense", *(f"{word}_x" for word in keywords)):
        with pytest.raises(BitwrightError) as caught:
            call(**{**required, wrong: 1})
        problem = next(p for p in caught.value.problems if p.code == "unknown-argument")
        assert str(problem.where).endswith(wrong)
        if wrong != "nonsense":
            assert wrong.removesuffix("_x") in (problem.fix or ""), problem


@pytest.mark.parametrize("name", sorted(CALLABLES))
def test_no_public_signature_hides_its_arguments(name: str) -> None:
    kinds = [p.kind for p in inspect.signature(CALLABLES[name]).parameters.values()]
    open_ended = {
        "TuneConfig.tune",  # those of `tune`, which are checked against its signature
        "TrainConfig",  # pydantic: fields are checked
        "bitwright.reports.add_to_report",  # parts of the record, checked against its fields
        "Cluster.of",
        "bitwright.cluster.Cluster.of",
        WITH_LIMITS,
    }
    assert inspect.Parameter.VAR_KEYWORD not in kinds or name in open_ended


def test_strict_keeps_name_signature_and_docstring() -> None:
    @strict
    def double(value: int, *, times: int = 2) -> int:
        """Documented."""
        return value * times

    assert double(2, times=3) == 6
    assert (double.__name__, double.__doc__) == ("double", "Documented.")
    with pytest.raises(TypeError) as caught:
        double(2, tims=3)  # type: ignore[call-arg]
    assert isinstance(caught.value, UnknownArgument)
    assert caught.value.codes == ["unknown-argument"]
    assert "times" in str(caught.value)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


BATCHES = [torch.randn(4, 8, generator=torch.Generator().manual_seed(1))]


def test_misspelt_choices_are_refused_and_the_model_stays_as_it_was() -> None:
    model = _model()
    with pytest.raises(UnknownArgument) as caught:
        quantize(model, BATCHES, weigths="int4/group32/sym", nonsense=1)  # type: ignore[call-arg]
    assert [problem.where for problem in caught.value.problems] == ["weigths", "nonsense"]
    assert "'weights'" in (caught.value.problems[0].fix or "")
    with pytest.raises(BitwrightError):
        quantizers_of(model)


@pytest.mark.parametrize(
    ("arguments", "code", "near"),
    [
        ({"observer": "msee"}, "unknown-name", "mse"),
        ({"weight_observer": "msee"}, "unknown-name", "mse"),
        ({"quantizer": "plan"}, "unknown-name", "plain"),
        ({"backend": "onnxrutime"}, "unknown-name", "onnxruntime"),
        ({"steps": ["gtpq"]}, "unknown-name", "gptq"),
        ({"steps": ["gptq:colums=3"]}, "unknown-argument", "columns"),
    ],
)
def test_misspelt_values_are_refused_before_any_data_is_read(arguments: Any, code: str, near: str) -> None:
    read: list[int] = []

    def batches() -> Iterator[torch.Tensor]:
        read.append(1)
        yield from BATCHES

    with pytest.raises(BitwrightError) as caught:
        quantize(_model(), batches, graph=capture(_model(), BATCHES[0]), **arguments)
    assert caught.value.codes == [code]
    assert near in str(caught.value)


def test_choices_next_to_a_plan_are_rejected() -> None:
    model = _model()
    plan = make_plan(capture(model, BATCHES[0]))
    with pytest.raises(PlanError) as caught:
        quantize(model, BATCHES, plan=plan, weights="int8/tensor/sym", keep_float=["0"])
    assert caught.value.codes == ["ignored-argument"] * 2
    assert [problem.where for problem in caught.value.problems] == ["weights", "keep_float"]
    with pytest.raises(PlanError) as caught:
        Qat(model, BATCHES, precision=plan, observer="mse")
    assert caught.value.codes == ["ignored-argument"]
    quantize(model, BATCHES, plan=plan, weights=None, keep_float=[])


def test_a_single_pattern_is_not_a_list_of_letters() -> None:
    plan = make_plan(capture(_model(), BATCHES[0]), keep_float="2*")
    assert set(plan.float) == {"2"}


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.a(x))


_BATCH = torch.randn(4, 8)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("model", lambda: quantize("resnet", [_BATCH])),  # type: ignore[arg-type]
        ("model", lambda: quantize(_Two, [_BATCH])),  # type: ignore[arg-type]
        ("batches", lambda: quantize(_Two(), _BATCH)),
        ("batches", lambda: quantize(_Two(), {"x": _BATCH})),
        ("batches", lambda: quantize(_Two(), None)),  # type: ignore[arg-type]
        ("batches", lambda: quantize(_Two(), "data")),
        ("batches", lambda: bitwright.calibrate(_Two(), _BATCH)),
        ("batches", lambda: bitwright.check(_Two(), "a.onnx", _BATCH)),
        ("backend", lambda: quantize(_Two(), [_BATCH], backend=3)),  # type: ignore[arg-type]
        ("observer", lambda: quantize(_Two(), [_BATCH], observer=3)),  # type: ignore[arg-type]
        ("steps", lambda: quantize(_Two(), [_BATCH], steps="gptq")),
        ("seed", lambda: quantize(_Two(), [_BATCH], seed="a")),  # type: ignore[arg-type]
        ("memory", lambda: quantize(_Two(), [_BATCH], memory="a")),  # type: ignore[arg-type]
        ("plan", lambda: quantize(_Two(), [_BATCH], plan=3)),  # type: ignore[arg-type]
        ("artefact", lambda: quantize(_Two(), [_BATCH], artefact="qdq")),  # type: ignore[arg-type]
        ("keep_float", lambda: quantize(_Two(), [_BATCH], keep_float=3)),  # type: ignore[typeddict-item]
        ("path", lambda: bitwright.export_float(_Two(), None, _BATCH)),  # type: ignore[arg-type]
        ("graph", lambda: make_plan("abc", "onnxruntime")),  # type: ignore[arg-type]
        ("plan", lambda: bitwright.prepare(_Two(), "plan.yaml")),  # type: ignore[arg-type]
        ("model", lambda: bitwright.strip("a")),
        ("name", lambda: bitwright.backend(3)),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_the_wrong_type_are_named(argument: str, call: Callable[[], Any]) -> None:
    with pytest.raises(BitwrightError) as caught:
        call()
    (problem,) = caught.value.problems
    assert problem.code == "wrong-argument-type"
    assert problem.where == argument
    assert isinstance(caught.value, TypeError)


def test_a_single_batch_instead_of_a_list_is_rejected_with_a_fix() -> None:
    with pytest.raises(BitwrightError) as raised:
        quantize(_Two(), _BATCH)
    assert raised.value.codes == ["wrong-argument-type"]
    assert "a list" in str(raised.value.problems[0].fix)


def test_the_types_that_are_accepted_are_wide() -> None:
    @strict
    def take(path: str | Path, n: int = 1, x: float = 1.0, on: bool = True, names: Iterable[str] = ()) -> Any:
        return path, n, x, on, names

    class Here:
        def __fspath__(self) -> str:
            return "here"

    take(Here(), np.int64(3), np.float32(2), np.bool_(True), "abc")  # type: ignore[arg-type]
    take("a", n=True, x=3, on=1, names={"a": 1})  # type: ignore[arg-type]
    with pytest.raises(BitwrightError) as caught:
        take(3, n="a", x="b", on="no", names=3)  # type: ignore[arg-type]
    assert [problem.where for problem in caught.value.problems] == ["path", "n", "x", "on", "names"]


@strict
def counted(*, threads: Count | None = None, memory: Amount = 0, slack: Share = 0.1, seed: Seed = 0) -> int:
    return threads or 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"threads": 0},
        {"threads": -5},
        {"threads": 10**30},
        {"memory": -1},
        {"slack": float("nan")},
        {"slack": -0.1},
        {"slack": float("inf")},
        {"seed": -1},
        {"seed": 2**32},
    ],
)
def test_impossible_numbers_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ImpossibleArgument) as caught:
        counted(**arguments)
    assert isinstance(caught.value, ValueError)
    assert caught.value.codes == ["impossible-argument"]
    assert [problem.where for problem in caught.value.problems] == list(arguments)


def test_all_impossible_numbers_are_listed_and_possible_ones_pass() -> None:
    with pytest.raises(ImpossibleArgument) as caught:
        counted(threads=-1, memory=-1)
    assert [problem.where for problem in caught.value.problems] == ["threads", "memory"]
    assert counted(threads=None, memory=0, slack=0, seed=2**32 - 1) == 0
    assert counted(threads=3) == 3


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda model, batch: bitwright.quantize(model, [batch], memory=-1), "memory"),
        (lambda model, batch: bitwright.quantize(model, [batch], seed=-1), "seed"),
        (lambda model, batch: bitwright.check(model, "model.onnx", [batch], threads=-5), "threads"),
        (lambda model, batch: bitwright.Qat(model, [batch], freeze_bn=-1), "freeze_bn"),
        (lambda model, batch: measure_latency({"a": lambda: None}, runs=0), "runs"),
    ],
)
def test_public_functions_refuse_impossible_numbers(call: Callable[..., Any], name: str) -> None:
    with pytest.raises(ImpossibleArgument) as caught:
        call(torch.nn.Linear(4, 2), torch.ones(1, 4))
    assert [problem.where for problem in caught.value.problems] == [name]


@pytest.mark.parametrize(
    ("make", "where", "mentions"),
    [
        (lambda: bitwright.Goal(drop="1 percent"), "drop", "1%"),
        (lambda: bitwright.Goal(drop=-1), "drop", "at least 0"),
        (lambda: bitwright.Goal(objective="speed"), "objective", "latency"),
        (lambda: bitwright.Budget(minutes="x"), "minutes", "number"),
        (lambda: bitwright.Space(samples=["a"]), "samples.0", "whole number"),
        (lambda: bitwright.TuneConfig(seed=-1), "seed", "at least 0"),
    ],
)
def test_wrong_settings_are_our_errors(make: Callable[[], object], where: str, mentions: str) -> None:
    with raises_problem("invalid-value", where=where, mentions=mentions) as error:
        make()
    assert isinstance(error.value, ValueError)
    assert "pydantic" not in str(error.value)
    assert len(error.value.problems) == 1


@pytest.mark.parametrize(("settings", "mentions"), [({"epochs": -3}, "at least 1"), ({"optimizer": "adam"}, "'adamw'")])
def test_a_fix_of_a_training_setting_says_what_it_takes(settings: dict[str, Any], mentions: str) -> None:
    with raises_problem("invalid-setting", where=next(iter(settings)), mentions=mentions):
        bitwright.TrainConfig(**settings)


@pytest.mark.parametrize(
    ("call", "fix"),
    [
        (lambda: bitwright.prepare(_Two(), "p.yaml"), "Plan.load('p.yaml')"),
        (lambda: bitwright.make_plan("net"), "capture("),
        (lambda: bitwright.SiteSpec(format="int8"), "Format.parse('int8')"),
        (lambda: bitwright.load("out", _Two()), "model=…"),
        (lambda: bitwright.quantize(_BATCH, [_BATCH]), "model"),
        (lambda: bitwright.Qat(_Two(), "digits"), 'load_workload("digits")'),
    ],
)
def test_what_to_pass_instead(call: Callable[[], object], fix: str) -> None:
    with raises_problem("wrong-argument-type") as error:
        call()
    assert fix in str(error.value.problems[0].fix)


def test_a_setting_of_another_argument_is_found_there() -> None:
    workload = bitwright.Workload(name="tiny", model=torch.nn.Linear(8, 4), inputs=(torch.randn(2, 8),))
    with raises_problem("unknown-argument", where="epochs", mentions="config=TrainConfig(epochs=…)"):
        bitwright.Trainer(workload, epochs=3)  # type: ignore[call-arg]
