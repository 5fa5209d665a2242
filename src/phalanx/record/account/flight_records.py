"""Flight recorders: the collective in which ranks hung, and the ranks that did not enter it.

torch numbers the collectives of every process group on every rank. If ranks wait in number 41 of a group and one of
its members has only reached number 40, they wait for that member, unless it waits itself in another group. Ranks write
the newest entries of their recorder to flight/ of the run folder when a membership ends (train/flight.py). A rank that
was killed or stopped writes nothing, which is evidence as well.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.io.files import load_json
from phalanx.io.values import integer, printable, text
from phalanx.record.run import Run
from phalanx.units import first_few

MOST_BYTES = 2**20  # of one rank's file; usual files have some kB
MOST_FILES = 20_000
FILE = re.compile(r"epoch-(\d{1,9})-rank-(\d{1,9})\.json")
# Collectives whose sizes may differ between the ranks of a group.
UNEVEN = ("all_to_all", "alltoall", "gather", "scatter", "send", "recv", "coalesced", "broadcast")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One collective, or one message between two ranks, as recorded by one rank."""

    group: str  # torch's name of the process group
    op: str  # all_reduce, …
    number: int  # within its group
    is_message: bool  # a send or receive; these are numbered separately
    is_done: bool
    sizes: str = ""
    peer: int | None = None  # global rank at the other end of a message


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessGroup:
    """A process group: its axis in the mesh, and its global ranks."""

    label: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Flight:
    """The entries of one rank's flight recorder."""

    rank: int
    groups: Mapping[str, ProcessGroup]
    entries: tuple[Entry, ...]

    @property
    def waits(self) -> bool:
        """True if a collective or message that the rank began has not ended."""
        return any(not entry.is_done for entry in self.entries)


@dataclass(frozen=True, kw_only=True, slots=True)
class HangCulprit:
    """The conclusion from the flight recorders, in a sentence, and the ranks to blame as far as known."""

    sentence: str
    culprits: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wait:
    """Ranks that wait in one collective of a group, and members that did not enter it."""

    label: str
    members: tuple[int, ...]
    number: int
    entries: Mapping[int, Entry]  # of this number, by rank
    missing: Mapping[int, int | None]  # by rank, the number it had reached; None where it left no record

    @property
    def waiting(self) -> list[int]:
        return sorted(rank for rank, entry in self.entries.items() if not entry.is_done)

    @property
    def name(self) -> str:
        first = self.entries[min(self.entries)]
        sizes = f", sizes {first.sizes}" if first.sizes else ""
        return f"{first.op} number {self.number} of group {self.label} ({_ranks_text(self.members)}{sizes})"


def find_culprit(flights: Iterable[Flight]) -> HangCulprit | None:
    """Determine which ranks the others of a membership waited for; None if no rank waited."""
    flight_by_rank = {flight.rank: flight for flight in flights}
    waits = _group_waits(flight_by_rank)
    for wait in waits:
        if differing := _call_mismatch(wait):
            return differing
    idle = {rank for rank, flight in flight_by_rank.items() if not flight.waits}
    blamed = [(wait, [rank for rank in wait.missing if rank in idle or rank not in flight_by_rank]) for wait in waits]
    blamed = [(wait, ranks) for wait, ranks in blamed if ranks]
    if blamed:
        wait, culprits = max(blamed, key=lambda blamed_wait: (len(blamed_wait[0].waiting), -blamed_wait[0].number))
        return HangCulprit(sentence=f"{wait.name}: {_who_is_late(wait, culprits)}", culprits=tuple(culprits))
    if message := _silent_peer(flight_by_rank, idle):
        return message
    if late := [wait for wait in waits if wait.missing]:
        waits_text = "; ".join(f"{wait.name}: {_who_is_late(wait, sorted(wait.missing))}" for wait in late[:2])
        return HangCulprit(sentence=f"ranks wait for each other: {waits_text}")
    if waits:
        inside = "every rank entered it and none came out: the network, a GPU, or a rank that died in it"
        return HangCulprit(sentence=f"{waits[0].name}: {inside}")
    return None


def _group_waits(known: Mapping[int, Flight]) -> list[_Wait]:
    """Return every group in which some rank waits, with the first collective that did not end."""
    groups = {name: group for flight in known.values() for name, group in flight.groups.items()}
    waits = []
    for name, group in groups.items():
        entries_by_rank = {
            rank: {entry.number: entry for entry in flight.entries if entry.group == name and not entry.is_message}
            for rank, flight in known.items()
            if rank in group.ranks
        }
        pending = [
            entry.number for entries in entries_by_rank.values() for entry in entries.values() if not entry.is_done
        ]
        if not pending:
            continue
        number = min(pending)
        newest = {rank: max(entries, default=0) for rank, entries in entries_by_rank.items()}
        waits.append(
            _Wait(
                label=group.label,
                members=group.ranks,
                number=number,
                entries={rank: entries[number] for rank, entries in entries_by_rank.items() if number in entries},
                missing={rank: newest.get(rank) for rank in group.ranks if newest.get(rank, -1) < number},
            )
        )
    return sorted(waits, key=lambda wait: (-len(wait.waiting), wait.label, wait.number))


