"""All tests, in two processes beside each other: those of the trainer, and all others. `python .ci/tests.py [OPTION …]`

Each leaves cores idle (ranks that wait for each other, one process that computes), so that together they take less time
than one after the other. Options go to both, as `-k kill` or `--durations=20`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time

TRAINER = ("tests/train", "tests/elastic", "src/phalanx/train", "src/phalanx/elastic")
PARTS = (
    ("the trainer", TRAINER),
    ("all others", ("tests", "src", *(f"--ignore={path}" for path in TRAINER))),
)
NO_TESTS = 5  # pytest's code for "-k" that matched nothing


def main(options: list[str]) -> int:
    """The worst exit code of both."""
    began_s = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", *options]
    with tempfile.TemporaryFile() as kept:
        trainer = subprocess.Popen([*command, *PARTS[0][1]], stdout=kept, stderr=subprocess.STDOUT)
        others = subprocess.Popen([*command, *PARTS[1][1]])
        try:
            codes = [others.wait(), trainer.wait()]
        except KeyboardInterrupt:  # both heard it too; let them tidy up
            codes = [others.wait(), trainer.wait()]
        kept.seek(0)
        sys.stdout.flush()
        print(f"\n{PARTS[0][0]}:", flush=True)
        sys.stdout.buffer.write(kept.read())
        print(f"both in {(time.monotonic() - began_s) / 60:.1f} min", flush=True)
    failed = [code for code in codes if code not in (0, NO_TESTS)]
    return failed[0] if failed else min(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
