"""From all legal layouts to the best one, the Pareto set, and the best of each other idea."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from phalanx.errors import Problem
from phalanx.plan.cases import OFFLOAD, RECOMPUTE, SCHEDULES
from phalanx.plan.impossible import no_fit, no_layout
from phalanx.plan.layout import Layout
from phalanx.plan.request import UNSPLIT_OWN, PlanRequest
from phalanx.plan.score import LayoutScores, join_scores, least_seconds, score_layouts
from phalanx.plan.space import DOMAIN, GIVEN, Bools, Ints, build_space
from phalanx.plan.trainer_memory import MEMORY_ERROR
from phalanx.units import format_seconds

# Layouts within 2 % of the fastest are equal and the simplest is taken: the cost model misses published steps by 4.8 %
# (mean over 13 sources of the median error, phalanx backtest, 2026-11-15), so a lead of 2 % on paper is no evidence.
SAME = 1.02
# A simpler layout may fill this much of the usable memory, or as much as the fastest does: memory is off by 5.7 %
# (median, the same run), and a plan that runs out of it is not simple.
SAFE_MEMORY = 0.9
# A layout that would not fit if it took 6 % more than was counted, as far as `phalanx trace` may find it, is not taken
# while any other is left: a plan without the warning of `_crowded_memory` fits whenever its trace agrees with it.
FULL_MEMORY = 1.0 / (1.0 + MEMORY_ERROR)
ROOMIER = 1.03  # among those within 3 % of the fastest the simplest with room is taken
# Where nothing has so much room, one that fills more than this share of the device itself is not taken while anything
# slower does not: the training specification calls it an error (MEM001).
DEVICE_MEMORY = 0.90
# A plan without such room is replaced by one with offload that is at most this many times as slow: `phalanx trace` may
# still find that it fits, and the warning says so.
OFFLOAD_FOR_ROOM = 1.25
NO_ROOM = f"no layout here leaves {1 - SAFE_MEMORY:.0%} free: use more devices, or try a short run first"
DECIDES = "phalanx trace JOB --against-plan decides"
SMALLER = (2, 4)  # parts of the cluster that are tried as well: slower, but often cheaper per token
SMALLER_MICRO_BATCH = 8  # largest micro-batch tried there: those parts only sketch the front
CLEARLY_BETTER = 1.05  # a free search this much faster than a layout fixed by hand is worth a warning
PARETO_STEP = 0.9  # a point that saves less than 10 % of memory over its faster neighbour is left out
PARETO_SLOWEST = 1.5  # nor is anyone served by a layout half as slow again as the best on the same devices


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A layout with the two numbers it is judged by; `idea` says what it stands for."""

    layout: Layout
    step_s: float
    memory_bytes: float
    fits: bool
    idea: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """What a search found: `best` is the simplest of those as good as the fastest; `others` are other ideas."""

    best: Candidate
    fastest: Candidate
    others: tuple[Candidate, ...]
    pareto: tuple[Candidate, ...]
    legal: int
    fitting: int
    warnings: tuple[Problem, ...]


def search_layouts(request: PlanRequest) -> SearchResult:
    """Score every legal layout. Raises UserError when there is none or none fits."""
    scores, warnings = _first_that_fits(request)
    best = _best_row(scores)
    everything = _unfixed_scores(request) if any(name != "compression" for name in request.fixed) else scores
    warnings += (
        *_crowded_memory(request, scores, best, everything),
        *_better_if_free(request, scores, best, everything),
    )
    legal, fitting = scores.legal, int(scores.fits.sum())
    if everything is not scores:
        legal, fitting = legal + everything.legal, fitting + int(everything.fits.sum())
    return SearchResult(
        best=_make_candidate(scores, best),
        fastest=_make_candidate(scores, _fastest_row(scores, np.flatnonzero(scores.fits))),
        others=_other_ideas(everything, scores.layout(best)),
        pareto=_pareto_layouts(request, scores),
        legal=legal,
        fitting=fitting,
        warnings=warnings,
    )


def _first_that_fits(request: PlanRequest) -> tuple[LayoutScores, tuple[Problem, ...]]:
    """Layouts with and without offload; when nothing in them fits, tensor groups wider than a fast domain."""
    plain, scores = _with_savings(request)
    if scores.fits.any():
        return scores, _offload_pays(request, plain, scores)
    where = request.cluster.name
    wide = score_layouts(build_space(request, offload=request.offload_kinds, widest_tensor=request.cluster.devices))
    if wide.fits.any():
        what = (
            f"nothing fits unless tensor groups reach beyond the {request.cluster.domain_devices} devices of a domain"
        )
        return wide, (Problem(where=where, what=what, fix="more devices allow a deeper pipeline instead"),)
    if not wide.legal:
        raise no_layout(request)
    raise no_fit(request, wide)


