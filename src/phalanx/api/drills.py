"""Drills: inject faults into a real run on purpose, and prove from its record that nothing was lost."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.api.drill_records import keep_record
from phalanx.api.jobs import AnyJob, job_as_file, override_texts
from phalanx.api.results import Overrides, PublicResult, Tell, silent, teller, warn
from phalanx.api.train_inputs import require_spec
from phalanx.errors import mistake
from phalanx.io.codec import json_values
from phalanx.io.tables import text_table
from phalanx.units import MINUTE_S, format_seconds, number_text, plural

if TYPE_CHECKING:
    from phalanx.plan.plan import Plan
    from phalanx.train.drill.faults import Fault
    from phalanx.train.drill.peer_drill import PeerDrillResult
    from phalanx.train.drill.perform import DrillResult as DrillOutcome
    from phalanx.train.drill.perform import DrillSettings
    from phalanx.train.drill.schedule import SuitePart

WHERE = "phalanx drill"
USUAL_FAULT = "kill:rank=1,step=5,point=collective"
RATE_PER_MIN = 6.0  # of chaos faults
# A failing chaos schedule is reduced for at most this many times its own length.
SHRINK_FACTOR = 2.0
LEAST_SHRINK_S = 120.0
CHAOS_RESTARTS = 10
# Seconds that a run continues after its last fault while a schedule is reduced.
AFTER_S = 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillCall:
    """The arguments of a `drill` call."""

    job: str
    faults: tuple[str, ...] = ()
    chaos: bool = False
    rate: float = RATE_PER_MIN
    seed: int = 0
    minutes: float = 0.0
    hosts: int = 1
    spares: int = 0
    peers: int = 0
    steps: int = 0
    cluster: str | None = None
    overrides: tuple[str, ...] = ()
    runs: Path = Path("runs")
    replay: bool = True
    shrink: bool = True
    allow_code: bool = False
    out: Path | None = None
    tell: Tell = silent


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class DrillPage(PublicResult):
    """The effects of the faults on a run, the verdicts, and the signed record."""

    outcome: DrillOutcome | PeerDrillResult
    record: Path

    @property
    def ok(self) -> bool:
        """True if every verdict holds."""
        return self.outcome.ok

    def __str__(self) -> str:
        from phalanx.train.drill.drill_report import render_drill
        from phalanx.train.drill.peer_drill import PeerDrillResult

        text = str(self.outcome) if isinstance(self.outcome, PeerDrillResult) else render_drill(self.outcome)
        return f"{text}\nrecord: {self.record}"

    def to_dict(self) -> dict[str, Any]:
        """Return verdict, record and the full result."""
        return {"ok": self.ok, "record": str(self.record), "result": json_values(self.outcome)}

    @property
    def exit_code(self) -> int:
        """0 if every verdict holds, 1 if one does not or could not be judged."""
        return 0 if self.ok else 1


def drill(
    job: AnyJob,
    faults: str | Sequence[str] = (),
    *,
    chaos: bool = False,
    rate: float | None = None,
    seed: int | None = None,
    minutes: float = 0.0,
    hosts: int = 1,
    spares: int = 0,
    peers: int = 0,
    steps: int = 0,
    cluster: str | None = None,
    overrides: Overrides = (),
    runs: str | Path = "runs",
    replay: bool = True,
    shrink: bool = True,
    ranks_per_gpu: int | None = None,
    allow_code: bool = False,
    out: str | Path | None = None,
    progress: bool | Tell = False,
) -> DrillPage:
    """Train a job, inject faults such as "kill:rank=1,step=5" (docs/drills.md lists them), and judge the result.

    `chaos` draws faults at random moments for `minutes` minutes, at `rate` faults per minute. This machine acts as
    `hosts` hosts with `spares` spare slots. The run is repeated without faults to compare digests, unless `replay` is
    False. The record is signed; if every verdict holds it is also copied to where `check` finds it.

    With `peers` this machine acts as that many peers of a job with a [sync] section; faults then hit peers, as
    "partition:peer=3+4,step=8", and every committed round is compared over all of them instead of with a replay.

    >>> page = drill("job.toml", "kill:rank=1,step=5", hosts=2)  # doctest: +SKIP
    >>> page.ok  # doctest: +SKIP
    True
    """
    tell = teller(progress)
    require_spec(cluster, "phalanx.drill")
    named_faults = (faults,) if isinstance(faults, str) else tuple(faults)
    if chaos and named_faults:
        raise mistake(WHERE, "--chaos and --fault exclude each other", fix="give one of them")
    if chaos and not minutes:
        raise mistake(WHERE, "--chaos has no end", why="faults are drawn for so many minutes", fix="add --minutes 2")
    idle = {"--rate": rate is not None, "--seed": seed is not None, "--no-shrink": not shrink}
    if not chaos and any(idle.values()):
        options = [name for name, is_given in idle.items() if is_given]
        raise mistake(
            WHERE,
            f"{' and '.join(options)} {'applies' if len(options) == 1 else 'apply'} to random faults (--chaos) only",
            why="--fault names faults one by one",
            fix="add --chaos --minutes 2, or leave it out",
        )
    call = DrillCall(
        job=job_as_file(job, Path(runs)),
        faults=named_faults,
        chaos=chaos,
        rate=RATE_PER_MIN if rate is None else rate,
        seed=seed or 0,
        minutes=minutes,
        hosts=hosts,
        spares=spares,
        peers=peers,
        steps=steps,
        cluster=cluster,
        overrides=_with_sharing(overrides, ranks_per_gpu),
        runs=Path(runs),
        replay=replay,
        shrink=shrink,
        allow_code=allow_code,
        out=Path(out) if out is not None else None,
        tell=tell,
    )
    _check_ranges(call)
    _refuse_launcher()
    if peers:
        from phalanx.api.peer_drills import drill_peers

        return drill_peers(call)
    from phalanx.train.drill.faults import parse_faults
    from phalanx.train.prepare import need_torch

    # Before planning: a typing error costs no time.
    parsed = parse_faults(list(call.faults))
    need_torch()
    plan = drill_plan(call)
    if call.chaos:
        from phalanx.train.drill.schedule import DrillTarget, draw_faults

        stage = DrillTarget(world=plan.layout.devices, hosts=call.hosts, spares=call.spares)
        parsed = draw_faults(rate_per_min=call.rate, minutes=call.minutes, seed=call.seed, target=stage)
    elif not parsed:
        parsed = parse_faults([USUAL_FAULT])
    _check_targets(call, parsed, plan.layout.devices)
    scene = make_scene(call, plan)
    on = f"{plural(plan.layout.devices, 'rank')}, {plan.layout.name}"
    tell(f"drill of {plan.job.name} on {on}: {plural(len(parsed), 'fault')}")
    from phalanx.train.drill.perform import perform_drill

    outcome = perform_drill(scene, parsed)
    page = DrillPage(outcome=outcome, record=keep_record(call, parsed, outcome, plan))
    if outcome.broken and call.chaos and call.shrink:
        _shrink_faults(call, scene, parsed, outcome)
    return page


def _check_targets(call: DrillCall, faults: Sequence[Fault], ranks: int) -> None:
    """Check that the ranks and hosts of the faults exist; otherwise the drill would pick another target."""
    needy = [fault.text for fault in faults if fault.of.host]
    if needy and call.hosts < 2:
        raise mistake(
            f"--fault {needy[0]}",
            "hits a host, and there is only one",
            why="with its only host a run is gone, and so is its proof",
            fix="add --hosts 2",
        )
    for fault in faults:
        if beyond := [rank for rank in fault.rank if rank >= ranks]:
            raise mistake(
                f"--fault {fault.text}",
                f"there is no rank {beyond[0]}: the job has {plural(ranks, 'rank')}",
                fix=f"use rank={ranks - 1}" if ranks == 1 else f"use rank=0 to rank={ranks - 1}",
            )
        if fault.of.host and fault.host >= call.hosts:
            raise mistake(
                f"--fault {fault.text}",
                f"there is no host {fault.host}: the drill has {plural(call.hosts, 'host')}",
                fix=f"use host=0 to host={call.hosts - 1}, or add --hosts {fault.host + 1}",
            )


def _with_sharing(overrides: Overrides, ranks_per_gpu: int | None) -> tuple[str, ...]:
    sharing = [f"train.ranks_per_gpu={ranks_per_gpu}"] if ranks_per_gpu is not None else []
    return (*override_texts(overrides), *sharing)


def _check_ranges(call: DrillCall) -> None:
    for name, value, least, most in (
        ("--rate", call.rate, 0.01, 600),
        ("--minutes", call.minutes, 0, 100_000),
        ("--hosts", call.hosts, 1, 64),
        ("--spares", call.spares, 0, 64),
        ("--peers", call.peers, 0, 64),
        ("--steps", call.steps, 0, 10**9),
        ("--seed", call.seed, 0, 2**63),
    ):
        if not least <= value <= most:
            raise mistake(
                WHERE, f"{name} {number_text(value)} is not between {least:g} and {most:g}", fix=f"use {name} {least:g}"
            )


def _refuse_launcher() -> None:
    from phalanx.elastic.launchers import refuse_several

    refuse_several(os.environ, WHERE)


def drill_plan(call: DrillCall) -> Plan:
    """Plan the job as `train` does, with digests on, which the proof rests on."""
    from phalanx.train import prepare

    # By chance four faults may follow each other without a step between; a separate drill tests the crash loop.
    patience = [f"fault.restarts={CHAOS_RESTARTS}"] if call.chaos else []
    overrides = ["fault.digest_every=1", *patience, *call.overrides]
    resolved = prepare.load_job(call.job, overrides=overrides, cluster=call.cluster, steps=call.steps)
    if resolved.job.sync.has_peers and not call.peers:
        raise mistake(
            call.job,
            f'sync.mode = "{resolved.job.sync.mode}": its peers are what is drilled',
            fix="add --peers 4, or --set sync.mode=every-step to drill the ranks of one peer",
        )
    plan = prepare.plan_for_run(resolved)
    if call.minutes and not call.steps:
        # Enough steps for the duration: the low end of the predicted step time is the shortest step.
        steps = max(plan.duration.steps, int(60 * call.minutes / plan.prediction.step_s_low) + 1)
        resolved = prepare.load_job(call.job, overrides=overrides, cluster=call.cluster, steps=steps)
        plan = prepare.plan_for_run(resolved)
    prepare.check_code(plan.job, allowed=call.allow_code)
    prepare.check_here(plan)
    prepare.tell_sharing(plan, call.tell)
    base = resolved.path.parent
    prepare.check_inputs(plan.job, resolved, base, fresh=True)
    prepare.check_writable(call.runs, plan.job.checkpoint.path)
    plan = prepare.with_data(plan, base)
    findings = prepare.check_inputs(plan.job, resolved, base, fresh=True)
    warn((*findings.warnings, *prepare.check_data(plan)), call.tell)
    return plan


def make_scene(call: DrillCall, plan: Plan) -> DrillSettings:
    """Return the settings of a drill's run."""
    from phalanx.elastic.local_launch import rank_environ
    from phalanx.train.drill.perform import DrillSettings

    return DrillSettings(
        plan=plan,
        runs=call.runs,
        hosts=call.hosts,
        spares=call.spares,
        environ=rank_environ(os.environ, plan),
        allow_code=call.allow_code,
        minutes=call.minutes,
        replay=call.replay,
        drawn=call.chaos,
        tell=call.tell,
    )


