"""The events of one rank, and those of the supervisor: checked, put in order, and passed to the counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.io.files import Spot
from phalanx.io.values import at, integer, number, printable
from phalanx.record.account.ledger import LedgerStream
from phalanx.record.event_batches import EventBatch, EventFeed, EventParser, LineBlock
from phalanx.record.event_schema import EventColumns, known_kinds
from phalanx.record.events import Event
from phalanx.rules.log.agreement import LATE_S, Clocks, Digests, Key, LoggedMemberships
from phalanx.rules.log.devices import Gaps, Meter, Monitors, PeerDelays
from phalanx.rules.log.grammar import BACK_S, Grammar
from phalanx.rules.log.saves import Pending, Restore, Rollback, Saves, restore_of, rollback_of
from phalanx.rules.log.secrets import Secrets
from phalanx.rules.log.steps import Steps

MOST_SKIPS = 256  # skipped steps remembered per rank
MOST_GENERATIONS = 256
MOST_S = 1e9  # of a step: 30 years are a damaged number
STARTS = frozenset(("ready", "run_start"))
# Kinds with many events and without free text: only fields that a writer added are searched for credentials.
NUMBERS = frozenset(("step", "monitor", "peers", "timeline", "evaluate"))


class Counted:
    """The counters of all ranks together."""

    def __init__(self, memberships: LoggedMemberships) -> None:
        self.memberships = memberships
        self.lines, self.grammar, self.secrets = EventParser(), Grammar(), Secrets()
        self.digests, self.clocks = Digests(), Clocks()
        self.monitors, self.peers, self.saves = Monitors(), PeerDelays(), Saves()
        self.steps = Steps()


class RankLog:
    """Reads blocks of one rank's files, in order."""

    def __init__(self, rank: int, feed: EventFeed, counted: Counted, *, witness: bool) -> None:
        self.rank, self.feed, self._all, self._is_witness = rank, feed, counted, witness
        self._last_s = 0.0
        self._last_step = -1
        # A start was logged since the last step, so the next step may be an earlier one.
        self._is_begun = True
        self._generation = self._late_generation = -1
        self.kinds: dict[str, int] = {}  # number of events of each known kind
        self.states: list[str] = []  # of `run_end`
        self._started = -1  # newest generation of a `run_start`
        # `run_start`s of a generation that this rank had begun or left.
        self.begun_again = 0
        # Generation -> first and last step, while steps follow each other.
        self.spans: dict[int, tuple[int, int]] = {}
        self.is_whole = True  # no line and no step is missing
        self.skips: dict[Key, Spot] = {}
        self.offsets: list[float] = []
        self.took_s = self.waited_s = 0.0
        self.telemetry_s: float | None = None
        self.steps = 0
        self.peak_bytes = 0.0
        # World size and layout of the present membership.
        self._layout: tuple[Any, dict[str, Any]] | None = None
        self.retries: int | None = None
        self.monitor_gaps, self.peer_gaps, self.meter, self._pending = Gaps(), Gaps(), Meter(), Pending()
        self.restores: list[Restore] = []
        self.passing: LedgerStream | None = None  # another reader of the same events

    def take(self, piece: LineBlock) -> None:
        """Add the next lines."""
        batch = self._all.lines.batch(piece)
        if self.passing is not None:
            self.passing.take(batch)
        if batch.bad:
            self._all.grammar.unread(piece, batch.bad)
            self._all.secrets.look_at(piece, batch.bad)
            self.is_whole = False
        if not batch.events:
            return
        for segment in batch.parts([place for place, kind in batch.others if kind in STARTS]):
            self._take_segment(segment, piece.file)

    def _take_segment(self, batch: EventBatch, file: str) -> None:
        """Add events without a start between them: their steps go up."""
        self._check_times(batch.times, file, batch.lines)
        for kind in batch.kinds:
            columns, lines = batch.columns(kind)
            if kind not in known_kinds():
                self._all.grammar.strange(kind, len(columns))
                self._all.secrets.look_in(columns.events, file, lines)
            else:
                self._take_kind(kind, columns, lines, file)

    def _take_kind(self, kind: str, columns: EventColumns, lines: Sequence[int], file: str) -> None:
        invalid_places = self._all.grammar.valid(columns, file, lines)
        if invalid_places or set(columns.get("rank")) != {self.rank}:
            events = columns.events
            good = [
                place
                for place in range(len(events))
                if place not in (invalid_places or ()) and events[place].get("rank") == self.rank
            ]
            strange = len(events) - len(good) - len(invalid_places or ())
            if strange:  # events of another rank in this rank's file
                self._all.grammar.disorder(file, lines[0], strange)
            self.is_whole = False
            for place in set(range(len(events))).difference(good):
                self._all.secrets.look_in([events[place]], file, [lines[place]])
            if not good:
                return
            lines = [lines[place] for place in good]
            columns = columns.pick(good)
        if columns.is_doubted or invalid_places:
            columns = columns.whole()
        self.kinds[kind] = self.kinds.get(kind, 0) + len(columns)
        if kind not in NUMBERS:
            self._all.secrets.look_in(columns.events, file, lines)
        else:
            self._all.secrets.look_through(columns, file, lines)
        self._hand_on(kind, columns, file, lines)

    def _hand_on(self, kind: str, columns: EventColumns, file: str, lines: Sequence[int]) -> None:
        if kind == "step":
            self._take_steps(columns, file, lines)
        elif kind in STARTS:
            self._take_start(kind, columns, file, lines)
        elif kind == "monitor":
            self.monitor_gaps.take(columns.get("t"), columns.get("epoch"))
            self._all.monitors.take(columns, self.meter)
            # Counted since the process began: the newest value is the largest, except after the process was
            # replaced.
            retry_counts = [retries for retries in columns.get("allocation_retries") if retries is not None]
            if retry_counts:
                self.retries = max(self.retries or 0, *retry_counts)
        elif kind == "peers":
            self.peer_gaps.take(columns.get("t"), columns.get("epoch"))
            self._all.peers.take(columns)
        elif kind == "checkpoint":
            self._all.saves.take(columns, file, lines, self._pending, witness=self._is_witness)
        elif kind == "run_end":
            # The newest 16, so that memory stays bounded.
            self.states = (self.states + [str(state) for state in columns.get("state")])[-16:]

    def _take_start(self, kind: str, columns: EventColumns, file: str, lines: Sequence[int]) -> None:
        self._is_begun = True
        self.monitor_gaps.begin()
        self.peer_gaps.begin()
        if kind == "run_start":
            generation = columns.get("epoch")[0] or 0
            self.begun_again += generation <= self._started
            self._started = max(self._started, generation)
            self._in_layout(columns.get("world")[0], self._all.memberships.layout(generation))
        if self._is_witness:
            self._all.steps.begin()
            restore = restore_of(columns.events[0], Spot(file=file, line=lines[0])) if kind == "ready" else None
            if restore is not None and restore[1] != "start" and len(self.restores) < MOST_GENERATIONS:
                self.restores.append(restore)

    def _in_layout(self, world: Any, layout: Mapping[str, Any]) -> None:
        """Reset times and memory when the layout changes, since they do not describe the new one."""
        before, self._layout = self._layout, (world, dict(layout))
        if before in (None, self._layout):
            return
        self.took_s = self.waited_s = self.peak_bytes = 0.0
        self.telemetry_s, self.steps = None, 0
        if self._is_witness:
            self._all.steps.begin_layout()

    # ---- order

    def _check_times(self, times: Sequence[Any], file: str, lines: Sequence[int]) -> None:
        try:
            if times[0] >= self._last_s and times == sorted(times):
                self._last_s = times[-1]
                return
        except TypeError:
            # A time that is not a number is reported by the schema check.
            pass
        for time_s, line in zip(times, lines, strict=True):
            if type(time_s) not in (int, float):
                continue
            if time_s < self._last_s - BACK_S:
                self._all.grammar.disorder(file, line)
                # Count a clock that was set once, not at every later event.
                self._last_s = time_s
            self._last_s = max(self._last_s, time_s)

    def _take_steps(self, columns: EventColumns, file: str, lines: Sequence[int]) -> None:
        steps = columns.get("step")
        follows = steps[0] == self._last_step + 1 or self._is_begun
        if not (follows and steps[-1] - steps[0] == len(steps) - 1 and steps == tuple(range(steps[0], steps[-1] + 1))):
            keep = self._ordered_steps(steps, file, lines)
            if not keep:
                return
            columns, lines = columns.pick(keep), [lines[place] for place in keep]
            steps = columns.get("step")
        self._is_begun, self._last_step = False, steps[-1]
        self._note_generations(columns, file, lines)
        self._note_skips(columns, file, lines)
        self._sum_times(columns)
        self.monitor_gaps.step(columns.get("t"))
        self.peer_gaps.step(columns.get("t"))
        if columns.has("digest") and any(columns.get("digest")):
            memberships = self._all.memberships
            self._all.digests.take(columns, self.rank, file, lines, where=memberships, witness=self._is_witness)
        if self._is_witness:
            self._all.clocks.know(columns)
            self._all.steps.take(columns, file, lines)
        else:
            self._all.clocks.compare(columns, self.offsets)

    def _ordered_steps(self, steps: Sequence[int], file: str, lines: Sequence[int]) -> list[int]:
        """Return the positions of the steps that go up: a step may not go back unless the run restarted."""
        self.is_whole = False
        keep: list[int] = []
        last = -1 if self._is_begun else self._last_step
        for place, step in enumerate(steps):
            if step > last:
                keep.append(place)
                last = step
            else:
                self._all.grammar.disorder(file, lines[place])
        return keep

    def _note_generations(self, columns: EventColumns, file: str, lines: Sequence[int]) -> None:
        steps, generations, times = columns.get("step"), columns.get("epoch"), columns.get("t")
        for generation in dict.fromkeys(generations):
            first = generations.index(generation)
            last = len(generations) - 1 - generations[::-1].index(generation)
            generation_number = generation or 0
            # LATE_S allows for clocks of hosts that differ.
            over_s = self._all.memberships.over_s(generation_number) + LATE_S
            if generation_number < self._generation:
                self._all.digests.past(generations.count(generation), Spot(file=file, line=lines[first]))
            elif times[last] > over_s:
                late = [
                    place
                    for place, step_generation in enumerate(generations)
                    if step_generation == generation and times[place] > over_s
                ]
                # One step may be logged late: the process was stopped inside it.
                late_places = late[self._late_generation != generation_number :]
                self._late_generation = generation_number
                if late_places:
                    self._all.digests.past(len(late_places), Spot(file=file, line=lines[late_places[0]]))
            self._generation = max(self._generation, generation_number)
            if generation_number in self.spans or len(self.spans) < MOST_GENERATIONS:
                begin = self.spans.get(generation_number, (steps[first], 0))[0]
                self.spans[generation_number] = (min(begin, steps[first]), steps[last])

    def _note_skips(self, columns: EventColumns, file: str, lines: Sequence[int]) -> None:
        skipped = columns.get("skipped")
        if not any(skipped):
            return
        steps, generations = columns.get("step"), columns.get("epoch")
        for place, is_skipped in enumerate(skipped):
            if is_skipped is True and len(self.skips) < MOST_SKIPS:
                self.skips[generations[place] or 0, steps[place]] = Spot(file=file, line=lines[place])

    def _sum_times(self, columns: EventColumns) -> None:
        """Sum the time in steps and the time waiting for other ranks."""
        took, waited = columns.get("duration_s"), columns.get("wait_s")
        self.steps += len(columns)
        try:
            took_s, waited_s = sum(took), sum(waited)
        except TypeError:  # None among the values; a search for it would take longer than the sum
            pairs = [
                (step_s, wait_s) for step_s, wait_s in zip(took, waited, strict=True) if None not in (step_s, wait_s)
            ]
            took_s, waited_s = sum(step_s for step_s, _ in pairs), sum(wait_s for _, wait_s in pairs)
        if took_s < MOST_S and waited_s < MOST_S:
            self.took_s += took_s
            self.waited_s += waited_s
        if columns.has("telemetry_s"):
            reported_s = sum(filter(None, columns.get("telemetry_s")))
            self.telemetry_s = (self.telemetry_s or 0.0) + (reported_s if reported_s < MOST_S else 0.0)
        peak = max(filter(None, columns.get("memory_bytes")), default=0.0)
        self.peak_bytes = max(self.peak_bytes, peak if peak < 1e18 else 0.0)


