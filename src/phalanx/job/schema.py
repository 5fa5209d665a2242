"""A job as values: one frozen dataclass per section of the file, every key with its rule and a line of explanation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from phalanx.job.key_rules import AUTO, MOST_TOKENS, choice, count, day, flag, nested, number, pair, text, texts
from phalanx.job.model import ModelShape

Auto = Literal["auto"]

EDITIONS = ("2026.1",)
NAME_PATTERN = r"[a-z0-9][a-z0-9._-]{0,62}"
RULE_ID_PATTERN = r"[A-Z]{2,12}[0-9]{1,4}"  # ours have three letters and three digits; others' rules may differ
MOST_RANKS = 10**7
_URL, _LABEL = r"https?://[0-9A-Za-z.:_\[\]-]{1,255}", r"[a-z0-9][a-z0-9.-]{0,252}"
ELECTION_PATTERN = rf"file|etcd:{_URL}(,{_URL}){{0,15}}|kubernetes(:{_LABEL}(/{_LABEL})?)?"
TOKENS_PER_PARAMETER = 20  # compute-optimal (Hoffmann et al. 2022): what data.tokens = "auto" means
MOST_SECONDS = 10**9  # 31 years


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """What is read: token files, how many tokens in all, and how long a sequence is."""

    paths: tuple[str, ...] = field(default=(), metadata=texts("folders that phalanx data build made", key="path"))
    corpus: str = field(
        default="", metadata=choice("text to fetch and build when no path is given", "", "offline-english")
    )
    tokens: int | Auto = field(
        default=AUTO,
        metadata=count(
            f'tokens to train on; "auto" is {TOKENS_PER_PARAMETER} per parameter', most=MOST_TOKENS, auto=True
        ),
    )
    seed: int = field(default=0, metadata=count("seed of the sampler and of the initial weights", least=0))
    sequence: int = field(default=4096, metadata=count("tokens per sequence"))


@dataclass(frozen=True, kw_only=True, slots=True)
class RampStage:
    """A smaller global batch early in training: `global_tokens` per step until `until_tokens` were seen."""

    until_tokens: int = field(metadata=count("tokens seen when this stage ends", most=MOST_TOKENS))
    global_tokens: int = field(metadata=count("tokens per step in this stage", most=MOST_TOKENS))


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """How much is learnt from at once. The file gives one of the two global sizes; both are filled in here."""

    global_tokens: int = field(default=0, metadata=count("tokens per optimizer step", most=MOST_TOKENS))
    global_sequences: int = field(default=0, metadata=count("sequences per optimizer step", most=10**12))
    micro: int | Auto = field(default=AUTO, metadata=count("sequences per device and pass", auto=True))
    ramp: tuple[RampStage, ...] = field(default=(), metadata=nested("smaller batches early in training"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Optim:
    """The optimizer and its schedule."""

    name: str = field(default="adamw", metadata=choice("the update rule", "adamw", "adafactor", "adamw8bit", "muon"))
    lr: float = field(default=3e-4, metadata=number("peak learning rate", above=True, most=100.0))
    betas: tuple[float, float] = field(default=(0.9, 0.95), metadata=pair("Adam's moments", least=0.0, most=1.0))
    weight_decay: float = field(default=0.1, metadata=number("decoupled weight decay", most=10.0))
    schedule: str = field(default="wsd", metadata=choice("learning rate over time", "wsd", "cosine"))
    warmup_tokens: int = field(default=0, metadata=count("tokens of linear warm-up", least=0, most=MOST_TOKENS))
    decay: float = field(default=0.2, metadata=number("share of the tokens over which wsd decays", most=1.0))
    final_lr: float = field(default=0.1, metadata=number("last learning rate, as a share of the peak", most=1.0))
    eps: float = field(default=1e-8, metadata=number("keeps Adam from dividing by zero", above=True, most=1.0))
    clip: float = field(default=1.0, metadata=number("largest gradient norm; 0 never clips", most=1e6))


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Number formats of the arithmetic, of gradients on the wire, and of what is kept between steps."""

    compute: str = field(default="bf16", metadata=choice("matrix products", "bf16", "fp16", "fp8", "fp4", "fp32"))
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
    """How the model is split: every key is a value to keep, or "auto" for the planner to choose."""

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
    data: int | Auto = field(default=AUTO, metadata=count("replicas of the model", most=MOST_RANKS, auto=True))
    shard: int | Auto = field(
        default=AUTO,
        metadata=count("ranks that share one sharded copy", most=MOST_RANKS, auto=True, zero_is_auto=True),
    )
    zero: int | Auto = field(
        default=AUTO, metadata=count("ZeRO stage: what the shard group shares", least=0, most=3, auto=True)
    )
    tensor: int | Auto = field(default=AUTO, metadata=count("ranks that split each matrix", most=MOST_RANKS, auto=True))
    sequence_parallel: bool | Auto = field(
        default=AUTO, metadata=flag("split norms and dropout along the sequence in the tensor group", auto=True)
    )
    context: int | Auto = field(
        default=AUTO, metadata=count("ranks that split each sequence", most=MOST_RANKS, auto=True)
    )
    pipeline: int | Auto = field(default=AUTO, metadata=count("stages of layers", most=MOST_RANKS, auto=True))
    virtual_pipeline: int | Auto = field(
        default=AUTO, metadata=count("model chunks per stage", most=MOST_RANKS, auto=True)
    )
    schedule: str = field(
        default=AUTO, metadata=choice("pipeline order", AUTO, "gpipe", "1f1b", "interleaved", "zero-bubble")
    )
    expert: int | Auto = field(default=AUTO, metadata=count("ranks that split the experts", most=MOST_RANKS, auto=True))
    context_kind: str = field(
        default="ring", metadata=choice("how context ranks share keys and values", "ring", "ulysses", "allgather")
    )
    loss_parallel: bool = field(default=True, metadata=flag("leave the logits split over the tensor group"))
    recompute: str = field(
        default=AUTO, metadata=choice("activations computed again in backward", AUTO, "none", "selective", "full")
    )
    recompute_layers: int | Auto = field(
        default=AUTO, metadata=count('of each stage, layers that recompute; "auto" is all of them', auto=True)
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
    """What the loop does besides learning: how often it looks up, and when it gives up."""

    weights: str = field(
        default="",
        metadata=text("Hugging Face folder to start from, relative to the job file; empty draws new weights"),
    )
    compile: bool | Auto = field(
        default=AUTO, metadata=flag('compile each block; "auto" does so on GPUs only', auto=True)
    )
    compile_check: bool = field(
        default=True,
        metadata=flag(
            "compare compiled code with eager code on one micro-batch before the first step, and stop on errors"
        ),
    )
    ranks_per_gpu: int = field(
        default=1,
        metadata=count("ranks that may share one GPU, for proofs and drills; above 1 needs NCCL 2.30", most=64),
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
            most=MOST_SECONDS,
            auto=True,
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Comm:
    """How ranks talk to each other."""

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
        metadata=number("longest wait for another rank until steps are steady", above=True, most=MOST_SECONDS),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginReferences:
    """Code of the user's own, each as "file.py:name", "package.module:name" or the name of an entry point.

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
    """A rule of the specification that this job breaks on purpose, why, and until when."""

    rule: str = field(
        metadata=text("id of the rule, as CKP001", pattern=RULE_ID_PATTERN, expects='an id such as "CKP001"')
    )
    reason: str = field(metadata=text("why it is right here", pattern=r".{3,}", expects="a reason in words"))
    expires: str = field(metadata=day("last day on which it holds"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """How exactly the arithmetic is to be repeated."""

    reproducible: bool = field(
        default=False, metadata=flag("the same bits on any number of data ranks, for a price in speed")
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What survives a failure."""

    path: str = field(default="checkpoints", metadata=text("folder, relative to the run, or s3://bucket/prefix"))
    interval_s: float | Auto = field(
        default=AUTO,
        metadata=number(
            'seconds between checkpoints; "auto" is Daly\'s optimum', above=True, most=MOST_SECONDS, auto=True
        ),
    )
    keep: int = field(default=3, metadata=count("newest checkpoints kept", most=10**6))
    asynchronous: bool = field(default=True, metadata=flag("write while training goes on", key="async"))
    memory_every: int | Auto = field(
        default=AUTO,
        metadata=count(
            "steps between copies in host memory, from which a lost rank is restored; 0 is never, "
            '"auto" as often as costs at most 1 %',
            least=0,
            auto=True,
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """How failures are noticed and survived."""

    detect_s: float = field(default=30.0, metadata=number("seconds until a failure is noticed", most=MOST_SECONDS))
    restart_s: float = field(
        default=300.0, metadata=number("seconds from the failure noticed to the next step", most=MOST_SECONDS)
    )
    dead_after_s: float = field(
        default=30.0, metadata=number("silence after which a rank is dead", above=True, most=MOST_SECONDS)
    )
    spares: int | Auto = field(default=AUTO, metadata=count("idle hosts kept ready", least=0, auto=True))
    failures_per_host_day: float | None = field(
        default=None, metadata=number("measured failure rate; left out, the cluster's is used", most=1e4)
    )
    recovery: str = field(
        default="auto",
        metadata=choice(
            "a lost rank is replaced from an idle place, or the job shrinks, or it stops",
            "auto",
            "replace",
            "shrink",
            "stop",
        ),
    )
    on_loss: str = field(
        default="rebuild",
        metadata=choice(
            "when a rank is lost, all ranks rebuild, or the others leave out its model replica until it is back",
            "rebuild",
            "leave-out",
        ),
    )
    restarts: int = field(default=3, metadata=count("failures in a row, without a step between, before giving up"))
    digest_every: int | Auto = field(
        default=AUTO,
        metadata=count(
            "steps between comparisons of replicated weights; 0 is never, "
            '"auto" once in a checkpoint interval and in 100 steps',
            least=0,
            auto=True,
        ),
    )
    grace_s: float = field(
        default=30.0, metadata=number("seconds from SIGTERM to the end", above=True, most=MOST_SECONDS)
    )
    interface: str = field(
        default="",
        metadata=text(
            "address that agents of several hosts listen on; left out, the loopback",
            pattern=r"[0-9A-Za-z.:_-]{0,255}",
            expects="an address of this host",
        ),
    )
    election: tuple[str, ...] = field(
        default=("file",),
        metadata=texts(
            "how hosts agree on the one that coordinates; of several, the first that works at the start",
            key="election",
            pattern=ELECTION_PATTERN,
            expects='"file", "etcd:URL", "kubernetes" or "kubernetes:NAMESPACE/NAME", or a list of them',
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Telemetry:
    """What a run tells while it goes."""

    interval_s: float = field(
        default=10.0, metadata=number("seconds between samples of each rank's device", above=True, most=MOST_SECONDS)
    )
    peers_every_s: float = field(
        default=30.0, metadata=number("seconds between reports of peer latency; 0 is never", most=MOST_SECONDS)
    )
    timeline_every: int = field(
        default=200, metadata=count("steps between two whose timeline is recorded; 0 is never", least=0)
    )
    host_files_from: int = field(
        default=1024,
        metadata=count("ranks from which on those of a host share one file of events and one log; 0 is never", least=0),
    )
    prometheus: bool = field(default=False, metadata=flag("serve /metrics"))
    listen: str = field(
        default="127.0.0.1:0",
        metadata=text(
            "address and port of /metrics; port 0 takes a free one",
            pattern=r"(?:[A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.%]{2,60}\]):(?:6553[0-5]|655[0-2]\d|65[0-4]\d\d|6[0-4]\d{3}|[1-5]?\d{1,4})",
            expects='an address and a port, as "127.0.0.1:0"',
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterChoice:
    """Where to run, as written; the hardware layer makes a Cluster of it."""

    spec: str = field(default="", metadata=text('such as "8xH100:16", or "local" for this machine'))
    file: str = field(default="", metadata=text("a cluster file, relative to the job file"))

    @property
    def target(self) -> str:
        """The one of the two that is given."""
        return self.file or self.spec


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Money and energy; None takes the figure from the planner's tables."""

    usd_per_device_hour: float | None = field(default=None, metadata=number("what one device costs", most=1e5))
    pue: float | None = field(
        default=None, metadata=number("power of the site / power of the machines", least=1.0, most=5.0)
    )
    grid_gco2_per_kwh: float | None = field(default=None, metadata=number("grams of CO2e per kWh", most=5000.0))
    region: str = field(default="", metadata=text("grid region for the carbon table"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a person asks for. `load` is the only maker: a Job in hand has passed every check that needs no hardware."""

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
    numerics: Numerics
    checkpoint: Checkpoint
    fault: Fault
    telemetry: Telemetry
    cluster: ClusterChoice
    cost: Cost


SECTIONS = {
    "data": Data,
    "batch": Batch,
    "optim": Optim,
    "precision": Precision,
    "parallel": Parallel,
    "train": Train,
    "plugins": PluginReferences,
    "comm": Comm,
    "numerics": Numerics,
    "checkpoint": Checkpoint,
    "fault": Fault,
    "telemetry": Telemetry,
    "cluster": ClusterChoice,
    "cost": Cost,
}
