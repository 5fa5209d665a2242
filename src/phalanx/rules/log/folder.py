"""What the small files of a run folder say: where it came from, and where it listened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.io.values import at, printable
from phalanx.record.provenance import job_digest
from phalanx.record.run import Run
from phalanx.record.run_files import read_json

MOST_ADDRESSES = 64


def launch_of(run: Run) -> Mapping[str, Any]:
    """launch.json; empty where it is missing or damaged."""
    return _read_object(run, "launch.json")


def has_provenance(launch: Mapping[str, Any]) -> bool | None:
    """Whether the launch says which versions ran, and which configuration and code; None where there is no launch.

    A package that was installed has no commit: a digest of its files stands for it.
    """
    if not launch:
        return None
    known = at(launch, "provenance")
    versions = at(known, "versions")
    code = known.get("commit") or known.get("code")
    return all((versions.get("phalanx"), known.get("job_digest"), code))


def is_job_changed(run: Run, launch: Mapping[str, Any]) -> bool:
    """Whether job.json is another than the launch says; False where one of them is missing."""
    reported, job = at(launch, "provenance").get("job_digest"), _read_object(run, "job.json")
    return bool(reported and job) and reported != job_digest(job)


def listens(run: Run, launch: Mapping[str, Any]) -> tuple[str, ...]:
    """Addresses that the coordinator, the agents, the store and the metrics listened on."""
    return tuple(sorted(set(_listen_addresses(run, launch)))[:MOST_ADDRESSES])


def _listen_addresses(run: Run, launch: Mapping[str, Any]) -> Iterator[str]:
    seen = _read_object(run, "coordinator.json")
    named = launch.get("addresses")
    yield from (printable(one, most=100) for one in (named if isinstance(named, list) else ()) if isinstance(one, str))
    go = at(seen, "go")
    places = [seen.get("address"), go.get("store"), *at(go, "vaults").values(), *at(go, "peers").values()]
    for number in (0, 1):  # since 0.7: by host and slot, place, address and port of who takes its copies
        for told in at(_read_object(run, f"coordinator-members-{number}.json"), "peers").values():
            slots = told.values() if isinstance(told, dict) else ()
            places += [one[1:] for one in slots if isinstance(one, list)]
    for place in places[:10_000]:
        if isinstance(place, list) and place and isinstance(place[0], str):
            yield printable(place[0], most=100)
    telemetry = at(_read_object(run, "job.json"), "telemetry")
    if telemetry.get("prometheus") and isinstance(telemetry.get("listen"), str):
        yield printable(telemetry["listen"].rpartition(":")[0].strip("[]") or telemetry["listen"], most=100)


def _read_object(run: Run, name: str) -> Mapping[str, Any]:
    try:
        return read_json(run.path / name)
    except (PhalanxError, OSError):
        return {}
