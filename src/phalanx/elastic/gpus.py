"""What stands between ranks and their GPUs: more ranks than GPUs without a word, an NCCL that is too old for it,
preloaded libraries that do not fit, an MPS that does not answer, memory that other programs hold.

Imports no torch: the client and the agents ask before they wait for it. What must be asked of the library itself is
asked in a process of its own, or by a rank, which has it.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from phalanx.errors import Problem, UserError
from phalanx.hardware.types import Gpu
from phalanx.units import format_bytes, plural

LEAST_NCCL = (2, 30)  # the first that lets two ranks use one GPU (its release notes; tried with 2.30.7)
# What ranks on one GPU need beside that. NVLink SHARP counts GPUs, not ranks; two blocks per collective leave room for
# those of the other ranks, which must all be on the GPU at once (measured on one H200 with up to 8 ranks).
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
PRELOAD, MPS_FOLDER = "LD_PRELOAD", "CUDA_MPS_PIPE_DIRECTORY"
USUAL_MPS_FOLDER = "/tmp/nvidia-mps"  # the driver's default
MPS_CONTROL = "nvidia-cuda-mps-control"
MPS_PATIENCE_S = 5.0  # it answers in milliseconds
IMPORT_PATIENCE_S = 300.0  # torch from a cold network disk
ASK_NCCL = "import torch; from phalanx.elastic.gpus import tell_nccl; tell_nccl()"


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclLibrary:
    """The NCCL that is in use, which need not be the one that torch was compiled with and prints."""

    version: tuple[int, ...]
    path: str

    @property
    def name(self) -> str:
        """As people write it."""
        return f"NCCL {'.'.join(map(str, self.version))}" + (f" ({self.path})" if self.path else "")


class Store(Protocol):
    """What is used here of torch's stores."""

    def add(self, key: str, amount: int, /) -> int: ...
    def set(self, key: str, value: str, /) -> None: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...


# ---- ranks that share ------------------------------------------------------------------------------------------------


def shared_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that ranks on one GPU need and that nobody has set."""
    return {name: value for name, value in SHARED.items() if name not in environ}


def take_shared_gpu(environ: MutableMapping[str, str]) -> None:
    """Let this rank's NCCL share its GPU, before its first communicator; raises UserError where it cannot."""
    problem = check_nccl(loaded_nccl(), where="ranks that share a GPU")
    if problem is not None:
        raise UserError(problem)
    environ.update(shared_settings(environ))


def agree_on_gpus(store: Store, gpu: str, *, world: int, allowed: int, limit_s: float) -> bool:
    """Whether some ranks share a GPU. Every rank names its own; all raise where more share one than are allowed.

    Without agents only the ranks know: `srun --gpus-per-task=1` shows each its own GPU as number 0. Two additions to
    the store per rank, whatever their number. What a store raises when ranks are missing is passed on.
    """
    name = hashlib.sha256(gpu.encode()).hexdigest()[:32]
    count = store.add(f"gpu/{name}", 1)
    if count > 1:
        store.set("gpu/shared", "1")
    if count > allowed:
        store.set("gpu/refused", "1")
    if store.add("gpu/arrived", 1) == world:
        store.set("gpu/all", "1")
    store.wait(["gpu/all"], timedelta(seconds=limit_s))
    if store.check(["gpu/refused"]):
        raise UserError(
            Problem(
                where="phalanx train",
                what=f"more than {plural(allowed, 'rank')} were started for one GPU",
                why=f"two ranks on one GPU are never meant by accident; NCCL takes them from {_version(LEAST_NCCL)} on",
                fix="start one task per GPU, or allow it with --ranks-per-gpu N",
            )
        )
    return store.check(["gpu/shared"])


def check_nccl(found: NcclLibrary | None, *, where: str) -> Problem | None:
    """NCCL is new enough for ranks that share a GPU."""
    if found is not None and found.version >= LEAST_NCCL:
        return None
    have = found.name if found is not None else "this torch, which has no NCCL,"
    return Problem(
        where=where,
        what=f"{have} does not take two ranks on one GPU",
        why=f"NCCL allows that from {_version(LEAST_NCCL)} on",
        fix="preload a newer one, LD_PRELOAD=/path/to/libnccl.so.2, or give every rank a GPU of its own",
    )


def loaded_nccl() -> NcclLibrary | None:
    """The NCCL in this process, which has imported torch; None where there is none.

    Asked of the library, not of torch: `torch.cuda.nccl.version()` is a constant of torch's own build. A preloaded NCCL
    is first in the order in which names are looked up, also where torch's own is loaded beside it (so it is with the
    wheels of torch 2.11); without one, torch's may be known to torch alone, and is found among the mapped files.
    """
    for name in (None, *_mapped("libnccl")):
        with suppress(OSError, AttributeError):
            ask = ctypes.CDLL(name).ncclGetVersion
            number = ctypes.c_int()
            if ask(ctypes.byref(number)) == 0:
                return NcclLibrary(version=nccl_version(number.value), path=_file_of(ask) or name or "")
    return None


def nccl_version(code: int) -> tuple[int, ...]:
    """From NCCL's own number of its version; the form changed with 2.9.

    >>> nccl_version(23007), nccl_version(2804)
    ((2, 30, 7), (2, 8, 4))
    """
    major, rest = divmod(code, 10_000 if code >= 10_000 else 1000)
    return major, *divmod(rest, 100)


def tell_nccl() -> None:
    """Print what `ask_nccl` reads."""
    found = loaded_nccl()
    print(json.dumps({"version": found.version, "path": found.path} if found is not None else None))


