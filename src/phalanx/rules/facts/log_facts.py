"""What a run log says, in numbers of constant size: the L of the rules' evidence.

None, and an empty tuple, mean that the log does not say; a rule then answers `unknown`, never `pass`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.rules.outcome import Spot

TYPE_CHECKING = False
if TYPE_CHECKING:  # 70 ms that no check of a job needs
    from phalanx.record.account.incidents import Incident
    from phalanx.record.account.ledger import Ledger
    from phalanx.record.account.stragglers import Straggler


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Many numbers as a few; quantiles come from a histogram and are within 2 %."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    most: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFacts:
    """Steps, by the witness (the lowest rank on record) unless said otherwise.

    Times and tokens (`duration_s` to `tokens_per_s`) are of the newest layout alone.
    """

    first: int
    last: int
    count: int  # that stayed
    again: int  # done again after a restore
    duration_s: Spread | None = None  # steady ones: not the first five of a membership, not those that compiled
    drift: float | None = None  # median duration of the last quarter over that of the first, less 1
    data_share: float | None = None  # of the time, waiting for batches
    tokens: Mapping[int, int] | None = None  # tokens of a step -> how many steps; at most 256 sizes, then None
    tokens_spot: Spot | None = None  # a step with the rarest size
    tokens_per_s: float | None = None  # mean
    not_finite: int = 0  # steps with a loss or norm that is not finite, and that were not skipped
    not_finite_spot: Spot | None = None
    zero_norm: int = 0  # steps that were taken with a gradient norm of exactly 0
    zero_norm_spot: Spot | None = None
    skipped: int = 0
    skipped_in_a_row: int = 0
    skips_differ: Spot | None = None  # a step that one rank skipped and another did not
    worst_jump: float | None = None  # largest loss or gradient norm over its running mean, of steps not skipped
    worst_jump_spot: Spot | None = None
    worst_loss_jump: float | None = None  # asked by C: of the loss alone; gradients are clipped, the loss is not
    worst_loss_jump_spot: Spot | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DigestFacts:
    """Digests of the replicated weights: one per (generation, step), whoever computed it."""

    compared: int  # (generation, step) pairs of which two or more ranks that hold the same weights reported
    every_steps: int | None  # usual distance between two
    differing: int = 0
    differing_spot: Spot | None = None
    alone: int = 0  # digests of weights that one rank holds: nothing to compare them with
    stale: int = 0  # steps for a generation older than one the rank had reported, or long after the next one began
    stale_spot: Spot | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseFacts:
    """The gradient noise scale, in sequences."""

    count: int
    gap_steps: float | None  # p99 of the distance between two
    last: float | None
    growth: float | None  # last over the value at a tenth of the run
    has_parts: bool  # noise_trace and grad_squared stand beside it
    error: float | None  # largest relative difference to what the parts give; None without parts


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorFacts:
    """Samples of the devices, over all ranks."""

    ranks: int  # that have any
    gap_s: float | None  # between two of a rank: not exceeded for 99 % of its time, on 99 % of the ranks that have any
    utilization: float | None  # mean
    lowest_hour: float | None  # lowest mean of an hour (of the whole, when shorter)
    utilization_sources: tuple[str, ...] = ()
    memory_peak_bytes: float | None = None
    held_bytes: float | None = None  # by an allocator of a GPU, the most; None where no step told its own peak
    pressure_mean: float | None = None
    pressure_source: str = ""
    allocation_retries: int | None = None
    energy_sources: tuple[str, ...] = ()
    energy_j: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerFacts:
    """Pings between neighbours."""

    ranks: int
    gap_s: float | None  # between two reports of a rank, as of MonitorFacts
    lost_share: float | None
    p99_s: float | None  # median over pairs


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFacts:
    """Checkpoints, as the ranks told of them and as the folder shows them."""

    stages: int
    commits: int
    # Of saves that were due alone: those of a Ctrl-C, a SIGTERM, the end or a change of members come when they come.
    interval_saves: int = 0  # that were committed
    blocked_s: Spread | None = None  # training stood still
    persist_s: Spread | None = None  # until safe on disk
    interval_s: Spread | None = None  # from the commit before, of whatever kind, in the same membership
    final_blocked_s: Spread | None = None  # the same of all other saves
    final_persist_s: Spread | None = None
    bytes: float | None = None  # of the last one
    errors: int = 0
    error_spot: Spot | None = None
    commits_without_stage: int = 0
    overlapping: int = 0  # stages begun while the one before was not committed
    disorder_spot: Spot | None = None
    restores: int = 0
    restored_uncommitted: int = 0  # restores of a step that no commit was told of
    restored_spot: Spot | None = None
    kept: int | None = None  # commits in the folder now
    incomplete: int | None = None  # folders that look committed and lack their manifest
    given_up: tuple[int, ...] = ()  # steps whose checkpoints a roll-back set aside, where none was committed since
    rolled_back_to: int | None = None  # the step it went back to
    free_bytes: float | None = None  # on the disk they are on


@dataclass(frozen=True, kw_only=True, slots=True)
class GrammarFacts:
    """Whether the log is complete, ordered and attributable."""

    unreadable: int = 0  # lines that are no events
    unreadable_spot: Spot | None = None
    invalid: int = 0  # events that break the schema
    invalid_spot: Spot | None = None
    invalid_text: str = ""
    unknown_kinds: Mapping[str, int] | None = None
    missing: tuple[str, ...] = ()  # what a log must have exactly once, or at least once, and this one lacks
    repeated: tuple[str, ...] = ()  # what it must have once and has more often
    out_of_order: int = 0  # events whose step or time goes back without a restore between
    out_of_order_spot: Spot | None = None
    unclosed: int = 0  # incidents after which neither a step nor an end was recorded
    skew_s: float | None = None  # largest difference between the clocks of ranks at the same step
    ranks_missing: tuple[int, ...] = ()
    secrets: int = 0  # lines that look like credentials, in events and logs
    secrets_spot: Spot | None = None
    secrets_partial: bool = False  # there was more than is searched
    has_provenance: bool | None = None  # versions, digest of the configuration, commit of the code or its digest
    job_changed: bool = False  # job.json has another digest than the launch says


@dataclass(frozen=True, kw_only=True, slots=True)
class LogFacts:
    """Everything the rules ask of a run. While the run goes on, `is_over` is False and counts are "so far"."""

    run: str
    folder: str
    state: str
    is_over: bool
    world: int
    ranks: tuple[int, ...]  # that have a record
    wall_s: float | None
    ranks_read: int | None = None  # whose events were read, where those are not all: of very many, some
    bytes_left: int = 0  # not read: the run grows, or there was a budget
    steps: StepFacts | None = None
    digests: DigestFacts | None = None
    noise: NoiseFacts | None = None
    monitor: MonitorFacts | None = None
    peers: PeerFacts | None = None
    checkpoints: CheckpointFacts | None = None
    grammar: GrammarFacts = GrammarFacts()
    preflights: int | None = None  # memberships before which every host was looked at
    memberships: int | None = None
    refused_hosts: int = 0
    incidents: tuple[Incident, ...] = ()
    detect_s: Spread | None = None  # from a failure to its notice
    recovery_s: Spread | None = None  # from a failure to the next step that stayed
    most_in_a_row: int = 0  # failures without a new step between them
    ledger: Ledger | None = None
    effective: float | None = None  # share of the wall clock that trained
    lowest_hour: float | None = None  # of it
    stragglers: tuple[Straggler, ...] = ()
    straggler_scores: int | None = None  # ranks that have a score; None when there is none
    imbalance: float | None = None  # slowest rank's own time over the mean's: T / T_ideal
    telemetry_share: float | None = None  # of the step time, spent on telemetry itself
    mfu: float | None = None
    usd: float | None = None
    energy_j: float | None = None
    listens: tuple[str, ...] = ()  # addresses that control, store or metrics listened on
    is_drill: bool = False  # its failures were made on purpose: how often they came says nothing of the hardware
    message: str = ""  # first line of what the run's status says about its end
