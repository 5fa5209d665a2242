"""Events: whole lines under all circumstances, and a reader that survives everything else."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.record import events as module
from phalanx.record.events import EventReader, EventWriter, event_files_of, read_events


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_an_event_is_a_line_with_its_version_time_and_rank(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "e.jsonl", rank=3, clock=Clock())
    writer.write("evaluate", step=7, loss=math.nan, parts={"a": math.inf, "b": [1.5]})
    assert json.loads((tmp_path / "e.jsonl").read_text()) == {
        "v": 1, "event": "evaluate", "t": 1000.0, "rank": 3, "step": 7, "loss": None, "parts": {"a": None, "b": [1.5]},
    }  # fmt: skip


def test_quick_steps_share_a_write_and_other_events_do_not_wait(tmp_path: Path) -> None:
    path, clock = tmp_path / "e.jsonl", Clock()
    writer = EventWriter(path, rank=0, clock=clock)
    writer.write("step", step=0)
    writer.write("step", step=1)
    assert len(read_events(path)[0]) == 1, "the first is written at once, the second waits"
    clock.now += 0.06
    writer.write("step", step=2)
    assert len(read_events(path)[0]) == 3
    writer.write("step", step=3)
    writer.write("stop", reason="asked")
    assert [event["event"] for event in read_events(path)[0]] == ["step"] * 4 + ["stop"]
    writer.write("step", step=4)
    writer.close()
    writer.close()
    assert len(read_events(path)[0]) == 6


def test_a_torn_line_of_a_killed_process_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    path.write_text('{"v":1,"event":"step","step":0}\n{"v":1,"eve')
    assert len(read_events(path)[0]) == 1
    assert read_events(path)[1] == 1
    writer = EventWriter(path, rank=0)
    writer.write("run_start")
    events, skipped = read_events(path)
    assert ([event["event"] for event in events], skipped) == (["step", "run_start"], 1)


def test_two_writers_of_one_file_do_not_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    writers = [EventWriter(path, rank=rank) for rank in range(2)]
    for step in range(200):
        writers[step % 2].write("sample", step=step, text="x" * step)
    assert ([event["step"] for event in read_events(path)[0]], read_events(path)[1]) == (list(range(200)), 0)


def test_a_reader_follows_a_growing_file(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    reader = EventReader(path)
    assert reader.read() == []
    path.write_bytes(b'{"event":"a"}\n{"event":')
    assert [event["event"] for event in reader.read()] == ["a"]
    with path.open("ab") as stream:
        stream.write(b'"b"}\n{"event":"c"}')
    assert [event["event"] for event in reader.read()] == ["b"]
    assert reader.read() == []
    assert reader.finish() == []
    assert reader.skipped == 1


def test_foreign_lines_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    path.write_bytes(b'\n[1]\n{"event":3}\n\xff\xfe\n' + b"[" * 5000 + b'\n{"event":"ok"}\n')
    assert read_events(path) == ([{"event": "ok"}], 4)


@given(st.binary(max_size=300))
def test_any_bytes_can_be_read(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "e.jsonl"
    path.write_bytes(data)
    events, skipped = read_events(path)
    assert len(events) + skipped <= data.count(b"\n") + 1


def test_a_full_disk_loses_nothing_that_fits_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "e.jsonl"
    writer = EventWriter(path, rank=0)
    real = os.write
    room = [10]  # bytes left on the disk

    def write(file: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "full")
        done = real(file, data[: room[0]])
        room[0] -= done
        return done

    monkeypatch.setattr(module.os, "write", write)
    writer.write("a", text="hello")
    writer.write("b", text="hello")
    assert path.stat().st_size == 10
    room[0] = 10**6
    writer.flush()
    assert ([event["event"] for event in read_events(path)[0]], writer.lost) == (["a", "b"], 0)


def test_a_disk_that_stays_full_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PENDING_BYTES", 2000)
    writer = EventWriter(tmp_path / "e.jsonl", rank=0)
    real = os.write

    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(module.os, "write", full)
    for step in range(100):
        writer.write("a", step=step)
    monkeypatch.setattr(module.os, "write", real)
    writer.close()
    events, skipped = read_events(tmp_path / "e.jsonl")
    assert skipped == 0
    assert len(events) + writer.lost == 100
    assert events[-1]["step"] == 99


def test_what_an_earlier_writer_could_not_write_follows_the_first_line_that_goes_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new membership has a writer of its own, and may last for hours."""
    real, is_full = os.write, [True]

    def write(file: int, data: bytes) -> int:
        if is_full[0]:
            raise OSError(errno.ENOSPC, "full")
        return real(file, data)

    monkeypatch.setattr(module.os, "write", write)
    first = EventWriter(tmp_path / "e.jsonl", rank=0)
    first.write("a")
    assert not first.close()
    second = EventWriter(tmp_path / "e.jsonl", rank=0, earlier=[first])
    second.write("b")
    is_full[0] = False
    second.write("c")
    assert [event["event"] for event in read_events(tmp_path / "e.jsonl")[0]] == ["b", "c", "a"]
    assert first.close()


# ---- rotation --------------------------------------------------------------------------------------------------------


