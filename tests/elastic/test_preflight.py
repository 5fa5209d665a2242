"""Each check at its threshold, and the whole on this machine."""

from __future__ import annotations

import math
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.elastic import preflight as checks
from phalanx.elastic.clock_skew import check_skew, clock_skew_s
from phalanx.hardware.catalog import find_accelerator
from phalanx.hardware.types import Gpu, Machine
from phalanx.plan.plan import Plan
from phalanx.train.prepare import load_job, plan_for_run

HOST = Machine(
    hostname="gpu-04", cpu_model="x", sockets=1, cores=2, usable_cores=2, numa_nodes=1, memory_bytes=64 * 10**9
)
JOB = """
spec = "2026.1"
[model]
name = "tiny"
layers = 2
hidden = 32
heads = 2
kv_heads = 2
head_dim = 16
ffn = 64
vocab = 256
[data]
corpus = "offline-english"
sequence = 16
tokens = 4096
[batch]
global_sequences = 8
[precision]
compute = "fp32"
"""


@pytest.fixture(scope="module")
def cpu_plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    path = tmp_path_factory.mktemp("job") / "job.toml"
    path.write_text(JOB)
    return plan_for_run(load_job(str(path), overrides=[], cluster="local-cpu:4", steps=0))


@pytest.fixture(scope="module")
def gpu_plan(cpu_plan: Plan) -> Plan:
    """The same on eight H100 that must hold 60 GB each."""
    cluster = replace(cpu_plan.cluster, accelerator=find_accelerator("H100"), link_bytes_per_s=450e9)
    memory = replace(cpu_plan.memory, total_bytes=60e9)
    return replace(cpu_plan, cluster=cluster, memory=memory, layout=replace(cpu_plan.layout, data=8))


def gpu(index: int, *, memory_bytes: int = 80 * 10**9, nvlinks: int = 18, rate: float = 450e9) -> Gpu:
    return Gpu(
        index=index, name="NVIDIA H100", memory_bytes=memory_bytes, pci_address="", numa_node=0,
        pcie_bytes_per_s=63e9, nvlinks=nvlinks, nvlink_bytes_per_s=rate,
    )  # fmt: skip


def with_state(plan: Plan, *, checkpoint_bytes: float, hosts: int = 1, memory_every: int = 1) -> Plan:
    return replace(
        plan,
        reliability=replace(
            plan.reliability, checkpoint_bytes=checkpoint_bytes, hosts=hosts, memory_every=memory_every
        ),
    )


def test_this_machine_is_fit(cpu_plan: Plan, tmp_path: Path) -> None:
    for quick in (True, False):
        assert checks.preflight(plan=cpu_plan, run=tmp_path, slots=4, address="", quick=quick) == []


