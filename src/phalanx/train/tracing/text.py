"""A trace as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.train.tracing.against import Line, TracedFit
from phalanx.train.tracing.log import RankTrace, rows
from phalanx.train.tracing.meter import PARTS
from phalanx.units import format_bytes, format_count, format_seconds


def render_rank(trace: RankTrace) -> str:
    """One rank: messages, FLOPs, memory."""
    place = ", ".join(f"{axis} {index} of {size}" for axis, (index, size) in trace.place.items() if size > 1)
    layers = _ranges(trace.layers)
    lines = [
        f"rank {trace.rank}" + (f" ({place})" if place else "") + f": layers {layers}",
        *_messages(trace),
        *_flops(trace),
        *_memory(trace),
        f"  traced in {format_seconds(trace.seconds)} with {format_bytes(trace.rss_bytes)} of this machine's memory",
    ]
    return "\n".join(lines)


def render_short(trace: RankTrace) -> str:
    """One line, for a table of ranks."""
    sent = sum(operation.sent_bytes for operation in trace.operations)
    return (
        f"  {trace.rank:>8,}  {_ranges(trace.stages):<14}{len(trace.layers):>7}{len(trace.operations):>12,}"
        f"{format_bytes(sent):>10}{_pflop(trace.total_flops):>12}{format_bytes(trace.peak.nbytes):>10}"
        f"  {trace.peak.phase:<10}{format_seconds(trace.seconds):>8}"
    )


SHORT_HEAD = (
    f"  {'rank':>8}  {'stages':<14}{'layers':>7}{'operations':>12}{'sent':>10}{'FLOPs':>12}{'peak':>10}"
    f"  {'in':<10}{'traced':>8}"
)


def render_against(lines: Sequence[Line]) -> str:
    """The comparison with the plan, a mark where it is out of its limit."""
    head = f"  {'':<15}{'':<24}{'plan':>12}{'trace':>12}{'difference':>12}"
    body = []
    for line in lines:
        show = format_count if line.kind == "FLOPs" else format_bytes
        word = "within" if line.agrees else "more than"
        mark = f"  {word} {line.limit:.0%}" if line.limit else ""
        body.append(
            f"  {line.kind:<15}{line.name:<24}{show(line.planned):>12}{show(line.traced):>12}"
            f"{line.difference:>+12.1%}{mark}"
        )
    return "\n".join(["AGAINST THE PLAN", head, *body])


def render_fit(fit: TracedFit, *, recompute: str) -> str:
    """Whether the traced step fits; where it does not, what would make it."""
    need = (
        f"{format_bytes(fit.traced_bytes)} traced and {format_bytes(fit.buffers_bytes)} of buffers, of "
        f"{format_bytes(fit.usable_bytes)} usable"
    )
    if fit.fits:
        return f"FITS: {need}"
    more = {"none": 'parallel.recompute = "selective", ', "selective": 'parallel.recompute = "full", '}.get(
        recompute, ""
    )
    return (
        f"DOES NOT FIT: {need}\n  the step would end out of memory\n"
        f'  try {more}a smaller batch.micro, parallel.offload = "optimizer" or more devices, and trace again'
    )


def _messages(trace: RankTrace) -> list[str]:
    table = rows(trace)
    if not table:
        return ["", "  MESSAGES  none: one rank"]
    head = (
        f"  {'axis':<12}{'ranks':>7}{'stride':>8}  {'operation':<16}{'phase':<11}{'calls':>8}"
        f"{'payload':>11}{'sent':>11}"
    )
    body = [
        f"  {row.axis:<12}{row.ranks:>7,}{row.stride:>8,}  {row.kind:<16}{row.phase:<11}{row.calls:>8,}"
        f"{format_bytes(row.nbytes):>11}{format_bytes(row.sent_bytes):>11}"
        for row in table
    ]
    total = sum(row.sent_bytes for row in table)
    last = f"  {'all':<12}{'':>15}  {'':<27}{len(trace.operations):>8,}{'':>11}{format_bytes(total):>11}"
    return ["", "MESSAGES PER STEP", head, *body, last]


def _flops(trace: RankTrace) -> list[str]:
    body = [
        f"  {phase:<12}" + "".join(f"{kind} {_pflop(count):<16}" for kind, count in kinds.items())
        for phase, kinds in trace.flops.items()
        if any(kinds.values())
    ]
    return ["", "FLOPS PER STEP", *body, f"  {'all':<12}{_pflop(trace.total_flops)}"]


def _memory(trace: RankTrace) -> list[str]:
    peak = trace.peak
    body = [
        f"  {part:<13}{format_bytes(peak.parts_bytes[part]):>10}{peak.parts_bytes[part] / peak.nbytes:>8.1%}"
        for part in PARTS
        if peak.parts_bytes.get(part)
    ]
    notes = f"  between steps {format_bytes(peak.rest_bytes)}"
    if peak.host_bytes:
        notes += f"; on the host {format_bytes(peak.host_bytes)}"
    return ["", f"PEAK MEMORY, in {peak.phase}", *body, f"  {'peak':<13}{format_bytes(peak.nbytes):>10}", notes]


def _pflop(value: float) -> str:
    for suffix, scale in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)):
        if value >= scale:
            return f"{value / scale:.2f} {suffix}"
    return f"{value / 1e6:.2f} MFLOP"


def _ranges(numbers: Sequence[int]) -> str:
    """0-3, 16-19"""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)
