"""`write_html`: the record as one page that needs nothing else: no network, no other file."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib.resources import files
from pathlib import Path

from bitwright.files import write_text
from bitwright.report import charts, words
from bitwright.report.record import Record, SiteRow


def write_html(record: Record, path: str | Path) -> Path:
    """Write the page, whole or not at all."""
    return write_text(Path(path), page(record))


def page(record: Record) -> str:
    """The page's text. Every string of the record is escaped: names come from models and files of others."""
    assets = files("bitwright.report")
    css, js = (assets.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    # In a script element only "<" could end it; as an escape it is the same JSON.
    data = record.model_dump_json().replace("<", "\\u003c")
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(record.title)} · Bitwright</title>\n<style>\n{css}</style>\n</head>",
            "<body>\n<main>",
            _header(record),
            _cards(record),
            _measured(record),
            _steps(record),
            _sites(record),
            _left(record),
            _environment(record),
            f'</main>\n<script type="application/json" id="record">{data}</script>',
            f"<script>\n{js}</script>\n</body>\n</html>\n",
        ]
    )


def _header(record: Record) -> str:
    quantized = len(record.sites)
    return (
        f"<header><h1>{escape(record.title)}</h1><p>{quantized} quantized sites, "
        f"{len(record.float_operators)} operators in float · "
        f'Bitwright {escape(record.environment.bitwright)} · <time datetime="{escape(record.created)}">'
        f"{escape(record.created.replace('T', ' ').removesuffix('+00:00'))} UTC</time></p></header>"
    )


def _card(title: str, value: str, *lines: str) -> str:
    below = "".join(f"<span>{line}</span>" for line in lines)
    return f'<div class="card"><h2>{escape(title)}</h2><strong>{value}</strong>{below}</div>'


def _cards(record: Record) -> str:
    cards: list[str] = []
    if len(record.accuracies) > 1:
        first, last = record.accuracies[0], record.accuracies[-1]
        cards.append(
            _card(
                f"Accuracy ({last.metric})",
                escape(words.score(last)),
                escape(f"on {last.where}; {first.where}: {words.score(first)}"),
                escape(words.change(last, first)),
            )
        )
    sizes = words.float_and_quantized(record)
    if sizes is not None:
        before, after = sizes
        cards.append(
            _card(
                "Size",
                escape(words.size(after.bytes)),
                escape(f"{100 * after.bytes / before.bytes:.0f} % of {words.size(before.bytes)}"),
                escape(f"{after.name} against {before.name}"),
            )
        )
    quantized = [timing for timing in record.timings if timing.variant == "quantized"]
    if quantized:
        one = quantized[0]
        alike = [t for t in quantized if (t.runtime, t.threads) == (one.runtime, one.threads)]
        cards.append(
            _card(
                "Latency",
                escape(f"{one.median_ms:.3g} ms"),
                *(escape(f"batch {t.batch}: {words.speed(t)}") for t in alike),
                escape(f"{one.runtime}, {_threads(one.threads)}; the figure is of batch {one.batch}"),
            )
        )
    if record.parities:
        good = all(parity.passed for parity in record.parities)
        agreement = [p.top1_agreement for p in record.parities if p.top1_agreement is not None]
        lines = [escape(f"on {', '.join(p.runtime for p in record.parities)}")]
        if agreement:
            lines.append(escape(f"top-1 agrees on {100 * min(agreement):.4g} % of samples"))
        value = '<span class="good">agrees</span>' if good else '<span class="bad">diverges</span>'
        cards.append(_card("Runtime against simulation", value.replace("span", "b"), *lines))
    return f'<div class="cards">{"".join(cards)}</div>' if cards else ""


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _cell(text: str, *, value: float | None = None, code: bool = False) -> str:
    """A cell; one with a `value` is a number, by which it is sorted."""
    inner = f"<code>{escape(text)}</code>" if code else escape(text)
    return f"<td>{inner}</td>" if value is None else f'<td class="n" data-v="{value!r}">{inner}</td>'


