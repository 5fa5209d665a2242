"""One file of events per host: the ranks of a host write it together, and readers answer as for a file per rank."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from synthetic import write_run

import phalanx
from phalanx.record.account.summary import summarize_run
from phalanx.record.archive.history import RunHistory
from phalanx.record.event_batches import EventFeed, EventParser
from phalanx.record.events import Event, EventReader, EventWriter, event_files_of, read_events
from phalanx.record.host_extents import HEAD_BYTES, UNIT_BYTES, HostStream
from phalanx.record.host_file import host_files, open_events, session_counts
from phalanx.record.report.html import render_html
from phalanx.record.report.live import Watcher
from phalanx.record.report.run_report import read_run_report
from phalanx.record.run import Run
from phalanx.rules.log.stream import LogStream
from phalanx.web.run_store import run_stamp

TORN = b'{"v":1,"event":"step","t":1794'


def in_child(work: Callable[[], None]) -> int:
    """Do it in a process of its own; the signal that ended it."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(1)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def write_again(source: Run, folder: Path, *, by_host: bool) -> Run:
    """The same run, written by EventWriter: a process per rank and membership; the last rank leaves a torn line."""
    run = Run(path=folder / source.name)
    shutil.copytree(source.path, run.path, ignore=shutil.ignore_patterns("events-*"))
    events = {rank: read_events(source.events(rank))[0] for rank in source.event_parts()}
    for generation in (1, 2):
        for rank, mine in events.items():
            begin = [number for number, one in enumerate(mine) if one["event"] == "ready"]
            some = mine[: begin[1]] if generation == 1 else mine[begin[1] :]
            host = run.host_events(f"host-{rank % 2}") if by_host else None
            is_killed = rank == len(events) - 1 and generation == 1
            found = in_child(lambda: write_rank(run, rank, some, host, generation, torn=is_killed))  # noqa: B023
            assert found == signal.SIGKILL
    return run


def write_rank(run: Run, rank: int, events: list[Event], host: Path | None, generation: int, *, torn: bool) -> None:
    """Write and die."""
    clock = [0.0]
    writer = EventWriter(run.events(rank), rank=rank, clock=lambda: clock[0], host_file=host, generation=generation)
    for event in events:
        clock[0] = event["t"]
        fields = {name: value for name, value in event.items() if name not in ("v", "event", "t", "rank")}
        writer.write(event["event"], **fields)
    if torn:
        writer.flush()
        writer._pending.append(TORN)
        writer.flush()
    else:
        writer.close()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """A run with a file per rank, and the same with a file per host."""
    folder = tmp_path_factory.mktemp("layouts")
    source = write_run(folder / "source", ranks=4, steps=400, incidents=1)
    return write_again(source, folder / "ranks", by_host=False), write_again(source, folder / "hosts", by_host=True)


def test_files_are_per_host(both: tuple[Run, Run]) -> None:
    names = sorted(path.name for path in both[1].path.glob("events-*"))
    wanted = [f"events-host-host-{number}.{end}" for number in (0, 1) for end in ("index", "jsonl", "ranks")]
    assert names == wanted
    assert session_counts(both[1].path).by_rank == {0: 2, 1: 2, 2: 2, 3: 2}


def test_every_event_in_order(both: tuple[Run, Run]) -> None:
    for rank in range(4):
        ours, theirs = (read_events(run.events(rank)) for run in both)
        assert ours == theirs
        assert ours[1] == (rank == 3)  # the torn line


def test_plain_tools_read_it(both: tuple[Run, Run]) -> None:
    """Whoever skips what is no event, as docs/events.md says, reads the file of a host as it is."""
    found: dict[int, list[int]] = {}
    for path in both[1].path.glob("events-host-*.jsonl"):
        for line in path.read_bytes().split(b"\n"):
            try:
                event = json.loads(line.strip(b"\0"))
            except ValueError:
                continue
            if event.get("event") == "step":
                found.setdefault(event["rank"], []).append(event["step"])
    steps = {
        rank: [one["step"] for one in read_events(both[0].events(rank))[0] if one["event"] == "step"] for rank in found
    }
    assert found == steps


