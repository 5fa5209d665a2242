"""TOP001: the product of the parallel degrees is the number of devices."""

from __future__ import annotations

import re
from collections.abc import Iterator

from phalanx.errors import Problem
from phalanx.job.schema import Job
from phalanx.plan.plan import Plan
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Impact, Outcome, Spot, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule

# As in the planner's messages.
SIZES = re.compile(r"\b(tensor|context|pipeline|data|expert) (\d{1,9})\b")
# Refusals of another trainer's configuration by rules/foreign: settings are missing or open, not wrong.
SILENT = ("does not say", "may be given more arguments", "trains a part of its weights", "computes its steps in a way")
LEFT_OPEN = (" is not known: ", " is not a number", "which is not in this folder")
KEY = re.compile(r"[a-z_]+\.[a-z_]+(?= = )")
OF_LAYOUTS = ("parallel.", "batch.", "model.", "cluster.")
# A bound of our own job schema, which another trainer does not have. No size of a layout may be below 1 in any
# trainer, but larger ones may be valid.
OUR_LIMIT = re.compile(r" is above [\d,.^e+]+$")
NO_RATE = re.compile(r"optim\.lr = 0(\.0+)? is not above 0")
NO_START = Impact(points=100.0, note="the job does not start")


def check(evidence: Evidence, limits: Limits) -> Outcome | tuple[Outcome, ...]:
    """Check the arithmetic of the layout, or return why the planner found no layout."""
    if evidence.plan is not None:
        return _judge_layout(evidence, evidence.plan, limits)
    refusals = tuple(
        problem
        for problem in evidence.refusals
        if not (is_memory(problem) or is_batch(problem) or "matrix units" in problem.what)
    )
    if refusals:
        return tuple(_judge_refusal(evidence, problem) for problem in refusals)
    if evidence.refusals:
        return passed("not the degrees: the planner refused the job for what MEM001, BAT001 or PRC003 tell")
    return unknown(
        "no cluster is known, so neither is the world size", fix="name one: [cluster] spec, or --cluster 8xH100:16"
    )


def is_memory(problem: Problem) -> bool:
    """Return whether a refusal of the planner is about memory, which MEM001 reports."""
    return "does not fit" in problem.what


def is_batch(problem: Problem) -> bool:
    """Return whether a refusal of the planner is about the batch, which BAT001 reports."""
    return "global batch" in problem.what or "batch.micro =" in problem.what


def _judge_refusal(evidence: Evidence, problem: Problem) -> Outcome:
    if problem.what.startswith(SILENT):
        return unknown(f"the configuration {problem.what}", fix=problem.fix)
    split = evidence.find_setting("pp_partition_method")
    if split is not None and "embedding" in str(split.value) and "parallel.pipeline" in problem.what:
        # Megatron-DeepSpeed with type:transformer|embedding splits embeddings off: BLOOM's 70 layers are fine-tuned
        # in 72 stages.
        return unknown("embeddings are stages of their own here, which the planner does not know", fix=problem.fix)
    if evidence.is_foreign and "logits on a rank" in problem.what:
        # Phalanx cannot run it; others split the loss, index with 64 bits, or pad to less than the longest sample.
        return unknown(problem.what.removeprefix("no layout can run: "), fix="nothing, if it runs: no plan is made")
    if evidence.is_foreign and any(words in problem.what for words in LEFT_OPEN):
        return unknown(problem.what, fix=problem.fix)
    if evidence.is_foreign and NO_RATE.match(problem.what):
        return failed(
            "a learning rate of 0: the job starts, and nothing is learnt",
            at=_refused_place(evidence, problem) or "optim.lr",
            severity="info",
            impact=Impact(note="every step, unless gradients are all that is wanted"),
            fix="a learning rate above 0, or nothing where weights are to stay as they are",
        )
    key = KEY.match(problem.what) if evidence.is_foreign else None
    our_limit = key is not None and (not key.group().startswith(OF_LAYOUTS) or OUR_LIMIT.search(problem.what))
    if key is not None and (evidence.changed or our_limit):
        # A value that no Phalanx job may have: whether another trainer accepts it is not known.
        return unknown(f"{problem.what}; no plan is made", fix=problem.fix)
    statement = f"{problem.what}: {problem.why}" if problem.why else problem.what
    return failed(
        statement,
        at=_refused_place(evidence, problem) or _named_key(problem),
        impact=_whole_job(evidence),
        fix=problem.fix or "leave the sizes under [parallel] to the planner",
    )


def _refused_place(evidence: Evidence, problem: Problem) -> Spot | None:
    """Return the line of another trainer's file that the job reader refused: its key is not in the job."""
    file, _, line = problem.where.rpartition(":")
    if not evidence.is_foreign or file != evidence.job_file or not line.isdigit():
        return None
    return Spot(file=file, line=int(line))


