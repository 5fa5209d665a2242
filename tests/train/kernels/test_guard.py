"""The guard of the kernel lab: a sound kernel passes, and every planted cheat in cheats/ is refused for its reason."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from row_norm import ROW_NORM, SOUND

from phalanx.train.kernels.lab import machine_limits
from phalanx.train.kernels.lab.arena import HEADER_BYTES, HostBlock
from phalanx.train.kernels.lab.candidate_guard import KernelVerdict, judge_candidate
from phalanx.train.kernels.lab.candidate_server import CandidateLimits, CandidateProcess, CandidateServer
from phalanx.train.kernels.lab.machine_limits import MachineLimits
from phalanx.units import GIB

CHEATS = sorted((Path(__file__).parent / "cheats").glob("*.txt"))
ON_GPU = sorted((Path(__file__).parent / "gpu_kernels").glob("*.txt"))
MACHINE = MachineLimits(bytes_per_s=1e11, flops_per_s=1e13)


@pytest.fixture(scope="module")
def server() -> Iterator[CandidateServer]:
    with CandidateServer() as server:
        yield server


def test_light_is_not_slowed_by_a_format_that_a_cpu_only_emulates(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs without bfloat16 products a kernel that computes in float32 was taken for a cheat."""
    rates = {torch.bfloat16: 1e8, torch.float32: 1e11}
    monkeypatch.setattr(machine_limits, "_product_rate", lambda device, kind: rates[kind])
    monkeypatch.setitem(machine_limits.COPY_BYTES, "cpu", 2**16)
    assert machine_limits.measure_limits(torch.device("cpu"), torch.bfloat16).flops_per_s == 1e11


def judged(
    source: str,
    server: CandidateServer,
    *,
    timed: bool = False,
    seconds: float = 60.0,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
) -> KernelVerdict:
    limits = CandidateLimits(seconds=seconds, memory_bytes=GIB // 2)
    return judge_candidate(source, ROW_NORM, server=server, dtypes=dtypes, timed=timed, limits=limits, machine=MACHINE)


def test_a_sound_kernel_passes(server: CandidateServer) -> None:
    verdict = judged(SOUND, server, timed=True, dtypes=())
    assert (verdict.passed, verdict.kind, verdict.reason) == (True, "", "")
    assert 0.0 < verdict.worst_error <= 1.0
    assert verdict.timing is not None
    assert verdict.timing.seconds >= max(verdict.timing.first_s, verdict.timing.second_s, verdict.timing.claimed_s)
    assert verdict.cases > 20


@pytest.mark.parametrize("path", CHEATS, ids=lambda path: path.stem)
def test_a_cheat_is_refused(path: Path, server: CandidateServer) -> None:
    source = path.read_text()
    head = source.partition(":")[0].removeprefix("# ").split()
    verdict = judged(source, server, timed="timed" in head, seconds=1.0 if head[0] == "time" else 60.0)
    assert not verdict.passed
    assert verdict.kind in head[0].split("|"), verdict.reason
    assert verdict.reason


class UnwatchedServer(CandidateServer):
    """Candidates whose process does not look for what they change in it."""

    def fork_candidate(self, block_file: int, settings: dict[str, Any], limits: CandidateLimits) -> CandidateProcess:
        return super().fork_candidate(block_file, {**settings, "watch": False}, limits)


def test_barriers_hold_where_nothing_is_detected() -> None:
    """What a process reports of itself is a detector: values and clocks alone refuse these."""
    refused = {}
    with UnwatchedServer() as server:
        for path in CHEATS:
            source = path.read_text()
            head = source.partition(":")[0].removeprefix("# ").split()
            if kinds := [word.removeprefix("unwatched=") for word in head if word.startswith("unwatched=")]:
                verdict = judged(source, server, timed="timed" in head)
                refused[path.stem] = not verdict.passed and verdict.kind in kinds[0].split("|")
    assert len(refused) >= 4
    assert all(refused.values()), refused


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("path", ON_GPU, ids=lambda path: path.stem)
def test_kernels_on_a_gpu(path: Path, server: CandidateServer) -> None:
    """Streams, events, contexts, and Triton's compiler."""
    source = path.read_text()
    head = source.partition(":")[0].removeprefix("# ").split()
    verdict = judge_candidate(
        source,
        ROW_NORM,
        server=server,
        device="cuda",
        timed="timed" in head,
        shape={"tokens": 16384, "width": 4096},
        limits=CandidateLimits(seconds=5.0 if head[0] == "time" else 60.0),
    )
    assert (verdict.kind or "passes") in head[0].split("|"), verdict.reason


def test_there_are_many_cheats() -> None:
    assert len(CHEATS) >= 16


def test_a_kernel_may_ask_for_its_own_lines(server: CandidateServer) -> None:
    """As Triton does for what it compiles."""
    lines = """
inspect = __builtins__["__imp" + "ort__"]("inspect")
assert inspect.getsourcelines(kernel)[0][0] == "def kernel(x, w):\\n"
"""
    verdict = judged(SOUND + lines, server)
    assert verdict.passed, verdict.reason


def test_a_paused_process_stands_still_and_goes_on(server: CandidateServer) -> None:
    block = HostBlock(HEADER_BYTES)
    block.write_source(SOUND.encode())
    process = server.fork_candidate(block.file, {"device": "cpu"}, CandidateLimits())
    try:
        assert "a process of its own" in process.hear()["barriers"]
        process.pause()
        assert process._state() == "T"
        process.resume()
        assert process.ask({"do": "nothing"}) == {}
    finally:
        process.end()
        block.close()


def test_the_barrier_holds_below_python(server: CandidateServer) -> None:
    """A system call that no hook of Python sees is refused by the kernel: here the candidate is right only then."""
    source = SOUND.replace(
        "    y = x.float()",
        '    libc = __builtins__["__imp" + "ort__"]("ctypes").pythonapi\n'
        '    if libc.open(b"/etc/passwd", 0) >= 0 or libc.socket(2, 1, 0) >= 0 or libc.fork() >= 0:\n'
        "        return x\n"
        "    y = x.float()",
    )
    verdict = judged(source, server)
    if "seccomp" not in verdict.barriers:
        pytest.skip("no seccomp on this machine")
    assert verdict.passed, verdict.reason


MOVE_AND_READ = """
import os, sys
from phalanx.train.kernels.lab.file_rights import restrict_files
folder = sys.argv[1]
print(restrict_files(writable=[folder], run_programs=True))
os.replace(f"{folder}/a/compiled", f"{folder}/b/compiled")  # as Triton does with what it compiled
try:
    open(f"{folder}-else/secret").read()
    print("read")
except PermissionError:
    print("denied")
"""


def test_a_compiler_may_move_files_in_its_folder_and_read_no_others(tmp_path: Path) -> None:
    folder, other = tmp_path / "cache", tmp_path / "cache-else"
    for one in (folder / "a", folder / "b", other):
        one.mkdir(parents=True)
    (folder / "a" / "compiled").write_text("")
    (other / "secret").write_text("")
    done = subprocess.run([sys.executable, "-c", MOVE_AND_READ, folder], capture_output=True, text=True, check=True)
    is_restricted, read = done.stdout.split()
    assert (folder / "b" / "compiled").exists()
    assert read == ("denied" if is_restricted == "True" else "read")
