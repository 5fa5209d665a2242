"""The layout search: the best of all legal layouts, the Pareto front, and the best alternative of each kind."""

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
# (mean over 13 sources of the median error, phalanx backtest, 2026-11-15), so a lead of 2 % on paper is not evidence.
SAME = 1.02
# A simpler layout may fill this much of the usable memory, or as much as the fastest does: memory is off by 5.7 %
# (median, the same run), and a plan that runs out of it is not simple.
SAFE_MEMORY = 0.9
# A layout that would not fit if it took 6 % more than predicted, which is the error `phalanx trace` may find, is not
# taken while any other remains: a plan without the warning of `_crowded_memory` fits whenever its trace agrees with
# it.
FULL_MEMORY = 1.0 / (1.0 + MEMORY_ERROR)
ROOMIER = 1.03  # among those within 3 % of the fastest the simplest with room is taken
# Where no layout has that much room, one that fills more than this share of the device is not taken while a slower one
# fills less: the training specification calls it an error (MEM001).
DEVICE_MEMORY = 0.90
# A plan without such room is replaced by one with offload that is at most this many times as slow; else it is kept,
# because `phalanx trace` may still find that it fits, as its warning states.
OFFLOAD_FOR_ROOM = 1.25
NO_ROOM = f"no layout here leaves {1 - SAFE_MEMORY:.0%} free: use more devices, or try a short run first"
DECIDES = "phalanx trace JOB --against-plan decides"
SMALLER = (2, 4)  # fractions of the cluster that are tried as well: slower, but often cheaper per token
SMALLER_MICRO_BATCH = 8  # largest micro-batch tried on those fractions, which only sketch the front
CLEARLY_BETTER = 1.05  # a free search this much faster than a layout fixed by hand is worth a warning
PARETO_STEP = 0.9  # a point that saves less than 10 % of memory over its faster neighbour is left out
PARETO_SLOWEST = 1.5  # a layout 50 % slower than the best on the same devices is of no use


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A layout with the step time and memory it is judged by; `idea` is the kind of alternative it represents."""

    layout: Layout
    step_s: float
    memory_bytes: float
    fits: bool
    idea: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The result of a search. `best` is the simplest of the layouts about as fast as the fastest.

    `others` are the best alternatives of each kind, with the layouts that would be faster if they fit.
    """

    best: Candidate
    fastest: Candidate
    others: tuple[Candidate, ...]
    pareto: tuple[Candidate, ...]
    legal: int
    fitting: int
    warnings: tuple[Problem, ...]


def search_layouts(request: PlanRequest) -> SearchResult:
    """Score every legal layout and choose the best; raises UserError if no layout is legal or none fits."""
    scores, warnings = _first_that_fits(request)
    best = _best_row(scores)
    unfixed = _unfixed_scores(request) if any(name != "compression" for name in request.fixed) else scores
    warnings += (
        *_crowded_memory(request, scores, best, unfixed),
        *_better_if_free(request, scores, best, unfixed),
    )
    legal, fitting = scores.legal, int(scores.fits.sum())
    if unfixed is not scores:
        legal, fitting = legal + unfixed.legal, fitting + int(unfixed.fits.sum())
    return SearchResult(
        best=_make_candidate(scores, best),
        fastest=_make_candidate(scores, _fastest_row(scores, np.flatnonzero(scores.fits))),
        others=_other_ideas(unfixed, scores.layout(best)),
        pareto=_pareto_layouts(request, scores),
        legal=legal,
        fitting=fitting,
        warnings=warnings,
    )


def _first_that_fits(request: PlanRequest) -> tuple[LayoutScores, tuple[Problem, ...]]:
    """Return the scores of layouts with and without offload.

    If none fits, try tensor groups wider than a fast domain; raises UserError if none of those fits either.
    """
    plain_scores, scores = _with_savings(request)
    if scores.fits.any():
        return scores, _offload_pays(request, plain_scores, scores)
    where = request.cluster.name
    wide_scores = score_layouts(
        build_space(request, offload=request.offload_kinds, widest_tensor=request.cluster.devices)
    )
    if wide_scores.fits.any():
        what = (
            f"nothing fits unless tensor groups reach beyond the {request.cluster.domain_devices} devices of a domain"
        )
        return wide_scores, (Problem(where=where, what=what, fix="more devices allow a deeper pipeline instead"),)
    if not wide_scores.legal:
        raise no_layout(request)
    raise no_fit(request, wide_scores)


