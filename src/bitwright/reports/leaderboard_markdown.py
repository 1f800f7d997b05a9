"""A leaderboard as Markdown: accuracy of each algorithm and backend, hardware gaps, and rows that are not done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from bitwright.bench.leaderboard import (
    Leaderboard,
    Row,
    Spread,
    Summary,
    comparable,
    drop_reference,
    reasons,
    short_reason,
    spread,
    spread_text,
    summary,
)
from bitwright.core.formatting import counted
from bitwright.reports.markdown import escaped, table


def markdown(board: Leaderboard) -> str:
    """The tables of a leaderboard."""
    return "\n".join(_lines(board)) + "\n"


def _lines(board: Leaderboard) -> Iterator[str]:
    states = Counter(row.status for row in board.rows)
    yield f"# {escaped(board.title or board.name)}"
    yield ""
    yield f"{counted(len(board.rows), 'row')}: {', '.join(f'{count} {state}' for state, count in states.items())}. "
    minutes = sum(row.cpu_minutes or 0.0 for row in board.rows)
    yield f"{minutes:.1f} CPU minutes. Points below float are below {drop_reference(board)}; "
    yield "± is the deviation over all rows taken together. Config " + escaped(board.config_hash) + "."
    notes = board.config.get("notes") or ()
    for note in notes:
        yield f"\n{escaped(str(note))}"
    if board.floats:
        yield ""
        heads = ["model", "#seed", "#float", "#trained on as long as a row"]
        floats = board.floats
        yield table(heads, [(o.model, str(o.seed), f"{o.accuracy:.2f}", _value(o.trained_on)) for o in floats])
    yield from _overall(board)
    for model in dict.fromkeys(row.model for row in board.rows):
        for bits in dict.fromkeys(row.bits for row in board.rows):
            yield from _cells(board, model, bits)
    yield from _schemes(board)
    yield from _gaps(board)
    yield from _reasons(board.rows)
    yield ""
    for key, machine in board.machines.items():
        versions = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
        code = f"Bitwright {machine.bitwright}" + (f" ({machine.revision})" if machine.revision else "")
        yield escaped(
            f"Machine {key}: {machine.cpu}, {' and '.join(dict.fromkeys(machine.instructions))}, "
            f"{counted(machine.threads, 'thread')}, Python {machine.python}, {code}, {versions}."
        )


def _overall(board: Leaderboard) -> Iterator[str]:
    """Points below float by algorithm and width, best first, and their deviation over backends and models."""
    widths = list(dict.fromkeys(row.bits for row in board.rows))
    shared = comparable(board.rows)
    rows: dict[tuple[str, int], Summary] = {}
    names = list(dict.fromkeys(row.algorithm for row in board.rows))
    for name in names:
        for bits in widths:
            own = [one for one in shared if (one.algorithm, one.bits) == (name, bits)]
            rows[name, bits] = summary(own, algorithm=name, bits=bits)
    names.sort(key=lambda name: _mean(rows[name, widths[-1]].drop))
    yield "\n## Points below float, over backends, models and seeds that all algorithms have\n"
    yield from _left_out(board.rows, shared)
    heads = ["algorithm", *(head for bits in widths for head in (f"#{bits} bits", "#over backends", "#over models"))]
    lines = []
    for name in names:
        cells = [name]
        for bits in widths:
            one = rows[name, bits]
            cells += [spread_text(one.drop), _value(one.over_backends), _value(one.over_models)]
        lines.append(cells)
    yield table(heads, lines)
    yield "\n“Over backends” and “over models” are deviations of mean points below float.\n"


def _left_out(rows: Sequence[Row], shared: Sequence[Row]) -> Iterator[str]:
    """Backends that are in no mean because some algorithm is not done there."""
    kept = {row.backend for row in shared}
    out = [backend for backend in dict.fromkeys(row.backend for row in rows) if backend not in kept]
    done = sum(row.accuracy is not None for row in rows)
    if len(shared) < done:
        names = f" (backends left out: {', '.join(map(escaped, out))})" if out else ""
        yield f"These are {len(shared)} of {counted(done, 'row')} that are done{names}.\n"


def _cells(board: Leaderboard, model: str, bits: int) -> Iterator[str]:
    """Accuracy of each algorithm on each backend."""
    own = [s for s in board.summaries if (s.model, s.bits) == (model, bits)]
    cells = {(s.algorithm, s.backend): s for s in own if None not in (s.algorithm, s.backend)}
    backends = list(dict.fromkeys(row.backend for row in board.rows))
    yield f"\n## {escaped(model)}, {bits} bits: accuracy, mean ± deviation over seeds\n"
    best = {b: max((_mean(cells[a, b].accuracy, -1.0) for a, c in cells if c == b), default=-1.0) for b in backends}
    lines = []
    for name in dict.fromkeys(row.algorithm for row in board.rows):
        texts = [escaped(name)]
        for backend in backends:
            one = cells.get((name, backend))
            if one is None:  # the grid has no such row
                texts.append("")
                continue
            text = spread_text(one.accuracy) or _states(one)
            mark = "**" if one.accuracy is not None and one.accuracy.mean == best[backend] else ""
            texts.append(f"{mark}{text}{mark}")
        lines.append(texts)
    yield table(["algorithm", *(f"#{backend}" for backend in backends)], lines, escape=False)


def _schemes(board: Leaderboard) -> Iterator[str]:
    """Points below float of each backend's scheme on each model, over algorithms and seeds."""
    groups = [s for s in board.summaries if s.algorithm is None and s.backend is not None]
    models = list(dict.fromkeys(row.model for row in board.rows))
    widths = list(dict.fromkeys(row.bits for row in board.rows))
    yield "\n## Points below float by backend, over algorithms that run on all of them\n"
    common = _always_done(board.rows)
    yield f"Algorithms: {', '.join(map(escaped, common)) or 'none'}.\n"
    lines = []
    for backend in dict.fromkeys(s.backend for s in groups):
        cells = [backend or ""]
        for model in models:
            for bits in widths:
                own = (
                    r.drop
                    for r in board.rows
                    if (r.backend, r.model, r.bits) == (backend, model, bits) and r.algorithm in common
                )
                cells.append(spread_text(spread(own)))
        lines.append(cells)
    yield table(["backend", *(f"#{model}, {bits} bits" for model in models for bits in widths)], lines)


