"""Perform a drill: train with the faults, replay without them, judge both records."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from phalanx.elastic.local_launch import HostSpec, agent_command, launch, local_hosts
from phalanx.errors import PhalanxError
from phalanx.io.toml import to_toml
from phalanx.job.load import job_to_dict
from phalanx.plan.plan import Plan
from phalanx.record.provenance import job_provenance
from phalanx.record.run import Run, create_run
from phalanx.train.drill import firings, judge
from phalanx.train.drill.driver import DrillStuck, FaultDriver
from phalanx.train.drill.faults import EVERY_TIME, Fault, parse_fault
from phalanx.train.drill.judge import ExpectedSamples, Verdict
from phalanx.train.drill.network import DrillNetwork
from phalanx.train.drill.outcomes import FaultOutcome, fault_outcomes, judge_noticed, judge_refused
from phalanx.train.drill.replica_history import ReplicaPresence, judge_replica_history, left_out_ranks
from phalanx.train.drill.step_history import DrillHistory, layout_sequence, read_history
from phalanx.units import plural

BACK_OFF_S = 60.0  # pauses between attempts, and a start of the agents
# Beyond dead_after_s, for the incident of a fault to be written.
NOTICE_S = 5.0
# These need hosts with separate networks.
LINKS = ("partition", "slow-link", "lossy-link")


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillSettings:
    """The settings of a drill, the same for every attempt."""

    plan: Plan
    runs: Path
    hosts: int
    spares: int
    environ: Mapping[str, str]
    allow_code: bool = False
    # After so many minutes the run is asked to stop; 0: when its steps are done.
    minutes: float = 0.0
    replay: bool = True
    # The faults were drawn at random: some come too late, and not each of them must fire.
    drawn: bool = False
    tell: Callable[[str], None] = lambda text: None


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillNumbers:
    """The measurements of a drill, and the plan's predictions."""

    wall_s: float
    steps: int
    faults: int
    recovery_s: float | None  # median over the faults that required a recovery
    recovery_worst_s: float | None
    planned_recovery_s: float
    # Productive share of the time without start-up and shutdown; the ledger's is of all time.
    effective: float | None
    # Predicted with these failures, each at the cost that the plan assumed.
    planned_effective: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillResult:
    """The verdicts and measurements of a drill."""

    run: Run
    state: str
    message: str
    outcomes: tuple[FaultOutcome, ...]
    not_fired: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    numbers: DrillNumbers

    @property
    def ok(self) -> bool:
        """True when every verdict holds; one that could not be judged does not."""
        return all(verdict.ok for verdict in self.verdicts)

    @property
    def broken(self) -> bool:
        """True when a verdict that could be judged does not hold."""
        return any(verdict.judged and not verdict.ok for verdict in self.verdicts)


def perform_drill(
    scene: DrillSettings, faults: Sequence[Fault], *, reference: DrillHistory | None = None
) -> DrillResult:
    """Train with the faults, replay without them, and judge.

    A `reference` of the same member sequence saves the replay.
    """
    run = _make_run(scene, scene.runs, faults, {})
    scene.tell(f"  run: {run.path}")
    ended = _run_drill(scene, run, faults)
    history = read_history(run)
    presence = ReplicaPresence.of(history) if scene.plan.job.fault.on_loss == "leave-out" else None
    left_out = left_out_ranks(history, presence) if presence is not None else {}
    replayed = None
    if scene.replay and history.chain:
        is_alike = reference is not None and layout_sequence(history) == layout_sequence(reference) and not left_out
        replayed = reference if is_alike else _replay_drill(scene, run, history, left_out)
    shots = firings.read_firings(run)
    # With how = "raise" saves fail, but events are still written.
    lasted_s = {fault.id: fault.for_s for fault in faults if fault.kind == "disk-full" and fault.how == "limit"}
    full = [
        judge.FullDisk(pid=shot.pid, begin_s=shot.t_s, end_s=shot.t_s + lasted_s[shot.id])
        for shot in shots
        if shot.id in lasted_s
    ]
    expected = expected_samples(scene.plan)
    if presence is not None:
        verdicts = judge_replica_history(history, presence, expected=expected, replay=replayed)
    else:
        verdicts = judge.judge_history(history, expected=expected, replay=replayed, full=full)
    patience_s = scene.plan.job.fault.dead_after_s + NOTICE_S
    outcomes = fault_outcomes(history, faults, shots, patience_s=patience_s)
    verdicts.append(judge_noticed(outcomes, asked=len(faults), patience_s=patience_s, drawn=scene.drawn))
    verdicts += judge_refused(history, outcomes, drawn=scene.drawn)
    try:
        verdicts.append(judge.judge_ledger(run))
    except (PhalanxError, ImportError, KeyError, ValueError) as error:
        verdicts.append(Verdict(name="the ledger closes", ok=False, evidence=f"{type(error).__name__}: {error}"))
    verdicts.append(_ending_verdict(ended, history, faults, minutes=scene.minutes))
    counts = Counter(shot.id for shot in shots)
    missing = [fault.text for fault in faults if not counts[fault.id]]
    # Faults that chaos draws may come too late; faults that were named must have fired.
    if not scene.drawn:
        verdicts.append(judge_injected(faults, counts))
    return DrillResult(
        run=run,
        state=ended[0],
        message=ended[1],
        outcomes=tuple(outcomes),
        not_fired=tuple(missing),
        verdicts=tuple(verdicts),
        numbers=_drill_numbers(scene.plan, run, history, outcomes),
    )