def _table(heads: Iterable[str], rows: Iterable[str]) -> str:
    """Heads that begin with a hash are columns of numbers."""
    head = "".join(f'<th class="n">{escape(h[1:])}</th>' if h[0] == "#" else f"<th>{escape(h)}</th>" for h in heads)
    body = "".join(rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _measured(record: Record) -> str:
    """Accuracy and parity beside latency, where there is room; then where precision is lost."""
    left = _accuracy(record) + _parity(record)
    right = ""
    if record.timings:
        right = (
            "<section><h2>Latency</h2><p class=note>Medians, float and quantized measured in turns; "
            f"p10 to p90 in brackets</p>{charts.latency(record.timings)}</section>"
        )
    columns = "".join(f"<div>{column}</div>" for column in (left, right) if column)
    text = f'<div class="pair">{columns}</div>' if columns else ""
    if any(row.sqnr_db is not None for row in record.sites):
        text += (
            "<section><h2>Where precision is lost</h2><p class=note>Signal to quantization noise, "
            f"at the sites with the lowest</p>{charts.worst_sites(record.sites)}</section>"
        )
    return text


def _accuracy(record: Record) -> str:
    if not record.accuracies:
        return ""
    first = record.accuracies[0]
    rows = [
        f"<tr>{_cell(a.where)}{_cell(words.score(a), value=a.value)}"
        f"{_cell('' if a is first else words.change(a, first), value=a.value - first.value)}</tr>"
        for a in record.accuracies
    ]
    samples = f"<p class=note>{first.samples} samples</p>" if first.samples else ""
    table = _table(["Run by", f"#{first.metric}", "#Change"], rows)
    return f"<section><h2>Accuracy</h2>{samples}{table}</section>"


def _parity(record: Record) -> str:
    if not record.parities:
        return ""
    rows = [
        f"<tr>{_cell(p.runtime)}<td class={'good' if p.passed else 'bad'}>"
        f"{'agrees' if p.passed else 'diverges'}</td>"
        f"{_cell(words.decibels(p.sqnr_db), value=p.sqnr_db or 1e9)}"
        f"{_cell(f'{p.max_error:.3g}', value=p.max_error)}"
        f"{_cell(p.first_divergence or 'none', code=bool(p.first_divergence))}</tr>"
        for p in record.parities
    ]
    table = _table(["Runtime", "Outputs", "#SQNR", "#Largest error", "First diverging site"], rows)
    return (
        "<section><h2>Runtime against simulation</h2><p class=note>The artefact on the real runtime "
        f"against the simulated model, {record.parities[0].samples} samples</p>{table}</section>"
    )


def _steps(record: Record) -> str:
    """The algorithms that ran, in order, and what each of them left alone."""
    if not record.steps:
        return ""
    rows = [
        f"<tr>{_cell(row.step, code=True)}{_cell(str(row.units), value=row.units)}"
        f"{_cell(f'{row.seconds:.1f} s', value=row.seconds)}"
        f"{_cell('; '.join(f'{site}: {why}' for site, why in row.skipped.items()) or 'nothing')}</tr>"
        for row in record.steps
    ]
    return f"<section><h2>Steps</h2>{_table(['Step', '#Units', '#Time', 'Left alone'], rows)}</section>"


def _sites(record: Record) -> str:
    heads = ["Site", "Format", "#SQNR", "#Clipped", "#Range", "#Scale", "#Zero point", "Why"]
    head = "".join(
        f'<th class="n"><button type="button">{h[1:]}</button></th>'
        if h[0] == "#"
        else f'<th><button type="button">{h}</button></th>'
        for h in heads
    )
    count = len(record.sites)
    return (
        '<section id="sites"><h2>Sites</h2>'
        f'<input type="search" id="filter" placeholder="Filter: name, format, reason" '
        'aria-label="Filter sites"> '
        f'<span class="note" id="shown">{count} of {count}</span>'
        f'<div class="scroll"><table class="sortable"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(_site(row) for row in record.sites)}</tbody></table></div></section>"
    )


def _site(row: SiteRow) -> str:
    how = row.observer if row.quantizer == "plain" else row.quantizer
    how = how if row.share is None else f"grid of {row.share}"
    how += f", guard {row.guard}" if row.guard else ""
    scale = words.span(words.number(row.scale_min), words.number(row.scale_max))
    zero = words.span(str(row.zero_point_min), str(row.zero_point_max))
    clipped = "–" if row.clipped is None else f"{100 * row.clipped:.3g} %"
    sqnr = "–" if row.sqnr_db is None else f"{row.sqnr_db:.1f} dB"
    return (
        f"<tr>{_cell(row.site, code=True)}"
        f"<td><code>{escape(row.format)}</code><small>{escape(how)}</small></td>"
        f"{_cell(sqnr, value=1e9 if row.sqnr_db is None else row.sqnr_db)}"
        f"{_cell(clipped, value=-1.0 if row.clipped is None else row.clipped)}"
        f"{_cell(words.span(words.number(row.low), words.number(row.high)), value=row.high - row.low)}"
        f"{_cell(scale, value=row.scale_min)}{_cell(zero, value=row.zero_point_min)}"
        f'<td class="why">{escape(row.why)}</td></tr>'
    )


def _left(record: Record) -> str:
    """What stayed in float, and what vanished into its neighbour: nothing is skipped silently."""
    if record.float_operators:
        rows = [
            f"<tr>{_cell(o.operator, code=True)}{_cell(o.kind)}<td>{escape(o.why)}</td></tr>"
            for o in record.float_operators
        ]
        left = _table(["Operator", "Kind", "Why"], rows)
    else:
        left = '<p class="note">None: all operators of this model are quantized, or part of one that is.</p>'
    text = f"<section><h2>Left in float</h2>{left}</section>"
    if record.folds:
        rows = [f"<tr>{_cell(n, code=True)}{_cell(o, code=True)}</tr>" for n, o in record.folds.items()]
        text += f"<section><h2>Folded</h2>{_table(['Batch norm', 'Into'], rows)}</section>"
    return f'<div class="pair">{text}</div>'


def _environment(record: Record) -> str:
    found = record.environment
    facts = {
        "Machine": f"{found.cpu}, {found.cores} cores, {found.platform}",
        "CPU features": ", ".join(found.cpu_features) or "none known",
        "Threads of torch": str(found.threads),
        "Python": found.python,
        "Packages": ", ".join(f"{name} {version}" for name, version in found.packages.items()),
        "Seed": "none" if record.seed is None else str(record.seed),
        "Plan (SHA-256)": record.plan_sha256,
    }
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return f"<section><h2>Environment</h2><dl>{items}</dl></section>"
