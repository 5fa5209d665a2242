"""Which library with which settings, and on which ranks they differ."""

from __future__ import annotations

import ctypes.util
import threading
from datetime import timedelta
from pathlib import Path

from torch.distributed import HashStore

from phalanx.train.telemetry import communicators
from phalanx.train.telemetry.communicators import (
    compare_settings,
    mapped_libraries,
    name_differences,
    settings_in_force,
)


def test_settings_of_the_environment_and_of_nccls_own_files(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text("NCCL_DEBUG=WARN\n# NCCL_ALGO=Ring\nNCCL_IB_HCA = mlx5 # rails\nrm -rf /\n")
    (tmp_path / ".nccl.conf").write_text("NCCL_IB_HCA=mlx5_0\n")
    environ = {
        "NCCL_DEBUG": "INFO",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "PATH": "/bin",
        "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI",
    }
    found = settings_in_force({**environ, "NCCL_X": "has wJalrXUtnFEMI"}, root=tmp_path, home=tmp_path)
    assert found["NCCL_DEBUG"] == "INFO", "a file does not override the environment"
    assert found["NCCL_IB_HCA"] == f"mlx5_0 ({tmp_path}/.nccl.conf)"
    assert found["TORCH_NCCL_BLOCKING_WAIT"] == "1"
    assert set(found) == {"NCCL_DEBUG", "NCCL_IB_HCA", "NCCL_X", "TORCH_NCCL_BLOCKING_WAIT"}
    assert "wJalrXUtnFEMI" not in found["NCCL_X"]


def test_the_library_is_asked_itself() -> None:
    maps = "7f0-7f1 r-xp 0 08:01 5 /opt/nccl/libnccl.so.2.30.7\n7f4-7f5 rw-p 0 0 0\n"
    maps += "7f2-7f3 r--p 0 08:01 6 /usr/lib/libc.so.6\n"
    maps += "7f5-7f6 r-xp 0 08:01 7 /opt/aws/libnccl-net.so\n"
    assert mapped_libraries(maps) == ["/opt/aws/libnccl-net.so", "/opt/nccl/libnccl.so.2.30.7"]
    assert ctypes.util.find_library("nccl") is not None or communicators.describe_library({})["version"] is None


def test_differences_between_ranks_are_named_by_rank_0() -> None:
    store, found = HashStore(), {}
    store.set_timeout(timedelta(seconds=60))
    settings = {
        0: {"NCCL_ALGO": "Ring"},
        1: {"NCCL_ALGO": "Ring", "NCCL_SOCKET_IFNAME": "eth1"},
        2: {"NCCL_DEBUG": "INFO"},
    }

    def one(rank: int) -> None:
        found[rank] = compare_settings(store, settings[rank], rank=rank, world=3)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in settings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found[1] == found[2] == []
    assert found[0] == [
        "NCCL_ALGO is Ring on rank 0 and not set on rank 2",
        "NCCL_DEBUG is not set on rank 0 and INFO on rank 2",
    ]
    assert name_differences({}, {}) == []