def _with_savings(request: PlanRequest) -> tuple[LayoutScores, LayoutScores]:
    """The scores of layouts that spend no time to save memory outside of a rank, and with those that do and may win.

    Offload, and ZeRO-2 over several micro-batches, slow a layout down: they pay only where memory stands in the way of
    a faster one, and nothing else is priced so.
    """
    kinds = (str(request.fixed["offload"]),) if "offload" in request.fixed else request.offload_kinds
    space = build_space(request, offload=kinds)
    plain = score_layouts(space.part(kinds[0], zero2="whole"))
    limit_s = np.inf
    if plain.fits.any():
        best = _best_row(plain)
        filled = float(plain.memory_bytes[best])
        # A plan that MEM001 calls an error gives way to any that fits, however slow.
        if filled <= max(FULL_MEMORY * plain.usable_bytes, _device_bytes(request)):
            has_room = filled <= FULL_MEMORY * plain.usable_bytes
            limit_s = float(plain.step_s[best]) * (1.0 if has_room else OFFLOAD_FOR_ROOM)
    rows = least_seconds(space.part(kinds[0])) < limit_s
    if not rows.any():
        return plain, plain
    parts = [space.part(kind, rows) for kind in kinds[1:]]
    if "zero" not in request.fixed:
        parts.append(space.part(kinds[0], rows, zero2="repeated"))
    others = [score_layouts(part, memory_cutoff=1.0) for part in parts if part.product.size]
    return plain, join_scores(plain, others, limit_s=limit_s)


def _offload_pays(request: PlanRequest, plain: LayoutScores, scores: LayoutScores) -> tuple[Problem, ...]:
    """A plan that keeps something in host memory, and what it would be without."""
    best = _best_row(scores)
    layout = scores.layout(best)
    if layout.offload == "none" or "offload" in request.fixed:
        return ()
    kept = {"optimizer": "the optimizer"}.get(layout.offload, layout.offload)
    if not plain.fits.any():
        what = f"nothing fits in device memory without keeping {kept} in host memory"
        return (Problem(where=request.cluster.name, what=what, fix="more devices would make offload unnecessary"),)
    row = _best_row(plain)
    return (
        Problem(
            where=request.cluster.name,
            what=f"the plan keeps {kept} in host memory: {format_seconds(float(scores.step_s[best]))} per step against "
            f"{format_seconds(float(plain.step_s[row]))} of {plain.layout(row).name}",
            fix='set parallel.offload = "none" to plan without it',
        ),
    )


def _fastest_row(scores: LayoutScores, rows: Ints) -> int:
    """The fastest of some rows; of equals the one with the least memory."""
    seconds = scores.step_s[rows]
    least = seconds.min()
    near = rows[seconds <= least + 2e-9]  # sorting or rounding a million rows to read one would double the search
    first = near[scores.step_s[near].round(9) == least.round(9)]
    return int(first[np.argmin(scores.memory_bytes[first])])


def _best_row(scores: LayoutScores) -> int:
    """The simplest of the rows that fit and are as fast as the fastest."""
    return _simplest_row(scores, np.flatnonzero(scores.fits))


def _simplest_row(scores: LayoutScores, rows: Ints) -> int:
    """The simplest of the rows that are as fast as the fastest of them, within what the model can tell apart."""
    near = _as_good(scores, rows)
    keys = (*layout_complexity(scores, near), scores.step_s[near].round(9), scores.memory_bytes[near])
    return int(near[np.lexsort(keys[::-1])[0]])


def _as_good(scores: LayoutScores, rows: Ints) -> Ints:
    """The rows as fast as the fastest that leave memory free; the fastest and those as full if none does."""
    fastest = _fastest_row(scores, rows)
    full, filled = FULL_MEMORY * scores.usable_bytes, float(scores.memory_bytes[fastest])
    room = max(SAFE_MEMORY * scores.usable_bytes, min(filled, full))
    quick = rows[scores.step_s[rows] <= scores.step_s[fastest] * max(SAME, ROOMIER)]
    for slack, most_bytes in ((SAME, room), (ROOMIER, full)):
        enough = scores.step_s[quick] <= scores.step_s[fastest] * slack
        near: Ints = quick[enough & (scores.memory_bytes[quick] <= most_bytes)]
        if near.size:
            return near
    device = _device_bytes(scores.space.request)
    for most_bytes in (min(full, device), device, filled):
        held = rows[scores.memory_bytes[rows] <= most_bytes]
        if held.size:
            break
    near = held[scores.step_s[held] <= scores.step_s[_fastest_row(scores, held)] * SAME]
    return near


def _device_bytes(request: PlanRequest) -> float:
    """The most that a plan fills of a device while anything that needs less fits."""
    return DEVICE_MEMORY * request.cluster.accelerator.memory_bytes


