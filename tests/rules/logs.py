"""Facts of a run with which every rule of the log is content, to be broken one at a time: `good_log(noise=None)`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phalanx.record.account.incidents import Incident
from phalanx.record.account.ledger import Ledger
from phalanx.record.account.time_accounts import Accounts
from phalanx.rules.facts.log_facts import (
    CheckpointFacts,
    DigestFacts,
    GrammarFacts,
    LogFacts,
    MonitorFacts,
    NoiseFacts,
    PeerFacts,
    Spread,
    StepFacts,
)

GiB = 2.0**30


def spread(value: float, *, count: int = 1000, wide: float = 1.0) -> Spread:
    """Numbers around a value; `wide` is the 95th percentile over the median."""
    return Spread(count=count, mean=value, p50=value, p95=value * wide, p99=value * wide, most=value * wide)


def incident(**changes: Any) -> Incident:
    """A device that fell, and was made good from memory within a minute."""
    fell = Incident(
        t=1_794_750_000.0,
        rank=77,
        host="host-9",
        what="killed by signal 9",
        step=4000,
        world=128,
        source="memory",
        restored_step=3999,
        recovery_s=45.0,
    )
    return replace(fell, **changes)


def ledger(**changes: Any) -> Ledger:
    """100,000 s, 97 % of them effective; accounts and wall clock agree to the second."""
    accounts = Accounts(
        productive=96_000.0,
        init=300.0,
        compile=60.0,
        data=500.0,
        stragglers=500.0,
        evaluate=600.0,
        checkpoint=400.0,
        guard=100.0,
        detect=10.0,
        restore=40.0,
        lost_work=10.0,
        stopping=60.0,
        other=1_420.0,
    )
    made = Ledger(
        wall_s=100_000.0,
        accounts=accounts,
        overlap_s=0.0,
        steps=9_700,
        steps_lost=1,
        incidents=1,
        formations=2,
        unreadable_lines=0,
    )
    return replace(made, **changes)


def good_log(**changes: Any) -> LogFacts:
    """Of the kit's good job: Llama 3 8B on 16 hosts of 8 H100, a day and four hours, one failure."""
    made = LogFacts(
        run="good-20261115-120000",
        folder="runs/good-20261115-120000",
        state="done",
        is_over=True,
        world=128,
        ranks=tuple(range(128)),
        wall_s=100_000.0,
        steps=good_steps(),
        digests=DigestFacts(compared=97, every_steps=100),
        noise=NoiseFacts(count=9_600, gap_steps=1.0, last=2_000.0, growth=1.5, has_parts=True, error=0.001),
        monitor=good_monitor(),
        peers=PeerFacts(ranks=128, gap_s=31.0, lost_share=0.0, p99_s=40e-6),
        checkpoints=good_checkpoints(),
        grammar=GrammarFacts(unknown_kinds={}, skew_s=0.05, has_provenance=True),
        preflights=2,
        memberships=2,
        incidents=(incident(),),
        detect_s=spread(8.0, count=1),
        recovery_s=spread(45.0, count=1),
        most_in_a_row=1,
        ledger=ledger(),
        effective=0.97,
        lowest_hour=0.93,
        straggler_scores=128,
        imbalance=1.02,
        telemetry_share=0.002,
        mfu=0.45,
        usd=9_000.0,
        energy_j=8.0e9,
        listens=("127.0.0.1",),
    )
    return replace(made, **changes)


def good_steps(**changes: Any) -> StepFacts:
    """9,700 steps of 10 s."""
    made = StepFacts(
        first=0,
        last=9_699,
        count=9_700,
        again=1,
        duration_s=spread(10.0, count=9_600, wide=1.03),
        drift=0.005,
        data_share=0.005,
        tokens={4_194_304: 9_700},
        tokens_per_s=419_430.0,
        worst_jump=1.8,
    )
    return replace(made, **changes)


def good_monitor(**changes: Any) -> MonitorFacts:
    """Samples of 128 H100s."""
    made = MonitorFacts(
        ranks=128,
        gap_s=10.4,
        utilization=0.88,
        lowest_hour=0.85,
        utilization_sources=("gpm-sm",),
        memory_peak_bytes=62 * GiB,
        held_bytes=66 * GiB,
        pressure_mean=0.77,
        pressure_source="limit",
        allocation_retries=0,
        energy_sources=("nvml",),
        energy_j=8.0e9,
    )
    return replace(made, **changes)


def good_checkpoints(**changes: Any) -> CheckpointFacts:
    """One about every half hour."""
    made = CheckpointFacts(
        stages=55,
        commits=55,
        interval_saves=55,
        blocked_s=spread(1.6, count=55),
        persist_s=spread(9.5, count=55),
        interval_s=spread(1_800.0, count=54),
        bytes=112e9,
        restores=1,
        kept=3,
        incomplete=0,
        free_bytes=4e12,
    )
    return replace(made, **changes)


def good_cpu_log(**changes: Any) -> LogFacts:
    """Four ranks on one host without a device: a few hundred short steps, and nothing fell."""
    made = good_log(
        run="first-20261115-120000",
        folder="runs/first-20261115-120000",
        world=4,
        ranks=(0, 1, 2, 3),
        wall_s=160.0,
        steps=good_steps(
            last=399,
            count=400,
            again=0,
            duration_s=spread(0.37, count=395, wide=1.2),
            tokens={4_096: 400},
            tokens_per_s=11_000.0,
        ),
        digests=DigestFacts(compared=4, every_steps=100),
        noise=NoiseFacts(count=300, gap_steps=1.0, last=40.0, growth=2.0, has_parts=True, error=0.0),
        monitor=good_monitor(
            ranks=4,
            utilization=0.45,
            lowest_hour=0.45,
            utilization_sources=("cpu-time",),
            memory_peak_bytes=0.6 * GiB,
            held_bytes=0.6 * GiB,
            pressure_mean=0.0,
            pressure_source="psi",
            allocation_retries=None,
            energy_sources=("estimate",),
            energy_j=5_000.0,
        ),
        peers=PeerFacts(ranks=4, gap_s=31.0, lost_share=0.0, p99_s=200e-6),
        checkpoints=good_checkpoints(
            stages=2,
            commits=2,
            blocked_s=spread(0.02, count=2),
            persist_s=spread(0.3, count=2),
            interval_s=spread(75.0, count=1),
            bytes=4e6,
            restores=0,
            kept=2,
            free_bytes=1e11,
        ),
        preflights=1,
        memberships=1,
        incidents=(),
        detect_s=None,
        recovery_s=None,
        most_in_a_row=0,
        ledger=ledger(
            wall_s=160.0,
            accounts=Accounts(
                productive=140.0, init=4.0, data=1.0, stragglers=6.0, checkpoint=2.0, evaluate=3.0, other=4.0
            ),
            steps=400,
            steps_lost=0,
            incidents=0,
            formations=1,
        ),
        effective=0.92,
        lowest_hour=0.9,
        straggler_scores=4,
        imbalance=1.05,
        mfu=0.6,
        usd=None,
        energy_j=5_000.0,
        listens=("127.0.0.1",),
    )
    return replace(made, **changes)