def _with_savings(request: PlanRequest) -> tuple[LayoutScores, LayoutScores]:
    """Return the scores without, and with, layouts that trade time for memory outside of a rank.

    Offload, and ZeRO-2 over several micro-batches, slow a layout down. They pay only where they allow a layout faster
    than the best one without them, or not much slower if that one has too little room in memory, so only the base rows
    that could be fast enough are scored with them.
    """
    kinds = (str(request.fixed["offload"]),) if "offload" in request.fixed else request.offload_kinds
    space = build_space(request, offload=kinds)
    plain_scores = score_layouts(space.part(kinds[0], zero2="whole"))
    limit_s = np.inf
    if plain_scores.fits.any():
        best = _best_row(plain_scores)
        filled_bytes = float(plain_scores.memory_bytes[best])
        # A plan that MEM001 calls an error is replaced by any that fits, however slow.
        if filled_bytes <= max(FULL_MEMORY * plain_scores.usable_bytes, _device_bytes(request)):
            has_room = filled_bytes <= FULL_MEMORY * plain_scores.usable_bytes
            limit_s = float(plain_scores.step_s[best]) * (1.0 if has_room else OFFLOAD_FOR_ROOM)
    rows = least_seconds(space.part(kinds[0])) < limit_s
    if not rows.any():
        return plain_scores, plain_scores
    parts = [space.part(kind, rows) for kind in kinds[1:]]
    if "zero" not in request.fixed:
        parts.append(space.part(kinds[0], rows, zero2="repeated"))
    saving_scores = [score_layouts(part, memory_cutoff=1.0) for part in parts if part.product.size]
    return plain_scores, join_scores(plain_scores, saving_scores, limit_s=limit_s)


def _offload_pays(request: PlanRequest, plain: LayoutScores, scores: LayoutScores) -> tuple[Problem, ...]:
    """Report what a plan keeps in host memory, and the step time of the best plan without offload."""
    best = _best_row(scores)
    layout = scores.layout(best)
    if layout.offload == "none" or "offload" in request.fixed:
        return ()
    name = {"optimizer": "the optimizer"}.get(layout.offload, layout.offload)
    if not plain.fits.any():
        what = f"nothing fits in device memory without keeping {name} in host memory"
        return (Problem(where=request.cluster.name, what=what, fix="more devices would make offload unnecessary"),)
    row = _best_row(plain)
    return (
        Problem(
            where=request.cluster.name,
            what=f"the plan keeps {name} in host memory: {format_seconds(float(scores.step_s[best]))} per step against "
            f"{format_seconds(float(plain.step_s[row]))} of {plain.layout(row).name}",
            fix='set parallel.offload = "none" to plan without it',
        ),
    )


def _fastest_row(scores: LayoutScores, rows: Ints) -> int:
    """Return the fastest of some rows; of equally fast rows the one with the least memory."""
    seconds = scores.step_s[rows]
    least_s = seconds.min()
    # Sorting or rounding a million rows to read one would double the search time.
    candidates = rows[seconds <= least_s + 2e-9]
    fastest = candidates[scores.step_s[candidates].round(9) == least_s.round(9)]
    return int(fastest[np.argmin(scores.memory_bytes[fastest])])


def _best_row(scores: LayoutScores) -> int:
    """Return the simplest of the rows that fit and are about as fast as the fastest."""
    return _simplest_row(scores, np.flatnonzero(scores.fits))


def _simplest_row(scores: LayoutScores, rows: Ints) -> int:
    """Return the simplest of the rows whose times the model cannot tell from that of the fastest."""
    rows_as_good = _as_good(scores, rows)
    keys = (
        *layout_complexity(scores, rows_as_good),
        scores.step_s[rows_as_good].round(9),
        scores.memory_bytes[rows_as_good],
    )
    return int(rows_as_good[np.lexsort(keys[::-1])[0]])


