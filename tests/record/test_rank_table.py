"""The rank table of a host: the same answers with it, without it, and with one that is damaged or of another moment."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.record.archive.event_index import newest_blocks
from phalanx.record.archive.history import RunHistory
from phalanx.record.events import EventWriter, read_events
from phalanx.record.host_extents import ExtentChain
from phalanx.record.host_file import host_files, session_counts
from phalanx.record.rank_table import ENTRY_BYTES, ENTRY_HEAD_BYTES, RankTableWriter
from phalanx.record.run import Run

RANKS = range(5)


def write_session(run: Run, rank: int, host: str, generation: int, *, steps: int = 300, close: bool = True) -> None:
    clock = [100.0 * generation]
    writer = EventWriter(
        run.events(rank), rank=rank, clock=lambda: clock[0], host_file=run.host_events(host), generation=generation
    )
    for step in range(steps):
        clock[0] += 1.0
        writer.write("step", step=step, loss=1.0 * generation, compute_s=0.1 * (rank + 1) + 0.01 * generation)
    if close:
        writer.close()
    else:
        writer.flush()


def make_run(folder: Path) -> Run:
    """Restarts, a rank that moved from one host to another, one whose last session wrote nothing."""
    folder.mkdir()
    run = Run(path=folder)
    for generation in (1, 2):
        for rank in RANKS:
            moved = rank == 4 and generation == 2
            write_session(run, rank, "b" if rank == 3 or moved else "a", generation)
    write_session(run, 1, "a", 3, steps=0)
    EventWriter(run.events(7), rank=7, host_file=run.host_events("b"), generation=3).close()  # nothing written
    write_session(run, 0, "a", 3, steps=260, close=False)  # one block in its index, and four steps more
    return run


def answers(run: Run) -> dict[str, Any]:
    """What a reader who looks for the first time says of the run."""
    host_files.cache_clear()
    known = sorted(session_counts(run.path).by_rank.items())
    ranks = [rank for rank, _ in known]
    return {
        "sessions": known,
        "parts": run.event_parts(),
        "recorded": list(run.recorded()),
        "blocks": newest_blocks(str(run.path), ranks).tobytes(),
        "newest": repr(RunHistory.open(run).newest("loss", "compute_s")),
        "events": [len(read_events(run.events(rank))[0]) for rank in ranks],
    }


def without_tables(run: Run, folder: Path) -> Run:
    """The same folder as a version before rank tables left it."""
    shutil.copytree(run.path, folder, ignore=shutil.ignore_patterns("*.ranks"))
    return Run(path=folder)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("tables") / "run")


@pytest.fixture(scope="module")
def wanted(source: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = answers(without_tables(source, tmp_path_factory.mktemp("heads") / "run"))
    assert found["sessions"] == [(0, 3), (1, 3), (2, 2), (3, 2), (4, 2), (7, 1)]
    assert found["recorded"] == [0, 1, 2, 3, 4]
    return found


def test_answers_are_those_of_the_heads(source: Run, wanted: dict[str, Any]) -> None:
    assert answers(source) == wanted


def test_one_read_per_host(source: Run, wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With tables, no head of an extent is read to tell the ranks, their sessions and their newest blocks."""

    def refuse(self: ExtentChain, file: int) -> bool:
        raise AssertionError(f"{self.path} was read")

    host_files.cache_clear()
    ranks = [rank for rank, _ in wanted["sessions"]]
    monkeypatch.setattr(ExtentChain, "refresh", refuse)
    assert sorted(session_counts(source.path).by_rank.items()) == wanted["sessions"]
    assert source.event_parts() == wanted["parts"]
    assert newest_blocks(str(source.path), ranks).tobytes() == wanted["blocks"]


