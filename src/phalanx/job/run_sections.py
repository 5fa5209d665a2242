"""The sections of a job on its operation: checkpoints, faults, telemetry, cluster, cost and launching."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.io.limits import MAX_KEPT, MAX_RANKS, MAX_SECONDS
from phalanx.job.key_rules import AUTO, Auto, choice, count, flag, number, text, texts

_URL, _LABEL = r"https?://[0-9A-Za-z.:_\[\]-]{1,255}", r"[a-z0-9][a-z0-9.-]{0,252}"
ELECTION_PATTERN = rf"file|etcd:{_URL}(,{_URL}){{0,15}}|kubernetes(:{_LABEL}(/{_LABEL})?)?"
LAUNCH_WORD = r"([0-9A-Za-z][0-9A-Za-z._-]{0,62})?"  # a partition, queue or account
K8S_NAME = r"([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)?"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """Checkpoints: where they are written, how often, and how many are kept."""

    path: str = field(default="checkpoints", metadata=text("folder, relative to the run, or s3://bucket/prefix"))
    interval_s: float | Auto = field(
        default=AUTO,
        metadata=number(
            'seconds between checkpoints; "auto" is Daly\'s optimum', above=True, most=MAX_SECONDS, auto=True
        ),
    )
    keep: int = field(default=3, metadata=count("newest checkpoints kept", most=MAX_KEPT))
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
class FaultSettings:
    """Detection of failures and recovery from them."""

    detect_s: float = field(default=30.0, metadata=number("seconds until a failure is noticed", most=MAX_SECONDS))
    restart_s: float = field(
        default=300.0, metadata=number("seconds from the failure noticed to the next step", most=MAX_SECONDS)
    )
    dead_after_s: float = field(
        default=30.0, metadata=number("silence after which a rank is dead", above=True, most=MAX_SECONDS)
    )
    spares: int | Auto = field(
        default=AUTO, metadata=count("idle hosts kept ready", least=0, most=MAX_RANKS, auto=True)
    )
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
    max_lost: float = field(
        default=0.8,
        metadata=number(
            "share of the wall time that incidents with steps between them may cost; 1 is no limit", above=True, most=1
        ),
    )
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
        default=30.0, metadata=number("seconds from SIGTERM to the end", above=True, most=MAX_SECONDS)
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
    """The measurements that a run records and serves."""

    interval_s: float = field(
        default=10.0, metadata=number("seconds between samples of each rank's device", above=True, most=MAX_SECONDS)
    )
    peers_every_s: float = field(
        default=30.0, metadata=number("seconds between reports of peer latency; 0 is never", most=MAX_SECONDS)
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
    """The cluster as the job file names it; the hardware layer makes a Cluster of it."""

    spec: str = field(default="", metadata=text('such as "8xH100:16", or "local" for this machine'))
    file: str = field(default="", metadata=text("a cluster file, relative to the job file"))

    @property
    def target(self) -> str:
        """The file or the spec, whichever is set."""
        return self.file or self.spec


@dataclass(frozen=True, kw_only=True, slots=True)
class CostSettings:
    """Cost and energy; None takes the value from the planner's tables."""

    usd_per_device_hour: float | None = field(default=None, metadata=number("what one device costs", most=1e5))
    pue: float | None = field(
        default=None, metadata=number("power of the site / power of the machines", least=1.0, most=5.0)
    )
    grid_gco2_per_kwh: float | None = field(default=None, metadata=number("grams of CO2e per kWh", most=5000.0))
    region: str = field(default="", metadata=text("grid region for the carbon table"))


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchChoice:
    """The system on which `phalanx launch` starts the job.

    Omitted keys come from the user's or the site's launch.toml.
    """

    on: str = field(default="", metadata=choice("the system that starts it", "", "local", "slurm", "k8s"))
    queue: str = field(
        default="",
        metadata=text(
            "Slurm's partition, or Kueue's queue", pattern=LAUNCH_WORD, expects="letters, digits, '.', '_' and '-'"
        ),
    )
    account: str = field(
        default="",
        metadata=text("Slurm's account", pattern=LAUNCH_WORD, expects="letters, digits, '.', '_' and '-'"),
    )
    qos: str = field(
        default="",
        metadata=text(
            "Slurm's quality of service, or Kueue's priority class",
            pattern=LAUNCH_WORD,
            expects="letters, digits, '.', '_' and '-'",
        ),
    )
    hosts: int | Auto = field(
        default=AUTO, metadata=count('hosts without the spares; "auto" is the plan\'s', most=MAX_RANKS, auto=True)
    )
    time_s: float | Auto = field(
        default=AUTO,
        metadata=number(
            'time limit; "auto" is the upper end of the predicted interval', above=True, most=MAX_SECONDS, auto=True
        ),
    )
    interface: str = field(
        default="",
        metadata=text(
            "network interface, or network such as 10.0.0.0/8, on which hosts reach each other",
            pattern=r"[0-9A-Za-z.:_/-]{0,63}",
            expects="the name of an interface, or a network",
        ),
    )
    python: str = field(default="", metadata=text("Python with Phalanx on the hosts; left out, the one that launches"))
    modules: tuple[str, ...] = field(
        default=(), metadata=texts("environment modules to load on the hosts", key="modules")
    )
    image: str = field(default="", metadata=text("container image (Slurm: pyxis and enroot)"))
    mounts: tuple[str, ...] = field(
        default=(), metadata=texts('folders of the host in the container, as "/data" or "/data:/mnt"', key="mounts")
    )
    environ: tuple[str, ...] = field(
        default=(), metadata=texts('variables of every rank, as "NCCL_IB_HCA=mlx5"', key="environ")
    )
    options: tuple[str, ...] = field(
        default=(), metadata=texts('further options of sbatch, as "--constraint=h100"', key="options")
    )
    flavour: str = field(
        default="",
        metadata=choice("what it is in Kubernetes", "", "jobset", "trainjob", "podgroup", "job", "skypilot", "dstack"),
    )
    namespace: str = field(
        default="", metadata=text("Kubernetes' namespace", pattern=K8S_NAME, expects="lower case, digits and '-'")
    )
    claim: str = field(
        default="",
        metadata=text(
            "PersistentVolumeClaim with the run folders", pattern=K8S_NAME, expects="lower case, digits and '-'"
        ),
    )
    topology: tuple[str, ...] = field(
        default=(), metadata=texts('node labels of Kueue\'s topology, widest first, as "topology/rack"', key="topology")
    )
    placement: str = field(
        default="", metadata=choice("whether the job waits for one domain", "", "preferred", "required")
    )
    rdma: str = field(
        default="",
        metadata=text(
            "extended resource of the RDMA devices, as rdma/hca",
            pattern=r"([a-z0-9.-]{1,253}/[0-9A-Za-z._-]{1,63})?",
            expects="a resource such as rdma/hca",
        ),
    )
    host_network: bool = field(default=False, metadata=flag("pods use the network of their nodes"))
