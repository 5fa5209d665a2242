"""Description of the communication library: time to create process groups, library version, and settings in force.

torch prints the NCCL version it was compiled against; the one that is loaded may differ (LD_PRELOAD, a module
system), so the library itself is queried. Settings come from the environment and from files that NCCL reads by
itself.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined, unused-ignore]

from phalanx.elastic.gpus import loaded_nccl
from phalanx.record.events import EventWriter
from phalanx.record.provenance import redact
from phalanx.train.parallel.dims import GroupTime
from phalanx.units import first_few

PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "GLOO_")
MOST_VARIABLES, MOST_VALUE = 200, 300  # an event is one line
MOST_DIFFERENCES = 32
# Timeout for the settings of the other ranks, which have all just joined
MEETING_S = 60.0
_FILE_LINE = re.compile(r"\s*(NCCL_[A-Z0-9_]{1,80})\s*=\s*([^\n]{0,300}?)\s*")
_LIBRARY = re.compile(r"/lib(?:nccl|rccl)[^/]*\.so[^/]*$")


def settings_in_force(
    environ: Mapping[str, str] = os.environ, *, root: Path = Path("/"), home: Path | None = None
) -> dict[str, str]:
    """Return the variables of NCCL, gloo and the flight recorder.

    Values from NCCL's files are followed by the file's name. NCCL reads ~/.nccl.conf (or NCCL_CONF_FILE), then
    /etc/nccl.conf; neither overrides a variable that is set already.
    """
    settings = {name: value for name, value in environ.items() if name.startswith(PREFIXES)}
    conf_file = environ.get("NCCL_CONF_FILE")
    for path in (Path(conf_file) if conf_file else (home or Path.home()) / ".nccl.conf", root / "etc/nccl.conf"):
        with suppress(OSError):
            for line in path.read_text(encoding="utf-8", errors="replace")[: 2**16].splitlines():
                if (match := _FILE_LINE.fullmatch(line.partition("#")[0])) and match.group(1) not in settings:
                    settings[match.group(1)] = f"{match.group(2)} ({path})"
    listed = sorted(settings.items())[:MOST_VARIABLES]
    return {name: redact(value, environ)[:MOST_VALUE] for name, value in listed}


def mapped_libraries(maps: str) -> list[str]:
    """Return the files of NCCL and RCCL among those a process has mapped (/proc/self/maps), plugins included."""
    names = {line.rsplit(maxsplit=1)[-1] for line in maps.splitlines() if "/" in line}
    return sorted(name for name in names if _LIBRARY.search(name))


def describe_library(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Describe the library that this process has loaded."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        maps = ""
    libraries = mapped_libraries(maps)
    built = ""
    if torch.cuda.is_available():
        # A build without NCCL
        with suppress(Exception):
            built = ".".join(str(number) for number in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    library = loaded_nccl()
    return {
        "version": ".".join(map(str, library.version)) if library is not None else None,
        "built_version": built or None,
        "libraries": libraries,
        "preloaded": [path for path in re.split(r"[ :]+", environ.get("LD_PRELOAD", "")) if path],
    }


def name_differences(first: Mapping[str, str], others: Mapping[int, Mapping[str, str | None]]) -> list[str]:
    """Return sentences about settings that differ from rank 0's.

    `first` are rank 0's settings, `others` each rank's differing values, None for an unset variable.

    >>> name_differences({"NCCL_ALGO": "Ring"}, {2: {"NCCL_ALGO": None}, 3: {"NCCL_ALGO": None}})
    ['NCCL_ALGO is Ring on rank 0 and not set on ranks 2, 3']
    """
    reported: dict[tuple[str, str | None], list[int]] = {}
    for rank, values in sorted(others.items()):
        for name, value in sorted(values.items()):
            reported.setdefault((name, value), []).append(rank)
    sentences = []
    for (name, value), ranks in reported.items():
        first_value = first.get(name)
        rank_list = first_few(ranks, 8)
        sentences.append(
            f"{name} is {first_value if first_value is not None else 'not set'} on rank 0 and "
            f"{value if value is not None else 'not set'} on rank{'s' if len(ranks) > 1 else ''} {rank_list}"
        )
    return sentences[:MOST_DIFFERENCES] + (["and more"] if len(sentences) > MOST_DIFFERENCES else [])


# These differ between ranks by their nature.
_OWN = ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG_FILE")


def compare_settings(store: Store, mine: Mapping[str, str], *, rank: int, world: int) -> list[str]:
    """Return the differences between ranks as sentences on rank 0, nothing elsewhere. Every rank must call this."""
    prefix = "communicators"
    if rank == 0:
        store.set(f"{prefix}/0", json.dumps(dict(mine)))
        names = [f"{prefix}/{other_rank}" for other_rank in range(1, world)]
        if not names:
            return []
        store.wait(names, timedelta(seconds=MEETING_S))
        answers = store.multi_get(names) if hasattr(store, "multi_get") else [store.get(name) for name in names]
        values_by_rank = {other_rank: json.loads(answer) for other_rank, answer in enumerate(answers, start=1)}
        return name_differences(mine, {other_rank: values for other_rank, values in values_by_rank.items() if values})
    first = json.loads(store.get(f"{prefix}/0"))
    differing = [name for name in {**first, **mine} if first.get(name) != mine.get(name) and name not in _OWN]
    store.set(f"{prefix}/{rank}", json.dumps({name: mine.get(name) for name in differing[:MOST_DIFFERENCES]}))
    return []


def tell_communicators(
    events: EventWriter,
    store: Store | None,
    times: Iterable[GroupTime],
    *,
    joined_s: float,
    generation: int,
    device: torch.device,
    notes: Sequence[str] = (),
) -> None:
    """Write an event on how the groups of a membership were created. Every rank must call this."""
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [GroupTime(group="world", ranks=world, count=1, seconds=joined_s), *times]
    settings, differences = settings_in_force(), list[str]()
    if store is not None:
        # A report must not end a run
        with suppress(RuntimeError, ValueError):
            differences = compare_settings(store, settings, rank=rank, world=world)
    described: dict[str, Any] = {"variables": settings, "differences": differences, "notes": list(notes)}
    fields = {} if rank else {**describe_library(), **described}
    events.write(
        "communicators",
        epoch=generation,
        backend="nccl" if device.type == "cuda" else "gloo",
        # With a device_id torch creates NCCL's communicators at once, and splits the others off it; gloo always
        # connects.
        mode="eager",
        seconds=round(sum(group_time.seconds for group_time in groups), 6),
        groups=[asdict(group_time) | {"seconds": round(group_time.seconds, 6)} for group_time in groups],
        **fields,
    )
