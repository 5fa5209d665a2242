"""Launch scripts of public repositories: what `phalanx import` reads of each against the arguments bash really makes.

    python benchmarks/foreign_files.py capture FOLDER CAPTURED.json    (as root, on a machine with unshare and chroot)
    python benchmarks/foreign_files.py compare FOLDER CAPTURED.json

FOLDER holds one folder per repository. `capture` runs each script as nobody, without a network, in a throwaway root
that holds nothing but bash, a few text tools and stubs: every program a script starts is a stub that writes down its
arguments. `compare` prints a table.
"""

# ruff: noqa: E501  (shell text)

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

TOOLS = [
    "bash",
    "dirname",
    "basename",
    "cat",
    "sed",
    "expr",
    "seq",
    "tr",
    "cut",
    "realpath",
    "readlink",
    "env",
    "head",
    "tail",
    "grep",
    "awk",
    "mkdir",
    "printf",
    "bc",
    "wc",
    "sort",
]
STUBS = [
    "torchrun",
    "python",
    "python3",
    "deepspeed",
    "srun",
    "mpirun",
    "mpiexec",
    "aprun",
    "jsrun",
    "flux",
    "singularity",
    "apptainer",
    "ssh",
    "pdsh",
    "nohup",
    "accelerate",
    "sbatch",
    "ray",
    "docker",
    "numactl",
    "taskset",
    "nsys",
    "ds",
    "numa_run.sh",
    "launch.sh",
]
STUB = r"""#!/bin/bash
# Writes its arguments, and the JSON files they name, to the capture; starts an inner shell where one is asked for.
phalanx_note() {
  { printf 'A\0'; for one in "$@"; do printf '%s\0' "$one"; done
    for one in "$@"; do
      case "$one" in *.json|*.conf|*=*.json) name="${one##*=}"; [ -f "$name" ] && { printf 'F\0%s\0' "$name"; printf '%s\0' "$(<"$name")"; } ;; esac
    done
    printf 'E\0'; } > "/capture/$EPOCHREALTIME.$BASHPID"  # one file each: they run side by side
  local all=("$@") index
  for ((index = 1; index < ${#all[@]}; index++)); do
    if [[ "${all[index]}" == *bash || "${all[index]}" == sh || "${all[index]}" == */sh ]] && [[ "${all[index+1]}" == -*c ]]; then
      /bin/bash "${all[@]:index+1}"; return
    fi
  done
}
"""
SCRIPTS = (".sh", ".slurm", ".sbatch", ".bash")
KEYS = ("TP", "PP", "CP", "EP", "ZeRO", "recompute", "precision", "micro", "global")
TRAINING = {
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "model_parallel_size", "num_layers", "hidden_size",
    "num_attention_heads", "micro_batch_size", "global_batch_size", "seq_length", "train_iters", "train_samples",
}  # fmt: skip


