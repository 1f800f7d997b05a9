"""What a PTQ step is: settings that are checked as a whole, and units of work that are done one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from bitwright.errors import BitwrightError, PlanError, Problem, did_you_mean
from bitwright.registry import STEPS

if TYPE_CHECKING:
    from bitwright.ptq.work import Work


class Step(BaseModel):
    """A model-level algorithm. Its fields are its settings; a subclass is one file and one entry point."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str]
    """As it is registered."""

    needs_ranges: ClassVar[bool] = True
    """Whether it works on a calibrated model; else it runs before calibration, on the float weights."""

    def __init__(self, **settings: Any) -> None:
        """Check all settings at once."""
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise PlanError(
                [self._problem(d) for d in error.errors()], title=f"wrong settings of {self.name}"
            ) from None

    @classmethod
    def _problem(cls, detail: Any) -> Problem:
        key = ".".join(str(part) for part in detail["loc"])
        if detail["type"] == "extra_forbidden":
            near = did_you_mean(key, cls.model_fields)
            return Problem(what="unknown setting", where=f"{cls.name}: {key}", fix=near, code="unknown-argument")
        field = cls.model_fields.get(key)
        fix = field.description if field is not None else None
        return Problem(what=detail["msg"], where=f"{cls.name}: {key}", value=detail["input"], fix=fix)

    def problems(self, work: Work) -> Iterable[Problem]:
        """What stands in the way, seen before any long work."""
        return ()

    def units(self, work: Work) -> Sequence[str]:
        """Names of the pieces of work, in order; after each of them the run could be interrupted."""
        raise NotImplementedError

    def run(self, work: Work, unit: str) -> None:
        """Do one of them: change the model in place."""
        raise NotImplementedError

    def finish(self, work: Work) -> None:
        """The last unit is done, in this process or before it was interrupted."""

    def __str__(self) -> str:
        said = ",".join(f"{key}={value}" for key, value in self.model_dump(exclude_defaults=True).items())
        return f"{self.name}:{said}" if said else self.name


def read_steps(steps: Iterable[str | Step]) -> list[Step]:
    """Steps from their names ("adaround", "adaround:iterations=500,lr=0.01"); every problem is listed."""
    found: list[Step] = []
    problems: list[Problem] = []
    for step in steps:
        try:
            found.append(step if isinstance(step, Step) else _read(step))
        except BitwrightError as error:
            problems += error.problems
    late = [step.name for index, step in enumerate(found) if not step.needs_ranges and _ranged(found[:index])]
    for name in late:
        what = "works on float weights, so it can't come after a step that needs ranges"
        problems.append(Problem(what=what, where="steps", value=name, fix=f"put {name} first"))
    if problems:
        raise PlanError(problems, title="the steps have problems")
    return found


def _ranged(steps: list[Step]) -> bool:
    return any(step.needs_ranges for step in steps)


def _read(text: str) -> Step:
    name, _, rest = text.partition(":")
    kind: type[Step] = STEPS.get(name.strip())
    settings: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            raise BitwrightError(
                "a setting is written key=value", where=f"step {name}", value=part, fix=f"{name}:iterations=500"
            )
        settings[key.strip().replace("-", "_")] = value.strip()
    return kind(**settings)
