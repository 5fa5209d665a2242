"""The machine of a published row: an accelerator of the catalogue with the links the row states."""

from __future__ import annotations

from functools import lru_cache

from phalanx.hardware.catalog import find_accelerator
from phalanx.hardware.cluster_defaults import assemble_cluster
from phalanx.hardware.types import Cluster
from phalanx.plan.published import Row, number


def cluster_of(row: Row) -> Cluster:
    """The cluster a row ran on; raises UserError for an unknown accelerator."""
    gpus = int(number(row, "gpus") or 1)
    stated_domain = int(number(row, "nodes_gpu") or 0)
    nic_gbps = number(row, "inter_link_gbps_per_gpu") or 0.0
    return _cluster(row["gpu"], gpus, stated_domain, nic_gbps)


@lru_cache(maxsize=4096)
def _cluster(name: str, gpus: int, stated_domain: int, nic_gbps: float) -> Cluster:
    accelerator = find_accelerator(name)
    per_domain = stated_domain or accelerator.domain_devices
    if gpus > per_domain and gpus % per_domain:
        # A rack of 72 is used 64 at a time when the job is a power of two.
        per_domain = max(size for size in range(1, per_domain + 1) if gpus % size == 0)
    domains = max(1, -(-gpus // per_domain))
    nic = nic_gbps * 1e9 / 8.0
    return assemble_cluster(
        name=f"{name}:{gpus}",
        accelerator=accelerator,
        domain_devices=per_domain,
        domains=domains,
        source="published table",
        nic_bytes_per_s=nic,
    )
