"""The index: a run with it looks as without it, whatever became of either file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.record import events as events_module
from phalanx.record.archive import blocks
from phalanx.record.archive.blocks import BLOCK, STEPS
from phalanx.record.archive.event_index import HEAD_BYTES, SIZE, read_index
from phalanx.record.archive.rank_file import RankFile, RowCache
from phalanx.record.archive.series import COLUMN, LATER
from phalanx.record.events import EventWriter, event_files_of, read_events


def write_starts(path: Path, starts: Sequence[tuple[int, int]], *, rotate_bytes: int = 2**28) -> None:
    """A run with several starts, each (first step, steps); values tell which start a step is of."""
    now = [1000.0]
    for number, (first, count) in enumerate(starts):
        writer = EventWriter(path, rank=0, clock=lambda: now[0], rotate_bytes=rotate_bytes)
        writer.write("run_start", step=first)
        for step in range(first, first + count):
            now[0] += 0.2
            writer.write("step", step=step, loss=step + number / 10, tokens=10, lr=math.nan)
            if step % 50 == 0:
                writer.write("monitor", power_w=step)
            if step % 100 == 0:
                writer.write("checkpoint", step=step)
        writer.close()


def expected(path: Path) -> list[tuple[int, float]]:
    """Step and loss of the steps that stayed, by the plain rule."""
    kept: list[tuple[int, float]] = []
    for event in read_events(path)[0]:
        if event["event"] == "step":
            while kept and kept[-1][0] >= event["step"]:
                kept.pop()
            kept.append((event["step"], event["loss"]))
    return kept


def found(path: Path) -> list[tuple[int, float]]:
    file = RankFile(path, [int(part.stem[-4:]) for part in event_files_of(path)[:-1]], RowCache())
    file.refresh()
    rows = [file.rows(number) for number in range(len(file.kept().blocks))]
    pairs = [(row.step, row.values[:, COLUMN["loss"]]) for row in rows]
    both = [(int(a), float(b)) for steps, losses in pairs for a, b in zip(steps, losses, strict=True)]
    return [pair for pair in both if pair[1] == pair[1]]


START = st.tuples(st.integers(0, 700), st.integers(0, 700))


@settings(max_examples=20)
@given(starts=st.lists(START, min_size=1, max_size=4), rotate=st.sampled_from([2**28, 30_000]))
def test_steps_done_again_replace_those_undone(
    tmp_path_factory: pytest.TempPathFactory, starts: list[tuple[int, int]], rotate: int
) -> None:
    path = tmp_path_factory.mktemp("run") / "events-00000.jsonl"
    write_starts(path, starts, rotate_bytes=rotate)
    wanted = expected(path)
    assert found(path) == wanted
    for part in event_files_of(path):
        part.with_suffix(".index").unlink(missing_ok=True)
    assert found(path) == wanted


def test_a_block_knows_least_largest_and_mean(tmp_path: Path) -> None:
    path = tmp_path / "events-00000.jsonl"
    write_starts(path, [(0, 600)])
    index = read_index(path)
    assert (index.refused, index.trouble, len(index.blocks)) == (0, "", 3)
    first = index.blocks[0]
    assert (first["first"], first["last"], first["steps"], first["start"]) == (0, STEPS - 1, STEPS, 0)
    assert index.blocks["end"][-1] == path.stat().st_size, "a writer that ends leaves nothing to be read"
    loss, lr, power = (first["series"][COLUMN[name]] for name in ("loss", "lr", "power_w"))
    assert (loss["low"], loss["high"], loss["count"]) == (0, STEPS - 1, STEPS)
    assert loss["mean"] == pytest.approx((STEPS - 1) / 2)
    assert (lr["count"], power["count"], power["high"]) == (0, 6, 250)
    assert [int(step) for step in index.places["step"]] == [0, 0, 100, 200, 300, 400, 500]


@pytest.mark.parametrize("harm", ["cut", "bit", "foreign", "empty", "folder", "twice", "longer", "garbage"])
def test_a_damaged_index_changes_nothing_and_is_told(tmp_path: Path, harm: str) -> None:
    path = tmp_path / "events-00000.jsonl"
    write_starts(path, [(0, 600), (550, 300)])
    wanted = expected(path)
    index = path.with_suffix(".index")
    data = index.read_bytes()
    other = tmp_path / "events-00001.jsonl"
    write_starts(other, [(7, 600)])
    harmed = {
        "cut": data[:-100],
        "bit": data[: HEAD_BYTES + 2 * SIZE + 300] + b"\xff" + data[HEAD_BYTES + 2 * SIZE + 301 :],
        "foreign": other.with_suffix(".index").read_bytes(),
        "empty": b"",
        "folder": None,
        "twice": data + data[HEAD_BYTES:],
        "longer": data,
        "garbage": os.urandom(len(data)),
    }[harm]
    index.unlink()
    if harmed is None:
        index.mkdir()
    else:
        index.write_bytes(harmed)
    if harm == "longer":  # the events were cut, as after a crash of the host
        path.write_bytes(path.read_bytes()[:-20_000])
        wanted = expected(path)
    file = RankFile(path, [], RowCache())
    file.refresh()
    assert found(path) == wanted
    told = file.troubles()
    assert bool(told) == (harm != "cut"), told


def test_a_killed_writer_costs_the_index_one_block_and_the_events_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events-00000.jsonl"
    killed = EventWriter(path, rank=0)
    for step in range(300):
        killed.write("step", step=step, loss=step)
    killed.flush()  # and no close
    with path.open("ab") as file:
        file.write(b'{"v":1,"event":"st')
    write_starts(path, [(300, 300)])
    assert [pair[0] for pair in found(path)] == list(range(600))
    index = read_index(path)
    assert [int(first) for first in index.blocks["first"]] == [0, 300, 556]
    file = RankFile(path, [], RowCache())
    file.refresh()
    file.kept()
    assert dict(file.troubles()) == {"lines that are no events": 1}


@pytest.mark.parametrize("head", [True, False])
def test_an_index_on_a_full_disk_is_whole_records_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: bool
) -> None:
    path = tmp_path / "events-00000.jsonl"
    real = os.write

    def write(file: int, data: bytes) -> int:
        short = len(data) == HEAD_BYTES if head else len(data) % SIZE == 0 and len(data) != HEAD_BYTES
        return real(file, data[:100] if short else data)

    monkeypatch.setattr(events_module.os, "write", write)
    write_starts(path, [(0, 600)])
    assert path.with_suffix(".index").stat().st_size == (0 if head else HEAD_BYTES)
    monkeypatch.setattr(events_module.os, "write", real)
    assert [pair[0] for pair in found(path)] == list(range(600))


def test_two_writers_at_once_are_read_where_they_mixed(tmp_path: Path) -> None:
    path = tmp_path / "events-00000.jsonl"
    one, two = (EventWriter(path, rank=0) for _ in range(2))
    for step in range(0, 700, 2):
        one.write("step", step=step, loss=step)
        one.flush()
        two.write("step", step=step + 1, loss=step + 1)
        two.flush()
    one.close()
    two.close()
    assert found(path) == expected(path)


def test_an_outlived_writer_leaves_the_index_of_the_next_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "events-00000.jsonl"
    old = EventWriter(path, rank=0)
    old.write("step", step=0, loss=0.0)
    old.flush()
    path.rename(tmp_path / "events-00000-0001.jsonl")
    write_starts(path, [(1, 300)])
    for step in range(1, 600):
        old.write("step", step=step, loss=-1.0)
    old.close()
    index = read_index(path)
    assert (index.refused, [int(first) for first in index.blocks["first"]]) == (0, [1, 257])
    assert index.blocks["series"]["low"][:, COLUMN["loss"]].min() >= 0


def test_columns_of_another_version_find_their_places(tmp_path: Path) -> None:
    path = tmp_path / "events-00000.jsonl"
    write_starts(path, [(0, 300)])
    index = path.with_suffix(".index")
    data = index.read_bytes()
    head = data[:HEAD_BYTES].replace(b'"loss", "tokens"', b'"tokens", "loss"').replace(b'"grad_norm"', b'"Grad_norm"')
    index.write_bytes(head + data[HEAD_BYTES:])
    assert read_index(path).trouble == "it belongs to other events"  # a changed letter is noticed
    older = {name: value for name, value in json.loads(head).items() if name != "check"}
    index.write_bytes(json.dumps(older).encode().ljust(HEAD_BYTES) + data[HEAD_BYTES:])
    file = RankFile(path, [], RowCache())
    file.refresh()
    series = file.kept().blocks["series"][0]
    assert (series[COLUMN["tokens"]]["high"], series[COLUMN["loss"]]["high"]) == (255, 10)
    assert series[COLUMN["grad_norm"]]["count"] == 0


def test_kinds_that_an_older_writer_did_not_know_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events-00000.jsonl"
    monkeypatch.setattr(blocks, "_BITS", {kind: bit for kind, bit in blocks._BITS.items() if kind not in LATER})
    writer = EventWriter(path, rank=0)
    for step in range(600):
        writer.write("step", step=step)
        if step == 400:
            writer.write("memory", step=step)
    writer.close()
    monkeypatch.undo()
    file = RankFile(path, [], RowCache())
    file.refresh()
    assert file.unread == 0, "all of it from the index"
    assert [event["step"] for event in file.events(("memory",))] == [400]
    assert (file.latest("memory") or {})["step"] == 400
    assert file.steps_with("memory") == {400}


def test_a_record_has_no_gaps() -> None:
    assert BLOCK.itemsize == SIZE == 640
    assert sum(np.dtype(BLOCK[name]).itemsize for name in BLOCK.names or ()) == SIZE
