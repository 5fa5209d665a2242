"""The sections of a report for all output formats: tables, paragraphs, lists and quotes of plain texts.

render.py shows them on a terminal and as Markdown, html.py as a page; `phalanx watch` shows their `brief` lines.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from phalanx.io.values import printable
from phalanx.record.account.communication import communication_lines
from phalanx.record.account.cost import Cost
from phalanx.record.account.ledger import Ledger
from phalanx.record.account.summary import LayoutResult, Pair, RankTime, Summary
from phalanx.record.account.time_accounts import ACCOUNT_LABELS
from phalanx.record.report.run_report import RunReport
from phalanx.units import format_bytes, format_carbon, format_count, format_energy, format_money, format_seconds, plural

MOST_ROWS = 16  # rows of a table; a page may show more
UNKNOWN = "-"
# The keys of `Cost.sources` as named in the table of costs.
SOURCE_NAMES = {"usd": "money", "energy_j": "energy", "kgco2e": "carbon", "projected": "at the end"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A bar in a cell: names and sizes of its parts, and the size of the complete cell. Omitted in Markdown."""

    parts: tuple[tuple[str, float], ...]
    whole: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ColourKey:
    """A name with its colour, where the output has colours."""

    name: str


Cell = str | Bar | ColourKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of cells under a head; columns in `right` are right-aligned, rows in `alarms` are highlighted."""

    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    right: tuple[int, ...] = ()
    alarms: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """One bar over the full width of a page, by parts; only HTML pages draw it."""

    parts: tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Paragraph:
    """One or more sentences."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Items:
    """Short texts, one per line; `quiet` ones are remarks on the block above."""

    texts: tuple[str, ...]
    quiet: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Quote:
    """Verbatim texts, such as the model's samples."""

    texts: tuple[str, ...]


Block = Table | Stack | Paragraph | Items | Quote


