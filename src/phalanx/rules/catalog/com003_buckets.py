"""COM003: gradient buckets are large enough for the latency, and small enough to overlap."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from phalanx.rules.catalog.com_messages import (
    BUCKET_MIB,
    MIB,
    Message,
    damaged_traffic,
    gradient_messages,
    message_time,
    sane,
)
from phalanx.rules.catalog.shared import launcher_may_shard, without_measurement
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Edit, Outcome, exempt, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule

# Share of a layer's compute: the backward pass has two of three matrix products.
BACKWARD = 2 / 3
# Trainers that fill buckets at every ZeRO stage: deepspeed/runtime/zero/stage_1_and_2.py, stage3.py.
BUCKETED = ("deepspeed",)
SIZES_MIB = tuple(2.0**power for power in range(13))  # 1 MiB to 4 GiB


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cost:
    """The cost of one bucket (start-up and transfer), and the exposed cost of all buckets in a step."""

    latency_s: float
    transfer_s: float
    buckets: float
    lost: float  # share of the step that all buckets add
    by: str  # algorithm that carries it

    @property
    def share(self) -> float:
        return self.latency_s / max(self.latency_s + self.transfer_s, 1e-30)


def check(evidence: Evidence, limits: Limits) -> Outcome:
    """Judge the gradient message with the largest cost."""
    if evidence.profile.name == "tpu":
        return exempt("the compiler merges the collectives of a TPU")
    if (damaged := damaged_traffic(evidence.the_plan)) is not None:
        return damaged
    sent = [message for message in gradient_messages(evidence) if message.axis != "expert data"]
    if not sent:
        return exempt("one data rank: no gradients travel")
    if (missing := without_measurement(evidence, "what a bucket costs")) is not None:
        return missing
    steps = evidence.setting_number("max_steps", "train_iters", "training.steps")
    if evidence.is_foreign and steps is not None and 0 < steps <= limits.number("few_steps"):
        return exempt("a few steps, to see whether they run: no bucket is worth a change")
    if launcher_may_shard(evidence):
        return unknown(
            "the file names neither DeepSpeed nor FSDP, and the launcher may: who sums gradients is not known"
        )
    buckets = evidence.practice.trainer in BUCKETED or evidence.setting_flag("deepspeed")
    sent = [_in_buckets(evidence, message) for message in sent] if buckets else sent
    costs = [(_message_cost(evidence, message), message) for message in sent]
    cost, message = max(costs, key=lambda pair: pair[0].lost)
    if evidence.the_plan.layout.zero > 0 and not buckets:
        return _judge_blocks(evidence, limits, cost, message)
    return _judge_buckets(evidence, limits, cost, message)


def _in_buckets(evidence: Evidence, one: Message) -> Message:
    """Regroup messages per block into buckets, for a trainer that fills buckets at every ZeRO stage."""
    total = one.count * one.nbytes
    bucket_mib = evidence.the_job.comm.bucket_mib
    size = min(total, (bucket_mib if not isinstance(bucket_mib, str) else BUCKET_MIB) * MIB)
    return replace(one, nbytes=size, count=max(1, math.ceil(total / max(size, 1.0)))) if total > 0 else one


def _message_cost(evidence: Evidence, one: Message) -> _Cost:
    plan = evidence.the_plan
    latency_s, transfer_s = _message_parts(evidence, one)
    b = plan.prediction.breakdown_s
    compute_s = sum(b.get(name, 0.0) for name in ("matmul_s", "attention_s", "elementwise_s"))
    # Below ZeRO-2, gradients are sent only in the last backward pass of a step.
    passes = plan.layout.accumulation if plan.layout.zero < 2 or plan.layout.pipeline > 1 else 1
    hidden_s = BACKWARD * compute_s / max(1, passes)
    wire_s = one.count * (latency_s + transfer_s)
    lost_s = min(one.count * latency_s, max(0.0, wire_s - hidden_s))
    if one.count < 2:
        # A single bucket is sent when backward is over, so nothing hides it.
        lost_s = wire_s
    return _Cost(
        latency_s=latency_s,
        transfer_s=transfer_s,
        buckets=one.count,
        lost=min(1.0, lost_s / max(plan.prediction.step_s, 1e-30)),
        by=_picked_carrier(evidence, one),
    )


def _message_parts(evidence: Evidence, one: Message) -> tuple[float, float]:
    """Return latency and transfer time of one message in seconds: by NCCL's model, on CPUs by the measured ring."""
    cluster = evidence.the_plan.cluster
    if evidence.profile.name != "cpu-gloo":
        time = message_time(one, cluster)
        # The call itself is not a reason to change a bucket: it takes 10 to 290 µs depending on the network, and
        # this one is not measured.
        return time.latency_s, time.call_s + time.transfer_s
    host = evidence.host
    alpha_s = (host.link_latency_s if host is not None else None) or cluster.link_latency_s
    rate = (host.link_bytes_per_s if host is not None else None) or cluster.link_bytes_per_s
    steps = (one.ranks - 1) * (2 if one.operation == "all-reduce" else 1)
    return steps * max(0.0, alpha_s), steps / one.ranks * one.nbytes / sane(rate)