def test_quick_moves_no_data(cpu_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[str] = []
    monkeypatch.setattr(checks, "measure_link", lambda address, *, enough: moved.append(address) or enough)
    checks.preflight(plan=cpu_plan, run=tmp_path, slots=4, address="127.0.0.1", quick=True)
    assert moved == []
    checks.preflight(plan=cpu_plan, run=tmp_path, slots=4, address="127.0.0.1", quick=False)
    assert moved == ["127.0.0.1"]


def test_all_problems_at_once(cpu_plan: Plan, tmp_path: Path) -> None:
    plan = with_state(cpu_plan, checkpoint_bytes=1e18)
    found = checks.preflight(plan=plan, run=tmp_path, slots=100_000, address="192.0.2.1", quick=False)
    assert [problem.what.partition(" ")[2][:9] for problem in found[:1]] == ["ranks on "]
    text = "\n".join(problem.render() for problem in found)
    for words in ("ranks on", "of memory is free", "is free in", "no port can be bound on 192.0.2.1"):
        assert words in text


def test_a_host_without_the_run_folder(cpu_plan: Plan, tmp_path: Path) -> None:
    found = checks.preflight(plan=cpu_plan, run=tmp_path / "gone", slots=4, address="", quick=True)
    assert len(found) == 1
    assert found[0].what == f"there is no folder {tmp_path / 'gone'}"
    assert found[0].fix == "put runs on a file system that every host mounts: phalanx train --runs FOLDER"


def test_no_torch() -> None:
    """The client and the coordinator look at hosts too, and do not wait for torch."""
    import subprocess

    script = "import sys, phalanx.elastic.preflight; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_cores(cpu_plan: Plan) -> None:
    assert list(checks.check_devices(cpu_plan, HOST, 128)) == []
    (problem,) = checks.check_devices(cpu_plan, HOST, 129)
    assert problem.render() == (
        "gpu-04: 129 ranks on 2 cores; at most 128 can make progress\n  give this host at most 128 slots"
    )


def test_a_lost_gpu(gpu_plan: Plan) -> None:
    whole = replace(HOST, gpus=tuple(gpu(index) for index in range(8)))
    assert list(checks.check_devices(gpu_plan, whole, 8)) == []
    lost = replace(whole, gpus=whole.gpus[:7], notes=("the NVIDIA driver stopped answering: GPU is lost",))
    (problem,) = checks.check_devices(gpu_plan, lost, 8)
    assert problem.render() == (
        "gpu-04: 7 of the 8 × H100-80GB-SXM needed by its ranks respond\n"
        "  the NVIDIA driver stopped answering: GPU is lost\n"
        "  check nvidia-smi and dmesg (Xid errors); restart the host, or remove it from the job"
    )


def test_ranks_that_share_a_gpu(gpu_plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """With consent two ranks of 20 GB fit on 80 GB, also beside 30 GB of somebody else's, but not beside 50."""
    small = replace(gpu_plan, memory=replace(gpu_plan.memory, total_bytes=20e9))
    host = replace(HOST, gpus=(replace(gpu(0), used_bytes=30 * 10**9),))
    (problem,) = checks.check_devices(small, host, 2)
    assert problem.what == "1 of the 2 × H100-80GB-SXM needed by its ranks respond"
    monkeypatch.setenv("PHALANX_RANKS_PER_GPU", "2")
    assert list(checks.check_devices(small, host, 2, fresh=True)) == []
    monkeypatch.delenv("PHALANX_RANKS_PER_GPU")
    allowed = replace(small, job=replace(small.job, train=replace(small.job.train, ranks_per_gpu=2)))
    assert list(checks.check_devices(allowed, host, 2, fresh=True)) == []
    (problem,) = checks.check_devices(allowed, host, 3)
    assert problem.what == "1 of the 3 × H100-80GB-SXM needed by its ranks respond; 2 ranks may share a GPU"
    taken = replace(host, gpus=(replace(gpu(0), used_bytes=50 * 10**9),))
    (problem,) = checks.check_devices(allowed, taken, 2, fresh=True)
    assert problem.render().startswith(
        "gpu-04, GPU 0: other programs hold 50.0 GB of its 80.0 GB; the plan needs 40.0 GB\n"
    )
    assert list(checks.check_devices(allowed, taken, 2)) == []  # later what is held there is our own
    (problem,) = checks.check_devices(replace(allowed, memory=gpu_plan.memory), host, 2, fresh=True)
    assert problem.what == "80.0 GB of memory; the plan needs 120 GB; ranks share it"


def test_a_smaller_gpu(gpu_plan: Plan) -> None:
    host = replace(HOST, gpus=(gpu(0), gpu(1, memory_bytes=40 * 10**9)))
    (problem,) = checks.check_devices(gpu_plan, host, 2)
    assert problem.render().startswith("gpu-04, GPU 1: 40.0 GB of memory; the plan needs 60.0 GB\n")


@pytest.mark.parametrize(
    ("nvlinks", "rate", "slots", "fit"),
    [(18, 450e9, 2, True), (9, 225e9, 2, True), (8, 200e9, 2, False), (0, 0.0, 2, False), (-1, 0.0, 2, True),
     (0, 0.0, 1, True)],
)  # fmt: skip
def test_nvlinks(gpu_plan: Plan, nvlinks: int, rate: float, slots: int, fit: bool) -> None:
    """Half of them must be up; a driver that cannot say, or a single GPU, is no reason to refuse."""
    host = replace(HOST, gpus=(gpu(0, nvlinks=nvlinks, rate=rate), gpu(1))[:slots])
    found = list(checks.check_devices(gpu_plan, host, slots))
    assert [problem.where for problem in found] == ([] if fit else ["gpu-04, GPU 0"])
    if not fit:
        assert f"{nvlinks} NVLinks give" in found[0].what
        assert "less than 50% of the 450 GB/s the plan assumed" in found[0].what


def test_memory_of_cpu_ranks_and_their_copies(cpu_plan: Plan) -> None:
    plan = with_state(replace(cpu_plan, memory=replace(cpu_plan.memory, total_bytes=2e9)), checkpoint_bytes=4e9)
    # four ranks of 2 GB, and each one's gigabyte of state three times
    assert list(checks.check_memory(plan, 4, 20e9, host="a")) == []
    (problem,) = checks.check_memory(plan, 4, 19.9e9, host="a")
    assert problem.render() == (
        "a: 19.9 GB of memory is free; the plan needs 8.00 GB for 4 ranks and 12.0 GB for in-memory checkpoints\n"
        "  the kernel would kill a rank in the middle of a step\n"
        "  stop other programs, start fewer ranks here, or set checkpoint.memory_every = 0"
    )


def test_spares_need_no_memory(cpu_plan: Plan) -> None:
    plan = with_state(replace(cpu_plan, memory=replace(cpu_plan.memory, total_bytes=2e9)), checkpoint_bytes=4e9)
    assert list(checks.check_memory(plan, 6, 20e9, host="a")) == []


def test_gpu_ranks_need_host_memory_only_for_copies(gpu_plan: Plan) -> None:
    plan = with_state(gpu_plan, checkpoint_bytes=8e9, hosts=2)  # and as guests those of the other host
    assert list(checks.check_memory(plan, 8, 48e9, host="a")) == []
    (problem,) = checks.check_memory(plan, 8, 47e9, host="a")
    assert problem.what == "47.0 GB of memory is free; the plan needs 48.0 GB for in-memory checkpoints"
    plan = with_state(gpu_plan, checkpoint_bytes=8e9, hosts=2, memory_every=0)
    assert list(checks.check_memory(plan, 8, 0.0, host="a")) == []


def test_free_memory_inside_a_container(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 64000000 kB\nMemAvailable: 50000000 kB\n")
    limited = replace(HOST, memory_bytes=10 * 10**9)
    assert checks.available_bytes(HOST, root=tmp_path) == 50_000_000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("7000000000\n")
    (group / "memory.stat").write_text("anon 1\nfile 2\ninactive_file 2000000000\nactive_file 3\n")
    assert checks.available_bytes(limited, root=tmp_path) == 5e9  # cached files are given back


def test_free_memory_here() -> None:
    assert 0 < checks.available_bytes(checks.discover()) <= checks.discover().memory_bytes


def test_disk(cpu_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    fields = [*real[:10], real.f_fsid]
    fields[0:2], fields[4] = [4096, 4096], 10**6  # 4.096 GB are free
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    plan = replace(cpu_plan, duration=replace(cpu_plan.duration, training_s=1e6))
    assert plan.job.checkpoint.keep == 3
    assert list(checks.check_disk(with_state(plan, checkpoint_bytes=1.02e9), tmp_path, host="a")) == []
    (problem,) = checks.check_disk(with_state(plan, checkpoint_bytes=1.05e9), tmp_path, host="a")
    assert problem.render() == (
        f"a: 4.10 GB is free in {tmp_path}; 4 checkpoints of this host need 4.20 GB\n"
        "  checkpoint.keep = 3, and the next is written before the oldest is deleted\n"
        "  delete old runs, lower checkpoint.keep, or set checkpoint.path to a larger disk"
    )
    assert list(checks.check_disk(with_state(plan, checkpoint_bytes=2e9, hosts=2), tmp_path, host="a")) == []
    short = replace(plan, duration=replace(plan.duration, training_s=1.0))  # it saves once, at its end
    assert list(checks.check_disk(with_state(short, checkpoint_bytes=4e9), tmp_path, host="a")) == []
    (problem,) = checks.check_disk(with_state(short, checkpoint_bytes=4.2e9), tmp_path, host="a")
    assert problem.what == f"4.10 GB is free in {tmp_path}; a checkpoint of this host needs 4.20 GB"


@pytest.mark.parametrize(
    ("steps", "training_s", "interval_s", "saves"),
    [
        (14, 20.0, 600.0, 1),  # only the last
        (14, 599.0, 600.0, 1),
        (14, 600.0, 600.0, 2),  # one is due just before the end
        (1000, 6000.0, 600.0, 11),
        (3, 6000.0, 600.0, 3),  # no step is saved twice
        (1000, 6000.0, math.inf, 1),
        (0, 0.0, 600.0, 1),
    ],
)
def test_expected_saves(cpu_plan: Plan, steps: int, training_s: float, interval_s: float, saves: int) -> None:
    prediction = replace(cpu_plan.prediction, step_s=1.0, step_s_high=1.0)
    plan = replace(
        cpu_plan,
        prediction=prediction,
        duration=replace(cpu_plan.duration, steps=steps, training_s=training_s),
        reliability=replace(cpu_plan.reliability, interval_s=interval_s),
    )
    assert checks.expected_saves(plan) == saves


def test_of_the_predicted_step_times_the_longest_counts(cpu_plan: Plan) -> None:
    plan = replace(
        cpu_plan,
        prediction=replace(cpu_plan.prediction, step_s=1.0, step_s_high=2.0),
        duration=replace(cpu_plan.duration, steps=1000, training_s=1000.0),
        reliability=replace(cpu_plan.reliability, interval_s=600.0),
    )
    assert checks.expected_saves(plan) == 4


def test_object_storage_has_no_disk_to_fill(cpu_plan: Plan, tmp_path: Path) -> None:
    plan = with_state(cpu_plan, checkpoint_bytes=1e18)
    checkpoint = replace(plan.job.checkpoint, path="s3://bucket/run")
    plan = replace(plan, job=replace(plan.job, checkpoint=checkpoint))
    assert list(checks.check_disk(plan, tmp_path, host="a")) == []


def test_a_disk_that_cannot_be_written(cpu_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as for root on a read-only mount
    (problem,) = checks.check_disk(cpu_plan, tmp_path, host="a")
    assert problem.what == f"{tmp_path} cannot be written"


def test_an_address_of_another_host() -> None:
    assert list(checks.check_port("", host="a")) == []
    (problem,) = checks.check_port("192.0.2.1", host="a")  # TEST-NET-1, nobody's
    assert problem.what.startswith("no port can be bound on 192.0.2.1: ")
    assert problem.fix == "set fault.interface to an address of this host; ip address lists them"


def test_clock(tmp_path: Path) -> None:
    written_s = tmp_path.stat().st_mtime
    assert list(checks.check_clock(tmp_path, written_s - 4.0, host="a")) == []
    (problem,) = checks.check_clock(tmp_path, written_s - 6.0, host="a")
    assert problem.render() == (
        "a: its clock is 6.00 s behind; 5 s are allowed\n"
        "  events of different hosts could not be ordered\n"
        "  start chrony or systemd-timesyncd on it"
    )
    (problem,) = checks.check_clock(tmp_path, 12.0, host="a")
    assert problem.what == "the clock reads 1970-01-01 00:00"


@pytest.mark.parametrize(
    ("their_s", "round_trip_s", "skew_s"),
    [(1000.0, 0.0, 0.0), (990.0, 12.0, 0.0), (1006.0, 1.0, 6.0), (980.0, 4.0, -16.0)],
)
def test_skew_beyond_what_the_way_explains(their_s: float, round_trip_s: float, skew_s: float) -> None:
    assert clock_skew_s(their_s, round_trip_s, now_s=1000.0) == skew_s
    assert len(list(check_skew(skew_s, host="a"))) == (abs(skew_s) > 5)


@pytest.mark.parametrize(("share", "fit"), [(0.011, True), (0.009, False)])
def test_link(cpu_plan: Plan, gpu_plan: Plan, monkeypatch: pytest.MonkeyPatch, share: float, fit: bool) -> None:
    plan = replace(cpu_plan, cluster=replace(cpu_plan.cluster, link_bytes_per_s=3e9))
    monkeypatch.setattr(checks, "_measure_once", lambda address: share * 3e9)
    found = list(checks.check_link(plan, "", host="a"))
    assert (found == []) is fit
    if not fit:
        assert found[0].what == (
            "its network transfers 27.0 MB/s on 127.0.0.1, less than 1% of the 3.00 GB/s that the plan assumed"
        )
    monkeypatch.setattr(checks, "_measure_once", lambda address: share * 2e9)
    assert (list(checks.check_link(gpu_plan, "", host="a")) == []) is fit  # not a hundredth of NVLink


def test_between_hosts(cpu_plan: Plan, gpu_plan: Plan) -> None:
    """CPU ranks are held against the plan's network as far as TCP can carry it, GPUs never against RDMA."""
    several = replace(cpu_plan, cluster=replace(cpu_plan.cluster, domains=2, domain_devices=2, nic_bytes_per_s=0.5e9))
    assert checks.expected_between(several) == 1e9
    fast = replace(several, cluster=replace(several.cluster, nic_bytes_per_s=50e9))
    assert checks.expected_between(fast) == 2e9
    assert checks.expected_between(cpu_plan) == checks.expected_between(gpu_plan) == 125e6
    assert list(checks.check_between(several, 0.1e9, host="b")) == []
    (problem,) = checks.check_between(several, 0.09e9, host="b")
    assert problem.render() == (
        "b: 90.0 MB/s between it and the coordinator, less than 10% of the 1.00 GB/s expected\n"
        "  every other rank would wait for this host\n"
        "  check its cable, MTU and switch; --address selects another network"
    )


def test_a_recheck_asks_only_for_what_is_new(cpu_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = with_state(replace(cpu_plan, memory=replace(cpu_plan.memory, total_bytes=2e9)), checkpoint_bytes=4.0)
    monkeypatch.setattr(checks, "available_bytes", lambda machine: 3e9)
    monkeypatch.setattr(checks, "measure_link", lambda address, *, enough: pytest.fail("no data is moved"))
    found = [
        checks.recheck(plan=plan, run=tmp_path, slots=4, new_ranks=new, new_places=new, address="") for new in (0, 1, 2)
    ]
    assert [len(problems) for problems in found] == [0, 0, 1]
    assert "4.00 GB for 2 ranks" in found[2][0].what
    assert checks.recheck(plan=plan, run=tmp_path / "gone", slots=4, new_ranks=0, new_places=0, address="")


def test_a_full_disk_refuses_a_start_and_ends_no_run_that_lives(cpu_plan: Plan, tmp_path: Path) -> None:
    plan = with_state(cpu_plan, checkpoint_bytes=1e18)
    assert len(list(checks.check_disk(plan, tmp_path, host="a"))) == 1
    assert checks.recheck(plan=plan, run=tmp_path, slots=1, new_ranks=0, new_places=0, address="") == []


def test_a_checkpoint_that_is_there_needs_no_room(
    cpu_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(tmp_path)
    fields = [*real[:10], real.f_fsid]
    fields[0:2], fields[4] = [4096, 4096], 10**6  # 4.096 GB are free
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    long = replace(cpu_plan, duration=replace(cpu_plan.duration, training_s=1e6))
    plan = with_state(long, checkpoint_bytes=3e9)
    assert len(list(checks.check_disk(plan, tmp_path, host="a"))) == 1
    folder = tmp_path / plan.job.checkpoint.path / "step-00000010"
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    assert list(checks.check_disk(plan, tmp_path, host="a")) == []
    (problem,) = checks.check_disk(with_state(cpu_plan, checkpoint_bytes=5e9), tmp_path, host="a")
    assert "; another checkpoint of this host needs 5.00 GB" in problem.what


def test_the_best_of_some_tries_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: Iterator[float] = iter([1.0, 5.0, *[3.0] * 8, 9.0, 2.0])
    monkeypatch.setattr(checks, "_measure_once", lambda address: next(rates))
    assert checks.measure_link("", enough=4.0) == 5.0
    assert checks.measure_link("", enough=100.0) == 9.0


def test_the_link_is_really_measured() -> None:
    assert checks.measure_link("127.0.0.1", enough=1.0) > 0
    assert checks.measure_link("192.0.2.1", enough=1.0) == 0


def test_a_link_that_stands_still_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "LINK_PATIENCE_S", 0.05)
    monkeypatch.setattr(socket.socket, "recv_into", lambda sock, buffer: time.sleep(0.05) or raise_timeout())
    assert checks.measure_link("", enough=1.0) == 0


def raise_timeout() -> int:
    raise TimeoutError
