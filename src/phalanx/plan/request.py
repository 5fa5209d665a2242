"""The planner's input: the values of a job and a cluster that a layout depends on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from phalanx.errors import Problem, UserError, mistake, nearest
from phalanx.hardware.catalog import matmul_flops
from phalanx.hardware.types import Cluster
from phalanx.job.model import ModelShape
from phalanx.job.schema import Job
from phalanx.plan.cases import OFFLOAD
from phalanx.plan.memory_profile import MemoryProfile, memory_profiles
from phalanx.plan.optimizer import MOMENTS, STATE_BYTES, packed_bytes, state_format, update_profile
from phalanx.plan.physics import Physics, Profile, shipped_physics, shipped_profiles
from phalanx.plan.physics import profile_name as physics_profile

if TYPE_CHECKING:
    from phalanx.plan.calibrate import Calibration


# What each framework can run, so that the search proposes only layouts that its users need not implement first.


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """Limits of a training framework. Settings that the job fixes by hand are not checked against them."""

    schedules: tuple[str, ...]
    zero: tuple[int, ...]
    zero_with_pipeline: tuple[int, ...]
    context: bool = True  # can split one sequence over devices
    copies_kv_heads: bool = True  # can give several tensor ranks the same key/value head
    bare_ends: bool = True  # can give the embedding and the head their own pipeline chunk
    selective_zero_bubble: bool = True  # can recompute selectively under a zero-bubble schedule
    offload: tuple[str, ...] = ("none", "optimizer")  # what it can keep in host memory


EVERYTHING = Framework(
    # torch.distributed.pipelining.schedules.
    schedules=("gpipe", "1f1b", "interleaved", "zero-bubble"),
    zero=(0, 1, 2, 3),
    zero_with_pipeline=(0, 1, 2, 3),
    offload=OFFLOAD,
)
MEGATRON = Framework(
    schedules=("1f1b", "interleaved"),  # megatron/core/pipeline_parallel/schedules.py
    zero=(0, 1, 2, 3),  # distributed optimizer, Megatron-FSDP
    zero_with_pipeline=(0, 1),
)
# deepspeed/runtime/pipe/engine.py: "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism"
DEEPSPEED = Framework(
    schedules=("1f1b",),
    zero=(0, 1, 2, 3),
    zero_with_pipeline=(0, 1),
    context=False,
    offload=("none", "optimizer", "parameters"),  # offload_optimizer, offload_param
)
# The limits of Phalanx's own trainer, as phalanx.train.rank_settings enforces them: key/value heads are split, never
# copied; under a pipeline torch's schedules keep the gathered weights for the whole step, so ZeRO-3 would promise
# memory it does not free.
PHALANX = Framework(
    schedules=EVERYTHING.schedules,
    zero=(0, 1, 2, 3),
    zero_with_pipeline=(0, 1, 2),
    copies_kv_heads=False,
    bare_ends=False,
    selective_zero_bubble=False,
    offload=OFFLOAD,
)
FRAMEWORKS = {
    "phalanx": PHALANX,
    "megatron-core": MEGATRON,
    "megatron-bridge": MEGATRON,
    "megatron-lm": Framework(schedules=("1f1b", "interleaved"), zero=(0, 1), zero_with_pipeline=(0, 1), context=False),
    "megatron-deepspeed": DEEPSPEED,
    "deepspeed": DEEPSPEED,
    # nanotron 0.5: all-forward-all-backward and 1F1B, ZeRO-1
    "nanotron": Framework(
        schedules=("gpipe", "1f1b"), zero=(0, 1), zero_with_pipeline=(0, 1), context=False, offload=("none",)
    ),
}


def find_framework(name: str) -> Framework:
    """Return the limits of a profile's framework; an unknown framework is assumed to support everything."""
    return FRAMEWORKS.get(name, EVERYTHING)


Fixed = Mapping[str, int | str | bool]

# Frameworks whose published runs materialise attention scores (column `attention` of throughput_public.csv).
UNFUSED = ("megatron-deepspeed", "megatron-lm", "deepspeed")
# Framework names as users write them -> the profile that was fitted on such runs.
PROFILE_ALIASES = {
    "default": "default",
    "megatron": "megatron-core",
    # It runs on Megatron-Core since 2023; "megatron-lm-2021" is what it was.
    "megatron-lm": "megatron-core",
    "bridge": "megatron-bridge",
    "nemo": "megatron-core",
    "nemo-megatron": "megatron-core",
    "composer": "composer-fsdp",
    "deepspeed-zero3": "deepspeed",
}
CURRENT = "9999"  # the version of a name without one: the newest profile of its family
# The names that messages list: the profiles, and the dated name of the one that was replaced.
FRAMEWORK_NAMES = (*sorted({*shipped_profiles()} - {"default"}), "megatron-lm-2021")
# `launch_s` of a profile covers all that the host does per operation; `phalanx probe` times one bare kernel. This is
# the probe's value on the H200 that the "pytorch" and "phalanx" profiles were measured on (benchmarks/data,
# 2026-11-15).
PROBED_LAUNCH_S = 6.86e-6
# Bytes per parameter of fp32 master weights and two fp32 moments, which the memory profiles were fitted with.
ADAMW_BYTES = 12.0


