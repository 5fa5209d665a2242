"""Queues, quota and topology of the real Kueue with JobSet; pods only report status. The messages are Kueue's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kueue_cluster import KUEUE, MISSING, RACK, KueueCluster, kueue_cluster
from slurm_cluster import wait_for

import phalanx
from phalanx.launch.kube.client import has_condition

NODES, SHARE = 4 * RACK, 2 * RACK  # of each team
PATIENCE_S = 600.0

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=MISSING or "they are there")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KueueCluster]:
    with kueue_cluster(tmp_path_factory.mktemp("queues"), nodes=NODES, language=SHARE, vision=SHARE) as made:
        yield made


def await_pods(cluster: KueueCluster, team: str, run: str, pods: int) -> None:
    wait_for(lambda: cluster.running(team)[run] == pods, f"{pods} pods of {run}", patience_s=PATIENCE_S)


def await_reason(job: str, begin: str) -> None:
    seen: dict[str, None] = {}

    def is_said() -> bool:
        seen[phalanx.why(job).explanation.reason] = None
        return any(one.startswith(begin) for one in seen)

    try:
        wait_for(is_said, begin, patience_s=PATIENCE_S / 2)
    except AssertionError as error:
        raise AssertionError(f"{begin!r} was never said, but {list(seen)}") from error


def test_a_gang_is_admitted_whole_in_rank_order_and_why_names_what_others_wait_for(cluster: KueueCluster) -> None:
    first = cluster.submit("first", hosts=RACK + 8, team="vision")  # a rack and a half
    await_pods(cluster, "vision", first, RACK + 8)
    racks = cluster.racks("vision", first)
    assert sorted(racks) == racks  # numbers follow the racks
    assert len(set(racks)) == 2
    workloads, _ = cluster.client.list_objects(f"{KUEUE}/namespaces/vision/workloads")
    assert has_condition(workloads[0], "Admitted") is not None
    assert phalanx.why(first).explanation.reason == f"on {RACK + 8} pods"

    more = cluster.submit("more", hosts=NODES - RACK, team="vision")  # with what it could borrow, but not now
    await_reason(more, "queue vision has no quota left for it now (")
    assert cluster.running("vision")[more] == 0  # all or nothing
    cluster.client.patch(f"{KUEUE}/clusterqueues/vision", {"spec": {"stopPolicy": "Hold"}})
    await_reason(more, "queue vision is stopped or not set up (")
    cluster.client.patch(f"{KUEUE}/clusterqueues/vision", {"spec": {"stopPolicy": "None"}})
    await_reason(more, "queue vision has no quota left for it now (")

    spread = cluster.submit(
        "spread", hosts=RACK + 1, team="language", topology=("topology/rack",), placement="required"
    )
    await_reason(spread, "no part of the network has room for it in one piece (")
    label = cluster.submit("label", hosts=2, team="language", topology=("topology/row",), placement="required")
    await_reason(label, "nodes of queue language have no label that launch.topology names (")

    groups = (cluster.client.get(f"{KUEUE}/clusterqueues/vision") or {})["spec"]["resourceGroups"]
    groups[0]["flavors"][0]["resources"][0] |= {"nominalQuota": "8", "borrowingLimit": "0"}
    cluster.client.patch(f"{KUEUE}/clusterqueues/vision", {"spec": {"resourceGroups": groups}})
    await_reason(more, "it asks for more than queue vision can ever have (")
    cluster.apply_teams()  # as it was

    [waits] = [one for one in workloads_of(cluster, "vision") if more in one]
    cluster.client.patch(f"{KUEUE}/namespaces/vision/workloads/{waits}", {"spec": {"active": False}})
    await_reason(more, "it was deactivated (")
    phalanx.requeue(more)
    await_reason(more, "queue vision has no quota left for it now (")
    cluster.client.delete(f"{KUEUE}/namespaces/vision/localqueues/vision")
    await_reason(more, "there is no queue vision in its namespace")
    for job in (more, spread, label, first):
        phalanx.cancel(job)
    cluster.apply_teams()
    for team in ("language", "vision"):
        wait_for(lambda team=team: not workloads_of(cluster, team), "no workload is left", patience_s=PATIENCE_S)


def workloads_of(cluster: KueueCluster, team: str) -> list[str]:
    return [one["metadata"]["name"] for one in cluster.client.list_objects(f"{KUEUE}/namespaces/{team}/workloads")[0]]


def test_idle_quota_is_borrowed_and_reclaimed(cluster: KueueCluster) -> None:
    borrower = cluster.submit("borrower", hosts=SHARE + RACK, team="vision")
    await_pods(cluster, "vision", borrower, SHARE + RACK)
    owner = cluster.submit("owner", hosts=SHARE, team="language")
    await_pods(cluster, "language", owner, SHARE)
    await_reason(borrower, "another job took its quota or nodes (")
    assert cluster.running("vision")[borrower] == 0
    phalanx.cancel(owner)
    await_pods(cluster, "vision", borrower, SHARE + RACK)  # by itself, when there is room again
    phalanx.cancel(borrower)


def test_a_higher_priority_of_the_same_team_goes_first(cluster: KueueCluster) -> None:
    low = cluster.submit("low", hosts=NODES, team="vision", qos="low")
    await_pods(cluster, "vision", low, NODES)
    high = cluster.submit("high", hosts=2, team="vision", qos="high")
    await_pods(cluster, "vision", high, 2)
    await_reason(low, "another job took its quota or nodes (")
    for job in (high, low):
        phalanx.cancel(job)
