"""For operators: set up a cluster for teams, and keep its nodes healthy."""

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
    """The objects that set up a cluster for teams, and the change of each."""

    texts: Mapping[str, str]  # manifests by file name
    changes: tuple[ObjectChange, ...] = ()  # empty if no cluster was queried
    applied: bool = False
    note: str = ""

    def __str__(self) -> str:
        if not self.changes:
            return "\n".join([*(text.rstrip("\n") for text in self.texts.values()), f"# {self.note}"])
        lines = []
        for change in self.changes:
            where = f" in {change.namespace}" if change.namespace else ""
            lines.append(
                f"{change.change:<9} {change.kind} {change.name}{where}{f': {change.note}' if change.note else ''}"
            )
            lines += [f"    {line}" for line in change.diff.splitlines()]
        counts = Counter(change.change for change in self.changes)
        summary = ", ".join(f"{count} {change}" for change, count in counts.items())
        return "\n".join([*lines, f"{summary}: {self.note}"])


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ClusterHealth(PublicResult):
    """The health of a cluster's nodes, and the decisions to take nodes out of service."""

    nodes: tuple[NodeHealth, ...]  # all nodes
    decisions: tuple[HealthDecision, ...]  # one, or one per partition
    applied: bool

    @property
    def exit_code(self) -> int:
        """1 if a faulty node is still in service: because of the limit, or because nothing was applied."""
        waiting = any(decision.take_out for decision in self.decisions) and not self.applied
        return 1 if waiting or any(decision.braked for decision in self.decisions) else 0

    def __str__(self) -> str:
        taken_out = {name: reason for decision in self.decisions for name, reason in decision.take_out}
        lines = [
            f"{node.name}: out of service: {node.reason or 'no reason given'}" for node in self.nodes if node.is_out
        ]
        word = "taken out of service" if self.applied else "would be taken out of service"
        lines += [f"{name}: {word}: {reason}" for name, reason in taken_out.items()]
        lines += [
            f"nothing was done: {decision.braked}; look for one cause first"
            for decision in self.decisions
            if decision.braked
        ]
        out = sum(node.is_out or (self.applied and node.name in taken_out) for node in self.nodes)
        return "\n".join([*lines, f"{len(self.nodes) - out} of {len(self.nodes)} nodes in service"])


def cluster_init(
    teams: str | Path, *, on: str = "k8s", apply: bool = False, out: str | Path | None = None
) -> ClusterSetup:
    """Set up a Kubernetes cluster for teams: topology, quotas, priorities, rights, preflight, alerts.

    Without a configured cluster, return the objects; otherwise the differences from the cluster's present state.
    `apply` applies them server-side. `out` writes the manifests into a folder.

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
    team_file = read_teams(Path(teams))
    documents = cluster_objects(team_file)
    texts = {f"{team_file.name}.yaml": yaml.safe_dump_all(documents, sort_keys=False, width=120)}
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
    """Determine which nodes should be out of service, and why; `apply` cordons or drains them, each with its reason.

    On Kubernetes the nodes' conditions and taints decide, on Slurm the hosts that runs excluded (of one partition with
    `queue`). Phalanx never takes more than half of the nodes out. `follow` continues with a watch, on Kubernetes.

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
        last_page = ""
        for watched_nodes, decision in follow_nodes(client, apply=apply):
            page = str(ClusterHealth(nodes=tuple(watched_nodes), decisions=(decision,), applied=apply))
            if page != last_page:
                tell(page)
            last_page = page
    nodes, decision = check_nodes(client, apply=apply, now_s=time.time())
    return ClusterHealth(nodes=tuple(nodes), decisions=(decision,), applied=apply)
