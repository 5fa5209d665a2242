"""A drill of peers on slow links: start their processes, inject the faults, judge the records, render the result."""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.elastic.local_launch import collected_signals
from phalanx.io.tables import text_table
from phalanx.io.toml import to_toml
from phalanx.job.load import job_to_dict
from phalanx.peers.identity import PeerIdentity
from phalanx.plan.plan import Plan
from phalanx.record.events import read_events
from phalanx.record.provenance import job_provenance
from phalanx.record.run import Run, create_run, open_run
from phalanx.train.data.batches import BatchPlan
from phalanx.train.drill import firings
from phalanx.train.drill.drill_report import MOST_ROWS
from phalanx.train.drill.faults import PEER_FAULTS, Fault, parse_fault, parse_faults
from phalanx.train.drill.judge import Verdict, evidence_text
from phalanx.train.drill.peer_cables import PeerCables
from phalanx.train.drill.peer_driver import DrilledPeer, PeerDriver, drilled_peers
from phalanx.train.drill.peer_judge import (
    EXCLUDED,
    PeerFaultOutcome,
    PeerRecord,
    judge_loss,
    judge_named,
    judge_peers,
    peer_outcomes,
)
from phalanx.train.drill.perform import judge_injected
from phalanx.train.drill.schedule import poisson_times
from phalanx.train.slow_links.peer_launch import make_trial
from phalanx.train.slow_links.peer_session import peers_folder
from phalanx.units import MINUTE_S, first_few, format_seconds, plural

# Time for all peers to meet in a round again after the last fault.
SETTLE_S = 180.0
# Bandwidth that every peer states where losses are compared: `clipped-mean` depends on the bounds of shares.
EQUAL_MBPS = 100.0
BACK_OFF_S = 120.0  # for starts of processes
LINKS = ("partition", "slow-link")
# Faults that only a member commits whom the owner does not trust.
LIES = ("lie", "poison", "liar")
# Folder of the run without lies, inside the first peer's run.
HONEST = "honest"
# Folder of the other peers' runs, inside the first peer's run.
OTHERS = "others"


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerDrillSettings:
    """The settings of a drill of peers."""

    plan: Plan
    runs: Path
    peers: int
    minutes: float = 0.0
    drawn: bool = False  # the faults were drawn at random
    allow_code: bool = False
    has_liars: bool = False  # faults of LIES: updates are aggregated as among invited members
    # With another run: all peers learn from equal shares of the samples, and average equal shares of the vector.
    compares_loss: bool = False
    # Those of another run's peers; empty for new ones.
    identities: tuple[PeerIdentity, ...] = ()
    tell: Callable[[str], None] = lambda text: None


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerDrillNumbers:
    """The measurements of a drill."""

    wall_s: float
    peers: int
    rounds: int
    steps: int
    faults: int
    members: float  # peers in a round, on average
    longest_s: float  # between two rounds
    met_s: float | None  # from the last fault's end until all peers were in one round


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerDrillResult:
    """The verdicts and measurements of a drill of peers."""

    run: Run
    state: str
    message: str
    outcomes: tuple[PeerFaultOutcome, ...]
    not_fired: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    numbers: PeerDrillNumbers

    @property
    def ok(self) -> bool:
        """True when every verdict holds; one that could not be judged does not."""
        return all(verdict.ok for verdict in self.verdicts)

    @property
    def broken(self) -> bool:
        """True when a verdict that could be judged does not hold."""
        return any(verdict.judged and not verdict.ok for verdict in self.verdicts)

    def __str__(self) -> str:
        return render_peer_drill(self)


def perform_peer_drill(scene: PeerDrillSettings, faults: Sequence[Fault]) -> PeerDrillResult:
    """Train with all peers on this machine, with the faults, and judge their records.

    With faults of the kind `lie` the job is trained again with honest peers, and the final losses are compared.
    """
    liars = {number for fault in faults if fault.kind == "lie" for number in fault.peer}
    if any(fault.kind in LIES for fault in faults):
        scene = replace(scene, has_liars=True, compares_loss=bool(liars))
        aggregation = scene.plan.job.sync.aggregation_among(invited=True)
        scene.tell(f'  updates are aggregated by "{aggregation}", as where members were invited')
    result, records = train_drilled_peers(scene, faults)
    if not liars:
        return result
    departures = honest_departures(records, liars, inner_steps=scene.plan.job.sync.inner_steps)
    scene.tell("  the same run with the same members and no lies, to compare the loss")
    # The same identities: the samples dealt to a liar depend on its id, which made 0.007 nats of difference.
    repeated = replace(scene, runs=result.run.path / HONEST, identities=read_identities(result.run))
    _, honest = train_drilled_peers(repeated, departures)
    return replace(result, verdicts=(*result.verdicts, judge_loss(records, honest, liars)))


