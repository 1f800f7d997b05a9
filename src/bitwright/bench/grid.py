"""A grid as a file: algorithms × backends × widths × models × seeds under one training setting."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from bitwright.bench.grid_validation import file_problem, schema_problems, without_invalid_parts
from bitwright.core.addresses import is_address
from bitwright.core.arguments import strict
from bitwright.core.documents import name_problem, read_settings
from bitwright.core.errors import PlanError, Problem, did_you_mean
from bitwright.core.registry import BACKENDS, OBSERVERS, QUANTIZERS, WORKLOADS, translated
from bitwright.plan import NO_FOLDING, STRATEGIES, known_strategies

GRID_VERSION = 1
_REGISTRIES = {"a_method": QUANTIZERS, "w_method": QUANTIZERS, "observer": OBSERVERS, "weight_observer": OBSERVERS}
_SOME: dict[str, Any] = {"minItems": 1}  # checked in `problems`: there it hides no other one


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)


class Training(_Strict):
    """How a network trains; the keys mean what they mean to `bitwright train`."""

    epochs: int = Field(default=1, ge=1, le=10**6)
    batch: int | None = Field(default=None, ge=1, le=10**9)
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: float = Field(default=0.01, gt=0, le=1e6)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    weight_decay: float = Field(default=1e-4, ge=0, le=1e6)
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup: float = Field(default=0.0, ge=0, le=1e6)
    clip: float | None = Field(default=None, gt=0, le=1e30)
    ema: float | None = Field(default=None, gt=0, lt=1)
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    freeze_observers: int | None = Field(default=None, ge=0, le=10**6)
    freeze_bn: int | None = Field(default=None, ge=0, le=10**6)
    fuse: bool = Field(
        default=False, description="Compile the quantizers' arithmetic: worth its seconds in long trainings."
    )


class Algorithm(_Strict):
    """A way to quantize: the arithmetic of weights and activations, and what it needs to start and to learn."""

    name: str = Field(default="", description="In tables; by default the methods' names.")
    a_method: str = Field(description="A quantizer's name: lsq, pact, …")
    w_method: str | None = Field(default=None, description="By default what goes with a_method (pact: dorefa).")
    observer: str | None = Field(
        default=None, description="How ranges of activations begin; mse below 8 bits if not said."
    )
    weight_observer: str | None = Field(
        default=None, description="How ranges of weights begin; mse below 8 bits if not said."
    )
    quantizer_lr: float | None = Field(default=None, gt=0, le=1e6, description="Of what the quantizers learn.")
    quantizer_decay: float = Field(default=0.0, ge=0, le=1e6, description="PACT wants some.")

    @property
    def weights(self) -> str:
        """The quantizer of weights."""
        partner: str | None = QUANTIZERS.get(self.a_method).weight_partner
        return self.w_method or partner or self.a_method

    @property
    def label(self) -> str:
        """What tables call it."""
        if self.name:
            return self.name
        return self.a_method if self.w_method in (None, self.a_method) else f"{self.w_method}+{self.a_method}"


class Model(_Strict):
    """A network with its data."""

    name: str = Field(default="", description="In tables; by default the workload's.")
    workload: str = Field(description="file.py:function, or a name of `bitwright list workloads`.")

    @property
    def label(self) -> str:
        """What tables call it."""
        return self.name or self.workload.rpartition(":")[2]


@strict
class GridConfig(_Strict):
    """One grid. Every row is trained from the same float weights of its model and seed."""

    version: Literal[1] = Field(default=1, alias="bitwright-grid")
    name: str = Field(default="grid", min_length=1)
    title: str = ""
    models: tuple[Model, ...] = Field(json_schema_extra=_SOME)
    algorithms: tuple[Algorithm, ...] = Field(json_schema_extra=_SOME)
    backends: tuple[str, ...] = Field(json_schema_extra=_SOME)
    bits: tuple[int, ...] = Field(json_schema_extra=_SOME, description="Of weights and activations; 2 to 8.")
    seeds: tuple[int, ...] = Field(default=(0,), json_schema_extra=_SOME)
    bnfold: int = Field(default=4, description="-1: norms aren't folded; 0 to 4: by that strategy.")
    edges: int | None = Field(
        default=8, ge=2, le=16, description="Bits of the first and the last operator where the others have fewer."
    )
    training: Training = Training()
    start: Training | None = Field(
        default=None, description="Train the float network first, once for each seed; None: the workload brings it."
    )
    beyond: Literal["refuse", "simulate"] = Field(
        default="refuse",
        description="At a width that a backend can't run: refuse it, or simulate the backend's scheme.",
    )
    runtimes: Literal["every", "first-seed", "none"] = Field(
        default="every", description="Which rows are measured on the backend's runtime too, where it runs here."
    )
    threads: int = Field(default=1, ge=1, le=10_000, description="Of torch: sums depend on it.")
    attempts: int = Field(default=2, ge=1, le=1000, description="How often a row that fails is tried in all.")
    store: str | None = Field(
        default=None, description="A file, or postgresql://…; NAME.db beside the grid if not said."
    )
    notes: tuple[str, ...] = Field(default=(), description="What a reader of the results should know.")

    @field_validator("models", "algorithms", mode="before")
    @classmethod
    def _named(cls, value: Any, info: Any) -> Any:
        key = "workload" if info.field_name == "models" else "a_method"
        items = value if isinstance(value, list | tuple) else [value]
        return [{key: item} if isinstance(item, str) else item for item in items]

    @field_validator("backends", "bits", "seeds", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return value if isinstance(value, list | tuple) else [value]

    @staticmethod
    def load(path: str | Path, *, workload: str | None = None) -> GridConfig:
        """Read a file, ours or MQBench's `config.yaml`; all its problems at once. Paths in it are relative to it.

        `workload` names the network of a file that names none.
        """
        file = Path(path)
        data = read_settings(file, "a grid", "bitwright-grid: 1")
        return GridConfig.parse(data, where=str(file), folder=file.parent, workload=workload)

    @staticmethod
    def parse(data: dict[str, Any], *, where: str, folder: Path, workload: str | None = None) -> GridConfig:
        """A grid from what a file holds."""
        foreign = translated(data, "grid", where=where, workload=workload)
        if foreign is not None:
            data = foreign
        elif workload is not None:
            data = {**data, "models": [workload]}
        try:
            config = GridConfig.model_validate(data)
        except ValidationError as error:
            raise PlanError(_all_problems(data, error, folder), title=f"{where} has problems") from error
        config = config._beside(folder)
        problems = list(config.problems())
        if problems:
            raise PlanError(problems, title=f"{where} has problems")
        return config

    def _beside(self, folder: Path) -> GridConfig:
        """Paths as seen from the file."""

        def code(ref: str) -> str:
            return str(folder / ref) if ".py:" in ref else ref

        def table(ref: str) -> str:
            return str(folder / ref) if ref.endswith((".yaml", ".yml")) else ref

        store = self.store or f"{self.name}.db"
        return self.model_copy(
            update={
                "models": tuple(Model(workload=code(model.workload), name=model.label) for model in self.models),
                "backends": tuple(map(table, self.backends)),
                "store": store if is_address(store) else str(folder / store),
            }
        )

    def problems(self) -> Iterator[Problem]:
        """What a schema can't see, before any work."""
        names = [("name", self.name, name_problem(self.name))]
        names += [(f"models.{i}.name", model.label, name_problem(model.label)) for i, model in enumerate(self.models)]
        for where, value, what in names:
            if what is not None:
                fix = "use letters, digits, spaces, '.', '-' and '_'"
                yield Problem(what=what, where=where, value=value, fix=fix, code="unsafe-name")
        for index, algorithm in enumerate(self.algorithms):
            for key, registry in _REGISTRIES.items():
                name = getattr(algorithm, key)
                if name is not None and name not in registry:
                    fix = did_you_mean(name, registry.names())
                    yield Problem(
                        what=f"unknown {registry.kind}", where=f"algorithms.{index}.{key}", value=name, fix=fix
                    )
        for index, name in enumerate(self.backends):
            if name not in BACKENDS and not name.endswith((".yaml", ".yml")):
                fix = did_you_mean(name, BACKENDS.names())
                yield Problem(what="unknown backend", where=f"backends.{index}", value=name, fix=fix)
        for index, model in enumerate(self.models):
            if ":" not in model.workload and model.workload not in WORKLOADS:
                fix = did_you_mean(model.workload, WORKLOADS.names())
                yield Problem(what="unknown workload", where=f"models.{index}", value=model.workload, fix=fix)
            elif ":" in model.workload and (wrong := file_problem(model.workload)) is not None:
                yield replace(wrong, where=f"models.{index}")
        for index, bits in enumerate(self.bits):
            if not 2 <= bits <= 8:
                yield Problem(what="widths are 2 to 8 bits", where=f"bits.{index}", value=bits)
        for index, seed in enumerate(self.seeds):
            if not 0 <= seed < 2**63:
                what = "a seed isn't negative" if seed < 0 else "a seed is less than 2**63"
                yield Problem(what=what, where=f"seeds.{index}", value=seed)
        if self.bnfold != NO_FOLDING and self.bnfold not in STRATEGIES:
            fix = known_strategies(none=True)
            yield Problem(what="unknown folding strategy", where="bnfold", value=self.bnfold, fix=fix)
        for key, section in (("training", self.training), ("start", self.start)):
            if section is not None and section.warmup >= section.epochs:
                what = "the learning rate would only ever rise"
                yield Problem(
                    what=what, where=f"{key}.warmup", value=section.warmup, fix=f"use less than {section.epochs}"
                )
        labels = {
            "models": [m.label for m in self.models],
            "algorithms": [a.label for a in self.algorithms],
            "backends": self.backends,
            "bits": self.bits,
            "seeds": self.seeds,
        }
        for key, values in labels.items():
            if not values:
                yield Problem(what="is empty: the grid would have no row", where=key)
            for value, count in Counter(map(str, values)).items():
                if count > 1:
                    fix = "name them apart (name: …)" if key in ("models", "algorithms") else "leave one out"
                    yield Problem(what=f"{count} entries are called alike", where=key, value=value, fix=fix)

    def tasks(self) -> list[RowTask]:
        """The rows: a seed is complete before the next begins."""
        axes = product(self.seeds, self.models, self.bits, self.backends, self.algorithms)
        return [
            RowTask(
                model=model,
                algorithm=algorithm,
                backend=backend,
                bits=bits,
                seed=seed,
                bnfold=self.bnfold,
                edges=self.edges,
                training=self.training,
                start=self.start,
                beyond=self.beyond,
                runtimes=self.runtimes == "every" or (self.runtimes == "first-seed" and seed == self.seeds[0]),
                threads=self.threads,
            )
            for seed, model, bits, backend, algorithm in axes
        ]

    @property
    def digest(self) -> str:
        """A short hash of all that decides results."""
        return _digest([task.to_json() for task in self.tasks()])