def _always_done(rows: Sequence[Row]) -> list[str]:
    """Algorithms with all rows done: only these can be compared over backends."""
    return [
        name
        for name in dict.fromkeys(row.algorithm for row in rows)
        if all(row.status == "done" for row in rows if row.algorithm == name)
    ]


def _gaps(board: Leaderboard) -> Iterator[str]:
    """Runtime minus simulated."""
    measured = [row for row in board.rows if row.device is not None and row.device.gap is not None]
    if not measured:
        return
    yield "\n## Hardware gap: accuracy on the runtime minus simulated, in points\n"
    lines = []
    for runtime, bits in dict.fromkeys((row.device.runtime, row.bits) for row in measured if row.device):
        own = [row.device for row in measured if row.device and (row.device.runtime, row.bits) == (runtime, bits)]
        gaps = [device.gap for device in own if device.gap is not None]
        kinds: Counter[str] = Counter()
        for device in own:
            kinds.update(device.kinds or {})
        text = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
        mean, most = sum(gaps) / len(gaps), max(gaps, key=abs)
        lines.append((runtime, str(bits), str(len(gaps)), f"{mean:+.3f}", f"{most:+.3f}", text))
    yield table(["runtime", "#bits", "#rows", "#mean", "#largest", "products by type"], lines)


def _reasons(rows: Iterable[Row]) -> Iterator[str]:
    """Why rows have no accuracy, or none on the runtime."""
    why = reasons(rows)
    if not why:
        return
    yield "\n## Not done, and why\n"
    lines = [(what, name, backend, str(count), short_reason(reason)) for what, name, backend, reason, count in why]
    yield table(["what", "algorithm", "backend", "#rows", "reason"], lines)


def _states(one: Summary) -> str:
    return ", ".join(state for state in one.rows)


def _mean(value: Spread | None, otherwise: float = float("inf")) -> float:
    return otherwise if value is None else value.mean


def _value(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