def flip(at: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[at // 8] ^= 1 << at % 8

    return change


def cut(data: bytearray) -> None:
    del data[-1:]


def drop_last(data: bytearray) -> None:
    del data[-ENTRY_BYTES:]


def clear(data: bytearray) -> None:
    data[:] = bytes(len(data))


def swap_names(data: bytearray) -> None:
    """The entries of two ranks with each other's heads are both whole: this is no damage, only another order."""
    one, two = data[:ENTRY_BYTES], data[ENTRY_BYTES : 2 * ENTRY_BYTES]
    data[: 2 * ENTRY_BYTES] = two + one


def repeat_first(data: bytearray) -> None:
    data[-ENTRY_BYTES:] = data[:ENTRY_BYTES]


# In heads and in blocks, by turns.
FLIPS = [
    flip(
        8 * ENTRY_BYTES * (number % 4)
        + random.Random(number).randrange(8 * (ENTRY_BYTES, ENTRY_HEAD_BYTES)[number % 2])
    )
    for number in range(16)
]


@pytest.mark.parametrize("change", [cut, drop_last, clear, swap_names, repeat_first, *FLIPS])
def test_a_damaged_table_changes_nothing(
    source: Run, wanted: dict[str, Any], tmp_path: Path, change: Callable[[bytearray], None]
) -> None:
    run = Run(path=tmp_path / "run")
    shutil.copytree(source.path, run.path)
    path = run.host_events("a").with_suffix(".ranks")
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    assert answers(run) == wanted


def test_tables_of_another_moment_or_host(source: Run, tmp_path: Path) -> None:
    """Kept from before the newest sessions, or of another file: the heads are read."""
    run = Run(path=tmp_path / "run")
    shutil.copytree(source.path, run.path)
    table = run.host_events("a").with_suffix(".ranks")
    before = table.read_bytes()
    write_session(run, 2, "a", 4)
    write_session(run, 9, "a", 4)
    told = answers(without_tables(run, tmp_path / "heads"))
    assert answers(run) == told
    table.write_bytes(before)
    assert answers(run) == told
    shutil.copyfile(run.host_events("b").with_suffix(".ranks"), table)
    assert answers(run) == told


def test_an_older_version_goes_on_and_a_newer_one_again(source: Run, tmp_path: Path) -> None:
    """What was written without a table is told by the heads; the next writer makes the table anew."""
    run = Run(path=tmp_path / "run")
    shutil.copytree(source.path, run.path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankTableWriter, "note_extent", lambda self, known, **told: self.close())
        write_session(run, 2, "a", 4)
        write_session(run, 8, "a", 4)
    assert answers(run) == answers(without_tables(run, tmp_path / "first"))
    write_session(run, 3, "a", 5)
    told = answers(without_tables(run, tmp_path / "second"))
    assert answers(run) == told
    host_files.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExtentChain, "refresh", lambda self, file: pytest.fail("the table was not made anew"))
        assert sorted(session_counts(run.path).by_rank.items()) == told["sessions"]


def test_a_record_torn_from_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a write of the index that failed, the newest block is what the index has, not what was meant to be."""
    from phalanx.record.host_extents import HostStream

    run = Run(path=tmp_path / "run")
    run.path.mkdir()
    write, failing = HostStream.write, [False]

    def fail(self: HostStream, data: bytes) -> int:
        if failing[0] and self._session.path.endswith(".index"):
            write(self, data[:100])
            raise OSError(28, os.strerror(28))
        return write(self, data)

    monkeypatch.setattr(HostStream, "write", fail)
    writer = EventWriter(run.events(0), rank=0, host_file=run.host_events("a"), generation=1)
    for step in range(1000):
        failing[0] = 400 < step < 600
        writer.write("step", step=step, loss=float(step))
        assert newest_loss(run) == newest_loss(without_tables(run, tmp_path / f"{step}")) if step % 250 == 249 else True
        writer.flush()
    writer.close()
    assert answers(run) == answers(without_tables(run, tmp_path / "heads"))


def newest_loss(run: Run) -> str:
    host_files.cache_clear()
    return repr(RunHistory.open(run).newest("loss"))
