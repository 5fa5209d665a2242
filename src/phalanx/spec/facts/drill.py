"""What drills have proved: the D of the rules' evidence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillFacts:
    """One drill on record. `signed`: its signature and the digests of its evidence are right."""

    path: str
    signed: bool
    version: str  # of the Phalanx that was drilled
    profile: str  # the specification's profile that it ran on, as "cpu-gloo"
    faults: tuple[str, ...]  # kinds injected: kill, hang, corrupt, save-kill, nan, flip, partition, slow …
    fired: tuple[str, ...]  # of these, the kinds that really happened
    clean: bool  # the oracle found nothing
    bitwise: bool  # every digest equals the replay without faults
    detect_s: tuple[float, ...] = ()
    recovery_s: tuple[float, ...] = ()
    named_right: bool | None = None  # a slow rank was injected and exactly it was named
    wrong: tuple[str, ...] = ()  # what the record or its oracle complains of
