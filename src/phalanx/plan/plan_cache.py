"""A cache of plans that took long to find, so that checking a job again does not search a million layouts again.

A plan depends on its job, its cluster, and the code and tables of the planner; the name of the cached file is a digest
of all of them. A file that cannot be read is planned again; a plan that cannot be written is not cached.
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

LEAST_S = 0.15  # seconds of planning: a plan made sooner is not worth a file
MOST_KEPT = 64
MOST_BYTES = 8 * 2**20  # the largest plans have 0.1 MB
PARTS = ("job", "hardware", "network", "plan")  # subpackages that a plan depends on


def cached_plan(resolved: ResolvedJob, cluster: Cluster, *, environ: Mapping[str, str]) -> Plan:
    """Return the plan of a job on a cluster, from the cache where it has one. Raises what `make_plan` raises.

    A run that would never finish is planned too, so that all its problems can be reported.
    """
    folder = plan_cache_folder(environ)
    if folder is None:
        return make_plan(resolved, cluster, allow_unfinishable=True)
    path = folder / f"{_inputs_digest(resolved, cluster)}.json"
    cached_plan_ = _read_plan(path)
    if cached_plan_ is not None and cached_plan_.job == resolved.job and cached_plan_.cluster == cluster:
        return cached_plan_
    start_s = time.perf_counter()
    plan = make_plan(resolved, cluster, allow_unfinishable=True)
    if time.perf_counter() - start_s >= LEAST_S:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            replace_text(path, plan.to_json())
            for old_path in sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)[:-MOST_KEPT]:
                old_path.unlink(missing_ok=True)
    return plan


def plan_cache_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of cached plans; None without a home, because the current folder may be another user's."""
    home = environ.get("HOME", "")
    cache = environ.get("XDG_CACHE_HOME") or (os.path.join(home, ".cache") if home else "")
    return Path(cache) / "phalanx" / "plans" if os.path.isabs(cache) else None


def _read_plan(path: Path) -> Plan | None:
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            return None
        return Plan.from_json(read_bounded(path, MOST_BYTES).decode(), where=str(path))
    except (OSError, ValueError, PhalanxError):
        return None


def _inputs_digest(resolved: ResolvedJob, cluster: Cluster) -> str:
    """Return a digest of everything a plan depends on; origins too, because warnings name the lines of the file."""
    origins = {key: [origin.kind, origin.where] for key, origin in resolved.origins.items()}
    warnings = [problem.render() for problem in resolved.warnings]
    statement = json.dumps(
        [json_values(resolved.job), json_values(cluster), origins, warnings, _planner_files()], sort_keys=True
    )
    return hashlib.sha256(statement.encode()).hexdigest()[:40]


def _planner_files() -> list[tuple[str, int, int]]:
    """Return every file of the planner with its size and time, so that a changed planner plans again."""
    root = Path(__file__).parents[1]
    files = sorted(path for part in PARTS for path in (root / part).rglob("*") if path.suffix in _COUNTED)
    return [(str(path.relative_to(root)), (status := path.stat()).st_size, status.st_mtime_ns) for path in files]


_COUNTED = (".py", ".csv", ".json", ".toml")
