"""Logs as they should not be: every one is read to its end, in little memory, and says what is wrong with it."""

from __future__ import annotations

import gzip
import json
import os
import random
import threading
import tracemalloc
from pathlib import Path

import pytest
from synthetic import write_run

from phalanx.record import event_batches
from phalanx.record.event_batches import EventParser
from phalanx.record.run import Run
from phalanx.rules.log import agreement as agree
from phalanx.rules.log import steps, sums
from phalanx.rules.log.stream import LogStream, read_log


@pytest.fixture
def run(tmp_path) -> Run:
    return write_run(tmp_path, ranks=2, hosts=1, steps=60, incidents=0)


def test_a_truncated_file(run):
    data = run.events(1).read_bytes()
    run.events(1).write_bytes(data[: len(data) // 2])
    found = read_log(run).grammar
    assert found.unreadable == 1
    assert found.unreadable_spot.file.endswith("events-00001.jsonl")
    assert found.unreadable_spot.line == data[: len(data) // 2].count(b"\n") + 1


def test_lines_in_another_order(run):
    lines = run.events(0).read_text().splitlines(keepends=True)
    middle = lines[5:-5]
    random.Random(1).shuffle(middle)
    run.events(0).write_text("".join([*lines[:5], *middle, *lines[-5:]]))
    found = read_log(run).grammar
    assert found.out_of_order > 10
    assert found.out_of_order_spot.line > 5
    assert found.unreadable == found.invalid == 0


def test_one_pair_of_steps_that_changed_places(run):
    lines = run.events(0).read_text().splitlines(keepends=True)
    steps = [place for place, line in enumerate(lines) if '"event":"step"' in line]
    a, b = steps[20], steps[21]
    lines[a], lines[b] = lines[b], lines[a]
    run.events(0).write_text("".join(lines))
    found = read_log(run)
    assert found.grammar.out_of_order >= 1
    assert a + 1 < found.grammar.out_of_order_spot.line <= b + 1
    assert found.steps.again == 0


def test_wrong_types_are_named_with_field_and_line(run):
    lines = run.events(0).read_text().splitlines()
    place = next(at for at, line in enumerate(lines) if '"step":30,' in line)
    lines[place] = json.dumps(json.loads(lines[place]) | {"loss": "low", "duration_s": []})
    run.events(0).write_text("\n".join(lines) + "\n")
    found = read_log(run).grammar
    assert (found.invalid, found.invalid_spot.line) == (1, place + 1)
    assert found.invalid_text == "step: loss = 'low' is not number or null"


@pytest.mark.parametrize(
    "line",
    [
        b'{"v":1,"event":"step","t":1,"rank":0,"step":NaN}',
        b'{"v":1,"event":"step","t":1,"rank":0,"step":1e999}',
        b"\x00\xff\xfe binary \x1b[2J",
        b"[1,2,3]",
        b'"text"',
        b'{"event":5}',
        b"{" * 3000,
        b'{"v":1,"event":"step","t":1794700200,"rank":0,"step":[1',
    ],
)
def test_lines_that_are_no_events_are_counted(run, line):
    lines = run.events(0).read_bytes().splitlines()
    lines.insert(7, line)
    run.events(0).write_bytes(b"\n".join(lines) + b"\n")
    found = read_log(run)
    assert (found.grammar.unreadable, found.grammar.unreadable_spot.line) == (1, 8)
    assert found.steps.count == 60


@pytest.mark.parametrize(
    "fields",
    [
        {"step": -5}, {"step": 7.0, "digest": "a"}, {"epoch": 1.0, "skipped": True},
        {"step": 2**64 - 1}, {"t": "now"}, {"t": -1e300}, {"rank": 7}, {"rank": None}, {"v": 2},
        {"duration_s": -1.0}, {"duration_s": 1e308}, {"tokens": 1.5}, {"tokens": 10**18}, {"loss": 1e308},
        {"noise_trace": 1e308, "grad_squared": 1e-308}, {"epoch": "x"}, {"epoch": -3}, {"digest": 5},
        {"digest": "x" * 1000}, {"skipped": 1}, {"wait_s": 1e308}, {"memory_bytes": 1e308}, {"event": ""},
        {"event": "step\x1b[2J<script>"},
    ],
)  # fmt: skip
def test_absurd_values_end_in_facts(run, fields):
    lines = run.events(0).read_text().splitlines()
    for place, line in enumerate(lines):
        if '"event":"step"' in line and place % 3 == 0:
            lines[place] = json.dumps(json.loads(line) | fields)
    run.events(0).write_text("\n".join(lines) + "\n")
    found = read_log(run)
    assert found.steps.count > 0
    assert "\x1b" not in str(found)


def test_absurd_values_in_every_other_kind(run):
    rng = random.Random(3)
    odd = [None, -1, 2**70, "x", [], {}, [None], True, 1e308, "\x1b[31m"]
    for path in (run.events(0), run.supervisor):
        lines = []
        for line in path.read_text().splitlines():
            event = json.loads(line)
            lines += [json.dumps(event | {name: rng.choice(odd)}) for name in event for _ in range(2)]
        path.write_text("\n".join(lines[:3000]) + "\n")
    found = read_log(run)
    assert found.grammar.invalid > 50
    assert found.grammar.invalid_text
    assert "\x1b" not in str(found)


def test_unknown_events_are_counted_by_kind(run):
    with open(run.events(1), "a") as file:
        for number in range(300):
            file.write(f'{{"v":1,"event":"frob","t":1794701000,"rank":1,"x":{number}}}\n')
        file.writelines(f'{{"v":1,"event":"k{number}","t":1794701000,"rank":1}}\n' for number in range(1000))
    found = read_log(run).grammar
    assert found.unknown_kinds["frob"] == 300
    assert sum(found.unknown_kinds.values()) == 1300
    assert len(found.unknown_kinds) < 100
    assert found.invalid == found.unreadable == 0


def test_a_rank_that_is_missing(run):
    run.events(1).unlink()
    assert read_log(run).grammar.ranks_missing == (1,)


def test_an_empty_folder(tmp_path):
    found = read_log(Run(path=tmp_path))
    assert (found.ranks, found.steps, found.checkpoints) == ((), None, None)
    assert found.grammar.missing == ("events of any rank",)
    assert found.grammar.has_provenance is None


def test_only_a_supervisor(run):
    for path in run.event_files():
        path.unlink()
    found = read_log(run)
    assert found.memberships == 1
    assert found.steps is None
    assert found.grammar.ranks_missing == (0, 1)


def test_a_compressed_file_in_place_of_events(run):
    run.events(1).write_bytes(gzip.compress(os.urandom(200_000)))
    found = read_log(run).grammar
    assert found.unreadable > 100
    assert found.unreadable_spot.line == 1


def test_a_link_out_of_the_folder_is_not_followed(run, tmp_path):
    other = tmp_path / "elsewhere"
    run.events(1).rename(other)
    run.events(1).symlink_to(other)
    found = read_log(run)
    assert found.grammar.unreadable_spot.file.endswith("events-00001.jsonl")
    assert found.grammar.unreadable_spot.line == 0
    assert found.grammar.unreadable == 1


def test_a_pipe_in_place_of_a_file_is_not_waited_for(run):
    for path in (run.events(1), run.supervisor, run.path / "launch.json", run.path / "logs" / "x.log"):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    made = []
    thread = threading.Thread(target=lambda: made.append(read_log(run)), daemon=True)
    thread.start()
    thread.join(timeout=300)
    assert made
    assert made[0].steps.count == 60


def test_a_file_that_became_shorter(run):
    stream = LogStream(run)
    stream.refresh()
    data = run.events(0).read_bytes()
    run.events(0).write_bytes(data[:5000])
    stream.refresh()
    assert stream.facts().grammar.unreadable == 1


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_a_huge_line_is_passed_over_without_being_held(run, monkeypatch):
    """As 1 GB to the usual 1 MiB: 64 MiB to a line of 64 KiB, and to pieces as small; the hole is not on the disk."""
    for name, size in (("MOST_LINE_BYTES", 2**16), ("READ_BYTES", 2**18), ("PIECE_BYTES", 2**13)):
        monkeypatch.setattr(event_batches, name, size)
    data = run.events(1).read_bytes()
    lines = data.count(b"\n")
    with open(run.events(1), "r+b") as file:
        file.seek(len(data) + 64 * 2**20)
        file.write(b"\n" + b'{"v":1,"event":"frob","t":1794701000,"rank":1}\n')
    stream = LogStream(run)
    tracemalloc.start()
    stream.refresh()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    found = stream.facts().grammar
    assert peak < 4 * 2**20
    assert (found.unreadable, found.unreadable_spot.line, found.unknown_kinds) == (1, lines + 1, {"frob": 1})


def test_overlong_lines_among_others_are_cut_out(tmp_path, monkeypatch):
    for name, size in (("MOST_LINE_BYTES", 1000), ("READ_BYTES", 4096), ("PIECE_BYTES", 300)):
        monkeypatch.setattr(event_batches, name, size)
    rng = random.Random(0)
    sizes = [rng.choice([1, 20, 299, 300, 999, 1000, 1001, 3000, 9000]) for _ in range(300)]
    path = tmp_path / "events-00000.jsonl"
    path.write_bytes(b"".join(b"x" * size + b"\n" for size in sizes))
    read = event_batches.EventFeed(path, "run")
    pieces = list(read.pieces())
    found = {piece.line + at: len(line) for piece in pieces for at, line in enumerate(piece.data[:-1].split(b"\n"))}
    fits = {number: size for number, size in enumerate(sizes, 1) if size < 1000}
    assert {number: size for number, size in found.items() if size < 1000} == fits
    assert set(found) | {n for n, size in enumerate(sizes, 1) if size >= 1000} == set(range(1, 301))
    assert read.bad + len(found) == 300


def test_memory_does_not_grow_with_the_run(tmp_path, monkeypatch):
    """Six times the steps, in the same memory: what is kept of them is thinned out."""
    for module, name in ((agree, "MOST_TIMES"), (sums, "MOST_SAMPLE"), (steps, "KEPT"), (sums, "HELD")):
        monkeypatch.setattr(module, name, 100)
    run = write_run(tmp_path, ranks=2, hosts=1, steps=200, incidents=0)
    peaks = []
    for times in (2, 12):
        stream = LogStream(_longer(run, tmp_path / str(times), times))
        tracemalloc.start()
        stream.refresh()
        peaks.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert stream.facts().steps.count == 200 * times
    assert peaks[1] < 1.1 * peaks[0] + 20_000


def _longer(run: Run, folder: Path, times: int) -> Run:
    made = Run(path=folder)
    folder.mkdir()
    made.plan_json.write_text(run.plan_json.read_text())
    for path in run.event_files():
        events = [json.loads(line) for line in path.read_text().splitlines()]
        steps = [event for event in events if event["event"] == "step"]
        began, ended = steps[0]["t"], steps[-1]["t"]
        lines = [json.dumps(event) for event in events if event["event"] in ("ready", "run_start")]
        for turn in range(times):
            for event in steps:
                moved = {"step": event["step"] + 200 * turn, "t": event["t"] + turn * (ended - began + 5)}
                lines.append(json.dumps(event | moved, separators=(",", ":")))
        (folder / path.name).write_text("\n".join(lines) + "\n")
    return made


def test_a_timeline_is_read_without_its_spans_and_checked_where_it_is_odd():
    long = json.dumps(
        {"v": 1, "event": "timeline", "t": 1.5, "rank": 0, "step": 9, "epoch": 1, "seconds": 0.5,
         "spans": [["forward", "a", 0.0, 0.1, None, None]] * 50, "dropped": 0, "collectives": []},
        separators=(",", ":"),
    ).encode()  # fmt: skip
    lines = EventParser()
    for count in range(40):
        piece = event_batches.LineBlock(data=long + b"\n", file="f", line=1, count=1)
        events, numbers, bad = lines.events(piece)
        assert (len(events), list(numbers), bad) == (1, [1], [])
        assert events[0]["step"] == 9
        assert len(events[0]["spans"]) == (50 if count < 32 else 0)
    odd = long.replace(b'"dropped":0', b'"dropped":[')
    events, _, bad = lines.events(event_batches.LineBlock(data=odd + b"\n", file="f", line=1, count=1))
    assert (events, bad) == ([], [1])


def test_a_world_beyond_all_measure_is_not_counted_through(run):
    text = run.supervisor.read_text().replace('"world":2,', '"world":4611686018427387904,')
    run.supervisor.write_text(text)
    found = read_log(run)
    assert found.world == 10_000_000
    assert len(found.grammar.ranks_missing) == 4096


def test_a_formation_that_began_twice(run):
    with run.events(1).open("a") as stream:
        lines = run.events(1).read_text().splitlines(keepends=True)
        stream.write(next(line for line in lines if '"event":"run_start"' in line))
    found = read_log(run).grammar
    assert found.repeated == ("run_start",)
    run.supervisor.unlink()  # without one nobody numbers the memberships: torchrun may have started it again
    assert read_log(run).grammar.repeated == ()


def test_a_formation_after_each_failure_began_once(tmp_path):
    assert read_log(write_run(tmp_path, ranks=2, hosts=1, steps=60, incidents=2)).grammar.repeated == ()
