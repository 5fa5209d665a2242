"""A story as one HTML file: nothing is fetched, nothing is run, every text of the run is escaped."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from html import escape

from phalanx.io.svg import stacked
from phalanx.io.values import printable
from phalanx.record.account.communication import communication_lines
from phalanx.record.account.summary import Pair, RankTime, Summary
from phalanx.record.page.figures import figures
from phalanx.record.page.report import compared, cost_rows, layout_rows, spent_on, wall_s
from phalanx.record.page.story import Story
from phalanx.record.page.style import CSS
from phalanx.units import format_bytes, format_count, format_money, format_seconds, plural

MOST_ROWS = 64  # ranks, incidents or checkpoints in a table
MOST_SAMPLE = 4000
MOST_UNBROKEN = 40  # characters of a cell that stay on one line of a narrow screen
LONG = ' class="long"'
STATES = ("created", "launching", "running", "done", "stopped", "failed", "gone")

Row = Sequence[str]


def page(story: Story, *, made: str) -> str:
    """The whole file; `made` says by what and when, at the bottom."""
    s = story.summary
    digest = base64.b64encode(hashlib.sha256(CSS.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    sections = [
        ("Prediction and measurement", _measured(s)),
        ("Layouts", _layouts(s)),
        ("Over the run", figures(story)),
        ("Where the time went", _ledger(story)),
        ("Ranks", _ranks(story)),
        ("Incidents", _incidents(s)),
        ("Communication", _list(communication_lines(s.communication)) if s.communication is not None else ""),
        ("Checkpoints", _checkpoints(story)),
        ("Cost, energy and carbon", _cost(s)),
        ("What it writes", _samples(s)),
        ("What the plan warned of", _list(story.reasons)),
        ("What of the record is damaged", _damage(s)),
    ]
    body = "\n".join(f"<section><h2>{title}</h2>\n{text}\n</section>" for title, text in sections if text)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{escape(_name(s))} · Phalanx</title>
<style>{CSS}</style>
</head>
<body>
<main>
{_head(s)}
{body}
<footer>{escape(printable(made))}</footer>
</main>
</body>
</html>
"""


def _name(s: Summary) -> str:
    return printable(s.run.rstrip("/").rsplit("/", 1)[-1], most=120)


def _head(s: Summary) -> str:
    state = s.state if s.state in STATES else "unknown"
    ranks = plural(s.world, "rank")
    lead = f"{s.model} ({format_count(s.parameters)} parameters) on {s.cluster}, {ranks}: {s.layout}"
    why = f"<pre>{escape(_lines(s.message))}</pre>" if s.message and state in ("failed", "gone") else ""
    title = f'<h1>{escape(_name(s))} <span class="state {state}">{escape(printable(s.state, most=40))}</span></h1>'
    return f'<header>{title}\n<p class="lead quiet">{escape(printable(lead))}</p>{why}\n{_tiles(s)}</header>'


def _tiles(s: Summary) -> str:
    of = f"of {s.planned_steps:,} steps" if s.planned_steps else "steps"
    usd = s.cost.so_far.usd if s.cost is not None else None
    tiles = [
        (f"{s.steps:,}", of),
        (f"{s.last_loss:.4f}" if s.last_loss is not None else "", f"loss, from {s.first_loss or 0:.4f}"),
        (_or(s.tokens_per_s.measured, format_count), "tokens/s" + _planned(s.tokens_per_s, format_count)),
        (_or(s.mfu.measured, _percent), "MFU" + _planned(s.mfu, _percent)),
        (_or(s.memory_bytes.measured, format_bytes), "memory" + _planned(s.memory_bytes, format_bytes)),
        (_or(s.effective_time.measured, _percent), "effective time" + _planned(s.effective_time, _percent)),
        (_or(usd, format_money), "so far"),
        (_or(wall_s(s), format_seconds), f"wall clock, {s.starts} starts" if s.starts > 1 else "wall clock"),
    ]
    made = [
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in tiles if value
    ]
    return f'<div class="tiles">{"".join(made)}</div>'


def _or(value: float | None, show: Callable[[float], str]) -> str:
    return show(value) if value is not None else ""


