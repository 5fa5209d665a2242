"""How easy the source is to follow, in numbers: files, lines, functions, helpers used once, names used twice.

    python benchmarks/code_measures.py [FOLDER ...]        # src/phalanx unless named; several stand side by side
    python benchmarks/code_measures.py --entered           # also the files that each command enters

Nothing here is good or bad by itself; the table in docs/decisions/ has them before and after the redesign. A private
helper is a function or method whose name begins with one underscore; it is used once when its name occurs in its own
file twice: where it is defined and where it is called. Files entered are counted by `sys.setprofile` in every process,
and from its fork on in a forked one. A rank is the process that entered most files of those that entered the loop.
"""

from __future__ import annotations

import argparse
import ast
import collections
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHORT = 5  # lines of a helper that hardly says more than its name


def measure(folder: Path) -> dict[str, float]:
    """All numbers of one source tree."""
    files = sorted(folder.rglob("*.py"))
    lines = functions = one_word = helpers = once = once_short = 0
    classes: dict[str, int] = collections.Counter()
    modules: dict[str, int] = collections.Counter()
    for path in files:
        text = path.read_text(encoding="utf-8")
        lines += text.count("\n")
        modules[path.name] += path.name not in ("__init__.py", "__main__.py")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                classes[node.name] += 1
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("__"):
                continue
            functions += 1
            one_word += "_" not in node.name.strip("_")
            if node.name.startswith("_"):
                helpers += 1
                if len(re.findall(rf"\b{re.escape(node.name)}\b", text)) == 2:
                    once += 1
                    once_short += (node.end_lineno or 0) - node.lineno < SHORT
    return {
        "files": len(files),
        "lines": lines,
        "functions": functions,
        "functions with names of one word, %": round(100 * one_word / functions),
        "private helpers used once, %": round(100 * once / max(helpers, 1)),
        f"of these with {SHORT} lines or fewer": once_short,
        "class names of two or more classes": sum(count > 1 for count in classes.values()),
        "file names of two or more files": sum(count > 1 for count in modules.values()),
    }


TRACER = """
import atexit, json, os, sys, threading
seen = set()
def note(frame, event, _):
    if event == "call":
        name = frame.f_code.co_filename
        if "/phalanx/" in name and name.endswith(".py"):
            seen.add(name)
def keep():
    with open(os.path.join(os.environ["ENTERED"], f"{os.getpid()}.json"), "w") as file:
        json.dump(sorted(seen), file)
sys.setprofile(note); threading.setprofile(note); atexit.register(keep)
os.register_at_fork(after_in_child=seen.clear)
real = os._exit
def leave(code):
    keep(); real(code)
os._exit = leave
"""


def entered(words: list[str], source: Path) -> list[set[str]]:
    """Files of Phalanx in which a function ran during a command, by process."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(TRACER)
        environ = {**os.environ, "ENTERED": folder, "PYTHONPATH": f"{folder}:{source.parent}", "PHALANX_PROBE": "0"}
        subprocess.run(
            [sys.executable, "-m", "phalanx", *words], env=environ, cwd=folder, capture_output=True, check=False
        )
        return [set(json.loads(path.read_text())) for path in Path(folder).glob("*.json")]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, default=[ROOT / "src/phalanx"])
    parser.add_argument("--entered", action="store_true")
    args = parser.parse_args()
    found = [measure(folder) for folder in args.folders]
    if args.entered:
        job = str(ROOT / "examples/llama-3-8b-64xH100.toml")
        small = str(ROOT / "examples/drill.toml")
        two = ["--cluster", "local-cpu:2", "--set", "parallel.shard=2"]
        for one, folder in zip(found, args.folders, strict=True):
            for name, words in {
                "plan": ["plan", job],
                "check --select CKP001": ["check", job, "--select", "CKP001"],
                "a training of two ranks": ["train", small, "--steps", "3", "--no-check", *two],
                "a drill that kills one of two ranks": [
                    *("drill", small, "--fault", "kill:rank=1,step=3", "--steps", "6", "--no-replay"),
                    *two,
                ],
            }.items():
                processes = entered(words, folder)
                one[f"files entered by {name}"] = len(set().union(*processes))
                ranks = [files for files in processes if any(file.endswith("train/loop.py") for file in files)]
                if ranks:
                    one[f"… by a rank of {name}"] = max(map(len, ranks))
    print("| | " + " | ".join(map(str, args.folders)) + " |\n|---|" + "---|" * len(found))
    for name in found[0]:
        print(f"| {name} | " + " | ".join(f"{one.get(name, 0):,}" for one in found) + " |")


if __name__ == "__main__":
    main()