def layout_complexity(scores: LayoutScores, rows: Ints) -> tuple[Ints, ...]:
    """How much machinery layouts need, most important first: offload, stages, axes, schedule, context size, the rest.

    Offload comes first: its times rest on assumptions about hosts. Then stages: each adds a place where the model is
    cut, and a rank that waits for its neighbours.
    """

    def column(name: str) -> Ints:
        return scores.column(name, rows)

    axes = sum((column(name) > 1).astype(np.int64) for name in ("tp", "cp", "pp", "ep"))
    staged = column("pp") > 1
    odd_schedule = staged & np.isin(column("schedule"), [SCHEDULES.index(name) for name in ("gpipe", "zero-bubble")])
    schedule = (odd_schedule | (column("vpp") > 1)).astype(np.int64)
    unusual = (column("zero") >= 2, np.isin(column("group"), (DOMAIN, GIVEN)), column("compression") > 0)
    rest = sum(one.astype(np.int64) for one in unusual)
    return column("offload"), column("pp"), np.asarray(axes), schedule, column("cp"), np.asarray(rest)


def _make_candidate(scores: LayoutScores, row: int, idea: str = "") -> Candidate:
    return Candidate(
        layout=scores.layout(row),
        step_s=float(scores.step_s[row]),
        memory_bytes=float(scores.memory_bytes[row]),
        fits=bool(scores.fits[row]),
        idea=idea,
    )


FASTEST = "fastest on paper"
Idea = Callable[[LayoutScores, Layout], Bools]

# What a person would ask "why not ...?" about.
IDEAS: dict[str, Idea] = {
    "another tensor size": lambda s, best: s.column("tp") != best.tensor,
    "another pipeline depth": lambda s, best: s.column("pp") != best.pipeline,
    "another context size": lambda s, best: s.column("cp") != best.context,
    "another expert size": lambda s, best: s.column("ep") != best.expert,
    "another ZeRO stage": lambda s, best: s.column("zero") != best.zero,
    "another recompute": lambda s, best: s.column("recompute") != RECOMPUTE.index(best.recompute),
    "another micro-batch": lambda s, best: s.column("micro_batch") != best.micro_batch,
    "pure FSDP": lambda s, best: (
        (s.column("zero") == 3) & (s.column("tp") == 1) & (s.column("pp") == 1) & (s.column("cp") == 1)
    ),
    "no model parallelism": lambda s, best: (s.column("tp") == 1) & (s.column("pp") == 1) & (s.column("cp") == 1),
}


def _other_ideas(scores: LayoutScores, best: Layout) -> tuple[Candidate, ...]:
    found: dict[Layout, Candidate] = {}
    fits = scores.fits
    if fits.any():
        _add_candidate(found, _make_candidate(scores, _fastest_row(scores, np.flatnonzero(fits)), FASTEST), best)
    for idea, mask in IDEAS.items():
        rows = np.flatnonzero(fits & mask(scores, best))
        if rows.size:
            _add_candidate(found, _make_candidate(scores, _simplest_row(scores, rows), idea), best)
    limit = np.min(scores.step_s, where=fits, initial=np.inf)
    unfit = np.where(fits, np.inf, scores.step_s)
    cheaper = {"no recompute": scores.column("recompute") == 0, "if memory were larger": np.ones_like(fits)}
    for idea, wanted in cheaper.items():
        row = _least_row(unfit, wanted & (scores.column("offload") == OFFLOAD.index(best.offload)))
        if row is not None and scores.step_s[row] < limit:
            _add_candidate(found, _make_candidate(scores, row, idea), best)
    return tuple(sorted(found.values(), key=lambda one: (not one.fits, one.step_s)))


def _least_row(values: np.ndarray[tuple[int], np.dtype[np.float64]], mask: Bools) -> int | None:
    rows = np.flatnonzero(mask & np.isfinite(values))
    return int(rows[values[rows].argmin()]) if rows.size else None


def _add_candidate(found: dict[Layout, Candidate], one: Candidate, best: Layout) -> None:
    if one.layout == best:
        return
    known = found.get(one.layout)
    if known is None:
        found[one.layout] = one
    elif known.idea != FASTEST:
        found[one.layout] = replace(known, idea=f"{known.idea}, {one.idea}")


def _pareto_layouts(request: PlanRequest, scores: LayoutScores) -> tuple[Candidate, ...]:
    """Layouts that nothing beats in time, money and memory at once; smaller parts of the cluster take part."""
    found = _time_memory_front(scores)
    # Where the whole cluster needs no offload, a smaller part that does is slower and no cheaper.
    offload = tuple(sorted({"none", found[0].layout.offload}, key=OFFLOAD.index)) if found else ("none",)
    for part in SMALLER:
        domains = request.cluster.domains // part
        if domains < 1 or request.cluster.domains % part:
            break
        devices = domains * request.cluster.domain_devices
        space = build_space(request, devices=devices, offload=offload, most_micro=SMALLER_MICRO_BATCH)
        found += _time_memory_front(score_layouts(space, memory_cutoff=1.0))
    return tuple(one for one in found if not any(_dominates_other(other, one) for other in found))