def ask_nccl(environ: Mapping[str, str]) -> NcclLibrary | Problem | None:
    """The NCCL that a process started with `environ` would use; a Problem where such a process does not start."""
    where = f"{PRELOAD}={environ[PRELOAD]}" if environ.get(PRELOAD) else "NCCL"
    try:
        done = subprocess.run(
            [sys.executable, "-c", ASK_NCCL],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=IMPORT_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Problem(where=where, what=f"torch could not be imported within {IMPORT_PATIENCE_S:g} s")
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        told = said[-1] if said else f"its process ended with code {done.returncode}"
        return Problem(
            where=where,
            what=f"torch cannot be imported: {told[:300]}",
            why="a preloaded library takes the place of the one that torch was built for" if PRELOAD in where else "",
            fix=f"unset {PRELOAD}, or name a library that fits this torch" if PRELOAD in where else "",
        )
    lines = done.stdout.splitlines()
    answer = json.loads(lines[-1]) if lines else None
    return NcclLibrary(version=tuple(answer["version"]), path=answer["path"]) if answer else None


# ---- libraries, MPS, memory ------------------------------------------------------------------------------------------


def check_preload(environ: Mapping[str, str]) -> Iterator[Problem]:
    """What LD_PRELOAD names can be loaded: the loader ignores what it cannot, and the old library is used instead."""
    named, program = environ.get(PRELOAD, ""), shutil.which("true")
    if not named or program is None:
        return
    try:
        done = subprocess.run(
            [program], env=dict(environ), capture_output=True, text=True, timeout=MPS_PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Problem(
            where=PRELOAD, what=f"{named} keeps even {program} from starting: {error}", fix=f"unset {PRELOAD}"
        )
        return
    # glibc: ERROR: ld.so: object 'x.so' from LD_PRELOAD cannot be preloaded (wrong ELF class: ELFCLASS32): ignored.
    refused = re.findall(r"object '([^']*)' from LD_PRELOAD cannot be preloaded \(([^\n]*)\): ignored", done.stderr)
    for name, why in refused:
        yield Problem(
            where=f"{PRELOAD}={named}",
            what=f"{name} cannot be loaded: {why}",
            why="every process goes on without it, with the library that it was to replace",
            fix=f"name a file that is there and was built for this machine, or unset {PRELOAD}",
        )
    if done.returncode and not refused:  # musl, or a library that ends every process
        told = (done.stderr.splitlines() or [f"{program} ended with code {done.returncode}"])[0]
        yield Problem(where=f"{PRELOAD}={named}", what=f"no program starts with it: {told}", fix=f"unset {PRELOAD}")


def check_mps(environ: Mapping[str, str], *, program: str | None = None) -> Iterator[Problem]:
    """CUDA's multi-process service answers, where there is one: a process that starts CUDA would wait for it forever.

    `program` is its control program; left out, the one on the path.
    """
    folder = Path(environ.get(MPS_FOLDER) or USUAL_MPS_FOLDER)
    pipe = folder / "control"
    with suppress(OSError):
        if not stat.S_ISFIFO(pipe.stat().st_mode):
            return
        told = _mps_silence(pipe, environ, program or shutil.which(MPS_CONTROL))
        if told:
            yield Problem(
                where=f"{MPS_FOLDER}={folder}",
                what=f"MPS does not respond: {told}",
                why="a process that starts CUDA would wait for it",
                fix=f"echo quit | {MPS_CONTROL}; rm -r {folder}; start it again with {MPS_CONTROL} -d if it is wanted",
            )


def _mps_silence(pipe: Path, environ: Mapping[str, str], program: str | None) -> str:
    """Why the control daemon behind a pipe does not answer; empty where it does."""
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))  # writes nothing
    except OSError as error:
        if error.errno == errno.ENXIO:
            return f"nobody reads {pipe}; its control daemon is gone"
        return ""  # not ours to open: somebody else's MPS, which CUDA will not use either
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program],
            input="get_server_list\n",
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=MPS_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"its control daemon does not answer within {MPS_PATIENCE_S:g} s"
    except OSError:
        return ""
    said = (done.stderr or done.stdout).strip().splitlines()
    return f"its control daemon says {said[0][:200]!r}" if done.returncode and said else ""


def check_free(gpu: Gpu, *, needed_bytes: float, where: str) -> Problem | None:
    """A GPU has room for our ranks beside what other programs hold on it."""
    if gpu.used_bytes < 0 or gpu.memory_bytes - gpu.used_bytes >= needed_bytes:
        return None
    return Problem(
        where=where,
        what=f"other programs hold {format_bytes(gpu.used_bytes)} of its {format_bytes(gpu.memory_bytes)}; "
        f"the plan needs {format_bytes(needed_bytes)}",
        why="a rank would run out of memory, or wait for its turn",
        fix="end them (nvidia-smi lists them), or choose other GPUs with CUDA_VISIBLE_DEVICES",
    )


class _DlInfo(ctypes.Structure):
    """What dladdr(3) tells: the file of an address first."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _file_of(function: object) -> str:
    """The library that a function of one comes from; empty where the system does not say."""
    found = _DlInfo()
    with suppress(OSError, AttributeError):
        address = ctypes.cast(function, ctypes.c_void_p)  # type: ignore[arg-type]
        if ctypes.CDLL(None).dladdr(address, ctypes.byref(found)) and found.file:
            return os.fsdecode(found.file)
    return ""


def _mapped(name: str) -> list[str]:
    """The files of loaded libraries of that name."""
    found: dict[str, None] = {}
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if Path(path).name.startswith(name):
                found[f"/{path}"] = None
    return list(found)


def _version(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