class RowTask(_Strict):
    """One row: all that decides its result."""

    model: Model
    algorithm: Algorithm
    backend: str
    bits: int
    seed: int
    bnfold: int
    edges: int | None
    training: Training
    start: Training | None
    beyond: Literal["refuse", "simulate"]
    runtimes: bool
    threads: int

    def to_json(self) -> dict[str, Any]:
        """Equal rows give equal texts; folders of the user's files don't count."""
        data: dict[str, Any] = self.model_dump(mode="json")
        data["model"]["workload"] = _file_name(data["model"]["workload"])
        data["backend"] = _file_name(data["backend"])
        return data

    @property
    def key(self) -> str:
        """The hash of the row's settings."""
        return _digest(self.to_json())

    def grid(self) -> dict[str, Any]:
        """A grid of this row alone, as a file would have it."""
        data = self.to_json()
        one = {key: data.pop(key) for key in ("model", "algorithm", "backend", "seed")}
        lists = {
            "models": [one["model"]],
            "algorithms": [{k: v for k, v in one["algorithm"].items() if v not in (None, "")}],
            "backends": [one["backend"]],
            "bits": [data.pop("bits")],
            "seeds": [one["seed"]],
        }
        training = {key: _changed(data.pop(key)) for key in ("training", "start")}
        data["runtimes"] = "every" if data["runtimes"] else "none"
        rest = {k: v for k, v in data.items() if GridConfig.model_fields[k].default != v}
        return {"bitwright-grid": GRID_VERSION, **lists, **{k: v for k, v in training.items() if v is not None}, **rest}


def _all_problems(data: dict[str, Any], error: ValidationError, folder: Path) -> list[Problem]:
    """What the schema refuses, and what else is wrong."""
    found = list(schema_problems(error, GridConfig))
    places = {problem.where for problem in found}
    lists = {str(one["loc"][0]) for one in error.errors()}  # with stand-ins, which may be there twice
    try:
        rest = GridConfig.model_validate(without_invalid_parts(data, error))._beside(folder).problems()
    except (ValidationError, LookupError, TypeError, AttributeError):  # too far from a grid to be looked at
        return found
    return [*found, *(one for one in rest if one.where not in {*places, *lists})]


def _changed(training: dict[str, Any] | None) -> dict[str, Any] | None:
    """Only what differs from the defaults."""
    fields = Training.model_fields
    return None if training is None else {k: v for k, v in training.items() if fields[k].default != v}


def _file_name(ref: str) -> str:
    return ref.rpartition("/")[2] if ".py:" in ref or ref.endswith((".yaml", ".yml")) else ref


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]
