"""The section [sync]: how peers that are joined by slow links exchange gradients or weights."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.io.limits import MAX_PEERS, MAX_SECONDS
from phalanx.job.key_rules import AUTO, Auto, choice, count, number

SYNC_MODES = ("every-step", "target-batch", "diloco", "quorum")
CODECS = ("fp32", "bf16", "int8", "int4", "topk-2bit")
AGGREGATIONS = ("mean", "clipped-mean", "trimmed-mean", "median", "sign")
# Of the steps; 20 % brought DiLoCo with H = 20 within 0.18 % of synchronous training in our runs.
WARM_UP_SHARE = 0.2
# Momentum of the outer step: 0.9 in runs of at least this many exchanges and inner steps, less in shorter ones
# (decision 0050).
LEAST_MOMENTUM, MOST_MOMENTUM = 0.5, 0.9
LONG_EXCHANGES, LONG_STEPS = 80, 1600
# Closest to honest training under attack: benchmarks/2026-11-19-slow-links-attacks.md.
ROBUST = "clipped-mean"
MOST_SUMMED_PEERS = 8  # largest number of peers whose sparse updates are summed: more were not measured
# Share of the values that topk-2bit sends: of each of up to four peers, and the least with more peers.
TOP_SHARE, LEAST_TOP_SHARE = 0.03, 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncSettings:
    """The exchange among peers, each a whole copy of the model behind a slow link.

    "every-step" is training without peers: all ranks are one job on one fast network.
    """

    mode: str = field(default="every-step", metadata=choice("when peers exchange what they learnt", *SYNC_MODES))
    peers: int = field(
        default=0,
        metadata=count(
            "peers that the plan assumes, and that phalanx train starts on this machine", least=0, most=MAX_PEERS
        ),
    )
    inner_steps: int = field(default=50, metadata=count("optimizer steps of a peer between two exchanges (H)"))
    outer_learning_rate: float | Auto = field(
        default=AUTO,
        metadata=number(
            'learning rate of the outer Nesterov step; "auto" is 0.7, up to 1 in runs of fewer than 80 exchanges '
            "or 1,600 inner steps; with topk-2bit the number of peers whose updates are averaged, up to 8",
            above=True,
            most=100.0,
            auto=True,
        ),
    )
    outer_momentum: float | Auto = field(
        default=AUTO,
        metadata=number(
            'momentum of the outer Nesterov step; "auto" is 0.9, down to 0.5 in runs of fewer than 80 exchanges '
            "or 1,600 inner steps, and 0 with topk-2bit",
            most=0.999,
            auto=True,
        ),
    )
    synchronous_steps: int | Auto = field(
        default=AUTO,
        metadata=count(
            'steps at the start that exchange gradients every time; "auto" is 20 % of the steps', least=0, auto=True
        ),
    )
    fragments: int = field(
        default=1, metadata=count("parts of the model that are exchanged one after the other", most=10_000)
    )
    delay_steps: int = field(
        default=0, metadata=count("steps that go on between sending an update and applying the result", least=0)
    )
    local_share: float = field(
        default=0.0, metadata=number("share of a peer's own weights that stays when the result is mixed in", most=0.99)
    )
    codec: str = field(default="fp32", metadata=choice("how updates are written on the wire", *CODECS))
    top_share: float | Auto = field(
        default=AUTO,
        metadata=number(
            'share of the values that topk-2bit sends; "auto" is 0.03, and less with more than four peers, so that '
            "each of them receives no more",
            above=True,
            most=1.0,
            auto=True,
        ),
    )
    feedback: float = field(
        default=0.95, metadata=number("share of what int4 and topk-2bit left out that the next update carries", most=1)
    )
    quorum: int = field(
        default=0, metadata=count("peers whose results are enough for a round; 0 is all", least=0, most=MAX_PEERS)
    )
    grace_s: float = field(
        default=5.0, metadata=number("seconds that a round with a quorum waits for more results", most=MAX_SECONDS)
    )
    late: str = field(
        default="drop",
        metadata=choice("a result that comes after its round is dropped, or counted in the next", "drop", "count"),
    )
    screening: str = field(
        default="norm",
        metadata=choice(
            "an update is dropped for its norm, or also when it raises the loss on held-out text", "norm", "loss"
        ),
    )
    aggregation: str = field(
        default=AUTO,
        metadata=choice(
            'how the updates of a round become one; "auto" is the weighted mean in a trial on one machine, and a kind '
            "that a minority of liars cannot steer where members were invited",
            AUTO,
            *AGGREGATIONS,
        ),
    )
    gate_sequences: int = field(
        default=32,
        metadata=count(
            "held-out sequences on which peers evaluate each exchange of weights before it is committed; 0 is none",
            least=0,
            most=10_000,
        ),
    )
    heartbeat_s: float = field(
        default=0.5, metadata=number("seconds between signs of life to other peers", above=True, most=MAX_SECONDS)
    )
    dead_after_s: float = field(
        default=5.0, metadata=number("silence after which a peer is dead", above=True, most=MAX_SECONDS)
    )

    def outer_step(self, steps: int) -> tuple[float, float]:
        """Return the learning rate and momentum of the outer step, in a run of `steps` steps.

        A momentum of 0.9 moves the weights up to seven times as far as peers went. Over hundreds of exchanges that is
        DiLoCo's setting (arXiv:2311.08105); in runs of 480 steps it lost 1 to 5 % more than 0.5, in runs of 1,280
        less. The part that topk-2bit omits and carries along acts as a momentum already, as in SparseLoCo
        (arXiv:2508.15706); `update_scale` determines how far its steps go. Both in
        benchmarks/2026-11-18-peers-quality.md.

        >>> [SyncSettings(mode="diloco", inner_steps=20).outer_step(steps) for steps in (200, 1000, 10_000)]
        [(1.0, 0.5), (0.775, 0.8), (0.7, 0.9)]
        >>> SyncSettings(mode="diloco", inner_steps=5).outer_step(600)  # many exchanges, few steps
        (0.875, 0.6667)
        >>> SyncSettings(mode="diloco", codec="topk-2bit").outer_step(10_000)
        (1.0, 0.0)
        """
        peer_steps = max(1, steps - self.warm_up_steps(steps))
        shortness = max(LONG_STEPS / peer_steps, LONG_EXCHANGES * self.inner_steps / peer_steps)
        momentum = min(max(1.0 - (1.0 - MOST_MOMENTUM) * shortness, LEAST_MOMENTUM), MOST_MOMENTUM)
        # From 1 at the least momentum down to DiLoCo's 0.7 at the most.
        rate = 1.0 - 0.3 * (momentum - LEAST_MOMENTUM) / (MOST_MOMENTUM - LEAST_MOMENTUM)
        if self.codec == "topk-2bit":
            rate, momentum = 1.0, 0.0
        return (
            round(rate, 4) if isinstance(self.outer_learning_rate, str) else self.outer_learning_rate,
            round(momentum, 4) if isinstance(self.outer_momentum, str) else self.outer_momentum,
        )

    def update_scale(self, counted: int) -> float:
        """Return the factor on the mean of `counted` peers' updates before the outer step (decision 0058).

        With topk-2bit most values are sent by only one peer, so the mean, which divides by all peers, moves too
        little; the sum moves as far as was sent. Above eight peers it was not measured whether the sum is too much.

        >>> [SyncSettings(codec="topk-2bit").update_scale(counted) for counted in (1, 4, 40)]
        [1.0, 4.0, 8.0]
        >>> SyncSettings(codec="topk-2bit", outer_learning_rate=1.0).update_scale(4), SyncSettings().update_scale(4)
        (1.0, 1.0)
        """
        if self.codec != "topk-2bit" or not isinstance(self.outer_learning_rate, str):
            return 1.0
        return float(min(max(counted, 1), MOST_SUMMED_PEERS))

    def sent_share(self) -> float:
        """Return the share of the values that topk-2bit sends; every peer receives what the n - 1 others sent.

        All peers together send as many values as four peers do with 3 % each, but no peer sends less than 0.5 %.

        >>> [SyncSettings(peers=peers).sent_share() for peers in (0, 2, 4, 8, 40)]
        [0.03, 0.03, 0.03, 0.0129, 0.005]
        """
        if not isinstance(self.top_share, str):
            return self.top_share
        return max(LEAST_TOP_SHARE, round(TOP_SHARE * 3 / max(3, self.peers - 1), 4))

    def aggregation_among(self, *, invited: bool) -> str:
        """Return how updates are aggregated, among invited peers or among peers of one owner (decision 0070).

        >>> [SyncSettings().aggregation_among(invited=invited) for invited in (False, True)]
        ['mean', 'clipped-mean']
        >>> SyncSettings(aggregation="median").aggregation_among(invited=False)
        'median'
        """
        if self.aggregation != AUTO:
            return self.aggregation
        return ROBUST if invited else "mean"

    @property
    def has_peers(self) -> bool:
        """True if the job trains with peers."""
        return self.mode != "every-step"

    def warm_up_steps(self, steps: int) -> int:
        """Return the number of steps at the start that exchange gradients every time, in a run of `steps` steps.

        >>> SyncSettings(mode="diloco").warm_up_steps(400), SyncSettings(mode="target-batch").warm_up_steps(400)
        (80, 0)
        """
        if self.mode not in ("diloco", "quorum"):
            return 0
        if self.synchronous_steps == AUTO:
            return round(WARM_UP_SHARE * steps)
        return min(int(self.synchronous_steps), steps)
