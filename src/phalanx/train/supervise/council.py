"""The decisions of the coordinator: who forms the next epoch, from which state, and when the run is over.

Messages in, messages out; no sockets and no torch, so that every situation can be played through in a test. A run is
waiting (for hosts), forming (asked its members, not all have answered), running, or over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.record.events import EventWriter
from phalanx.record.run import Run
from phalanx.train.supervise import failure as failing
from phalanx.train.supervise.board import NO_STEP, Phase
from phalanx.train.supervise.failure import Failure
from phalanx.train.supervise.fence import begin_epoch, current_epoch
from phalanx.train.supervise.formation import Formation, Seat
from phalanx.train.supervise.membership import next_formation
from phalanx.train.supervise.memory import Memory, Message
from phalanx.train.supervise.preflight import check_skew, clock_skew_s
from phalanx.train.vault.choose import Choice, choices
from phalanx.train.vault.held import Held

CONNECT_S = 2.0  # an agent reads its clock before a connection that may take so long
RECONNECT_S = 1.0  # an agent that hung up may be back at once; one whose host is gone is not
CAUSE_S = 0.5  # after ranks have left without a known cause, time for it to show
REPLACE_S = 2.0  # for an agent to start another process in a slot
GROW_S = 1.0  # seats that came back are to stay this long before the ranks are disturbed
LOOK_S = 0.5  # between looks for the stop file
ANSWER_S = 2.0  # for agents to say where their ranks are
BACK_OFF_S, MOST_BACK_OFF_S = 0.5, 10.0
STOPPED, FAILED = 130, 3
MARGIN_S = 10.0  # collectives give up after train.timeout_s themselves, and say more about it than we can


@dataclass(kw_only=True, slots=True)
class Host:
    """An agent, as the council sees it."""

    name: str
    address: str
    heard_s: float
    gone_s: float | None = None  # when it hung up
    alive: dict[int, int] = field(default_factory=dict)  # slot -> process
    progress: dict[int, tuple[int, int, float]] = field(default_factory=dict)  # slot -> step, phase, age in seconds
    problems: tuple[str, ...] = ()  # what its preflight found; it takes no part
    ready: Message | None = None
    where: dict[int, tuple[bool, str]] | None = None  # slot -> waits for others, place


class Council:
    """Hears agents and decides. `hear` only takes note; `tick`, called often, acts."""

    def __init__(
        self,
        run: Run,
        plan: Plan,
        send: Callable[[str, Message], None],
        events: EventWriter,
        *,
        memory: Memory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run, self.job, self.planned, self.events = run, plan.job, plan.layout, events
        self.memory, self.changed, self.progressed, self.is_over = memory, True, False, False
        self._send, self._clock = send, clock
        self._began_s = clock()
        launch = run.launch()
        self._hosts: dict[str, Host] = {}
        self._order = [str(name) for name in launch.get("hosts", ())]
        self._formations: list[Message] = list(launch.get("formations", ()))
        self._forming = False
        self._takes_over_until_s = clock() + RECONNECT_S if memory.running else 0.0
        self._failures: dict[int, Failure] = {}
        self._out_of_memory = False
        self._noticed_s: float | None = None
        self._left: dict[int, Message] = {}
        self._words: dict[int, str] = {}  # the last collective of each rank that left for the present epoch
        self._left_s: float | None = None
        self._wishes = 0
        self._told_stop = self._told_reform = False
        self._grow_s: float | None = None
        self._looked_s = -1e9
        self._asked_s: float | None = None
        self._step_s, self._stepped_s = 0.0, clock()

    # ---- hearing ---------------------------------------------------------------------------------------------------

    def hear(self, host: str, message: Message) -> None:
        """Take note of what an agent said."""
        kind = str(message.get("kind"))
        if kind == "joined":
            self._joined(host, message["hello"])
            return
        known = self._hosts.get(host)
        if known is None:
            return
        known.heard_s = self._clock()
        handler = getattr(self, f"_hear_{kind}", None)
        if handler is not None:
            handler(known, message)

    def _joined(self, name: str, hello: Message) -> None:
        old = self._hosts.get(name)
        problems = [str(text) for text in hello.get("problems", ())]
        skew_s = clock_skew_s(float(hello["time"]), CONNECT_S, now_s=time.time())
        problems += [problem.render() for problem in check_skew(skew_s, host=name)]
        host = Host(name=name, address=str(hello.get("address", "")), heard_s=self._clock(), problems=tuple(problems))
        if old is not None:
            host.alive, host.ready = old.alive, old.ready
        self._hosts[name] = host
        if name not in self._order:
            self._order.append(name)
        self.events.write("host", host=name, state="joined", epoch=self.memory.epoch, problems=problems)
        for problem in problems:
            self.events.write("quarantine", epoch=self.memory.epoch, host=name, reason=problem)
        if self._wishes:
            self._send(name, {"kind": "stop"})

    def _hear_status(self, host: Host, message: Message) -> None:
        host.alive = {int(slot): int(pid) for slot, pid in message["slots"].items()}
        formation = self.memory.formation
        if formation is None or not self.memory.running:
            return
        in_epoch = {int(slot) for slot in message["members"]} if message["epoch"] == formation.epoch else set()
        for slot, rank in formation.of_host(host.name).items():
            if slot not in in_epoch:
                self._fail(rank, Failure(rank=rank, step=NO_STEP, at_s=time.time(), kind="Left", message="left"))

    def _hear_gone(self, host: Host, message: Message) -> None:
        host.gone_s = self._clock()

    def _hear_up(self, host: Host, message: Message) -> None:
        host.alive[int(message["slot"])] = int(message["pid"])

    def _hear_lost(self, host: Host, message: Message) -> None:
        slot = int(message["slot"])
        if host.alive.get(slot) == int(message["pid"]):
            del host.alive[slot]
        rank = self._rank(host, slot)
        if rank is not None and int(message["epoch"]) in (0, self.memory.epoch):
            self._out_of_memory = self._out_of_memory or bool(message.get("out_of_memory"))
            self._fail(rank, Failure(**{**message["failure"], "rank": rank}))

    def _hear_left(self, host: Host, message: Message) -> None:
        rank = self._rank(host, int(message["slot"]))
        if message.get("last_collective") and rank is not None:
            self._words[rank] = str(message["last_collective"])
        if rank is not None and int(message["epoch"]) == self.memory.epoch:
            self._left[rank] = message
            self._left_s = self._left_s or self._clock()

    def _hear_ready(self, host: Host, message: Message) -> None:
        if int(message["epoch"]) == self.memory.epoch:
            host.ready = message

    def _hear_beat(self, host: Host, message: Message) -> None:
        host.progress = {
            int(slot): (int(step), int(phase), float(age)) for slot, (step, phase, age) in message["progress"].items()
        }
        steps = [host.progress[slot][0] for slot in self._members(host) if slot in host.progress]
        best = max(steps, default=NO_STEP)
        if not self._forming and best > self.memory.best_step:
            self.memory.best_step, self.memory.failures, self.progressed = best, 0, True
            self.memory.seat_failures.clear()
            now = self._clock()
            self._step_s, self._stepped_s = max(0.9 * self._step_s, now - self._stepped_s), now

    def _hear_where(self, host: Host, message: Message) -> None:
        host.where = {int(slot): (bool(waits), str(place)) for slot, (waits, place) in message["ranks"].items()}

    def _hear_stop(self, host: Host, message: Message) -> None:
        self._wishes = max(self._wishes, int(message["count"]))

    def _fail(self, rank: int, failure: Failure) -> None:
        self._failures[rank] = failure
        self._noticed_s = self._noticed_s or self._clock()

    def _rank(self, host: Host, slot: int) -> int | None:
        return self.memory.formation.rank(Seat(host.name, slot)) if self.memory.formation is not None else None

    def _members(self, host: Host) -> dict[int, int]:
        return self.memory.formation.of_host(host.name) if self.memory.formation is not None else {}

    # ---- deciding --------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Act on what is known."""
        self._look_for_stop()
        if self.is_over:
            return
        self._miss_hosts()
        if self._clock() < self._takes_over_until_s and not self._all_here():
            return
        if self.memory.formation is None:
            self._wait_for_hosts()
        elif self._failures:
            self._recover()
        elif self._forming:
            self._gather()
        elif len(self._left) == self.memory.formation.world:
            self._all_left()
        elif self._left_s is not None and self._clock() - self._left_s > CAUSE_S:
            self._nobody_fell()
        else:
            self._grow()
            self._look_for_stuck()

    def _look_for_stop(self) -> None:
        now = self._clock()
        if now - self._looked_s >= LOOK_S:
            self._looked_s = now
            if self.run.stop_file.exists():
                self._wishes = max(self._wishes, 1)
        if self._wishes >= 2:
            self._killed()
        elif self._wishes and not self._told_stop:
            self._told_stop = True
            self._tell_all({"kind": "stop"})
            if self.memory.formation is None:
                self._end("stopped", STOPPED, "stopped before the first rank was started")

    def _miss_hosts(self) -> None:
        """Hosts that hung up and did not come back, or say nothing any more."""
        now = self._clock()
        for name, host in list(self._hosts.items()):
            silent = now - host.heard_s > self.job.fault.dead_after_s
            if (host.gone_s is not None and now - host.gone_s > RECONNECT_S) or silent:
                del self._hosts[name]
                self._lose_host(name, "says nothing any more" if silent else "is gone: its agent hung up")
        if self.memory.running and now >= self._takes_over_until_s and self.memory.formation is not None:
            for name in self.memory.formation.hosts:
                if name not in self._hosts and not self._known_lost(name):
                    self._lose_host(name, "did not come back")

    def _known_lost(self, name: str) -> bool:
        assert self.memory.formation is not None
        return all(rank in self._failures for rank in self.memory.formation.of_host(name).values())

    def _lose_host(self, name: str, what: str) -> None:
        self.events.write("host", host=name, state="lost", epoch=self.memory.epoch, reason=what)
        formation = self.memory.formation
        if formation is None:
            return
        for rank in formation.of_host(name).values():
            failure = Failure(
                rank=rank, step=self.memory.best_step, at_s=time.time(), kind="HostLost", message=f"host {name} {what}"
            )
            self._fail(rank, failure)

    def _all_here(self) -> bool:
        formation = self.memory.formation
        return formation is not None and all(name in self._hosts for name in formation.hosts)

    def _alive(self) -> list[Seat]:
        """Seats with a living process, host by host."""
        return [
            seat
            for name in self._order
            if name in self._hosts and self._hosts[name].gone_s is None and not self._hosts[name].problems
            for slot in sorted(self._hosts[name].alive)
            if (seat := Seat(name, slot)) not in self.memory.quarantined
        ]

    def _wait_for_hosts(self) -> None:
        patience_s = self.job.train.timeout_s
        late = self._clock() - self._began_s > patience_s
        refused = [text for host in self._hosts.values() for text in host.problems]
        if len(self._alive()) >= self._layout_at(0).devices:
            self._form("start")
        elif refused and len(self._hosts) == len(self._order) and not self._form("some hosts are", planned_only=False):
            self._end("failed", FAILED, "\n".join(["a host failed its preflight", *(f"  {text}" for text in refused)]))
        elif late and (len(self._order) < 2 or not self._form("some hosts did not arrive", planned_only=False)):
            here = ", ".join(self._hosts) or "nobody"
            message = (
                f"{self.run.path}: {len(self._alive())} of {self.planned.devices} ranks arrived within "
                f"{patience_s:g} s\n  here: {here}\n  look at the logs of the agents that are missing"
            )
            self._end("failed", FAILED, message)

    def _layout_at(self, step: int) -> Layout:
        """What is wanted: the plan, or what a replay prescribes from this step on."""
        wanted = [one for one in self._formations if int(one["from_step"]) <= max(step, 0)]
        return Layout(**wanted[-1]["layout"]) if wanted else self.planned

    # ---- failures --------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """A rank or a host fell: form again as soon as the seats for it are there, or give up."""
        assert self.memory.formation is not None
        assert self._noticed_s is not None
        cause = failing.first(list(self._failures.values()))
        if cause.is_user or self.job.fault.recovery == "stop":
            self._give_up(cause)
            return
        if self.memory.failures > self.job.fault.restarts:
            self._give_up(cause, f"{self.memory.failures} failures in a row without a step between")
            return
        waited_s = self._clock() - self._noticed_s
        pause_s = BACK_OFF_S * 2 ** (self.memory.failures - 2) if self.memory.failures > 1 else 0.0
        if waited_s < min(pause_s, MOST_BACK_OFF_S) or self._replacement_comes(waited_s):
            return
        self._incident(cause)
        if not self._form(_because(cause)):
            self._give_up(cause, "there are not enough places left for any layout of this job")

    def _replacement_comes(self, waited_s: float) -> bool:
        """Whether an agent is about to start another process where one fell."""
        formation = self.memory.formation
        assert formation is not None
        if self.job.fault.recovery == "shrink" or waited_s > REPLACE_S:
            return False
        alive = set(self._alive())
        missing = [formation.seats[rank] for rank in self._failures]
        coming = [seat for seat in missing if seat not in alive and self._comes_back(seat)]
        return bool(coming) and len(alive) < formation.world

    def _comes_back(self, seat: Seat) -> bool:
        host = self._hosts.get(seat.host)
        return host is not None and host.gone_s is None and seat not in self.memory.quarantined

    def _incident(self, cause: Failure) -> None:
        formation = self.memory.formation
        assert formation is not None
        self.memory.failures += 1
        for rank in self._failures:
            seat = formation.seats[rank]
            self.memory.seat_failures[seat] = self.memory.seat_failures.get(seat, 0) + 1
            if self.memory.seat_failures[seat] >= self.job.fault.restarts and len(self._alive()) > formation.world:
                self._quarantine(seat, f"failed {self.memory.seat_failures[seat]} times in a row")
        seat = formation.seats[cause.rank]
        self.events.write(
            "incident",
            epoch=formation.epoch,
            rank=cause.rank,
            host=seat.host,
            slot=seat.slot,
            step=max(cause.step, self.memory.best_step),
            cause={"kind": cause.kind, "message": cause.message, "signal": cause.signal},
            stack=cause.stack,
            others=[rank for rank in self._failures if rank != cause.rank],
            in_a_row=self.memory.failures,
        )

    def _quarantine(self, seat: Seat, reason: str) -> None:
        self.memory.quarantined.add(seat)
        self.events.write("quarantine", epoch=self.memory.epoch, host=seat.host, slot=seat.slot, reason=reason)

    def _nobody_fell(self) -> None:
        """Ranks lost each other, or their numbers, and every process lives."""
        assert self.memory.formation is not None
        astray = [message for message in self._left.values() if message.get("fault")]
        if astray:
            self._astray(astray[0])
            return
        rank, message = min(self._left.items(), key=lambda one: one[0])
        if message.get("state") and all(one.get("state") for one in self._left.values()):
            self._left_s = None  # some are done, the others are still at it
            return
        text = str(message.get("why") or "left its formation")
        self._fail(rank, Failure(rank=rank, step=int(message["step"]), at_s=time.time(), kind="Left", message=text))

    def _astray(self, message: Message) -> None:
        """All ranks agree that the state is not to be trusted: go on from before it, without those to blame."""
        assert self.memory.formation is not None
        sound, step = int(message["sound"]), int(message["step"])
        again = step in self.memory.rolled_back
        suspects = [int(rank) for rank in message.get("suspects", ())]
        cause = Failure(
            rank=suspects[0] if suspects else 0, step=step, at_s=time.time(), kind="Astray", message=str(message["why"])
        )
        self.memory.case = None if suspects else message.get("evidence")
        if again and not suspects:
            self._give_up(cause, "it happened again at the same step after going back")
            return
        self.memory.rolled_back.append(step)
        self.memory.at_most = sound
        self._failures = {cause.rank: cause}
        self._incident(cause)
        if len(suspects) == 1:
            self._quarantine(self.memory.formation.seats[suspects[0]], str(message["why"]))
        if not self._form(str(message["why"])):
            self._give_up(cause, "there are not enough places left for any layout of this job")

    def _look_for_stuck(self) -> None:
        """Processes live and nothing moves: ask where everybody is, and end the one that does not wait for others."""
        now, formation = self._clock(), self.memory.formation
        assert formation is not None
        if self._asked_s is None:
            if self._is_stuck(formation):
                self._asked_s = now
                for host in self._hosts.values():
                    host.where = None
                self._tell_all({"kind": "where"})
            return
        asked = [self._hosts[name] for name in formation.hosts if name in self._hosts]
        if any(host.where is None for host in asked) and now - self._asked_s < ANSWER_S:
            return
        self._asked_s = None
        if self._is_stuck(formation):
            self._blame(formation, asked)

    def _is_stuck(self, formation: Formation) -> bool:
        ages = [host.progress[slot] for host, slot in self._seated(formation) if slot in host.progress]
        if len(ages) < formation.world:
            return False
        return all(age > self._patience_s(phase) for _, phase, age in ages)

    def _patience_s(self, phase: int) -> float:
        if phase == Phase.TRAINING:
            return self.job.fault.dead_after_s + 3 * self._step_s
        return self.job.train.timeout_s + MARGIN_S

    def _seated(self, formation: Formation) -> Iterator[tuple[Host, int]]:
        for seat in formation.seats:
            if seat.host in self._hosts:
                yield self._hosts[seat.host], seat.slot

    def _blame(self, formation: Formation, asked: list[Host]) -> None:
        found = [
            (waits, host.progress[slot][0], host.name, slot, place)
            for host in asked
            for slot, (waits, place) in (host.where or {}).items()
            if slot in self._members(host) and slot in host.progress
        ]
        if not found or all(waits for waits, *_ in found):
            rank = min((formation.rank(Seat(name, slot)) or 0 for _, _, name, slot, _ in found), default=0)
            text = "every rank waits for another, and none moves"
            self._fail(rank, Failure(rank=rank, step=NO_STEP, at_s=time.time(), kind="Deadlock", message=text))
            return
        _, _, name, slot, place = min(found)
        self._send(name, {"kind": "kill", "slot": slot, "place": place})

    # ---- forming ---------------------------------------------------------------------------------------------------

    def _form(self, reason: str, *, planned_only: bool = True) -> bool:
        """Begin the next epoch; False when there is no formation for the seats that live."""
        policy = self.job.fault.recovery if self.memory.formation is not None or not planned_only else "replace"
        wanted = self._layout_at(self.memory.best_step)
        formation = next_formation(
            epoch=self.memory.epoch + 1,
            planned=wanted,
            sequences=self.job.batch.global_sequences,
            reproducible=self.job.numerics.reproducible,
            policy="auto" if policy == "stop" else policy,
            before=self.memory.formation,
            alive=self._alive(),
            fallen=[self.memory.formation.seats[rank] for rank in self._failures] if self.memory.formation else (),
        )
        if formation is None:
            return False
        self.memory.epoch, self.memory.formation, self.memory.running = formation.epoch, formation, True
        self._forming, self.changed = True, True
        self._failures, self._left = {}, {}
        self._noticed_s = self._left_s = self._grow_s = self._asked_s = None
        self._told_reform = False
        begin_epoch(self.run, formation.epoch)
        for host in self._hosts.values():
            host.ready, host.progress = None, {}
        self.events.write(
            "epoch",
            epoch=formation.epoch,
            reason=reason,
            world=formation.world,
            layout=asdict(formation.layout),
            members=[
                {"rank": rank, "host": seat.host, "slot": seat.slot, "pid": self._hosts[seat.host].alive[seat.slot]}
                for rank, seat in enumerate(formation.seats)
            ],
        )
        self._tell_all({"kind": "form", **formation.to_json()})
        return True

    def _gather(self) -> None:
        """Go as soon as every member has answered."""
        formation = self.memory.formation
        assert formation is not None
        if self._left_s is not None and self._clock() - self._left_s > CAUSE_S:
            self._nobody_fell()
            return
        hosts = [self._hosts.get(name) for name in formation.hosts]
        if any(host is None or host.ready is None for host in hosts):
            return
        ready = {host.name: host.ready for host in hosts if host is not None and host.ready is not None}
        self._go(formation, ready)

    def _go(self, formation: Formation, ready: Mapping[str, Message]) -> None:
        choice = self._choice()
        source = (choice.epoch, choice.step) if choice is not None else None
        self.memory.lineage = self.memory.lineage.begin(formation.epoch, source=source)
        vaults = {
            str(rank): [self._hosts[seat.host].address, int(ready[seat.host]["ports"][str(seat.slot)][1])]
            for rank, seat in enumerate(formation.seats)
        }
        first = formation.seats[0]
        at_most = self.memory.at_most
        saved = [step for step in self.run.saved_steps() if at_most is None or step <= at_most]
        step = choice.step if choice is not None else max(saved, default=0)
        where = "memory" if choice is not None else "disk" if step else "start"
        if self._words:  # the survivors have left what fell, and could say where they were
            self.events.write("evidence", epoch=formation.epoch - 1, last_collectives=self._words)
            self._words = {}
        self.events.write("restore", epoch=formation.epoch, step=step, source=where)
        self._tell_all(
            {
                "kind": "go",
                "epoch": formation.epoch,
                "store": [self._hosts[first.host].address, int(ready[first.host]["ports"][str(first.slot)][0])],
                "vaults": vaults,
                "peers": {seat.host: vaults[str(rank)] for rank, seat in reversed(list(enumerate(formation.seats)))},
                "restore": choice.to_json() if choice is not None else None,
                "at_most": at_most,
                "case": self.memory.case,
            }
        )
        self.memory.best_step, self.memory.at_most = step, None
        self._forming, self.changed = False, True
        self._step_s, self._stepped_s = 0.0, self._clock()
        if self.run.status().get("state") != "running":
            self.run.set_status("running", world=formation.world, started=round(time.time(), 3))

    def _choice(self) -> Choice | None:
        held = {
            name: [Held.from_json(one) for one in host.ready.get("held", ())]
            for name, host in self._hosts.items()
            if host.ready is not None
        }
        found = choices(held, lineage=self.memory.lineage, at_most=self.memory.at_most)
        return found[0] if found else None

    def _grow(self) -> None:
        """A job that shrank takes its planned layout up again, at the end of a step, when the seats are there."""
        formation = self.memory.formation
        assert formation is not None
        wanted = self._layout_at(self.memory.best_step)
        if self._told_reform or self.job.fault.recovery != "auto" or formation.world >= wanted.devices or self._wishes:
            return
        better = next_formation(
            epoch=self.memory.epoch + 1,
            planned=wanted,
            sequences=self.job.batch.global_sequences,
            reproducible=self.job.numerics.reproducible,
            policy="auto",
            before=formation,
            alive=self._alive(),
        )
        if better is None or better.world <= formation.world:
            self._grow_s = None
            return
        self._grow_s = self._grow_s or self._clock()
        if self._clock() - self._grow_s > GROW_S and self.memory.best_step > NO_STEP:
            self._told_reform = True
            self._tell_all({"kind": "reform"})

    # ---- ending ----------------------------------------------------------------------------------------------------

    def _all_left(self) -> None:
        """Every rank came out of its loop."""
        states = {str(one.get("state", "")) for one in self._left.values()}
        if states == {"reform"}:
            self.memory.best_step = max(int(one["step"]) for one in self._left.values())
            if not self._form("as planned"):
                self._end("failed", FAILED, f"{self.run.path}: no formation is left for step {self.memory.best_step}")
        elif states == {"done"}:
            self._end("done", 0, "", step=failing.last_checkpoint(self.run))
        elif states == {"stopped"}:
            saved = failing.last_checkpoint(self.run)
            kept = f"saved step {saved:,}" if saved is not None else "nothing was saved"
            message = f"stopped as asked: {kept}; go on with: phalanx train --resume {self.run.path}"
            self._end("stopped", STOPPED, message, step=saved)
        else:
            self._nobody_fell()

    def _killed(self) -> None:
        saved = failing.last_checkpoint(self.run)
        kept = f"the last checkpoint is step {saved:,}" if saved is not None else "no checkpoint was written"
        self._end("stopped", STOPPED, f"killed at once, as asked; {kept}", step=saved)

    def _give_up(self, cause: Failure, why: str = "") -> None:
        others = [one for one in self._failures.values() if one is not cause]
        world = self.memory.formation.world if self.memory.formation is not None else self.planned.devices
        message = failing.tell(self.run, cause, others=others, world=world, out_of_memory=self._out_of_memory)
        if why:
            message = f"{message}\n  given up: {why}"
        code = cause.exit_code if cause.is_user else FAILED
        self._end("failed", code, message, rank=cause.rank, step=cause.step)

    def _end(self, state: str, code: int, message: str, **fields: Any) -> None:
        self.run.set_status(state, exit_code=code, message=message, **fields)
        self.events.write("end", epoch=self.memory.epoch, state=state, message=message)
        self._tell_all({"kind": "end", "code": code})
        self.is_over = self.changed = True
        self.memory.running = False

    def _tell_all(self, message: Message) -> None:
        for name in self._hosts:
            self._send(name, message)


def _because(cause: Failure) -> str:
    return (
        f"rank {cause.rank} fell: {cause.kind} {cause.message.splitlines()[0][:200] if cause.message else ''}".strip()
    )
