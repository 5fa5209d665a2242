"""Node health on Slurm: nodes that runs excluded, or that blame themselves, are drained with the reason."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from phalanx.errors import PhalanxError, UserError
from phalanx.io.codec import json_text
from phalanx.io.files import load_json, replace_text
from phalanx.io.values import number, text
from phalanx.io.visible import one_line
from phalanx.launch.book import book_folder, read_records
from phalanx.launch.operate.health import PREFIX, HealthDecision, NodeHealth, decide_health
from phalanx.launch.slurm import NOT_USABLE, SlurmSystem, unknown_partition
from phalanx.record.events import read_events
from phalanx.record.run import Run

NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,253}")
RECENT_S = 86400.0  # older exclusions are ignored: the node has been examined, or is gone
MOST_RUNS = 200  # newest first
# Next to the launch records: the nodes that were drained, so that a repaired node stays in service.
LEDGER = "drained.json"


def check_slurm(
    environ: Mapping[str, str], *, partition: str, apply: bool, now_s: float | None = None
) -> tuple[list[NodeHealth], list[HealthDecision]]:
    """Check every partition (or one) for nodes that our runs blame, and drain them if asked.

    The limit on drained nodes applies to each partition alone: a node of two partitions counts in both.
    """
    system = SlurmSystem(environ)
    if partition and partition not in (partition_names := system.partitions()):
        raise UserError(unknown_partition(partition, partition_names))
    blamed = blamed_by_runs(environ, time.time() if now_s is None else now_s)
    partitions = slurm_nodes(system, partition, {name: tuple(reasons) for name, reasons in blamed.items()})
    decisions = [decide_health(nodes) for nodes in partitions.values()]
    # A node is drained if the limit of none of its partitions prevents it.
    held_back = {
        node.name
        for nodes, decision in zip(partitions.values(), decisions, strict=True)
        if decision.braked
        for node in nodes
    }
    drained = {name: reason for decision in decisions for name, reason in decision.take_out if name not in held_back}
    if apply:
        for name, reason in drained.items():
            drain_node(system, name, reason)
        _remember(environ, drained)
    nodes_by_name = {node.name: node for nodes in partitions.values() for node in nodes}
    return list(nodes_by_name.values()), decisions


def slurm_nodes(
    system: SlurmSystem, partition: str, blamed: Mapping[str, tuple[str, ...]]
) -> dict[str, list[NodeHealth]]:
    """Return the nodes of each partition."""
    chosen = ("-p", partition) if partition else ()
    nodes_by_partition: dict[str, dict[str, NodeHealth]] = {}
    for line in system.ask("sinfo", "-h", "-N", *chosen, "-o", "%P|%N|%T|%E").splitlines():
        words = line.split("|", 3)
        if len(words) == 4:
            name, is_out = words[1], any(word in words[2].lower() for word in NOT_USABLE)
            view = NodeHealth(name=name, is_out=is_out, blamed=blamed.get(name, ()), reason=one_line(words[3]))
            nodes_by_partition.setdefault(words[0].rstrip("*"), {})[name] = view
    return {name: list(nodes.values()) for name, nodes in nodes_by_partition.items()}


def blamed_by_runs(environ: Mapping[str, str], now_s: float) -> dict[str, list[str]]:
    """Return, with reasons, the hosts that runs launched from here excluded and that have not been drained since."""
    drained_at = _ledger(environ)
    reasons_by_host: dict[str, list[str]] = {}
    for record in read_records(environ, system="slurm")[-MOST_RUNS:]:
        with suppress(PhalanxError, OSError):
            events, _ = read_events(Run(path=Path(record.run)).supervisor)
            for event in events:
                host, at_s = text(event, "host"), number(event, "t") or 0.0
                if event.get("event") != "quarantine" or "slot" in event or not NODE.fullmatch(host):
                    continue
                if now_s - at_s < RECENT_S and at_s > drained_at.get(host, 0.0):
                    reasons_by_host.setdefault(host, []).append(
                        f"{one_line(text(event, 'reason'))[:100]} (job {record.id})"
                    )
    return reasons_by_host


def drain_node(system: SlurmSystem, name: str, reason: str) -> None:
    """Drain a node: it gets no new jobs, and running jobs continue.

    `scontrol update NodeName=… State=RESUME` undoes it.
    """
    printable = re.sub(r"[^ -~]", "?", reason).replace('"', "'")
    system.ask("scontrol", "update", f"NodeName={name}", "State=DRAIN", f"Reason={printable}")


def drain_own_node(name: str, said: Sequence[str], environ: Mapping[str, str]) -> str:
    """Drain a node from its own health check, unless that would leave less than half of a partition of it."""
    system = SlurmSystem(environ)
    for partition, nodes in slurm_nodes(system, "", {name: tuple(said)}).items():
        own_nodes = [node for node in nodes if node.name == name]
        if own_nodes and own_nodes[0].is_out:
            return f"{name} is out of service already: {own_nodes[0].reason}"
        decision = decide_health(nodes)
        if own_nodes and decision.braked:
            return f"{name} is blamed ({'; '.join(said)}) and stays: in partition {partition}, {decision.braked}"
    drain_node(system, name, PREFIX + "; ".join(said))
    return f"{name} is drained: {'; '.join(said)}"


def _ledger(environ: Mapping[str, str]) -> dict[str, float]:
    try:
        values = load_json(book_folder(environ) / LEDGER)
    except (OSError, ValueError, PhalanxError):
        return {}
    return {str(name): float(at_s) for name, at_s in values.items()} if isinstance(values, dict) else {}


def _remember(environ: Mapping[str, str], acted: Mapping[str, str]) -> None:
    if acted:
        ledger = _ledger(environ) | dict.fromkeys(acted, time.time())
        os.makedirs(book_folder(environ), mode=0o700, exist_ok=True)
        replace_text(book_folder(environ) / LEDGER, json_text(ledger) + "\n")
