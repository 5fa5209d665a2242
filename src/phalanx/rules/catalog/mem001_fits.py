"""MEM001: the predicted peak of memory fits, with a margin for errors of the prediction."""

from __future__ import annotations

import math
import re

from phalanx.plan.impossible import PLANNER_FINDS, WITH_OFFLOAD
from phalanx.plan.plan import Plan
from phalanx.plan.request import trains_with_phalanx
from phalanx.plan.search import DECIDES, FULL_MEMORY
from phalanx.plan.trainer_memory import MEMORY_ERROR
from phalanx.rules.catalog.shared import launcher_may_shard, refusal_text
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Impact, Outcome, Severity, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import format_bytes

# Trainers built on Hugging Face's Trainer, where torch_dtype of the loaded model decides; DeepSpeed always keeps an
# fp32 copy.
LOADED_BY_CODE = ("axolotl", "transformers", "ms-swift", "llama-factory")
SMALL_STATES = re.compile(
    r"8bit|8-bit|4bit|paged|adafactor|galore|lomo|sgd|lion|apollo|muon|ademamix|adam_mini|shampoo"
)
NO_START = Impact(note="the job ends when it runs out of memory, mostly in its first steps: nothing is trained")


def check(evidence: Evidence, limits: Limits) -> Outcome:
    """Compare the fullest device with its allowed share, or return the planner's refusal."""
    is_refused = any("does not fit" in problem.what for problem in evidence.refusals)
    if is_refused and (open_formats := _open_formats(evidence)):
        return open_formats
    if evidence.plan is None or is_refused:
        return _judge_refusal(evidence, _severity(evidence, limits))
    memory = evidence.plan.memory
    if not (memory.device_bytes > 0 and math.isfinite(memory.total_bytes)):
        return unknown("the memory of this device is not known", fix="give memory_bytes in a cluster file")
    share, max_share = memory.total_bytes / memory.device_bytes, limits.number("most_share")
    parts = sorted(memory.parts_bytes.items(), key=lambda item: -item[1])
    formula = (
        " + ".join(f"{name} {format_bytes(size)}" for name, size in parts if size >= 0.01 * memory.total_bytes)
        + f" = {format_bytes(memory.total_bytes)}",
        f"{format_bytes(memory.total_bytes)} / {format_bytes(memory.device_bytes)} = {share:.1%} of the device",
    )
    statement = f"the fullest device holds {share:.1%} of its memory"
    if share <= max_share:
        return passed(
            statement + _doubtful_memory(evidence.plan),
            formula=formula,
            value=share,
            threshold=max_share,
            at="plan:memory",
        )
    if open_formats := _open_formats(evidence):
        return open_formats
    return failed(
        f"{statement}, more than {max_share:.0%}",
        formula=formula,
        value=share,
        threshold=max_share,
        at="plan:memory",
        severity=_severity(evidence, limits),
        impact=NO_START,
        fix=_layout_with_headroom(
            evidence.plan, min(max_share * memory.device_bytes, FULL_MEMORY * memory.usable_bytes)
        ),
    )


def _severity(evidence: Evidence, limits: Limits) -> Severity | None:
    """Return "info" for another trainer's file whose prediction is too close to the device's memory to be sure."""
    if not evidence.is_foreign or evidence.plan is None:
        return None
    memory = evidence.plan.memory
    return "info" if memory.total_bytes <= limits.number("doubtful") * memory.device_bytes else None


def _open_formats(evidence: Evidence) -> Outcome | None:
    """Return `unknown` for a Trainer whose number formats depend on how the model was loaded, else None.

    The format halves or quarters the memory of weights and states.
    """
    if evidence.practice.trainer not in LOADED_BY_CODE:
        return None
    if launcher_may_shard(evidence):
        return unknown(
            "the file names neither DeepSpeed nor FSDP, and the launcher may: accelerate launch --config_file",
            fix="give --set parallel.zero=3, or 0 where nothing is sharded",
        )
    optimizer = evidence.find_setting("optimizer", "optim")
    if optimizer is not None and SMALL_STATES.search(str(optimizer.value).lower()):
        return unknown(f"the states of {str(optimizer.value)[:40]} are smaller than Adam's, and not predicted")
    if evidence.stated("precision.master_weights"):
        return None
    return unknown(
        f"whether {evidence.practice.trainer} keeps fp32 weights and states follows from how the model is loaded, or "
        "from another optimizer",
        fix="give --set precision.master_weights=true, or false where all is bf16",
    )


def _doubtful_memory(plan: Plan) -> str:
    """Return a warning text where a step of our trainer may not fit although its predicted bytes do; else empty."""
    if plan.memory.total_bytes <= FULL_MEMORY * plan.memory.usable_bytes or not trains_with_phalanx(plan.job):
        return ""
    return f", less than {MEMORY_ERROR:.0%} below what is usable: {DECIDES}"