def test_a_large_file_is_closed_and_the_next_begins_under_its_name(tmp_path: Path) -> None:
    path = tmp_path / "events-00000.jsonl"
    writer = EventWriter(path, rank=0, rotate_bytes=2000)
    for step in range(100):
        writer.write("sample", step=step, text="x" * 50)
    writer.close()
    names = [found.name for found in event_files_of(path)]
    assert names[:2] == ["events-00000-0001.jsonl", "events-00000-0002.jsonl"]
    assert names[-1] == "events-00000.jsonl"
    assert all(1900 < found.stat().st_size < 2300 for found in event_files_of(path)[:-1])
    assert ([event["step"] for event in read_events(path)[0]], read_events(path)[1]) == (list(range(100)), 0)
    assert all(found.with_suffix(".index").is_file() for found in event_files_of(path)[:-1])


def test_a_reader_follows_over_rotation_and_resume(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    reader, seen = EventReader(path), list[int]()
    for start in (0, 40):  # the second writer is a resumed run
        writer = EventWriter(path, rank=0, rotate_bytes=700)
        for step in range(start, start + 40):
            writer.write("sample", step=step, text="x" * 20)
            if step % 3 == 0:
                seen += [event["step"] for event in reader.read()]
        writer.close()
    seen += [event["step"] for event in reader.finish()]
    assert (seen, reader.skipped, len(event_files_of(path)) > 5) == (list(range(80)), 0, True)


def test_a_file_that_is_closed_while_it_is_opened_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "e.jsonl"
    path.write_text('{"event":"a"}\n')
    reader = EventReader(path)
    assert len(reader.read()) == 1
    with path.open("a") as file:
        file.write('{"event":"b"}\n')
    real = module._open_or_none

    def rotate_first(name: Path) -> object:
        monkeypatch.setattr(module, "_open_or_none", real)
        path.rename(tmp_path / "e-0001.jsonl")
        path.write_text('{"event":"c, and long enough to be mistaken for the rest of the old file"}\n')
        return real(name)

    monkeypatch.setattr(module, "_open_or_none", rotate_first)
    assert [event["event"][0] for event in reader.read()] == ["b", "c"]


def test_an_outlived_writer_does_not_rotate_what_is_no_longer_its_file(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    old, new = (EventWriter(path, rank=0, rotate_bytes=300) for _ in range(2))
    for step in range(10):
        new.write("sample", step=step, text="x" * 100)
    before = [found.name for found in event_files_of(path)]
    old.write("sample", step=-1, text="y" * 400)
    assert [found.name for found in event_files_of(path)] == before
    steps = [event["step"] for event in read_events(path)[0]]
    assert [step for step in steps if step >= 0] == list(range(10))


@pytest.mark.parametrize("what", ["rename", "open"])
def test_a_file_that_cannot_be_rotated_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    writer = EventWriter(tmp_path / "e.jsonl", rank=0, rotate_bytes=500)
    tries = []

    def refuse(*names: object) -> int:
        tries.append(names)
        raise OSError(errno.EACCES, "no")

    monkeypatch.setattr(module.os, what, refuse)
    for step in range(50):
        writer.write("sample", step=step, text="x" * 40)
    monkeypatch.undo()
    writer.close()
    assert [event["step"] for event in read_events(tmp_path / "e.jsonl")[0]] == list(range(50))
    assert 1 < len([names for names in tries if "e.jsonl" in str(names[0])]) < 20, "not at every event"


def test_parts_that_were_tidied_away_are_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "e-0007.jsonl").write_text('{"event":"a"}\n')
    (tmp_path / "e.jsonl").write_text('{"event":"b"}\n')
    assert [event["event"] for event in read_events(tmp_path / "e.jsonl")[0]] == ["a", "b"]


def test_a_line_without_end_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    with path.open("wb") as file:
        file.write(b'{"event":"a"}\n')
        file.truncate(64 * 2**20)
        file.seek(64 * 2**20)
        file.write(b'\n{"event":"b"}\n')
    tracemalloc.start()
    events, skipped = read_events(path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert ([event["event"] for event in events], skipped) == (["a", "b"], 1)
    assert most < 8 * 2**20


def test_threads_share_a_writer(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "e.jsonl", rank=0, rotate_bytes=20_000)
    threads = [
        threading.Thread(target=lambda kind=kind: [writer.write(kind, step=step) for step in range(300)])
        for kind in ("step", "monitor")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    events, skipped = read_events(tmp_path / "e.jsonl")
    assert (len(events), skipped) == (600, 0)


def test_an_event_no_reader_would_take_is_not_written(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "e.jsonl", rank=0)
    writer.write("sample", text="x" * 2**20)
    writer.write("sample", text="\ud800 half a pair")
    writer.close()
    assert writer.lost == 1
    assert [event["text"] for event in read_events(tmp_path / "e.jsonl")[0]] == ["? half a pair"]


def test_several_events_are_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, sizes, write = EventWriter(tmp_path / "events.jsonl", rank=-1), list[int](), os.write
    monkeypatch.setattr(module.os, "write", lambda file, data: sizes.append(write(file, data)) or sizes[-1])
    writer.write_all(("host", {"host": name}) for name in "abc")
    assert len(sizes) == 1
    writer.write("end")
    writer.close()
    assert [one.get("host") for one in read_events(tmp_path / "events.jsonl")[0]] == ["a", "b", "c", None]