def _planned(pair: Pair, show: Callable[[float], str]) -> str:
    return f", planned {show(pair.predicted)}" if pair.predicted else ""


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _layouts(s: Summary) -> str:
    """Of a run that changed its layout: each with its own prediction."""
    rows = layout_rows(s.layouts)
    told = "Predicted → measured, each over its own steps; the table above is of the newest."
    return _table(rows[0], rows[1:], right=(1,)) + f'<p class="quiet">{told}</p>' if rows else ""


def _measured(s: Summary) -> str:
    rows = compared(s)
    if not rows:
        return "<p>No step was finished.</p>"
    note = ""
    if s.step_s_low and s.step_s_high:
        low, high = format_seconds(s.step_s_low), format_seconds(s.step_s_high)
        note = f'<p class="quiet">The plan gives a step {low} to {high} with 80 % probability.</p>'
    return _table(("", "predicted", "measured", "difference"), rows, right=(1, 2, 3)) + note


# ---- tables ----------------------------------------------------------------------------------------------------------


def _ledger(story: Story) -> str:
    found = story.summary.ledger
    if found is None or not found.wall_s:
        return ""
    spent = spent_on(found)
    rows = [
        (_swatch(name) + escape(name), escape(format_seconds(took_s)), f"{share:.1%}") for name, took_s, share in spent
    ]
    told = [
        f"{found.effective:.1%} of {format_seconds(found.wall_s)} were effective: steps that stayed, without compiling."
    ]
    told += [f"The ledger does not close: {found.gap}."] if found.gap else ["The accounts close to within 1 %."]
    told += [f"But {found.jumped}."] if found.jumped else []
    told += [f"Done and undone: {plural(found.steps_lost, 'step')}."] if found.steps_lost else []
    bar = stacked([(name, took_s) for name, took_s, _ in spent])
    note = f'<p class="quiet">{escape(" ".join(told))}</p>'
    return bar + note + _table(("account", "time", "share"), rows, right=(1, 2), safe=True)


def _swatch(name: str) -> str:
    kind = escape(name.replace(" ", "-"), quote=True)
    square = f'<rect class="part {kind}" width="10" height="10"/>'
    return f'<svg class="swatch" viewBox="0 0 10 10" aria-hidden="true">{square}</svg>'


def _ranks(story: Story) -> str:
    s = story.summary
    known = [one for one in s.ranks if one.compute_s is not None]
    if len(known) < 2:
        return ""
    score = story.scores.score
    slowest = sorted(known, key=lambda one: (-score.get(one.rank, 0.0), one.rank))[:MOST_ROWS]
    shown = sorted(slowest, key=lambda one: one.rank)
    most = max((one.compute_s or 0.0) + (one.wait_s or 0.0) for one in known) or 1.0
    rows = [_rank_row(one, score.get(one.rank), most) for one in shown]
    named = (
        _list([one.text for one in s.stragglers]) or '<p class="quiet">No rank stands out: the work is balanced.</p>'
    )
    cut = (
        f'<p class="quiet">The {len(shown)} slowest of {plural(len(known), "rank")}.</p>'
        if len(known) > len(shown)
        else ""
    )
    columns = ("rank", "place", "computing and not", "compute", "not computing", "memory", "score")
    told = "The score is a rank’s own time over the median of those with the same work, in the last 100 steps."
    note = f'<p class="quiet">{told}</p>'
    slow = {one.rank for one in s.stragglers}
    alarms = [number for number, one in enumerate(shown) if one.rank in slow]
    return named + _table(columns, rows, right=(0, 3, 4, 5, 6), safe=True, alarms=alarms) + cut + note


def _rank_row(one: RankTime, score: float | None, most: float) -> Row:
    compute, wait = one.compute_s or 0.0, one.wait_s or 0.0
    rest = max(0.0, most - compute - wait)
    bar = stacked([("compute", compute), ("wait", wait), ("rest", rest)], height=10).replace('"stack"', '"cell"')
    return (
        str(one.rank),
        escape(one.place),
        bar,
        escape(_or(one.compute_s, format_seconds)),
        escape(_or(one.wait_s, format_seconds)),
        escape(_or(one.memory_bytes, format_bytes)),
        f"{score:.2f}" if score is not None else "",
    )


