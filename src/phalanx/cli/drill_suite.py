"""`phalanx drill JOB --suite`: the standard drills, what each proved, and the rules it answers."""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cli.output import note, plain, print_json, say
from phalanx.errors import mistake
from phalanx.units import format_seconds, plural

if TYPE_CHECKING:
    from phalanx.plan.plan import Plan
    from phalanx.train.drill.perform import DrillResult
    from phalanx.train.drill.schedule import SuitePart


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """One run of the suite, judged and on record."""

    part: SuitePart
    result: DrillResult
    record: Path


def run_suite(args: argparse.Namespace) -> int:
    """0 when every verdict of every run holds, 1 when one does not."""
    from phalanx.train.drill.schedule import suite_parts
    from phalanx.train.prepare import need_torch

    need_torch()
    began_s = time.monotonic()
    plan = _first_plan(args)
    played = [_play(args, part) for part in suite_parts(plan.prediction.step_s)]
    _print(args, played, took_s=time.monotonic() - began_s)
    return 0 if all(one.result.ok for one in played) else 1


def _first_plan(args: argparse.Namespace) -> Plan:
    """The job as it is: how long its steps are, and whether there is anybody to lose."""
    from phalanx.cli.drill import make_plan
    from phalanx.train.drill.schedule import LEAST_WORLD

    plan = make_plan(args)
    if plan.layout.devices < LEAST_WORLD:
        raise mistake(
            str(args.job),
            "has one rank",
            why="a drill asks what the others do when one is lost",
            fix="--cluster local-cpu:4 drills it on four ranks of this machine",
        )
    return plan


def _play(args: argparse.Namespace, part: SuitePart) -> Played:
    from phalanx.cli.drill import keep_record, make_plan, make_scene
    from phalanx.train.drill.perform import perform_drill
    from phalanx.train.drill.schedule import judge_slow_rank, suite_faults

    mine = _arguments(args, part)
    plan, faults = make_plan(mine), suite_faults(part)
    on = f"{plural(plan.layout.devices, 'rank')}, {plan.layout.name}"
    note(f"{part.name}: {plural(len(faults), 'fault')} in {plan.job.name} on {on}")
    result = perform_drill(make_scene(mine, plan), faults)
    more: dict[str, Any] = {"suite": True, "part": part.name}
    if part.slow_rank is not None:
        verdict = judge_slow_rank(result.run, slow_rank=part.slow_rank, world=plan.layout.devices)
        result = dataclasses.replace(result, verdicts=(*result.verdicts, verdict))
        more["named_right"] = verdict.ok
    record = keep_record(mine, faults, result, plan, **more)
    return Played(part=part, result=result, record=record)


def _arguments(args: argparse.Namespace, part: SuitePart) -> argparse.Namespace:
    """The call as if this part alone had been asked for; what the person set goes before what the part sets."""
    return argparse.Namespace(
        **{
            **vars(args),
            "overrides": [*part.overrides, *args.overrides],
            "steps": part.steps,
            "agents": part.agents,
            "spares": part.spares,
            "no_replay": not part.replay,
        }
    )


def _print(args: argparse.Namespace, played: list[Played], *, took_s: float) -> None:
    from phalanx.record.drill import store_path

    ok = all(one.result.ok for one in played)
    if args.json:
        parts = [{"part": one.part.name, "record": one.record, "result": plain(one.result)} for one in played]
        print_json({"ok": ok, "seconds": round(took_s, 1), "parts": parts})
        return
    for one in played:
        say(_told(one))
    if ok:
        say(f"{format_seconds(took_s)}; kept in {store_path(os.environ)}, where phalanx check finds it")
        say("the signature says that this user's phalanx wrote the records and that nobody changed them since")
    else:
        say(f"{format_seconds(took_s)}; not kept: a drill that failed proves nothing")


def _told(one: Played) -> str:
    """What one run proved, or what went wrong in it."""
    from phalanx.train.drill.schedule import claims_shown

    numbers = one.result.numbers
    counts = f"{plural(numbers.faults, 'fault')}, {plural(numbers.steps, 'step')}"
    head = f"{one.part.name}: {counts}; the run is {one.result.state}"
    wrong = [
        f"  {verdict.word}  {verdict.name}: {verdict.evidence}" for verdict in one.result.verdicts if not verdict.ok
    ]
    lines = [
        f"  {_word(one, happened):<9} {claim:<52} {' '.join(rules)}"
        for claim, rules, happened in claims_shown(one.part, one.result)
    ]
    return "\n".join([head, *wrong, *lines, f"  record: {one.record}"])


def _word(one: Played, happened: bool) -> str:
    if not happened:
        return "not seen"
    return "proved" if one.result.ok else "in doubt"