def _shrink_faults(call: DrillCall, scene: DrillSettings, faults: Sequence[Fault], outcome: DrillOutcome) -> None:
    """Search for the smallest failing schedule, and print the command that repeats it."""
    from phalanx.train.drill.perform import perform_drill
    from phalanx.train.drill.schedule import shrink_schedule

    budget_s = max(LEAST_SHRINK_S, SHRINK_FACTOR * outcome.numbers.wall_s)
    call.tell(f"looking for the smallest schedule that fails, for up to {budget_s:.0f} s")

    def fails(some: Sequence[Fault]) -> bool:
        quiet = replace(scene, minutes=_length_min(some), tell=silent)
        return perform_drill(quiet, some).broken

    smallest = shrink_schedule(faults, fails, budget_s=budget_s)
    words = " ".join(f"--fault {fault.text}" for fault in smallest)
    enough = "is enough" if len(smallest) == 1 else "are enough"
    call.tell(f"{len(smallest)} of {plural(len(faults), 'fault')} {enough}:")
    call.tell(
        f"  phalanx drill {call.job} --hosts {call.hosts} --spares {call.spares} "
        f"--minutes {_length_min(smallest):g} {words}"
    )


def _length_min(faults: Sequence[Fault]) -> float:
    """Return the minutes of a run that ends AFTER_S after the last fault."""
    return round((max((fault.at_s or 0.0 for fault in faults), default=0.0) + AFTER_S) / MINUTE_S, 2)


