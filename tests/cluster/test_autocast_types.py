"""The rules against the real thing: what autocast gives at each operator."""

from __future__ import annotations

import pytest
from step_cases import bert, digits, net

from bitwright.cluster.device_step import flow
from bitwright.plan import Plan
from bitwright.profiling import StepSettings, record_step
from bitwright.profiling.execution import IMPLEMENTATIONS, OperatorUnderPlan


@pytest.mark.parametrize("make", [net, digits, bert])
def test_predicted_types_match_autocast(make) -> None:  # type: ignore[no-untyped-def]
    model, batch, loss = make()
    plain = record_step(model, batch, loss)
    real = record_step(model, batch, loss, StepSettings(amp="bf16"))
    executions = {
        op.name: IMPLEMENTATIONS.execution(OperatorUnderPlan(op.name, op.call, Plan(), "bf16")) for op in plain.ops
    }
    ours = flow(plain, executions, "bf16")
    assert ours == {op.name: op.outputs[0].dtype for op in real.ops}
    assert "bfloat16" in ours.values()
