"""What the supervisor told: hosts, formations, restores, failures and the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from phalanx.io.files import Spot
from phalanx.io.values import at, integer, number, printable
from phalanx.record.event_batches import EventParser, LineBlock
from phalanx.record.event_schema import known_kinds
from phalanx.record.events import Event
from phalanx.rules.log.agreement import Formations
from phalanx.rules.log.saves import Restore, restore_of
from phalanx.rules.log.schema import Grammar
from phalanx.rules.log.secrets import Secrets

MOST_TOLD = 4096  # restores and failures that are remembered; the newest
MOST_HOSTS = 100_000


class Supervisor:
    """Takes the lines of supervisor.jsonl, in order."""

    def __init__(self, known: Formations) -> None:
        self._known = known
        self._hosts: dict[str, bool] = {}  # those that are there: whether they were looked at
        self.kinds: dict[str, int] = {}
        self.formations = self.preflights = self.refused = self.most_in_a_row = self.world = 0
        self.launches = 0
        self.restores: deque[Restore] = deque(maxlen=MOST_TOLD)
        # When noticed, and for how long others were waited for.
        self.failures: deque[tuple[float, float]] = deque(maxlen=MOST_TOLD)
        self.ended_s: float | None = None  # time of the newest `end`

    def take(self, piece: LineBlock, lines: EventParser, grammar: Grammar, secrets: Secrets) -> None:
        """The next lines."""
        events, numbers, bad = lines.events(piece)
        if bad:
            grammar.unread(piece, bad)
            secrets.look_at(piece, bad)
        for event, line in zip(events, numbers, strict=True):
            kind = event["event"]
            if kind not in known_kinds():
                grammar.strange(kind, 1)
            elif not grammar.breaks(event, piece.file, line):
                self.kinds[kind] = self.kinds.get(kind, 0) + 1
                self._event(kind, event, Spot(file=piece.file, line=line))
            secrets.look_in([event], piece.file, [line])

    def _event(self, kind: str, event: Event, spot: Spot) -> None:
        if kind == "host":
            self._host(event)
        elif kind == "epoch":
            self._formation(event)
        elif kind == "restore":
            restore = restore_of(event, spot)
            if restore is not None:
                self.restores.append(restore)
            epoch, time_s = integer(event, "epoch"), number(event, "t")
            if epoch is not None and time_s is not None:
                self._known.begin(epoch, time_s)
        elif kind == "incident":
            self.most_in_a_row = max(self.most_in_a_row, integer(event, "in_a_row") or 1)
            self.failures.append((number(event, "t") or 0.0, number(event, "waited_s") or 0.0))
        elif kind == "quarantine":
            self.refused += 1
        elif kind == "end":
            self.ended_s = number(event, "t")

    def _host(self, event: Mapping[str, Any]) -> None:
        name = printable(event["host"], most=100)
        if event["state"] == "joined" and len(self._hosts) < MOST_HOSTS:
            problems = event.get("problems")
            self._hosts[name] = isinstance(problems, list)
            self.refused += bool(problems)
        elif event["state"] == "lost":
            self._hosts.pop(name, None)

    def _formation(self, event: Mapping[str, Any]) -> None:
        """A host looks at itself when it joins, and again whenever it is asked for ranks of a new formation."""
        members = event.get("members")
        hosts = {printable(one.get("host"), most=100) for one in members or () if isinstance(one, dict)}
        self.formations += 1
        self.preflights += bool(hosts) and all(self._hosts.get(host) for host in hosts)
        self.launches += event.get("reason") == "start"
        # Ranks of the newest launch: one that was resumed with fewer is a smaller job, one that lost some is not.
        world = integer(event, "world") or 0
        self.world = world if event.get("reason") == "start" else max(self.world, world)
        epoch = integer(event, "epoch")
        if epoch is not None:
            self._known.tell(epoch, at(event, "layout"))
