"""Writes the scripts of this folder and the arguments that bash makes of each: python make_corpus.py

Every script is ours, one idiom of public launch scripts each, with several sizes. They are run with every program
stubbed: a stub writes down its arguments and the JSON they name. Nothing else is started.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from idioms import IDIOMS, SIZES, Sizes

HERE = Path(__file__).parent
PROGRAMS = [
    "torchrun",
    "python",
    "python3",
    "deepspeed",
    "srun",
    "mpirun",
    "singularity",
    "ssh",
    "nohup",
    "nvidia-smi",
    "hostname",
    "nproc",
    "scontrol",
    "pip",
    "git",
]
STUB = r"""#!/bin/bash
note() {
  { printf 'A\0'; printf '%s\0' "$@"
    for one in "$@"; do
      name="${one##*=}"
      [[ "$name" == *.json && -f "$name" ]] && { printf 'F\0%s\0' "$name"; printf '%s\0' "$(<"$name")"; }
    done
    printf 'E\0'; } >> "$CAPTURE"
  local all=("$@") at
  for ((at = 1; at < ${#all[@]}; at++)); do
    if [[ "${all[at]}" == bash && "${all[at+1]}" == -*c ]]; then bash "${all[@]:at+1}"; fi
  done
}
note "${0##*/}" "$@"
"""


def write_scripts() -> list[Path]:
    """Every idiom with every size; files that a script sources lie in a folder beside."""
    for old in HERE.glob("*.sh"):
        old.unlink()
    shutil.rmtree(HERE / "parts", ignore_errors=True)
    written = []
    for name, idiom in IDIOMS.items():
        for number, sizes in enumerate(SIZES[: idiom.variants], start=1):
            path = HERE / f"{name}_{number}.sh"
            path.write_text(filled(idiom.text, sizes, path.stem), encoding="utf-8")
            for part, text in idiom.parts.items():
                target = HERE / "parts" / f"{path.stem}_{part}"
                target.parent.mkdir(exist_ok=True)
                target.write_text(filled(text, sizes, path.stem), encoding="utf-8")
            written.append(path)
    return written


def filled(text: str, sizes: Sizes, stem: str) -> str:
    """The idiom with its numbers: @TP@ and the like."""
    for key, value in {**sizes, "STEM": stem}.items():
        text = text.replace(f"@{key}@", str(value))
    return text


def captured_commands(script: Path, stubs: Path) -> list[dict[str, object]]:
    """What the script starts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(script, folder / script.name)
        if (HERE / "parts").is_dir():
            shutil.copytree(HERE / "parts", folder / "parts")
        capture = folder / "capture.bin"
        capture.touch()
        environment = {"PATH": f"{stubs}:/usr/bin:/bin", "CAPTURE": str(capture), "HOME": name}
        subprocess.run(
            ["bash", script.name],
            cwd=folder,
            env=environment,
            timeout=20,
            check=False,
            capture_output=True,
            stdin=subprocess.DEVNULL,
        )
        parts = capture.read_bytes().decode().split("\0")
    commands: list[dict[str, object]] = []
    at = 0
    while at < len(parts):
        if parts[at] != "A":
            at += 1
            continue
        argv: list[str] = []
        files: dict[str, str] = {}
        at += 1
        while parts[at] != "E":
            if parts[at] == "F":
                files[parts[at + 1]] = parts[at + 2]
                at += 3
            else:
                argv.append(parts[at])
                at += 1
        commands.append({"argv": argv, "files": files})
    return commands


def main() -> None:
    """Write scripts and captured.json."""
    captured = {}
    with tempfile.TemporaryDirectory() as name:
        stubs = Path(name)
        for program in PROGRAMS:
            (stubs / program).write_text(STUB)
            (stubs / program).chmod(0o755)
        for script in write_scripts():
            captured[script.name] = captured_commands(script, stubs)
    text = "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in captured.items()) + "\n}\n"
    (HERE / "captured.json").write_text(text, encoding="utf-8")
    print(f"{len(captured)} scripts, {sum(map(bool, captured.values()))} start something", file=sys.stderr)
    os.sync()


if __name__ == "__main__":
    main()
