"""Read and write the files of a run folder, and find the ranks with events by the names of the files."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from phalanx.errors import PhalanxError, UserError, mistake
from phalanx.io.files import FileTooLargeError, load_json, replace_text
from phalanx.io.values import at, integer
from phalanx.io.write_errors import write_failure
from phalanx.record.events import SETTLED_NS
from phalanx.record.host_file import HOST_FILE, SessionCounts, session_counts

EVENTS = re.compile(r"events-(\d{5}|[1-9]\d{5,6})(?:-(\d{4,9}))?\.jsonl")
PLAN = re.compile(r"plan(?:-\d{1,9})?\.json")
BEYOND = 10**9  # more ranks than any run has: no upper limit


def has_events(names: Iterable[str]) -> bool:
    """Return True if one of these names is an event file of a rank, or of all ranks of a host."""
    return any(EVENTS.fullmatch(name) or HOST_FILE.fullmatch(name) for name in names)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a run; raise UserError if it is missing or damaged."""
    try:
        if not path.is_file() and path.exists():  # opening a pipe would block forever
            raise mistake(str(path), "is not a file", why="the run is damaged")
        data = load_json(path)
    except OSError as error:
        raise mistake(str(path), f"cannot be read: {error.strerror or error}", why="the run is damaged") from error
    except FileTooLargeError as error:
        raise mistake(str(path), str(error), why="the run is damaged") from error
    except ValueError as error:
        raise mistake(str(path), "is not JSON", why="the run is damaged") from error
    if not isinstance(data, dict):
        raise mistake(str(path), "is not a JSON object", why="the run is damaged")
    return data


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Replace a JSON file of a run; raise SystemFailure if it cannot be written."""
    write_run_file(path, json.dumps(values, indent=1, ensure_ascii=False) + "\n")


def write_run_file(path: Path, text: str) -> None:
    """Replace a file of a run; raise SystemFailure if it cannot be written."""
    try:
        replace_text(path, text)
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> PhalanxError:
    """Return the error to raise for a file of a run that could not be written."""
    return write_failure(path, error, fix="free some space, or use another --runs")


# ---- names in the folder ---------------------------------------------------------------------------------------------


def list_event_parts(folder: Path) -> tuple[dict[int, list[int]], int]:
    """Return every rank with events and the numbers of its closed parts, in order, and the number of stray files.

    Stray files are event files of ranks that no plan and no launch of the run had.
    """
    try:
        names = list_names(folder)
    except OSError:
        return {}, 0
    parts, counts = names.parts, names.counts
    sessions = session_counts(folder)
    if sessions.by_rank:
        parts, counts = _with_sessions(names, sessions)
    most = _most_ranks(folder, names.settings)
    if not parts or next(reversed(parts)) < most:
        return parts, 0
    known_ranks = {rank: closed for rank, closed in parts.items() if rank < most}
    strays = sum(counts[rank] for rank in parts if rank >= most)
    return known_ranks, strays


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class ListedNames:
    """The contents of a run folder, by the names of its files. Immutable."""

    parts: dict[int, list[int]]  # for every rank with events, in order, the numbers of its closed parts
    counts: dict[int, int]  # for every rank, the number of its event files
    settings: tuple[str, ...]  # names of plan files and launch.json
    live: frozenset[int] = frozenset()  # ranks whose own event file still grows


# A report calls this a dozen times, and with 16,384 ranks each call takes 20 ms.
@lru_cache(maxsize=4)
def _with_sessions(names: ListedNames, sessions: SessionCounts) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Add the sessions in host files to parts and counts: every session but the newest is a closed part."""
    if not names.parts:
        # Shared by all ranks with a single session, perhaps 131,072: must not be modified.
        empty: list[int] = []
        counted = sorted(sessions.by_rank.items())
        return {rank: list(range(1, count)) if count > 1 else empty for rank, count in counted}, sessions.by_rank
    parts, counts = dict(names.parts), dict(names.counts)
    for rank, count in sessions.by_rank.items():
        closed = count - (rank not in names.live)
        closed_parts = parts.get(rank)
        parts[rank] = sorted({*closed_parts, *range(1, closed + 1)}) if closed_parts else list(range(1, closed + 1))
        counts[rank] = counts.get(rank, 0) + count
    return dict(sorted(parts.items())), counts


def list_names(folder: Path) -> ListedNames:
    """List the names in a run folder; a folder that has not changed for a while is listed only once."""
    folder_stat = os.stat(folder)
    is_settled = time.time_ns() - folder_stat.st_mtime_ns > SETTLED_NS
    read_names = _read_names if is_settled else _read_names.__wrapped__
    return read_names(os.fspath(folder), folder_stat.st_ino, folder_stat.st_mtime_ns)


@lru_cache(maxsize=4)
def _read_names(folder: str, inode: int, changed_ns: int) -> ListedNames:
    names = os.listdir(folder)
    parts_by_rank: dict[int, list[int]] = {}
    counts: dict[int, int] = {}
    live: set[int] = set()
    for name in names:
        if not name.startswith("events-") or not name.endswith(".jsonl") or name.startswith("events-host-"):
            continue
        # events-00000.jsonl, the form of nearly all names
        if len(name) == 18 and name[7:12].isdecimal() and name.isascii():
            rank = int(name[7:12])
            parts_by_rank.setdefault(rank, [])
            counts[rank] = counts.get(rank, 0) + 1
            live.add(rank)
            continue
        if (match := EVENTS.fullmatch(name)) is None:
            continue
        rank = int(match.group(1))
        closed = parts_by_rank.setdefault(rank, [])
        counts[rank] = counts.get(rank, 0) + 1
        if match.group(2):
            closed.append(int(match.group(2)))
        else:
            live.add(rank)
    settings = tuple(name for name in names if name == "launch.json" or (name[:4] == "plan" and PLAN.fullmatch(name)))
    parts = {rank: sorted(parts_by_rank[rank]) for rank in sorted(parts_by_rank)}
    return ListedNames(parts=parts, counts=counts, settings=settings, live=frozenset(live))


def _most_ranks(folder: Path, names: Sequence[str]) -> int:
    """Return the largest world size of all plans and of the launch; BEYOND if one of them cannot be read."""
    worlds = [_world_in(folder / name) for name in names if PLAN.fullmatch(name)]
    if "launch.json" in names:
        worlds.append(_world_in(folder / "launch.json"))
    return max(worlds) if worlds and "plan.json" in names else BEYOND


def _world_in(path: Path) -> int:
    """Return the world size in a plan or launch file; BEYOND if it has none."""
    try:
        file_stat = path.stat()
    except OSError:
        return BEYOND
    return _read_world(str(path), file_stat.st_ino, file_stat.st_mtime_ns, file_stat.st_size)


# Cached by the state of the file: a reader that follows a run calls this twice a second.
@lru_cache(maxsize=256)
def _read_world(path: str, inode: int, changed_ns: int, size: int) -> int:
    try:
        values = read_json(Path(path))
    except UserError:
        return BEYOND
    if Path(path).name == "launch.json":
        return max(0, integer(values, "world") or 0)
    return layout_world(at(values, "layout")) or BEYOND


def layout_world(layout: Any) -> int | None:
    """Return the number of devices of a layout; None if `layout` is not a layout."""
    axes = ("data", "tensor", "context", "pipeline")
    return math.prod(max(1, integer(layout, axis) or 1) for axis in axes) if integer(layout, "data") else None
