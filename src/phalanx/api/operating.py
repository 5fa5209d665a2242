"""For operators: a cluster set up for teams, and its nodes kept healthy."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.api.results import PublicResult, Tell, teller
from phalanx.errors import mistake

if TYPE_CHECKING:
    from phalanx.launch.operate.cluster_diff import ObjectChange
    from phalanx.launch.operate.health import HealthDecision, NodeHealth


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ClusterSetup(PublicResult):
    """Objects of a cluster for teams, and what becomes of each."""

    texts: Mapping[str, str]  # manifests by file name
    changes: tuple[ObjectChange, ...] = ()  # empty where no cluster was asked
    applied: bool = False
    note: str = ""

    def __str__(self) -> str:
        if not self.changes:
            return "\n".join([*(text.rstrip("\n") for text in self.texts.values()), f"# {self.note}"])
        lines = []
        for one in self.changes:
            where = f" in {one.namespace}" if one.namespace else ""
            lines.append(f"{one.change:<9} {one.kind} {one.name}{where}{f': {one.note}' if one.note else ''}")
            lines += [f"    {line}" for line in one.diff.splitlines()]
        counts = Counter(one.change for one in self.changes)
        summary = ", ".join(f"{count} {change}" for change, count in counts.items())
        return "\n".join([*lines, f"{summary}: {self.note}"])


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ClusterHealth(PublicResult):
    """Nodes that are out of service or blamed, and what was decided."""

    nodes: tuple[NodeHealth, ...]  # all
    decisions: tuple[HealthDecision, ...]  # one, or one per partition
    applied: bool

    @property
    def exit_code(self) -> int:
        """1 when a node is blamed and still in service: the brake, or nothing was applied."""
        waiting = any(one.take_out for one in self.decisions) and not self.applied
        return 1 if waiting or any(one.braked for one in self.decisions) else 0

    def __str__(self) -> str:
        taken = {name: reason for one in self.decisions for name, reason in one.take_out}
        lines = [
            f"{node.name}: out of service: {node.reason or 'no reason given'}" for node in self.nodes if node.is_out
        ]
        word = "taken out of service" if self.applied else "would be taken out of service"
        lines += [f"{name}: {word}: {reason}" for name, reason in taken.items()]
        lines += [f"nothing was done: {one.braked}; look for one cause first" for one in self.decisions if one.braked]
        out = sum(node.is_out or (self.applied and node.name in taken) for node in self.nodes)
        return "\n".join([*lines, f"{len(self.nodes) - out} of {len(self.nodes)} nodes in service"])


def cluster_init(
    teams: str | Path, *, on: str = "k8s", apply: bool = False, out: str | Path | None = None
) -> ClusterSetup:
    """Set up a Kubernetes cluster for teams: topology, quotas, priorities, rights, preflight, alerts.

    Prints the objects where no cluster is configured; else the differences to what is there. `apply` makes them so,
    server-side. `out` writes the manifests into a folder.

    >>> print(cluster_init("teams.toml"))  # doctest: +SKIP
    >>> cluster_init("teams.toml", apply=True)  # doctest: +SKIP
    """
    import yaml

    from phalanx.io.files import write_text
    from phalanx.launch.kube.access import has_access, read_access
    from phalanx.launch.kube.client import KubeClient
    from phalanx.launch.operate.cluster_diff import compare_objects
    from phalanx.launch.operate.cluster_objects import cluster_objects
    from phalanx.launch.operate.teams import read_teams

    if on != "k8s":
        fix = "use --on k8s; Slurm's partitions and QOS are set up with its own tools"
        raise mistake("phalanx cluster init", f"--on {on} cannot be set up from here", fix=fix)
    read = read_teams(Path(teams))
    documents = cluster_objects(read)
    texts = {f"{read.name}.yaml": yaml.safe_dump_all(documents, sort_keys=False, width=120)}
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_text(Path(out) / name, text)
    if not apply and not has_access(os.environ):
        return ClusterSetup(texts=texts, note="no cluster is configured here: nothing was compared or applied")
    changes = compare_objects(KubeClient(read_access(os.environ)), documents, apply=apply)
    note = "applied" if apply else "nothing was changed; --apply makes it so"
    return ClusterSetup(texts=texts, changes=tuple(changes), applied=apply, note=note)


def cluster_health(
    *, on: str = "k8s", queue: str = "", apply: bool = False, follow: bool = False, progress: bool | Tell = False
) -> ClusterHealth:
    """Which nodes should be out of service, and why; `apply` cordons or drains them, each with its reason.

    On Kubernetes from the nodes' conditions and taints, on Slurm from hosts that runs excluded (of one partition with
    `queue`). Never more than half of the nodes are out by our doing. `follow` goes on, with one watch, on Kubernetes.

    >>> print(cluster_health(on="slurm"))  # doctest: +SKIP
    """
    from phalanx.launch.kube.access import read_access
    from phalanx.launch.kube.client import KubeClient
    from phalanx.launch.operate.kube_health import check_nodes, follow_nodes
    from phalanx.launch.operate.slurm_health import check_slurm

    where = "phalanx cluster health"
    if on == "slurm":
        if follow:
            raise mistake(where, "--follow is for --on k8s", fix="run it every few minutes by cron or scrontab")
        nodes, decisions = check_slurm(os.environ, partition=queue, apply=apply)
        return ClusterHealth(nodes=tuple(nodes), decisions=tuple(decisions), applied=apply)
    if on != "k8s":
        raise mistake(where, f"--on {on} has no nodes to look after", fix="use --on k8s or --on slurm")
    client, tell = KubeClient(read_access(os.environ)), teller(progress)
    if follow:
        said = ""
        for seen, decision in follow_nodes(client, apply=apply):
            now = str(ClusterHealth(nodes=tuple(seen), decisions=(decision,), applied=apply))
            if now != said:
                tell(now)
            said = now
    nodes, decision = check_nodes(client, apply=apply, now_s=time.time())
    return ClusterHealth(nodes=tuple(nodes), decisions=(decision,), applied=apply)
