"""A gang of 1,000 pods on 7,500 nodes, and 200 small jobs beside a large one, on the real JobSet and Kueue.

Nodes only report status (tests/status_kubelet.py). What Phalanx asks of the API is counted: it grows with pages of 500
objects, never with a request per node or per pod. PHALANX_SCALE_NODES takes fewer nodes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest
from kueue_cluster import MISSING, RACK, KueueCluster, kueue_cluster
from slurm_cluster import wait_for

import phalanx
from phalanx.launch.kube.client import KubeClient
from phalanx.launch.operate.kube_health import check_nodes

NODES = int(os.environ.get("PHALANX_SCALE_NODES", "7500"))
GANG = min(1000, NODES // 4)
SMALL_JOBS, SMALL_HOSTS, SMALL_SHARE = 200, 2, 200  # all of them together want twice their team's share
PATIENCE_S = 1200.0

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=MISSING or "they are there")]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KueueCluster]:
    begun = time.monotonic()
    with kueue_cluster(tmp_path_factory.mktemp("large"), nodes=NODES, language=GANG, vision=SMALL_SHARE) as made:
        print(f"\ncontrol plane with {NODES:,} nodes: {time.monotonic() - begun:.1f} s")
        yield made


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every request that our client sends from now on, with its method."""
    sent: list[str] = []
    send = KubeClient._send

    def counted(self: KubeClient, connection: Any, method: str, path: str, *more: Any) -> Any:
        if self.rate.per_s < 1e6:  # not the test's own
            sent.append(f"{method} {path}")
        return send(self, connection, method, path, *more)

    monkeypatch.setattr(KubeClient, "_send", counted)
    return sent


def test_a_gang_of_a_thousand_pods_in_rank_order_and_few_requests(large: KueueCluster, asked: list[str]) -> None:
    counts = {}
    for name, hosts in (("pair", 2), ("gang", GANG)):
        request = large.request(name, hosts=hosts, team="language")
        asked.clear()
        begun = time.monotonic()
        large.system.submit([request])
        counts[name] = len(asked)
        wait_for(lambda name=name, hosts=hosts: large.running("language")[name] == hosts, name, patience_s=PATIENCE_S)
        print(f"{name}: {hosts:,} pods run {time.monotonic() - begun:.1f} s after submission; {counts[name]} requests")
    assert counts["pair"] == counts["gang"]
    racks = large.racks("language", "gang")
    assert len(racks) == GANG
    assert len([rack for rack, _ in groupby(racks)]) == len(set(racks))  # a rack holds consecutive numbers
    assert len(set(racks)) <= -(-GANG // RACK) + 1  # as few racks as can be
    for what, work, most in (
        ("why", lambda: phalanx.why("gang"), 10),
        ("queue", lambda: phalanx.queue(on="k8s"), 10),
        ("health", lambda: check_nodes(large.system._client(), apply=True, now_s=time.time()), -(-NODES // 500) + 1),
    ):
        asked.clear()
        begun = time.monotonic()
        work()
        print(f"{what}: {len(asked)} requests, {time.monotonic() - begun:.2f} s")
        assert len(asked) <= most, (what, asked)
    for name in ("pair", "gang"):
        phalanx.cancel(name)
    assert not large.running("language")


def test_two_hundred_small_jobs_do_not_starve_a_large_one(large: KueueCluster) -> None:
    """They borrow what is idle; whose it is takes it back, and all of them end."""
    small = [large.request(f"small-{number:03d}", hosts=SMALL_HOSTS, team="vision") for number in range(SMALL_JOBS)]
    begun = time.monotonic()
    large.system.submit(small)
    print(f"{SMALL_JOBS} jobs submitted in {time.monotonic() - begun:.1f} s")
    wait_for(
        lambda: sum(large.running("vision").values()) > SMALL_SHARE, "small jobs that borrow", patience_s=PATIENCE_S
    )
    began = time.monotonic()
    large.submit("large", hosts=GANG, team="language")
    wait_for(lambda: large.running("language")["large"] == GANG, "the large job", patience_s=PATIENCE_S)
    print(f"the large one ran {time.monotonic() - began:.1f} s after its submission")
    assert 0 < sum(large.running("vision").values()) <= SMALL_SHARE
    large.over |= {one.name for one in small}
    large.kubelet.look_again()
    jobsets = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/vision/jobsets"

    def all_over() -> bool:
        listed, _ = large.client.list_objects(jobsets)
        return sum((one.get("status") or {}).get("terminalState") == "Completed" for one in listed) == SMALL_JOBS

    wait_for(all_over, "all small jobs", patience_s=PATIENCE_S)
    print(f"all small jobs over {time.monotonic() - begun:.1f} s after the first submission")