# Memory of a CPU rank besides tensors: gloo has hardly any communicator buffers, and libraries are shared pages.
CPU_BASE_BYTES = 3e7


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """A planning question.

    `fixed` holds the settings that the job fixes by hand: the keys of `[parallel]`, and `micro`.
    """

    model: ModelShape
    cluster: Cluster
    sequence: int
    global_sequences: int
    precision: str
    fixed: Fixed
    physics: Physics
    profile: Profile
    memory: MemoryProfile
    profile_name: str = "default"
    fused_attention: bool = True
    limits: Framework = EVERYTHING
    packed_bytes: float = 0.0  # bytes per parameter that 8-bit moments add when a checkpoint stores them as fp32
    recompute_layers: int | None = None  # of each stage, layers that recompute; None is all of them
    calibration: Calibration | None = None  # measured over modelled seconds of the user's own system
    origins: Mapping[str, str] = field(default_factory=dict)  # dotted key -> file:line, for messages

    @property
    def offload_kinds(self) -> tuple[str, ...]:
        """The kinds of offload a search may use: the framework's, but none on CPUs, which compute in host memory."""
        on_host = self.cluster.accelerator.family == "cpu"
        return ("none",) if on_host else self.limits.offload

    def place(self, key: str) -> str:
        """Return the file and line where a setting was written, or "job", for the head of a message."""
        return self.origins.get(key, "job")

    def pace(self, scalar: str) -> float:
        """Return the calibration's factor on one group of parts of the step; 1 without a calibration."""
        return float(getattr(self.calibration, scalar)) if self.calibration else 1.0


def request_from_job(
    job: Job, cluster: Cluster, *, origins: Mapping[str, str] | None = None
) -> tuple[PlanRequest, tuple[Problem, ...]]:
    """Return the planning question that a job and a cluster pose, and warnings about how the job was read."""
    known_origins = dict(origins or {})
    _check_precision(job, cluster, known_origins)
    _check_zero(job, known_origins)
    profile_name, warnings = framework_profile(job.parallel.framework, known_origins.get("parallel.framework", "job"))
    profile = update_profile(shipped_profiles()[profile_name], job.optim.name, job.precision.optimizer_state)
    if job.precision.grad_reduce == "bf16":
        profile = replace(profile, gradient_bytes=2.0)
    if job.precision.fp8_head and trains_with_phalanx(job):
        profile = replace(profile, narrow_head=1.0)
    if cluster.launch_s > 0:
        profile = replace(profile, launch_s=profile.launch_s * cluster.launch_s / PROBED_LAUNCH_S)
    memory_by_profile = memory_profiles()
    request = PlanRequest(
        model=job.model,
        cluster=cluster,
        sequence=job.data.sequence,
        global_sequences=job.batch.global_sequences,
        precision=job.precision.compute,
        fixed=fixed_by_hand(job),
        recompute_layers=None if job.parallel.recompute_layers == "auto" else int(job.parallel.recompute_layers),
        physics=shipped_physics(),
        profile=profile,
        profile_name=profile_name,
        memory=memory_profile(
            job,
            memory_by_profile.get(_memory_profile(job.parallel.framework, profile_name), memory_by_profile["default"]),
            on_cpu=cluster.accelerator.family == "cpu",
        ),
        packed_bytes=packed_bytes(job.optim.name, job.precision.optimizer_state),
        fused_attention=profile_name not in UNFUSED,
        limits=find_framework(_memory_profile(job.parallel.framework, profile_name)),
        origins=known_origins,
    )
    return request, warnings


def _memory_profile(framework_name: str, profile_name: str) -> str:
    """Return the memory profile's name:

    Phalanx's trainer shares the speed profile of plain PyTorch but not its memory profile.
    """
    return "phalanx" if framework_name.strip().lower() == "phalanx" else profile_name


def trains_with_phalanx(job: Job) -> bool:
    """Return True if the plan is for Phalanx's own trainer."""
    return job.parallel.framework.strip().lower() == "phalanx"


def framework_profile(name: str, where: str) -> tuple[str, tuple[Problem, ...]]:
    """Return the name of a framework's efficiency profile, and for an unknown one the default with a warning."""
    key = name.strip().lower()
    dated = re.fullmatch(r"(.+?)-(20\d\d)", key)
    if dated:
        key = physics_profile(dated[1], dated[2])
    key = PROFILE_ALIASES.get(key, key) if not dated else key
    key = key if key in shipped_profiles() else physics_profile(key, CURRENT)
    if key != "default" or name.strip().lower() in PROFILE_ALIASES:
        return key, ()
    key = name.strip().lower()
    suggestion = nearest(key, [*shipped_profiles(), *PROFILE_ALIASES])
    names = f"the names are {', '.join(FRAMEWORK_NAMES)}"
    return "default", (
        Problem(
            where=where,
            what=f'no efficiency profile for framework "{name}": planned with the default one',
            fix=f'did you mean "{suggestion}"? {names}' if suggestion else names,
        ),
    )


