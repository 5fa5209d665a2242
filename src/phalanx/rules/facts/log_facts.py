"""The facts of a run log in a fixed number of values: evidence L of the rules.

None and an empty tuple mean that the log does not contain the fact; a rule then answers `unknown`, never `pass`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.rules.outcome import Spot

TYPE_CHECKING = False
if TYPE_CHECKING:  # 70 ms that a check of a job does not need
    from phalanx.record.account.incidents import Incident
    from phalanx.record.account.ledger import Ledger
    from phalanx.record.account.stragglers import Straggler


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A summary of many numbers; quantiles come from a histogram and are within 2 %."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    most: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFacts:
    """Facts about steps, from the observer (the lowest rank on record) unless stated otherwise.

    Times and tokens (`duration_s` to `tokens_per_s`) are of the newest layout alone.
    """

    first: int
    last: int
    count: int  # steps that stayed
    again: int  # steps repeated after a restore
    duration_s: Spread | None = None  # without the first five steps of a membership and those that compiled
    drift: float | None = None  # median duration of the last quarter over that of the first, less 1
    data_share: float | None = None  # share of the step time spent waiting for batches
    tokens: Mapping[int, int] | None = None  # tokens of a step -> number of steps; at most 256 sizes, then None
    tokens_spot: Spot | None = None  # a step with the rarest size
    tokens_per_s: float | None = None  # mean
    not_finite: int = 0  # steps with a loss or norm that is not finite and that were not skipped
    not_finite_spot: Spot | None = None
    zero_norm: int = 0  # applied steps with a gradient norm of exactly 0
    zero_norm_spot: Spot | None = None
    skipped: int = 0
    skipped_in_a_row: int = 0
    skips_differ: Spot | None = None  # a step that one rank skipped and another did not
    worst_jump: float | None = None  # largest loss or gradient norm over its running mean, of steps not skipped
    worst_jump_spot: Spot | None = None
    worst_loss_jump: float | None = None  # of the loss alone: gradients are clipped, the loss is not
    worst_loss_jump_spot: Spot | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DigestFacts:
    """Digests of the replicated weights, one per (generation, step) and group of ranks with the same weights."""

    compared: int  # (generation, step) pairs reported by two or more ranks that hold the same weights
    every_steps: int | None  # usual distance between two digests, in steps
    differing: int = 0
    differing_spot: Spot | None = None
    alone: int = 0  # digests of weights that only one rank holds, which cannot be compared
    stale: int = 0  # steps for a generation older than one the rank had reported, or long after the next one began
    stale_spot: Spot | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseFacts:
    """The gradient noise scale, in sequences."""

    count: int
    gap_steps: float | None  # p99 of the distance between two values
    last: float | None
    growth: float | None  # last over the value at a tenth of the run
    has_parts: bool  # the log has noise_trace and grad_squared too
    error: float | None  # largest relative difference to the value computed from the parts; None without parts


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorFacts:
    """Device samples, over all ranks."""

    ranks: int  # ranks that have samples
    # Gap between two samples of a rank that is not exceeded for 99 % of its time, on 99 % of the ranks with samples.
    gap_s: float | None
    utilization: float | None  # mean
    lowest_hour: float | None  # lowest mean of an hour (of the whole run, when shorter)
    utilization_sources: tuple[str, ...] = ()
    memory_peak_bytes: float | None = None
    # Maximum held by the allocator of a GPU; None where no step logs its own peak.
    held_bytes: float | None = None
    pressure_mean: float | None = None
    pressure_source: str = ""
    allocation_retries: int | None = None
    energy_sources: tuple[str, ...] = ()
    energy_j: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerFacts:
    """Pings between neighbours."""

    ranks: int
    gap_s: float | None  # between two reports of a rank, as in MonitorFacts
    lost_share: float | None
    p99_s: float | None  # median over pairs


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFacts:
    """Facts about checkpoints, from the events of the ranks and from the checkpoint folder."""

    stages: int
    commits: int
    # Only saves that were due by the interval: those of a Ctrl-C, a SIGTERM, the end or a membership change come at
    # irregular times.
    interval_saves: int = 0  # committed saves
    blocked_s: Spread | None = None  # time in which training stood still
    persist_s: Spread | None = None  # time until safe on disk
    interval_s: Spread | None = None  # time since the previous commit of any kind in the same membership
    final_blocked_s: Spread | None = None  # the same for all other saves
    final_persist_s: Spread | None = None
    bytes: float | None = None  # of the last checkpoint
    errors: int = 0
    error_spot: Spot | None = None
    commits_without_stage: int = 0
    overlapping: int = 0  # stages begun before the previous checkpoint was committed
    disorder_spot: Spot | None = None
    restores: int = 0
    restored_uncommitted: int = 0  # restores of a step for which no commit was logged
    restored_spot: Spot | None = None
    kept: int | None = None  # committed checkpoints in the folder now
    incomplete: int | None = None  # folders with the name of a checkpoint but without a manifest
    # Steps whose checkpoints a roll-back set aside, if no checkpoint was committed since.
    given_up: tuple[int, ...] = ()
    rolled_back_to: int | None = None  # target step of the roll-back
    free_bytes: float | None = None  # on the disk that holds the checkpoints


@dataclass(frozen=True, kw_only=True, slots=True)
class GrammarFacts:
    """Facts on whether the log is complete, in order and attributable to a version."""

    unreadable: int = 0  # lines that are not events
    unreadable_spot: Spot | None = None
    invalid: int = 0  # events that break the schema
    invalid_spot: Spot | None = None
    invalid_text: str = ""
    unknown_kinds: Mapping[str, int] | None = None
    missing: tuple[str, ...] = ()  # events that must occur exactly once, or at least once, and are missing
    repeated: tuple[str, ...] = ()  # events that must occur once and occur more often
    out_of_order: int = 0  # events whose step or time goes back without a restore between
    out_of_order_spot: Spot | None = None
    unclosed: int = 0  # incidents after which neither a step nor an end was recorded
    skew_s: float | None = None  # largest difference between the clocks of ranks at the same step
    ranks_missing: tuple[int, ...] = ()
    secrets: int = 0  # lines that appear to contain credentials, in events and logs
    secrets_spot: Spot | None = None
    secrets_partial: bool = False  # some of the text was not searched
    has_provenance: bool | None = None  # versions, digest of the job, and commit or digest of the code are recorded
    job_changed: bool = False  # the digest of job.json differs from the one in the launch record


@dataclass(frozen=True, kw_only=True, slots=True)
class LogFacts:
    """All facts that rules read of a run. While the run continues, `is_over` is False and counts are those so far."""

    run: str
    folder: str
    state: str
    is_over: bool
    world: int
    ranks: tuple[int, ...]  # ranks that have a record
    wall_s: float | None
    ranks_read: int | None = None  # number of ranks whose events were read: with very many ranks, only some
    bytes_left: int = 0  # not read, because the run grows or the budget was used up
    steps: StepFacts | None = None
    digests: DigestFacts | None = None
    noise: NoiseFacts | None = None
    monitor: MonitorFacts | None = None
    peers: PeerFacts | None = None
    checkpoints: CheckpointFacts | None = None
    grammar: GrammarFacts = GrammarFacts()
    preflights: int | None = None  # memberships before which every host was checked
    memberships: int | None = None
    refused_hosts: int = 0
    incidents: tuple[Incident, ...] = ()
    detect_s: Spread | None = None  # from a failure to its notice
    recovery_s: Spread | None = None  # from a failure to the next step that stayed
    most_in_a_row: int = 0  # failures without a new step between them, at most
    ledger: Ledger | None = None
    effective: float | None = None  # share of the wall time that was effective training time
    lowest_hour: float | None = None  # lowest effective share of an hour
    stragglers: tuple[Straggler, ...] = ()
    straggler_scores: int | None = None  # number of ranks that have a score; None when no rank has one
    imbalance: float | None = None  # slowest rank's own time over the mean of all: T / T_ideal
    telemetry_share: float | None = None  # share of the step time spent on telemetry itself
    mfu: float | None = None
    usd: float | None = None
    energy_j: float | None = None
    listens: tuple[str, ...] = ()  # addresses that the coordinator, agents, store or metrics listened on
    is_drill: bool = False  # its failures were injected, so their rate shows nothing about the hardware
    message: str = ""  # first line of the message about the end in the run's status