def _picked_carrier(evidence: Evidence, one: Message) -> str:
    """Return NCCL's choice with its time, as `phalanx fabric collective` prints it."""
    if evidence.profile.name == "cpu-gloo":
        return "a ring of gloo"
    time = message_time(one, evidence.the_plan.cluster)
    low, high = 1e6 * time.low_s, 1e6 * time.high_s
    choice = f"{time.algorithm} {time.protocol}, {1e6 * time.seconds:,.0f} µs"
    return f"{choice} (80 % of systems: {low:,.0f} to {high:,.0f})"


def _cost_formula(cost: _Cost, one: Message) -> tuple[str, ...]:
    return (
        f"{one.operation} of {one.size} between {one.ranks:,} ranks: L / (L + S/B) = {1e6 * cost.latency_s:,.0f} µs / "
        f"({1e6 * cost.latency_s:,.0f} + {1e6 * cost.transfer_s:,.0f} µs) = {cost.share:.0%}, by {cost.by}",
        f"{cost.buckets:,.0f} of them in a step; what of their start-up nothing hides is {cost.lost:.1%} of the step",
    )


def _judge_blocks(evidence: Evidence, limits: Limits, cost: _Cost, one: Message) -> Outcome:
    """Judge FSDP, which reduces block by block: the size is that of the model's blocks, so only the cost counts."""
    max_block_share, least_lost = limits.number("block_share"), limits.number("least_loss")
    message = f"a block's gradients are {one.size}; {cost.share:.0%} of their time is start-up"
    if cost.share <= max_block_share or cost.lost < least_lost:
        hides = f"; backward hides all but {cost.lost:.1%} of the step" if cost.share > max_block_share else ""
        return passed(message + hides, formula=_cost_formula(cost, one), value=cost.share, threshold=max_block_share)
    inside = one.per_domain
    return failed(
        f"{message}, more than {max_block_share:.0%}",
        formula=_cost_formula(cost, one),
        value=cost.share,
        threshold=max_block_share,
        at="parallel.shard",
        impact=evidence.loses(cost.lost, "start-up of the reductions, as far as backward does not hide it"),
        fix=f"parallel.shard = {inside}: groups of {inside} sum inside a domain and once between domains (HSDP)"
        if 1 < inside < one.ranks
        else "fewer data ranks and more per rank: a larger batch.micro, or more context or pipeline ranks",
    )