def honest_departures(records: Sequence[PeerRecord], liars: Collection[int], *, inner_steps: int) -> tuple[Fault, ...]:
    """Return faults that make each excluded liar leave as an honest peer, before the exchange in which it was excluded.

    Fewer peers take more samples each between two exchanges of the same global batch: three ended 0.03 nats below four.
    """
    steps: dict[int, int] = {}
    for number in sorted(liars):
        ids = {record.id for record in records if record.number == number}
        excluded = [
            int(event["step"])
            for record in records
            if record.number not in liars
            for event in record.of("peer")
            if event.get("kind") in EXCLUDED and event.get("peer") in ids
        ]
        if excluded:
            # The step after the exchange before.
            steps[number] = max(0, min(excluded) - inner_steps)
    texts = [f"leave:peer={number},step={step}" for number, step in steps.items()]
    return parse_faults(texts, kinds=PEER_FAULTS)


def read_identities(first: Run) -> tuple[PeerIdentity, ...]:
    """Return the identities of all peers of a drill in order of their numbers, from the run of the first."""
    runs = [first, *(open_run(folder) for folder in (first.path / OTHERS).iterdir())]
    runs.sort(key=lambda run: int(run.launch()["peer_number"]))
    return tuple(PeerIdentity.load(peers_folder(run)) for run in runs)


def train_drilled_peers(scene: PeerDrillSettings, faults: Sequence[Fault]) -> tuple[PeerDrillResult, list[PeerRecord]]:
    """Train one run with all peers and the faults; returns the verdicts on it and the records of the peers."""
    runs = _make_runs(scene, faults)
    scene.tell(f"  run: {runs[0].path}")
    peers, sync = drilled_peers(runs), scene.plan.job.sync
    began_s = time.time()
    with ExitStack() as stack:
        cables = None
        if any(fault.kind in LINKS for fault in faults):
            cables = stack.enter_context(PeerCables({peer.number: _target(peer) for peer in peers}))
        driver = PeerDriver(
            peers,
            faults,
            cables=cables,
            minutes=scene.minutes,
            settle_s=SETTLE_S,
            patience_s=scene.plan.job.comm.init_timeout_s + 2 * sync.dead_after_s + BACK_OFF_S,
            allow_code=scene.allow_code,
            tell=scene.tell,
        )
        stop_signals = stack.enter_context(collected_signals())
        driver.run(lambda: bool(stop_signals))
        interrupted = stop_signals[-1] if stop_signals else None
    if interrupted is not None:
        signal.raise_signal(interrupted)
        raise KeyboardInterrupt
    end_s = time.time()
    skewed = {number for fault in faults if fault.kind == "clock-skew" for number in fault.peer}
    records = _read_records(peers, skewed)
    return _judge(scene, faults, peers, records, driver, began_s=began_s, end_s=end_s), records


def _read_records(peers: Sequence[DrilledPeer], skewed: Collection[int]) -> list[PeerRecord]:
    return [
        PeerRecord(
            number=peer.number,
            id=peer.id,
            events=read_events(peer.run.events(0))[0] if peer.run.events(0).exists() else [],
            has_true_clock=peer.number not in skewed,
        )
        for peer in peers
    ]


def _target(peer: DrilledPeer) -> Callable[[], tuple[str, int] | None]:
    return lambda: peer.address


def _make_runs(scene: PeerDrillSettings, faults: Sequence[Fault]) -> list[Run]:
    """Make one run folder per peer; the others' lie in the first one's, so that the evidence is in one place."""
    plan, job = scene.plan, job_to_dict(scene.plan.job)
    runs: list[Run] = []
    for number in range(1, scene.peers + 1):
        root = runs[0].path / OTHERS if runs else scene.runs
        stem = plan.job.name if number == 1 else f"{plan.job.name[:54]}-peer-{number}"
        run = create_run(root, stem, job_toml=to_toml(job), job=job, plan_json=plan.to_json())
        run.set_launch(
            v=1,
            world=plan.layout.devices,
            layout=plan.layout.name,
            started=round(time.time(), 3),
            data_s=0.0,
            allow_code=scene.allow_code,
            drill=True,
            peer_number=number,
            provenance=job_provenance(job),
        )
        peer_faults = [fault for fault in faults if number == 1 or (fault.of.inside and number in fault.peer)]
        firings.write_schedule(run, peer_faults)
        runs.append(run)
    make_trial(runs[0], runs[1:], mbps=EQUAL_MBPS if scene.compares_loss else None, known=scene.identities)
    for run in runs:
        run.set_launch(**{**run.launch(), "drills_liars": scene.has_liars, "equal_shares": scene.compares_loss})
    return runs