def _judge_refusal(evidence: Evidence, severity: Severity | None) -> Outcome:
    """Return the outcome without a plan: a failure because nothing fits, or unknown for another reason."""
    for problem in evidence.refusals:
        if "does not fit" in problem.what:
            return failed(
                problem.what,
                formula=(problem.why,) if problem.why else (),
                at="plan:memory",
                severity=severity,
                impact=NO_START,
                fix=_in_their_words(evidence, problem.fix or "use more devices, or devices with more memory"),
            )
    why = refusal_text(evidence.refusals[0]) if evidence.refusals else "no cluster is named"
    return unknown(f"there is no plan: {why}", fix="fix that first, or name a cluster (--cluster 8xH100:16)")


# The settings that keep the optimizer in host memory, for trainers that have one and files that do not set it.
OFFLOADS = {
    "torchtitan": "training.enable_cpu_offload = true",
    "megatron": "--optimizer-cpu-offload",
    "deepspeed": 'zero_optimization.offload_optimizer.device = "cpu"',
}
SMALLER = {"torchtitan": "training.local_batch_size", "megatron": "--micro-batch-size"}
_OFFLOAD = 'set parallel.offload = "optimizer"'
_IN_HOST_MEMORY = "with the optimizer in host memory"


def _in_their_words(evidence: Evidence, fix: str) -> str:
    """Return the planner's advice with the options of another trainer; a smaller batch, if possible, costs least."""
    trainer = evidence.practice.trainer
    if not evidence.is_foreign or trainer not in OFFLOADS:
        return fix
    if PLANNER_FINDS in fix:
        fix = "another layout fits" + (f" with {OFFLOADS[trainer]}" if fix.endswith(WITH_OFFLOAD) else "")
    elif not (_OFFLOAD in fix or _IN_HOST_MEMORY in fix):
        return fix
    fix = fix.replace(_OFFLOAD, OFFLOADS[trainer]).replace(_IN_HOST_MEMORY, f"and {OFFLOADS[trainer]}")
    micro, name = evidence.the_job.batch.micro, SMALLER.get(trainer, "")
    return f"a smaller {name} first; then {fix}" if name and isinstance(micro, int) and micro > 1 else fix


def _layout_with_headroom(plan: Plan, most_bytes: float) -> str:
    """Return the fastest layout of the plan's Pareto front that keeps the margin, or else what to try."""
    fitting = [
        candidate
        for candidate in plan.pareto
        if candidate.memory_bytes <= most_bytes and candidate.devices == plan.layout.devices
    ]
    if fitting:
        best = min(fitting, key=lambda candidate: candidate.step_s)
        slower = best.step_s / plan.prediction.step_s - 1 if plan.prediction.step_s > 0 else 0.0
        return f"{best.layout.short} needs {format_bytes(best.memory_bytes)} and {slower:+.1%} of the step time"
    stronger = {"none": '"selective"', "selective": '"full"'}.get(plan.layout.recompute)
    return (f"parallel.recompute = {stronger}, " if stronger else "") + "a smaller batch.micro, or more devices"


RULE = Rule(
    id="MEM001",
    slug="fits-with-margin",
    severity="error",
    requires="J",
    uses="P",
    requirement="The predicted peak of the fullest device leaves a tenth of its memory free.",
    why="""
A job that does not fit ends after the devices were taken. A prediction is not a measurement: ours misses the reserved
memory of published runs by 5.7 % in the median (`phalanx backtest`, 2026-11-15), and on a device of 80 GB the
driver's context, NCCL's buffers and fragmentation take several GB more. On a host the page cache and everybody else
live in the same memory, so CPU ranks get 80 %; a TPU's compiler lays memory out exactly and gets 92 %.
""",
    how="""
`weights + gradients + optimizer + activations + logits + gathered + buffers ≤ 0.90 · device memory`, each term by
ZeRO stage, recompute and schedule as `phalanx plan` prints it; a CPU rank's device is its share of the host. A
planner that finds no layout that fits is a failure of this rule, in the planner's words. Where a step of our own
trainer fills more than 94 % of the usable memory, its count (within 6 % of the traced step) leaves open whether it
fits: `phalanx trace JOB --against-plan` decides, and exits with 1 if it does not. Of another trainer's file less than
15 % above the device is a remark (our choice): so far our prediction may be off, and the file may well be running.
""",
    limits={
        "doubtful": Limit(value=1.15, unit="x", note="of the device, in other trainers' files a remark: our choice"),
        "most_share": Limit(
            value=0.90,
            note="of the device; cpu: of the rank's share of RAM; tpu: compiler-exact; our choice, "
            "beside an error of 5.7 %",
            profiles={"cpu-gloo": 0.80, "tpu": 0.92},
        ),
    },
    bad="""
[batch]
micro = 2

[parallel]
recompute = "none"
zero = 1
offload = "none"
""",
    good="""
[batch]
micro = 1

[parallel]
recompute = "selective"
zero = 3
""",
    fix="More sharding, recompute, a smaller micro-batch, or more devices; `phalanx plan JOB` prints every term.",
    waive="A short run on the same layout whose measured peak fits (`phalanx train JOB --steps 20`), "
    "named in the reason.",
    references=(
        Reference(text="Rajbhandari et al., ZeRO, arXiv:1910.02054", mark="recalled"),
        Reference(text="Korthikanti et al., activation memory, arXiv:2205.05198", mark="recalled"),
        Reference(text="phalanx backtest: memory of 936 published runs, docs/validation.md", mark="computed"),
    ),
    check=check,
)
