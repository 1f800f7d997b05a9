"""What a strategy knows: the space, the goal, and rankings of operators, each made once for a whole study."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

import torch

from bitwright.batching import first, split
from bitwright.errors import BitwrightError
from bitwright.fingerprint import fingerprint
from bitwright.sensitivity import errors_without, hessian_traces, score
from bitwright.tuning.attribution import credit, own_sites
from bitwright.tuning.candidate import Candidate
from bitwright.tuning.evaluate import Evaluator, Tell
from bitwright.tuning.goal import Goal
from bitwright.tuning.outcome import Outcome
from bitwright.tuning.space import SearchSpace
from bitwright.tuning.store import Study
from bitwright.workload import Workload, loss_of, pairs

Wave = Sequence[Candidate]
Asking = Generator[Wave, list[Outcome], None]
"""A strategy yields candidates that may be evaluated at the same time, and is sent their outcomes, in this order."""
Strategy = Callable[["Search"], Asking]
_SAMPLES, _BATCH = 64, 32  # of a ranking
_LABELLED = 256  # samples of a Hessian


class Search:
    """Given to a strategy."""

    def __init__(
        self,
        workload: Workload,
        space: SearchSpace,
        goal: Goal,
        evaluator: Evaluator,
        study: Study,
        tell: Tell,
        *,
        seed: int,
    ) -> None:
        self.workload, self.space, self.goal, self.seed = workload, space, goal, seed
        self._evaluator, self._study, self._tell = evaluator, study, tell

    def need_loss(self, strategy: str) -> None:
        """Refuse at once what can't be ranked later."""
        if self.workload.loss is None or self.workload.evaluation is None:
            raise BitwrightError(
                f"{strategy} needs a loss and data with targets",
                where=f"workload {self.workload.name!r}",
                fix="give Workload(loss=..., evaluation=...), or use another strategy",
            )

    def by_output(self) -> list[str]:
        """Operators by what quantizing each alone does to the outputs, worst first."""
        return self._ranking("output", lambda: self._scored(lambda one: one.output_error))

    def by_mse(self) -> list[str]:
        """Operators by the mean squared error of the numbers that they read, worst first."""
        return self._ranking("mse", lambda: self._scored(lambda one: one.mse or 0.0, weights=False))

    def by_hessian(self) -> list[str]:
        """Operators by trace(H)·‖ΔW‖², worst first."""
        return self._ranking("hessian", self._curved)

    def by_outputs_of(self, floats: Mapping[str, Iterable[str]]) -> list[str]:
        """Names by the outputs' error with the operators of each in float, the smallest first."""
        sets = {name: sorted(kept) for name, kept in floats.items()}

        def compute() -> dict[str, float]:
            self._tell("ranking operators")
            start = self.space.start()
            off = {name: self._gone(start, kept) for name, kept in sets.items()}
            with self._evaluator.quantized(start) as quantized:
                batches = list(split(first(self._evaluator.calibration, _SAMPLES), _BATCH))
                return errors_without(quantized.model, batches, off)

        known = self._remembered(f"outputs {fingerprint(repr(sorted(sets.items())))}", compute)
        return sorted(sets, key=lambda name: known[name])

    def _gone(self, start: Candidate, floats: Iterable[str]) -> set[str]:
        """The sites that vanish from the plan when these operators stay float, too."""
        every = own_sites(self._evaluator.plan(start))
        return every - own_sites(self._evaluator.plan(start.with_float({*start.float, *floats})))

    def _remembered(self, name: str, compute: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Kept with the study: all workers, and later runs, go by the same one."""
        known = self._study.recall(name)
        values: dict[str, float] = self._study.keep(name, compute()) if known is None else known
        return values

    def _ranking(self, name: str, compute: Callable[[], dict[str, float]]) -> list[str]:
        values = self._remembered(name, compute)
        free = [op.name for op in self.space.free]
        return sorted(free, key=lambda op: -values.get(op, float("-inf")))

    def _scored(self, value: Callable[..., float], *, weights: bool = True) -> dict[str, float]:
        self._tell("ranking operators")
        with self._evaluator.quantized(self.space.start()) as quantized:
            scores = score(quantized.model, split(first(self._evaluator.calibration, _SAMPLES), _BATCH))
        values = {one.site: value(one) for one in scores.sites if weights or not one.site.endswith(":weight")}
        start = self.space.start()
        gone = {op.name: self._gone(start, [op.name]) for op in self.space.free}
        return credit(values, gone, self._evaluator.graph)

    def _curved(self) -> dict[str, float]:
        self._tell("estimating Hessian traces")
        assert self.workload.loss is not None and self.workload.evaluation is not None
        model, graph = self.workload.model, self._evaluator.graph
        parameters = {
            op.name: port.sources[0].name
            for op in graph.ops
            if (port := op.port("weight")) is not None and len(port.sources) == 1 and port.sources[0].kind == "param"
        }
        free = {op.name for op in self.space.free}
        parameters = {op: name for op, name in parameters.items() if op in free}
        data = first(pairs(self.workload), _LABELLED)
        traces = hessian_traces(model, data, loss_of(self.workload), sorted(set(parameters.values())), seed=self.seed)
        errors = self._weight_errors()
        return {op: max(traces[name], 0.0) * errors.get(op, 0.0) for op, name in parameters.items()}

    @torch.no_grad()
    def _weight_errors(self) -> dict[str, float]:
        """‖ΔW‖² of each operator's weight, as it is quantized (folded norms and all)."""
        errors: dict[str, float] = {}
        with self._evaluator.quantized(self.space.start()) as quantized:
            scores = score(quantized.model, split(first(self._evaluator.calibration, 1), 1))
            numbers = {
                op.site("weight"): torch.Size(port.shape).numel()
                for op in quantized.graph.ops
                if (port := op.port("weight")) is not None
            }
        for site in scores.sites:
            if site.site in numbers:
                errors[site.operator] = (site.mse or 0.0) * numbers[site.site]
        return errors
