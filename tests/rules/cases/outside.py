"""TOP005, EFF005, CKP007, OPT001, DAT001, DAT002, ENV001: what speaks of other trainers' files, and of predictions."""

from __future__ import annotations

from dataclasses import replace

from rules.kit import Case, Evidence, Flip, evidence

from phalanx.job.draft import Origin
from phalanx.rules.evidence import ForeignSetting
from phalanx.rules.facts.data_facts import DataFacts
from phalanx.rules.facts.trainers import Practice


def foreign(
    trainer: str = "megatron", *sets: str, planned: bool = True, devices: int = 128, **settings: object
) -> Evidence:
    """The good job as another trainer's file with these settings."""
    found = evidence(*sets)
    said = {
        name.replace("__", "."): ForeignSetting(key=name.replace("__", "."), value=value, line=number)
        for number, (name, value) in enumerate(settings.items(), 1)
    }
    origins = {
        **found.origins,
        **{f"optim.{key}": Origin(kind="file", where="f.sh:3") for key in ("lr", "eps", "betas")},
    }
    found = replace(
        found,
        practice=Practice(trainer=trainer),
        their_keys={"optim.lr": "lr"},
        settings=said,
        origins=origins,
        devices_said=devices,
    )
    return found if planned else replace(found, plan=None)


def batch(total: int) -> Evidence:
    return foreign(
        "deepspeed",
        planned=False,
        train_batch_size=total,
        train_micro_batch_size_per_gpu=2,
        gradient_accumulation_steps=2,
    )


def slow(ratio: float, mfu: float = 0.4) -> Evidence:
    """The good job with a step that takes so many times that of the best."""
    found = evidence()
    plan = found.the_plan
    best_s = min([plan.prediction.step_s, plan.search.fastest_step_s, *(o.step_s for o in plan.alternatives if o.fits)])
    prediction = replace(plan.prediction, step_s=best_s * ratio, mfu=mfu)
    return replace(found, plan=replace(plan, prediction=prediction))


def host(share: float) -> Evidence:
    """FULL_STATE_DICT that takes such a share of a host's memory."""
    found = foreign("accelerate", fsdp_config__fsdp_state_dict_type="FULL_STATE_DICT")
    plan = found.the_plan
    cluster = replace(plan.cluster, host_memory_bytes=12 * plan.prediction.parameters / share)
    return replace(found, plan=replace(plan, cluster=cluster))


def read(epochs: float) -> Evidence:
    found = evidence()
    return replace(found, data=DataFacts(named=1, tokens=found.the_plan.duration.tokens / epochs))