def _as_good(scores: LayoutScores, rows: Ints) -> Ints:
    """Return the rows about as fast as the fastest that leave memory free, or as much as possible."""
    fastest = _fastest_row(scores, rows)
    full_bytes, filled_bytes = FULL_MEMORY * scores.usable_bytes, float(scores.memory_bytes[fastest])
    room_bytes = max(SAFE_MEMORY * scores.usable_bytes, min(filled_bytes, full_bytes))
    fast_rows = rows[scores.step_s[rows] <= scores.step_s[fastest] * max(SAME, ROOMIER)]
    for slack, limit_bytes in ((SAME, room_bytes), (ROOMIER, full_bytes)):
        fast_enough = scores.step_s[fast_rows] <= scores.step_s[fastest] * slack
        simple_rows: Ints = fast_rows[fast_enough & (scores.memory_bytes[fast_rows] <= limit_bytes)]
        if simple_rows.size:
            return simple_rows
    device_bytes = _device_bytes(scores.space.request)
    for limit_bytes in (min(full_bytes, device_bytes), device_bytes, filled_bytes):
        in_memory = rows[scores.memory_bytes[rows] <= limit_bytes]
        if in_memory.size:
            break
    simple_rows = in_memory[scores.step_s[in_memory] <= scores.step_s[_fastest_row(scores, in_memory)] * SAME]
    return simple_rows


def _device_bytes(request: PlanRequest) -> float:
    """Return the most bytes that a plan may fill of a device while any layout that needs less fits."""
    return DEVICE_MEMORY * request.cluster.accelerator.memory_bytes


def layout_complexity(scores: LayoutScores, rows: Ints) -> tuple[Ints, ...]:
    """Return sort keys for how complex layouts are, most important first.

    The order is offload, stages, axes, schedule, context size, the rest. Offload comes first: its times rest on
    assumptions about hosts. Then stages: each adds a cut through the model, and a rank that waits for its neighbours.
    """

    def column(name: str) -> Ints:
        return scores.column(name, rows)

    axes = sum((column(name) > 1).astype(np.int64) for name in ("tp", "cp", "pp", "ep"))
    staged = column("pp") > 1
    odd_schedule = staged & np.isin(column("schedule"), [SCHEDULES.index(name) for name in ("gpipe", "zero-bubble")])
    schedule = (odd_schedule | (column("vpp") > 1)).astype(np.int64)
    unusual = (column("zero") >= 2, np.isin(column("group"), (DOMAIN, GIVEN)), column("compression") > 0)
    num_unusual = sum(flags.astype(np.int64) for flags in unusual)
    return column("offload"), column("pp"), np.asarray(axes), schedule, column("cp"), np.asarray(num_unusual)


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

# Alternatives that users ask "why not ...?" about.
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
    candidates: dict[Layout, Candidate] = {}
    is_fitting = scores.fits
    if is_fitting.any():
        _add_candidate(
            candidates, _make_candidate(scores, _fastest_row(scores, np.flatnonzero(is_fitting)), FASTEST), best
        )
    for idea, mask in IDEAS.items():
        rows = np.flatnonzero(is_fitting & mask(scores, best))
        if rows.size:
            _add_candidate(candidates, _make_candidate(scores, _simplest_row(scores, rows), idea), best)
    limit = np.min(scores.step_s, where=is_fitting, initial=np.inf)
    unfit = np.where(is_fitting, np.inf, scores.step_s)
    cheaper = {"no recompute": scores.column("recompute") == 0, "if memory were larger": np.ones_like(is_fitting)}
    for idea, rows_wanted in cheaper.items():
        row = _least_row(unfit, rows_wanted & (scores.column("offload") == OFFLOAD.index(best.offload)))
        if row is not None and scores.step_s[row] < limit:
            _add_candidate(candidates, _make_candidate(scores, row, idea), best)
    return tuple(sorted(candidates.values(), key=lambda candidate: (not candidate.fits, candidate.step_s)))


def _least_row(values: np.ndarray[tuple[int], np.dtype[np.float64]], mask: Bools) -> int | None:
    rows = np.flatnonzero(mask & np.isfinite(values))
    return int(rows[values[rows].argmin()]) if rows.size else None


