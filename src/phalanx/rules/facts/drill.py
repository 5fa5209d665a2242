"""What drills have proved: the D of the rules' evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.units import plural


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillFacts:
    """One drill on record, the newest first by the time that was signed. Rules ask `proofs` and `proof` which count.

    `signed`: its signature is right, and so are the digests of its evidence where that lies beside it. Kinds of faults
    are those of docs/drills.md, and beside them `save-kill` (SIGKILL at a point of a save) and `corrupt` (a checkpoint
    was damaged; in `fired` only when a restore met it and went further back).
    """

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
    current: bool = True  # the code, file by file, is that of the Phalanx that checks
    save_points: tuple[str, ...] = ()  # points of a save at which a rank was killed
    part: str = ""  # of the suite
    world: int = 0  # ranks of the drilled job; 0 is not said
    replayed: bool = True  # a replay without faults was made to compare with; else `bitwise` says nothing
    job: str = ""  # name of the drilled job
    other: str = ""  # how the drilled job differs from the one that is checked, in a clause; empty: it is the same
    made: str = ""  # day on which it was signed, as "2026-11-16"

    @property
    def told(self) -> str:
        """Which drill this is, for a finding."""
        parts = [self.job, plural(self.world, "rank") if self.world else "", self.made]
        return f"{self.path} ({', '.join(part for part in parts if part)})" if any(parts) else self.path


def proofs(drills: Sequence[DrillFacts], *, profile: str) -> tuple[DrillFacts, ...]:
    """The records that count: signed, of this code, of this profile, and of the job that is checked."""
    return tuple(one for one in drills if one.signed and one.current and one.profile == profile and not one.other)


def proof(drills: Sequence[DrillFacts], *, profile: str, kind: str) -> DrillFacts | None:
    """The newest record that counts and in which a fault of this kind happened; clean or not."""
    return next((one for one in proofs(drills, profile=profile) if kind in one.fired), None)


def why_none(drills: Sequence[DrillFacts], *, profile: str) -> str:
    """Why the records there are do not count, in a clause; empty when there is none, or when some do."""
    if not drills or proofs(drills, profile=profile):
        return ""
    first = drills[0]
    if not first.signed:
        return f"the record {first.path} does not count: {first.wrong[0] if first.wrong else 'it is not signed'}"
    if first.profile != profile:
        return f"the newest record is of {first.profile or 'an unknown profile'}, not of {profile}"
    if first.other:
        return f"the newest record is of another job ({first.other})"
    return f"the newest record is of other code than this Phalanx (it was {first.version})"