@dataclass(frozen=True, kw_only=True, slots=True)
class BriefLine:
    """One line for a screen of 24 lines: a label, a text, and True if it is bad news."""

    label: str
    text: str
    is_alarm: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A titled part of a report; a section without blocks is not shown."""

    title: str
    blocks: tuple[Block, ...]
    brief: tuple[BriefLine, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Headline:
    """The first lines of a report."""

    name: str  # of the run folder
    state: str
    progress: str  # steps, tokens, time
    subject: str  # model, cluster, layout
    message: tuple[str, ...]  # the reason of a failure


def report_headline(s: Summary) -> Headline:
    """Return the first lines of a report."""
    done = f"{s.steps:,} of {plural(s.planned_steps, 'step')}" if s.planned_steps else plural(s.steps, "step")
    spent_s = wall_seconds(s)
    spent = f" in {format_seconds(spent_s)}" if spent_s else ""
    starts = f", {plural(s.starts, 'start')}" if s.starts > 1 else ""
    is_bad = s.state in ("failed", "interrupted")
    return Headline(
        name=printable(s.run.rstrip("/").rsplit("/", 1)[-1], most=120),
        state=s.state,
        progress=f"{done}, {format_count(s.tokens)} token{'' if s.tokens == 1 else 's'}{spent}{starts}",
        subject=f"{s.model} ({format_count(s.parameters)} parameters) on {s.cluster}, "
        f"{plural(s.world, 'rank')}: {s.layout}",
        message=tuple(printable(line) for line in s.message.splitlines()[:20]) if is_bad else (),
    )


def report_sections(s: Summary, report: RunReport | None = None, *, most_rows: int = MOST_ROWS) -> list[Section]:
    """Return all sections that have content; `report` adds those that need the complete record."""
    sections = [
        _measured_section(s),
        _layouts_section(s),
        _learning_section(s),
        time_section(s),
        _ranks_section(s, report, most_rows),
        incident_section(s, most_rows),
        Section(
            title="Communication",
            blocks=_item_blocks(line.strip() for line in communication_lines(s.communication))
            if s.communication
            else (),
        ),
        _checkpoints_section(s, report),
        cost_section(s),
        Section(title="Samples", blocks=(Quote(texts=s.samples[:8]),) if s.samples else ()),
        Section(title="Warnings of the plan", blocks=_item_blocks(report.reasons) if report is not None else ()),
        damage_section(s, most_rows),
    ]
    return [section for section in sections if section.blocks]


def wall_seconds(s: Summary) -> float | None:
    """Return the wall time of the run by its ledger, without pauses between launches and clock jumps."""
    return s.ledger.wall_s if s.ledger is not None and s.ledger.wall_s else s.wall_s


# ---- prediction and measurement --------------------------------------------------------------------------------------


CPU_MEMORY = (
    "Memory on a CPU: predicted are the job's tensors and a fixed allowance for buffers; measured is the growth of the "
    "process, with freed memory that the C allocator keeps."
)


def _measured_section(s: Summary) -> Section:
    title = "Prediction and measurement"
    if s.step_s.measured is None:
        return Section(title=title, blocks=(Paragraph(text="No step was finished."),))
    step = _seconds_text(s.step_s.measured) + (f" (p90 {format_seconds(s.step_s_p90)})" if s.step_s_p90 else "")
    guess = _seconds_text(s.step_s.predicted)
    if s.step_s_low and s.step_s_high:
        guess += f" ({format_seconds(s.step_s_low)} to {format_seconds(s.step_s_high)})"
    rows: list[tuple[Cell, ...]] = [("step", guess, step, _error_text(s.step_s))]
    kinds: tuple[tuple[str, Pair, Callable[[float | None], str]], ...] = (
        ("tokens/s", s.tokens_per_s, _count_text),
        ("MFU", s.mfu, _share_text),
        ("memory of the fullest rank", s.memory_bytes, _bytes_text),
        ("training", s.training_s, _seconds_text),
        ("recovery from a failure", s.recovery_s, _seconds_text),
        ("effective training time", s.effective_time, _share_text),
    )
    for name, pair, show in kinds:
        if pair.measured is not None:
            rows.append((name, show(pair.predicted), show(pair.measured), _error_text(pair)))
    if s.first_step_s is not None:
        rows.append(("first step", "", f"{format_seconds(s.first_step_s)} after the launch", ""))
    head = ("", "predicted", "measured", "difference")
    table = Table(head=head, rows=tuple(rows), right=(1, 2, 3))
    if s.device_family == "cpu" and s.memory_bytes.measured is not None:
        return Section(title=title, blocks=(table, Paragraph(text=CPU_MEMORY)))
    return Section(title=title, blocks=(table,))


def _layouts_section(s: Summary) -> Section:
    """Return the layouts of a run that changed its layout, each with its own prediction."""
    title = "Layouts"
    if len(s.layouts) < 2:
        return Section(title=title, blocks=())
    newest = s.layouts[-1]
    caption = (
        f"Predicted → measured, each over its own steps. The table above is of the newest layout, "
        f"steps {newest.first_step + 1:,} to {newest.last_step + 1:,}."
    )
    head = ("steps", "ranks", "layout", "step", "tokens/s", "MFU", "memory")
    rows = tuple(_layout_row(layout_result) for layout_result in s.layouts)
    return Section(title=title, blocks=(Table(head=head, rows=rows, right=(1,)), Paragraph(text=caption)))


def _layout_row(one: LayoutResult) -> tuple[Cell, ...]:
    steps = f"{one.first_step + 1:,} to {one.last_step + 1:,}"
    name = one.layout if one.planned else f"{one.layout}, not planned"
    pairs = (
        (one.step_s, _seconds_text),
        (one.tokens_per_s, _count_text),
        (one.mfu, _share_text),
        (one.memory_bytes, _bytes_text),
    )
    return (steps, f"{one.world:,}", name, *(f"{show(pair.predicted)} → {show(pair.measured)}" for pair, show in pairs))


def _learning_section(s: Summary) -> Section:
    lines = []
    if s.first_loss is not None and s.last_loss is not None:
        lines.append(f"training loss {s.first_loss:.4f} → {s.last_loss:.4f} nats per token")
    if s.evaluation is not None:
        e = s.evaluation
        parts = [f"{e.loss:.4f} nats per token"] if e.loss is not None else []
        parts += [f"{e.bits_per_byte:.3f} bits per byte"] if e.bits_per_byte is not None else []
        lines += [f"held-out text {', '.join(parts)} at step {e.step:,}"] if parts else []
        baseline_values = (("unigram", e.unigram_bits_per_byte), ("bigram", e.bigram_bits_per_byte))
        baselines = [f"{name} {value:.3f}" for name, value in baseline_values if value is not None]
        lines += [f"baselines {', '.join(baselines)} bits per byte on the same text"] if baselines else []
    if s.noise_scale is not None:
        lines.append(f"gradient noise scale {format_count(s.noise_scale)} samples: a batch far above it wastes tokens")
    if s.skipped_steps:
        lines.append(f"skipped {plural(s.skipped_steps, 'step')} whose gradient was not finite")
    if s.zero_gradient_steps:
        count = plural(s.zero_gradient_steps, "step")
        lines.append(f"took {count} with a gradient norm of exactly 0, which learn nothing: the state may be damaged")
    return Section(title="Learning", blocks=_item_blocks(lines))


# ---- time ------------------------------------------------------------------------------------------------------------


def spent_on(ledger: Ledger) -> list[tuple[str, float, float]]:
    """Return the accounts that took 0.05 % of the time or more: name, seconds, share; largest first."""
    spent = [(ACCOUNT_LABELS[name], took_s) for name, took_s in asdict(ledger.accounts).items()]
    shares = [(name, took_s, took_s / ledger.wall_s) for name, took_s in spent if ledger.wall_s]
    return sorted((account for account in shares if account[2] >= 0.0005), key=lambda account: -account[1])


def time_section(s: Summary) -> Section:
    """Return the section of the ledger: every second in one account, largest first."""
    title, ledger = "Where the time went", s.ledger
    if ledger is None or not ledger.wall_s:
        return Section(title=title, blocks=())
    spent = spent_on(ledger)
    rows: list[tuple[Cell, ...]] = [
        (ColourKey(name=name), format_seconds(took_s), f"{share:.1%}", Bar(parts=((name, share),), whole=1.0))
        for name, took_s, share in spent
    ]
    wall = format_seconds(ledger.wall_s)
    caption = f"Effective training time: {ledger.effective:.1%} of {wall}, in steps that stayed, without compiling."
    caption += f" The parts do not add up: {ledger.gap}." if ledger.gap else " The parts add up to the wall clock."
    caption += f" But {ledger.jumped}." if ledger.jumped else ""
    caption += f" {plural(ledger.steps_lost, 'step')} done and undone." if ledger.steps_lost else ""
    brief = [BriefLine(label="time", text="  ".join(f"{name} {share:.1%}" for name, _, share in spent[:8]))]
    if ledger.gap:
        brief.append(BriefLine(label="", text=f"the parts do not add up: {ledger.gap}", is_alarm=True))
    table = Table(head=("spent on", "time", "share", ""), rows=tuple(rows), right=(1, 2))
    stack = Stack(parts=tuple((name, took_s) for name, took_s, _ in spent))
    return Section(title=title, blocks=(stack, table, Paragraph(text=caption)), brief=tuple(brief))


# ---- ranks -----------------------------------------------------------------------------------------------------------


def _ranks_section(s: Summary, report: RunReport | None, most_rows: int) -> Section:
    timed_ranks = [rank_time for rank_time in s.ranks if rank_time.compute_s is not None]
    if not timed_ranks:
        return Section(title="Ranks", blocks=())
    score = report.scores.score if report is not None else {}
    slowest = sorted(
        timed_ranks,
        key=lambda rank_time: (-score.get(rank_time.rank, 0.0), -(rank_time.compute_s or 0.0), rank_time.rank),
    )[:most_rows]
    shown = sorted(slowest, key=lambda rank_time: rank_time.rank)
    most = max((rank_time.compute_s or 0.0) + (rank_time.wait_s or 0.0) for rank_time in timed_ranks) or 1.0
    head = ["rank", "place", "", "compute", "not computing", "share", "sent", "memory", "score"]
    rows = [
        [*_rank_cells(rank_time, most), f"{score[rank_time.rank]:.2f}" if rank_time.rank in score else UNKNOWN]
        for rank_time in shown
    ]
    absent = [8] if report is None else []
    # Sent bytes are counted only where gradients are compressed.
    absent += [6] if all(rank_time.bytes_sent is None for rank_time in shown) else []
    columns = [column for column in range(len(head)) if column not in absent]
    slow = {straggler.rank for straggler in s.stragglers}
    table = Table(
        head=tuple(head[column] for column in columns),
        rows=tuple(tuple(row[column] for column in columns) for row in rows),
        right=(0, *range(3, len(columns))),
        alarms=frozenset(number for number, rank_time in enumerate(shown) if rank_time.rank in slow),
    )
    caption = "Means per step. Not computing: waiting for other ranks, stages, transfers or a core."
    caption += (
        " The score is a rank’s own time over the median of the ranks with the same work, in the last 100 steps."
        if report is not None
        else ""
    )
    caption += (
        f" The {len(shown)} slowest of {plural(len(timed_ranks), 'rank')}." if len(timed_ranks) > len(shown) else ""
    )
    lines = [f"straggler: {straggler.text}; the others wait for it" for straggler in s.stragglers[:MOST_ROWS]]
    if not lines and len(timed_ranks) > 1:
        lines = ["no rank stands out: the work is balanced"]
    return Section(
        title="Ranks", blocks=(*_item_blocks([*lines, *_imbalance_lines(s)]), table, Paragraph(text=caption))
    )


def _rank_cells(one: RankTime, most: float) -> list[Cell]:
    compute, wait = one.compute_s or 0.0, one.wait_s or 0.0
    share = f"{wait / (wait + compute):.0%}" if one.wait_s is not None and wait + compute > 0 else UNKNOWN
    bar = Bar(parts=(("compute", compute), ("wait", wait)), whole=most)
    cells = (
        _seconds_text(one.compute_s),
        _seconds_text(one.wait_s),
        share,
        _bytes_text(one.bytes_sent),
        _bytes_text(one.memory_bytes),
    )
    return [str(one.rank), one.place or "only rank", bar, *cells]


def _imbalance_lines(s: Summary) -> list[str]:
    """Describe the load imbalance of pipeline stages and of experts."""
    lines = []
    if s.stage_compute_s:
        slowest = max(s.stage_compute_s) / statistics.fmean(s.stage_compute_s) - 1.0
        number = s.stage_compute_s.index(max(s.stage_compute_s))
        lines.append(f"stages: the slowest, {number}, computes {slowest:.0%} longer than the mean of all")
    if s.expert_imbalance is not None:
        lines.append(f"experts: the busiest gets {s.expert_imbalance:.2f} times the mean")
    return lines


# ---- failures, checkpoints, cost, damage -----------------------------------------------------------------------------


def incident_section(s: Summary, most_rows: int = MOST_ROWS) -> Section:
    """Return the section of failures and recoveries."""
    title = "Incidents"
    if not s.incidents:
        return Section(title=title, blocks=())
    shown, rows = s.incidents[-most_rows:], []
    for incident in shown:
        went = f"{plural(incident.world, 'rank')}, from {incident.source}" if incident.world else "run ended"
        back = f"{incident.restored_step:,}" if incident.restored_step is not None else UNKNOWN
        where = f"rank {incident.rank} on {incident.host}"
        rows.append((f"{incident.step:,}", where, incident.what, went, back, _seconds_text(incident.recovery_s)))
    head = ("step", "where", "what", "continued with", "back to step", "next step after")
    lines = [f"step {incident.step:,}: {incident.finding}" for incident in shown if incident.finding]
    lines += [f"the last {len(shown)} of {len(s.incidents):,}"] if len(s.incidents) > len(shown) else []
    last = s.incidents[-1]
    took = f", next step after {format_seconds(last.recovery_s)}" if last.recovery_s is not None else ""
    brief = f"{len(s.incidents):,}; step {last.step:,}: rank {last.rank} on {last.host}: {last.what}{took}"
    return Section(
        title=title,
        blocks=(Table(head=head, rows=tuple(rows), right=(0, 4, 5)), *_item_blocks(lines)),
        brief=(BriefLine(label="incidents", text=brief),),
    )


def _checkpoints_section(s: Summary, report: RunReport | None) -> Section:
    blocks: list[Block] = []
    saved = report.saved if report is not None else ()
    if saved:
        rows = tuple(
            (f"{checkpoint.step:,}", _seconds_text(checkpoint.blocked_s), _seconds_text(checkpoint.seconds),
             _bytes_text(checkpoint.size_bytes), f"not saved: {checkpoint.error}" if checkpoint.error else "")
            for checkpoint in saved[-12:]
        )  # fmt: skip
        sized = [checkpoint.is_whole for checkpoint in saved[-12:] if checkpoint.size_bytes is not None]
        size_head = "size" if all(sized) else "size of rank 0’s shards"
        head = ("step", "training waited", "written in", size_head, "")
        blocks.append(Table(head=head, rows=rows, right=(0, 1, 2, 3)))
    lines = [f"the last 12 of {len(saved):,}"] if len(saved) > 12 else []
    if s.checkpoints:
        size = f"{format_bytes(s.checkpoint_bytes)} of rank 0" if s.checkpoint_bytes else ""
        # Not recorded before 0.7.
        size = f"{format_bytes(s.checkpoint_total_bytes)}" if s.checkpoint_total_bytes else size
        took = f"written in {format_seconds(s.checkpoint_s)}" if s.checkpoint_s else ""
        steps = ", ".join(f"{step:,}" for step in s.checkpoints[-8:])
        each = ", ".join(fact for fact in (size, took) if fact)
        each = f"; each {each}" if each else ""
        lines.append(f"on disk: step{'s' if len(s.checkpoints) > 1 else ''} {steps}{each}")
    return Section(title="Checkpoints", blocks=(*blocks, *_item_blocks(lines)))


def cost_rows(cost: Cost) -> list[tuple[str, str, str, str]]:
    """Return name, so far, projected and predicted cost as texts; only rows with at least one known value."""
    kinds: tuple[tuple[str, str, Callable[[float], str]], ...] = (
        ("money", "usd", format_money),
        ("energy", "energy_j", format_energy),
        ("carbon", "kgco2e", format_carbon),
    )
    rows = []
    for name, key, show in kinds:
        values = [getattr(amount, key) for amount in (cost.so_far, cost.projected, cost.predicted)]
        if any(value is not None for value in values):
            cells = [show(value) if value is not None else UNKNOWN for value in values]
            rows.append((name, cells[0], cells[1], cells[2]))
    return rows


def cost_section(s: Summary) -> Section:
    """Return the section of money, energy and carbon: so far, at the end, as planned."""
    title = "Cost, energy and carbon"
    rows = cost_rows(s.cost) if s.cost is not None else []
    if s.cost is None or not rows:
        return Section(title=title, blocks=())
    table = Table(head=("", "so far", "at the end", "planned"), rows=tuple(rows), right=(1, 2, 3))
    caption = tuple(f"{SOURCE_NAMES.get(name, name)}: {source}" for name, source in s.cost.sources.items())
    brief = [BriefLine(label=row[0], text=f"{row[1]} so far, {row[2]} at the end, planned {row[3]}") for row in rows]
    return Section(title=title, blocks=(table, Items(texts=caption, quiet=True)), brief=tuple(brief))


def damage_section(s: Summary, most_rows: int = MOST_ROWS) -> Section:
    """Return the section of damage: the parts of the record that cannot be read."""
    rows = tuple(
        (printable(problem.where), printable(problem.what), f"{problem.count:,}") for problem in s.damage[:most_rows]
    )
    blocks: tuple[Block, ...] = (Table(head=("where", "what", "count"), rows=rows, right=(2,)),) if rows else ()
    if s.unreadable_lines:
        blocks += _item_blocks([f"{plural(s.unreadable_lines, 'line')} of events could not be read"])
    brief = [BriefLine(label="damaged", text=f"{row[0]}: {row[1]} ({row[2]})", is_alarm=True) for row in rows[:3]]
    return Section(title="Damage to the record", blocks=blocks, brief=tuple(brief))


def _item_blocks(texts: Iterable[str]) -> tuple[Block, ...]:
    items = tuple(texts)
    return (Items(texts=items),) if items else ()


def _error_text(pair: Pair) -> str:
    return f"{pair.error:+.1%}" if pair.error is not None else ""


def _seconds_text(value: float | None) -> str:
    return format_seconds(value) if value is not None else UNKNOWN


def _bytes_text(value: float | None) -> str:
    return format_bytes(value) if value is not None else UNKNOWN


def _count_text(value: float | None) -> str:
    return format_count(value) if value is not None else UNKNOWN


def _share_text(value: float | None) -> str:
    return f"{value:.1%}" if value is not None else UNKNOWN
