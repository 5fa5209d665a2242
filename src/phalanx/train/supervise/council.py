"""The decisions of the coordinator: who forms the next epoch, from which state, and when the run is over.

Messages in, messages out; no sockets and no torch, so that every situation can be played through in a test. A run is
waiting (for hosts), forming (asked its members, not all have answered), running, or over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
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
from phalanx.train.supervise.hosts import Host, culprit, is_still, seated
from phalanx.train.supervise.membership import next_formation
from phalanx.train.supervise.memory import Memory, Message
from phalanx.train.supervise.preflight import check_skew, clock_skew_s
from phalanx.train.vault.choose import Choice, choices
from phalanx.train.vault.held import Held

CONNECT_S = 2.0  # an agent reads its clock before a connection that may take so long
RECONNECT_S = 1.0  # an agent that hung up may be back at once; one whose host is gone is not
TAKE_OVER_S = 5.0  # for agents to find a new coordinator, as long as nothing seems to be wrong
CAUSE_S = 0.5  # after ranks have left without a known cause, time for it to show
REPLACE_S = 2.0  # for an agent to start another process in a slot
GROW_S = 1.0  # seats that came back are to stay this long before the ranks are disturbed
LOOK_S = 0.5  # between looks for the stop file
BEAT_S = 0.5  # between signs of life to the agents
PAUSE_S = 1.0  # between two of our own turns, after which it was us who did not listen
ANSWER_S = 2.0  # for agents to say where their ranks are, and to end one
BACK_OFF_S, MOST_BACK_OFF_S = 0.5, 10.0
STOPPED, FAILED = 130, 3
MARGIN_S = 10.0  # collectives give up after train.timeout_s themselves, and say more about it than we can


class Council:
    """Hears agents and decides. `hear` only takes note; `tick`, called often, acts.

    `save` writes the memory down. It is called before agents are told of an epoch, so that whoever takes over knows
    of everything that may be going on.
    """

    def __init__(
        self,
        run: Run,
        plan: Plan,
        send: Callable[[str, Message], None],
        events: EventWriter,
        *,
        memory: Memory,
        save: Callable[[Memory], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run, self.job, self.planned, self.events = run, plan.job, plan.layout, events
        self.memory, self.progressed, self.is_over = memory, False, False
        self._send, self._save, self._clock = send, save, clock
        launch = run.launch()
        self._hosts: dict[str, Host] = {}
        self._order = [str(name) for name in launch.get("hosts", ())]
        self._slots = sum(int(count) for count in launch.get("slots", ()))
        self._formations: list[Message] = list(launch.get("formations", ()))
        self._takes_over = memory.running
        if memory.running:
            events.write("coordinator", epoch=memory.epoch, state="took over")
        self._began_s = self._ticked_s = clock()
        self._failures: dict[int, Failure] = {}
        self._told_incident = self._out_of_memory = False
        self._noticed_s: float | None = None
        self._before: Formation | None = None
        self._left: dict[int, Message] = {}
        self._left_s: float | None = None
        self._words: dict[int, str] = {}  # the last collective of each rank that left for the present epoch
        self._wishes = 0
        self._wished_s: float | None = None
        self._hurry_s: float | None = None  # when a cluster manager asked, which does not wait
        self._told_reform = False
        self._grow_s: float | None = None
        self._looked_s = self._beat_s = -1e9
        self._asked_s: float | None = None
        self._killed_s = -1e9
        self._step_s, self._stepped_s = 0.0, clock()
        if memory.forming:
            begin_epoch(run, memory.epoch)  # whoever wrote this down may not have come so far

    # ---- hearing ---------------------------------------------------------------------------------------------------

    def hear(self, host: str, message: Message) -> None:
        """Take note of what an agent said."""
        kind = str(message.get("kind"))
        if kind == "joined":
            self._joined(host, message["hello"])
            return
        known = self._hosts.get(host)
        if known is None:
            if kind != "gone":  # it was given up, and lives: it is to introduce itself again
                self._send(host, {"kind": "again"})
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
        self._hosts[name] = host
        if name not in self._order:
            self._order.append(name)
        self.events.write("host", host=name, state="joined", epoch=self.memory.epoch, problems=problems)
        for problem in problems if old is None else ():
            self.events.write("quarantine", epoch=self.memory.epoch, host=name, reason=problem)
        if self._wishes:
            self._send(name, {"kind": "stop"})

    def _hear_status(self, host: Host, message: Message) -> None:
        """What an agent holds that has just connected, perhaps not for the first time."""
        host.told, host.alive = True, {int(slot): int(pid) for slot, pid in message["slots"].items()}
        self._wish(int(message["wishes"]))  # before anything is formed of these slots
        formation = self.memory.formation
        if formation is None or not self.memory.running:
            return
        ranks, epoch = formation.of_host(host.name), int(message["epoch"])
        gone = [rank for slot, rank in ranks.items() if host.alive.get(slot) != self.memory.pids[rank]]
        if epoch < formation.epoch and not self.memory.forming:
            gone = list(ranks.values())
        for rank in gone:
            text = f"its process on host {host.name} ended while nobody looked"
            self._fail(rank, Failure(rank=rank, step=self.memory.step, at_s=time.time(), kind="Left", message=text))
        if gone or not ranks:
            return
        if epoch < formation.epoch and self.memory.forming:  # it was never told, or the word was lost
            self._send(host.name, {"kind": "form", **formation.to_json()})
        elif int(message["went"]) < formation.epoch and self.memory.go is not None:
            self._send(host.name, self.memory.go)

    def _hear_gone(self, host: Host, message: Message) -> None:
        host.gone_s = self._clock()

    def _hear_up(self, host: Host, message: Message) -> None:
        host.alive |= {int(slot): int(pid) for slot, pid in message["slots"].items()}

    def _hear_lost(self, host: Host, message: Message) -> None:
        slot, pid = int(message["slot"]), int(message["pid"])
        if host.alive.get(slot) == pid:
            del host.alive[slot]
        rank = self._rank(host, slot)
        if rank is not None and self.memory.running and self.memory.pids[rank] == pid:
            self._out_of_memory = self._out_of_memory or bool(message.get("out_of_memory"))
            self._came_to(int(message["failure"]["step"]))
            self._fail(rank, Failure(**{**message["failure"], "rank": rank}))

    def _hear_left(self, host: Host, message: Message) -> None:
        epoch, seat = int(message["epoch"]), Seat(host.name, int(message["slot"]))
        formations = (one for one in (self.memory.formation, self._before) if one is not None and one.epoch == epoch)
        formation = next(formations, None)
        rank = formation.rank(seat) if formation is not None else None
        if rank is None:
            return
        if message.get("last_collective"):
            self._words[rank] = str(message["last_collective"])
        if epoch == self.memory.epoch:
            self._came_to(int(message["step"]))
            self._left[rank] = message
            self._left_s = self._left_s or self._clock()

    def _hear_ready(self, host: Host, message: Message) -> None:
        if int(message["epoch"]) == self.memory.epoch:
            host.ready = message

    def _hear_beat(self, host: Host, message: Message) -> None:
        if int(message["epoch"]) != self.memory.epoch or self.memory.forming:
            return
        host.progress = {
            int(slot): (int(step), int(phase), float(age)) for slot, (step, phase, age) in message["progress"].items()
        }
        step = max((host.progress[slot][0] for slot in self._members(host) if slot in host.progress), default=NO_STEP)
        if step > self.memory.step:
            now = self._clock()
            self._step_s, self._stepped_s = max(0.9 * self._step_s, now - self._stepped_s), now
        self._came_to(step)

    def _came_to(self, step: int) -> None:
        """The run has done so many steps, as a beat says or the last word of a rank: a beat may come too late."""
        if self.memory.forming:
            return
        if step > self.memory.step:
            self.memory.step, self.progressed = step, True
            self.memory.at_most = None  # what could not be trusted was left behind
        if step > self.memory.best_step:
            self.memory.best_step, self.memory.failures = step, 0
            self.memory.seat_failures.clear()

    def _hear_where(self, host: Host, message: Message) -> None:
        host.where = {int(slot): (bool(waits), str(place)) for slot, (waits, place) in message["ranks"].items()}

    def _hear_stop(self, host: Host, message: Message) -> None:
        self._wish(int(message["count"]))
        if message.get("hurry"):
            self._hurry_s = self._hurry_s or self._clock()

    def _wish(self, count: int) -> None:
        if count > self._wishes:
            self._wishes, self._wished_s = count, self._wished_s or self._clock()
            self._tell_all({"kind": "stop"})

    def _fail(self, rank: int, failure: Failure) -> None:
        known = self._failures.get(rank)
        if known is None or known.is_consequence:  # what a process says of its end counts more than that it is gone
            self._failures[rank] = failure
        self._noticed_s = self._noticed_s or self._clock()

    def _rank(self, host: Host, slot: int) -> int | None:
        return self.memory.formation.rank(Seat(host.name, slot)) if self.memory.formation is not None else None

    def _members(self, host: Host) -> dict[int, int]:
        return self.memory.formation.of_host(host.name) if self.memory.formation is not None else {}

    # ---- deciding --------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Act on what is known."""
        self._mind_the_clock()
        self._look_for_stop()
        if self.is_over:
            return
        self._miss_hosts()
        formation = self.memory.formation
        if formation is None:
            self._wait_for_hosts()
        elif self._takes_over:
            return
        elif self._failures:
            self._recover()
        elif self._left_s is not None and len(self._left) == formation.world:
            self._all_left()
        elif self._left_s is not None and self._clock() - self._left_s > CAUSE_S:
            self._nobody_fell()
        elif self.memory.forming:
            self._gather()
        else:
            self._grow()
            self._look_for_stuck()

    def _mind_the_clock(self) -> None:
        """If it was us who did not run for a while, the others are not to blame; and they are to know that we do."""
        now = self._clock()
        paused_s, self._ticked_s = now - self._ticked_s, now
        if paused_s > PAUSE_S:
            for host in self._hosts.values():
                host.heard_s += paused_s
        if now - self._beat_s >= BEAT_S:
            self._beat_s = now
            self._tell_all({"kind": "beat"})

    def _look_for_stop(self) -> None:
        now = self._clock()
        if now - self._looked_s >= LOOK_S:
            self._looked_s = now
            if self.run.stop_file.exists():
                self._wish(1)
        if self._wished_s is None:
            return
        if self._wishes >= 2:
            self._kill_all("killed at once, as asked")
        elif self.memory.formation is None:
            self._end("stopped", STOPPED, "stopped before the first rank was started")
        elif self._hurry_s is not None and now - self._hurry_s > self.job.fault.grace_s:
            self._kill_all(f"killed: not done within fault.grace_s = {self.job.fault.grace_s:g} s after it was asked")

    def _miss_hosts(self) -> None:
        """Hosts that hung up and did not come back, or say nothing any more."""
        now = self._clock()
        for name, host in list(self._hosts.items()):
            silent = now - host.heard_s > self.job.fault.dead_after_s
            if (host.gone_s is not None and now - host.gone_s > RECONNECT_S) or silent:
                del self._hosts[name]
                self._lose_host(name, "says nothing any more" if silent else "is gone: its agent hung up")
        if self._takes_over and self.memory.formation is not None:
            missing = [name for name in self.memory.formation.hosts if not self._is_here(name)]
            patience_s = RECONNECT_S if self._failures or self._left else TAKE_OVER_S
            if missing and now - self._began_s < patience_s:
                return
            self._takes_over = False
            for name in missing:
                self._lose_host(name, "did not come back")

    def _is_here(self, name: str) -> bool:
        host = self._hosts.get(name)
        return host is not None and host.told and host.gone_s is None

    def _lose_host(self, name: str, what: str) -> None:
        self.events.write("host", host=name, state="lost", epoch=self.memory.epoch, reason=what)
        formation = self.memory.formation
        for rank in formation.of_host(name).values() if formation is not None else ():
            text = f"host {name} {what}"
            self._fail(rank, Failure(rank=rank, step=self.memory.step, at_s=time.time(), kind="HostLost", message=text))

    def _alive(self) -> list[Seat]:
        """Seats with a living process, host by host."""
        return [
            seat
            for name in self._order
            if self._is_here(name) and not self._hosts[name].problems
            for slot in sorted(self._hosts[name].alive)
            if (seat := Seat(name, slot)) not in self.memory.quarantined
        ]

    def _wait_for_hosts(self) -> None:
        patience_s = self.job.train.timeout_s
        late = self._clock() - self._began_s > patience_s
        refused = [text for host in self._hosts.values() for text in host.problems]
        if len(self._alive()) >= self._layout_at(0).devices:
            self._form("start")
        elif refused and self._all_arrived() and not self._form("some hosts failed their preflight", first=False):
            self._end("failed", FAILED, "\n".join(["a host failed its preflight", *(f"  {text}" for text in refused)]))
        elif late and (len(self._order) < 2 or not self._form("some hosts did not arrive", first=False)):
            here = ", ".join(self._hosts) or "nobody"
            message = (
                f"{self.run.path}: {len(self._alive())} of {self.planned.devices} ranks arrived within "
                f"{patience_s:g} s\n  here: {here}\n  look at the logs of the agents that are missing"
            )
            self._end("failed", FAILED, message)

    def _all_arrived(self) -> bool:
        return sum(len(host.alive) for host in self._hosts.values()) >= max(self._slots, self.planned.devices)

    def _layout_at(self, step: int) -> Layout:
        """What is wanted: the plan, or what a replay prescribes from this step on."""
        wanted = [one for one in self._formations if int(one["from_step"]) <= max(step, 0)]
        return Layout(**wanted[-1]["layout"]) if wanted else self.planned

    # ---- failures --------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """A rank or a host fell: form again as soon as the seats for it are there, or give up."""
        formation = self.memory.formation
        assert formation is not None
        assert self._noticed_s is not None
        cause = failing.first(list(self._failures.values()))
        waited_s = self._clock() - self._noticed_s
        ends = cause.is_user or self.job.fault.recovery == "stop"
        if ends or self.memory.failures >= self.job.fault.restarts + int(self._told_incident):
            if waited_s > CAUSE_S or len(self._failures.keys() | self._left.keys()) == formation.world:
                self._give_up(cause, "" if ends else self._too_often())
            return
        pause_s = BACK_OFF_S * 2 ** (self.memory.failures - 2) if self.memory.failures > 1 else 0.0
        if waited_s < min(pause_s, MOST_BACK_OFF_S) or self._somebody_comes(formation, waited_s):
            return
        self._incident(cause)
        if self._form(_because(cause)) or self._may_return(formation, waited_s):
            return
        self._give_up(cause, "there are not enough places left for any layout of this job")

    def _too_often(self) -> str:
        count = self.memory.failures + int(not self._told_incident)
        return f"{count} failures in a row, without a step between (fault.restarts = {self.job.fault.restarts})"

    def _somebody_comes(self, formation: Formation, waited_s: float) -> bool:
        """Whether it will soon be clear who is there: a host that hung up, one that joins, a process being started."""
        if any(host.gone_s is not None or not host.told for host in self._hosts.values()):
            return True
        if self.job.fault.recovery == "shrink" or waited_s > REPLACE_S:
            return False
        alive = set(self._alive())
        missing = [formation.seats[rank] for rank in self._failures]
        coming = [seat for seat in missing if seat not in alive and self._is_usable(seat)]
        return bool(coming) and len(alive) < formation.world

    def _is_usable(self, seat: Seat) -> bool:
        host = self._hosts.get(seat.host)
        return host is not None and not host.problems and seat not in self.memory.quarantined

    def _may_return(self, formation: Formation, waited_s: float) -> bool:
        """Whether to wait for lost places: nothing can go on without them, and nobody is disturbed by waiting."""
        if self._wishes:
            self._kill_all("stopped as asked, while not enough ranks were there to go on")
            return True
        if self.job.fault.recovery == "shrink" or waited_s > self.job.train.timeout_s:
            return False
        alive = set(self._alive())
        return any(
            seat not in alive and (seat.host not in self._hosts or self._is_usable(seat)) for seat in formation.seats
        )

    def _incident(self, cause: Failure) -> None:
        """Record it, once."""
        formation = self.memory.formation
        assert formation is not None
        if self._told_incident:
            return
        self._told_incident = True
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
            step=max(cause.step, self.memory.step),
            cause={"kind": cause.kind, "message": cause.message, "signal": cause.signal},
            stack=cause.stack,
            others=[rank for rank in self._failures if rank != cause.rank],
            in_a_row=self.memory.failures,
            waited_s=round(self._clock() - self._noticed_s, 3) if self._noticed_s is not None else 0.0,
        )

    def _quarantine(self, seat: Seat, reason: str) -> None:
        self.memory.quarantined.add(seat)
        self.events.write("quarantine", epoch=self.memory.epoch, host=seat.host, slot=seat.slot, reason=reason)

    def _nobody_fell(self) -> None:
        """Ranks lost each other, or their numbers, and every process lives."""
        formation = self.memory.formation
        assert formation is not None
        astray = [message for message in self._left.values() if message.get("fault")]
        if astray:
            self._astray(astray[0])
            return
        rank, message = min(self._left.items(), key=lambda one: (bool(one[1].get("state")), one[0]))
        if message.get("state"):
            self._left_s = None  # some are done, the others are still at it
        elif not self._seeks_culprit(formation):
            text = str(message.get("why") or "left its formation")
            self._fail(rank, Failure(rank=rank, step=int(message["step"]), at_s=time.time(), kind="Left", message=text))

    def _seeks_culprit(self, formation: Formation) -> bool:
        """Ranks gave up waiting: whether one that is still in, and has not moved for long, is being dealt with."""
        now = self._clock()
        if now - self._killed_s < ANSWER_S:
            return True
        stuck = {
            (host.name, slot)
            for host, slot in seated(self._hosts, formation)
            if self._rank(host, slot) not in self._left and self._age_s(host, slot) > self.job.fault.dead_after_s
        }
        if not stuck:
            return False
        if self._asked_s is None:
            self._ask_where()
            return True
        if not self._has_answers(formation):
            return True
        self._asked_s = None
        found = culprit(self._hosts, formation, stuck)
        if found is not None:
            self._kill(*found)
        return found is not None

    def _astray(self, message: Message) -> None:
        """All ranks agree that the state is not to be trusted: go on from before it, without those to blame."""
        assert self.memory.formation is not None
        sound, step, why = int(message["sound"]), int(message["step"]), str(message["why"])
        again = step in self.memory.rolled_back
        suspects = [int(rank) for rank in message.get("suspects", ())]
        cause = Failure(rank=suspects[0] if suspects else 0, step=step, at_s=time.time(), kind="Astray", message=why)
        self.memory.case = None if suspects else message.get("evidence")
        self._failures, self._noticed_s = {cause.rank: cause}, self._noticed_s or self._clock()
        if self.job.fault.recovery == "stop":
            self._give_up(cause)
            return
        if again and not suspects:
            self._give_up(cause, "it happened again at the same step after going back")
            return
        if self.memory.failures >= self.job.fault.restarts:
            self._give_up(cause, self._too_often())
            return
        self.memory.rolled_back.append(step)
        self.memory.at_most = sound
        self._incident(cause)
        if len(suspects) == 1:
            self._quarantine(self.memory.formation.seats[suspects[0]], why)
        if not self._form(f"roll back to step {sound}: {why}"):
            self._give_up(cause, "there are not enough places left for any layout of this job")

    def _look_for_stuck(self) -> None:
        """Processes live and nothing moves: ask where everybody is, and end the one that does not wait for others."""
        formation = self.memory.formation
        assert formation is not None
        if self._clock() - self._killed_s < ANSWER_S:
            return
        if self._asked_s is None:
            if self._is_stuck(formation):
                self._ask_where()
            return
        if not self._has_answers(formation):
            return
        self._asked_s = None
        if self._is_stuck(formation):
            self._blame(formation)

    def _ask_where(self) -> None:
        self._asked_s = self._clock()
        for host in self._hosts.values():
            host.where = None
        self._tell_all({"kind": "where"})

    def _has_answers(self, formation: Formation) -> bool:
        assert self._asked_s is not None
        asked = [self._hosts[name] for name in formation.hosts if name in self._hosts]
        return all(host.where is not None for host in asked) or self._clock() - self._asked_s > ANSWER_S

    def _is_stuck(self, formation: Formation) -> bool:
        return is_still(self._hosts, formation, self._patience_s)

    def _patience_s(self, phase: int) -> float:
        if phase == Phase.TRAINING:
            return self.job.fault.dead_after_s + 3 * self._step_s
        return self.job.train.timeout_s + MARGIN_S

    def _age_s(self, host: Host, slot: int) -> float:
        return host.progress[slot][2] if slot in host.progress else 0.0

    def _blame(self, formation: Formation) -> None:
        found = culprit(self._hosts, formation, {(host.name, slot) for host, slot in seated(self._hosts, formation)})
        if found is not None:
            self._kill(*found)
            return
        text = "every rank waits for another, and none moves"
        self._fail(0, Failure(rank=0, step=self.memory.step, at_s=time.time(), kind="Deadlock", message=text))

    def _kill(self, host: Host, slot: int, place: str) -> None:
        self._killed_s = self._clock()
        silent_s = round(self._age_s(host, slot), 3)
        self._send(
            host.name,
            {"kind": "kill", "epoch": self.memory.epoch, "slot": slot, "place": place, "silent_s": silent_s},
        )

    # ---- forming ---------------------------------------------------------------------------------------------------

    def _fallen(self, before: Formation) -> list[Seat]:
        """Seats whose process ended: one that only left, or only spoke for all, is as good as before."""
        seats = [(before.seats[rank], self.memory.pids[rank]) for rank in self._failures]
        return [seat for seat, pid in seats if self._pid(seat) != pid]

    def _pid(self, seat: Seat) -> int | None:
        host = self._hosts.get(seat.host)
        return host.alive.get(seat.slot) if host is not None else None

    def _form(self, reason: str, *, first: bool = True) -> bool:
        """Begin the next epoch; False when there is no formation for the seats that live.

        The very first is as planned, unless `first` says that enough was waited for that.
        """
        before = self.memory.formation
        policy = self.job.fault.recovery if before is not None or not first else "replace"
        formation = next_formation(
            epoch=max(self.memory.epoch, current_epoch(self.run)) + 1,
            planned=self._layout_at(self.memory.step),
            sequences=self.job.batch.global_sequences,
            reproducible=self.job.numerics.reproducible,
            policy="auto" if policy == "stop" else policy,
            before=before,
            alive=self._alive(),
            fallen=self._fallen(before) if before is not None else (),
        )
        if formation is None:
            return False
        memory, self._before = self.memory, before
        memory.epoch, memory.formation, memory.running = formation.epoch, formation, True
        memory.forming, memory.go = True, None
        memory.pids = [self._hosts[seat.host].alive[seat.slot] for seat in formation.seats]
        self._forget_failures()
        for host in self._hosts.values():
            host.ready, host.progress = None, {}
        self._save(memory)
        begin_epoch(self.run, formation.epoch)
        self.events.write(
            "epoch",
            epoch=formation.epoch,
            reason=reason,
            world=formation.world,
            layout=asdict(formation.layout),
            members=[
                {"rank": rank, "host": seat.host, "slot": seat.slot, "pid": memory.pids[rank]}
                for rank, seat in enumerate(formation.seats)
            ],
        )
        self._tell_all({"kind": "form", **formation.to_json()})
        return True

    def _forget_failures(self) -> None:
        self._failures, self._left = {}, {}
        self._noticed_s = self._left_s = self._grow_s = self._asked_s = None
        self._told_incident = self._told_reform = self._out_of_memory = False

    def _gather(self) -> None:
        """Go as soon as every member has answered."""
        formation = self.memory.formation
        assert formation is not None
        hosts = [self._hosts.get(name) for name in formation.hosts]
        ready = {host.name: host.ready for host in hosts if host is not None and host.ready is not None}
        if all(seat.host in ready and str(seat.slot) in ready[seat.host]["ports"] for seat in formation.seats):
            self._go(formation, ready)

    def _go(self, formation: Formation, ready: Mapping[str, Message]) -> None:
        choice = self._choice(ready)
        vaults = {
            str(rank): [self._hosts[seat.host].address, int(ready[seat.host]["ports"][str(seat.slot)][1])]
            for rank, seat in enumerate(formation.seats)
        }
        first, at_most = formation.seats[0], self.memory.at_most
        saved = [step for step in self.run.saved_steps() if at_most is None or step <= at_most]
        if choice is not None and max(saved, default=0) > choice.step:
            choice = None  # copies that could not be renewed for long are older than the disk
        step = choice.step if choice is not None else max(saved, default=0)
        self.memory.went_s = self.memory.went_s or time.time()
        go = {
            "kind": "go",
            "epoch": formation.epoch,
            "store": [self._hosts[first.host].address, int(ready[first.host]["ports"][str(first.slot)][0])],
            "vaults": vaults,
            "peers": {seat.host: vaults[str(rank)] for rank, seat in reversed(list(enumerate(formation.seats)))},
            "restore": choice.to_json() if choice is not None else None,
            "at_most": at_most,
            "case": self.memory.case,
            "went_s": self.memory.went_s,
        }
        source = (choice.epoch, choice.step) if choice is not None else None
        self.memory.lineage = self.memory.lineage.begin(formation.epoch, source=source)
        self.memory.forming, self.memory.go = False, go
        self.memory.step, self.memory.best_step = step, max(step, self.memory.best_step)
        self._step_s, self._stepped_s = 0.0, self._clock()
        self._save(self.memory)
        if self._words:  # the survivors have left what fell, and could say where they were
            self.events.write("evidence", epoch=formation.epoch - 1, last_collectives=self._words)
            self._words = {}
        where = "memory" if choice is not None else "disk" if step else "start"
        self.events.write("restore", epoch=formation.epoch, step=step, source=where)
        self._tell_all(go)
        if self.run.status().get("state") != "running":
            self.run.set_status("running", world=formation.world, started=round(time.time(), 3))

    def _choice(self, ready: Mapping[str, Message]) -> Choice | None:
        """The newest step that the members' hosts hold in full; what others hold cannot be reached."""
        held = {name: [Held.from_json(one) for one in message.get("held", ())] for name, message in ready.items()}
        found = choices(held, lineage=self.memory.lineage, at_most=self.memory.at_most)
        return found[0] if found else None

    def _grow(self) -> None:
        """A job that shrank takes its planned layout up again, at the end of a step, when the seats are there."""
        formation = self.memory.formation
        assert formation is not None
        wanted = self._layout_at(self.memory.step)
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
        if self._clock() - self._grow_s > GROW_S:
            self._told_reform = True
            self._tell_all({"kind": "reform"})

    # ---- ending ----------------------------------------------------------------------------------------------------

    def _all_left(self) -> None:
        """Every rank came out of its loop."""
        states = {str(one.get("state") or "") for one in self._left.values()}
        if states == {"reform"}:
            self.memory.step = max(int(one["step"]) for one in self._left.values())
            if not self._form("as planned"):
                self._end("failed", FAILED, f"{self.run.path}: no formation is left for step {self.memory.step}")
        elif states == {"done"}:
            self._end("done", 0, "", step=failing.last_checkpoint(self.run))
        elif states == {"stopped"}:
            saved = failing.last_checkpoint(self.run)
            kept = f"saved step {saved:,}" if saved is not None else "nothing was saved"
            message = f"stopped as asked: {kept}; go on with: phalanx train --resume {self.run.path}"
            self._end("stopped", STOPPED, message, step=saved)
        elif "" in states:
            self._nobody_fell()
        else:
            text = f"ranks left in different states: {', '.join(sorted(states))}"
            self._fail(0, Failure(rank=0, step=self.memory.step, at_s=time.time(), kind="Left", message=text))

    def _kill_all(self, why: str) -> None:
        saved = failing.last_checkpoint(self.run)
        kept = f"the last checkpoint is step {saved:,}" if saved is not None else "no checkpoint was written"
        self._end("stopped", STOPPED, f"{why}; {kept}", step=saved)

    def _give_up(self, cause: Failure, why: str = "") -> None:
        formation = self.memory.formation
        assert formation is not None
        self._incident(cause)
        left = [
            Failure(rank=rank, step=int(one["step"]), at_s=time.time(), kind="Left", message=str(one.get("why")))
            for rank, one in self._left.items()
            if rank not in self._failures and not one.get("state") and not one.get("fault")
        ]
        others = [one for one in self._failures.values() if one is not cause]
        message = failing.tell(
            self.run,
            cause,
            others=[*others, *left],
            world=formation.world,
            out_of_memory=self._out_of_memory,
            host=formation.seats[cause.rank].host if len(self._order) > 1 else "",
        )
        if why:
            message = f"{message}\n  given up: {why}"
        code = cause.exit_code if cause.is_user else FAILED
        self._end("failed", code, message, rank=cause.rank, step=cause.step)

    def _end(self, state: str, code: int, message: str, **fields: Any) -> None:
        self.run.set_status(state, exit_code=code, message=message, **fields)
        self.events.write("end", epoch=self.memory.epoch, state=state, message=message)
        self.is_over, self.memory.running = True, False
        self._save(self.memory)
        self._tell_all({"kind": "end", "code": code})

    def _tell_all(self, message: Message) -> None:
        for name in self._hosts:
            self._send(name, message)


def _because(cause: Failure) -> str:
    said = next(iter(cause.message.splitlines()), "")[:200]
    return f"rank {cause.rank} fell: {cause.kind} {said}".strip()
