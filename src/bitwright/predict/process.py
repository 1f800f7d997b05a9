"""What a training process has in memory beside its tensors: the peaks of real steps, less what is predicted of them."""

from __future__ import annotations

from collections.abc import Sequence

from bitwright.plan import Plan
from bitwright.predict.predictor import predict
from bitwright.profile.device import DeviceProfile
from bitwright.profile.stepgraph import StepGraph


def with_process(
    made: DeviceProfile, graph: StepGraph, plain: int, planned: Sequence[tuple[Plan, int]] = ()
) -> DeviceProfile:
    """A profile that knows the process: from the peak of plain steps, and from those under plans.

    What is compiled needs the compiler and kernels, and its blocks are of other sizes: gaps stay between them in the C
    library's heap, which one kernel alone doesn't show. Peaks of 0 are unknown: what was known before stays.
    """
    whole = predict(graph, Plan(), made).devices[0].memory
    if not plain or whole is None:
        return made
    facts = made.memory.model_copy(update={"process": max(0, plain - whole.peak)})
    for plan, peak in planned:
        made_of = predict(graph, plan, made)
        use = made_of.devices[0].memory
        if peak and use is not None and next(iter(made_of.locals.values())).compiled:
            facts = facts.model_copy(update={"compiler": max(facts.compiler, peak - use.peak - facts.process)})
    return made.model_copy(update={"memory": facts})