# ---- verdicts --------------------------------------------------------------------------------------------------------


def _judge(
    scene: PeerDrillSettings,
    faults: Sequence[Fault],
    peers: Sequence[DrilledPeer],
    records: Sequence[PeerRecord],
    driver: PeerDriver,
    *,
    began_s: float,
    end_s: float,
) -> PeerDrillResult:
    job = scene.plan.job
    shots = [shot for peer in peers for shot in firings.read_firings(peer.run)]
    outcomes = peer_outcomes(records, faults, shots)
    batches = BatchPlan.of(job.batch, sequence=job.data.sequence, tokens=scene.plan.duration.tokens)
    sizes = {step: batches.at(step)[1] for step in range(scene.plan.duration.steps)}
    verdicts = judge_peers(records, sequence=job.data.sequence, batches=sizes)
    lasting = {fault.text: fault.for_s for fault in faults}
    verdicts.append(judge_named(records, outcomes, dead_after_s=job.sync.dead_after_s, end_s=end_s, lasting=lasting))
    if scene.minutes:
        verdicts.append(_judge_met(driver))
    named = {number for outcome in outcomes if outcome.noticed_s is not None for number in outcome.peers}
    ending, state = _judge_ending(peers, faults, driver, named)
    verdicts.append(ending)
    counts = Counter(shot.id for shot in shots)
    if not scene.drawn:
        verdicts.append(judge_injected(faults, counts))
    return PeerDrillResult(
        run=peers[0].run,
        state=state,
        message=driver.stuck,
        outcomes=tuple(outcomes),
        not_fired=tuple(fault.text for fault in faults if not counts[fault.id]),
        verdicts=tuple(verdicts),
        numbers=_numbers(records, outcomes, driver, wall_s=end_s - began_s),
    )


def _judge_met(driver: PeerDriver) -> Verdict:
    name, met_s = "all peers meet again", driver.met_s
    if met_s is None:
        return Verdict(name=name, ok=False, evidence=f"not within {SETTLE_S:g} s of the last fault's end")
    return Verdict(name=name, ok=True, evidence=f"in one round {format_seconds(met_s)} after the last fault's end")


def _judge_ending(
    peers: Sequence[DrilledPeer], faults: Sequence[Fault], driver: PeerDriver, named: Collection[int]
) -> tuple[Verdict, str]:
    """Judge whether every peer that was not removed for good trained to the end, or left when it was asked to."""
    liars = {number for fault in faults if fault.kind == "lie" for number in fault.peer}
    excluded = {number for number in liars if number in named}
    wrong, states = [driver.stuck] if driver.stuck else [], Counter[str]()
    back = {number for fault in faults if fault.kind in ("kill", "leave") and fault.for_s for number in fault.peer}
    for peer in peers:
        state = str(peer.run.status().get("state"))
        states[state] += 1
        if peer.is_gone or peer.is_held or peer.number in excluded:
            continue
        code = peer.process.returncode if peer.process is not None else None
        if state not in ("done", "stopped") or code != 0:
            late = " (it came back when the others had ended)" if peer.number in back else ""
            wrong.append(f"peer {peer.number} is {state}, exit code {code}: {peer.run.status().get('message')}{late}")
    text = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    state = "stuck" if driver.stuck else str(peers[0].run.status().get("state"))
    return Verdict(name="the run ended well", ok=not wrong, evidence=evidence_text(text, wrong)), state


def _numbers(
    records: Sequence[PeerRecord], found: Sequence[PeerFaultOutcome], driver: PeerDriver, *, wall_s: float
) -> PeerDrillNumbers:
    events = [event for record in records if record.has_true_clock for event in record.of("exchange")]
    firsts: dict[int, float] = {}
    sizes: dict[int, int] = {}
    for event in events:
        number = int(event["round"])
        firsts[number] = min(firsts.get(number, float("inf")), float(event["t"]))
        sizes[number] = len(event["members"])
    times = sorted(firsts.values())
    gaps = [later - before for before, later in itertools.pairwise(times)]
    steps = [int(event["step"]) + 1 for record in records for event in record.of("step")]
    return PeerDrillNumbers(
        wall_s=wall_s,
        peers=len(records),
        rounds=len(sizes),
        steps=max(steps, default=0),
        faults=len(found),
        members=sum(sizes.values()) / len(sizes) if sizes else 0.0,
        longest_s=max(gaps, default=0.0),
        met_s=driver.met_s,
    )


# ---- faults by chance ------------------------------------------------------------------------------------------------