def _named_key(problem: Problem) -> str:
    """Return the first job key that a refusal names; empty (the whole file) without one."""
    words = (word.strip("(),:;=\"'`") for word in problem.what.split())
    sections = ("parallel.", "batch.", "precision.", "cost.", "checkpoint.", "cluster.")
    named_key = next((word for word in words if word.startswith(sections)), "")
    sizes = {name: int(size) for name, size in SIZES.findall(problem.what)}
    return named_key or (f"parallel.{max(sizes, key=lambda name: sizes[name])}" if sizes else "")


def _whole_job(evidence: Evidence) -> Impact:
    return Impact(points=100.0, usd=evidence.usd, note=NO_START.note)


def _judge_layout(evidence: Evidence, plan: Plan, limits: Limits) -> Outcome | tuple[Outcome, ...]:
    layout, job = plan.layout, evidence.job or plan.job
    product = (
        f"tensor {layout.tensor} × context {layout.context} × pipeline {layout.pipeline} × data {layout.data} "
        f"= {layout.devices:,}"
    )
    failures = tuple(
        failed(message, formula=(product,), value=value, threshold=bound, at=at, impact=_whole_job(evidence), fix=fix)
        for message, value, bound, at, fix in _degree_faults(job, plan, limits)
    )
    statement = f"{product} of {plan.cluster.devices:,} devices, each with one rank"
    return failures or passed(statement, formula=(product,), value=layout.devices, threshold=plan.cluster.devices)


def _degree_faults(job: Job, plan: Plan, limits: Limits) -> Iterator[tuple[str, int, int, str, str]]:
    """Yield (what, value, bound, key, fix) for every size that does not divide."""
    layout, model, world = plan.layout, job.model, plan.cluster.devices
    if layout.devices > world or (limits.flag("every_device") and layout.devices != world):
        message = f"the degrees make {layout.devices:,} ranks, and there are {world:,} devices"
        fix = "choose degrees whose product is the number of devices, or leave one of them out"
        if job.parallel.framework != "phalanx" and 0 < layout.devices < world:
            # The file may be right, and the named cluster a larger, shared one.
            fix = f"name the {layout.devices:,} devices it takes (--cluster), or give it more data ranks"
        yield message, layout.devices, world, "parallel.data", fix
    group = layout.data * layout.context * layout.tensor
    if group % max(1, layout.expert):
        message = f"expert {layout.expert} does not divide data × context × tensor = {group:,}"
        yield message, layout.expert, group, "parallel.expert", "use a divisor of it"
    stages = layout.pipeline * layout.virtual_pipeline
    # Other trainers may give the embedding and the head chunks of their own (Megatron's --account-for-embedding-in-
    # and --account-for-loss-in-pipeline-split; Llama 3, arXiv 2407.21783, section 3.3.2).
    bare_ends = 2 if layout.virtual_pipeline > 1 and job.parallel.framework != "phalanx" else 0
    if model.layers + bare_ends < stages:
        message = f"{stages:,} chunks of the pipeline for {model.layers} layers: some hold none"
        fix = "fewer stages, or fewer chunks a stage"
        yield message, stages, model.layers, "parallel.pipeline", fix
    if model.heads % max(1, layout.tensor):
        message = f"tensor {layout.tensor} does not divide the model's {model.heads} attention heads"
        sizes = [str(size) for size in range(1, min(model.heads, 64) + 1) if model.heads % size == 0]
        yield message, layout.tensor, model.heads, "parallel.tensor", f"use one of {', '.join(sizes)}"


RULE = Rule(
    id="TOP001",
    slug="degrees-match-world",
    severity="error",
    requires="J",
    uses="P",
    requirement="Parallel degrees tile the world exactly, and every rank has a device of its own.",
    why="""
Whatever does not divide is found out by the process group or by the first matrix product, after the devices are taken:
a queue's wait and a start for nothing. Devices that no rank uses are paid for all the same: one node of 8 idle beside
1,016 GPUs at $2.50 an hour costs $480 a day. The degrees are those of Megatron (arXiv:2104.04473).
""",
    how="""
`data · tensor · pipeline · context = devices`; `expert` divides `data · context · tensor`; `layers ≥ pipeline ·
chunks`; `heads mod tensor = 0`; ranks fill devices in order, so each has its own when the product does not exceed them.
Where the planner finds no layout its reason is the finding, but for what only our own job schema asks of another
trainer's file (a learning rate of 0 is a remark); what does not fit into memory is told by MEM001, a batch that cannot
be shared out by BAT001.
""",
    limits={
        "every_device": Limit(value=True, note="whether devices may stay without a rank: arithmetic, no threshold"),
    },
    bad="""
[parallel]
pipeline = 3        # on 128 devices
""",
    good="""
[parallel]
pipeline = 4
""",
    fix="Leave the degrees to the planner, or fix them so that their product is the number of devices.",
    waive="Never for a job that is to start; for a study of a layout that no cluster of yours has.",
    references=(
        Reference(text="Megatron-LM, arXiv:2104.04473", mark="recalled"),
        Reference(text="the price of idle devices", mark="computed"),
    ),
    check=check,
)