# ---- the standard drills ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteDrill:
    """One drill of the suite, judged, with its record."""

    part: SuitePart
    outcome: DrillOutcome
    record: Path


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class DrillSuite(PublicResult):
    """The standard drills with their results, and the rules they are evidence for."""

    drills: tuple[SuiteDrill, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """True if every verdict of every drill holds."""
        return all(suite_drill.outcome.ok for suite_drill in self.drills)

    def __str__(self) -> str:
        from phalanx.record.drill_record import store_path

        lines = [_suite_text(suite_drill) for suite_drill in self.drills]
        if self.ok:
            lines += [
                f"{format_seconds(self.seconds)}; saved to {store_path(os.environ)}, where phalanx check finds it",
                "signed with your key: phalanx check refuses records that were changed since",
            ]
        else:
            lines.append(f"{format_seconds(self.seconds)}; not saved: a drill that failed proves nothing")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return every drill with its record and result."""
        parts = [
            {
                "part": suite_drill.part.name,
                "record": str(suite_drill.record),
                "result": json_values(suite_drill.outcome),
            }
            for suite_drill in self.drills
        ]
        return {"ok": self.ok, "seconds": round(self.seconds, 1), "parts": parts}

    @property
    def exit_code(self) -> int:
        """0 if every verdict of every drill holds, 1 if one does not."""
        return 0 if self.ok else 1


def drill_suite(
    job: AnyJob,
    *,
    cluster: str | None = None,
    overrides: Overrides = (),
    runs: str | Path = "runs",
    ranks_per_gpu: int | None = None,
    allow_code: bool = False,
    progress: bool | Tell = False,
) -> DrillSuite:
    """Run the standard drills, which are evidence for rules of `check`; fixed, so that records are comparable.

    >>> print(drill_suite("job.toml"))  # doctest: +SKIP
    """
    from phalanx.train.drill.schedule import LEAST_WORLD, suite_parts
    from phalanx.train.prepare import need_torch

    require_spec(cluster, "phalanx.drill_suite")
    _refuse_launcher()
    need_torch()
    began_s = time.monotonic()
    call = DrillCall(
        job=job_as_file(job, Path(runs)),
        cluster=cluster,
        overrides=_with_sharing(overrides, ranks_per_gpu),
        runs=Path(runs),
        allow_code=allow_code,
        tell=teller(progress),
    )
    # The job unchanged: the length of its steps, and its number of ranks.
    plan = drill_plan(call)
    if plan.layout.devices < LEAST_WORLD:
        raise mistake(
            call.job,
            "has one rank",
            why="a drill asks what the others do when one is lost",
            fix="--cluster local-cpu:4 drills it on four ranks of this machine",
        )
    played = tuple(_play_drill(call, part) for part in suite_parts(plan.prediction.step_s))
    return DrillSuite(drills=played, seconds=time.monotonic() - began_s)


def _play_drill(call: DrillCall, part: SuitePart) -> SuiteDrill:
    """Perform one drill of the suite; the user's overrides take precedence over those of the drill."""
    from phalanx.train.drill.perform import perform_drill
    from phalanx.train.drill.schedule import judge_slow_rank, suite_faults

    drill_call = replace(
        call,
        overrides=(*part.overrides, *call.overrides),
        steps=part.steps,
        hosts=part.agents,
        spares=part.spares,
        replay=part.replay,
    )
    plan, faults = drill_plan(drill_call), suite_faults(part)
    on = f"{plural(plan.layout.devices, 'rank')}, {plan.layout.name}"
    call.tell(f"{part.name}: {plural(len(faults), 'fault')} in {plan.job.name} on {on}")
    outcome = perform_drill(make_scene(drill_call, plan), faults)
    extra_fields: dict[str, Any] = {"suite": True, "part": part.name}
    if part.slow_rank is not None:
        verdict = judge_slow_rank(outcome.run, slow_rank=part.slow_rank, world=plan.layout.devices)
        outcome = replace(outcome, verdicts=(*outcome.verdicts, verdict))
        extra_fields["named_right"] = verdict.ok
    return SuiteDrill(part=part, outcome=outcome, record=keep_record(drill_call, faults, outcome, plan, **extra_fields))


def _suite_text(one: SuiteDrill) -> str:
    """Describe what one drill proved, or what failed in it."""
    from phalanx.train.drill.schedule import claims_shown

    numbers = one.outcome.numbers
    counts = f"{plural(numbers.faults, 'fault')}, {plural(numbers.steps, 'step')}"
    head = f"{one.part.name}: {counts}; the run is {one.outcome.state}"
    wrong = [
        f"  {verdict.word}  {verdict.name}: {verdict.evidence}" for verdict in one.outcome.verdicts if not verdict.ok
    ]
    proved = "proved" if one.outcome.ok else "in doubt"
    rows = [
        (proved if happened else "not seen", claim, " ".join(rules))
        for claim, rules, happened in claims_shown(one.part, one.outcome)
    ]
    return "\n".join([head, *wrong, *text_table(rows, indent=2), f"  record: {one.record}"])