def test_history_is_the_same(both: tuple[Run, Run]) -> None:
    ours, theirs = map(RunHistory.open, both)
    assert ours.names() == theirs.names()
    for history in (ours, theirs):
        history.look()
    assert ours.damage() == theirs.damage()
    for name in ("loss", "compute_s", "mfu"):
        assert ours.curve(name, points=100) == theirs.curve(name, points=100)
        assert repr(ours.mesh(name)) == repr(theirs.mesh(name))
    for rank in range(4):
        assert ours.events(rank=rank) == theirs.events(rank=rank)
        assert list(ours.steps(rank, 190, 210)) == list(theirs.steps(rank, 190, 210))
    assert [sum(file.unread for file in one._files.values()) for one in (ours, theirs)][1] == 0  # all by indexes
    assert repr(ours.newest("loss")) == repr(theirs.newest("loss"))
    assert list(both[0].recorded()) == list(both[1].recorded()) == [0, 1, 2, 3]
    assert both[0].event_bytes() - both[1].event_bytes() == 1  # the end of the torn line, in the file of a rank


def log_facts(run: Run) -> str:
    """What `check` knows of a log: without places in files, the disk of this machine and the last digits of sums."""
    stream = LogStream(run)
    stream.refresh()
    text = re.sub(r"Spot\([^)]*\)|free_bytes=[\d.]+", "", repr(stream.facts()).replace(str(run.path), "RUN"))
    return re.sub(r"\d+\.\d+(?:e-?\d+)?", lambda found: f"{float(found.group()):.9g}", text)


def test_pages_are_the_same(both: tuple[Run, Run]) -> None:
    def without_folder(text: str, run: Run) -> str:
        return text.replace(str(run.path), "RUN")

    summaries = [without_folder(repr(summarize_run(run)), run) for run in both]
    assert summaries[0] == summaries[1]
    reports = [without_folder(render_html(read_run_report(run), made="now"), run) for run in both]
    assert reports[0] == reports[1]
    facts = [log_facts(run) for run in both]
    assert facts[0] == facts[1]
    checks = [phalanx.check(str(run.path)).to_dict() for run in both]
    verdicts = [[(one["rule"], one["verdict"]) for one in found["findings"]] for found in checks]
    assert verdicts[0] == verdicts[1]
    looks = [re.sub(r"\w+_s=[\d.]+\)$", "", without_folder(str(Watcher(run).look()), run)) for run in both]  # a clock
    assert looks[0] == looks[1]
    assert both[0].event_bytes() == both[1].event_bytes() + 1  # the newline that ends the torn line
    assert both[0].committed_step() == both[1].committed_step()
    assert list(both[0].recorded()) == list(both[1].recorded())
    assert run_stamp(both[1])[0] != (0, 0)


def test_readers_follow_it(tmp_path: Path) -> None:
    """Into the next session, which another host writes."""
    run = Run(path=tmp_path)
    reader, feed, lines = EventReader(run.events(5)), EventFeed(run.events(5), ""), EventParser()
    seen: list[tuple[list[int], list[int]]] = []
    for generation, host in ((1, "a"), (2, "b"), (3, "a")):
        writer = EventWriter(run.events(5), rank=5, host_file=run.host_events(host), generation=generation)
        for part in range(2):
            for step in range(2):
                writer.write("ready", step=10 * generation + 2 * part + step)
            host_files.cache_clear()  # look now: whoever follows a run looks again when a moment has passed
            fed = [event["step"] for piece in feed.pieces() for event in lines.events(piece)[0]]
            seen.append(([event["step"] for event in reader.read()], fed))
        writer.close()
    wanted = [
        [10 * generation + 2 * part, 10 * generation + 2 * part + 1] for generation in (1, 2, 3) for part in (0, 1)
    ]
    assert seen == [(one, one) for one in wanted]
    assert [path.name for path in event_files_of(run.events(5))] == [
        "events-00005-0001.jsonl",
        "events-00005-0002.jsonl",
        "events-00005.jsonl",
    ]


def test_many_processes_one_file(tmp_path: Path) -> None:
    """Each line whole and in order, also those of a rank that is killed anywhere."""
    run, children = Run(path=tmp_path), []
    for rank in range(4):
        child = os.fork()
        if not child:
            writer = EventWriter(run.events(rank), rank=rank, host_file=run.host_events("a"))
            for step in range(400):
                writer.write("ready", step=step, text="x" * (step % 700))
            if rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            writer.close()
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    for rank in range(4):
        events, bad = read_events(run.events(rank))
        assert ([event["step"] for event in events], {event["rank"] for event in events}, bad) == (
            list(range(400)),
            {rank},
            0,
        )


