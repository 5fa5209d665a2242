"""From all legal layouts to the best one, the Pareto set, and the best of each other idea."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from phalanx.errors import Problem
from phalanx.plan.ask import Ask
from phalanx.plan.cases import OFFLOAD, RECOMPUTE
from phalanx.plan.impossible import no_fit, no_layout
from phalanx.plan.layout import Layout
from phalanx.plan.score import Scores, score
from phalanx.plan.space import Bools, build

TIE = 1.005  # layouts within 0.5 % are equal: below the noise floor of repeated runs, so the simpler one is taken
MOST_TIES = 200
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
    """What a search found: `others` are the best of each other idea, fastest first."""

    best: Candidate
    others: tuple[Candidate, ...]
    pareto: tuple[Candidate, ...]
    legal: int
    fitting: int
    warnings: tuple[Problem, ...]


def search(ask: Ask) -> SearchResult:
    """Score every legal layout. Raises UserError when there is none or none fits."""
    scores, warnings = _first_that_fits(ask)
    best = _best(scores)
    everything = _unfixed(ask) if _narrow(ask) else scores
    warnings += _better_if_free(ask, scores, best, everything)
    legal, fitting = scores.legal, int(scores.fits.sum())
    if everything is not scores:
        legal, fitting = legal + everything.legal, fitting + int(everything.fits.sum())
    return SearchResult(
        best=_candidate(scores, best),
        others=_others(everything, scores.layout(best)),
        pareto=_pareto(ask, scores),
        legal=legal,
        fitting=fitting,
        warnings=warnings,
    )


def _first_that_fits(ask: Ask) -> tuple[Scores, tuple[Problem, ...]]:
    """The plain space; when nothing in it fits, optimizer offload, then tensor groups wider than a fast domain."""
    plain = score(build(ask))
    if plain.fits.any():
        return plain, ()
    where = ask.cluster.name
    offloaded = score(build(ask, offload=("optimizer",)))
    if "offload" not in ask.fixed and offloaded.fits.any():
        what = "nothing fits in device memory without keeping the optimizer in host memory"
        return offloaded, (Problem(where=where, what=what, fix="more devices would make offload unnecessary"),)
    wide = score(build(ask, offload=("none", "optimizer"), widest_tensor=ask.cluster.devices))
    if wide.fits.any():
        what = f"nothing fits unless tensor groups reach beyond the {ask.cluster.domain_devices} devices of a domain"
        return wide, (Problem(where=where, what=what, fix="more devices allow a deeper pipeline instead"),)
    if not wide.legal:
        raise no_layout(ask)
    raise no_fit(ask, wide)


def _best(scores: Scores) -> int:
    """The fastest row that fits; among those within 0.5 % of it the simplest, then the fastest."""
    step = np.where(scores.fits, scores.step_s, np.inf)
    near = np.flatnonzero(step <= step.min() * TIE)
    near = near[np.argsort(step[near], kind="stable")[:MOST_TIES]]
    layouts = [scores.layout(int(row)) for row in near]
    simple = np.array([complexity(one) for one in layouts], dtype=np.float64)
    order = np.lexsort(np.stack([scores.memory_bytes[near], step[near].round(9), simple]))
    return int(near[order[0]])


def complexity(layout: Layout) -> int:
    """How much machinery a layout needs, for breaking ties."""
    unusual = (
        layout.virtual_pipeline > 1,
        layout.pipeline > 1 and layout.schedule in ("gpipe", "zero-bubble"),
        layout.zero >= 2,
        layout.zero > 0 and layout.shard < layout.data * layout.context,
        layout.compression != "none",
        layout.offload != "none",
    )
    return layout.axes + sum(unusual)


def _candidate(scores: Scores, row: int, idea: str = "") -> Candidate:
    return Candidate(
        layout=scores.layout(row),
        step_s=float(scores.step_s[row]),
        memory_bytes=float(scores.memory_bytes[row]),
        fits=bool(scores.fits[row]),
        idea=idea,
    )


Idea = Callable[[Scores, Layout], Bools]

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


def _others(scores: Scores, best: Layout) -> tuple[Candidate, ...]:
    found: dict[Layout, Candidate] = {}
    step = np.where(scores.fits, scores.step_s, np.inf)
    for idea, mask in IDEAS.items():
        row = _least(step, mask(scores, best))
        if row is not None:
            _add(found, _candidate(scores, row, idea), best)
    unfit = np.where(scores.fits, np.inf, scores.step_s)
    cheaper = {"no recompute": scores.column("recompute") == 0, "if memory were larger": np.ones_like(scores.fits)}
    for idea, wanted in cheaper.items():
        row = _least(unfit, wanted & (scores.column("offload") == OFFLOAD.index(best.offload)))
        if row is not None and scores.step_s[row] < step.min():
            _add(found, _candidate(scores, row, idea), best)
    return tuple(sorted(found.values(), key=lambda one: (not one.fits, one.step_s)))


def _least(values: np.ndarray[tuple[int], np.dtype[np.float64]], mask: Bools) -> int | None:
    rows = np.flatnonzero(mask & np.isfinite(values))
    return int(rows[values[rows].argmin()]) if rows.size else None


def _add(found: dict[Layout, Candidate], one: Candidate, best: Layout) -> None:
    if one.layout == best:
        return
    known = found.get(one.layout)
    found[one.layout] = replace(known, idea=f"{known.idea}, {one.idea}") if known else one


def _pareto(ask: Ask, scores: Scores) -> tuple[Candidate, ...]:
    """Layouts that nothing beats in time, money and memory at once; smaller parts of the cluster take part."""
    found = _front(scores)
    for part in SMALLER:
        domains = ask.cluster.domains // part
        if domains < 1 or ask.cluster.domains % part:
            break
        devices = domains * ask.cluster.domain_devices
        space = build(ask, devices=devices, offload=_offloads(scores), most_micro=SMALLER_MICRO_BATCH)
        found += _front(score(space, hopeless=1.0))
    return tuple(one for one in found if not any(_dominates(other, one) for other in found))


def _offloads(scores: Scores) -> tuple[str, ...]:
    return tuple(OFFLOAD[index] for index in np.unique(scores.column("offload")))


def _front(scores: Scores) -> list[Candidate]:
    """The front over time and memory of one device count (there money is time), thinned to visible differences."""
    fastest = np.min(scores.step_s, where=scores.fits, initial=np.inf)
    rows = np.flatnonzero(scores.fits & (scores.step_s <= PARETO_SLOWEST * fastest))
    rows = rows[np.lexsort((scores.memory_bytes[rows], scores.step_s[rows]))]
    if not rows.size:
        return []
    best = _best(scores)
    kept = [best]
    least = np.minimum.accumulate(scores.memory_bytes[rows])
    for row in rows[scores.memory_bytes[rows] <= least]:
        if scores.memory_bytes[row] < PARETO_STEP * scores.memory_bytes[kept[-1]]:
            kept.append(int(row))
    return [_candidate(scores, row) for row in kept]


def _dominates(a: Candidate, b: Candidate) -> bool:
    ours = (a.step_s, a.step_s * a.layout.devices, a.memory_bytes)
    theirs = (b.step_s, b.step_s * b.layout.devices, b.memory_bytes)
    return ours != theirs and all(x <= y for x, y in zip(ours, theirs, strict=True))


def _narrow(ask: Ask) -> bool:
    return any(name != "compression" for name in ask.fixed)


def _unfixed(ask: Ask) -> Scores:
    """The space as if the job fixed nothing but its gradient compression, which changes the arithmetic."""
    kept = {name: value for name, value in ask.fixed.items() if name == "compression"}
    return score(build(replace(ask, fixed=kept)))


def _better_if_free(ask: Ask, scores: Scores, best: int, everything: Scores) -> tuple[Problem, ...]:
    if everything is scores or not everything.fits.any():
        return ()
    row = _best(everything)
    gain = float(scores.step_s[best] / everything.step_s[row])
    if gain < CLEARLY_BETTER:
        return ()
    names = ", ".join(f"{name} = {value}" for name, value in ask.fixed.items() if name != "compression")
    return (
        Problem(
            where=next((ask.place(f"parallel.{name}") for name in ask.fixed if name != "compression"), "job"),
            what=f"the fixed settings ({names}) cost {gain - 1:.0%}: {scores.step_s[best]:.3g} s per step "
            f"against {everything.step_s[row]:.3g} s",
            fix=f"the free search finds {everything.layout(row).name}",
        ),
    )
