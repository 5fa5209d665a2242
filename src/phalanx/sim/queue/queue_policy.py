"""The policy of a queue: a name, or a TOML file, with single settings on top."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from phalanx.errors import mistake, nearest
from phalanx.io.codec import Bounds, from_json_values, json_values
from phalanx.io.toml import read_toml

Seconds = Annotated[float, Bounds(ge=0, le=1e9)]
Hours = Annotated[float, Bounds(ge=0, le=1e6)]
Backfill = Literal["none", "easy", "conservative"]


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueTeam:
    """A team with its own nodes; it may borrow idle nodes of other teams, up to `most_borrowed`."""

    name: Annotated[str, Bounds(max_length=80)]
    nodes: Annotated[int, Bounds(ge=0)]
    weight: Annotated[float, Bounds(gt=0, le=1e6)] = 1.0  # of its fair share
    most_borrowed: Annotated[int, Bounds(ge=0)] | None = None  # None: no limit


@dataclass(frozen=True, kw_only=True, slots=True)
class Drain:
    """Nodes that accept no new job for some hours; jobs that run on them may finish."""

    start_h: Hours
    hours: Hours
    first_node: Annotated[int, Bounds(ge=0)]
    nodes: Annotated[int, Bounds(ge=1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuePolicy:
    """Every setting of a queue; docs/queue-simulation.md explains each. `_s` are seconds, `_h` hours."""

    backfill: Backfill = "easy"
    depth: Annotated[int, Bounds(ge=1, le=1_000_000)] = 500  # waiting jobs that a pass considers
    # Waiting jobs for which conservative backfill reserves nodes.
    promises: Annotated[int, Bounds(ge=1, le=1_000_000)] = 50
    backfill_every_s: Seconds = 0.0  # between two passes of backfill; 0: after every change
    preemption: bool = False  # jobs of higher priority take nodes from jobs of lower priority
    grace_s: Seconds = 0.0  # between the signal to a preempted job and its end
    save_on_signal: bool = True  # a preempted job writes a checkpoint within its grace
    reclaim: bool = True  # a team takes its own nodes back from teams that borrow them
    # Among equal priorities, the team with the least use for its weight goes first.
    fair_share: bool = False
    half_life_h: Hours = 168.0  # after which past use counts half; 0: only current use counts
    packing: Literal["first", "preferred", "required"] = "preferred"
    nodes_per_rack: Annotated[int, Bounds(ge=1)] = 16
    racks_per_block: Annotated[int, Bounds(ge=1)] = 8
    failures_per_node_day: Annotated[float, Bounds(ge=0, le=1000)] | None = None  # None: the cluster's
    repair_h: Hours = 24.0
    on_failure: Literal["requeue", "replace"] = "requeue"
    checkpoint_s: Seconds = 1800.0  # between checkpoints of a job; 0: it writes none
    restart_s: Seconds = 120.0  # from a new start to the first step again
    admission_s: Seconds = 0.0  # time of the scheduler per job, one after the other
    started_nodes_per_s: Annotated[float, Bounds(ge=0, le=1e9)] = 0.0  # of one job; 0: all at once
    team: tuple[QueueTeam, ...] = ()
    drain: tuple[Drain, ...] = ()


NAMED: dict[str, dict[str, object]] = {
    "fifo": {"backfill": "none"},
    "easy": {"backfill": "easy"},
    "conservative": {"backfill": "conservative"},
}


def read_policy(spec: str | Path | QueuePolicy, overrides: Sequence[str] | Mapping[str, object] = ()) -> QueuePolicy:
    """Return the policy of a name or file, with `overrides` such as "preemption=true" applied.

    Raises UserError for unknown policies and settings, and for teams that are defined twice.

    >>> read_policy("fifo").backfill, read_policy("easy", ["depth=50"]).depth
    ('none', 50)
    """
    if isinstance(spec, QueuePolicy):
        table: dict[str, Any] = json_values(spec)
        where = "policy"
    elif str(spec) in NAMED:
        table, where = dict(NAMED[str(spec)]), f"policy {spec}"
    elif str(spec).endswith(".toml"):
        table, where = dict(read_toml(Path(spec), noun="policy").table), str(spec)
    else:
        close = nearest(str(spec), NAMED)
        problem = f"there is no policy {str(spec)[:60]!r}"
        raise mistake("--policy", problem, fix=f"use {close or ', '.join(NAMED)}, or a .toml file")
    override_values = overrides if isinstance(overrides, Mapping) else dict(_parse_override(text) for text in overrides)
    policy = from_json_values(
        QueuePolicy,
        {**table, **override_values},
        where,
        noun="policy",
        fix="docs/queue-simulation.md lists its settings",
    )
    names = [team.name for team in policy.team]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise mistake(where, f"team {repeated[0]!r} is defined twice", fix="name each team once")
    return policy


def _parse_override(text: str) -> tuple[str, object]:
    """Parse one `--set KEY=VALUE`; the value is TOML, or a bare word for a text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise mistake("--set", f"{text[:60]!r} has no =", fix="write --set depth=100")
    try:
        return name.strip(), tomllib.loads(f"v = {value.strip()}")["v"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return name.strip(), value.strip()