def _judge_buckets(evidence: Evidence, limits: Limits, cost: _Cost, one: Message) -> Outcome:
    max_latency_share, min_buckets = limits.number("latency_share"), limits.number("least_buckets")
    # A default of another trainer was not chosen by the user: it has no line in the file.
    is_chosen = not isinstance(evidence.the_job.comm.bucket_mib, str) and (
        not evidence.is_foreign or evidence.place("comm.bucket_mib")[1] > 0
    )
    too_few, too_small = cost.buckets < min_buckets, cost.share > max_latency_share
    message = (
        f"{cost.buckets:,.0f} bucket{'s' * (cost.buckets != 1)} of {one.size}, {cost.share:.0%} of their time start-up"
    )
    is_bad = too_few or too_small
    if not is_bad or (not is_chosen and cost.lost < limits.number("least_loss")):
        hides = f"; backward hides all but {cost.lost:.1%} of the step" if is_bad else ""
        return passed(message + hides, formula=_cost_formula(cost, one), value=cost.share, threshold=max_latency_share)
    reason = f"fewer than {min_buckets:g}" if too_few else f"more than {max_latency_share:.0%}"
    return failed(
        f"{message}: {reason}",
        formula=_cost_formula(cost, one),
        value=cost.buckets if too_few else cost.share,
        threshold=min_buckets if too_few else max_latency_share,
        unit="buckets" if too_few else "",
        at="comm.bucket_mib",
        impact=evidence.loses(cost.lost, "start-up, or traffic that starts when backward is over"),
        edits=(_better_bucket(evidence, one, most=max_latency_share, least=min_buckets),),
    )


def _better_bucket(evidence: Evidence, one: Message, *, most: float, least: float) -> Edit:
    """Return an edit to the smallest power of two that amortises the start-up, if that leaves enough buckets."""
    total_bytes = one.nbytes * one.count
    for mib in SIZES_MIB:
        latency_s, transfer_s = _message_parts(evidence, replace(one, nbytes=mib * MIB))
        if total_bytes / (mib * MIB) >= least and latency_s / (latency_s + transfer_s) <= most:
            return Edit(key="comm.bucket_mib", value=int(mib), safe=True, note=f"start-up at most {most:.0%}")
    largest_mib = max(0.001, total_bytes / MIB / max(least, 1.0))
    return Edit(
        key="comm.bucket_mib",
        value=float(f"{largest_mib:.3g}"),
        safe=True,
        note=f"{least:g} buckets, as large as can be",
    )


RULE = Rule(
    id="COM003",
    slug="bucket-size",
    severity="warning",
    requires="JP",
    uses="H",
    requirement="Gradient buckets are large enough that latency is a tenth of their time, and there are at least two.",
    why="""
Every bucket pays the start-up of its collective: 100 µs for a tree over 16 nodes, 300 µs for a ring over 128 ranks. In
one piece it starts only when backward is over, and nothing hides it. DistributedDataParallel takes 25 MiB
(Li et al., arXiv:2006.15704); over many nodes that is mostly start-up.
""",
    how="""
`L / (L + S/B) ≤ 0.10` for a bucket of S bytes, L the start-up that NCCL counts for its own pick and S/B the rest of the
time that `phalanx fabric collective` prints for it (on CPUs: the ring's measured latency and rate), and at least 2
buckets in a backward pass. What nobody chose, the trainer's own 25 MiB and the blocks that FSDP reduces one by one, is
a finding only where its start-up costs 1 % of the step: the number of buckets times L, less what the backward pass
hides. For CPUs blocks are reported only.
""",
    limits={
        "few_steps": Limit(value=100, unit="steps", note="of another trainer's file that is a test: our choice"),
        "latency_share": Limit(value=0.10, note="start-up over the time of a bucket: our choice"),
        "block_share": Limit(
            value=0.10,
            profiles={"cpu-gloo": 1.0},
            note="the same for blocks under ZeRO; not judged on CPUs: our choice",
        ),
        "least_buckets": Limit(value=2.0, unit="buckets", note="so that the first can leave before the last is ready"),
        "least_loss": Limit(value=0.01, note="of the step, below which what nobody chose is let be: our choice"),
    },
    bad="""
[parallel]
tensor = 8
zero = 0

[comm]
bucket_mib = 1
""",
    good="""
[parallel]
tensor = 8
zero = 0

[comm]
bucket_mib = 256
""",
    fix='`--fix` writes the smallest power of two that will do; `"auto"` is the trainer\'s choice.',
    waive="Memory too tight for larger buckets: each is held twice while it travels.",
    references=(
        Reference(text="DistributedDataParallel, arXiv:2006.15704", mark="recalled"),
        Reference(text="NVIDIA/nccl src/graph/tuning.cc", mark="read"),
        Reference(text="the share of 0.10", mark="our choice"),
    ),
    check=check,
)