# The supervisor's events: hosts, memberships, restores, failures and the end.


MOST_TOLD = 4096  # restores and failures that are remembered; the newest
MOST_HOSTS = 100_000


class Supervisor:
    """Reads the lines of supervisor.jsonl, in order."""

    def __init__(self, known: LoggedMemberships) -> None:
        self._known = known
        self._hosts: dict[str, bool] = {}  # hosts of the run -> whether they were checked
        self.kinds: dict[str, int] = {}
        self.memberships = self.preflights = self.refused = self.most_in_a_row = self.world = 0
        self.launches = 0
        self.restores: deque[Restore] = deque(maxlen=MOST_TOLD)
        # Time at which each failure was noticed, and the seconds for which others were waited for.
        self.failures: deque[tuple[float, float]] = deque(maxlen=MOST_TOLD)
        self.ended_s: float | None = None  # time of the newest `end`
        self.rollback: Rollback | None = None  # the newest

    def take(self, piece: LineBlock, lines: EventParser, grammar: Grammar, secrets: Secrets) -> None:
        """Add the next lines."""
        events, numbers, bad_lines = lines.events(piece)
        if bad_lines:
            grammar.unread(piece, bad_lines)
            secrets.look_at(piece, bad_lines)
        for event, line in zip(events, numbers, strict=True):
            kind = event["event"]
            if kind not in known_kinds():
                grammar.strange(kind, 1)
            elif not grammar.breaks(event, piece.file, line):
                self.kinds[kind] = self.kinds.get(kind, 0) + 1
                self._take_event(kind, event, Spot(file=piece.file, line=line))
            secrets.look_in([event], piece.file, [line])

    def _take_event(self, kind: str, event: Event, spot: Spot) -> None:
        if kind == "host":
            self._take_host(event)
        elif kind == "epoch":
            self._take_membership(event)
        elif kind == "restore":
            restore = restore_of(event, spot)
            if restore is not None:
                self.restores.append(restore)
            generation, time_s = integer(event, "epoch"), number(event, "t")
            if generation is not None and time_s is not None:
                self._known.begin(generation, time_s)
        elif kind == "incident":
            self.most_in_a_row = max(self.most_in_a_row, integer(event, "in_a_row") or 1)
            self.failures.append((number(event, "t") or 0.0, number(event, "waited_s") or 0.0))
        elif kind == "quarantine":
            self.refused += 1
        elif kind == "rollback":
            self.rollback = rollback_of(event)
        elif kind == "end":
            self.ended_s = number(event, "t")

    def _take_host(self, event: Mapping[str, Any]) -> None:
        name = printable(event["host"], most=100)
        if event["state"] == "joined" and len(self._hosts) < MOST_HOSTS:
            problems = event.get("problems")
            self._hosts[name] = isinstance(problems, list)
            self.refused += bool(problems)
        elif event["state"] == "lost":
            self._hosts.pop(name, None)

    def _take_membership(self, event: Mapping[str, Any]) -> None:
        """Count a membership and its preflights: a host checks itself when it joins and before each new membership."""
        members = event.get("members")
        hosts = {printable(member.get("host"), most=100) for member in members or () if isinstance(member, dict)}
        self.memberships += 1
        self.preflights += bool(hosts) and all(self._hosts.get(host) for host in hosts)
        self.launches += event.get("reason") == "start"
        # Ranks of the newest launch: a run resumed with fewer ranks is a smaller job, a run that lost some is not.
        world = integer(event, "world") or 0
        self.world = world if event.get("reason") == "start" else max(self.world, world)
        generation = integer(event, "epoch")
        if generation is not None:
            self._known.tell(generation, at(event, "layout"))