def draw_peer_faults(
    *, peers: int, rate_per_min: float, minutes: float, seed: int, dead_after_s: float
) -> tuple[Fault, ...]:
    """Draw faults of peers that come and go; the same for the same seed.

    A majority of the peers is always present, and the first peer is never cut off. No fault begins in the last tenth
    of the time, so that all peers meet again before the end.
    """
    source = random.Random(seed)
    # Peer number -> seconds when it is back.
    busy: dict[int, float] = {}
    faults: list[Fault] = []
    for at_s in poisson_times(source, rate_per_min=rate_per_min, until_s=0.9 * minutes * MINUTE_S):
        kind = source.choice(("kill", "hang", "leave", "hang", "partition", "slow-link", "nan", "poison", "liar"))
        free = [number for number in range(1, peers + 1) if busy.get(number, 0.0) <= at_s]
        num_away = sum(until > at_s for until in busy.values())
        # Fewer than half are away at any time.
        most = (peers - 1) // 2 - num_away
        if most < 1 or not free:
            continue
        if kind == "partition":
            free = [number for number in free if number > 1]
        count = min(most, len(free), source.choice((1, 1, 2, 3)) if kind == "partition" else 1)
        if count < 1:
            continue
        whom = sorted(source.sample(free, count))
        length_s = round(source.choice((0.4, 1.5, 3.0)) * dead_after_s, 1)
        keys = {"peer": "+".join(map(str, whom)), "at_s": f"{at_s:.2f}"}
        if "for_s" in PEER_FAULTS[kind].keys:
            keys["for_s"] = f"{length_s:g}"
        if kind == "slow-link":
            keys["sleep_s"] = "0.2"
        words = ",".join(f"{key}={value}" for key, value in keys.items())
        faults.append(parse_fault(f"{kind}:{words}", id=len(faults), kinds=PEER_FAULTS))
        if kind in ("kill", "leave", "hang", "partition"):
            # A process that starts again imports torch first, which takes half a minute on a busy machine.
            start_s = 30.0 if kind in ("kill", "leave") else dead_after_s
            busy |= dict.fromkeys(whom, at_s + length_s + start_s)
    return tuple(faults)


# ---- text ------------------------------------------------------------------------------------------------------------


def render_peer_drill(result: PeerDrillResult) -> str:
    """Return the faults, verdicts and numbers as text."""
    numbers = result.numbers
    length = f"{plural(numbers.rounds, 'round')}, {plural(numbers.steps, 'step')}, {format_seconds(numbers.wall_s)}"
    head = (
        f"{plural(len(result.outcomes), 'fault')}, {plural(numbers.peers, 'peer')}, {length}; run state: {result.state}"
    )
    rows = [(verdict.word, verdict.name, verdict.evidence) for verdict in result.verdicts]
    lines = [head, *_fault_lines(result.outcomes)]
    if result.not_fired:
        lines.append(f"  not injected, because the run had ended: {first_few(result.not_fired, 4)}")
    lines += ["verdicts", *text_table(rows, indent=2)]
    longest = format_seconds(numbers.longest_s)
    lines.append(f"rounds had {numbers.members:.1f} peers on average; longest time between two: {longest}")
    return "\n".join(lines)


def _fault_lines(found: Sequence[PeerFaultOutcome]) -> list[str]:
    if not found:
        return []
    if len(found) <= MOST_ROWS:
        head = ("fault", "step", "noticed", "next round", "its peers", "back after")
        rows = [
            (
                outcome.fault,
                str(outcome.step),
                _seconds(outcome.noticed_s),
                _seconds(outcome.stalled_s),
                "" if outcome.members is None else str(outcome.members),
                _seconds(outcome.back_s),
            )
            for outcome in found
        ]
        return [f"  {line}" for line in text_table([head, *rows], right=(1, 2, 3, 4, 5))]
    titles = ("fault", "injected", "noticed", "next round at worst", "back at worst")
    kinds: list[tuple[str, ...]] = []
    for kind in dict.fromkeys(outcome.kind for outcome in found):
        of_kind = [outcome for outcome in found if outcome.kind == kind]
        noticed = sum(outcome.noticed_s is not None for outcome in of_kind)
        worst = [max((v for v in values if v is not None), default=None) for values in (
            [outcome.stalled_s for outcome in of_kind], [outcome.back_s for outcome in of_kind])]  # fmt: skip
        kinds.append((kind, f"{len(of_kind)}×", f"{noticed}×", _seconds(worst[0]), _seconds(worst[1])))
    return [f"  {line}" for line in text_table([titles, *kinds], right=(1, 2, 3, 4))]


def _seconds(value: float | None) -> str:
    return "" if value is None else format_seconds(value)