def judge_injected(faults: Sequence[Fault], counts: Mapping[int, int]) -> Verdict:
    """Judge whether every named fault fired as often as it should; `counts` is by the fault's id."""
    wrong = [
        f"{fault.text} fired {counts.get(fault.id, 0):,} of {plural(fault.times, 'time')}"
        if fault.times > 1
        else fault.text
        for fault in faults
        if counts.get(fault.id, 0) < (fault.times if fault.times < EVERY_TIME else 1)
    ]
    text = ", ".join(wrong) if wrong else f"{len(faults):,} of {len(faults):,}"
    return Verdict(name="every fault was injected", ok=not wrong, evidence=text)


def _make_run(scene: DrillSettings, root: Path, faults: Sequence[Fault], more: Mapping[str, Any]) -> Run:
    plan = scene.plan
    job = job_to_dict(plan.job)
    run = create_run(root, plan.job.name, job_toml=to_toml(job), job=job, plan_json=plan.to_json())
    run.set_launch(
        v=1,
        world=plan.layout.devices,
        layout=plan.layout.name,
        started=round(time.time(), 3),
        data_s=0.0,
        allow_code=scene.allow_code,
        drill=True,
        provenance=job_provenance(job),
        **more,
    )
    firings.write_schedule(run, faults)
    return run


def _run_drill(
    scene: DrillSettings, run: Run, faults: Sequence[Fault], *, until_step: int | None = None
) -> tuple[str, str]:
    """Launch the run with its faults; returns (state, message) at the end."""
    with ExitStack() as stack:
        net = stack.enter_context(DrillNetwork(scene.hosts)) if any(fault.kind in LINKS for fault in faults) else None
        hosts = _drill_hosts(scene, net)
        minutes = scene.minutes if until_step is None else 0.0
        fault = scene.plan.job.fault
        driver = FaultDriver(
            run,
            faults,
            hosts=[host.name for host in hosts],
            net=net,
            minutes=minutes,
            until_step=until_step,
            patience_s=scene.plan.job.comm.init_timeout_s + fault.dead_after_s + BACK_OFF_S,
            tell=scene.tell,
        )
        stack.callback(driver.close)
        stack.enter_context(run.held())
        try:
            ended = launch(
                run,
                hosts=hosts,
                environ=scene.environ,
                tick=driver.tick,
                asked=lambda count: None,
                agent=agent_command(allow_code=scene.allow_code),
            )
        except DrillStuck as error:
            return "stuck", str(error)
    if len(ended.signals) > sum(fault.kind == "sigterm" for fault in faults):
        # The user wants the drill to end, not only this run: raise the signal again, with its usual effect.
        signal.raise_signal(ended.signals[-1])
        raise KeyboardInterrupt
    return ended.state, ended.message


def _drill_hosts(scene: DrillSettings, net: DrillNetwork | None) -> tuple[HostSpec, ...]:
    hosts = local_hosts(scene.plan.layout.devices, hosts=scene.hosts, spares=scene.spares)
    if net is None:
        return hosts
    return tuple(
        dataclasses.replace(host, address=net.address(number), prefix=net.prefix(number))
        for number, host in enumerate(hosts)
    )