def _add_candidate(found: dict[Layout, Candidate], one: Candidate, best: Layout) -> None:
    if one.layout == best:
        return
    existing = found.get(one.layout)
    if existing is None:
        found[one.layout] = one
    elif existing.idea != FASTEST:
        found[one.layout] = replace(existing, idea=f"{existing.idea}, {one.idea}")


def _pareto_layouts(request: PlanRequest, scores: LayoutScores) -> tuple[Candidate, ...]:
    """Return the layouts on the Pareto front of time, cost and memory, on the whole cluster and on fractions of it."""
    candidates = _time_memory_front(scores)
    # Where the whole cluster needs no offload, a fraction of it that does is slower and no cheaper.
    offload = tuple(sorted({"none", candidates[0].layout.offload}, key=OFFLOAD.index)) if candidates else ("none",)
    for divisor in SMALLER:
        domains = request.cluster.domains // divisor
        if domains < 1 or request.cluster.domains % divisor:
            break
        devices = domains * request.cluster.domain_devices
        space = build_space(request, devices=devices, offload=offload, most_micro=SMALLER_MICRO_BATCH)
        candidates += _time_memory_front(score_layouts(space, memory_cutoff=1.0))
    return tuple(
        candidate for candidate in candidates if not any(_dominates_other(rival, candidate) for rival in candidates)
    )


def _time_memory_front(scores: LayoutScores) -> list[Candidate]:
    """Return the front over time and memory for one device count, thinned to differences of at least 10 % of memory.

    With the devices fixed, cost is proportional to time. The simplest of the fastest layouts is on the front too,
    unless the fastest also needs less memory.
    """
    is_fitting = scores.fits
    fastest = np.min(scores.step_s, where=is_fitting, initial=np.inf)
    rows = np.flatnonzero(is_fitting & (scores.step_s <= PARETO_SLOWEST * fastest))
    rows = rows[np.lexsort((scores.memory_bytes[rows], scores.step_s[rows]))]
    if not rows.size:
        return []
    front_rows = [_fastest_row(scores, rows)]
    least_bytes = np.minimum.accumulate(scores.memory_bytes[rows])
    for row in rows[scores.memory_bytes[rows] <= least_bytes]:
        if scores.memory_bytes[row] < PARETO_STEP * scores.memory_bytes[front_rows[-1]]:
            front_rows.append(int(row))
    best = _best_row(scores)
    return [
        _make_candidate(scores, row) for row in sorted({best, *front_rows}, key=lambda row: float(scores.step_s[row]))
    ]


def _dominates_other(a: Candidate, b: Candidate) -> bool:
    a_costs = (a.step_s, a.step_s * a.layout.devices, a.memory_bytes)
    b_costs = (b.step_s, b.step_s * b.layout.devices, b.memory_bytes)
    return a_costs != b_costs and all(x <= y for x, y in zip(a_costs, b_costs, strict=True))


def _unfixed_scores(request: PlanRequest) -> LayoutScores:
    """Return the scores of the space without the settings that the job fixes by hand.

    Two restrictions stay: gradient compression changes the arithmetic, and a custom network is not split along every
    axis.
    """
    kept_names = ("compression", *(UNSPLIT_OWN if request.model.module else ()))
    kept_settings = {name: value for name, value in request.fixed.items() if name in kept_names}
    return _with_savings(replace(request, fixed=kept_settings))[1]


def _crowded_memory(
    request: PlanRequest, scores: LayoutScores, best: int, everything: LayoutScores
) -> tuple[Problem, ...]:
    """Warn of a plan whose free memory is within the prediction error, and name the next layout with room."""
    step_s, headroom = float(scores.step_s[best]), 1.0 - float(scores.memory_bytes[best]) / scores.usable_bytes
    if headroom >= 1.0 - FULL_MEMORY:
        return ()
    # Phalanx's own trainer, whose step can be traced.
    is_counted = bool(np.any(np.asarray(request.memory.counted) > 0))
    why = (
        f"the step may take up to {MEMORY_ERROR:.0%} more than is counted, so it may not fit: {DECIDES}"
        if is_counted
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
    """Describe the best layout that leaves memory free and its step time against `than_s`; empty if there is none."""
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
