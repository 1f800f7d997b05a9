"""Why rows are as they are: folded norms, ranges that aren't learned, zero points that don't move."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean
from typing import Any

from bitwright import Leaderboard
from bitwright.bench.leaderboard import Row
from findings.words import alike, drops, lsq_pairs, more, paired, say, show, table, twice_error, values_of

FOLLOWING = ("dsq", "fixed")  # they don't learn their ranges
WITH_ZERO_POINTS, WITHOUT = ("snpe", "openvino", "onnxruntime"), ("academic", "tensorrt", "tvm")
UNCENTRED = "folded, means kept"  # of leaderboard_folding.py
RESCALING = ("pact", "dorefa", "qil", "apot")  # they give a weight another size


def folding(board: Leaderboard, why: Leaderboard, folds: list[dict[str, Any]]) -> Iterator[str]:
    """Folded norms beside norms as they are, and what running statistics have to do with it."""
    models, keys = values_of(why.rows, "model"), ("algorithm", "backend", "bits", "model", "seed")
    pairs = paired(board.rows, why.rows, keys)
    own = [one for one, _ in pairs]
    yield "\n## Folded norms, and quantizers that give a weight another size"
    lines = []
    for name in ("lsq", *RESCALING):
        for bits in (8, 4):
            cost = more(p for p in pairs if (p[0].algorithm, p[0].bits) == (name, bits))
            each = (show(drops(rows, algorithm=name, bits=bits)) for rows in (own, why.rows))
            lines.append([name, bits, *each, f"{mean(cost):+.1f} ± {twice_error(cost):.1f}"])
    heads = ["folded (bnfold 4)", "norms as they are (bnfold -1)", "folding costs (± two standard errors)"]
    yield from table(["algorithm", "bits", *heads], lines)
    yield say(
        f"tensorrt and tvm, {' and '.join(map(str, models))}, seed 0; the second column is the same training with",
        "norms that run behind their convolutions. DoReFa (and with it PACT's weights), QIL and APoT squeeze or",
        "standardise a weight. Until November 2026 that met folded norms badly: PACT lost 36.8 ± 25.9 points at 8",
        "bits, DoReFa 27.9 ± 23.3, QIL 50.6 ± 21.8, APoT 46.2 ± 18.1. The cause was measured at 8 bits, seed 0",
        "(leaderboard_folding.py, which can still take the sizes away; top-1, and in brackets that of the same weights",
        "with the statistics of each batch instead of running ones):",
    )
    ways = [way for way in dict.fromkeys(one["way"] for one in folds) if way != UNCENTRED]
    at = {(one["model"], one["backend"], one["algorithm"], one["way"]): one for one in folds}
    rows = []
    for model, backend, name in dict.fromkeys((o["model"], o["backend"], o["algorithm"]) for o in folds):
        found = [at[model, backend, name, way] for way in ways]
        tops = [f"{one['accuracy']:.1f} ({one['statistics of batches']:.1f})" for one in found]
        most = [f"{max(one['sigma']):.3g}" for one in found[:2]]
        rows.append([name, f"{model}, {backend}", *tops, *most])

    uncentred = [f"{o['accuracy']:.1f} ({o['model']}, {o['backend']})" for o in folds if o["way"] == UNCENTRED]

    def after(name: str) -> str:
        own = (one for one in folds if one["algorithm"] == name and one["way"] in (ways[0], ways[-1]))
        return ", ".join(f"{one['after more batches']:.1f} ({one['model']}, {one['way']})" for one in own)

    yield from table(["algorithm", "place", *ways, *(f"largest growth of σ, {way}" for way in ways[:2])], rows, words=2)
    yield say(
        "Strategy 4 measures running σ behind Q(w·γ/σ)/(γ/σ). Where Q gives weights a size of their own that is",
        "proportional to σ, so each step's σ is a multiple of the last one's: training, with statistics of the batch,",
        "is undisturbed, but what is deployed has running ones. Now a folded weight gets its size back",
        "(docs/folding.md).",
    )
    yield say(
        "What is left has other reasons. DoReFa clips activations to [0, 1]; PACT, with the same weights, doesn't.",
        "QIL squeezes activations into [0, 1] as well: variances shrink, and 30 steps",
        "with momentum 0.1 leave 0.9³⁰ = 4 % of the old ones in the running ones, folded or not. Where more than that",
        "is gone, statistics of the batch are far better, and 100 more batches of statistics without any training",
        f"help (top-1 then: {after('qil')}). What no statistics bring back is lost elsewhere, as we read it in sizes",
        "that no norm restores: of what an add reads, of the logits (docs/quantizers.md). APoT takes the mean out of",
        f"each filter, as published. Without that, all else the same, its rows have, deployed: {', '.join(uncentred)}.",
    )


def starting_ranges(board: Leaderboard, ranges: Leaderboard) -> Iterator[str]:
    """Quantizers that don't learn their ranges, by two observers."""
    models = values_of(ranges.rows, "model")
    rows = [row for row in board.rows if row.model in models]
    lost = {
        (name, zero, bits): [d for b in found for d in drops(rows, algorithm=name, backend=b, bits=bits)]
        for name in FOLLOWING
        for zero, found in (("yes", WITH_ZERO_POINTS), ("no", WITHOUT))
        for bits in (8, 4, 2)
    }
    yield "\n## Ranges that aren't learned"
    yield from table(
        ["algorithm", "zero points", "8 bits", "4 bits", "2 bits", "4 bits, observer mse"],
        (
            [name, zero, *(show(lost[name, zero, b]) for b in (8, 4, 2)), show(other)]
            for name in FOLLOWING
            for zero in ("yes", "no")
            for other in [drops(ranges.rows, algorithm=name) if zero == "yes" else []]
        ),
        words=2,
    )
    both = {z: show([d for n in FOLLOWING for d in lost[n, z, 4]]) for z in ("yes", "no")}
    yield say(
        f"{' and '.join(map(str, models))}, two seeds.",
        "DSQ and fixed keep the ranges of their observer, `lsq` (s = 2·mean|x|/√p, quick); the last column has `mse`",
        f"(leaderboard_ranges.json). At 4 bits they lose {both['yes']} points where formats have zero points",
        f"({', '.join(WITH_ZERO_POINTS)}), {both['no']} elsewhere,",
        f"and {show(drops(ranges.rows))} with zero points and `mse`. Until November 2026 the first of these was",
        "19.4 ± 17.8, and 45.4 ± 23.7 at 2 bits:",
        "a fault of our observer. With a zero point it counted its steps from the lowest number",
        "that it had seen, and one",
        "far number clipped all large ones. Found by exchanging one thing at a time (fixed, 4 bits,",
        "seed 0, onnxruntime",
        "and snpe, these two networks; points below float, mean of the four): as it was 18.6; `mse` for weights only",
        "18.3;",
        "`mse` for activations only 3.3; `mse` for both 3.4; the old scale with a range around zero",
        "4.5. So it was neither",
        "the rounding of zero points nor scales that don't learn: those are the same with `mse`.",
    )