def _call_mismatch(wait: _Wait) -> HangCulprit | None:
    """Return a finding if ranks called different collectives under one number, or the same one with different sizes."""
    calls: dict[tuple[str, str], list[int]] = {}
    for rank, entry in sorted(wait.entries.items()):
        sizes = "" if any(word in entry.op for word in UNEVEN) and "all_gather" not in entry.op else entry.sizes
        calls.setdefault((entry.op, sizes), []).append(rank)
    if len(calls) < 2:
        return None
    calls_text = " and ".join(
        f"{op} {sizes}".strip() + f" on {_ranks_text(ranks)}" for (op, sizes), ranks in calls.items()
    )
    few = min(calls.values(), key=len)
    culprits = tuple(few) if 2 * len(few) < len(wait.entries) else ()
    return HangCulprit(
        sentence=f"number {wait.number} of group {wait.label} is {calls_text}: the ranks do not run the same program",
        culprits=culprits,
    )


def _silent_peer(known: Mapping[int, Flight], idle: Collection[int]) -> HangCulprit | None:
    """Return a finding if ranks wait for a message of a rank (pipeline stages) that waits for nothing itself."""
    waiting: dict[int, list[tuple[int, Entry]]] = {}
    for rank, flight in sorted(known.items()):
        for entry in flight.entries:
            if entry.is_message and not entry.is_done and entry.peer is not None:
                waiting.setdefault(entry.peer, []).append((rank, entry))
    for peer, messages in sorted(waiting.items(), key=lambda peer_messages: (-len(peer_messages[1]), peer_messages[0])):
        if peer not in known or peer in idle:
            rank, entry = messages[0]
            label = known[rank].groups[entry.group].label if entry.group in known[rank].groups else entry.group
            record = "left no record" if peer not in known else "waits for nobody itself"
            ranks = _ranks_text(sorted({waiting_rank for waiting_rank, _ in messages}))
            direction = "a message to" if entry.op == "send" else "a message from"
            verb = "waits" if len({waiting_rank for waiting_rank, _ in messages}) == 1 else "wait"
            return HangCulprit(
                sentence=f"{ranks} {verb} for {direction} rank {peer} (number {entry.number} of group {label}), "
                f"which {record}",
                culprits=(peer,),
            )
    return None


def _who_is_late(wait: _Wait, culprits: Sequence[int]) -> str:
    # Not only those still waiting: gloo aborts an operation as soon as the connection to a dead rank breaks.
    entered = f"{_ranks_text(sorted(wait.entries))} entered it"
    silent = [rank for rank in culprits if wait.missing[rank] is None]
    ranks_by_number: dict[int, list[int]] = {}
    for rank in culprits:
        if (last := wait.missing[rank]) is not None:
            ranks_by_number.setdefault(last, []).append(rank)
    parts = [f"{_ranks_text(silent)} left no record of entering it"] if silent else []
    for last, ranks in sorted(ranks_by_number.items()):
        came = f"came to number {last}" if last else "recorded none of this group"
        parts.append(f"{_ranks_text(ranks)} did not: {came}")
    return ", ".join([entered, *parts])


def _ranks_text(ranks: Sequence[int]) -> str:
    """Format ranks as text, with consecutive ranks as a range.

    >>> _ranks_text([0, 1, 2, 3]), _ranks_text([2]), _ranks_text([0, 1, 3])
    ('ranks 0–3', 'rank 2', 'ranks 0, 1, 3')
    """
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}–{ranks[-1]}"
    few = first_few(ranks, 8)
    return f"rank{'s' if len(ranks) != 1 else ''} {few}"


def recorded_generations(run: Run) -> list[int]:
    """Return the memberships (generations) whose ranks left flight records, in order."""
    try:
        matches = [FILE.fullmatch(name) for name in os.listdir(run.path / "flight")]
    except OSError:
        return []
    return sorted({int(match.group(1)) for match in matches if match is not None})


def read_flights(run: Run, generation: int, *, most: int = MOST_FILES) -> list[Flight]:
    """Read the flight records of a membership; skip invalid files. Return an empty list if there are more than `most`.

    Not a part of them: ranks whose file was not read would look as if they had left none.
    """
    try:
        matches = [FILE.fullmatch(name) for name in sorted(os.listdir(run.path / "flight"))]
    except OSError:
        return []
    matches_of_generation = [match for match in matches if match is not None and int(match.group(1)) == generation]
    flights = []
    for match in matches_of_generation if len(matches_of_generation) <= most else ():
        try:
            data = load_json(run.path / "flight" / match.group(), MOST_BYTES)
        except (OSError, ValueError):
            continue
        if isinstance(data, dict):
            flights.append(flight_of(data, rank=int(match.group(2))))
    return flights


def flight_of(data: Mapping[str, Any], *, rank: int) -> Flight:
    """Convert one rank's file to a value; skip invalid entries."""
    groups, entries = data.get("groups"), data.get("entries")
    groups_by_name = {}
    for name, entry_table in groups.items() if isinstance(groups, dict) else ():
        ranks = entry_table.get("ranks") if isinstance(entry_table, dict) else None
        if isinstance(ranks, list) and all(isinstance(member, int) for member in ranks):
            groups_by_name[str(name)] = ProcessGroup(
                label=printable(entry_table.get("label") or name, most=60), ranks=tuple(sorted(ranks))
            )
    valid_entries = []
    for entry_table in entries if isinstance(entries, list) else ():
        number = integer(entry_table, "number") if isinstance(entry_table, dict) else None
        if number is not None:
            valid_entries.append(
                Entry(
                    group=text(entry_table, "group"),
                    op=printable(entry_table.get("op") or "?", most=60),
                    number=number,
                    is_message=entry_table.get("is_message") is True,
                    is_done=entry_table.get("is_done") is True,
                    sizes=printable(entry_table.get("sizes") or "", most=80),
                    peer=integer(entry_table, "peer"),
                )
            )
    return Flight(rank=rank, groups=groups_by_name, entries=tuple(valid_entries))
