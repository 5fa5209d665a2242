"""Drills of peers on slow links: the part of `drill` that handles `peers`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from phalanx.api.drill_records import keep_record
from phalanx.api.drills import WHERE, DrillCall, DrillPage, drill_plan
from phalanx.errors import mistake
from phalanx.units import plural

if TYPE_CHECKING:
    from phalanx.plan.plan import Plan
    from phalanx.train.drill.faults import Fault

USUAL_FAULT = "kill:peer=2,step=5"


def drill_peers(call: DrillCall) -> DrillPage:
    """Train a job with its peers on this machine, with faults, and judge the records of all peers."""
    from phalanx.train.drill.faults import PEER_FAULTS, parse_faults
    from phalanx.train.prepare import need_torch

    _check_call(call)
    parsed = parse_faults(list(call.faults) or ([] if call.chaos else [USUAL_FAULT]), kinds=PEER_FAULTS)
    need_torch()
    plan = drill_plan(replace(call, overrides=(*call.overrides, f"sync.peers={call.peers}")))
    _check_plan(call, plan, parsed)
    from phalanx.train.drill.peer_drill import PeerDrillSettings, draw_peer_faults, perform_peer_drill

    if call.chaos:
        parsed = draw_peer_faults(
            peers=call.peers,
            rate_per_min=call.rate,
            minutes=call.minutes,
            seed=call.seed,
            dead_after_s=plan.job.sync.dead_after_s,
        )
    _check_targets(call, parsed)
    _check_lies(call, plan, parsed)
    call.tell(f"drill of {plan.job.name} with {plural(call.peers, 'peer')}: {plural(len(parsed), 'fault')}")
    scene = PeerDrillSettings(
        plan=plan,
        runs=call.runs,
        peers=call.peers,
        minutes=call.minutes,
        drawn=call.chaos,
        allow_code=call.allow_code,
        tell=call.tell,
    )
    outcome = perform_peer_drill(scene, parsed)
    return DrillPage(outcome=outcome, record=keep_record(call, parsed, outcome, plan, part="peers", peers=call.peers))


def _check_call(call: DrillCall) -> None:
    """Raise UserError for options that peers would ignore."""
    if call.peers < 2:
        raise mistake(WHERE, f"--peers {call.peers} is nobody to exchange with", fix="use --peers 3")
    if call.hosts != 1 or call.spares:
        raise mistake(
            WHERE,
            "--peers with --hosts or --spares",
            why="each peer of such a drill is one process on this machine",
            fix="leave them out",
        )


def _check_plan(call: DrillCall, plan: Plan, faults: Sequence[Fault]) -> None:
    sync = plan.job.sync
    if not sync.has_peers:
        raise mistake(
            call.job,
            f'--peers {call.peers} with sync.mode = "{sync.mode}"',
            why="such a job exchanges nothing with peers",
            fix="--set sync.mode=target-batch, or drill it without --peers",
        )
    if plan.layout.devices > 1:
        raise mistake(
            call.job,
            f"each peer has {plan.layout.devices} ranks",
            why="a drill starts peers of one rank",
            fix="add --cluster local-cpu:1",
        )
    if any(fault.kind == "poison" and fault.how == "loss" for fault in faults) and (
        sync.screening != "loss" or sync.mode == "target-batch" or sync.delay_steps
    ):
        raise mistake(
            call.job,
            f'poison:how=loss with sync.mode = "{sync.mode}" and sync.screening = "{sync.screening}"',
            why='updates of weights are held against held-out text with sync.screening = "loss" alone',
            fix="--set sync.mode=diloco --set sync.screening=loss --set sync.delay_steps=0",
        )


def _check_lies(call: DrillCall, plan: Plan, faults: Sequence[Fault]) -> None:
    sync, liars = plan.job.sync, {number for fault in faults if fault.kind == "lie" for number in fault.peer}
    if not liars:
        return
    if sync.mode == "target-batch" or sync.delay_steps or not sync.gate_sequences:
        raise mistake(
            call.job,
            f'a lie with sync.mode = "{sync.mode}", delay_steps = {sync.delay_steps}, '
            f"gate_sequences = {sync.gate_sequences}",
            why="peers evaluate exchanges of weights alone, before training goes on",
            fix="--set sync.mode=diloco --set sync.delay_steps=0 --set sync.gate_sequences=32",
        )
    if 3 * len(liars) > call.peers:
        raise mistake(
            "--fault lie",
            f"{len(liars)} of {call.peers} peers lie",
            why="votes hold with at most a third of liars",
            fix=f"add --peers {3 * len(liars)}",
        )


def _check_targets(call: DrillCall, faults: Sequence[Fault]) -> None:
    for fault in faults:
        if beyond := [number for number in fault.peer if not 1 <= number <= call.peers]:
            raise mistake(
                f"--fault {fault.text}",
                f"there is no peer {beyond[0]}: the drill has {call.peers}",
                fix=f"use peer=1 to peer={call.peers}, or add --peers {max(beyond)}",
            )
        if fault.kind == "partition" and len(set(fault.peer)) == call.peers:
            raise mistake(f"--fault {fault.text}", "cuts nobody off: it names all peers", fix="leave one out")
        if fault.kind in ("nan", "poison", "liar") and call.peers < 3:
            raise mistake(
                f"--fault {fault.text}",
                "of two peers nobody can tell who is wrong",
                why="an update is held against the median of the others",
                fix="add --peers 3",
            )