def _time_memory_front(scores: LayoutScores) -> list[Candidate]:
    """The front over time and memory of one device count (there money is time), thinned to visible differences.

    The simplest of the fastest is on it too, unless the fastest also needs less memory.
    """
    fits = scores.fits
    fastest = np.min(scores.step_s, where=fits, initial=np.inf)
    rows = np.flatnonzero(fits & (scores.step_s <= PARETO_SLOWEST * fastest))
    rows = rows[np.lexsort((scores.memory_bytes[rows], scores.step_s[rows]))]
    if not rows.size:
        return []
    kept = [_fastest_row(scores, rows)]
    least = np.minimum.accumulate(scores.memory_bytes[rows])
    for row in rows[scores.memory_bytes[rows] <= least]:
        if scores.memory_bytes[row] < PARETO_STEP * scores.memory_bytes[kept[-1]]:
            kept.append(int(row))
    best = _best_row(scores)
    return [_make_candidate(scores, row) for row in sorted({best, *kept}, key=lambda row: float(scores.step_s[row]))]


def _dominates_other(a: Candidate, b: Candidate) -> bool:
    ours = (a.step_s, a.step_s * a.layout.devices, a.memory_bytes)
    theirs = (b.step_s, b.step_s * b.layout.devices, b.memory_bytes)
    return ours != theirs and all(x <= y for x, y in zip(ours, theirs, strict=True))


def _unfixed_scores(request: PlanRequest) -> LayoutScores:
    """The space as if the job fixed nothing but what is not its choice.

    Gradient compression changes the arithmetic; a network of the user's own is not split along every axis.
    """
    needed = ("compression", *(UNSPLIT_OWN if request.model.module else ()))
    kept = {name: value for name, value in request.fixed.items() if name in needed}
    return _with_savings(replace(request, fixed=kept))[1]


def _crowded_memory(
    request: PlanRequest, scores: LayoutScores, best: int, everything: LayoutScores
) -> tuple[Problem, ...]:
    """A plan closer to the end of memory than memory can be predicted, and the next layout with room."""
    step_s, headroom = float(scores.step_s[best]), 1.0 - float(scores.memory_bytes[best]) / scores.usable_bytes
    if headroom >= 1.0 - FULL_MEMORY:
        return ()
    counted = bool(np.any(np.asarray(request.memory.counted) > 0))  # our own trainer, whose step can be traced
    why = (
        f"the step may take up to {MEMORY_ERROR:.0%} more than is counted, so it may not fit: {DECIDES}"
        if counted
        else "predicted memory is off by 5.7% (median over published runs), so it may not fit"
    )
    return (
        Problem(
            where=request.cluster.name,
            what=f"{scores.layout(best).name} leaves {headroom:.1%} of the usable memory free",
            why=why,
            fix=_roomy_layout(scores, step_s) or _roomy_layout(everything, step_s) or NO_ROOM,
        ),
    )


def _roomy_layout(scores: LayoutScores, than_s: float) -> str:
    """The best layout that leaves memory free, and its step against `than_s`; empty where there is none."""
    rows = np.flatnonzero(scores.memory_bytes <= SAFE_MEMORY * scores.usable_bytes)
    if not rows.size:
        return ""
    row = _simplest_row(scores, rows)
    step_s, room = float(scores.step_s[row]), 1.0 - float(scores.memory_bytes[row]) / scores.usable_bytes
    return (
        f"{scores.layout(row).name} leaves {room:.1%} free and takes {format_seconds(step_s)} per step "
        f"({step_s / than_s - 1:+.1%})"
    )


def _better_if_free(
    request: PlanRequest, scores: LayoutScores, best: int, everything: LayoutScores
) -> tuple[Problem, ...]:
    if everything is scores or not everything.fits.any():
        return ()
    row = _best_row(everything)
    gain = float(scores.step_s[best] / everything.step_s[row])
    if gain < CLEARLY_BETTER:
        return ()
    names = ", ".join(f"{name} = {value}" for name, value in request.fixed.items() if name != "compression")
    return (
        Problem(
            where=next((request.place(f"parallel.{name}") for name in request.fixed if name != "compression"), "job"),
            what=f"the fixed settings ({names}) cost {gain - 1:.0%}: {scores.step_s[best]:.3g} s per step "
            f"against {everything.step_s[row]:.3g} s",
            fix=f"the free search finds {everything.layout(row).name}",
        ),
    )
