"""How a run ends: the model that comes out of it, and the files that say so."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from bitwright.checkpoint import save_checkpoint
from bitwright.files import write_text
from bitwright.train.precision import word
from bitwright.train.state import load_best, whole_state
from bitwright.version import __version__

if TYPE_CHECKING:
    from bitwright.train.run import Run

RESULT = "result.json"


def finish(run: Run) -> None:
    """Put the result together, on all ranks, and write it on the first."""
    if run.ema is not None:
        run.ema.put(run.model)
    best = run.checkpoints.best() if run.checkpoints is not None else None
    if run.config.patience is not None and best is not None and run.best is not None:
        load_best(run, best)
        run.note(f"the result is that of epoch {int(run.best['epoch'])}, the best one")
    if run.qat is not None:
        run.qat.finish()
    if run.low is not None:
        run.low.finish()
    if run.whole_model is not None:
        run.whole_model.load_state_dict(whole_state(run))
        run.model = run.whole_model
        if run.qat is not None:
            run.qat.quantized = replace(run.qat.quantized, model=run.model)
    run.model.eval()
    if run.out is None or not run.ranks.first:
        return
    plan = run.qat.plan if run.qat is not None else run.compute
    if plan is not None:
        plan.save(run.out / "plan.yaml")
    save_checkpoint(run.model, run.out / "checkpoint.safetensors")
    write_text(run.out / RESULT, json.dumps(facts(run), indent=1) + "\n")


def facts(run: Run) -> dict[str, Any]:
    """What was run, and how it ended."""
    return {
        "bitwright": __version__,
        "torch": torch.__version__,
        "workload": run.workload.name,
        "quantize": word(run.precision),
        "compute": word(run.compute),
        "kind": run.kind,
        "simulate": run.simulate,
        "batches": run.data.parts,
        "init": str(run.init) if run.init is not None else None,
        "backend": run.qat.quantized.backend if run.qat is not None else None,
        "processes": run.ranks.world,
        "config": run.config.model_dump(),
        "config_hash": run.config.digest,
        "steps": run.step,
        "epochs": run.epoch,
        "stopped_early": run.stopped_early,
        "metric": run.workload.metric,
        "metrics": run.metrics,
        "best": run.best,
        "notes": run.notes,
    }