WARM = "optim.warmup_tokens=2000000000"
CASES = [
    Case(rule="TOP005", name="a batch that adds up", verdict="pass", evidence=lambda: batch(512), boundary=True),
    Case(
        rule="TOP005",
        name="a batch that does not",
        verdict="fail",
        evidence=lambda: batch(516),
        boundary=True,
        severity="error",
        says="is not micro-batch 2 × 2 accumulation steps × 128 data ranks = 512",
    ),
    Case(rule="TOP005", name="two formats", verdict="fail", evidence=lambda: foreign(fp16=True, bf16=True)),
    Case(
        rule="TOP005",
        name="interleaving with one stage",
        verdict="fail",
        evidence=lambda: foreign(num_layers_per_virtual_pipeline_stage=2),
        says="there is one stage",
    ),
    Case(
        rule="TOP005",
        name="experts and tensor ranks",
        verdict="fail",
        evidence=lambda: foreign(num_experts=8, tensor_model_parallel_size=2),
    ),
    Case(
        rule="TOP005",
        name="with sequence parallelism",
        verdict="pass",
        evidence=lambda: foreign(num_experts=8, tensor_model_parallel_size=2, sequence_parallel=True),
    ),
    Case(rule="TOP005", name="a job of ours", verdict="pass", evidence=evidence),
    Case(rule="EFF005", name="the layout found", verdict="pass", evidence=lambda: slow(1.0)),
    Case(rule="EFF005", name="half as much again", verdict="pass", evidence=lambda: slow(1.499), boundary=True),
    Case(
        rule="EFF005",
        name="twice the best",
        verdict="fail",
        evidence=lambda: slow(2.1),
        says="your layout costs 2.1x the best one found: $",
        points=100 * (1 - 1 / 2.1),
    ),
    Case(
        rule="EFF005", name="no use of the hardware", verdict="fail", evidence=lambda: slow(1.0, 0.02), says="MFU 2.0%"
    ),
    Case(rule="EFF005", name="at the bound", verdict="pass", evidence=lambda: slow(1.0, 0.4 * 0.35), boundary=True),
    Case(rule="CKP007", name="every rank its part", verdict="pass", evidence=foreign),
    Case(rule="CKP007", name="fits", verdict="pass", evidence=lambda: host(0.8), boundary=True),
    Case(rule="CKP007", name="does not", verdict="fail", evidence=lambda: host(0.81), says="one rank gathers"),
    Case(rule="OPT001", name="the good job", verdict="pass", evidence=lambda: evidence(WARM)),
    Case(
        rule="OPT001",
        name="a rate of 10",
        verdict="fail",
        evidence=lambda: evidence(WARM, "optim.lr=10"),
        severity="error",
    ),
    Case(
        rule="OPT001",
        name="a decay of 10",
        verdict="fail",
        evidence=lambda: evidence("optim.weight_decay=10"),
        severity="error",
    ),
    Case(
        rule="OPT001",
        name="a decay at the bound",
        verdict="pass",
        evidence=lambda: evidence("optim.weight_decay=0.5"),
        boundary=True,
    ),
    Case(rule="OPT001", name="epsilon", verdict="fail", evidence=lambda: evidence("optim.eps=0.5"), severity="error"),
    Case(
        rule="OPT001",
        name="betas",
        verdict="fail",
        evidence=lambda: evidence("optim.betas=[0.9,0.5]"),
        severity="warning",
    ),
    Case(
        rule="OPT001",
        name="no warm-up by choice",
        verdict="fail",
        evidence=lambda: evidence("optim.warmup_tokens=0"),
        says="without a warm-up",
    ),
    Case(
        rule="OPT001",
        name="megatron without",
        verdict="fail",
        evidence=lambda: foreign(lr=3e-4),
        says="without a warm-up",
    ),
    Case(rule="OPT001", name="a resumed one", verdict="pass", evidence=lambda: foreign(lr=3e-4, load="x")),
    Case(
        rule="OPT001",
        name="warm-up for ever",
        verdict="fail",
        evidence=lambda: evidence("optim.warmup_tokens=900000000000"),
        says="90%",
    ),
    Case(
        rule="DAT001", name="named", verdict="pass", evidence=lambda: evidence(data=DataFacts(named=1)), boundary=True
    ),
    Case(
        rule="DAT001",
        name="nothing named",
        verdict="fail",
        evidence=lambda: evidence(data=DataFacts(named=0)),
        boundary=True,
    ),
    Case(
        rule="DAT001",
        name="missing",
        verdict="fail",
        evidence=lambda: evidence(data=DataFacts(named=2, missing=("d/c4",))),
        says="d/c4 is not there",
    ),
    Case(rule="DAT002", name="four times", verdict="pass", evidence=lambda: read(4.0), boundary=True),
    Case(
        rule="DAT002",
        name="five times",
        verdict="fail",
        evidence=lambda: read(5.0),
        severity="warning",
        says="5.0 epochs",
    ),
    Case(rule="DAT002", name="a thousand", verdict="fail", evidence=lambda: read(1000), severity="warning"),
    Case(rule="ENV001", name="no variables", verdict="pass", evidence=foreign),
    Case(rule="ENV001", name="warnings only", verdict="pass", evidence=lambda: foreign(env__NCCL_DEBUG="WARN")),
    Case(
        rule="ENV001",
        name="trace",
        verdict="fail",
        evidence=lambda: foreign(env__NCCL_DEBUG="TRACE"),
        severity="warning",
    ),
    Case(
        rule="ENV001",
        name="no links",
        verdict="fail",
        evidence=lambda: foreign(env__NCCL_P2P_DISABLE="1"),
        says="NVLink",
    ),
    Case(
        rule="ENV001",
        name="queues",
        verdict="fail",
        evidence=lambda: foreign("megatron", "parallel.tensor=2", env__CUDA_DEVICE_MAX_CONNECTIONS="8"),
        boundary=True,
    ),
    Case(
        rule="ENV001",
        name="one queue",
        verdict="pass",
        evidence=lambda: foreign("megatron", "parallel.tensor=2", env__CUDA_DEVICE_MAX_CONNECTIONS="1"),
        boundary=True,
    ),
]
LONG = "optim.warmup_tokens=400000000000"
FLIPS = [
    Flip(rule="TOP005", limit="most_broken", value=1, evidence=lambda: batch(516), before="fail", after="pass"),
    Flip(rule="EFF005", limit="most_ratio", value=2.2, evidence=lambda: slow(2.1), before="fail", after="pass"),
    Flip(rule="EFF005", limit="least_share", value=0.01, evidence=lambda: slow(1.0, 0.02), before="fail", after="pass"),
    Flip(
        rule="EFF005",
        limit="least_parameters",
        value=1e15,
        evidence=lambda: slow(1.0, 0.02),
        before="fail",
        after="pass",
    ),
    Flip(rule="EFF005", limit="least_s", value=1e12, evidence=lambda: slow(2.1), before="fail", after="pass"),
    Flip(rule="EFF005", limit="floor", value=0.0, evidence=lambda: slow(1.0, 0.02), before="fail", after="pass"),
    Flip(rule="CKP007", limit="most_share", value=0.9, evidence=lambda: host(0.85), before="fail", after="pass"),
    Flip(
        rule="OPT001",
        limit="most_rate",
        value=1e9,
        evidence=lambda: evidence(WARM, "optim.lr=10"),
        before="fail",
        after="pass",
    ),
    Flip(
        rule="OPT001",
        limit="error_factor",
        value=1e9,
        evidence=lambda: evidence(WARM, "optim.lr=10"),
        before="error",
        after="warning",
    ),
    Flip(
        rule="OPT001",
        limit="muon",
        value=1e9,
        evidence=lambda: evidence(WARM, "optim.name=muon", "optim.lr=10"),
        before="fail",
        after="pass",
    ),
    Flip(rule="OPT001", limit="most_warmup", value=0.1, evidence=lambda: evidence(LONG), before="pass", after="fail"),
    Flip(rule="OPT001", limit="most_decay", value=0.01, evidence=lambda: evidence(WARM), before="pass", after="fail"),
    Flip(rule="OPT001", limit="most_eps", value=1e-9, evidence=lambda: evidence(WARM), before="pass", after="fail"),
    Flip(rule="OPT001", limit="least_beta2", value=0.99, evidence=lambda: evidence(WARM), before="pass", after="fail"),
    Flip(rule="OPT001", limit="most_beta", value=0.5, evidence=lambda: evidence(WARM), before="pass", after="fail"),
    Flip(
        rule="OPT001",
        limit="least_steps",
        value=10,
        evidence=lambda: foreign("megatron", train_iters=90),
        before="pass",
        after="fail",
    ),
    Flip(
        rule="OPT001",
        limit="low_rate",
        value=0.001,
        evidence=lambda: foreign("megatron", "optim.lr=1e-6", train_iters=5_000),
        before="pass",
        after="fail",
    ),
    Flip(
        rule="DAT002",
        limit="least_steps",
        value=1_000,
        evidence=lambda: replace(
            foreign("torchtitan", training__steps=500),
            data=read(5.0).data,
            origins={"data.tokens": Origin(kind="file", where="f.toml:3")},
        ),
        before="fail",
        after="pass",
    ),
    Flip(
        rule="DAT001",
        limit="least_sources",
        value=0,
        evidence=lambda: evidence(data=DataFacts(named=0)),
        before="fail",
        after="pass",
    ),
    Flip(rule="DAT002", limit="most_epochs", value=10.0, evidence=lambda: read(5.0), before="fail", after="pass"),
    Flip(
        rule="ENV001",
        limit="traps",
        value=(),
        evidence=lambda: foreign(env__NCCL_DEBUG="TRACE"),
        before="fail",
        after="pass",
    ),
    Flip(
        rule="ENV001",
        limit="connections",
        value=8,
        evidence=lambda: foreign("megatron", "parallel.tensor=2", env__CUDA_DEVICE_MAX_CONNECTIONS="8"),
        before="fail",
        after="pass",
    ),
    Flip(
        rule="ENV001",
        limit="without_order",
        value=("hopper",),
        evidence=lambda: foreign("megatron", "parallel.tensor=2", env__CUDA_DEVICE_MAX_CONNECTIONS="8"),
        before="fail",
        after="pass",
    ),
    Flip(
        rule="ENV001",
        limit="blackwell_queues",
        value=8,
        evidence=lambda: foreign("megatron", "parallel.tensor=2", planned=False, env__CUDA_DEVICE_MAX_CONNECTIONS="8"),
        before="fail",
        after="pass",
    ),
]
