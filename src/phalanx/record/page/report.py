"""A Summary as a page of plain text for a terminal of 100 columns."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict

from phalanx.io.tables import text_table
from phalanx.io.values import printable
from phalanx.record.account.communication import communication_lines
from phalanx.record.account.cost import Cost
from phalanx.record.account.ledger import Ledger
from phalanx.record.account.summary import Evaluation, LayoutResult, Pair, RankTime, Summary
from phalanx.units import format_bytes, format_count, format_money, format_seconds, plural

WIDTH = 100
MOST_ROWS = 16  # ranks shown; more are cut to the slowest
MOST_SAMPLE = 4000  # characters of a text that the model wrote
UNKNOWN = "-"


def render(summary: Summary) -> str:
    """The page: prediction beside measurement, what was learnt, the ranks, some text, where everything is."""
    sections = [
        ("", _measured(summary)),
        ("LAYOUTS (predicted → measured, each over its own steps)", _layouts(summary)),
        ("LEARNING", _learning(summary)),
        ("RANKS (means per step; not computing: for other ranks, stages, transfers, or a core)", _ranks(summary)),
        ("SURVIVED", _survived(summary)),
        ("WHERE THE TIME WENT", _time(summary)),
        ("COMMUNICATION", communication_lines(summary.communication) if summary.communication is not None else []),
        ("COST", _cost(summary)),
        ("WHAT IT WRITES", _samples(summary)),
        ("KEPT", _kept(summary)),
    ]
    lines = _headline(summary)
    for title, body in sections:
        if body:
            lines += ["", *([title] if title else []), *(f"  {line}".rstrip() for line in body)]
    return "\n".join(lines)


def _headline(s: Summary) -> list[str]:
    of = f" of {s.planned_steps:,}" if s.planned_steps else ""
    spent_s = wall_s(s)
    spent = f" in {format_seconds(spent_s)}" if spent_s else ""
    starts = f", {s.starts} starts" if s.starts > 1 else ""
    head = f"{s.run}: {s.state}, {s.steps:,}{of} steps, {format_count(s.tokens)} tokens{spent}{starts}"
    why = [f"  {printable(line)}" for line in s.message.splitlines()[:20]] if s.state in ("failed", "gone") else []
    ranks = plural(s.world, "rank")
    return [head, *why, f"{s.model} ({format_count(s.parameters)} parameters) on {s.cluster}, {ranks}: {s.layout}"]


def wall_s(s: Summary) -> float | None:
    """Seconds the run went on, by its ledger: neither pauses between launches nor leaps of a clock count."""
    return s.ledger.wall_s if s.ledger is not None and s.ledger.wall_s else s.wall_s


def _measured(s: Summary) -> list[str]:
    if s.step_s.measured is None:
        return ["no step was finished"]
    step = format_seconds(s.step_s.measured) + (f" (p90 {format_seconds(s.step_s_p90)})" if s.step_s_p90 else "")
    guess = _seconds(s.step_s.predicted)
    if s.step_s_low and s.step_s_high:
        guess += f" ({format_seconds(s.step_s_low)} to {format_seconds(s.step_s_high)})"
    rows = [("", "predicted", "measured", "difference"), ("step", guess, step, _error(s.step_s))]
    rows.append(("tokens/s", _count(s.tokens_per_s.predicted), _count(s.tokens_per_s.measured), _error(s.tokens_per_s)))
    if s.mfu.predicted and s.mfu.measured:
        rows.append(("MFU", f"{s.mfu.predicted:.1%}", f"{s.mfu.measured:.1%}", _error(s.mfu)))
    rows.append(("memory", _bytes(s.memory_bytes.predicted), _bytes(s.memory_bytes.measured), _error(s.memory_bytes)))
    rows.append(("training", _seconds(s.training_s.predicted), _seconds(s.training_s.measured), _error(s.training_s)))
    if s.first_step_s is not None:
        rows.append(("first step", "", f"{format_seconds(s.first_step_s)} after the launch", ""))
    return text_table(rows)


def layout_rows(layouts: Sequence[LayoutResult]) -> list[tuple[str, ...]]:
    """A header and a row per layout, each with its own prediction; nothing where a run had one."""
    if len(layouts) < 2:
        return []
    rows: list[tuple[str, ...]] = [("steps", "ranks", "layout", "step", "tokens/s", "MFU", "memory")]
    for one in layouts:
        steps = f"{one.first_step + 1:,} to {one.last_step + 1:,}"
        name = one.layout if one.planned else f"{one.layout}, not planned"
        pairs = ((one.step_s, _seconds), (one.tokens_per_s, _count), (one.mfu, _share), (one.memory_bytes, _bytes))
        rows.append((steps, f"{one.world:,}", name, *(_both(pair, show) for pair, show in pairs)))
    return rows


def _both(pair: Pair, show: Callable[[float | None], str]) -> str:
    return f"{show(pair.predicted)} → {show(pair.measured)}"


def _layouts(s: Summary) -> list[str]:
    rows = layout_rows(s.layouts)
    if not rows:
        return []
    newest = s.layouts[-1]
    told = f"the table above is of the newest, steps {newest.first_step + 1:,} to {newest.last_step + 1:,}"
    return [*text_table(rows, right=(1,)), told]


def _learning(s: Summary) -> list[str]:
    lines = []
    if s.first_loss is not None and s.last_loss is not None:
        lines.append(f"training loss  {s.first_loss:.4f} → {s.last_loss:.4f} nats per token")
    if s.evaluation is not None:
        lines += _evaluation(s.evaluation)
    if s.skipped_steps:
        lines.append(f"skipped {plural(s.skipped_steps, 'step')} whose gradient was not finite")
    if s.noise_scale is not None:
        lines.append(f"gradient noise {format_count(s.noise_scale)} samples: a batch far above it wastes tokens")
    return lines


def _evaluation(e: Evaluation) -> list[str]:
    parts = []
    if e.loss is not None:
        parts.append(f"{e.loss:.4f} nats per token")
    if e.bits_per_byte is not None:
        parts.append(f"{e.bits_per_byte:.3f} bits per byte")
    lines = [f"held-out text  {', '.join(parts)} at step {e.step:,}"] if parts else []
    baselines = [
        f"{name} {value:.3f}"
        for name, value in (("unigram", e.unigram_bits_per_byte), ("bigram", e.bigram_bits_per_byte))
        if value is not None
    ]
    if baselines:
        lines.append(f"baselines      {', '.join(baselines)} bits per byte on the same text")
    return lines


def _ranks(s: Summary) -> list[str]:
    known = [one for one in s.ranks if one.compute_s is not None]
    if not known:
        return []
    shown = sorted(sorted(known, key=lambda one: -(one.compute_s or 0.0))[:MOST_ROWS], key=lambda one: one.rank)
    rows: list[tuple[str, ...]] = [("rank", "place", "compute", "not computing", "share", "sent", "memory")]
    rows += [_rank_row(one) for one in shown]
    if all(one.bytes_sent is None for one in shown):  # counted where gradients are compressed
        rows = [(*row[:5], *row[6:]) for row in rows]
    lines = text_table(rows, right=(0, *range(2, len(rows[0]))))
    if len(known) > len(shown):
        lines.append(f"the {len(shown)} slowest of {plural(len(known), 'rank')}")
    return [*lines, *_straggler(s, known), *_imbalance(s)]


def _rank_row(one: RankTime) -> tuple[str, ...]:
    share = UNKNOWN
    if one.wait_s is not None and one.compute_s is not None and one.wait_s + one.compute_s > 0:
        share = f"{one.wait_s / (one.wait_s + one.compute_s):.0%}"
    place = one.place or "the only one"
    cells = (_seconds(one.compute_s), _seconds(one.wait_s), share, _bytes(one.bytes_sent), _bytes(one.memory_bytes))
    return (str(one.rank), place, *cells)


def _straggler(s: Summary, known: Sequence[RankTime]) -> list[str]:
    if not s.stragglers:
        return ["no rank stands out: the work is balanced"] if len(known) > 1 else []
    return [f"straggler: {one.text}; the others wait for it" for one in s.stragglers[:MOST_ROWS]]


def _imbalance(s: Summary) -> list[str]:
    """How unevenly the stages of a pipeline and the experts of a layer are loaded."""
    lines = []
    if s.stage_compute_s:
        slowest = max(s.stage_compute_s) / statistics.fmean(s.stage_compute_s) - 1.0
        number = s.stage_compute_s.index(max(s.stage_compute_s))
        lines.append(f"stages: the slowest, {number}, computes {slowest:.0%} longer than the mean of all")
    if s.expert_imbalance is not None:
        lines.append(f"experts: the busiest gets {s.expert_imbalance:.2f} times the mean")
    return lines


def _survived(s: Summary) -> list[str]:
    """Failures and what they cost, beside what the plan counted with."""
    if not s.incidents:
        return []
    rows = [("step", "what fell", "went on with", "back to", "next step after")]
    for one in s.incidents[-MOST_ROWS:]:
        went = f"{plural(one.world, 'rank')}, from {one.source}" if one.world else "nobody"
        back = f"{one.restored_step:,}" if one.restored_step is not None else UNKNOWN
        rows.append((f"{one.step:,}", f"rank {one.rank}: {one.what}"[:60], went, back, _seconds(one.recovery_s)))
    lines = text_table(rows, right=(0, 3, 4))
    for one in s.incidents[-MOST_ROWS:]:
        if one.finding:
            lines += textwrap.wrap(f"step {one.step:,}: {one.finding}", WIDTH - 4, subsequent_indent="  ")
    if len(s.incidents) > MOST_ROWS:
        lines.append(f"the last {MOST_ROWS} of {len(s.incidents):,}")
    pairs = (("recovery", s.recovery_s, _seconds), ("effective time", s.effective_time, _share))
    for name, pair, show in pairs:
        lines.append(f"{name}: planned {show(pair.predicted)}, measured {show(pair.measured)}")
    return lines


def _time(s: Summary) -> list[str]:
    """Every second in one account, largest first."""
    if s.ledger is None or not s.ledger.wall_s:
        return []
    spent = spent_on(s.ledger)
    rows = [(name, format_seconds(took_s), f"{share:.1%}", bar(share, 24)) for name, took_s, share in spent]
    lines = text_table(rows, right=(1, 2))
    lines.append(f"{s.ledger.effective:.1%} effective: steps that stayed, of {format_seconds(s.ledger.wall_s)}")
    if s.ledger.gap:
        lines.append(f"does not close: {s.ledger.gap}")
    lines += [s.ledger.jumped] if s.ledger.jumped else []
    return lines


def spent_on(ledger: Ledger) -> list[tuple[str, float, float]]:
    """Accounts that took 0.05 % of the time or more: name, seconds, share; largest first."""
    spent = [(name.replace("_", " "), took_s) for name, took_s in asdict(ledger.accounts).items()]
    shares = [(name, took_s, took_s / ledger.wall_s) for name, took_s in spent if ledger.wall_s]
    return sorted((one for one in shares if one[2] >= 0.0005), key=lambda one: -one[1])


def bar(share: float, width: int) -> str:
    """A bar of eighths of a character.

    >>> bar(0.5, 4), bar(0.3, 4)
    ('██', '█▎')
    """
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _cost(s: Summary) -> list[str]:
    """Money, energy, carbon: so far, at the end, as planned; only what is known of at least one."""
    rows = cost_rows(s.cost) if s.cost is not None else []
    if not rows or s.cost is None:
        return []
    columns = ("", "so far", "at the end", "planned")
    return [*text_table([columns, *rows], right=(1, 2, 3)), f"energy: {s.cost.sources.get('energy_j', '')}"]


def compared(s: Summary) -> list[tuple[str, str, str, str]]:
    """Name, predicted, measured, difference, as texts; what was not measured is left out."""
    kinds: tuple[tuple[str, Pair, Callable[[float | None], str]], ...] = (
        ("step", s.step_s, _seconds),
        ("tokens/s", s.tokens_per_s, _count),
        ("MFU", s.mfu, _share),
        ("memory of the fullest rank", s.memory_bytes, _bytes),
        ("training", s.training_s, _seconds),
        ("recovery of a failure", s.recovery_s, _seconds),
        ("effective training time", s.effective_time, _share),
    )
    return [
        (name, show(pair.predicted), show(pair.measured), _error(pair))
        for name, pair, show in kinds
        if pair.measured is not None
    ]


def cost_rows(cost: Cost) -> list[tuple[str, str, str, str]]:
    """Name, so far, projected, predicted, as texts."""
    kinds: tuple[tuple[str, str, Callable[[float], str]], ...] = (
        ("money", "usd", format_money),
        ("energy", "energy_j", format_energy),
        ("carbon", "kgco2e", format_carbon),
    )
    rows = []
    for name, key, show in kinds:
        values = [getattr(one, key) for one in (cost.so_far, cost.projected, cost.predicted)]
        if any(value is not None for value in values):
            cells = [show(value) if value is not None else UNKNOWN for value in values]
            rows.append((name, cells[0], cells[1], cells[2]))
    return rows


def format_energy(joules: float) -> str:
    """Kilowatt hours as people pay for them, joules for what is less.

    >>> format_energy(7.2e6), format_energy(5400.0), format_energy(3.6e10)
    ('2.00 kWh', '5.40 kJ', '10.0 MWh')
    """
    if abs(joules) >= 3.6e9:
        return f"{format_count(joules / 3.6e9)} MWh"
    if abs(joules) >= 3.6e5:
        return f"{format_count(joules / 3.6e6)} kWh"
    return f"{joules / 1e3:.2f} kJ" if abs(joules) >= 1e3 else f"{joules:.0f} J"


def format_carbon(kilograms: float) -> str:
    """Grams, kilograms or tonnes of CO2 equivalent.

    >>> format_carbon(0.0123), format_carbon(17.7), format_carbon(4200)
    ('12.3 g CO2e', '17.7 kg CO2e', '4.20 t CO2e')
    """
    for unit, scale in (("t", 1000.0), ("kg", 1.0)):
        if abs(kilograms) >= scale:
            return f"{format_count(kilograms / scale)} {unit} CO2e"
    grams = kilograms * 1000.0
    return f"{format_count(grams)} g CO2e" if abs(grams) >= 1.0 else f"{grams:.2g} g CO2e"


def _share(value: float | None) -> str:
    return f"{value:.1%}" if value is not None else UNKNOWN


def _samples(s: Summary) -> list[str]:
    lines: list[str] = []
    for text in s.samples:
        wrapped = textwrap.wrap(printable(text, most=MOST_SAMPLE), WIDTH - 6) or [""]
        lines += [f"│ {line}" for line in wrapped] + [""]
    return lines[:-1]


def _kept(s: Summary) -> list[str]:
    lines = []
    if s.checkpoints:
        size = f", {format_bytes(s.checkpoint_bytes)}" if s.checkpoint_bytes else ""
        took = f", {format_seconds(s.checkpoint_s)} each" if s.checkpoint_s else ""
        steps = ", ".join(f"{step:,}" for step in s.checkpoints[-5:])
        lines.append(f"checkpoint{'s' if len(s.checkpoints) > 1 else ''} of step {steps}{size}{took}")
    lines.append(f"run folder: {s.run}")
    if s.checkpoints and s.state != "done":
        lines.append(f"go on with: phalanx train --resume {s.run}")
    if s.unreadable_lines:
        lines.append(f"{plural(s.unreadable_lines, 'line')} of events could not be read")
    lines += [f"damaged: {printable(one.where)}: {printable(one.what)} ({one.count:,})" for one in s.damage[:MOST_ROWS]]
    return lines


def _error(pair: Pair) -> str:
    return f"{pair.error:+.1%}" if pair.error is not None else ""


def _seconds(value: float | None) -> str:
    return format_seconds(value) if value is not None else UNKNOWN


def _bytes(value: float | None) -> str:
    return format_bytes(value) if value is not None else UNKNOWN


def _count(value: float | None) -> str:
    return format_count(value) if value is not None else UNKNOWN
