"""The configuration of a grid: algorithms × backends × widths × models × seeds with one training setting."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from bitwright.core.arguments import strict
from bitwright.core.documents import name_problem, read_settings
from bitwright.core.errors import PlanError, Problem, did_you_mean
from bitwright.core.registry import BACKENDS, OBSERVERS, QUANTIZERS, WORKLOADS, translated
from bitwright.core.schemas import problems_of
from bitwright.core.task_store import is_address
from bitwright.plan import NO_FOLDING, STRATEGIES, known_strategies
from bitwright.training.config import TrainConfig
from bitwright.training.optimizer import Recipe
from bitwright.workload.loading import reference_problem

GRID_VERSION = 1
_REGISTRIES = {"a_method": QUANTIZERS, "w_method": QUANTIZERS, "observer": OBSERVERS, "weight_observer": OBSERVERS}
_SETTINGS = re.compile(r".+?\.ya?ml(?=$|:)")
_SOME: dict[str, Any] = {"minItems": 1}  # checked in `problems`, together with all other problems


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)


class Training(_Strict):
    """How a network trains. The keys are those of `bitwright train`.

    Stores of grids identify float networks by the `repr` of this class, so its name must not change.
    """

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
        default=False,
        description="Compile the quantizers' arithmetic. This takes seconds and speeds up long trainings.",
    )
    recipe: Recipe | None = Field(
        default=None, description="Settings in iterations, instead of epochs, optimizer, lr and schedule."
    )

    def config(self, **more: Any) -> TrainConfig:
        """The settings of a trainer. Batches have equal sizes, as in published results."""
        values: dict[str, Any] = {**self.model_dump(), **more}
        return TrainConfig(**values, **({"drop_last": True} if self.recipe is None else {}))

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        return ((key, value) for key, value in super().__repr_args__() if key != "recipe" or value is not None)


class Algorithm(_Strict):
    """Quantizers of weights and activations, with their observers and learning rates."""

    name: str = Field(default="", description="The name in tables; by default the names of the methods.")
    a_method: str = Field(description="A quantizer's name: lsq, pact, …")
    w_method: str | None = Field(default=None, description="By default the partner of a_method (pact: dorefa).")
    observer: str | None = Field(default=None, description="The observer of activations; by default mse below 8 bits.")
    weight_observer: str | None = Field(
        default=None, description="The observer of weights; by default mse below 8 bits."
    )
    quantizer_lr: float | None = Field(
        default=None, gt=0, le=1e6, description="The learning rate of the quantizers' parameters."
    )
    quantizer_decay: float = Field(
        default=0.0, ge=0, le=1e6, description="The weight decay of the quantizers' parameters; PACT needs some."
    )

    @property
    def weights(self) -> str:
        """The quantizer of weights."""
        partner: str | None = QUANTIZERS.get(self.a_method).weight_partner
        return self.w_method or partner or self.a_method

    @property
    def label(self) -> str:
        """The name in tables."""
        if self.name:
            return self.name
        return self.a_method if self.w_method in (None, self.a_method) else f"{self.w_method}+{self.a_method}"


class GridModel(_Strict):
    """A network with its data."""

    name: str = Field(default="", description="The name in tables; by default that of the workload.")
    workload: str = Field(description="file.py:function, config.yaml:FOLDER, or a name of `bitwright list workloads`.")

    @property
    def label(self) -> str:
        """The name in tables."""
        return self.name or self.workload.rpartition(":")[2]


@strict
class GridConfig(_Strict):
    """One grid. Every row is trained from the same float weights of its model and seed.

    >>> config = GridConfig(models=["digits"], algorithms=["lsq", "pact"], backends=["academic"], bits=[8, 4])
    >>> len(config.tasks())
    4
    """

    version: Literal[1] = Field(default=1, alias="bitwright-grid")
    name: str = Field(default="grid", min_length=1)
    title: str = ""
    models: tuple[GridModel, ...] = Field(json_schema_extra=_SOME)
    algorithms: tuple[Algorithm, ...] = Field(json_schema_extra=_SOME)
    backends: tuple[str, ...] = Field(json_schema_extra=_SOME)
    bits: tuple[int, ...] = Field(json_schema_extra=_SOME, description="The width of weights and activations, 2 to 8.")
    seeds: tuple[int, ...] = Field(default=(0,), json_schema_extra=_SOME)
    bnfold: int = Field(default=4, description="-1: norms are not folded; 0 to 4: the folding strategy.")
    edges: int | None = Field(
        default=8,
        ge=2,
        le=16,
        description="The width of the first and the last operator if the others have fewer bits.",
    )
    training: Training = Training()
    start: Training | None = Field(
        default=None,
        description="Train the float network first, once for each seed. None: the workload has trained weights.",
    )
    beyond: Literal["refuse", "simulate", "adapt"] = Field(
        default="refuse",
        description="If a backend can't run a width: refuse the row, or simulate the backend's scheme. adapt also "
        "gives quantizers without a zero point a symmetric format on backends with asymmetric ones.",
    )
    runtimes: Literal["every", "first-seed", "none"] = Field(
        default="every", description="The rows that are also measured on the backend's runtime, if it is available."
    )
    threads: int = Field(default=1, ge=1, le=10_000, description="Threads of torch. The order of sums depends on them.")
    attempts: int = Field(default=2, ge=1, le=1000, description="The total number of attempts for a row that fails.")
    store: str | None = Field(
        default=None, description="A file or postgresql://…; by default NAME.db in the folder of the grid."
    )
    notes: tuple[str, ...] = Field(default=(), description="Notes for readers of the results.")

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
    def load(
        path: str | Path,
        *,
        workload: str | None = None,
        data: str | Path | None = None,
        iterations: int | None = None,
    ) -> GridConfig:
        """Read a grid file or MQBench's `config.yaml`. Paths in the file are relative to it.

        All problems of the file are reported at once. `workload` is the model of a file that names none. Only for
        files of MQBench, `data` is the folder of images, and `iterations` replaces `max_iter`.
        """
        file = Path(path)
        settings = read_settings(file, "a grid", "bitwright-grid: 1")
        images = None if data is None else str(Path(data).resolve())
        return GridConfig.parse(
            settings, where=str(file), folder=file.parent, workload=workload, images=images, iterations=iterations
        )

    @staticmethod
    def parse(
        data: dict[str, Any],
        *,
        where: str,
        folder: Path,
        workload: str | None = None,
        images: str | None = None,
        iterations: int | None = None,
    ) -> GridConfig:
        """Make a grid from the data of a file. `images` and `iterations` are for files of MQBench, as in `load`."""
        options = {"images": images, "iterations": iterations}
        foreign = translated(data, "grid", where=where, workload=workload, **options)
        given = [name for name, value in options.items() if value is not None]
        if foreign is not None:
            data = foreign
        elif given:
            what = "only MQBench files accept this setting; a grid file contains its own"
            problem = Problem(what=what, where=given[0], fix="change the grid's file", code="ignored-argument")
            raise PlanError([problem], title=f"{where} has problems")
        elif workload is not None:
            data = {**data, "models": [workload]}
        try:
            config = GridConfig.model_validate(data)
        except ValidationError as error:
            raise PlanError(_all_problems(data, error, folder), title=f"{where} has problems") from error
        config = config._with_absolute_paths(folder)
        problems = list(config.problems())
        if problems:
            raise PlanError(problems, title=f"{where} has problems")
        return config

    def _with_absolute_paths(self, folder: Path) -> GridConfig:
        """Resolve paths relative to the folder of the file."""

        def code(ref: str) -> str:
            return str(folder / ref) if is_file(ref) else ref

        def table(ref: str) -> str:
            return str(folder / ref) if ref.endswith((".yaml", ".yml")) else ref

        store = self.store or f"{self.name}.db"
        return self.model_copy(
            update={
                "models": tuple(GridModel(workload=code(model.workload), name=model.label) for model in self.models),
                "backends": tuple(map(table, self.backends)),
                "store": store if is_address(store) else str(folder / store),
            }
        )

    def problems(self) -> Iterator[Problem]:
        """The problems that the schema can't find."""
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
                        what=f"unknown {registry.kind}",
                        where=f"algorithms.{index}.{key}",
                        value=name,
                        fix=fix,
                        code="unknown-name",
                    )
        for index, name in enumerate(self.backends):
            if name not in BACKENDS and not name.endswith((".yaml", ".yml")):
                fix = did_you_mean(name, BACKENDS.names())
                yield Problem(
                    what="unknown backend", where=f"backends.{index}", value=name, fix=fix, code="unknown-name"
                )
        for index, model in enumerate(self.models):
            if settings_file(model.workload) is not None:
                continue  # loading it reports its problems
            if ":" not in model.workload and model.workload not in WORKLOADS:
                fix = did_you_mean(model.workload, WORKLOADS.names())
                where = f"models.{index}"
                yield Problem(what="unknown workload", where=where, value=model.workload, fix=fix, code="unknown-name")
            elif ":" in model.workload and (wrong := reference_problem(model.workload)) is not None:
                yield replace(wrong, where=f"models.{index}")
        for index, bits in enumerate(self.bits):
            if not 2 <= bits <= 8:
                what = "the width is not supported"
                yield Problem(what=what, where=f"bits.{index}", value=bits, fix="use 2 to 8 bits", code="invalid-value")
        for index, seed in enumerate(self.seeds):
            if not 0 <= seed < 2**63:
                what = "the seed is negative" if seed < 0 else "the seed is too large"
                fix = "use 0 to 2**63 - 1"
                yield Problem(what=what, where=f"seeds.{index}", value=seed, fix=fix, code="invalid-value")
        if self.bnfold != NO_FOLDING and self.bnfold not in STRATEGIES:
            fix = known_strategies(none=True)
            what = "unknown folding strategy"
            yield Problem(what=what, where="bnfold", value=self.bnfold, fix=fix, code="unknown-folding-strategy")
        for key, section in (("training", self.training), ("start", self.start)):
            if section is not None and section.warmup >= section.epochs:
                what = "the warm-up is longer than the training"
                yield Problem(
                    what=what,
                    where=f"{key}.warmup",
                    value=section.warmup,
                    fix=f"use less than {section.epochs}",
                    code="warmup-too-long",
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
                what = "is empty: the grid has no rows"
                yield Problem(what=what, where=key, fix="give at least one value", code="empty-list")
            for value, count in Counter(map(str, values)).items():
                if count > 1:
                    fix = "give them different names (name: …)" if key in ("models", "algorithms") else "remove one"
                    what = f"{count} entries have the same name"
                    yield Problem(what=what, where=key, value=value, fix=fix, code="duplicate-name")

    def tasks(self) -> list[RowTask]:
        """The rows. All rows of a seed come before those of the next seed."""
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
        """A short hash of everything that affects the results."""
        return _digest([task.to_json() for task in self.tasks()])


class RowTask(_Strict):
    """One row: everything that affects its result."""

    model: GridModel
    algorithm: Algorithm
    backend: str
    bits: int
    seed: int
    bnfold: int
    edges: int | None
    training: Training
    start: Training | None
    beyond: Literal["refuse", "simulate", "adapt"]
    runtimes: bool
    threads: int

    def to_json(self) -> dict[str, Any]:
        """The settings as data. Equal rows give equal data; the folders of the user's files are left out."""
        data: dict[str, Any] = self.model_dump(mode="json")
        data["model"] = {"name": self.model.label, "workload": _file_name(data["model"]["workload"])}
        data["backend"] = _file_name(data["backend"])
        for section in (data["training"], data["start"]):
            if section is not None and section["recipe"] is None:
                del section["recipe"]  # keys of rows don't depend on it
        return data

    @property
    def label(self) -> str:
        """The row in words."""
        return f"{self.model.label}, {self.algorithm.label}, {self.backend}, {self.bits} bits, seed {self.seed}"

    @property
    def key(self) -> str:
        """The hash of the row's settings."""
        return _digest(self.to_json())

    def grid(self) -> dict[str, Any]:
        """A grid with only this row, in the form of a file."""
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
    """The problems that the schema finds, and all others."""
    found = list(_schema_problems(error, GridConfig))
    places = {problem.where for problem in found}
    lists = {str(one["loc"][0]) for one in error.errors()}  # they contain examples, perhaps twice
    try:
        rest = GridConfig.model_validate(_without_invalid_parts(data, error))._with_absolute_paths(folder).problems()
    except (ValidationError, LookupError, TypeError, AttributeError):  # the data is too different from a grid
        return found
    return [*found, *(one for one in rest if one.where not in {*places, *lists})]


def _changed(training: dict[str, Any] | None) -> dict[str, Any] | None:
    """The settings that differ from the defaults."""
    fields = Training.model_fields
    return None if training is None else {k: v for k, v in training.items() if fields[k].default != v}


def _file_name(ref: str) -> str:
    settings = settings_file(ref)
    if settings is not None:  # without the folder of the data
        return settings.rpartition("/")[2]
    return ref.rpartition("/")[2] if ".py:" in ref else ref


def settings_file(ref: str) -> str | None:
    """The file of a reference `config.yaml:FOLDER`; None for other references."""
    found = _SETTINGS.match(ref)
    return None if found is None else found[0]


def is_file(ref: str) -> bool:
    """Whether a reference to a workload is a file: `file.py:function` or `config.yaml:FOLDER`."""
    return ".py:" in ref or settings_file(ref) is not None


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


#: An example of each required key: as YAML, and as data.
_EXAMPLES: dict[str, tuple[str, Any]] = {
    "models": ("models: [my_workload.py:small]", {"workload": "digits"}),
    "algorithms": ("algorithms: [lsq]", {"a_method": "lsq"}),
    "backends": ("backends: [academic]", "academic"),
    "bits": ("bits: [8, 4]", 8),
    "seeds": ("seeds: [0, 1]", 0),
}
_NAMED = {"models": "workload", "algorithms": "a_method"}


def _schema_problems(error: ValidationError, model: type[BaseModel]) -> Iterator[Problem]:
    """The problems that the schema finds, with an example for each missing key."""
    for one, problem in zip(error.errors(), problems_of(error, model), strict=True):
        if one["type"] == "missing":
            first = str(one["loc"][0])
            fix = _EXAMPLES[first][0] if len(one["loc"]) == 1 and first in _EXAMPLES else f"{one['loc'][-1]}: …"
            yield Problem(what="is missing", where=problem.where, fix=fix, code="missing-key")
        else:
            yield problem


def _without_invalid_parts(data: dict[str, Any], error: ValidationError) -> dict[str, Any]:
    """A copy with a valid example in each place that the schema rejects, so that the rest can be validated too."""
    made = copy.deepcopy(data)
    for key in _EXAMPLES.keys() & made.keys():
        items = made[key] if isinstance(made[key], list | tuple) else [made[key]]
        named = _NAMED.get(key)
        made[key] = [{named: item} if named and isinstance(item, str) else item for item in items]
    for one in error.errors():
        _replace_invalid(made, one["loc"])
    return made


def _replace_invalid(made: dict[str, Any], loc: tuple[Any, ...]) -> None:
    first, example = loc[0], _EXAMPLES.get(str(loc[0]))
    if example is None:
        made.pop(first, None) if len(loc) == 1 else made[first].pop(loc[1], None)
    elif len(loc) == 1:  # the key is missing
        made[first] = [example[1]]
    elif len(loc) == 2 or loc[2] in example[1]:
        made[first][loc[1]] = example[1]
    else:
        made[first][loc[1]].pop(loc[2], None)
