"""All tests, four groups beside each other. `python .ci/tests.py [OPTION …]`

Ranks wait for each other, for time-outs and for files: three groups at a time used one core of two. A group is
one pytest; those that take longest begin first, and what no group names is in the last. Options go to all, as `-k kill`
or `--durations=20`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

AT_ONCE = 4
REAL_RUNS = ("drill", "train", "verify", "watch", "trace", "trace_stop", "probe")
GROUPS: dict[str, tuple[str, ...]] = {
    "elastic": ("tests/elastic",),
    "commands that train": tuple(f"tests/cli/test_{name}.py" for name in REAL_RUNS),
    "parity and plug-ins": tuple(sorted(str(path) for path in Path("tests/train").glob("test_*.py"))),
    "everything else": (
        "tests/api",
        "tests/metrics",
        "tests/record",
        "tests/sim",
        "tests/validate",
        "tests/web",
        "src",
    ),
    "models, data, optimizers": ("tests/train/models", "tests/train/data", "tests/train/optim"),
    "parallel": ("tests/train/parallel",),
    "guard, drill, verify, telemetry": ("tests/train",),
    "other commands": ("tests/cli",),
    "plan": ("tests/plan", "tests/hardware", "tests/job"),
    "rules": ("tests/rules",),
    "the rest": ("tests",),
}
NO_TESTS = 5  # pytest's code for "-k" that matched nothing


def paths_of(name: str) -> list[str]:
    """The arguments of a group's pytest: its paths, less those that a group before it has."""
    mine = GROUPS[name]
    names = list(GROUPS)
    earlier = [path for one in names[: names.index(name)] for path in GROUPS[one]]
    inside = [path for path in earlier if any(path.startswith(f"{own}/") for own in mine)]
    return [*mine, *(f"--ignore={path}" for path in inside)]


def main(options: Sequence[str]) -> int:
    """The worst exit code of all groups."""
    began_s = time.monotonic()
    waiting, codes, lock = list(GROUPS), {}, threading.Lock()
    for name in GROUPS:
        missing = [path for path in GROUPS[name] if not Path(path).exists()]
        assert not missing, f"the group {name!r} names {missing}, which are not there"

    def work() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                name = waiting.pop(0)
            own_s = time.monotonic()
            with tempfile.TemporaryFile() as kept:
                command = [sys.executable, "-m", "pytest", "-q", *options, *paths_of(name)]
                codes[name] = subprocess.call(command, stdout=kept, stderr=subprocess.STDOUT)
                kept.seek(0)
                with lock:
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
    failed = [name for name, code in codes.items() if code not in (0, NO_TESTS)]
    minutes, cpu = (time.monotonic() - began_s) / 60, os.times()
    spent = (cpu.children_user + cpu.children_system) / 60
    print(
        f"\nall groups in {minutes:.1f} min, {spent:.1f} min of processor time; failed: {', '.join(failed) or 'none'}"
    )
    return codes[failed[0]] if failed else min(codes.values(), default=130)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
