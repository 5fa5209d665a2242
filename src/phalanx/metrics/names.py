"""The table of exported series: OpenTelemetry name and UCUM unit, Prometheus name, labels, and source.

Names follow OpenTelemetry where it defines one (`hw.*`, `process.*`); it has none for training, so the `train.*` names
are defined here. The Prometheus name is derived by OpenTelemetry's rules, so an export by scraping and one by OTLP
give the same series.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import Literal

# UCUM unit -> the suffix of a Prometheus name. A unit in braces is an annotation and adds no suffix.
WORDS = {"s": "seconds", "By": "bytes", "J": "joules", "W": "watts", "Cel": "celsius", "g": "grams", "1": "ratio"}
WORDS |= {"USD": "usd", "{token}/s": "per_second"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One exported series.

    `field` is the event field it is read from; empty if it is computed (`source` names the module).
    """

    name: str
    unit: str
    help: str
    source: str  # the kind of event it comes from, or the module that computes it
    field: str = ""
    labels: tuple[str, ...] = ()  # in addition to `run`
    kind: Literal["gauge", "counter"] = "gauge"

    @property
    def prometheus(self) -> str:
        """The series' name in the Prometheus exposition.

        >>> Metric(name="train.step.duration", unit="s", help="", source="step").prometheus
        'train_step_duration_seconds'
        >>> Metric(name="train.tokens", unit="{token}", help="", source="step", kind="counter").prometheus
        'train_tokens_total'
        """
        name = self.name.replace(".", "_")
        word = WORDS.get(self.unit, "")
        name += f"_{word}" if word and not name.endswith(f"_{word}") else ""
        return f"{name}_total" if self.kind == "counter" else name


RANK = ("rank", "host")
DEVICE = (*RANK, "source")


def _step_metric(name: str, unit: str, field: str, help_: str, *labels: str) -> Metric:
    return Metric(name=name, unit=unit, field=field, help=help_, source="step", labels=labels)


def _monitor_metric(name: str, unit: str, field: str, help_: str, *labels: str) -> Metric:
    return Metric(name=name, unit=unit, field=field, help=help_, source="monitor", labels=labels)


# Series of rank 0's newest step: equal on every rank, or about the global batch.
STEP = (
    _step_metric("train.loss", "{nat}", "loss", "loss of the newest step, nats per token"),
    _step_metric("train.grad.norm", "", "grad_norm", "norm of the whole gradient before clipping"),
    _step_metric("train.grad.noise_scale", "{sample}", "noise_scale", "gradient noise scale (B_simple)"),
    _step_metric("train.learning_rate", "", "lr", "learning rate of the newest step"),
    _step_metric("train.step.duration", "s", "duration_s", "the newest step, from asking for its batch to its update"),
    _step_metric("train.throughput", "{token}/s", "tokens_per_s", "tokens per second of the newest step"),
    _step_metric("train.expert.imbalance", "", "expert_imbalance", "tokens of the busiest expert over the mean"),
)
MFU = Metric(name="train.mfu", unit="1", help="model FLOPs of the newest step over the peak", source="step and plan")

# Series of every rank's newest step.
RANK_STEP = (
    _step_metric("train.compute.duration", "s", "compute_s", "time the rank worked in the newest step", *RANK),
    _step_metric("train.wait.duration", "s", "wait_s", "time the rank waited for others in the newest step", *RANK),
    _step_metric("train.data.duration", "s", "data_s", "time the rank waited for its batch in the newest step", *RANK),
)

# Series of every rank's newest monitor event. OpenTelemetry names the memory of a GPU and of a process differently.
GPU = (
    _monitor_metric("hw.gpu.utilization", "1", "utilization", "share of the GPU that was active", *DEVICE),
    _monitor_metric("hw.gpu.memory.usage", "By", "memory_bytes", "GPU memory in use", *RANK),
    _monitor_metric("hw.gpu.memory.limit", "By", "memory_limit_bytes", "GPU memory there is", *RANK),
)
CPU = (
    _monitor_metric(
        "process.cpu.utilization", "1", "utilization", "CPU time of the rank over the cores it may use", *DEVICE
    ),
    _monitor_metric("process.memory.usage", "By", "memory_bytes", "memory of the rank's process", *RANK),
    _monitor_metric("process.memory.limit", "By", "memory_limit_bytes", "memory the rank's process may use", *RANK),
)
ANY_DEVICE = (
    _monitor_metric("train.memory.pressure", "1", "memory_pressure", "how short of memory the rank is", *DEVICE),
    _monitor_metric(
        "train.memory.retries", "{retry}", "allocation_retries", "allocations that had to be tried again", *RANK
    ),
    _monitor_metric("hw.power", "W", "power_w", "power drawn for the rank", *RANK),
    _monitor_metric("hw.temperature", "Cel", "temperature_c", "temperature of the rank's device", *RANK),
)
ENERGY = Metric(
    name="hw.energy",
    unit="J",
    help="energy drawn for the rank since it joined this membership",
    source="monitor",
    field="energy_j",
    labels=DEVICE,
    kind="counter",
)