def _incidents(s: Summary) -> str:
    if not s.incidents:
        return ""
    rows = []
    for one in s.incidents[-MOST_ROWS:]:
        went = f"{plural(one.world, 'rank')}, from {one.source}" if one.world else "nobody"
        back = f"{one.restored_step:,}" if one.restored_step is not None else ""
        where = f"rank {one.rank} on {one.host}"
        rows.append((f"{one.step:,}", where, one.what, went, back, _or(one.recovery_s, format_seconds)))
    columns = ("step", "where", "what", "went on with", "back to step", "next step after")
    more = f'<p class="quiet">The last {MOST_ROWS} of {len(s.incidents):,}.</p>' if len(s.incidents) > MOST_ROWS else ""
    found = _list([f"step {one.step:,}: {one.finding}" for one in s.incidents[-MOST_ROWS:] if one.finding])
    return _table(columns, rows, right=(0, 4, 5)) + more + found


def _checkpoints(story: Story) -> str:
    rows = []
    for one in story.saved[-12:]:
        took = (_or(one.blocked_s, format_seconds), _or(one.seconds, format_seconds), _or(one.size_bytes, format_bytes))
        rows.append((f"{one.step:,}", *took, f"not saved: {one.error}" if one.error else ""))
    kept = ", ".join(f"{step:,}" for step in story.summary.checkpoints[-8:])
    note = f'<p class="quiet">On the disk: step {escape(kept)}.</p>' if kept else ""
    more = f'<p class="quiet">The last 12 of {len(story.saved):,}.</p>' if len(story.saved) > 12 else ""
    columns = ("step", "training waited", "written in", "size of rank 0’s part", "")
    return _table(columns, rows, right=(0, 1, 2, 3)) + more + note if rows else note


def _cost(s: Summary) -> str:
    if s.cost is None or not (rows := cost_rows(s.cost)):
        return ""
    told = [f"{name}: {source}" for name, source in s.cost.sources.items()]
    return _table(("", "so far", "at the end", "planned"), rows, right=(1, 2, 3)) + _list(told, quiet=True)


def _samples(s: Summary) -> str:
    return "".join(f"<pre>{escape(_lines(text))}</pre>" for text in s.samples[:8])


def _lines(text: str) -> str:
    """A text with its line breaks and without other control characters."""
    return "\n".join(printable(line, most=MOST_SAMPLE) for line in text[:MOST_SAMPLE].splitlines()[:60])


def _damage(s: Summary) -> str:
    rows = [(printable(one.where), printable(one.what), f"{one.count:,}") for one in s.damage[:MOST_ROWS]]
    return _table(("where", "what", "count"), rows, right=(2,)) if rows else ""


def _list(texts: Sequence[str], *, quiet: bool = False) -> str:
    kind = ' class="quiet"' if quiet else ""
    return "".join(f"<p{kind}>{escape(text)}</p>" for text in texts)


def _table(
    head: Row, rows: Sequence[Row], *, right: Sequence[int] = (), safe: bool = False, alarms: Sequence[int] = ()
) -> str:
    """A table; cells are escaped unless they are `safe` already."""
    number = [' class="n"' if column in right else "" for column in range(len(head))]
    first = "".join(f'<th scope="col"{kind}>{escape(cell)}</th>' for cell, kind in zip(head, number, strict=True))
    lines = []
    for place, row in enumerate(rows):
        cells = [cell if safe else escape(cell) for cell in row]
        kinds = [
            kind or (LONG if not safe and len(cell) > MOST_UNBROKEN else "")
            for cell, kind in zip(row, number, strict=True)
        ]
        made = "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(cells, kinds, strict=True))
        kind = ' class="alarm"' if place in alarms else ""
        lines.append(f"<tr{kind}>{made}</tr>")
    body = "\n".join(lines)
    return f'<div class="scroll"><table><thead><tr>{first}</tr></thead><tbody>{body}</tbody></table></div>'
