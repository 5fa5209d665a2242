"""Plans that took long to find are kept, so that checking a job again does not search a million layouts again.

A plan depends on its job, its cluster, and the code and tables of the planner; the name of the kept file is a digest of
all of them. What cannot be read is found again; what cannot be written is not kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from phalanx.errors import PhalanxError
from phalanx.hardware.types import Cluster
from phalanx.io.codec import json_values
from phalanx.io.files import read_bounded, replace_text
from phalanx.job.load import ResolvedJob
from phalanx.plan.make import make_plan
from phalanx.plan.plan import Plan

LEAST_S = 0.15  # of planning: a plan made sooner is not worth a file
MOST_KEPT = 64
MOST_BYTES = 8 * 2**20  # the largest plans have 0.1 MB
PARTS = ("job", "hardware", "network", "plan")  # of the package: what a plan depends on


def cached_plan(resolved: ResolvedJob, cluster: Cluster, *, environ: Mapping[str, str]) -> Plan:
    """The plan of a job on a cluster, from an earlier search where there was one. Raises what `plan` raises.

    But a run that would never finish is planned too: what is wrong with it can then be told.
    """
    folder = plan_cache_folder(environ)
    if folder is None:
        return make_plan(resolved, cluster, allow_unfinishable=True)
    path = folder / f"{_inputs_digest(resolved, cluster)}.json"
    known = _read_plan(path)
    if known is not None and known.job == resolved.job and known.cluster == cluster:
        return known
    began_s = time.perf_counter()
    found = make_plan(resolved, cluster, allow_unfinishable=True)
    if time.perf_counter() - began_s >= LEAST_S:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            replace_text(path, found.to_json())
            for old in sorted(folder.glob("*.json"), key=lambda one: one.stat().st_mtime)[:-MOST_KEPT]:
                old.unlink(missing_ok=True)
    return found


def plan_cache_folder(environ: Mapping[str, str]) -> Path | None:
    """Where plans are kept; None for a user without a home: the current folder may be a stranger's."""
    home = environ.get("HOME", "")
    cache = environ.get("XDG_CACHE_HOME") or (os.path.join(home, ".cache") if home else "")
    return Path(cache) / "phalanx" / "plans" if os.path.isabs(cache) else None


def _read_plan(path: Path) -> Plan | None:
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            return None
        return Plan.from_json(read_bounded(path, MOST_BYTES).decode(), where=str(path))
    except (OSError, ValueError, PhalanxError):
        return None


def _inputs_digest(resolved: ResolvedJob, cluster: Cluster) -> str:
    """Of everything a plan depends on; origins too, since warnings name the lines of the file."""
    origins = {key: [one.kind, one.where] for key, one in resolved.origins.items()}
    warned = [problem.render() for problem in resolved.warnings]
    statement = json.dumps(
        [json_values(resolved.job), json_values(cluster), origins, warned, _planner_files()], sort_keys=True
    )
    return hashlib.sha256(statement.encode()).hexdigest()[:40]


def _planner_files() -> list[tuple[str, int, int]]:
    """Every file of the planner with its size and time, so that a changed planner plans again."""
    root = Path(__file__).parents[1]
    files = sorted(path for part in PARTS for path in (root / part).rglob("*") if path.suffix in _COUNTED)
    return [(str(path.relative_to(root)), (one := path.stat()).st_size, one.st_mtime_ns) for path in files]


_COUNTED = (".py", ".csv", ".json", ".toml")