def test_long_lines_lie_in_one_extent(tmp_path: Path) -> None:
    run = Run(path=tmp_path)
    writer = EventWriter(run.events(0), rank=0, host_file=run.host_events("a"))
    for size in (100, 3 * UNIT_BYTES, 100, 900_000):
        writer.write("ready", text="x" * size)
    writer.close()
    assert [len(event["text"]) for event in read_events(run.events(0))[0]] == [100, 3 * UNIT_BYTES, 100, 900_000]


def test_a_large_session_is_followed_by_another(tmp_path: Path) -> None:
    run = Run(path=tmp_path)
    writer = EventWriter(run.events(0), rank=0, host_file=run.host_events("a"), rotate_bytes=2000)
    for step in range(100):
        writer.write("ready", step=step)
    writer.close()
    assert session_counts(run.path).by_rank[0] > 2
    assert [event["step"] for event in read_events(run.events(0))[0]] == list(range(100))


def test_a_rank_goes_on_in_its_own_file(tmp_path: Path) -> None:
    """A run of an older version, or of a file system without locks: then what its host's file holds came before."""
    run = Run(path=tmp_path)
    for number, host in enumerate((run.host_events("a"), None, run.host_events("a"))):
        writer = EventWriter(run.events(0), rank=0, host_file=host, generation=number)
        writer.write("ready", step=number)
        writer.close()
    assert run.events(0).is_file()
    assert [event["step"] for event in read_events(run.events(0))[0]] == [0, 1, 2]
    assert run.event_parts() == {0: [1]}


def test_a_folder_without_room_or_locks(tmp_path: Path) -> None:
    """What cannot be opened beside the others is written into a file of the rank's own."""
    run = Run(path=tmp_path)
    run.host_events("a").mkdir()
    writer = EventWriter(run.events(0), rank=0, host_file=run.host_events("a"))
    writer.write("ready", step=1)
    writer.close()
    assert [event["step"] for event in read_events(run.events(0))[0]] == [1]
    assert run.events(0).is_file()


@pytest.mark.parametrize("by_host", [True, False])
def test_a_full_disk_loses_nothing(tmp_path: Path, by_host: bool) -> None:
    """What the disk refuses when a writer is closed, it may take later."""
    run = Run(path=tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = EventWriter(run.events(0), rank=0, host_file=run.host_events("a") if by_host else None)
    for step in range(100):
        writer.write("ready", step=step)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        for step in range(100, 200):
            writer.write("ready", step=step)
        assert not writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(read_events(run.events(0))[0]) < 200
    assert writer.close()
    assert writer.close()
    events, bad = read_events(run.events(0))
    assert ([event["step"] for event in events], bad) == (list(range(200)), 0)


def test_damaged_heads_cost_their_extent(tmp_path: Path) -> None:
    run = Run(path=tmp_path)
    for rank in range(3):
        writer = EventWriter(run.events(rank), rank=rank, host_file=run.host_events("a"))
        for step in range(300):
            writer.write("ready", step=step, text="x" * 200)
        writer.close()
    path = run.host_events("a")
    data = bytearray(path.read_bytes())
    second = next(at for at in range(0, len(data), UNIT_BYTES) if at and b'"rank":1,' in data[at : at + HEAD_BYTES])
    data[second + 70] ^= 1
    path.unlink()
    path.write_bytes(data)
    steps = {rank: [event["step"] for event in read_events(run.events(rank))[0]] for rank in run.event_parts()}
    assert steps[0] == steps[2] == list(range(300))
    assert 0 < len(steps[1]) < 300
    writer = EventWriter(run.events(1), rank=1, host_file=path, generation=2)
    writer.write("ready", step=1000)
    writer.close()
    host_files.cache_clear()  # on a busy machine the last look took long, and the next one waits for it
    assert [event["step"] for event in read_events(run.events(1))[0]] == [*steps[1], 1000]
    assert [event["step"] for event in read_events(run.events(2))[0]] == list(range(300))


@pytest.mark.parametrize("data", [b"", b"\0" * 100_000, b"\xff" * 100_000, b'{"extent":1,"used":"' * 9000])
def test_what_is_no_host_file(tmp_path: Path, data: bytes) -> None:
    run = Run(path=tmp_path)
    run.host_events("a").write_bytes(data)
    assert run.event_parts() == {}
    with pytest.raises(FileNotFoundError):
        open_events(run.events(0))
    stream = HostStream(run.host_events("a"), rank=0, generation=1)
    stream.write(b'{"event":"ready"}\n')
    stream.close()
    host_files.cache_clear()  # look now: after a long look the next one waits for a moment
    assert len(read_events(run.events(0))[0]) == 1
