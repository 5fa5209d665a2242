"""The job schema: one frozen dataclass per section of the job file, each key with its rule and an explanation.

This file has the sections on what is trained and how; run_sections.py has those on checkpoints, faults, telemetry,
cost and launching.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from phalanx.io.limits import (
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_RANKS,
    MAX_RANKS_PER_GPU,
    MAX_SECONDS,
    MAX_SEQUENCE,
    MAX_SEQUENCES,
    MAX_TOKENS,
    MAX_WIDTH,
)
from phalanx.job.key_rules import (
    AUTO,
    Auto,
    choice,
    count,
    day,
    flag,
    nested,
    number,
    pair,
    text,
    texts,
)
from phalanx.job.model import TOKENS_PER_PARAMETER, ModelShape
from phalanx.job.run_sections import Checkpoint, ClusterChoice, CostSettings, FaultSettings, LaunchChoice, Telemetry
from phalanx.job.sync_section import SyncSettings

EDITIONS = ("2026.1",)
NAME_PATTERN = r"[a-z0-9][a-z0-9._-]{0,62}"
# Phalanx's own ids have three letters and three digits; those of other specifications may differ.
RULE_ID_PATTERN = r"[A-Z]{2,12}[0-9]{1,4}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """The training data: token files, the number of tokens to train on, and the length of a sequence."""

    paths: tuple[str, ...] = field(default=(), metadata=texts("folders that phalanx data build made", key="path"))
    corpus: str = field(
        default="", metadata=choice("text to fetch and build when no path is given", "", "offline-english")
    )
    tokens: int | Auto = field(
        default=AUTO,
        metadata=count(
            f'tokens to train on; "auto" is {TOKENS_PER_PARAMETER} per parameter', most=MAX_TOKENS, auto=True
        ),
    )
    seed: int = field(default=0, metadata=count("seed of the sampler and of the initial weights", least=0))
    sequence: int = field(default=4096, metadata=count("tokens per sequence", most=MAX_SEQUENCE))


@dataclass(frozen=True, kw_only=True, slots=True)
class RampStage:
    """A smaller global batch early in training: `global_tokens` per step until `until_tokens` tokens have been seen."""

    until_tokens: int = field(metadata=count("tokens seen when this stage ends", most=MAX_TOKENS))
    global_tokens: int = field(metadata=count("tokens per step in this stage", most=MAX_TOKENS))


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The batch size. The file gives one of the two global sizes; the other is derived from it."""

    global_tokens: int = field(default=0, metadata=count("tokens per optimizer step", most=MAX_TOKENS))
    global_sequences: int = field(default=0, metadata=count("sequences per optimizer step", most=MAX_SEQUENCES))
    micro: int | Auto = field(default=AUTO, metadata=count("sequences per device and pass", auto=True))
    ramp: tuple[RampStage, ...] = field(default=(), metadata=nested("smaller batches early in training"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Optim:
    """The optimizer and its learning-rate schedule."""

    name: str = field(default="adamw", metadata=choice("the update rule", "adamw", "adafactor", "adamw8bit", "muon"))
    lr: float = field(default=3e-4, metadata=number("peak learning rate", above=True, most=100.0))
    betas: tuple[float, float] = field(default=(0.9, 0.95), metadata=pair("Adam's moments", least=0.0, most=1.0))
    weight_decay: float = field(default=0.1, metadata=number("decoupled weight decay", most=10.0))
    schedule: str = field(default="wsd", metadata=choice("learning rate over time", "wsd", "cosine"))
    warmup_tokens: int = field(default=0, metadata=count("tokens of linear warm-up", least=0, most=MAX_TOKENS))
    decay: float = field(default=0.2, metadata=number("share of the tokens over which wsd decays", most=1.0))
    final_lr: float = field(default=0.1, metadata=number("last learning rate, as a share of the peak", most=1.0))
    eps: float = field(default=1e-8, metadata=number("keeps Adam from dividing by zero", above=True, most=1.0))
    clip: float = field(default=1.0, metadata=number("largest gradient norm; 0 never clips", most=1e6))


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """The number formats of matrix products, of gradients on the wire, and of the state that is kept between steps."""

    compute: str = field(default="bf16", metadata=choice("matrix products", "bf16", "fp16", "fp8", "fp4", "fp32"))
    fp8_head: bool = field(
        default=False,
        metadata=flag('with compute = "fp8": products of the output head too; hold its loss first'),
    )
    grad_reduce: str = field(default="fp32", metadata=choice("gradients while they are summed", "fp32", "bf16"))
    optimizer_state: str = field(default="fp32", metadata=choice("optimizer moments", "fp32", "bf16", "int8"))
    master_weights: bool = field(default=True, metadata=flag("keep an fp32 copy of the weights"))
    loss_scale: float | Auto = field(
        default=AUTO,
        metadata=number(
            'what the loss is multiplied with; "auto" finds it while training in fp16 and is 1 otherwise',
            above=True,
            most=2.0**24,
            auto=True,
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """The layout: each key is a value to keep, or "auto" for the planner to choose."""

    JSON_UNLESS_DEFAULT: ClassVar[tuple[str, ...]] = ("order",)

    mode: str = field(
        default=AUTO, metadata=choice('"fixed" turns off the search: sizes left out are 1', AUTO, "fixed")
    )
    framework: str = field(
        default="phalanx",
        metadata=text(
            "whose efficiency profile predicts the step",
            pattern=r"[A-Za-z0-9][A-Za-z0-9 ._+-]{0,62}",
            expects='a name such as "phalanx", "megatron", "torchtitan", "nanotron" or "deepspeed"',
        ),
    )
    data: int | Auto = field(default=AUTO, metadata=count("replicas of the model", most=MAX_RANKS, auto=True))
    shard: int | Auto = field(
        default=AUTO,
        metadata=count("ranks that share one sharded copy", most=MAX_RANKS, auto=True, zero_is_auto=True),
    )
    zero: int | Auto = field(
        default=AUTO, metadata=count("ZeRO stage: what the shard group shares", least=0, most=3, auto=True)
    )
    tensor: int | Auto = field(default=AUTO, metadata=count("ranks that split each matrix", most=MAX_RANKS, auto=True))
    sequence_parallel: bool | Auto = field(
        default=AUTO, metadata=flag("split norms and dropout along the sequence in the tensor group", auto=True)
    )
    context: int | Auto = field(
        default=AUTO, metadata=count("ranks that split each sequence", most=MAX_RANKS, auto=True)
    )
    pipeline: int | Auto = field(default=AUTO, metadata=count("stages of layers", most=MAX_LAYERS, auto=True))
    virtual_pipeline: int | Auto = field(
        default=AUTO, metadata=count("model chunks per stage", most=MAX_LAYERS, auto=True)
    )
    schedule: str = field(
        default=AUTO, metadata=choice("pipeline order", AUTO, "gpipe", "1f1b", "interleaved", "zero-bubble")
    )
    order: tuple[str, ...] = field(
        default=(),
        metadata=texts(
            'what each pipeline rank does, as "FFBFBB" (phalanx evolve schedules writes it); without it, as `schedule`',
            key="order",
            pattern=r"[FBIW]{2,4096}",
            expects='a text of the letters F, B, I and W for each pipeline rank, such as ["FFBB", "FBFB"]',
        ),
    )
    expert: int | Auto = field(default=AUTO, metadata=count("ranks that split the experts", most=MAX_RANKS, auto=True))
    context_kind: str = field(
        default="ring", metadata=choice("how context ranks share keys and values", "ring", "ulysses", "allgather")
    )
    loss_parallel: bool = field(default=True, metadata=flag("leave the logits split over the tensor group"))
    recompute: str = field(
        default=AUTO, metadata=choice("activations computed again in backward", AUTO, "none", "selective", "full")
    )
    recompute_layers: int | Auto = field(
        default=AUTO,
        metadata=count('of each stage, layers that recompute; "auto" is all of them', most=MAX_LAYERS, auto=True),
    )
    offload: str = field(
        default=AUTO,
        metadata=choice("what is kept in host memory", AUTO, "none", "optimizer", "parameters", "activations"),
    )
    compression: str = field(
        default="none",
        metadata=choice("gradients on the wire", AUTO, "none", "bf16", "fp8", "int8", "powersgd", "topk"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Train:
    """Settings of the training loop: starting weights, compilation, evaluation, samples, and when to give up."""

    weights: str = field(
        default="",
        metadata=text("Hugging Face folder to start from, relative to the job file; empty draws new weights"),
    )
    compile: bool | Auto = field(
        default=AUTO, metadata=flag('compile each block; "auto" does so on GPUs only', auto=True)
    )
    lean: bool | Auto = field(
        default=AUTO,
        metadata=flag(
            'hold large logits in parts, and make the product of a gated MLP again in backward; "auto" does so on GPUs '
            "only",
            auto=True,
        ),
    )
    compile_check: bool = field(
        default=True,
        metadata=flag(
            "compare compiled code with eager code on one micro-batch before the first step, and stop on errors"
        ),
    )
    ranks_per_gpu: int = field(
        default=1,
        metadata=count(
            "ranks that may share one GPU, for proofs and drills; above 1 needs NCCL 2.30", most=MAX_RANKS_PER_GPU
        ),
    )
    evaluate_every: int = field(default=0, metadata=count("steps between evaluations; 0 only at the end", least=0))
    evaluate_sequences: int = field(default=64, metadata=count("held-out sequences per evaluation", least=0))
    samples: int = field(default=2, metadata=count("texts written by the model at the end", least=0, most=100))
    sample_tokens: int = field(default=60, metadata=count("tokens per text", most=10**4))
    skipped_steps: int = field(
        default=10, metadata=count("steps in a row with a gradient that is not finite before the run stops")
    )
    spike_factor: float = field(
        default=0.0,
        metadata=number("a step whose gradient norm is so many times the running median is skipped; 0 never", most=1e9),
    )
    timeout_s: float | Auto = field(
        default=AUTO,
        metadata=number(
            'longest wait for another rank once steps are steady; "auto" is five predicted steps, from 30 to 120 s',
            above=True,
            most=MAX_SECONDS,
            auto=True,
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Comm:
    """The communication between ranks: collective algorithm, bucket size and time-out."""

    algorithm: str = field(
        default=AUTO,
        metadata=choice(
            'all-reduce of GPUs: "auto" leaves it to NCCL, which knows its links', AUTO, "ring", "tree", "nvls"
        ),
    )
    bucket_mib: float | Auto = field(
        default=AUTO,
        metadata=number("gradients that are reduced together, MiB", above=True, most=65536.0, auto=True),
    )
    init_timeout_s: float = field(
        default=300.0,
        metadata=number("longest wait for another rank until steps are steady", above=True, most=MAX_SECONDS),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginReferences:
    """References to custom code, each as "file.py:name", "package.module:name" or the name of an entry point.

    Keyword arguments may follow as a JSON object: 'log.py:LossLog {"every": 10}'.
    """

    callbacks: tuple[str, ...] = field(default=(), metadata=texts("callbacks, called in this order", key="callbacks"))
    loss: str = field(default="", metadata=text("loss(logits, targets), summed over the valid tokens"))
    optimizer: str = field(default="", metadata=text("a torch.optim.Optimizer, or a function that builds one"))
    data: str = field(default="", metadata=text("a dataset or an iterable of sequences, instead of data.path"))
    metrics: tuple[str, ...] = field(
        default=(), metadata=texts("metric(logits, targets), summed over the valid tokens", key="metrics")
    )
    source: tuple[str, ...] = field(
        default=(), metadata=texts("lines of Python that came from a notebook or script", key="source")
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiver:
    """A rule of the specification that this job breaks on purpose, with the reason and the last day it applies."""

    rule: str = field(
        metadata=text("id of the rule, as CKP001", pattern=RULE_ID_PATTERN, expects='an id such as "CKP001"')
    )
    reason: str = field(metadata=text("why it is right here", pattern=r".{3,}", expects="a reason in words"))
    expires: str = field(metadata=day("last day on which it holds"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """The reproducibility of the arithmetic."""

    reproducible: bool = field(
        default=False, metadata=flag("the same bits on any number of data ranks, for a price in speed")
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Scaling of initial values and learning rates, so that those tuned on a small model fit a large one.

    `base_width` and `base_depth` are the size at which [optim] was tuned; at that size nothing changes.
    """

    parametrization: str = field(
        default="standard", metadata=choice("how they follow width and depth", "standard", "mup", "completep")
    )
    base_width: int = field(
        default=0, metadata=count("model.hidden at which [optim] was tuned", least=0, most=MAX_WIDTH)
    )
    base_depth: int = field(
        default=0, metadata=count("model.layers at which [optim] was tuned; for completep", least=0, most=MAX_LAYERS)
    )
    base_head_dim: int = field(
        default=64,
        metadata=count(
            "model.head_dim at which attention has its usual scale; it falls as 1 / head_dim", most=MAX_HEAD_DIM
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Job:
    """A complete job. Only `load` makes one, so a Job has passed every check that needs no hardware.

    >>> import phalanx
    >>> job = phalanx.load("examples/drill.toml").job
    >>> job
    <Job drill: drill-llama, 61.4k tokens>
    >>> job.data.sequence
    64
    """

    spec: str = field(default=EDITIONS[-1], metadata=choice("edition of the training specification", *EDITIONS))
    name: str = field(
        metadata=text(
            "names the run folder",
            pattern=NAME_PATTERN,
            expects="lower-case letters, digits, '.', '_' and '-', at most 63, not starting with a sign",
        )
    )
    profile: str = field(
        default=AUTO,
        metadata=choice(
            'hardware profile of the training specification; "auto" goes by the cluster',
            AUTO,
            "cpu-gloo",
            "nvidia-a100",
            "nvidia-h100",
            "nvidia-h200",
            "nvidia-b200",
            "amd-mi300x",
            "tpu",
            "custom",
        ),
    )
    rules: tuple[str, ...] = field(
        default=(),
        metadata=texts(
            'rules of your own for `phalanx check`, as "file.py:name"; run with --allow-code only', key="rules"
        ),
    )
    waiver: tuple[Waiver, ...] = field(default=(), metadata=nested("rules broken on purpose"))
    model: ModelShape
    data: Data
    batch: Batch
    optim: Optim
    precision: Precision
    parallel: Parallel
    train: Train
    plugins: PluginReferences = PluginReferences()
    comm: Comm = Comm()
    scale: Scale = Scale()
    numerics: Numerics
    checkpoint: Checkpoint
    fault: FaultSettings
    telemetry: Telemetry
    cluster: ClusterChoice
    cost: CostSettings
    launch: LaunchChoice = field(default_factory=LaunchChoice)
    sync: SyncSettings = field(default_factory=SyncSettings)

    # jobs without peers keep the digests they had before [sync] existed
    JSON_UNLESS_DEFAULT: ClassVar[tuple[str, ...]] = ("sync",)

    def __repr__(self) -> str:
        from phalanx.job.text import job_line

        return f"<Job {job_line(self)}>"


SECTIONS = {
    "data": Data,
    "batch": Batch,
    "optim": Optim,
    "precision": Precision,
    "parallel": Parallel,
    "train": Train,
    "plugins": PluginReferences,
    "comm": Comm,
    "scale": Scale,
    "numerics": Numerics,
    "checkpoint": Checkpoint,
    "fault": FaultSettings,
    "telemetry": Telemetry,
    "cluster": ClusterChoice,
    "cost": CostSettings,
    "launch": LaunchChoice,
    "sync": SyncSettings,
}
