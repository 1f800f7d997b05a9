"""Print trials and the result of a search."""

from __future__ import annotations

from pathlib import Path

from bitwright.cli.out import Out
from bitwright.core import formatting
from bitwright.core.output_folder import visible_files
from bitwright.tuning import Tuned
from bitwright.tuning.baseline import Baseline
from bitwright.tuning.search import TrialRecord

_SHOWN = 12  # trials in the table at the end


def show_trial(out: Out, asked: TrialRecord, baseline: Baseline) -> None:
    """Print one line for a candidate."""
    outcome = asked.outcome
    if outcome.failed is not None:
        verdict = f"failed: {outcome.failed.splitlines()[0]}"
    else:
        figures = ", ".join(f"{k} {v:.4g}" for k, v in outcome.metrics.items() if k != "n")
        about = "about " if outcome.stopped else ""
        speed = "" if outcome.latency_ratio is None else f", {outcome.latency_ratio:.2f}× latency"
        verdict = f"{'passes' if outcome.passed else 'fails'}: {about}{figures}{speed}"
        verdict += "".join(f", {limit}" for limit in outcome.exceeded)
    known = "" if asked.fresh else " (known)"
    out.say(f"{asked.number + 1:4d}  {verdict}  {asked.candidate}{known}")


def missed(tuned: Tuned, metric: str) -> str:
    """By how much the goal was missed."""
    outcome = tuned.outcome
    if outcome.exceeded:
        return "; ".join(outcome.exceeded)
    if tuned.baseline is None or metric not in outcome.metrics:
        return outcome.failed or "all"
    goal = tuned.goal
    gaps = {
        name: goal.margin(name, tuned.baseline.metrics[name], outcome.metrics[name]) for name in goal.metrics(metric)
    }
    return ", ".join(f"{-gap:.4g} {name}" for name, gap in gaps.items() if gap < 0)


def show_tuned(out: Out, tuned: Tuned, metric: str, folder: Path) -> None:
    """Print the best trials and the result, or all as JSON."""
    files = [str(file) for file in visible_files(folder) if file.is_file()]
    out.data({"files": files, **tuned.to_dict()})
    front = {asked.number for asked in tuned.pareto}
    best = sorted(tuned.history, key=lambda asked: asked.outcome.rank())[:_SHOWN]
    rows = [
        (
            str(asked.number + 1),
            "yes" if asked.outcome.passed else "no",
            ", ".join(f"{v:.4g}" for k, v in asked.outcome.metrics.items() if k != "n"),
            "" if asked.outcome.latency_ratio is None else f"{asked.outcome.latency_ratio:.2f}×",
            "" if asked.outcome.size is None else formatting.size(asked.outcome.size),
            "yes" if asked.number in front else "",
            str(asked.candidate),
        )
        for asked in best
    ]
    measured = ", ".join(name for name in best[0].outcome.metrics if name != "n") if best else metric
    if rows:
        out.table(["#trial", "passes", f"#{measured or metric}", "#latency", "#size", "Pareto", "candidate"], rows)
    if tuned.baseline is not None and tuned.baseline.majority is not None:
        out.say(f"accuracy of always predicting the most frequent class: {tuned.baseline.majority:.2f} %")
    if tuned.paired is not None:
        paired = tuned.paired
        out.say(
            f"only float is right on {paired.only_float} samples, only the quantized model on {paired.only_quantized}: "
            f"p = {paired.p_value:.2g} (McNemar)"
        )
    if tuned.quantized is None and tuned.met_goal:
        out.say("the float model is the best candidate; no artefact was written")
    outcome = tuned.outcome
    verdict = {True: "the goal is met", False: "the goal is missed", None: "no goal was checked"}[tuned.met_goal]
    speed = "" if outcome.latency_ratio is None else f", {outcome.latency_ratio:.2f}× float's latency"
    figures = ", ".join(f"{k} {v:.4g}" for k, v in outcome.metrics.items() if k != "n")
    out.say(f"{verdict}: {figures}{speed}; {tuned.candidate}")
    out.say(f"{len(tuned.history)} trials, {tuned.full_evaluations} whole evaluations; {tuned.stopped_because}")
    for file in files:
        out.say(f"  {file}")