def _replay_drill(
    scene: DrillSettings, run: Run, history: DrillHistory, left_out: Mapping[str, Sequence[int]]
) -> DrillHistory:
    """Train the same job with the same member sequence, without faults except steps that all ranks agreed to skip.

    Ranks that were `left_out` of a step take part in it and learn nothing from it.
    """
    poisoned = [
        execution.step for execution in history.chain if execution.skipped and _not_finite(execution.ranks.values())
    ]
    faults = [parse_fault(f"nan:rank=0,step={step}", id=number) for number, step in enumerate(poisoned)]
    again = _make_run(
        scene, run.path / "replay", faults, {"formations": layout_sequence(history), "left_out": left_out}
    )
    scene.tell(f"  replay of {plural(len(history.chain), 'step')} without faults")
    until = len(history.chain) if history.end is None or history.end.get("state") != "done" else None
    _run_drill(dataclasses.replace(scene, minutes=0.0), again, (), until_step=until)
    return read_history(again)


def expected_samples(plan: Plan) -> ExpectedSamples:
    """Return a function that gives the samples of a step in the sampler's order."""
    from phalanx.train.data.batches import BatchPlan
    from phalanx.train.data.token_samples import TokenDataset

    job = plan.job
    dataset = TokenDataset.open([Path(path) for path in job.data.paths], "train")
    sampler = dataset.sampler(job.data.sequence, job.data.seed)
    batches = BatchPlan.of(job.batch, sequence=job.data.sequence, tokens=plan.duration.tokens)
    return lambda step: [int(sample) for sample in sampler.indices(*batches.at(step))]


def _not_finite(events: Iterable[Mapping[str, Any]]) -> bool:
    return any(event.get("grad_norm") is None for event in events)


def _ending_verdict(
    ended: tuple[str, str], history: DrillHistory, faults: Sequence[Fault], *, minutes: float
) -> Verdict:
    """Judge the end of the run; `ended` is its state and message."""
    kinds = {fault.kind for fault in faults}
    wanted_states: tuple[str, ...]
    # With the slot excluded a run may continue.
    if any(fault.kind == "crash-loop" and fault.slot is None for fault in faults):
        wanted_states = ("failed",)
    elif "sigterm" in kinds:
        wanted_states = ("stopped",)
    else:
        wanted_states = ("done", "stopped") if minutes else ("done",)
    return judge.judge_ending(history, state=ended[0], wanted=wanted_states, message=ended[1])


def _drill_numbers(plan: Plan, run: Run, history: DrillHistory, found: Sequence[FaultOutcome]) -> DrillNumbers:
    times = [outcome.recovered_s for outcome in found if outcome.recovered_s is not None]
    effective, between_s = _measured_effective(run)
    failures = len({outcome.generation for outcome in found if outcome.recovered_s is not None})
    return DrillNumbers(
        wall_s=_wall_s(history),
        steps=len(history.chain),
        faults=len(found),
        recovery_s=median(times) if times else None,
        recovery_worst_s=max(times, default=None),
        planned_recovery_s=plan.job.fault.detect_s + plan.job.fault.restart_s,
        effective=effective,
        planned_effective=_planned_effective(plan, trained_s=(effective or 0.0) * between_s, failures=failures),
    )


def _planned_effective(plan: Plan, *, trained_s: float, failures: int) -> float:
    """Return the share of time that trains if each of the drill's failures cost what the plan assumed.

    With in-memory checkpoints only a step is redone. A drill fails far more often than a cluster, so its failures are
    added to the time that it trained: taken as a rate they could cost more time than there is.
    """
    figures = plan.reliability
    redone_s = (figures.memory_every * plan.prediction.step_s if figures.memory_every else figures.interval_s) / 2
    lost_s = plan.job.fault.detect_s + plan.job.fault.restart_s + redone_s
    spent_s = trained_s + failures * lost_s
    return (trained_s / spent_s if spent_s else 1.0) / (1 + figures.blocking_s / figures.interval_s)


def _wall_s(history: DrillHistory) -> float:
    moments = [float(event["t"]) for event in history.ranks] + [
        generation.began_s for generation in history.generations[:1]
    ]
    # No membership ever formed.
    if not moments:
        return 0.0
    return max([*moments, *([float(history.end["t"])] if history.end is not None else [])]) - min(moments)


def _measured_effective(run: Run) -> tuple[float | None, float]:
    """Return the share of the time between launch and end that trained, and that time in seconds.

    Start-up and shutdown are left out, because a plan does not predict them.
    """
    try:
        from phalanx.record.account.ledger import read_ledger

        ledger = read_ledger(run)
    except (PhalanxError, KeyError, ValueError):
        return None, 0.0
    between_s = ledger.wall_s - ledger.accounts.init - ledger.accounts.stopping
    return (ledger.accounts.productive / between_s if between_s > 0 else None), max(between_s, 0.0)
