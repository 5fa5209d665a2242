"""Whole commands of two versions, in turn: processor seconds from the start of Python to its end, and their ratio.

    python benchmarks/command_speed.py OLD/src [--repeats 5]     # beside the source that this file lies in

Both versions run with this Python, its packages and one empty cache folder each; caches (compiled files, kept plans,
fits of measured steps) are filled by a first run that is not counted, except for `check`, whose plan is made anew each
time, as at the first check of a job. Nothing is measured on this machine's cores: what was measured is taken as it is.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHECKED = (
    "drill.toml",
    "first-run.toml",
    "llama-3-8b-64xH100.toml",
    "bloom-176b-48x8xA100.toml",
    "deepseek-v3-2048xH800.toml",
)


def commands(folder: Path) -> dict[str, list[str]]:
    """Name of each measured command, and its words."""
    drill, first, big = (
        str(ROOT / "examples" / name) for name in ("drill.toml", "first-run.toml", "llama-3-8b-64xH100.toml")
    )
    return {
        "--help": ["--help"],
        "plan drill.toml, local": ["plan", drill],
        "plan first-run.toml, local": ["plan", first],
        "plan of Llama 3 70B, 8xH100:16": ["plan", big, "--cluster", "8xH100:16", "--set", "model.preset=llama-3-70b"],
        **{f"check {name}": ["check", str(ROOT / "examples" / name)] for name in CHECKED},
        "fabric design --gpus 16384 --nic-gbps 400": ["fabric", "design", "--gpus", "16384", "--nic-gbps", "400"],
        "init": ["init", str(folder / "new.toml"), "--force"],
    }


def run_once(words: list[str], source: Path, home: Path) -> tuple[float, int]:
    """Processor seconds of one command, and its exit code."""
    if words[0] == "check":
        shutil.rmtree(home / "cache/phalanx/plans", ignore_errors=True)
    environ = {
        **{key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"},
        "PYTHONPATH": str(source),
        "PYTHONPYCACHEPREFIX": str(home / "compiled"),
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(home / "cache"),
        "XDG_DATA_HOME": str(home / "data"),
        "OPENBLAS_NUM_THREADS": "1",
        "PHALANX_PROBE": "0",
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = "import sys; from phalanx.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, *words], env=environ, capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.returncode


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("old", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="commands that begin with this")
    parser.add_argument("--measured", type=Path, help="a folder with HOST.steps.json, as phalanx plan keeps it")
    args = parser.parse_args()
    sources = {"old": args.old.resolve(), "now": ROOT / "src"}
    with tempfile.TemporaryDirectory() as folder:
        homes = {name: Path(folder, name) for name in sources}
        for home in homes.values():
            (home / "data/phalanx/profiles").mkdir(parents=True)
            if args.measured:
                shutil.copytree(args.measured, home / "data/phalanx/profiles", dirs_exist_ok=True)
        print("| command | old | now | ratio |\n|---|---|---|---|")
        for name, words in commands(Path(folder)).items():
            if not name.startswith(args.only):
                continue
            seconds: dict[str, list[float]] = {one: [] for one in sources}
            codes = {one: run_once(words, source, homes[one])[1] for one, source in sources.items()}
            for _ in range(args.repeats):
                for one, source in sources.items():
                    seconds[one].append(run_once(words, source, homes[one])[0])
            old, now = (min(seconds[one]) for one in sources)
            odd = "" if codes["old"] == codes["now"] else f" (exit {codes['old']} and {codes['now']})"
            print(f"| `{name}`{odd} | {old:.3f} s | {now:.3f} s | {now / old:.2f} |", flush=True)


if __name__ == "__main__":
    main()
