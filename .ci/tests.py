"""All tests, eight groups beside each other. `python .ci/tests.py [OPTION …]`

Ranks wait for each other, for time-outs and for files: eight groups at a time keep two cores busy. A group is one
pytest, at most; what takes long is dealt to several, and those that take longest begin first. What no group names is in
the last. Options go to all, as `-k kill` or `--durations=20`.

A test that fails fails the run. Up to eight of them run a second time, each alone, as a diagnosis only: a test that
passes alone has a race, or a time limit that a busy machine breaks. The last lines say which did.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

AT_ONCE = 8
REAL_RUNS = ("drill", "train", "verify", "watch", "trace", "trace_stop", "probe")
# How a group's paths begin, and to how many processes its files are dealt. A file is the first group's that fits.
GROUPS: dict[str, tuple[tuple[str, ...], int]] = {
    # Waits most: Slurm looks at its queue every few seconds. One process, for one Slurm.
    "launch": (("tests/launch/",), 1),
    "parity and plug-ins": (("tests/train/test_",), 4),
    "elastic": (("tests/elastic/",), 3),
    "commands that train": (tuple(f"tests/cli/test_{name}.py" for name in REAL_RUNS), 3),
    "peers": (("tests/peers/", "tests/train/slow_links/", "tests/cli/test_peers"), 2),
    "models, data, optimizers": (("tests/train/models/", "tests/train/data/", "tests/train/optim/"), 1),
    "parallel": (("tests/train/parallel/",), 2),
    "guard, drill, verify, telemetry": (("tests/train/",), 2),
    "pages": (("tests/web/",), 1),
    "records": (("tests/api/", "tests/metrics/", "tests/record/"), 1),
    # One process compiles the packet engine, not two that begin together.
    "simulators": (("tests/sim/", "tests/validate/", "tests/cli/test_fabric"), 1),
    "other commands": (("tests/cli/",), 1),
    "plan": (("tests/plan/", "tests/hardware/", "tests/job/"), 1),
    "rules": (("tests/rules/",), 1),
    "the rest": (("tests/",), 1),
}
# Threads that wait for each other do not spin while another process could use the core.
ENVIRON = {**os.environ, "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive")}
ENVIRON.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes start: each would compile our sources again
SLOWEST = ("--durations=6", "--durations-min=8")
NO_TESTS = 5  # pytest's code for "-k" that matched nothing
TESTS_FAILED = 1  # pytest's code; others are an interrupt, an internal error, a test that cannot be collected
MAX_DIAGNOSED = 8  # failures that run again alone: of more, the first eight show what is wrong


def runs_of_tests() -> dict[str, list[str]]:
    """The paths of every pytest, by its name; the largest files first, the best guess at how long they take."""
    left = sorted(Path("tests").rglob("test_*.py"), key=lambda path: (-path.stat().st_size, str(path)))
    runs: dict[str, list[str]] = {}
    for name, (beginnings, parts) in GROUPS.items():
        mine = [str(path) for path in left if str(path).startswith(beginnings)]
        left = [path for path in left if str(path) not in mine]
        assert mine, f"no test belongs to the group {name!r}"
        runs.update({f"{name} {part + 1}/{parts}": mine[part::parts] for part in range(parts)})
    runs["doctests"] = ["src"]
    return runs


def call_pytest(words: Sequence[str], output: IO[bytes], failures: Path) -> tuple[int, list[str]]:
    """pytest's exit code, and the ids of the tests that failed; `failures` is a file of this call alone."""
    environ = {**ENVIRON, "FAILED_TESTS": str(failures)}  # conftest.py writes it
    command = [sys.executable, "-m", "pytest", "-q", *words]
    code = subprocess.call(command, stdout=output, stderr=subprocess.STDOUT, env=environ)
    lines = failures.read_text(encoding="utf-8").splitlines() if failures.exists() else []
    return code, list(dict.fromkeys(json.loads(line) for line in lines))


def diagnose_alone(tests: Sequence[str], options: Sequence[str], folder: Path) -> list[str]:
    """Run each of these failed tests again with nothing beside it; a line for each on what that shows."""
    lines = []
    for number, test in enumerate(tests[:MAX_DIAGNOSED]):
        print(f"\nagain, alone: {test}", flush=True)
        code, _ = call_pytest([*options, test], sys.stdout.buffer, folder / f"alone-{number}")
        lines.append(f"{test}: {'passed alone: a race' if code == 0 else 'failed alone too'}")
    return [*lines, *(f"{test}: not run alone" for test in tests[MAX_DIAGNOSED:])]


def main(options: Sequence[str]) -> int:
    """The worst exit code of all groups."""
    with tempfile.TemporaryDirectory() as folder:
        return run_groups(options, Path(folder))


def run_groups(options: Sequence[str], folder: Path) -> int:
    began_s = time.monotonic()
    runs, lock = runs_of_tests(), threading.Lock()
    codes: dict[str, int] = {}
    failures: list[str] = []
    waiting = list(runs)

    def work() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                name = waiting.pop(0)
            own_s = time.monotonic()
            with tempfile.TemporaryFile() as kept:
                words = [*SLOWEST, *options, *runs[name]]
                codes[name], mine = call_pytest(words, kept, folder / name.replace("/", "-"))
                kept.seek(0)
                with lock:
                    failures.extend(mine)
                    print(f"\n{name}: {(time.monotonic() - own_s) / 60:.1f} min", flush=True)
                    sys.stdout.buffer.write(kept.read())
                    sys.stdout.flush()

    workers = [threading.Thread(target=work, daemon=True) for _ in range(AT_ONCE)]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join()
    except KeyboardInterrupt:  # every pytest heard it too; let them tidy up
        waiting.clear()
        for worker in workers:
            worker.join()
    # Not after an interrupt or where tests could not be collected: those are no failures to explain.
    if failures and set(codes.values()) <= {0, NO_TESTS, TESTS_FAILED}:
        diagnoses = diagnose_alone(failures, options, folder)
        print("\n" + "\n".join(diagnoses))
    failed = [name for name, code in codes.items() if code not in (0, NO_TESTS)]
    minutes, cpu = (time.monotonic() - began_s) / 60, os.times()
    spent = (cpu.children_user + cpu.children_system) / 60
    print(
        f"\nall groups in {minutes:.1f} min, {spent:.1f} min of processor time; failed: {', '.join(failed) or 'none'}"
    )
    return codes[failed[0]] if failed else min(codes.values(), default=130)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
