"""What the typed decoder takes is what the other parser gives, and a log read with it has the same facts as without."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import orjson
import pytest
from synthetic import write_run

from phalanx.record import event_batches
from phalanx.record.event_batches import TypedDecoder, row_of
from phalanx.record.event_schema import EventColumns
from phalanx.record.run import Run
from phalanx.rules.facts.log_facts import LogFacts
from phalanx.rules.log.stream import read_log

STEP = {
    "v": 1, "event": "step", "t": 1.5, "rank": 0, "step": 3, "epoch": None, "loss": 2.25, "tokens": 64,
    "duration_s": 0.5, "wait_s": 0.1, "skipped": False, "digest": "ab12", "mine": 7,
}  # fmt: skip
MONITOR = {"v": 1, "event": "monitor", "t": 2, "rank": 0, "utilization": 0.5, "utilization_source": "nvml"}
NUMBERS = """
    0 -0 -0.0 00 01 +1 1. .5 1e5 1E+5 1e400 -1e400 1e-400 5.0 9223372036854775807 9223372036854775808 -1 1.5 1_0 0x1 1e
    -9223372036854775809 18446744073709551616 123456789012345678901234567890 2.2250738585072011e-308 4.9e-324 -
    1.7976931348623159e308 0.1234567890123456789012345678901 null true false NaN Infinity nul [] {} [1] {"a":1} 1}{ //
"""
TEXTS = (
    '"x"', '"\\u0041"', '"\\ud800"', '"\\ud83d\\ude00"', '"\\x"', '"\\/"', '"open', "", '"a\tb"', '"é"', " 1 ", "1,",
)  # fmt: skip


def line(event: dict[str, object], name: str, literal: str) -> bytes:
    told = {key: literal if key == name else json.dumps(value) for key, value in event.items()}
    return ("{" + ",".join(f'"{key}":{value}' for key, value in told.items()) + "}").encode()


@pytest.mark.parametrize("event", [STEP, MONITOR])
def test_what_it_takes_is_right_and_the_same(event):
    reader, kind = TypedDecoder(orjson.loads), event["event"]
    reader.learn([event])
    assert reader.read(b"[" + orjson.dumps(event) + b"]") is not None
    for name in event:
        for literal in (*NUMBERS.split(), *TEXTS):
            data = b"[" + line(event, name, literal) + b"]"
            found = reader.read(data)
            if found is None:
                continue
            (other,) = orjson.loads(data)
            told = {"event": kind, **dict(zip(reader.rows[kind], row_of(found[0][0]), strict=True))}
            assert {key: repr(value) for key, value in told.items()} == {key: repr(other[key]) for key in told}, data
            assert told.keys() == other.keys()
            assert EventColumns(kind, [other]).doubts() == [], data


@pytest.mark.parametrize(
    "other",
    [
        {"loss": 2.25},  # fields are missing
        STEP | {"more": 1},
        STEP | {"rank": True},
        STEP | {"duration_s": -1},
        STEP | {"v": 2},
        {"event": "epoch", "t": 1.0},
    ],
)
def test_what_it_does_not_know_it_refuses(other):
    reader = TypedDecoder(orjson.loads)
    assert reader.read(b"[" + orjson.dumps(STEP) + b"]") is None  # it has seen none
    reader.learn([STEP])
    assert reader.read(b"[" + orjson.dumps(STEP) + b"," + orjson.dumps(other) + b"]") is None
    assert reader.read(b"[" + orjson.dumps(STEP)[:-1] + b',"event":"monitor"}]') is None


def test_other_kinds_stay_tables_and_may_lack_fields():
    reader = TypedDecoder(orjson.loads)
    saves = [{"event": "checkpoint", "t": 1, "step": 5, "phase": "stage"}, {"event": "checkpoint", "t": 2, "bytes": 9}]
    odd = {"event": "peers", "t": 3.0, "pairs": [{"peer": 1, "count": 2**70}]}
    reader.learn([*saves, odd, STEP])
    data = b"[" + b",".join(json.dumps(event).encode() for event in [*saves, STEP, odd]) + b"]"
    events, others = reader.read(data) or ([], [])
    assert events[:2] == saves
    assert events[3] == odd | {"pairs": [{"peer": 1, "count": 2.0**70}]}  # as orjson has it
    assert others == [(0, "checkpoint"), (1, "checkpoint"), (3, "peers")]


def test_decoders_are_bounded():
    reader = TypedDecoder(orjson.loads)
    for count in range(2 * event_batches.MOST_MADE):
        reader.learn([STEP | {f"field-{count}": 1}, {"event": f"kind {count}", "t": 1.0}])
    assert reader._made == event_batches.MOST_MADE
    assert len(reader._shapes) <= event_batches.MOST_KINDS


# ---- whole runs ------------------------------------------------------------------------------------------------------


def facts(run: Run, monkeypatch: pytest.MonkeyPatch, *, with_it: bool) -> LogFacts:
    with monkeypatch.context() as patch:
        patch.setattr(event_batches, "READ_BYTES", 8192)
        if not with_it:
            patch.setattr(event_batches, "MOST_MADE", 0)
        found = read_log(run)
    assert found.checkpoints is not None
    return replace(found, checkpoints=replace(found.checkpoints, free_bytes=None))  # others write to the disk, too


def damaged(text: str, rng: random.Random) -> str:
    way = rng.randrange(8)
    if way == 0:
        return text[: rng.randrange(len(text))]
    if way == 1:
        return f"{text} {text}"
    if way == 2:
        return ""
    event = json.loads(text)
    name = rng.choice(list(event))
    if way == 3:
        del event[name]
    elif way == 4:
        event["extra"] = rng.choice([1, "x", None, "password=hunter2!x"])
    else:
        event[name] = rng.choice([None, 5.0, -1, "x", 2**70, [], True, 1e12])
    return json.dumps(event, separators=(",", ":"))


@pytest.mark.parametrize("share", [0.0, 0.005, 0.05])
def test_the_same_facts_with_and_without(tmp_path, monkeypatch, share):
    run, rng = write_run(tmp_path, ranks=3, hosts=1, steps=200, incidents=2), random.Random(4)
    for rank in range(3):
        lines = run.events(rank).read_text().splitlines()
        lines = [damaged(one, rng) if rng.random() < share else one for one in lines]
        run.events(rank).write_text("\n".join(lines) + "\n")
    taken = []
    real = TypedDecoder.read
    monkeypatch.setattr(TypedDecoder, "read", lambda *all_: taken.append(real(*all_)) or taken[-1])
    found = facts(run, monkeypatch, with_it=True)
    assert any(one is not None for one in taken)
    taken.clear()
    assert found == facts(run, monkeypatch, with_it=False)
    assert not any(one is not None for one in taken)
