"""A part of the tests with other Pythons, and with the lowest torch we declare. `python .ci/versions.py [MINUTES]`

What cannot be had here is skipped, with a line that says so; what runs and fails, fails. Environments are kept in
~/.cache/phalanx-ci, so that the next run finds them made. Nothing is begun that MINUTES (20) leave no time for.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
TOOLS = ["pytest>=8.2", "hypothesis>=6.100", "psutil>=5.9", "jsonschema>=4.21", "httpx>=0.27"]
NEEDED_S = 240.0  # to make an environment and run a part on two cores
LIMIT_S = 420.0  # for the tests of a part

# What parses, and every doctest, without the trainer: where Pythons differ.
PYTHON_TESTS = [
    *(
        "tests/job",
        "tests/rules/foreign",
        "tests/rules/formats",
        "tests/job/test_parameter_counts.py",
        "tests/hardware",
        "tests/test_patterns.py",
    ),
    *("tests/cli/test_import.py", "tests/cli/test_signals.py", "src", "--ignore=src/phalanx/train"),
]
# Every pipeline schedule, tensor × pipeline × data, recompute, and a step on fake ranks: where torch's versions differ.
TORCH_TESTS = [
    *("tests/train/parallel/test_pipeline.py", "tests/train/test_parity.py", "tests/train/test_trace.py"),
    *("-k", "pp2 or pp4 or pipeline or broken_rank or ulysses"),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Tests in an environment of their own."""

    name: str
    python: str
    packages: list[str]
    tests: list[str]
    free_gb: float  # on the disk, to make the environment


def main(minutes: float) -> int:
    """1 when a part failed."""
    ends_s = time.monotonic() + 60 * minutes
    parts = [lowest_torch(), *other_pythons()]
    if len(parts) == 1:
        print("versions: no other Python 3.11 or newer is here: skipped")
    with ThreadPoolExecutor(2) as pool:  # one process computes, so two fit two cores
        codes = list(pool.map(lambda part: run(part, ends_s), parts))
    return int(any(codes))


def lowest_torch() -> Part:
    """The lowest torch that the extra `train` allows; the suite itself runs with the highest."""
    [wanted] = [one for one in EXTRAS["train"] if one.startswith("torch>=")]
    lowest = re.fullmatch(r"torch>=([\d.]+),<[\d.]+", wanted)
    assert lowest is not None, wanted
    packages = [f"torch=={lowest[1]}.*", *(one for one in EXTRAS["train"] if one != wanted), *EXTRAS["parquet"]]
    # 6 GB: its wheel for x86-64 comes with CUDA, of which nothing is used here: 4.6 GB, 2 min 40 s, on 2026-11-16.
    return Part(
        name=f"torch {lowest[1]}", python=sys.executable, packages=[*packages, "transformers>=5"], tests=TORCH_TESTS,
        free_gb=10.0,
    )  # fmt: skip


def other_pythons() -> list[Part]:
    """The newest of each minor version that is not the one we run with."""
    found: dict[tuple[int, ...], str] = {}
    for candidate in candidates():
        version = version_of(candidate)
        if version >= (3, 11) and version[:2] != sys.version_info[:2]:
            found.setdefault(version, candidate)
    newest = {version[:2]: (version, python) for version, python in sorted(found.items())}
    return [
        Part(
            name=f"Python {'.'.join(map(str, version))}",
            python=python,
            packages=[*EXTRAS["web"], *EXTRAS["metrics"], *EXTRAS["sim"]],
            tests=[*PYTHON_TESTS, *without_torch()],
            free_gb=2.0,
        )
        for version, python in newest.values()
    ]


def without_torch() -> list[str]:
    """Options that leave out what imports the trainer: torch has no build for the processor alone of every Python."""
    files = (ROOT / "tests").rglob("test_*.py")
    return [f"--ignore={path}" for path in sorted(files) if re.search(r"phalanx\.train|import torch", path.read_text())]


def candidates() -> Iterable[str]:
    """Pythons on the path, Debian's own, and those of pyenv."""
    names = ("python3", "python3.11", "python3.12", "python3.13", "/usr/bin/python3")
    yield from (path for name in names if (path := shutil.which(name)))
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from (str(path) for path in sorted(pyenv.glob("versions/3.*/bin/python3")))


def version_of(python: str) -> tuple[int, ...]:
    """(3, 12, 1), or () of what is no Python: pyenv has stand-ins for versions that are switched off."""
    asked = [python, "-c", "import sys; print(*sys.version_info[:3])"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return tuple(int(word) for word in done.stdout.split()) if done.returncode == 0 else ()


def run(part: Part, ends_s: float) -> int:
    """0 when it passed or was skipped."""
    began_s = time.monotonic()
    if ends_s - began_s < NEEDED_S:
        return say(part, f"skipped: {max(0.0, ends_s - began_s):.0f} s are left, it may take {NEEDED_S:.0f}")
    try:
        python = environment(part, limit_s=ends_s - began_s - 60)
    except (OSError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", None) or str(error)
        return say(part, f"skipped: it cannot be had here: {str(told).strip().splitlines()[-1][:300]}")
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *part.tests]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        # On a busy machine slow is no failure; what failed before is one.
        shown = _text(error.stdout)
        failed = bool(re.search(r"^[.sxX]*[FE]", shown, re.MULTILINE))
        return say(
            part, f"{'FAILED' if failed else 'stopped'}: not done within {LIMIT_S:.0f} s\n{shown[-5000:]}", code=failed
        )
    last = (done.stdout.strip().splitlines() or [""])[-1]
    taken = f"{time.monotonic() - began_s:.0f} s"
    if done.returncode:
        return say(part, f"FAILED: {last}\n{done.stdout[-20_000:]}{done.stderr[-2000:]}", code=1)
    return say(part, f"{last}, {taken} with its environment")


def environment(part: Part, *, limit_s: float) -> str:
    """The Python of an environment that holds the part's packages; made once."""
    packages = [*PROJECT["dependencies"], *TOOLS, *part.packages]
    key = hashlib.sha256("\n".join([part.python, *map(str, version_of(part.python)), *packages]).encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "phalanx-ci"
    folder = cache / f"{part.name.replace(' ', '-').lower()}-{key.hexdigest()[:12]}"
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.exists() and version_of(str(python)):
        return str(python)
    cache.mkdir(parents=True, exist_ok=True)
    free_gb = shutil.disk_usage(cache).free / 1e9
    if free_gb < part.free_gb:
        raise OSError(f"{free_gb:.1f} GB are free in {cache}, it takes up to {part.free_gb:g}")
    for old in cache.glob(f"{part.name.replace(' ', '-').lower()}-*"):
        shutil.rmtree(old)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    try:
        for command in ([part.python, "-m", "venv", str(folder)], [*pip, *packages]):
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=limit_s)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    ready.touch()
    return str(python)


def say(part: Part, text: str, *, code: int = 0) -> int:
    """One line per part, more when it failed."""
    print(f"versions: {part.name}: {text}", flush=True)
    return code


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 20.0))
