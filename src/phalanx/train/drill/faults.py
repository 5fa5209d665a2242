"""The faults that a drill can inject: their kinds and keys, and one `Fault` as command-line text and as JSON.

`Fault` states what happens, to which rank, host or peer, and when:

kill:rank=2,step=5        hang:rank=1+3,step=4        kill:rank=0,point=save-manifest        host:host=1,at_s=3

Drills of peers on slow links (--peers) have their own kinds: kill:peer=2,step=5,for_s=3        partition:peer=3+4
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from phalanx.errors import Problem, UserError, mistake, nearest

# The points of train.state.save, in their order; faults during a save name one of them.
SAVE_POINTS = ("begin", "data", "index", "done", "all", "manifest", "set-aside", "commit", "prune")
# The points at which a rank can be hit. `init`: before it joins the process group, in any generation. `restore`:
# while it restores its state in a generation after the first, so during a recovery. `collective`: by a timer, while
# the step runs.
POINTS = ("init", "restore", "step", "collective", *(f"save-{name}" for name in SAVE_POINTS))
EVERY_TIME = 10**6
MOST = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultKind:
    """The effect of a kind of fault, the keys it accepts, and the process that injects it."""

    meaning: str
    keys: tuple[str, ...]
    # True: the rank injects it into itself; False: the drill's own process does.
    inside: bool = True
    # Choices of the key `how`; the first one is the default.
    hows: tuple[str, ...] = ()
    host: bool = False  # hits a host, not a rank
    # True: it must lead to a recovery, so a new generation or the end of the run follows.
    ends: bool = True


_WHEN = ("step", "at_s", "epoch", "times")
_RANK = ("rank", "point", *_WHEN)
_RANK_AT_STEP = ("rank", *_WHEN)
_OUTSIDE = ("step", "at_s")

FAULT_KINDS: dict[str, FaultKind] = {
    "kill": FaultKind(meaning="SIGKILL of a rank", keys=_RANK),
    "hang": FaultKind(meaning="SIGSTOP of a rank; after for_s SIGCONT as a zombie", keys=(*_RANK, "for_s")),
    "mute": FaultKind(meaning="a rank works on but its heartbeats stop", keys=(*_RANK_AT_STEP, "for_s")),
    "slow": FaultKind(
        meaning="a rank sleeps sleep_s in every step for for_s", keys=(*_RANK_AT_STEP, "sleep_s", "for_s"), ends=False
    ),
    "raise": FaultKind(meaning="a rank raises an exception", keys=_RANK),
    "cuda-error": FaultKind(
        meaning="a kernel of a rank fails, after which nothing runs in its process; without a GPU, an exception",
        keys=_RANK,
    ),
    "memory": FaultKind(
        meaning="a rank runs out of memory: MemoryError, or a real allocation over RLIMIT_AS",
        keys=(*_RANK, "how"),
        hows=("raise", "limit"),
    ),
    "nan": FaultKind(meaning="NaN in a rank's gradient", keys=_RANK_AT_STEP, ends=False),
    "zero": FaultKind(meaning="a rank's gradients are all 0", keys=_RANK_AT_STEP, ends=False),
    "flip": FaultKind(
        meaning="one bit of a weight, gradient or moment of a rank is flipped",
        keys=(*_RANK_AT_STEP, "how", "seed"),
        hows=("weight", "moment", "gradient", "update"),
    ),
    "crash-loop": FaultKind(
        meaning="a rank (or a slot) is killed at its start in each generation; with point=restore from the second on",
        keys=("rank", "slot", "point", "epoch", "times"),
    ),
    "host": FaultKind(
        meaning="SIGKILL of an agent and all its ranks", keys=("host", *_OUTSIDE), inside=False, host=True
    ),
    "freeze": FaultKind(
        meaning="SIGSTOP of an agent and all its ranks; after for_s SIGCONT as zombies",
        keys=("host", "for_s", "how", *_OUTSIDE),
        inside=False,
        hows=("host", "coordinator"),
        host=True,
    ),
    "coordinator": FaultKind(meaning="SIGKILL of the coordinator", keys=_OUTSIDE, inside=False, ends=False),
    "sigterm": FaultKind(meaning="SIGTERM to the launcher", keys=_OUTSIDE, inside=False, ends=False),
    "disk-full": FaultKind(
        meaning="a rank cannot write its part of a checkpoint for for_s: ENOSPC, or a real RLIMIT_FSIZE",
        keys=("rank", "for_s", "how", *_WHEN),
        hows=("raise", "limit"),
        ends=False,
    ),
    "damage": FaultKind(
        meaning="a file of the newest checkpoint is damaged",
        keys=("how", "seed", *_OUTSIDE),
        inside=False,
        hows=("flip", "truncate", "swap", "missing", "manifest"),
        ends=False,
    ),
    "fill-disk": FaultKind(
        meaning="the file system of the checkpoints is full for for_s; only on one that the drill mounted itself",
        keys=("for_s", *_OUTSIDE),
        inside=False,
        ends=False,
    ),
    "read-only": FaultKind(
        meaning="nothing can be written to the checkpoint folder for for_s",
        keys=("for_s", *_OUTSIDE),
        inside=False,
        ends=False,
    ),
    "strangers": FaultKind(
        meaning="20,000 connections to every port on which processes of the run listen",
        keys=_OUTSIDE,
        inside=False,
        ends=False,
    ),
    "busy-core": FaultKind(
        meaning="a rank is stopped for a share of the time, as if others used its core, for for_s",
        keys=("rank", "share", "for_s", *_OUTSIDE),
        inside=False,
        ends=False,
    ),
    "port": FaultKind(
        meaning="500 loopback ports that the next generation might use are taken",
        keys=_OUTSIDE,
        inside=False,
        ends=False,
    ),
    "partition": FaultKind(
        meaning="no packet between a host and the others for for_s",
        keys=("host", "for_s", *_OUTSIDE),
        inside=False,
        host=True,
    ),
    "slow-link": FaultKind(
        meaning="packets of a host arrive sleep_s late for for_s",
        keys=("host", "for_s", "sleep_s", *_OUTSIDE),
        inside=False,
        host=True,
        ends=False,
    ),
    "lossy-link": FaultKind(
        meaning="a share of a host's packets is lost for for_s",
        keys=("host", "for_s", "share", *_OUTSIDE),
        inside=False,
        host=True,
        ends=False,
    ),
}

# Faults of peers on slow links. Peers are numbered from 1, as in their names; several are hit together: peer=2+3.
PEER_FAULTS: dict[str, FaultKind] = {
    "kill": FaultKind(
        meaning="SIGKILL of a peer; started again after for_s", keys=("peer", "for_s", *_OUTSIDE), inside=False
    ),
    "leave": FaultKind(
        meaning="a peer is asked to leave (Ctrl-C); started again after for_s",
        keys=("peer", "for_s", *_OUTSIDE),
        inside=False,
    ),
    "hang": FaultKind(
        meaning="SIGSTOP of a peer; SIGCONT after for_s", keys=("peer", "for_s", *_OUTSIDE), inside=False
    ),
    "partition": FaultKind(
        meaning="nothing passes between the named peers and the others for for_s",
        keys=("peer", "for_s", *_OUTSIDE),
        inside=False,
    ),
    "slow-link": FaultKind(
        meaning="what a peer sends and is sent arrives sleep_s late for for_s",
        keys=("peer", "for_s", "sleep_s", *_OUTSIDE),
        inside=False,
        ends=False,
    ),
    "busy-core": FaultKind(
        meaning="a peer is stopped for a share of the time, as if others used its core, for for_s",
        keys=("peer", "share", "for_s", *_OUTSIDE),
        inside=False,
        ends=False,
    ),
    "slow": FaultKind(
        meaning="a peer comes sleep_s late to every round for for_s",
        keys=("peer", "sleep_s", "for_s", *_OUTSIDE),
        ends=False,
    ),
    "nan": FaultKind(meaning="a peer's update holds NaN", keys=("peer", *_OUTSIDE)),
    "poison": FaultKind(
        meaning="a peer's update is 1,000 times too large, or with how=loss turned round so that the loss rises",
        keys=("peer", "how", *_OUTSIDE),
        hows=("norm", "loss"),
    ),
    "liar": FaultKind(
        meaning="a peer claims to have learnt from more samples than it has, or states a norm that is too small",
        keys=("peer", "how", *_OUTSIDE),
        hows=("samples", "norm"),
    ),
    "lie": FaultKind(
        meaning="a peer sends false updates of its weights from then on, of a usual size: see docs/drills.md",
        keys=("peer", "how", *_OUTSIDE),
        hows=("reversed", "scaled", "random", "copied", "stale", "flipped"),
    ),
    "clock-skew": FaultKind(
        meaning="the clocks of a peer are skew_s off from its start on", keys=("peer", "skew_s"), ends=False
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault. `step`: before the step with this number; `at_s`: seconds after the first step."""

    kind: str
    id: int = 0
    # Taken modulo the number of ranks at that time.
    rank: tuple[int, ...] = ()
    # Numbers from 1; not empty in a drill of peers, and only there.
    peer: tuple[int, ...] = ()
    # The rank that has this slot, whatever its number.
    slot: int | None = None
    host: int = 0
    step: int | None = None
    at_s: float | None = None
    # Only in this generation of the membership; the key has had this name since 0.1.
    epoch: int | None = None
    point: str = ""
    how: str = ""
    for_s: float = 0.0  # 0: until the end
    sleep_s: float = 0.0
    share: float = 0.0
    skew_s: float = 0.0
    seed: int = 0
    times: int = 1

    @property
    def of(self) -> FaultKind:
        """The kind of this fault: its meaning and its keys."""
        return (PEER_FAULTS if self.peer else FAULT_KINDS)[self.kind]

    @property
    def text(self) -> str:
        """The fault as it is written on the command line.

        >>> parse_fault("kill:step=5,rank=2+3").text
        'kill:rank=2+3,step=5'
        """
        written = ((item.name, getattr(self, item.name)) for item in fields(self) if item.name not in ("kind", "id"))
        words = [f"{key}={_value_text(value)}" for key, value in written if self._is_said(key, value)]
        return self.kind + (":" + ",".join(words) if words else "")

    def to_dict(self) -> dict[str, Any]:
        """The fault as JSON values; keys that have their default value are left out."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        shown = {key: value for key, value in values.items() if key in ("kind", "id") or self._is_said(key, value)}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in shown.items()}

    def _is_said(self, key: str, value: Any) -> bool:
        """True for a key that is written out: one that differs from its default, and always the peers that are hit."""
        defaults = _usual_values(self.kind, self.of)
        unset = defaults[key] if key in defaults else next(item.default for item in fields(Fault) if item.name == key)
        return bool(value != unset or (key == "peer" and value))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Fault:
        """Read the fault that `to_dict` wrote; raises UserError for anything else."""
        words = {key: _value_text(tuple(v) if isinstance(v, list) else v) for key, v in values.items()}
        kind, number = words.pop("kind", ""), words.pop("id", "0")
        return parse_fault(
            f"{kind}:" + ",".join(f"{key}={value}" for key, value in words.items()),
            id=_whole_number(number, "id"),
            kinds=PEER_FAULTS if "peer" in words else FAULT_KINDS,
        )


def parse_fault(text: str, *, id: int = 0, kinds: Mapping[str, FaultKind] = FAULT_KINDS) -> Fault:
    """Parse `kind:key=value,key=value`; raises UserError that names the valid choices."""
    kind, _, rest = text.strip().partition(":")
    if kind not in kinds:
        close = nearest(kind, kinds)
        raise mistake(
            f"--fault {text[:80]}",
            f"{kind[:40]!r} is not a fault that can be injected",
            fix=f"did you mean {close}?" if close else f"use one of {', '.join(kinds)}",
        )
    texts: dict[str, str] = {}
    for word in (word for word in rest.split(",") if word.strip()):
        key, equals, value = word.partition("=")
        name = "how" if kind == "lie" and key.strip() == "kind" else key.strip()
        texts[_check_key(text, kind, name, bool(equals), kinds[kind].keys)] = value.strip()
    of = kinds[kind]
    values = {**_usual_values(kind, of), **{key: _read_value(text, of, key, value) for key, value in texts.items()}}
    _check_fault(text, of, values)
    return Fault(kind=kind, id=id, **values)


def parse_faults(texts: Iterable[str], *, kinds: Mapping[str, FaultKind] = FAULT_KINDS) -> tuple[Fault, ...]:
    """Parse and number the faults; raises one UserError with all mistakes."""
    faults: list[Fault] = []
    problems: list[Problem] = []
    for number, text in enumerate(texts):
        try:
            faults.append(parse_fault(text, id=number, kinds=kinds))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(problems)
    return tuple(faults)


def _check_key(text: str, kind: str, key: str, has_value: bool, allowed: tuple[str, ...]) -> str:
    if key in allowed and has_value:
        return key
    close = nearest(key, allowed)
    raise mistake(
        f"--fault {text[:80]}",
        f"{key[:40]!r} has no value" if key in allowed else f"{kind} has no key {key[:40]!r}",
        fix=f"did you mean {close}=…?" if close and key != close else f"{kind} takes {', '.join(allowed)}",
    )


def _usual_values(kind: str, of: FaultKind) -> dict[str, Any]:
    """The default values of the keys of a kind, for keys that are not written."""
    defaults: dict[str, Any] = {}
    if "peer" in of.keys:
        defaults["peer"] = (2,)
    if "skew_s" in of.keys:
        # About three years behind.
        defaults["skew_s"] = -1e8
    if "rank" in of.keys:
        defaults["rank"] = (1,)
    if of.host:
        defaults["host"] = 1
    if of.hows:
        defaults["how"] = of.hows[0]
    # For these kinds the default is 0: they last.
    if "for_s" in of.keys and kind not in ("hang", "mute", "kill", "leave"):
        defaults["for_s"] = 5.0
    if "sleep_s" in of.keys:
        defaults["sleep_s"] = 0.1
    if "share" in of.keys:
        defaults["share"] = 0.75 if kind == "busy-core" else 0.05
    if kind == "crash-loop":
        defaults |= {"times": EVERY_TIME, "point": "init"}
    return defaults


def _read_value(text: str, of: FaultKind, key: str, value: str) -> Any:
    try:
        return _READ[key](value, key)
    except ValueError as error:
        raise mistake(f"--fault {text[:80]}", str(error), fix=_example_text(of, key)) from None


def _example_text(of: FaultKind, key: str) -> str:
    if key == "how":
        return f"use one of {', '.join(of.hows)}"
    if key == "point":
        return f"use one of {', '.join(POINTS)}"
    examples = {name: f"write {name}=2, or {name}=1+3 for two at once" for name in ("rank", "peer")}
    examples |= {"share": "write share=0.05", "skew_s": "write skew_s=-3600"}
    return examples.get(key, f"write {key}=2")


def _check_fault(text: str, of: FaultKind, values: Mapping[str, Any]) -> None:
    where = f"--fault {text[:80]}"
    if values.get("how") and values["how"] not in of.hows:
        raise mistake(where, f"how={values['how'][:40]} is unknown", fix=_example_text(of, "how"))
    if values.get("point") and values["point"] not in POINTS:
        raise mistake(where, f"point={values['point'][:40]} is unknown", fix=_example_text(of, "point"))
    if values.get("step") is not None and values.get("at_s") is not None:
        raise mistake(where, "step and at_s exclude each other", fix="give one of them")


def _whole_number(value: str, key: str) -> int:
    if not value.isdecimal() or int(value) > MOST:
        raise ValueError(f"{key}={value[:40]} must be a whole number, 0 or more")
    return int(value)


def _rank_list(value: str, key: str) -> tuple[int, ...]:
    return tuple(_whole_number(number, key) for number in value.split("+"))


def _seconds_value(value: str, key: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number <= MOST:
        raise ValueError(f"{key}={value[:40]} must be a number, 0 or more")
    return number


def _skew_value(value: str, key: str) -> float:
    return -_seconds_value(value[1:], key) if value.startswith("-") else _seconds_value(value, key)


def _share_value(value: str, key: str) -> float:
    number = _seconds_value(value, key)
    if number > 1:
        raise ValueError(f"{key}={value[:40]} is above 1")
    return number


def _word(value: str, key: str) -> str:
    return value


def _value_text(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


_READ: dict[str, Callable[[str, str], Any]] = {
    **dict.fromkeys(("host", "slot", "step", "epoch", "seed", "times"), _whole_number),
    **dict.fromkeys(("at_s", "for_s", "sleep_s"), _seconds_value),
    **dict.fromkeys(("point", "how"), _word),
    **dict.fromkeys(("rank", "peer"), _rank_list),
    "skew_s": _skew_value,
    "share": _share_value,
}
