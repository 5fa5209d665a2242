"""PRC001 to PRC004: formats, sums and guards. Habits stand in for what the trainer's documentation says."""

from __future__ import annotations

from dataclasses import replace

from rules.kit import Case, Flip, evidence
from rules.logs import good_log, good_steps

from phalanx.rules.facts.parity import ParityFacts
from phalanx.rules.facts.trainers import Practice
from phalanx.rules.outcome import Spot

OURS = Practice(trainer="phalanx", loss_scale="dynamic", fp8_spares_sensitive=True, skips_together=True)
OTHER = Practice(trainer="megatron")
SPOT = Spot(file="events-00000.jsonl", line=7)


def parity(loss: float, **changes):
    """fp8 with two runs that compare it with bf16, whose loss is 4."""
    found = ParityFacts(
        narrow="run-fp8",
        wide="run-bf16",
        narrow_format="fp8",
        wide_format="bf16",
        model="small",
        tokens=10**10,
        narrow_loss=loss,
        wide_loss=4.0,
        held_out=True,
    )
    return lambda: evidence(FP8, practice=OURS, parity=replace(found, **changes))


def job(*sets: str, practice: Practice = OURS, **changes):
    return lambda: evidence(*sets, practice=practice, **changes)


def ran(*sets: str, **steps):
    return job(*sets, log=good_log(steps=good_steps(**steps)))


def with_layout(*sets: str, **changes):
    """The plan's layout with other degrees: what the sums run over."""

    def made():
        found = evidence(*sets, practice=OURS)
        plan = found.the_plan
        return replace(found, plan=replace(plan, layout=replace(plan.layout, **changes)))

    return made