def memory_profile(job: Job, framework_memory: MemoryProfile, *, on_cpu: bool = False) -> MemoryProfile:
    """Return the framework's memory profile adjusted to the job's optimizer, precision and trainer settings."""
    if trains_with_phalanx(job):
        compiled = not on_cpu if isinstance(job.train.compile, str) else job.train.compile
        lean = not on_cpu if isinstance(job.train.lean, str) else job.train.lean
        lean = lean and not job.model.module
        kind = job.parallel.context_kind
        framework_memory = replace(
            framework_memory,
            compiled=1.0 if compiled else 0.0,
            chunked_loss=1.0 if lean and not job.plugins.loss else 0.0,
            float8_head=1.0 if job.precision.fp8_head else 0.0,
            dropped_product=1.0 if lean and job.model.gated and job.model.activation == "silu" else 0.0,
            heads_copies=1.0 if kind == "ulysses" else 0.0,
            sequence_copies=3.0 if kind == "allgather" else 0.0,
        )
    is_fp32 = job.precision.compute == "fp32"
    state_bytes = STATE_BYTES[state_format(job.optim.name, job.precision.optimizer_state)]
    # fp32 weights are their own master copy
    master_bytes = 4.0 if job.precision.master_weights and not is_fp32 else 0.0
    saved_bytes = ADAMW_BYTES - (MOMENTS[job.optim.name] * state_bytes + master_bytes)
    adjusted = replace(framework_memory, optimizer_bytes=framework_memory.optimizer_bytes - saved_bytes)
    if job.optim.name == "muon":
        adjusted = replace(adjusted, table_optimizer_bytes=(MOMENTS["adamw"] - MOMENTS["muon"]) * state_bytes)
    if on_cpu:
        adjusted = replace(adjusted, base_bytes=CPU_BASE_BYTES)
    if job.precision.grad_reduce == "bf16":
        adjusted = replace(adjusted, gradient_bytes=2.0, gradient_bytes_fp16=2.0)
    return adjusted


# The trainer splits only its built-in layers over tensor, context and expert ranks (train.models.own), and only the
# author of a custom network knows whether it can be cut into pipeline stages.
UNSPLIT_OWN = ("tensor", "context", "expert", "pipeline")


def fixed_by_hand(job: Job) -> Fixed:
    """Return every key of `[parallel]`, and the micro-batch, that the job does not leave to the planner."""
    names = (
        "data", "shard", "zero", "tensor", "sequence_parallel", "context", "pipeline",
        "virtual_pipeline", "schedule", "expert", "recompute", "offload", "compression",
    )  # fmt: skip
    values: dict[str, int | str | bool] = {name: getattr(job.parallel, name) for name in names}
    values["micro"] = job.batch.micro
    # The order of a sum over tensor, context or pipeline ranks depends on their number; only sums over data ranks have
    # an order that does not.
    if job.numerics.reproducible:
        single_sizes = {"tensor": 1, "context": 1, "pipeline": 1, "expert": 1, "zero": 0, "shard": 1}
        values |= {name: size for name, size in single_sizes.items() if values[name] == "auto"}
    if job.model.module:
        values |= {name: 1 for name in UNSPLIT_OWN if values[name] == "auto"}
    return {name: value for name, value in values.items() if value != "auto"}


def _check_precision(job: Job, cluster: Cluster, origins: Mapping[str, str]) -> None:
    precision = job.precision.compute
    if cluster.accelerator.family == "cpu" or matmul_flops(cluster.accelerator, precision) > 0:
        return
    able = [name for name in ("bf16", "fp16", "fp8", "fp32") if matmul_flops(cluster.accelerator, name) > 0]
    raise mistake(
        origins.get("precision.compute", "job"),
        f'precision.compute = "{precision}", but {cluster.accelerator.name} has no {precision} matrix units',
        why="the catalogue knows no rate for it",
        fix=f"use one of {', '.join(able)}, or another accelerator",
    )


def _check_zero(job: Job, origins: Mapping[str, str]) -> None:
    """Raise UserError if a choice that needs a particular ZeRO stage comes with another stage fixed by hand."""
    required_stages = {
        "offload": ("parameters", (3,), "only ZeRO-3 gives the parameters back after each layer"),
        "compression": ("powersgd", (0,), "it factors whole gradient matrices, and ZeRO cuts them at any row"),
    }
    zero, problems = job.parallel.zero, []
    for name, (value, stages, why) in required_stages.items():
        if getattr(job.parallel, name) == value and zero != "auto" and zero not in stages:
            problems.append(
                Problem(
                    where=origins.get(f"parallel.{name}", "job"),
                    what=f'parallel.{name} = "{value}", but parallel.zero = {zero}',
                    why=why,
                    fix=f"use parallel.zero = {stages[0]}, or another {name}",
                )
            )
    if problems:
        raise UserError(problems)
