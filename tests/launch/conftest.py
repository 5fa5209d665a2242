"""A real Slurm for the tests of this folder, started once and always torn down."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, missing_slurm


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """16 nodes; the environment of this process leads to them."""
    if reason := missing_slurm():
        pytest.skip(reason)
    base = Path(tempfile.mkdtemp(prefix="phalanx-slurm-", dir="/tmp"))  # short: a socket's path has 107 characters
    cluster = SlurmCluster(base)
    before = dict(os.environ)
    try:
        cluster.start()
        os.environ.update(cluster.environ)
        yield cluster
    finally:
        os.environ.clear()
        os.environ.update(before)
        cluster.stop()
        shutil.rmtree(base, ignore_errors=True)
