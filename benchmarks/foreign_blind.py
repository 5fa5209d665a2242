"""Files of repositories that nobody looked at: what `phalanx check` reads of each against a truth found without it.

    python benchmarks/foreign_blind.py choose FOLDER CHOSEN.json [--scripts 40] [--configs 25]
    python benchmarks/foreign_blind.py capture FOLDER CHOSEN.json CAPTURED.json    (as root: unshare and chroot)
    python benchmarks/foreign_blind.py read FOLDER CHOSEN.json ROWS.json
    python benchmarks/foreign_blind.py compare FOLDER CAPTURED.json ROWS.json
    python benchmarks/foreign_findings.py sample ROWS.json 44 --seed 118

FOLDER holds one folder per repository. `choose` takes files at random by words of training in them, not by what the
product says; scripts with odd commands are left out. `capture` is that of foreign_files.py. `read` is the product.
`compare` takes the truth from the captured arguments, or from the parsed tree (foreign_trees.py).
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import foreign_files
import foreign_trees

KEYS = foreign_files.KEYS
LAYOUT = ("TP", "PP", "CP", "EP", "ZeRO", "recompute")
SCRIPT_WORDS = re.compile(
    r"model[-_]parallel[-_]size|--num[-_]layers|deepspeed|torchrun|accelerate launch|megatron|torch\.distributed"
    r"|python3? -m verl|train\.py|srun"
)
CONFIG_WORDS = re.compile(
    r"micro_batch|batch_size|zero_optimization|parallel|distributed_type|base_model|finetuning_type|seq_len"
)
ODD = re.compile(
    r"rm\s+-[a-z]*\s+/(\s|$)|/dev/tcp|mkfs|\bdd\s+if=|base64\s+-d|:\(\)\s*\{|/proc/sys|/dev/sd|shutdown|reboot"
    r"|iptables|nc\s+-"
)
TRAINER_WORDS = {"per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "output_dir"}
VERBS = ("sft", "pt", "rlhf")
Row = dict[str, Any]


def choose_files(folder: Path, most_scripts: int, most_configs: int) -> dict[str, dict[str, list[str]]]:
    """Scripts and configurations of each repository, at random."""
    chance = random.Random(20261118)
    chosen = {}
    for repo in sorted(folder.iterdir()):
        scripts, configs = [], []
        for path in sorted(repo.rglob("*")):
            name = str(path.relative_to(repo))
            if not path.is_file() or name.startswith(".") or path.stat().st_size > 100_000:
                continue
            text = path.read_text(errors="replace") if path.suffix in (*foreign_files.SCRIPTS, *TREES) else ""
            if path.suffix in foreign_files.SCRIPTS and SCRIPT_WORDS.search(text) and not ODD.search(text):
                scripts.append(name)
            elif path.suffix in TREES and len(CONFIG_WORDS.findall(text)) >= 2:
                configs.append(name)
        picked = {
            "scripts": sorted(chance.sample(scripts, min(len(scripts), most_scripts))),
            "configs": sorted(chance.sample(configs, min(len(configs), most_configs))),
        }
        chosen[repo.name] = picked
        print(repo.name, {kind: len(names) for kind, names in picked.items()})
    return chosen


TREES = (".yaml", ".yml", ".toml", ".json")


def capture_chosen(folder: Path, chosen: dict[str, Any], out: Path) -> None:
    """What each chosen script starts."""
    captured: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        jail = Path(name)
        jail.chmod(0o755)
        foreign_files.make_jail(jail)
        for repo, files in chosen.items():
            foreign_files.fill_jail(jail, folder / repo)
            captured[repo] = {
                one: foreign_files.capture_one(jail, folder / repo, folder / repo / one, {}) for one in files["scripts"]
            }
            out.write_text(json.dumps(captured))


def read_file(folder: Path, repo: str, name: str, kind: str) -> Row:
    """The product: exit code, seconds of CPU, findings, and the nine values or "unknown"."""
    from phalanx.errors import PhalanxError
    from phalanx.rules.foreign.convert import convert_config
    from phalanx.rules.foreign.detect import trainer_of_file
    from phalanx.rules.specification import check

    path = folder / repo / name
    row: Row = {"repo": repo, "file": name, "kind": kind, "target": str(path), "findings": []}
    began = time.process_time()
    try:
        report = check(str(path))
        row |= {"exit": report.exit_code, "trainer": report.trainer}
        row["findings"] = [
            {"rule": one.rule.id, "severity": one.severity, "line": one.line, "what": one.outcome.what}
            for one in report.problems
            if one.verdict == "fail" and one.severity in ("error", "warning")
        ]
    except PhalanxError as error:
        row |= {"exit": error.exit_code, "refused": str(error)[:300]}
    except Exception:  # the measurement counts them
        row |= {"exit": -1, "traceback": traceback.format_exc()[-900:]}
    row["seconds"] = round(time.process_time() - began, 3)
    try:
        if trainer := trainer_of_file(path):
            found = convert_config(path, trainer)
            row["read"] = {}
            for key, ours in foreign_files.JOB_KEYS.items():
                section, _, field = ours.partition(".")
                value = getattr(getattr(found.resolved.job, section), field)
                said = found.resolved.origins.get(ours)
                stand_in = said is not None and "stand-in" in said.where
                if ours in found.unknown or stand_in or (key == "global" and said is None):
                    value = "unknown"
                row["read"][key] = value
    except PhalanxError as error:
        row["refused"] = str(error)[:300]
    except Exception:
        row["traceback"] = traceback.format_exc()[-900:]
    return row


# ---- the truth of scripts that are not Megatron's, from the captured arguments --------------------------------


def _is_on(flags: dict[str, list[str]], name: str, default: bool) -> bool:
    words = flags.get(name)
    return default if words is None else not words or words[0].lower() in ("true", "1")


def swift_megatron_truth(command: dict[str, Any]) -> Row | None:
    """`megatron sft` of ms-swift: Command-line-parameters.md of its manual."""
    argv = command["argv"]
    place = next((i for i in range(len(argv) - 1) if argv[i].endswith("megatron") and argv[i + 1] in VERBS), -1)
    if place < 0:
        return None
    flags = foreign_files.flags_of(argv[place + 2 :])
    values = foreign_files.values_of(flags, command["files"])
    if "use_megatron_fsdp" not in flags:
        values["ZeRO"] = int(_is_on(flags, "use_distributed_optimizer", True))
    if "recompute_granularity" not in flags:
        values["recompute"] = "selective"
    values["precision"] = "fp8" if "fp8_format" in flags else "?"  # that of the model
    values["micro"] = values["micro"] or 1
    values["global"] = values["global"] or 16
    return {**values, "family": "ms-swift"}


def trainer_truth(command: dict[str, Any], repo: Path) -> Row | None:
    """transformers.TrainingArguments, and `swift sft` with its own defaults."""
    argv = command["argv"]
    swift = any(word.rpartition("/")[2] == "swift" for word in argv[:4]) and any(word in VERBS for word in argv[:6])
    place = next((i for i, word in enumerate(argv) if word.endswith(".py")), -1)
    flags = foreign_files.flags_of(argv[place + 1 :])
    trains = "per_device_train_batch_size" in flags and len(flags.keys() & TRAINER_WORDS) >= 2
    if not swift and (place < 0 or not trains):
        return None
    stage: Any = 0
    if flags.get("deepspeed"):
        name = flags["deepspeed"][0]
        own = re.fullmatch(r"zero([0-3])(_offload)?", name)
        stage = int(own.group(1)) if swift and own else _stage_in(repo, name)
    elif "fsdp" in flags:
        stage = 3 if "full_shard" in " ".join(flags["fsdp"]) else "?"
    precision = "bf16" if _is_on(flags, "bf16", False) else "fp16" if _is_on(flags, "fp16", False) else "fp32"
    if swift and precision == "fp32":
        words = flags.get("torch_dtype") or [""]
        precision = {"bfloat16": "bf16", "float16": "fp16"}.get(words[0], "?")
    words = flags.get("per_device_train_batch_size")
    return {
        **dict.fromkeys(KEYS, "?"),
        "TP": 1,
        "PP": 1,
        "ZeRO": stage,
        "recompute": "full" if _is_on(flags, "gradient_checkpointing", swift) else "none",
        "precision": precision,
        "micro": 1 if words is None else int(words[0]) if words and words[0].isdigit() else "?",
        "family": "ms-swift" if swift else "transformers",
    }


def _stage_in(repo: Path, name: str) -> Any:
    """Of the JSON of this name, wherever in the repository it lies."""
    found = [one for one in repo.rglob(name.rpartition("/")[2]) if str(one).endswith(name.lstrip("./"))]
    try:
        return json.loads(found[0].read_text()).get("zero_optimization", {}).get("stage", 0) if found else "?"
    except (ValueError, AttributeError, OSError):
        return "?"


def truth_of(row: Row, folder: Path, captured: dict[str, Any]) -> tuple[str, Row | None]:
    """Family and values; no values where the file is none of them."""
    if row["kind"] == "configs":
        try:
            family, values = foreign_trees.truth_of_tree(folder / row["repo"] / row["file"])
        except ValueError:
            return "unparsable", None
        return family, values or None
    commands = captured.get(row["repo"], {}).get(row["file"], [])
    repo = folder / row["repo"]
    for found in (
        [one for command in commands if (one := swift_megatron_truth(command))],
        [one for command in commands if (one := trainer_truth(command, repo))],
    ):
        if found:
            same = {key: {str(one[key]) for one in found} for key in (*KEYS, "family")}
            return found[0]["family"], {k: found[0][k] if len(v) == 1 else v for k, v in same.items()}
    truth = foreign_files.truth_of(commands)
    return ("megatron script", truth) if truth is not None else ("another script", None)


def compare_rows(rows: list[Row], folder: Path, captured: dict[str, Any]) -> None:
    """Print counts of all, of each value, of each family, and what is wrong, slow or broken."""
    total, families = Counter[str](), defaultdict[str, Counter[str]](Counter)
    values = {key: Counter[str]() for key in KEYS}
    others = Counter[str]()
    for row in rows:
        family, truth = truth_of(row, folder, captured)
        if "traceback" in row:
            print("TRACEBACK", row["file"], row["traceback"])
        if truth is None:
            others[f"{family}: {'refused' if row['exit'] == 2 else 'judged as ' + str(row.get('trainer'))}"] += 1
            continue
        read = row.get("read") or dict.fromkeys(KEYS, "unknown")
        verdicts = {key: foreign_files.verdict(key, truth[key], read[key]) for key in KEYS}
        for key, one in verdicts.items():
            values[key][one] += 1
            if one == "wrong":
                print(f"WRONG {row['repo']}/{row['file']}: {key} is {truth[key]}, read {read[key]}")
        for counter in (total, families[family]):
            counter["files"] += 1
            counter["wrong"] += "wrong" in verdicts.values()
            counter["wrong in layout, ZeRO or recompute"] += any(verdicts[key] == "wrong" for key in LAYOUT)
            counter["refused"] += "read" not in row
    print("all", dict(total))
    for name, counter in [*families.items(), *values.items()]:
        print(f"  {name:20}", dict(counter))
    print("without a truth:", dict(others))
    seconds = sorted(row["seconds"] for row in rows)
    exits = Counter(row["exit"] for row in rows)
    print(
        f"{len(rows)} files; exits {dict(exits)}; slowest {seconds[-1]} s; above 0.5 s: {sum(s > 0.5 for s in seconds)}"
    )


def main() -> None:
    """One verb after another."""
    verb, folder, chosen_at = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    options = dict(zip(sys.argv[3:], sys.argv[4:], strict=False))
    if verb == "choose":
        found = choose_files(folder, int(options.get("--scripts", 40)), int(options.get("--configs", 25)))
        chosen_at.write_text(json.dumps(found, indent=1))
    elif verb == "capture":
        capture_chosen(folder, json.loads(chosen_at.read_text()), Path(sys.argv[4]))
    elif verb == "read":
        chosen = json.loads(chosen_at.read_text())
        names = [(repo, name, kind) for repo, files in chosen.items() for kind in files for name in files[kind]]
        read_file(folder, *names[0])  # imports are not the file's
        Path(sys.argv[4]).write_text(json.dumps([read_file(folder, *one) for one in names], default=str))
    else:
        compare_rows(json.loads(Path(sys.argv[4]).read_text()), folder, json.loads(chosen_at.read_text()))


if __name__ == "__main__":
    main()