def make_jail(root: Path) -> None:
    """A root folder with bash, text tools and stubs, and nothing else."""
    for name in ("bin", "stub", "capture", "w", "tmp", "dev", "home", "etc"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for tool in TOOLS:
        where = shutil.which(tool)
        if where is None:
            continue
        real = Path(where).resolve()
        shutil.copy2(real, root / "bin" / tool)
        for line in subprocess.run(["ldd", str(real)], capture_output=True, text=True, check=False).stdout.splitlines():
            for found in re.findall(r"(/\S+\.so\S*)", line):
                target = root / found.lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                if not target.exists():
                    shutil.copy2(found, target)
    (root / "etc" / "handle").write_text(
        STUB + 'command_not_found_handle() { phalanx_note "$@"; return 0; }\n'
        'source() { [ -f "$1" ] && builtin source "$@"; :; }\nsleep() { :; }\nmodule() { :; }\nconda() { :; }\nulimit() { :; }\n'
    )
    for name in STUBS:
        stub = root / "stub" / name
        stub.write_text('#!/bin/bash\n. /etc/handle\nphalanx_note "${0##*/}" "$@"\n')
        stub.chmod(0o755)
    for name, lines in (("nvidia-smi", 8), ("ds_ssh", 18), ("rocm-smi", 8)):  # hosts of eight devices
        (root / "stub" / name).write_text(f"#!/bin/bash\nfor n in {{1..{lines}}}; do echo GPU; done\n")
        (root / "stub" / name).chmod(0o755)
    (root / "stub" / "nproc").write_text("#!/bin/bash\necho 8\n")
    (root / "stub" / "nproc").chmod(0o755)
    for name in ("null", "stdout", "stderr"):
        (root / "dev" / name).touch()
        (root / "dev" / name).chmod(0o666)


def capture_one(jail: Path, repo: Path, script: Path, environment: dict[str, str]) -> list[dict[str, Any]]:
    """The commands that a script starts, run in the jail from its own folder."""
    for old in (jail / "capture").iterdir():
        old.unlink()
    inside = Path("/w") / script.relative_to(repo)
    text = script.read_text(errors="replace")
    slurm = {}
    if nodes := re.search(r"^#SBATCH\s+(?:--nodes|-N)[= ]\s*(\d+)", text, re.MULTILINE):
        slurm = {"SLURM_NNODES": nodes.group(1), "SLURM_JOB_NUM_NODES": nodes.group(1)}
    command = [
        "unshare", "-n", "--pid", "--fork", "--", "chroot", "--userspec=65534:65534", str(jail), "/bin/env", "-i", "PATH=/stub:/bin", "HOME=/home",
        "BASH_ENV=/etc/handle", *(f"{k}={v}" for k, v in {**slurm, **environment}.items()), "/bin/bash", "-c",
        'cd "$0" && exec /bin/bash "$1" </dev/null >/dev/null 2>&1', str(inside.parent), inside.name,
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        # The first process of the namespace takes all others with it; one that lives on would write into the next capture.
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        process.wait()
    commands: list[dict[str, Any]] = []
    written = b"".join(path.read_bytes()[:1_000_000] for path in sorted((jail / "capture").iterdir())[:2_000])
    parts = written.decode(errors="replace").split("\0")
    at = 0
    while at < len(parts):
        if parts[at] != "A":
            at += 1
            continue
        argv, files, at = [], {}, at + 1
        while at < len(parts) and parts[at] != "E":
            if parts[at] == "F" and at + 2 < len(parts):
                files[parts[at + 1]] = parts[at + 2]
                at += 3
            else:
                argv.append(parts[at])
                at += 1
        commands.append({"argv": argv, "files": files})
    return commands


def fill_jail(jail: Path, repo: Path) -> None:
    """A copy of the repository that its scripts may spoil."""
    shutil.rmtree(jail / "w", ignore_errors=True)
    shutil.copytree(repo, jail / "w", symlinks=False, ignore_dangling_symlinks=True)
    for path in (jail / "w").rglob("*"):  # a file that is not there must not end the script before it starts anything
        if path.suffix in SCRIPTS and path.is_file():
            text = path.read_text(errors="surrogateescape")
            changed = re.sub(r"^([ \t]*)set [-+](?!-)[^\n]*$", r"\1:", text, flags=re.MULTILINE)
            if changed != text:
                path.write_text(changed, errors="surrogateescape")
    for path in (jail / "w", jail / "capture", jail / "tmp", jail / "home"):
        subprocess.run(["chown", "-R", "65534:65534", str(path)], check=True)


def scripts_of(repo: Path) -> list[Path]:
    """Every script that names two training arguments, or sources one that may."""
    return sorted(
        path for path in repo.rglob("*") if path.suffix in SCRIPTS and path.is_file() and path.stat().st_size < 200_000
    )


# ---- the truth: argparse's rules on the captured words, written apart from the product ------------------------------


def flags_of(argv: list[str]) -> dict[str, list[str]]:
    """Flags with underscores and their words; the last one holds."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in argv:
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = [value] if equals else []
            name = "" if equals else name
        elif name:
            found[name].append(word)
    return found


def truth_of(commands: list[dict[str, Any]]) -> dict[str, object] | None:
    """What the captured commands say; None where none of them trains. A value that differs is a set of all."""
    found: dict[str, set[Any]] = {key: set() for key in KEYS}
    training = []
    for one in commands:
        argv = one["argv"]
        program = next((i for i, w in enumerate(argv) if w.endswith(".py")), -1)
        flags = flags_of(argv[program + 1 :])
        if len(flags.keys() & TRAINING) >= 2:
            training.append((flags, one["files"]))
    asked = [one for one in training if one[0].keys() & {"train_iters", "train_samples", "train_tokens", "lr"}]
    for flags, files in asked or training:
        values = values_of(flags, files)
        for key in KEYS:
            found[key].add(values[key])
    if not training:
        return None
    return {key: next(iter(values)) if len(values) == 1 else values for key, values in found.items()}


def values_of(flags: dict[str, list[str]], files: dict[str, str]) -> dict[str, Any]:
    """Layout, sharding, recompute, precision and batch of one command; "?" where argparse would refuse it."""

    def number(*names: str, default: int | None = 1) -> object:
        for name in names:
            if name in flags:
                words = flags[name]
                return int(words[0]) if words and re.fullmatch(r"\d+", words[0]) else "?"
        return default

    config = next((flags[n][0] for n in ("deepspeed_config",) if flags.get(n)), "")
    stage: object = None
    if "deepspeed" in flags:
        text = files.get(config, "")
        try:
            zero = json.loads(text).get("zero_optimization", {}) if text else None
            stage = None if zero is None else int(zero.get("stage", 0))
        except (ValueError, TypeError, AttributeError):
            stage = "?"
        if stage is None:
            stage = number("zero_stage", default=None if config else 0)
            stage = "?" if stage is None else stage
    elif "use_megatron_fsdp" in flags or "use_custom_fsdp" in flags or "use_torch_fsdp2" in flags:
        kind = (flags.get("data_parallel_sharding_strategy") or ["optim_grads_params"])[0]
        kind = "optim_grads_params" if "use_torch_fsdp2" in flags else kind
        stage = {"no_shard": 0, "optim": 1, "optim_grads": 2}.get(kind, 3)
    else:
        stage = int("use_distributed_optimizer" in flags)
    granularity = (flags.get("recompute_granularity") or [""])[0]
    recompute = granularity if granularity in ("full", "selective") else "none"
    if not granularity and "recompute_activations" in flags:
        recompute = "selective"
    elif not granularity and ("checkpoint_activations" in flags or "activations_checkpoint_method" in flags):
        recompute = "full"
    eight = [n for n in ("fp8_format", "fp8", "fp8_hybrid", "fp8_e4m3") if n in flags]
    four = [n for n in ("fp4_format", "fp4") if n in flags]
    precision = (
        "fp4" if four else "fp8" if eight else "bf16" if "bf16" in flags else "fp16" if "fp16" in flags else "fp32"
    )
    return {
        "TP": number("tensor_model_parallel_size", "model_parallel_size"),
        "PP": 1 if "no_pipeline_parallel" in flags else number("pipeline_model_parallel_size"),
        "CP": number("context_parallel_size"),
        "EP": number("expert_model_parallel_size"),
        "ZeRO": stage,
        "recompute": recompute,
        "precision": precision,
        "micro": number("micro_batch_size", "batch_size", default=None),
        "global": number("global_batch_size", default=None),
    }


# ---- what the product says ------------------------------------------------------------------------------------------

JOB_KEYS = {
    "TP": "parallel.tensor",
    "PP": "parallel.pipeline",
    "CP": "parallel.context",
    "EP": "parallel.expert",
    "ZeRO": "parallel.zero",
    "recompute": "parallel.recompute",
    "precision": "precision.compute",
    "micro": "batch.micro",
    "global": "batch.global_sequences",
}


def read_of(path: Path) -> dict[str, object]:
    """The product's answer: a value, or "unknown"."""
    from phalanx.rules.foreign.convert import convert_config

    found = convert_config(path, "megatron")
    answer: dict[str, object] = {}
    for key, ours in JOB_KEYS.items():
        section, _, name = ours.partition(".")
        value = getattr(getattr(found.resolved.job, section), name)
        said = found.resolved.origins.get(ours)
        if ours in found.unknown or (key == "global" and (said is None or "stand-in" in said.where)):
            value = "unknown"
        answer[key] = value
    return answer


def verdict(key: str, truth: object, read: object) -> str:
    """right, unknown, wrong, or unjudged where the captured command is one that argparse refuses."""
    if truth == "?" or (isinstance(truth, set) and "?" in truth):
        return "unjudged"
    if read == "unknown":
        return "unknown"
    if truth is None:  # the trainer's own default
        return "unjudged" if key == "global" else "right" if read in (1, None) else "wrong"
    return "right" if read == truth else "wrong"


def compare(folder: Path, captured: dict[str, Any], *, show: bool = False) -> None:
    """Print one table per repository, and one of all."""
    from phalanx.errors import UserError

    total: dict[str, Counter[str]] = {}
    for repo in sorted(folder.iterdir()):
        table: dict[str, Counter[str]] = {key: Counter() for key in KEYS}
        scripts = Counter[str]()
        slowest = 0.0
        for name, commands in captured.get(repo.name, {}).items():
            truth = truth_of(commands)
            if truth is None:
                continue
            began = time.process_time()
            try:
                answer = read_of(repo / name)
            except UserError as error:
                scripts["refused"] += 1
                if show:
                    print(f"REFUSED {repo.name}/{name}: {error.problems[0].where} {error.problems[0].what[:150]}")
                answer = dict.fromkeys(KEYS, "unknown")
            except Exception:
                scripts["traceback"] += 1
                traceback.print_exc()
                continue
            slowest = max(slowest, time.process_time() - began)
            verdicts = {key: verdict(key, truth[key], answer[key]) for key in KEYS}
            for key, one in verdicts.items():
                table[key][one] += 1
                if one == "wrong" and show:
                    print(f"WRONG {repo.name}/{name}: {key} is {truth[key]}, read {answer[key]}")
            scripts["wrong" if "wrong" in verdicts.values() else "right or unknown"] += 1
            scripts["some unknown" if "unknown" in verdicts.values() else "all known"] += 1
        print(f"\n{repo.name}: {dict(scripts)}; slowest {slowest:.2f} s")
        for key, counts in table.items():
            print(
                f"  {key:10} right {counts['right']:4} unknown {counts['unknown']:4} wrong {counts['wrong']:3} unjudged {counts['unjudged']:3}"
            )
            total.setdefault(key, Counter()).update(counts)
        total.setdefault("scripts", Counter()).update(scripts)
    print(f"\nall: {dict(total.pop('scripts', Counter()))}")
    for key, counts in total.items():
        print(
            f"  {key:10} right {counts['right']:4} unknown {counts['unknown']:4} wrong {counts['wrong']:3} unjudged {counts['unjudged']:3}"
        )


def main() -> None:
    """Capture or compare."""
    verb, folder, file = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if verb == "compare":
        compare(folder, json.loads(file.read_text()), show="--show" in sys.argv)
        return
    captured: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        os.chmod(name, 0o755)
        jail = Path(name)
        make_jail(jail)
        for repo in sorted(folder.iterdir()):
            fill_jail(jail, repo)
            for script in scripts_of(repo):
                commands = capture_one(jail, repo, script, {})
                captured.setdefault(repo.name, {})[str(script.relative_to(repo))] = commands
            trained = sum(truth_of(one) is not None for one in captured.get(repo.name, {}).values())
            print(f"{repo.name}: {len(captured.get(repo.name, {}))} scripts, {trained} train", flush=True)
            file.write_text(json.dumps(captured))


if __name__ == "__main__":
    main()
