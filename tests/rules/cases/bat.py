"""BAT001 to BAT004: the batch, its loss, its noise, and the pipeline it fills."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rules.kit import JOB, Case, Evidence, Flip, evidence
from rules.logs import good_log, good_steps

from phalanx.rules.facts.log_facts import NoiseFacts
from phalanx.rules.facts.trainers import Practice
from phalanx.rules.outcome import Spot

BATCH = 4_194_304
RAMP = f"{JOB}\n[[batch.ramp]]\nuntil_tokens = 1_000_000_000\nglobal_tokens = 2_097_152\n"
STAGED = ("parallel.pipeline=8", "parallel.schedule=1f1b", "parallel.zero=1")


def logged(text: str = JOB, **steps: Any) -> Evidence:
    return evidence(text=text, log=good_log(steps=good_steps(**steps)))


def noisy(last: float | None, *, growth: float = 1.5, count: int = 9_600, text: str = JOB) -> Evidence:
    noise = NoiseFacts(count=count, gap_steps=1.0, last=last, growth=growth, has_parts=True, error=0.0)
    return evidence(text=text, log=good_log(noise=noise))


def trained_by(name: str, weighted: bool | None, *, alone: bool = False) -> Evidence:
    found = evidence(practice=Practice(trainer=name, token_weighted_loss=weighted))
    if not alone:
        return found
    layout = replace(found.the_plan.layout, data=1, accumulation=1)
    return replace(found, plan=replace(found.the_plan, layout=layout))


def laid_out(**changes: Any) -> Evidence:
    found = evidence()
    return replace(found, plan=replace(found.the_plan, layout=replace(found.the_plan.layout, **changes)))


CASES = [
    Case(rule="BAT001", name="as declared", verdict="pass", evidence=evidence, says="512 sequences"),
    Case(
        rule="BAT001",
        name="one micro-batch more",
        verdict="fail",
        evidence=lambda: laid_out(accumulation=5),
        boundary=True,
        severity="error",
        says="640 sequences, and 512 are declared",
        at="batch.global_sequences",
    ),
    Case(
        rule="BAT001",
        name="padded as after a shrink",
        verdict="pass",
        evidence=lambda: laid_out(data=120, accumulation=5),
        says="512 sequences, as declared, and 88 rows of padding that do not count",
    ),
    Case(
        rule="BAT001",
        name="one micro-batch more than the padding takes",
        verdict="fail",
        evidence=lambda: laid_out(data=120, accumulation=6),
        says="720 sequences, and 512 are declared",
    ),
    Case(
        rule="BAT001",
        name="cannot be shared out",
        verdict="fail",
        evidence=lambda: evidence("batch.global_sequences=500"),
        says="cannot be divided evenly over 128 devices",
        at="batch.global_sequences",
    ),
    Case(rule="BAT001", name="no plan", verdict="unknown", evidence=lambda: evidence(plan=None)),
    Case(rule="BAT001", name="every step", verdict="pass", evidence=logged, says="9,700 steps had 4,194,304 tokens"),
    Case(
        rule="BAT001",
        name="one step one token short",
        verdict="fail",
        evidence=lambda: logged(
            tokens={BATCH: 9_699, BATCH - 1: 1}, tokens_spot=Spot(file="events/rank-0.jsonl", line=77)
        ),
        boundary=True,
        says="1 of 9,700 steps had another batch than declared, as 4,194,303 tokens for 4,194,304",
        at="events/rank-0.jsonl",
    ),
    Case(
        rule="BAT001",
        name="a ramp has two sizes",
        verdict="pass",
        evidence=lambda: logged(RAMP, tokens={BATCH: 9_000, BATCH // 2: 700}),
    ),
    Case(
        rule="BAT001",
        name="half a batch without a ramp",
        verdict="fail",
        evidence=lambda: logged(tokens={BATCH: 9_000, BATCH // 2: 700}),
    ),
    Case(rule="BAT001", name="no tokens in the log", verdict="unknown", evidence=lambda: logged(tokens=None)),
    Case(rule="BAT002", name="by tokens", verdict="pass", evidence=lambda: trained_by("phalanx", True)),
    Case(
        rule="BAT002",
        name="mean of means",
        verdict="fail",
        evidence=lambda: trained_by("megatron", False),
        severity="warning",
        says="megatron averages the means of 512 micro-batches",
    ),
    Case(
        rule="BAT002",
        name="mean of means of unequal sequences",
        verdict="fail",
        evidence=lambda: replace(
            trained_by("megatron", False), log=good_log(steps=good_steps(tokens={BATCH: 10, BATCH - 3: 1}))
        ),
        severity="error",
    ),
    Case(rule="BAT002", name="nobody knows", verdict="unknown", evidence=lambda: trained_by("other", None)),
    Case(
        rule="BAT002",
        name="one micro-batch",
        verdict="pass",
        evidence=lambda: trained_by("megatron", False, alone=True),
        boundary=True,
        says="nothing to average over",
    ),
    Case(rule="BAT003", name="no log", verdict="unknown", evidence=evidence, says="run log"),
    Case(rule="BAT003", name="small batch", verdict="pass", evidence=lambda: noisy(2_000.0), says="0.26x"),
    Case(rule="BAT003", name="at the noise scale", verdict="pass", evidence=lambda: noisy(512.0), boundary=True),
    Case(
        rule="BAT003",
        name="past the noise scale",
        verdict="fail",
        evidence=lambda: noisy(511.0),
        boundary=True,
        severity="warning",
        says="a token teaches 50% of what it would",
        at="batch.global_sequences",
    ),
    Case(
        rule="BAT003",
        name="a noise scale that grew",
        verdict="fail",
        evidence=lambda: noisy(2_000.0, growth=2.1),
        severity="info",
        says="grew 2.1x",
    ),
    Case(
        rule="BAT003",
        name="grew, with a ramp",
        verdict="pass",
        evidence=lambda: noisy(2_000.0, growth=2.1, text=RAMP),
    ),
    Case(rule="BAT003", name="too few", verdict="unknown", evidence=lambda: noisy(2_000.0, count=9)),
    Case(rule="BAT003", name="no estimate", verdict="unknown", evidence=lambda: noisy(None)),
    Case(rule="BAT003", name="not a number", verdict="unknown", evidence=lambda: noisy(float("nan"))),
    Case(rule="BAT004", name="one stage", verdict="pass", evidence=evidence, says="one stage"),
    Case(
        rule="BAT004",
        name="a quarter",
        verdict="pass",
        evidence=lambda: evidence("batch.global_sequences=448", *STAGED),
        boundary=True,
        says="idles 25%",
    ),
    Case(
        rule="BAT004",
        name="more than a quarter",
        verdict="fail",
        evidence=lambda: evidence("batch.global_sequences=432", *STAGED),
        boundary=True,
        severity="warning",
        says="idles 26%",
        at="parallel.pipeline",
    ),
    Case(
        rule="BAT004",
        name="large micro-batches",
        verdict="fail",
        evidence=lambda: evidence("batch.micro=2", *STAGED),
        says="idles 44%",
        at="batch.micro",
    ),
    Case(
        rule="BAT004",
        name="a third of it without bubble",
        verdict="pass",
        evidence=lambda: laid_out(pipeline=8, data=16, micro_batch=2, accumulation=16, schedule="zero-bubble"),
    ),
]
FLIPS = [
    Flip(
        rule="BAT001",
        limit="tolerance",
        value=0.01,
        evidence=lambda: logged(tokens={BATCH: 9_699, BATCH - 1: 1}),
        before="fail",
        after="pass",
    ),
    Flip(
        rule="BAT002",
        limit="parts",
        value=512,
        evidence=lambda: trained_by("megatron", False),
        before="fail",
        after="pass",
    ),
    Flip(rule="BAT003", limit="most_ratio", value=2.0, evidence=lambda: noisy(300.0), before="fail", after="pass"),
    Flip(
        rule="BAT003",
        limit="most_growth",
        value=3.0,
        evidence=lambda: noisy(2_000.0, growth=2.1),
        before="fail",
        after="pass",
    ),
    Flip(
        rule="BAT003",
        limit="least_count",
        value=5,
        evidence=lambda: noisy(2_000.0, count=9),
        before="unknown",
        after="pass",
    ),
    Flip(
        rule="BAT004",
        limit="most_ratio",
        value=0.5,
        evidence=lambda: evidence("batch.micro=2", *STAGED),
        before="fail",
        after="pass",
    ),
    Flip(
        rule="BAT004",
        limit="zero_bubble_left",
        value=1.0,
        evidence=lambda: laid_out(pipeline=8, data=16, micro_batch=2, accumulation=16, schedule="zero-bubble"),
        before="pass",
        after="fail",
    ),
]
