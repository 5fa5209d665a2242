"""Ranks and GPUs: who may share one, which NCCL that takes, and what stands in the way, each in a sentence."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from phalanx.elastic import gpus
from phalanx.errors import Problem, UserError
from phalanx.hardware.catalog import find_accelerator
from phalanx.hardware.this_machine import allowed_ranks
from phalanx.hardware.types import Gpu, Machine
from phalanx.plan.plan import Plan
from phalanx.train import prepare

GPU = Gpu(
    index=0, name="NVIDIA H200", memory_bytes=141 * 10**9, pci_address="", numa_node=0, pcie_bytes_per_s=63e9,
    nvlinks=18, nvlink_bytes_per_s=450e9, used_bytes=10**9,
)  # fmt: skip
HOST = Machine(
    hostname="gpu-04", cpu_model="x", sockets=1, cores=2, usable_cores=2, numa_nodes=1, memory_bytes=64 * 10**9,
    gpus=(GPU,),
)  # fmt: skip
JOB = """
[model]
preset = "phalanx-tiny"
[data]
sequence = 64
tokens = 4096
[batch]
global_sequences = 8
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is of Linux's loader")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Four ranks for four H200, 20 GB each."""
    path = tmp_path_factory.mktemp("job") / "job.toml"
    path.write_text(JOB)
    made = prepare.plan_for_run(prepare.load_job(str(path), overrides=[], cluster="local-cpu:4", steps=0))
    cluster = replace(made.cluster, name="4xH200", accelerator=find_accelerator("H200"))
    layout = replace(made.layout, data=4, tensor=1, context=1, pipeline=1, shard=1, zero=0)
    return replace(made, cluster=cluster, layout=layout, memory=replace(made.memory, total_bytes=20e9))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with one H200 and an NCCL that is new enough."""
    for name in (gpus.PRELOAD, "PHALANX_RANKS_PER_GPU"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(gpus.MPS_FOLDER, "/nonexistent")
    monkeypatch.setattr(prepare, "discover", lambda: HOST)
    monkeypatch.setattr(prepare, "ask_nccl", lambda environ: gpus.NcclLibrary(version=(2, 30, 7), path=""))
    return monkeypatch


def with_sharing(plan: Plan, count: int) -> Plan:
    return replace(plan, job=replace(plan.job, train=replace(plan.job.train, ranks_per_gpu=count)))


# ---- consent ---------------------------------------------------------------------------------------------------------


def test_two_ranks_on_one_gpu_need_a_word(plan: Plan, here: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError) as caught:
        prepare.check_here(plan)
    assert str(caught.value) == (
        "4xH200: the plan needs 4 × H200-141GB-SXM, but this machine has 1 GPU\n"
        "  phalanx train starts ranks on one machine only\n"
        "  start a task per rank: srun --ntasks=4, mpirun -n 4, or torchrun on every host; or try it here with "
        "--cluster local:4; or let 4 ranks share a GPU with --ranks-per-gpu, which needs NCCL 2.30"
    )
    prepare.check_here(with_sharing(plan, 4))
    here.setenv("PHALANX_RANKS_PER_GPU", "4")
    prepare.check_here(plan)
    here.setenv("PHALANX_RANKS_PER_GPU", "2")
    with pytest.raises(UserError, match="this machine has 1 GPU, each shared by up to 2 ranks"):
        prepare.check_here(plan)


@pytest.mark.parametrize("text", ["0", "65", "-1", "four", "²", "1e1"])
def test_a_wrong_variable_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"PHALANX_RANKS_PER_GPU: .* is no number of ranks from 1 to 64"):
        allowed_ranks(1, {"PHALANX_RANKS_PER_GPU": text})


def test_nccl_that_is_too_old_for_it(plan: Plan, here: pytest.MonkeyPatch) -> None:
    here.setattr(prepare, "ask_nccl", lambda environ: gpus.NcclLibrary(version=(2, 28, 9), path="/x/libnccl.so.2"))
    with pytest.raises(UserError) as caught:
        prepare.check_here(with_sharing(plan, 4))
    assert str(caught.value) == (
        "4 ranks on 1 GPU: NCCL 2.28.9 (/x/libnccl.so.2) does not take two ranks on one GPU\n"
        "  NCCL allows that from 2.30 on\n"
        "  preload a newer one, LD_PRELOAD=/path/to/libnccl.so.2, or give every rank a GPU of its own"
    )
    here.setattr(prepare, "ask_nccl", lambda environ: None)
    with pytest.raises(UserError, match="this torch, which has no NCCL, does not take two ranks on one GPU"):
        prepare.check_gpus(2, where="--device cuda", tell=print)


def test_settings_of_the_user_are_kept_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpus.shared_settings({}) == gpus.SHARED
    assert gpus.shared_settings({"NCCL_MAX_CTAS": "4"}) == {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
    assert prepare.sharing_note(4, {"NCCL_MAX_CTAS": "4"}) == (
        "  up to 4 ranks share a GPU, with NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=4 (yours are "
        "kept); they also share its memory and speed"
    )


def test_no_gpu_at_all(here: pytest.MonkeyPatch) -> None:
    here.setattr(prepare, "discover", lambda: replace(HOST, gpus=(), notes=("the NVIDIA driver does not answer: x",)))
    with pytest.raises(UserError) as caught:
        prepare.check_gpus(1, where="--device cuda", tell=print)
    assert str(caught.value) == (
        "--device cuda: no GPU is visible on this machine\n"
        "  the NVIDIA driver does not answer: x\n"
        "  use --device cpu, or check nvidia-smi and CUDA_VISIBLE_DEVICES"
    )


@pytest.mark.parametrize(
    ("devices", "allowed", "found"),
    [("ab", 1, False), ("aa", 2, True), ("aab", 2, True), ("aa", 1, None), ("aaab", 2, None)],
)
def test_ranks_of_another_launcher_tell_each_other(
    devices: str, allowed: int, found: bool | None, tmp_path: Path
) -> None:
    """Each rank knows its own GPU alone; where too many share one, all of them end with the same sentence."""
    said: list[object] = []

    def rank(gpu: str) -> None:
        store = dist.FileStore(str(tmp_path / "store"), len(devices))
        try:
            said.append(gpus.agree_on_gpus(store, gpu, world=len(devices), allowed=allowed, limit_s=300))
        except UserError as error:
            said.append(str(error))

    threads = [threading.Thread(target=rank, args=(gpu,)) for gpu in devices]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    if found is not None:
        assert said == [found] * len(devices)
        return
    assert len(set(said)) == 1
    assert len(said) == len(devices)
    text = str(said[0])
    assert text.startswith(f"phalanx train: more than {allowed} rank{'s' * (allowed > 1)} were started for one GPU\n")
    assert "--ranks-per-gpu" in text


# ---- what stands in the way ------------------------------------------------------------------------------------------


@linux
def test_a_preloaded_library_that_cannot_be_loaded(tmp_path: Path, plan: Plan, here: pytest.MonkeyPatch) -> None:
    missing, text = tmp_path / "libnccl.so.2", tmp_path / "text.so"
    text.write_text("no library")
    (problem,) = gpus.check_preload({**os.environ, gpus.PRELOAD: str(missing)})
    assert problem.where == f"LD_PRELOAD={missing}"
    assert problem.what.startswith(f"{missing} cannot be loaded: ")
    assert problem.fix == "name a file that is there and was built for this machine, or unset LD_PRELOAD"
    both = list(gpus.check_preload({**os.environ, gpus.PRELOAD: f"{missing}:{text}"}))
    assert [one.what.split(" cannot")[0] for one in both] == [str(missing), str(text)]
    assert list(gpus.check_preload({name: value for name, value in os.environ.items() if name != gpus.PRELOAD})) == []
    here.setenv(gpus.PRELOAD, str(missing))
    with pytest.raises(UserError, match="cannot be loaded"):  # before NCCL is asked, and before anything starts
        prepare.check_here(with_sharing(plan, 4))


LIBRARY = "int ncclGetVersion(int *version) { *version = %d; return 0; }\n"


@linux
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler for a library to preload")
def test_the_version_is_that_of_the_loaded_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preloaded library answers, also where torch's own is loaded beside it, as the wheels of torch 2.11 do."""
    made = {}
    for code in (22809, 23007):
        source, library = tmp_path / f"{code}.c", tmp_path / str(code) / "libnccl.so.2"
        source.write_text(LIBRARY % code)
        library.parent.mkdir()
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        made[code] = gpus.NcclLibrary(version=gpus.nccl_version(code), path=str(library))
    old, new = made[22809], made[23007]
    assert gpus.ask_nccl({**os.environ, gpus.PRELOAD: new.path}) == new
    # Without torch itself, which takes seconds to import.
    ask = gpus.ASK_NCCL.removeprefix("import torch; ")
    for beside, preloaded, wanted in ((old, new, new), (new, old, old), (old, None, old)):
        monkeypatch.setattr(gpus, "ASK_NCCL", f"import ctypes; ctypes.CDLL({beside.path!r}); {ask}")
        environ = {name: value for name, value in os.environ.items() if name != gpus.PRELOAD}
        environ |= {gpus.PRELOAD: preloaded.path} if preloaded is not None else {}
        assert gpus.ask_nccl(environ) == wanted
    monkeypatch.setattr(gpus, "ASK_NCCL", "raise ImportError('undefined symbol: ncclCommFoo')")
    broken = gpus.ask_nccl({**os.environ, gpus.PRELOAD: "libfoo.so"})
    assert isinstance(broken, Problem)
    assert broken.render() == (
        "LD_PRELOAD=libfoo.so: torch cannot be imported: ImportError: undefined symbol: ncclCommFoo\n"
        "  a preloaded library takes the place of the one that torch was built for\n"
        "  unset LD_PRELOAD, or name a library that fits this torch"
    )


