"""How an operator runs under a plan. Measuring and predicting both use this module.

An `Execution` has the format of the operator itself and the casts of its tensors. It comes from the registered
implementations; the newest registration is asked first. A kernel is one object in this registry: its method `execution`
says whether and how it runs an operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from bitwright.core.arguments import strict
from bitwright.core.errors import did_you_mean
from bitwright.core.registry import KERNELS, QUANTIZERS
from bitwright.graph.graph import site_name
from bitwright.plan import FoldSpec, Plan, SiteSpec
from bitwright.profiling.cost_key import CallSpec
from bitwright.training.config import Amp


@strict
@dataclass(frozen=True)
class Cast:
    """A conversion of one tensor: rounding by a quantizer, or a cast to another dtype."""

    port: str
    kind: str
    """What is measured and fitted: `lsq int8/channel/sym`, `lsq uint8/tensor/asym relu`, `float32→bfloat16`."""
    learns: bool = False
    """Whether it has trained state, so that its result always has a gradient."""
    weight: bool = False
    state: str = ""
    """The site whose state it uses: its own, or that of the quantizer that it shares."""
    per_channel: bool = False
    """Whether it has one scale per channel."""


@strict
@dataclass(frozen=True)
class Execution:
    """How one operator runs."""

    format: str
    casts: tuple[Cast, ...] = ()
    takes: str | None = None
    """The format of its activations, to which others are cast; None if it accepts every format."""
    gives: str | None = None
    """The format of its result; None if it follows from the inputs."""
    compiled: bool = False
    """Whether it calls compiled arithmetic, so that the process has torch's compiler in memory."""
    passes_through: bool = False
    """Whether it returns its input: a norm that is folded into the operator before it."""

    def cast_at(self, port: str) -> Cast | None:
        """The cast at a port."""
        return next((cast for cast in self.casts if cast.port == port), None)


@strict
@dataclass(frozen=True)
class OperatorUnderPlan:
    """An operator and the plan under which it runs."""

    name: str
    call: CallSpec
    plan: Plan
    amp: Amp | None = None
    fused: bool = True

    def spec(self, port: str) -> SiteSpec | None:
        """The plan's spec of a site; for a shared quantizer, that of its owner."""
        spec = self.plan.sites.get(site_name(self.name, port))
        if spec is not None and spec.share is not None:
            spec = self.plan.sites.get(spec.share, spec)
        return spec if spec is not None and spec.quantizes else None

    @property
    def fold(self) -> FoldSpec | None:
        """How a norm is folded into this operator."""
        return next((fold for fold in self.plan.folds.values() if fold.into == self.name), None)

    @property
    def folded(self) -> FoldSpec | None:
        """How this norm is folded into the operator before it."""
        return self.plan.folds.get(self.name)


class Implementation(Protocol):
    """Defines how operators run. A kernel registers an implementation."""

    def execution(self, operator: OperatorUnderPlan) -> Execution | None:
        """Return how it runs this operator; None if it doesn't."""


def base_format(amp: Amp | None) -> str:
    """The format of an operator without an entry in the plan."""
    return "float32" if amp is None else f"amp-{amp}"


class Simulated:
    """Float arithmetic between quantizers, as `prepare` sets it up."""

    def execution(self, operator: OperatorUnderPlan) -> Execution | None:
        """The operator in float (or under autocast), with a cast at each site that has a quantizer."""
        base = base_format(operator.amp)
        fold, folded = operator.fold, operator.folded
        if fold is not None:
            base += f"/fold{fold.strategy}"
        if folded is not None:
            base += f"/folded{folded.strategy}"
        specs = {port: operator.spec(port) for port, _ in operator.call.ports}
        output = operator.spec("output")
        inputs = {port: spec for port, spec in specs.items() if spec is not None}
        casts = [self._cast(operator, port, spec, inputs) for port, spec in inputs.items()]
        if output is not None:
            casts.append(self._cast(operator, "output", output, inputs))
        if output is not None and operator.call.kind == "relu" and not inputs:
            base = "within-cast"
        elif casts and operator.call.inplace:
            base += "/copied"  # quantizers need the values that it overwrites
        # strategy 4 still applies the norm's bias
        passes_through = folded is not None and folded.strategy < 4 and not base.endswith("/copied")
        compiled = operator.fused and bool(casts)
        return Execution(base, tuple(casts), compiled=compiled, passes_through=passes_through)

    def _cast(self, operator: OperatorUnderPlan, port: str, spec: SiteSpec, inputs: Mapping[str, SiteSpec]) -> Cast:
        words = [spec.quantizer, str(spec.format)]
        if port == "output" and operator.call.kind == "relu" and not inputs:
            words.append("relu")
        if port == "weight" and operator.fold is not None:
            words.append(f"fold{operator.fold.strategy}")
        if spec.guard is not None:
            words.append(spec.guard)
        if operator.fused:
            words.append("fused")
        learned = QUANTIZERS.get(spec.quantizer).learned
        own = site_name(operator.name, port)
        state = operator.plan.sites[own].share or own
        per_channel = spec.format.granularity == "channel"
        return Cast(port, " ".join(words), bool(learned), port in ("weight", "bias"), state, per_channel)


class Kernels:
    """Operators of the plan's `compute`: every registered kernel, under the name that says how it runs."""

    def execution(self, operator: OperatorUnderPlan) -> Execution | None:
        """The kernel is measured as a whole, including its casts."""
        spec = operator.plan.compute.get(operator.name)
        if spec is None or not spec.is_low_precision:
            return None
        backward = "+".join(spec.backward) or "none"
        rounding = "/stochastic" if spec.stochastic and spec.backward else ""
        scales = "/tensor" if spec.per_tensor else ""
        compiled = KERNELS.get(spec.format).has_compiled_arithmetic
        return Execution(f"kernel {spec.format}/{backward}{rounding}{scales}", compiled=compiled)


class Implementations:
    """All implementations, newest first."""

    def __init__(self) -> None:
        self._known: dict[str, Implementation] = {"kernels": Kernels(), "simulated": Simulated()}

    def register(self, name: str, implementation: Implementation) -> None:
        """Add an implementation, which is asked before the existing ones."""
        if name in self._known:
            raise ValueError(f"the implementation {name!r} already exists")
        self._known = {name: implementation, **self._known}

    def unregister(self, name: str) -> None:
        """Remove an implementation."""
        if name not in self._known:
            raise KeyError(did_you_mean(name, self._known))
        del self._known[name]

    def execution(self, operator: OperatorUnderPlan) -> Execution:
        """Return how the operator runs."""
        for implementation in self._known.values():
            found = implementation.execution(operator)
            if found is not None:
                return found
        raise AssertionError("the simulation takes every operator")


IMPLEMENTATIONS = Implementations()


def is_quantizer(kind: str) -> bool:
    """Whether a cast's kind is a quantizer's, and not one dtype to another.

    >>> is_quantizer("lsq int8/channel/sym fused"), is_quantizer("float32→bfloat16")
    (True, False)
    """
    return "→" not in kind