PEER_RTT = Metric(
    name="train.peer.rtt",
    unit="s",
    help="round trip of a ping between neighbours of the mesh",
    source="peers",
    field="p50_s, p99_s",
    labels=("src", "dst", "axis", "percentile"),
)
PEER_LOST = Metric(
    name="train.peer.lost",
    unit="{probe}",
    help="pings without an answer in the newest window",
    source="peers",
    field="lost",
    labels=("src", "dst", "axis"),
)
COLLECTIVE = Metric(
    name="train.collective.duration",
    unit="s",
    help="time in collectives in the newest sampled step of rank 0",
    source="timeline",
    field="collectives.seconds",
    labels=("op", "group"),
)
COLLECTIVE_SIZE = Metric(
    name="train.collective.size",
    unit="By",
    help="bytes of the collectives in the newest sampled step of rank 0",
    source="timeline",
    field="collectives.bytes",
    labels=("op", "group"),
)
CHECKPOINT = Metric(
    name="train.checkpoint.duration",
    unit="s",
    help="newest checkpoint of rank 0: stage is what training waited, commit until it was safe",
    source="checkpoint",
    field="blocked_s, seconds",
    labels=("phase",),
)
CHECKPOINT_SIZE = Metric(
    name="train.checkpoint.size",
    unit="By",
    help="bytes rank 0 wrote for the newest checkpoint",
    source="checkpoint",
    field="bytes",
)
CHECKPOINT_STEP = Metric(
    name="train.checkpoint.step",
    unit="{step}",
    help="steps held by the newest committed checkpoint",
    source="checkpoint",
    field="step",
)
CHECKPOINT_TIME = Metric(
    name="train.checkpoint.timestamp",
    unit="s",
    help="Unix time at which the newest checkpoint was committed",
    source="checkpoint",
    field="t",
)
EVALUATION = Metric(
    name="train.evaluation.loss",
    unit="{nat}",
    help="loss on held-out text, nats per token",
    source="evaluate",
    field="loss",
)

INFO = Metric(
    name="train.info",
    unit="",
    help="always 1; its labels say what is trained on what",
    source="plan.json",
    labels=("model", "cluster", "layout", "state"),
)
DONE = Metric(name="train.step", unit="{step}", help="steps done that stayed", source="step", field="step")
PLANNED = Metric(name="train.step.planned", unit="{step}", help="steps the run is to do", source="plan.json")
TOKENS = Metric(
    name="train.tokens",
    unit="{token}",
    help="tokens learnt; those of steps that were undone and done again count once",
    source="step",
    field="tokens",
    kind="counter",
)
RANKS = Metric(name="train.ranks", unit="{rank}", help="ranks of the newest membership with a record", source="epoch")
INCIDENTS = Metric(
    name="train.incidents", unit="{incident}", help="ranks or hosts that failed", source="incident", kind="counter"
)
UPDATED = Metric(
    name="train.updated.timestamp", unit="s", help="Unix time of the newest step", source="step", field="t"
)
DAMAGE = Metric(
    name="train.record.damage",
    unit="{line}",
    help="parts of the record that cannot be read",
    source="record.archive.history",
)
GOODPUT = Metric(
    name="train.goodput.ratio",
    unit="1",
    help="share of the time spent on steps that stayed; recent: in the last hour, or quarter of a shorter run",
    source="record.account.effective",
    labels=("window",),
)
TIME = Metric(
    name="train.time",
    unit="s",
    help="where the time of the run went",
    source="record.account.ledger",
    labels=("account",),
)
STRAGGLER = Metric(
    name="train.straggler.score",
    unit="1",
    help="own time over the median of the ranks that do the same work",
    source="record.account.stragglers",
    labels=RANK,
)
COST = Metric(
    name="train.cost", unit="USD", help="what the run costs", source="record.account.cost", labels=("horizon",)
)
CARBON = Metric(
    name="train.carbon", unit="g", help="CO2 equivalent of the run", source="record.account.cost", labels=("horizon",)
)
RUN_ENERGY = Metric(
    name="train.energy",
    unit="J",
    help="energy of the whole run, restarts included",
    source="record.account.cost",
    labels=("horizon",),
)

# The plan's numbers, for comparison with the measured ones; `field` is the key in plan.json.
PREDICTED = tuple(
    Metric(name=name, unit=unit, help=help_, source="plan.json", field=field)
    for name, unit, field, help_ in (
        ("train.predicted.step.duration", "s", "prediction.step_s", "step time the plan predicts"),
        ("train.predicted.throughput", "{token}/s", "prediction.tokens_per_s", "tokens per second the plan predicts"),
        ("train.predicted.mfu", "1", "prediction.mfu", "MFU the plan predicts"),
        ("train.predicted.memory.usage", "By", "memory.total_bytes", "memory of a rank that the plan predicts"),
    )
)

METRICS: tuple[Metric, ...] = (
    *(INFO, DONE, PLANNED, TOKENS, RANKS, INCIDENTS, UPDATED, DAMAGE),
    *STEP,
    *(MFU, EVALUATION),
    *RANK_STEP,
    *(GPU + CPU + ANY_DEVICE),
    *(ENERGY, PEER_RTT, PEER_LOST, COLLECTIVE, COLLECTIVE_SIZE),
    *(CHECKPOINT, CHECKPOINT_SIZE, CHECKPOINT_STEP, CHECKPOINT_TIME),
    *(GOODPUT, TIME, STRAGGLER, COST, CARBON, RUN_ENERGY),
    *PREDICTED,
)


def grafana_dashboard() -> str:
    """Return the Grafana dashboard as JSON for import (Dashboards, New, Import)."""
    return resources.files("phalanx.metrics").joinpath("grafana.json").read_text(encoding="utf-8")
