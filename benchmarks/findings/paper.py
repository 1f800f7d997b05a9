"""The paper's three findings, beside ours: who is as good as LSQ, what one scale per tensor costs, who wins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import hypot, sqrt
from statistics import mean

from bitwright import Leaderboard
from bitwright.bench.leaderboard import Summary, drop_reference
from findings.words import TWINS, alike, drops, lsq_pairs, more, paired, say, show, table, twice_error, twins, values_of

PER_CHANNEL, PER_TENSOR = "tensorrt", ("snpe", "tvm")
LEARNED = ("lsq", "tqt")


def head(board: Leaderboard) -> Iterator[str]:
    done = [row for row in board.rows if row.status == "done"]
    states = Counter(row.status for row in board.rows)
    minutes = sum(row.cpu_minutes or 0.0 for row in board.rows)
    share = mean(row.float_accuracy or 0.0 for row in done) / 100
    noise = 2 * 100 * sqrt(2 * share * (1 - share) / (done[0].samples or 1))
    costs = ", ".join(
        f"{f.accuracy - f.trained_on:+.1f} ({f.model}, seed {f.seed})" for f in board.floats if f.trained_on is not None
    )
    yield "# What the reference leaderboard says, beside the MQBench paper"
    yield say(
        f"{len(board.rows)} rows ({', '.join(f'{count} {state}' for state, count in states.items())}),",
        f"{minutes:.0f} CPU minutes. [Tables](leaderboard.md); rows: leaderboard.json.",
        f"Numbers below are points below {drop_reference(board)}, mean ± deviation.",
    )
    yield say(
        "The paper has ImageNet networks and about 100 epochs. These are networks of about 5,200 (residual) and 2,500",
        "parameters (depthwise) on images",
        f"of 14 and 16 pixels' side, one epoch on 3,000 images, {done[0].samples} test images, two seeds: a",
        "difference of",
        f"less than about {noise:.0f} points between two single rows is noise. {confounded(board)}",
        f"The same epoch without quantizers costs the float networks, in points: {costs}.",
    )


def confounded(board: Leaderboard) -> str:
    """Whether what differs between networks may be due to their data."""
    models = {str(model) for model in values_of(board.rows, "model")}
    nets, data = ({model.split("-", 1)[part] for model in models} for part in (0, 1))
    if len(models) == len(nets) * len(data):
        return "Each network is on each data set, so that what one does isn't taken for the other's doing."
    return f"The rows are of {' and '.join(sorted(models))} only: what differs between them may be due to the data."


def schemes(board: Leaderboard) -> Iterator[str]:
    """Backends that quantize alike are one scheme."""
    counts = {bits: twins(board, bits) for bits in values_of(board.rows, "bits")}
    words = ", ".join(f"{same} of {pairs} pairs at {bits} bits" for bits, (same, pairs) in counts.items())
    yield "\n## Six backends, five schemes"
    yield say(
        f"{' and '.join(TWINS)} have the same accuracy in {words}: their tables place the same",
        "quantizers in the same formats, so that both are one scheme, trained twice. What they add is two runtimes to",
        "measure it on. Below, where places are counted, they count once at a width where all pairs are the same.",
    )
    if any(same < pairs for same, pairs in counts.values()):
        yield say(
            "Why some pairs differ isn't known: both get the same plan.",
        )


def academic(board: Leaderboard) -> Iterator[str]:
    rows = [row for row in board.rows if row.backend == "academic"]
    models, widths, names = (values_of(rows, key) for key in ("model", "bits", "algorithm"))
    means = {str(name): mean(found) for name in names if (found := drops(rows, algorithm=name, bits=4))}
    yield "\n## “LSQ is about as good as the others, academically”"
    yield from table(
        ["algorithm", *(f"{m}, {b} bits" for m in models for b in widths)],
        (
            [name, *(show(drops(rows, algorithm=name, model=m, bits=b)) for m in models for b in widths)]
            for name in sorted(means, key=means.__getitem__)
        ),
    )
    near = [name for name, value in means.items() if name != "lsq" and abs(value - means["lsq"]) <= 2]
    better = [name for name, value in means.items() if value < means["lsq"] - 2]
    behind = [name for name, value in means.items() if value > means["lsq"] + 2]
    yield say(
        f"At 4 bits LSQ loses {means['lsq']:.1f} points, mean of all networks. Within two points of it:",
        f"{', '.join(near) or 'none'}; better by more: {', '.join(better) or 'none'};",
        f"worse by more: {', '.join(behind) or 'none'}.",
        "The paper has LSQ, APoT, QIL, PACT and DoReFa within a point of each other on ResNet-18, and DoReFa",
        "diverging on",
        "MobileNetV2 and EfficientNet-Lite0.",
    )


def per_tensor(board: Leaderboard) -> Iterator[str]:
    models, widths = values_of(board.rows, "model"), values_of(board.rows, "bits")
    yield "\n## “One scale per tensor hurts depthwise networks”"
    yield from table(
        ["algorithm", "scheme", *(f"{m}, {b} bits" for m in models for b in widths)],
        (
            [
                name,
                f"{backend}, per {'channel' if backend == PER_CHANNEL else 'tensor'}",
                *(
                    show(drops(board.rows, algorithm=name, backend=backend, bits=b, model=m))
                    for m in models
                    for b in widths
                ),
            ]
            for name in LEARNED
            for backend in (PER_CHANNEL, *PER_TENSOR)
            if drops(board.rows, algorithm=name, backend=backend)
        ),
        words=2,
    )
    keys = ("algorithm", "bits", "model", "seed")
    learned = [row for row in board.rows if row.algorithm in LEARNED]
    per_channel = [row for row in learned if row.backend == PER_CHANNEL]
    pairs = paired((row for row in learned if row.backend in PER_TENSOR), per_channel, keys)
    extra: dict[tuple[str, object], list[float]] = {
        (net, bits): more(p for p in pairs if str(p[0].model).startswith(net) and p[0].bits == bits)
        for net in ("residual", "depthwise")
        for bits in widths
    }
    verdicts = []
    for bits in widths:
        residual, depthwise = (extra[net, bits] for net in ("residual", "depthwise"))
        apart, noise = mean(depthwise) - mean(residual), hypot(twice_error(residual), twice_error(depthwise))
        word = "within noise" if abs(apart) <= noise else "as the paper says" if apart > 0 else "the other way round"
        verdicts.append(f"{bits} bits {apart:+.1f} ± {noise:.1f}, {word}")
    costs = ", ".join(
        f"{mean(values):+.1f} ± {twice_error(values):.1f} ({net}, {bits} bits)" for (net, bits), values in extra.items()
    )
    yield say(
        "Only quantizers that learn their scales and keep the size of weights are here. One scale per tensor costs,",
        f"beside one per channel, on average of pairs of rows (± two standard errors): {costs}.",
        f"How much more it costs depthwise networks than residual ones: {'; '.join(verdicts)}.",
        "The schemes differ in more than that: tvm's scales are powers of two, snpe's have zero",
        "points, and both have integers on both sides of an add.",
    )


def winners(board: Leaderboard) -> Iterator[str]:
    places: dict[tuple[object, ...], list[Summary]] = {}
    for cell in board.summaries:
        again = cell.backend == TWINS[1] and len(set(twins(board, cell.bits))) == 1
        if (
            None not in (cell.algorithm, cell.backend, cell.bits, cell.model)
            and cell.accuracy is not None
            and not again
        ):
            places.setdefault((cell.backend, cell.bits, cell.model), []).append(cell)
    first: Counter[str] = Counter()
    ranks: dict[str, list[int]] = {}
    for cells in places.values():
        cells.sort(key=lambda cell: -(cell.accuracy.mean if cell.accuracy else 0.0))
        best = max(cell.accuracy.mean for cell in cells if cell.accuracy)
        first.update(str(cell.algorithm) for cell in cells if cell.accuracy and cell.accuracy.mean == best)
        for rank, cell in enumerate(cells, 1):
            ranks.setdefault(str(cell.algorithm), []).append(rank)
    yield "\n## “No method wins everywhere”"
    yield from table(
        ["algorithm", "wins", "best rank", "mean rank", "worst rank", "places"],
        (
            [name, first[name], min(ranks[name]), f"{mean(ranks[name]):.1f}", max(ranks[name]), len(ranks[name])]
            for name in sorted(ranks, key=lambda name: mean(ranks[name]))
        ),
    )
    name, count = first.most_common(1)[0]
    same, pairs = alike(lsq_pairs(board))
    yield say(
        f"Of {len(places)} places (backend, width, network), {name} wins or shares {count}; {len(first)} of",
        f"{len(ranks)} algorithms win somewhere. Equal means count for each of them: LSQ and LSQ+ are equal in {same}",
        f"of {pairs} pairs of rows (below).",
        "The paper says that nothing wins everywhere;",
        "nothing does here." if count < len(places) else f"{name} does here.",
        "With two seeds, many of these wins are within noise.",
    )