def test_mps_that_is_half_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {**os.environ, gpus.MPS_FOLDER: str(tmp_path)}
    assert list(gpus.check_mps(environ, program="/bin/true")) == []  # no pipe: no MPS
    pipe = tmp_path / "control"
    os.mkfifo(pipe)
    (problem,) = gpus.check_mps(environ, program="/bin/true")
    assert problem.render().splitlines()[:2] == [
        f"CUDA_MPS_PIPE_DIRECTORY={tmp_path}: MPS does not respond: nobody reads {pipe}; its control daemon is gone",
        "  a process that starts CUDA would wait for it",
    ]
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        silent, well, broken = (tmp_path / name for name in ("silent", "well", "broken"))
        silent.write_text("#!/bin/sh\nexec sleep 1000\n")
        well.write_text("#!/bin/sh\ncat\n")
        broken.write_text("#!/bin/sh\necho Cannot find MPS control daemon process >&2\nexit 1\n")
        for program in (silent, well, broken):
            program.chmod(0o755)
        assert list(gpus.check_mps(environ, program=str(well))) == []
        (problem,) = gpus.check_mps(environ, program=str(broken))
        assert "its control daemon says 'Cannot find MPS control daemon process'" in problem.what
        monkeypatch.setattr(gpus, "MPS_PATIENCE_S", 0.2)
        (problem,) = gpus.check_mps(environ, program=str(silent))
        assert problem.what == "MPS does not respond: its control daemon does not answer within 0.2 s"
    finally:
        os.close(reader)


def test_a_gpu_that_others_use(plan: Plan, here: pytest.MonkeyPatch) -> None:
    taken = replace(HOST, gpus=(replace(GPU, used_bytes=100 * 10**9),))
    here.setattr(prepare, "discover", lambda: taken)
    with pytest.raises(UserError) as caught:
        prepare.check_here(with_sharing(plan, 4))
    assert str(caught.value) == (
        "GPU 0: other programs hold 100 GB of its 141 GB; the plan needs 80.0 GB\n"
        "  a rank would run out of memory, or wait for its turn\n"
        "  end them (nvidia-smi lists them), or choose other GPUs with CUDA_VISIBLE_DEVICES"
    )
    assert gpus.check_free(replace(GPU, used_bytes=-1), needed_bytes=1e15, where="x") is None  # nobody can say
