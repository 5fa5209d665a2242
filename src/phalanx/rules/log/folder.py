"""Reader of the small JSON files of a run folder: provenance, and the addresses that the run listened on."""

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
    """Return the content of launch.json; empty where the file is missing or damaged."""
    return _read_object(run, "launch.json")


def has_provenance(launch: Mapping[str, Any]) -> bool | None:
    """Return whether the launch record names versions, job digest and code; None without a launch record.

    An installed package has no commit: a digest of its files replaces it.
    """
    if not launch:
        return None
    provenance = at(launch, "provenance")
    versions = at(provenance, "versions")
    code = provenance.get("commit") or provenance.get("code")
    return all((versions.get("phalanx"), provenance.get("job_digest"), code))


def is_job_changed(run: Run, launch: Mapping[str, Any]) -> bool:
    """Return whether job.json differs from the digest in the launch record; False where one of them is missing."""
    digest, job = at(launch, "provenance").get("job_digest"), _read_object(run, "job.json")
    return bool(digest and job) and digest != job_digest(job)


def listens(run: Run, launch: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the addresses that coordinator, agents, store and metrics listened on."""
    return tuple(sorted(set(_listen_addresses(run, launch)))[:MOST_ADDRESSES])


def _listen_addresses(run: Run, launch: Mapping[str, Any]) -> Iterator[str]:
    coordinator = _read_object(run, "coordinator.json")
    addresses = launch.get("addresses")
    yield from (
        printable(address, most=100)
        for address in (addresses if isinstance(addresses, list) else ())
        if isinstance(address, str)
    )
    go = at(coordinator, "go")
    places = [coordinator.get("address"), go.get("store"), *at(go, "vaults").values(), *at(go, "peers").values()]
    # Since 0.7: by host and slot, the position, address and port of the process that takes its copies.
    for number in (0, 1):
        for slots_by_index in at(_read_object(run, f"coordinator-members-{number}.json"), "peers").values():
            slots = slots_by_index.values() if isinstance(slots_by_index, dict) else ()
            places += [entry[1:] for entry in slots if isinstance(entry, list)]
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
