"""A story as a page of Markdown, for an issue or a wiki: the numbers of the HTML report without its plots."""

from __future__ import annotations

import re
from collections.abc import Sequence

from phalanx.io.values import printable
from phalanx.record.account.communication import communication_lines
from phalanx.record.account.summary import Summary
from phalanx.record.page.report import UNKNOWN, compared, cost_rows, layout_rows, spent_on, wall_s
from phalanx.record.page.story import Story
from phalanx.units import format_bytes, format_count, format_seconds, plural

MOST_ROWS = 16
# What Markdown or the HTML inside it would take for its own.
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&!])")


def page(story: Story) -> str:
    """The whole page."""
    s = story.summary
    sections = [
        ("Prediction and measurement", _measured(s)),
        ("Layouts", _layouts(s)),
        ("Learning", _learning(s)),
        ("Where the time went", _ledger(s)),
        ("Ranks", _ranks(story)),
        ("Incidents", _incidents(s)),
        ("Communication", _communication(s)),
        ("Checkpoints", _checkpoints(s)),
        ("Cost", _cost(s)),
        ("What it writes", _samples(s)),
        ("Damage", _damage(s)),
    ]
    parts = [_head(s), *(f"## {title}\n\n{text}" for title, text in sections if text)]
    return "\n\n".join(parts) + "\n"


def plain(text: object, *, most: int = 500) -> str:
    r"""A stranger's text that stays text.

    >>> plain("a|b <script> [x](y)")
    'a\\|b \\<script\\> \\[x\\](y)'
    """
    return _SPECIAL.sub(r"\\\1", printable(text, most=most))


def _head(s: Summary) -> str:
    of = f" of {s.planned_steps:,}" if s.planned_steps else ""
    spent_s = wall_s(s)
    spent = f" in {format_seconds(spent_s)}" if spent_s else ""
    name = plain(s.run.rstrip("/").rsplit("/", 1)[-1])
    ranks = plural(s.world, "rank")
    told = f"**{plain(s.state)}**, {s.steps:,}{of} steps, {format_count(s.tokens)} tokens{spent}. "
    what = (
        f"{plain(s.model)} ({format_count(s.parameters)} parameters) on {plain(s.cluster)}, {ranks}: {plain(s.layout)}."
    )
    why = f"\n\n> {plain(s.message)}" if s.message and s.state in ("failed", "gone") else ""
    return f"# {name}\n\n{told}{what}{why}"


def _measured(s: Summary) -> str:
    rows = compared(s)
    return _table(("", "predicted", "measured", "difference"), rows) if rows else "No step was finished."


def _layouts(s: Summary) -> str:
    """Of a run that changed its layout: each with its own prediction; the table above is of the newest."""
    rows = [tuple(plain(cell) for cell in row) for row in layout_rows(s.layouts)]
    told = "Predicted → measured, each over its own steps; the table above is of the newest."
    return f"{_table(rows[0], rows[1:])}\n\n{told}" if rows else ""


def _learning(s: Summary) -> str:
    lines = []
    if s.first_loss is not None and s.last_loss is not None:
        lines.append(f"- training loss {s.first_loss:.4f} → {s.last_loss:.4f} nats per token")
    if s.evaluation is not None and s.evaluation.loss is not None:
        bits = s.evaluation.bits_per_byte
        more = f", {bits:.3f} bits per byte" if bits is not None else ""
        lines.append(f"- held-out text {s.evaluation.loss:.4f} nats per token{more} at step {s.evaluation.step:,}")
    if s.noise_scale is not None:
        lines.append(f"- gradient noise scale {format_count(s.noise_scale)} samples")
    if s.skipped_steps:
        lines.append(f"- skipped {plural(s.skipped_steps, 'step')} whose gradient was not finite")
    return "\n".join(lines)


def _ledger(s: Summary) -> str:
    if s.ledger is None or not s.ledger.wall_s:
        return ""
    rows = [(name, format_seconds(took_s), f"{share:.1%}") for name, took_s, share in spent_on(s.ledger)]
    told = f"{s.ledger.effective:.1%} of {format_seconds(s.ledger.wall_s)} were effective: steps that stayed."
    gap = f" The ledger does not close: {s.ledger.gap}." if s.ledger.gap else ""
    jumps = f" But {s.ledger.jumped}." if s.ledger.jumped else ""
    return _table(("account", "time", "share"), rows) + f"\n\n{told}{gap}{jumps}"


def _ranks(story: Story) -> str:
    s = story.summary
    known = [one for one in s.ranks if one.compute_s is not None]
    if len(known) < 2:
        return ""
    score = story.scores.score
    shown = sorted(known, key=lambda one: (-score.get(one.rank, 0.0), one.rank))[:MOST_ROWS]
    rows = []
    for one in sorted(shown, key=lambda one: one.rank):
        took = [format_seconds(value) if value is not None else UNKNOWN for value in (one.compute_s, one.wait_s)]
        memory = format_bytes(one.memory_bytes) if one.memory_bytes else UNKNOWN
        rows.append((str(one.rank), plain(one.place), *took, memory, f"{score.get(one.rank, 1.0):.2f}"))
    named = "\n".join(f"- {plain(one.text)}" for one in s.stragglers) or "No rank stands out."
    cut = f"\n\nThe {len(shown)} slowest of {plural(len(known), 'rank')}." if len(known) > len(shown) else ""
    return named + "\n\n" + _table(("rank", "place", "compute", "not computing", "memory", "score"), rows) + cut


def _incidents(s: Summary) -> str:
    rows = []
    for one in s.incidents[-MOST_ROWS:]:
        went = f"{plural(one.world, 'rank')}, from {plain(one.source)}" if one.world else "nobody"
        took = format_seconds(one.recovery_s) if one.recovery_s is not None else UNKNOWN
        rows.append((f"{one.step:,}", f"rank {one.rank} on {plain(one.host)}", plain(one.what), went, took))
    found = "".join(f"\n- step {one.step:,}: {plain(one.finding)}" for one in s.incidents[-MOST_ROWS:] if one.finding)
    table = _table(("step", "where", "what", "went on with", "next step after"), rows) if rows else ""
    return table + (f"\n{found}" if found else "")


def _communication(s: Summary) -> str:
    if s.communication is None:
        return ""
    return "\n".join(f"- {plain(line.strip())}" for line in communication_lines(s.communication))


def _checkpoints(s: Summary) -> str:
    if not s.checkpoints:
        return ""
    steps = ", ".join(f"{step:,}" for step in s.checkpoints[-8:])
    size = f", {format_bytes(s.checkpoint_bytes)} of rank 0" if s.checkpoint_bytes else ""
    return f"On the disk: step {steps}{size}."


def _cost(s: Summary) -> str:
    if s.cost is None or not (rows := cost_rows(s.cost)):
        return ""
    told = "\n".join(f"- {plain(name)}: {plain(source)}" for name, source in s.cost.sources.items())
    return _table(("", "so far", "at the end", "planned"), rows) + "\n\n" + told


def _samples(s: Summary) -> str:
    return "\n\n".join(f"> {plain(text, most=1000)}" for text in s.samples[:4])


def _damage(s: Summary) -> str:
    return "\n".join(f"- {plain(one.where)}: {plain(one.what)} ({one.count:,})" for one in s.damage[:MOST_ROWS])


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)
