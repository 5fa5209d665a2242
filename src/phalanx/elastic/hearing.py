"""What agents say, one function for each kind of message. They only take note; `Council.tick` acts."""

from __future__ import annotations

import time
from collections.abc import Callable

from phalanx.elastic.failure import Failure
from phalanx.elastic.heartbeat_board import NO_STEP
from phalanx.elastic.hosts import Host
from phalanx.elastic.incident import shut_out
from phalanx.elastic.membership import HostSlot
from phalanx.elastic.memory import Message
from phalanx.elastic.preflight import check_skew, clock_skew_s
from phalanx.elastic.room import Room

CONNECT_S = 2.0  # an agent reads its clock before a connection that may take so long
STEPPED_S = 1.0  # between what our clock says has passed and what has, after which it was set


def hear(room: Room, name: str, message: Message) -> None:
    """Take note of what an agent said; what nobody knows is left alone, as a newer agent may say it."""
    kind = str(message.get("kind"))
    if kind == "joined":
        _joined(room, name, message["hello"])
        return
    host = room.hosts.get(name)
    if host is None:
        if kind != "gone":  # it was given up, and lives: it is to introduce itself again
            room.send(name, {"kind": "again"})
        return
    host.heard_s = room.clock()
    if kind in HEARD:
        HEARD[kind](room, host, message)


def _joined(room: Room, name: str, hello: Message) -> None:
    old = room.hosts.get(name)
    problems = [str(text) for text in hello.get("problems", ())]
    skew_s = clock_skew_s(float(hello["time"]), CONNECT_S, now_s=time.time())
    problems += [problem.render() for problem in check_skew(skew_s, host=name)]
    host = Host(name=name, address=str(hello.get("address", "")), heard_s=room.clock(), problems=tuple(problems))
    room.hosts[name] = host
    if name not in room.order:
        room.order.append(name)
    room.events.write(
        "host",
        host=name,
        state="joined",
        epoch=room.memory.epoch,
        problems=problems,
        link_bytes_per_s=hello.get("link_bytes_per_s"),
    )
    shut_out(room, host, problems if old is None else ())
    if room.wishes:
        room.send(name, {"kind": "stop"})


def _status(room: Room, host: Host, message: Message) -> None:
    """What an agent holds that has just connected, perhaps not for the first time."""
    host.told, host.alive = True, {int(slot): int(pid) for slot, pid in message["slots"].items()}
    wish(room, int(message["wishes"]))  # before anything is formed of these slots
    formation = room.memory.formation
    if formation is None or not room.memory.running:
        return
    ranks, epoch = formation.of_host(host.name), int(message["epoch"])
    gone = [
        rank
        for slot, rank in ranks.items()
        if host.alive.get(slot) != room.memory.pids[rank] and rank not in room.replacing
    ]
    if epoch < formation.epoch and not room.memory.forming:
        gone = list(ranks.values())
    for rank in gone:
        text = f"its process on host {host.name} ended while nobody looked"
        room.fail(rank, Failure(rank=rank, step=room.memory.step, at_s=time.time(), kind="Left", message=text))
    if gone or not ranks:
        return
    if epoch < formation.epoch and room.memory.forming:  # it was never told, or the word was lost
        room.send(host.name, {"kind": "form", **formation.to_json()})
    elif int(message["went"]) < formation.epoch and room.memory.go is not None:
        room.send(host.name, room.memory.go)
    elif room.memory.forming:  # whoever has its seat stays in it
        for slot in ranks:
            room.send(host.name, {"kind": "seat", "epoch": formation.epoch, "slot": slot})


def _gone(room: Room, host: Host, message: Message) -> None:
    host.gone_s = room.clock()


def _up(room: Room, host: Host, message: Message) -> None:
    host.alive |= {int(slot): int(pid) for slot, pid in message["slots"].items()}


def _lost(room: Room, host: Host, message: Message) -> None:
    slot, pid = int(message["slot"]), int(message["pid"])
    if host.alive.get(slot) == pid:
        del host.alive[slot]
    rank = room.rank_of(host, slot)
    if rank is None or not room.memory.running or room.memory.pids[rank] != pid:
        return
    failure = Failure(**{**message["failure"], "rank": rank})
    # It never came out of what fell before, or the form has not even reached it: the same incident.
    is_leaving = message.get("leaving") or int(message["epoch"]) < room.memory.epoch
    if room.memory.forming and is_leaving and not failure.is_user:
        room.replace(rank, failure)
        return
    room.out_of_memory = room.out_of_memory or bool(message.get("out_of_memory"))
    room.came_to(int(message["failure"]["step"]))
    room.fail(rank, failure)


def _left(room: Room, host: Host, message: Message) -> None:
    epoch, seat = int(message["epoch"]), HostSlot(host.name, int(message["slot"]))
    formations = (one for one in (room.memory.formation, room.before) if one is not None and one.epoch == epoch)
    formation = next(formations, None)
    rank = formation.rank(seat) if formation is not None else None
    if rank is None:
        return
    if message.get("last_collective"):
        room.words[rank] = str(message["last_collective"])
    if epoch == room.memory.epoch:
        room.came_to(int(message["step"]))
        room.left[rank] = message
        room.left_s = room.left_s or room.clock()


def _ready(room: Room, host: Host, message: Message) -> None:
    if int(message["epoch"]) != room.memory.epoch:
        return
    host.ready = message
    if room.asked_at is not None and "time" in message:
        (asked_s, asked_clock_s), now_s = room.asked_at, time.time()
        took_s = room.clock() - asked_clock_s
        if abs(now_s - asked_s - took_s) < STEPPED_S:  # else it was our own clock that was set
            skew_s = clock_skew_s(float(message["time"]), took_s, now_s=now_s)  # it was read after we asked
            shut_out(room, host, [problem.render() for problem in check_skew(skew_s, host=host.name)])


def _unfit(room: Room, host: Host, message: Message) -> None:
    """An agent looked at its host before it formed again, and found it bad."""
    if int(message["epoch"]) == room.memory.epoch:
        known = set(host.problems)
        shut_out(room, host, [str(text) for text in message["problems"] if str(text) not in known])


def _beat(room: Room, host: Host, message: Message) -> None:
    if int(message["epoch"]) != room.memory.epoch or room.memory.forming:
        return
    host.progress = {
        int(slot): (int(step), int(phase), float(age)) for slot, (step, phase, age) in message["progress"].items()
    }
    step = max((host.progress[slot][0] for slot in room.members(host) if slot in host.progress), default=NO_STEP)
    if step > room.memory.step:
        now = room.clock()
        room.step_s, room.stepped_s = max(0.9 * room.step_s, now - room.stepped_s), now
    room.came_to(step)


def _where(room: Room, host: Host, message: Message) -> None:
    host.where = {int(slot): (bool(waits), str(place)) for slot, (waits, place) in message["ranks"].items()}


def _stop(room: Room, host: Host, message: Message) -> None:
    wish(room, int(message["count"]))
    if message.get("hurry"):
        room.hurry_s = room.hurry_s or room.clock()


def wish(room: Room, count: int) -> None:
    """Somebody asked us to stop, for the `count`th time."""
    if count > room.wishes:
        room.wishes, room.wished_s = count, room.wished_s or room.clock()
        room.tell_all({"kind": "stop"})


HEARD: dict[str, Callable[[Room, Host, Message], None]] = {
    "status": _status,
    "gone": _gone,
    "up": _up,
    "lost": _lost,
    "left": _left,
    "ready": _ready,
    "unfit": _unfit,
    "beat": _beat,
    "where": _where,
    "stop": _stop,
}
