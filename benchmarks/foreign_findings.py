"""Configurations of public repositories: what `phalanx check` says of each, how long it takes, and a sample to judge.

    python benchmarks/foreign_findings.py check FOLDER FOUND.json [--cluster 8xH100:16] [--share 0.2] [--seed 1]
    python benchmarks/foreign_findings.py sample FOUND.json 40 [--seed 1]

FOLDER holds one folder per repository. `check` looks for files as `phalanx check FOLDER` does, checks a share of them
(recipes of Python files one by one) and writes every finding; `sample` prints findings at random, for a person to judge
against the file. Nothing of the files is run.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any


def check_folder(folder: Path, out: Path, cluster: str | None, share: float, seed: int) -> list[dict[str, Any]]:
    """One row per file or recipe: exit code, seconds of CPU, findings about the file; written after each repository."""
    from phalanx.errors import PhalanxError
    from phalanx.rules.project import ProjectConfig, find_files, recipe_targets
    from phalanx.rules.specification import check

    chosen = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for repo in sorted(folder.iterdir()):
        found = find_files(repo, ProjectConfig())
        parts = [part for file in found.files for part in recipe_targets(file, ())[1]]
        picked = sorted(chosen.sample(parts, max(1, round(share * len(parts))))) if parts else []
        for part in picked:
            row: dict[str, Any] = {"repo": repo.name, "target": part, "findings": []}
            began = time.process_time()
            try:
                report = check(part, cluster=cluster)
                row |= {"exit": report.exit_code, "trainer": report.trainer}
                row["findings"] = [
                    {"rule": one.rule.id, "severity": one.severity, "line": one.line, "what": one.outcome.what}
                    for one in report.problems
                    if one.verdict == "fail"
                ]
            except PhalanxError as error:
                row |= {"exit": error.exit_code, "refused": str(error)[:300]}
            except Exception:  # the measurement counts them
                row |= {"exit": -1, "traceback": traceback.format_exc()[-600:]}
            row["seconds"] = round(time.process_time() - began, 3)
            rows.append(row)
        print(
            f"{repo.name}: {found.looked_at:,} files looked at, {len(parts):,} to judge, {len(picked):,} judged",
            flush=True,
        )
        out.write_text(json.dumps(rows, indent=1))
    return rows


def tell_summary(rows: list[dict[str, Any]]) -> None:
    """Counts by exit code, by rule, and the slowest."""
    exits = Counter(row["exit"] for row in rows)
    print(f"{len(rows)} judged; exit codes {dict(exits)}; pass {exits[0] / max(1, len(rows)):.1%}")
    for trainer in sorted({row.get("trainer", "refused") for row in rows}):
        mine = [row for row in rows if row.get("trainer", "refused") == trainer]
        print(f"  {trainer:14} {len(mine):4}, exit 0: {sum(row['exit'] == 0 for row in mine)}")
    found = Counter(f"{one['rule']} {one['severity']}" for row in rows for one in row["findings"])
    print(f"{sum(found.values())} findings: {dict(found.most_common())}")
    slow = sorted(rows, key=lambda row: -row["seconds"])
    print("slowest:", [(row["seconds"], row["target"][-60:]) for row in slow[:5]])
    seconds = sorted(row["seconds"] for row in rows)
    if seconds:
        print(f"median {seconds[len(seconds) // 2]} s; above 0.5 s: {sum(one > 0.5 for one in seconds)}")
    for row in rows:
        if "traceback" in row:
            print("TRACEBACK", row["target"], row["traceback"])


def tell_sample(rows: list[dict[str, Any]], count: int, seed: int) -> None:
    """Findings at random, at most one of each file."""
    pairs = [(row, one) for row in rows for one in row["findings"]]
    random.Random(seed).shuffle(pairs)
    seen: set[str] = set()
    for row, one in pairs:
        if row["target"] in seen or len(seen) >= count:
            continue
        seen.add(row["target"])
        print(f"{len(seen):2} {row['target']}:{one['line']} {one['severity'][0].upper()} {one['rule']} {one['what']}")


def main() -> None:
    """Check or sample."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("check", "sample"))
    parser.add_argument("where", type=Path)
    parser.add_argument("what")
    parser.add_argument("--cluster")
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.verb == "sample":
        tell_sample(json.loads(args.where.read_text()), int(args.what), args.seed)
        return
    tell_summary(check_folder(args.where, Path(args.what), args.cluster, args.share, args.seed))


if __name__ == "__main__":
    main()