FP16 = "precision.compute=fp16"
FP8 = "precision.compute=fp8"
CASES = [
    Case(rule="PRC001", name="bf16 without a scale", verdict="pass", evidence=job()),
    Case(rule="PRC001", name="fp16, searched", verdict="pass", evidence=job(FP16)),
    Case(rule="PRC001", name="fp16, the schema's own auto", verdict="pass", evidence=lambda: evidence(FP16)),
    Case(
        rule="PRC001",
        name="fp16, fixed",
        verdict="fail",
        evidence=job(FP16, "precision.loss_scale=1024"),
        severity="error",
        says="fp16 with a fixed loss scale",
        at="precision.loss_scale",
    ),
    Case(
        rule="PRC001",
        name="fp16 without any",
        verdict="fail",
        evidence=job(FP16, practice=replace(OTHER, loss_scale="none")),
        says="no loss scale",
    ),
    Case(rule="PRC001", name="fp16 of a stranger", verdict="unknown", evidence=job(FP16, practice=OTHER)),
    Case(rule="PRC001", name="a stranger in bf16", verdict="pass", evidence=job(practice=OTHER)),
    Case(rule="PRC001", name="1 is none", verdict="pass", evidence=job("precision.loss_scale=1.0"), boundary=True),
    Case(rule="PRC001", name="2 is one", verdict="fail", evidence=job("precision.loss_scale=2.0"), boundary=True),
    Case(rule="PRC002", name="the defaults", verdict="pass", evidence=job()),
    Case(
        rule="PRC002",
        name="bf16 sums over ranks",
        verdict="fail",
        evidence=job("precision.grad_reduce=bf16"),
        severity="error",
        says="gradients are summed in bf16 over",
        at="precision.grad_reduce",
    ),
    Case(
        rule="PRC002",
        name="a single term is no sum",
        verdict="pass",
        evidence=with_layout("precision.grad_reduce=bf16", data=1, context=1, accumulation=1),
        boundary=True,
    ),
    Case(
        rule="PRC002",
        name="two micro-batches are one",
        verdict="fail",
        evidence=with_layout("precision.grad_reduce=bf16", data=1, context=1, accumulation=2),
        boundary=True,
    ),
    Case(
        rule="PRC002",
        name="declared compression is weighed elsewhere",
        verdict="fail",
        evidence=with_layout("precision.grad_reduce=bf16", compression="bf16"),
        severity="warning",
    ),
    Case(
        rule="PRC002",
        name="bf16 sums without a plan",
        verdict="unknown",
        evidence=job("precision.grad_reduce=bf16", plan=None),
    ),
    Case(
        rule="PRC002",
        name="bf16 moments",
        verdict="fail",
        evidence=job("precision.optimizer_state=bf16"),
        severity="warning",
        says="DeepSeek-V3",
    ),
    Case(rule="PRC002", name="a recipe by name", verdict="pass", evidence=job("optim.name=adamw8bit")),
    Case(
        rule="PRC002",
        name="no master weights",
        verdict="fail",
        evidence=job("precision.master_weights=false"),
        severity="error",
        at="precision.master_weights",
    ),
    Case(
        rule="PRC002",
        name="fp32 needs no copy and sums itself",
        verdict="pass",
        evidence=job("precision.compute=fp32", "precision.master_weights=false", "precision.grad_reduce=bf16"),
    ),
    Case(rule="PRC003", name="bf16", verdict="pass", evidence=job()),
    Case(
        rule="PRC003",
        name="fp4 on Hopper",
        verdict="fail",
        evidence=job("precision.compute=fp4"),
        severity="error",
        says="nvidia-h100 does not multiply in fp4",
        at="precision.compute",
    ),
    Case(rule="PRC003", name="fp8 on Ampere", verdict="fail", evidence=job(FP8, profile="nvidia-a100"), boundary=True),
    Case(
        rule="PRC003",
        name="fp8 on Hopper lacks parity",
        verdict="unknown",
        evidence=job(FP8),
        says="learns as bf16 does",
        boundary=True,
    ),
    Case(
        rule="PRC003",
        name="fp8 everywhere",
        verdict="fail",
        evidence=job(FP8, practice=replace(OURS, fp8_spares_sensitive=False)),
        says="does not spare all of embeddings",
    ),
    Case(
        rule="PRC003",
        name="fp8 of a stranger",
        verdict="unknown",
        evidence=job(FP8, practice=OTHER),
        says="leaves in 16 bit",
    ),
    Case(rule="PRC003", name="parity to the line", verdict="pass", evidence=parity(4.0 * 1.0025), boundary=True),
    Case(rule="PRC003", name="better than bf16", verdict="pass", evidence=parity(3.9)),
    Case(
        rule="PRC003",
        name="no parity",
        verdict="fail",
        evidence=parity(4.0 * 1.0026),
        boundary=True,
        severity="error",
        says="fp8 ends +0.260% from bf16",
    ),
    Case(rule="PRC003", name="parity of another format", verdict="unknown", evidence=parity(4.0, narrow_format="fp4")),
    Case(rule="PRC003", name="fp16 on TPU", verdict="fail", evidence=job(FP16, profile="tpu")),
    Case(rule="PRC003", name="fp16 of hardware that says so", verdict="pass", evidence=job(FP16, profile="custom")),
    Case(
        rule="PRC003",
        name="fp4 of hardware that does not",
        verdict="unknown",
        evidence=job("precision.compute=fp4", profile="custom", plan=None),
    ),
    Case(rule="PRC004", name="the defaults", verdict="pass", evidence=job()),
    Case(rule="PRC004", name="ten in a row", verdict="pass", evidence=job("train.skipped_steps=10"), boundary=True),
    Case(
        rule="PRC004",
        name="eleven in a row",
        verdict="fail",
        evidence=job("train.skipped_steps=11"),
        boundary=True,
        severity="warning",
        at="train.skipped_steps",
    ),
    Case(rule="PRC004", name="no clipping, no skipping", verdict="fail", evidence=job("optim.clip=0"), at="optim.clip"),
    Case(
        rule="PRC004",
        name="skipping alone",
        verdict="pass",
        evidence=job("optim.clip=0", "train.spike_factor=10"),
    ),
    Case(rule="PRC004", name="a stranger", verdict="unknown", evidence=job(practice=OTHER)),
    Case(
        rule="PRC004",
        name="each for itself",
        verdict="fail",
        evidence=job(practice=replace(OURS, skips_together=False)),
    ),
    Case(rule="PRC004", name="a good run", verdict="pass", evidence=ran()),
    Case(
        rule="PRC004",
        name="a step that was not finite was taken",
        verdict="fail",
        evidence=ran(not_finite=2, not_finite_spot=SPOT),
        says="2 steps with a loss or norm",
        at="events-00000.jsonl",
    ),
    Case(
        rule="PRC004",
        name="steps that moved nothing",
        verdict="fail",
        evidence=ran(zero_norm=3, zero_norm_spot=SPOT),
        severity="warning",
        says="took 3 steps with a gradient norm of exactly 0",
        at="events-00000.jsonl",
    ),
    Case(rule="PRC004", name="one rank skipped", verdict="fail", evidence=ran(skips_differ=SPOT, skipped=1)),
    Case(rule="PRC004", name="two were skipped", verdict="pass", evidence=ran(skipped=9, skipped_in_a_row=2)),
    Case(
        rule="PRC004",
        name="three were skipped",
        verdict="fail",
        evidence=ran(skipped=3, skipped_in_a_row=3),
        boundary=True,
        severity="warning",
        says="skipped 3 steps in a row",
    ),
    Case(
        rule="PRC004",
        name="ten were skipped, and the run ended",
        verdict="fail",
        evidence=ran(skipped=20, skipped_in_a_row=10),
        boundary=True,
        severity="error",
        says="as many as end a run",
    ),
    Case(rule="PRC004", name="ten in fp16", verdict="pass", evidence=ran(FP16, skipped=10, skipped_in_a_row=10)),
    Case(rule="PRC004", name="eleven in fp16", verdict="fail", evidence=ran(FP16, skipped=11, skipped_in_a_row=11)),
    Case(rule="PRC004", name="a norm of 43x that was clipped", verdict="pass", evidence=ran(worst_jump=43.0)),
    Case(
        rule="PRC004",
        name="a norm of 43x that was not",
        verdict="fail",
        evidence=ran("optim.clip=0", "train.spike_factor=100", worst_jump=43.0, worst_jump_spot=SPOT),
        severity="warning",
    ),
    Case(rule="PRC004", name="a loss of 5x", verdict="pass", evidence=ran(worst_loss_jump=5.0), boundary=True),
    Case(
        rule="PRC004",
        name="a loss of more",
        verdict="fail",
        evidence=ran(worst_loss_jump=5.1, worst_loss_jump_spot=SPOT),
        severity="warning",
        boundary=True,
        at="events-00000.jsonl",
    ),
    Case(
        rule="PRC004",
        name="a run shows what nobody wrote down",
        verdict="pass",
        evidence=lambda: evidence(log=good_log(steps=good_steps(skipped=1, skipped_in_a_row=1))),
    ),
]
FLIPS = [
    Flip(rule="PRC001", limit="scaled_formats", value=("bf16",), evidence=job(), before="pass", after="fail"),
    Flip(
        rule="PRC002",
        limit="reduce_formats",
        value=("fp32", "bf16"),
        evidence=job("precision.grad_reduce=bf16"),
        before="fail",
        after="pass",
    ),
    Flip(
        rule="PRC002",
        limit="most_terms",
        value=2,
        evidence=with_layout("precision.grad_reduce=bf16", data=1, context=1, accumulation=2),
        before="fail",
        after="pass",
    ),
    Flip(
        rule="PRC002",
        limit="moment_formats",
        value=("fp32", "bf16"),
        evidence=job("precision.optimizer_state=bf16"),
        before="fail",
        after="pass",
    ),
    Flip(
        rule="PRC002",
        limit="needs_master",
        value=False,
        evidence=job("precision.master_weights=false"),
        before="fail",
        after="pass",
    ),
    Flip(rule="PRC003", limit="most_gap", value=0.01, evidence=parity(4.02), before="fail", after="pass"),
    Flip(rule="PRC003", limit="narrow_formats", value=("fp4",), evidence=job(FP8), before="unknown", after="pass"),
    Flip(rule="PRC004", limit="most_in_a_row", value=3, evidence=job(), before="pass", after="fail"),
    Flip(
        rule="PRC004",
        limit="look_in_a_row",
        value=4,
        evidence=ran(skipped=3, skipped_in_a_row=3),
        before="fail",
        after="pass",
    ),
    Flip(rule="PRC004", limit="jump", value=4.0, evidence=ran(worst_loss_jump=4.5), before="pass", after="fail"),
]
