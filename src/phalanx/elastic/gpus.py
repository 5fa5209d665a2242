"""Checks between ranks and their GPUs: shared GPUs, NCCL's version, preloaded libraries, MPS, and free memory.

They find jobs with more ranks than GPUs, an NCCL that is too old for sharing a GPU, preloaded libraries that do not
load, an MPS that does not answer, and memory that other programs use. Imports no torch: the client and the agents run
these checks before torch is loaded. Questions to a library itself are answered in a separate process, or by a rank,
which has loaded it.
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

# The first version that lets two ranks use one GPU (its release notes; tried with 2.30.7).
LEAST_NCCL = (2, 30)
# Settings that ranks on one GPU need in addition. NVLink SHARP counts GPUs, not ranks; two blocks per collective
# leave room for those of the other ranks, which must all be on the GPU at once (measured on one H200 with up to 8
# ranks).
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
        """The version and path, as text."""
        return f"NCCL {'.'.join(map(str, self.version))}" + (f" ({self.path})" if self.path else "")


class Store(Protocol):
    """The methods of torch's stores that are used here."""

    def add(self, key: str, amount: int, /) -> int: ...
    def set(self, key: str, value: str, /) -> None: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...


# ---- ranks that share ------------------------------------------------------------------------------------------------


def shared_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ranks on one GPU need and that are not set."""
    return {name: value for name, value in SHARED.items() if name not in environ}


def take_shared_gpu(environ: MutableMapping[str, str]) -> None:
    """Let this rank's NCCL share its GPU, before its first communicator; raises UserError where it cannot."""
    problem = check_nccl(loaded_nccl(), where="ranks that share a GPU")
    if problem is not None:
        raise UserError(problem)
    environ.update(shared_settings(environ))


def agree_on_gpus(store: Store, gpu: str, *, world: int, allowed: int, limit_s: float) -> bool:
    """Return True when some ranks share a GPU.

    Every rank passes its own; all raise where more share one than `allowed`.

    Without agents only the ranks know: `srun --gpus-per-task=1` shows each its own GPU as number 0. Two additions to
    the store per rank, whatever their number. Errors of the store about missing ranks are passed on.
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
    """Return the NCCL in this process, which has imported torch; None where there is none.

    Asked of the library, not of torch: `torch.cuda.nccl.version()` is a constant of torch's own build. A preloaded
    NCCL is first in the order of symbol lookup, even where torch's own is loaded too (as with the wheels of torch
    2.11); without one, torch's may be known to torch alone, and is found among the mapped files.
    """
    for name in (None, *_mapped("libnccl")):
        with suppress(OSError, AttributeError):
            ask = ctypes.CDLL(name).ncclGetVersion
            number = ctypes.c_int()
            if ask(ctypes.byref(number)) == 0:
                return NcclLibrary(version=nccl_version(number.value), path=_file_of(ask) or name or "")
    return None


def nccl_version(code: int) -> tuple[int, ...]:
    """Decode NCCL's version number; its form changed with 2.9.

    >>> nccl_version(23007), nccl_version(2804)
    ((2, 30, 7), (2, 8, 4))
    """
    major, rest = divmod(code, 10_000 if code >= 10_000 else 1000)
    return major, *divmod(rest, 100)


def tell_nccl() -> None:
    """Print the text that `ask_nccl` reads."""
    library = loaded_nccl()
    print(json.dumps({"version": library.version, "path": library.path} if library is not None else None))


def ask_nccl(environ: Mapping[str, str]) -> NcclLibrary | Problem | None:
    """Return the NCCL that a process with this `environ` would use; a Problem where such a process does not start."""
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
        error_lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        last_line = error_lines[-1] if error_lines else f"its process ended with code {done.returncode}"
        return Problem(
            where=where,
            what=f"torch cannot be imported: {last_line[:300]}",
            why="a preloaded library takes the place of the one that torch was built for" if PRELOAD in where else "",
            fix=f"unset {PRELOAD}, or name a library that fits this torch" if PRELOAD in where else "",
        )
    lines = done.stdout.splitlines()
    answer = json.loads(lines[-1]) if lines else None
    return NcclLibrary(version=tuple(answer["version"]), path=answer["path"]) if answer else None


# ---- libraries, MPS, memory ------------------------------------------------------------------------------------------


def check_preload(environ: Mapping[str, str]) -> Iterator[Problem]:
    """The libraries that LD_PRELOAD names can be loaded.

    The loader ignores others, and the old library is used instead.
    """
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
    for name, reason in refused:
        yield Problem(
            where=f"{PRELOAD}={named}",
            what=f"{name} cannot be loaded: {reason}",
            why="every process goes on without it, with the library that it was to replace",
            fix=f"name a file that is there and was built for this machine, or unset {PRELOAD}",
        )
    # musl, or a library that ends every process.
    if done.returncode and not refused:
        message = (done.stderr.splitlines() or [f"{program} ended with code {done.returncode}"])[0]
        yield Problem(where=f"{PRELOAD}={named}", what=f"no program starts with it: {message}", fix=f"unset {PRELOAD}")


def check_mps(environ: Mapping[str, str], *, program: str | None = None) -> Iterator[Problem]:
    """CUDA's multi-process service answers, where it exists: a process that starts CUDA would wait for it forever.

    `program` is its control program; by default the one on the path.
    """
    folder = Path(environ.get(MPS_FOLDER) or USUAL_MPS_FOLDER)
    pipe = folder / "control"
    with suppress(OSError):
        if not stat.S_ISFIFO(pipe.stat().st_mode):
            return
        silence = _mps_silence(pipe, environ, program or shutil.which(MPS_CONTROL))
        if silence:
            yield Problem(
                where=f"{MPS_FOLDER}={folder}",
                what=f"MPS does not respond: {silence}",
                why="a process that starts CUDA would wait for it",
                fix=f"echo quit | {MPS_CONTROL}; rm -r {folder}; start it again with {MPS_CONTROL} -d if it is wanted",
            )


def _mps_silence(pipe: Path, environ: Mapping[str, str], program: str | None) -> str:
    """Return why the control daemon behind a pipe does not answer; "" where it does."""
    try:
        # Opened only; nothing is written.
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        if error.errno == errno.ENXIO:
            return f"nobody reads {pipe}; its control daemon is gone"
        # No permission: another user's MPS, which CUDA will not use either.
        return ""
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
    output_lines = (done.stderr or done.stdout).strip().splitlines()
    return f"its control daemon says {output_lines[0][:200]!r}" if done.returncode and output_lines else ""


def check_free(gpu: Gpu, *, needed_bytes: float, where: str) -> Problem | None:
    """A GPU has room for this job's ranks in addition to the memory that other programs use."""
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
    """The result of dladdr(3): the file of an address first."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _file_of(function: object) -> str:
    """Return the path of the library that contains a C function; "" where the system does not report it."""
    info = _DlInfo()
    with suppress(OSError, AttributeError):
        address = ctypes.cast(function, ctypes.c_void_p)  # type: ignore[arg-type]
        if ctypes.CDLL(None).dladdr(address, ctypes.byref(info)) and info.file:
            return os.fsdecode(info.file)
    return ""


def _mapped(name: str) -> list[str]:
    """Return the files of loaded libraries whose names begin so."""
    paths: dict[str, None] = {}
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if Path(path).name.startswith(name):
                paths[f"/{path}"] = None
    return list(paths)


def _version(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