def zero_points(board: Leaderboard, zeros: list[dict[str, Any]]) -> Iterator[str]:
    """Why LSQ and LSQ+ are alike."""
    pairs = lsq_pairs(board)
    having = [pair for pair in pairs if has_zero_points(pair[1])]
    same, _ = alike(pairs)
    differ = [abs(d) for d in more(p for p in having if p[0].bits == 4 and p[0].accuracy != p[1].accuracy)]
    most = max(zeros, key=lambda one: one["moved"])
    times = 0.5 / most["moved"] // 50 * 50
    apart = max(zeros, key=lambda one: abs(one["accuracy"][0] - one["accuracy"][1]))
    yield "\n## LSQ and LSQ+"
    yield say(
        f"They have the same accuracy in {same} of {len(pairs)} pairs of rows. {len(pairs) - len(having)} pairs have",
        "symmetric formats only, without a zero point to learn: there LSQ+ is LSQ. In the other",
        f"{len(having)}, {alike(having)[0]} are the same: a zero point starts on a code, and has to move by half a",
        f"code to change anything. Of {sum(one['sites'] for one in zeros)} sites that we looked at",
        f"({', '.join(one['backend'] for one in zeros)}, residual-fashion-mnist, 4 bits, seed 0) none moved by more",
        f"than {most['moved']:.4f} of a code in {most['steps']} steps (leaderboard_zero_points.json).",
        f"Adam's steps are about as long as the rate, 0.0003 here: {times:.0f} times the steps, or",
        "the rate, and more are needed before LSQ+ can differ.",
    )
    yield say(
        f"Where the pairs do differ it is noise, and says how large that is: on {apart['backend']} their weights are",
        f"{apart['apart'][0]:.0e} apart after the first step, {apart['apart'][1]:.0e} after the",
        "last, and the accuracies",
        f"are {apart['accuracy'][0]:.2f} and {apart['accuracy'][1]:.2f}. The quantizers' own numbers are equal to the",
        "bit; as we read it, gradients are added in another order, since a ReLU isn't part of the",
        "same pass where a zero",
        "point is learned.",
        f"At 4 bits {len(differ)} pairs differ, by {mean(differ):.1f} points on average and {max(differ):.1f} at most:"
        " no better than that are single rows, whatever their two decimals say."
        if differ
        else "",
    )


def has_zero_points(row: Row) -> bool:
    ran = row.executed
    return ran is not None and any("/asym" in one.format for one in (*ran.weights, *ran.activations))
