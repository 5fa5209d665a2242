"""The history of a run: the same numbers however it was kept, and no trouble with damaged ones."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from synthetic import write_run

from phalanx.errors import UserError
from phalanx.record.account.ledger import read_ledger
from phalanx.record.archive import history as module
from phalanx.record.archive import rank_file as rankfile
from phalanx.record.archive.damage import supervisor_damage
from phalanx.record.archive.history import Damage, RunHistory
from phalanx.record.events import EventWriter, read_events
from phalanx.record.run import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write_run(tmp_path_factory.mktemp("runs"), steps=120, straggler=2)


@pytest.fixture
def small(tmp_path: Path) -> Run:
    return write_run(tmp_path, name="small", ranks=2, steps=12, incidents=0)


def long_run(folder: Path, *, ranks: int = 2, starts: tuple[tuple[int, int], ...] = ((0, 4_000),)) -> Run:
    """Long enough to be drawn from blocks; `step` is the loss."""
    run = write_run(folder, name="long", ranks=ranks, steps=1, incidents=0)
    for rank in range(ranks):
        run.events(rank).unlink()
        now = [1000.0]
        writer = EventWriter(run.events(rank), rank=rank, clock=lambda now=now: now[0])  # type: ignore[misc]
        for first, last in starts:
            for step in range(first, last):
                now[0] += 0.1
                writer.write("step", step=step, loss=step, compute_s=rank + 1.0, tokens_per_s=10.0)
        writer.close()
    return run


def told(history: RunHistory) -> dict[str, int]:
    return {f"{one.where}: {one.what}": one.count for one in history.damage()}


# ---- curves ----------------------------------------------------------------------------------------------------------


def test_a_curve_has_the_steps_that_stayed(run: Run) -> None:
    history = RunHistory.open(run)
    events = [event for event in read_events(run.events(0))[0] if event["event"] == "step"]
    newest = {event["step"]: event["loss"] for event in events}
    curve = history.curve("loss")
    assert (curve.step, curve.unit) == (tuple(range(120)), "nats/token")
    assert curve.low == curve.high == curve.mean == tuple(newest[step] for step in range(120))
    assert len(events) > 120, "some were done twice"
    assert (history.ranks, history.first_step, history.last_step, history.damage()) == ((0, 1, 2, 3), 0, 119, [])


def test_buckets_keep_the_peaks(run: Run) -> None:
    history = RunHistory.open(run)
    fine, coarse = history.curve("loss"), history.curve("loss", points=7)
    assert len(coarse.step) == 7
    edges = [*coarse.step, 120]
    for number, (first, after) in enumerate(itertools.pairwise(edges)):
        inside = [value for value in fine.mean[first:after] if value is not None]
        assert (coarse.low[number], coarse.high[number]) == (min(inside), max(inside))
        assert coarse.mean[number] == pytest.approx(np.mean(inside))
        assert coarse.t[number] == fine.t[after - 1]
    part = history.curve("loss", first=30, last=39)
    assert (part.step, part.mean) == (tuple(range(30, 40)), fine.mean[30:40])


def test_series_of_a_run(run: Run, small: Run) -> None:
    history = RunHistory.open(run)
    assert {"loss", "compute_s", "power_w", "memory_used_bytes", "mfu"} <= set(history.names())
    assert "expert_imbalance" not in history.names()
    predicted = run.plan()["prediction"]
    rate, mfu = history.curve("tokens_per_s", points=1), history.curve("mfu", points=1)
    assert mfu.mean[0] == pytest.approx(predicted["mfu"] * rate.mean[0] / predicted["tokens_per_s"])
    small.plan_json.write_text("{}")
    assert "mfu" not in RunHistory.open(small).names()
    assert set(RunHistory.open(small).curve("mfu").mean) == {None}
    with pytest.raises(UserError, match=r"has no series 'los'\n.*did you mean loss"):
        history.curve("los")


def test_monitors_stand_at_the_step_they_were_taken_in(run: Run) -> None:
    curve = RunHistory.open(run).curve("energy_j")
    assert (curve.unit, len(curve.step)) == ("J", len(set(curve.t)))
    assert list(curve.t) == sorted(curve.t)
    assert [step for step in curve.step if step > 119] == []
    steps = RunHistory.open(run).curve("loss")
    middle = next(number for number, step in enumerate(curve.step) if step == 80)
    assert steps.t[80] <= curve.t[middle] <= steps.t[81] + 5


def test_a_long_run_is_drawn_from_blocks_and_looks_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RAW_STEPS", 1_000)
    run = long_run(tmp_path, ranks=1, starts=((0, 2_400), (2_250, 4_000)))
    history = RunHistory.open(run)
    curve = history.curve("loss", points=5)
    assert (len(curve.step), history.last_step) == (5, 3_999)
    assert (curve.low[0], curve.high[-1]) == (0, 3_999)
    assert list(curve.step) == sorted(set(curve.step))
    assert all(high - low < 800 + 256 for low, high in zip(curve.low, curve.high, strict=True))
    again = next(number for number, step in enumerate(curve.step) if step > 2_250) - 1
    assert curve.high[again] - curve.low[again] == curve.step[again + 1] - 1 - curve.step[again], (
        "nothing undone is in it"
    )
    assert history.curve("loss", first=2_240, last=2_260).step == tuple(range(2_240, 2_261))
    run.events(0).with_suffix(".index").unlink()
    assert RunHistory.open(run).curve("loss", points=5) == curve


# ---- meshes ----------------------------------------------------------------------------------------------------------


def test_a_mesh_has_a_row_per_rank(run: Run) -> None:
    mesh = RunHistory.open(run).mesh("compute_s", columns=12)
    assert (mesh.ranks, mesh.unit, mesh.step) == ((0, 1, 2, 3), "s", tuple(range(0, 120, 10)))
    table = np.array(mesh.values)
    assert table.shape == (4, 12)
    assert table[2] / table[0] == pytest.approx(1.5, rel=0.05), "the straggler"
    curve = RunHistory.open(run).curve("compute_s", rank=2, first=10, last=19)
    assert table[2, 1] == pytest.approx(np.mean([value for value in curve.mean if value is not None]))
    assert len(RunHistory.open(run).mesh("compute_s", first=100, last=104).step) == 5


def test_a_mesh_of_a_long_run_and_a_rank_that_came_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RAW_MESH_STEPS", 1_000)
    run = long_run(tmp_path)
    lines = run.events(1).read_bytes().split(b"\n")
    run.events(1).write_bytes(b"\n".join(lines[2_000:]))
    history = RunHistory.open(run)
    mesh = history.mesh("compute_s", columns=4)
    assert mesh.values[0] == (1.0,) * 4
    assert mesh.values[1] == (None,) * 2 + (2.0,) * 2
    assert told(history) == {"rank 1: index not used: it belongs to other events": 1}


@pytest.mark.parametrize("most", [96 * 2**20, 0])
def test_a_mesh_sees_what_came_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(module, "RAW_MESH_STEPS", 100)
    monkeypatch.setattr(module, "MOST_DIGEST_BYTES", most)
    run = long_run(tmp_path, starts=((0, 1_000),))
    history = RunHistory.open(run)
    before = history.mesh("compute_s")
    assert history.mesh("loss").values[0][-1] == pytest.approx(883.5), "the block of the last steps"
    for rank, steps in ((0, 600), (1, 300)):
        writer = EventWriter(run.events(rank), rank=rank)
        for step in range(1_000, 1_000 + steps):
            writer.write("step", step=step, compute_s=5.0)
        writer.close()
    assert history.mesh("compute_s") == before, "as of the last refresh"
    assert history.refresh()
    table = history.mesh("compute_s").values
    assert (table[0][0], table[1][0], table[0][-1], table[1][-1]) == (1.0, 2.0, 5.0, None)
    assert len(history._digests) == (2 if most else 0)


def test_a_mesh_does_not_read_forever(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SCAN_BYTES", 2 * run.events(0).stat().st_size + 5_000)
    history = RunHistory.open(run)
    mesh = history.mesh("compute_s")
    assert [row[0] is None for row in mesh.values] == [False, False, True, True]
    assert told(history) == {f"ranks 2, 3: {module.TOO_LONG}": 2}


def test_memory_of_many_ranks_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = long_run(tmp_path, ranks=4, starts=((0, 1_000),))
    monkeypatch.setattr(module, "MOST_HELD_BYTES", 15_000)
    history = RunHistory.open(run)
    mesh = history.mesh("compute_s")
    assert [row[0] for row in mesh.values] == [1.0, 2.0, 3.0, 4.0]
    assert len(history._files) < 4
    assert history.curve("loss", points=1_000).step[-1] == 999


# ---- events ----------------------------------------------------------------------------------------------------------


def test_rare_events_are_found_without_the_steps(run: Run) -> None:
    history = RunHistory.open(run)
    everything = read_events(run.events(1))[0]
    for kinds in (("evaluate",), ("checkpoint", "run_end"), ("peers",), ("sample",)):
        assert history.events(*kinds, rank=1) == [event for event in everything if event["event"] in kinds]
    rare = [event for event in everything if event["event"] not in ("step", "monitor", "peers")]
    assert history.events(rank=1) == rare
    assert [event["event"] for event in history.supervisor()] == [
        event["event"] for event in read_events(run.supervisor)[0]
    ]
    for kind in ("monitor", "step", "checkpoint", "peers", "run_start"):
        assert history.latest(kind, rank=1) == [event for event in everything if event["event"] == kind][-1]
    assert (history.latest("nothing"), history.latest("step", rank=99), history.events(rank=99)) == (None, None, [])


def test_steps_one_by_one(run: Run) -> None:
    found = list(RunHistory.open(run).steps(0, 55, 64))
    assert [event["step"] for event in found] == list(range(55, 65))
    assert {event["epoch"] for event in found if event["step"] >= 57} == {2}, "those done again"


def test_what_a_step_looked_like_inside(run: Run) -> None:
    history = RunHistory.open(run)
    assert history.steps_with("timeline") == (49, 99)
    assert history.at_step("timeline", 99, rank=3)["spans"][0][0] == "data"
    assert history.at_step("timeline", 98) is None


def test_rare_events_that_are_many(small: Run) -> None:
    writer = EventWriter(small.events(0), rank=0)
    for step in range(12, 312):
        writer.write("step", step=step, loss=1.0)
        writer.write("checkpoint", step=step + 1)
        if step % 100 == 0:
            writer.write("timeline", step=step, spans=[["data", str(step), 0, 1, None, None]])
    writer.close()
    history = RunHistory.open(small)
    assert history.steps_with("timeline") == (100, 200, 300)
    assert history.at_step("timeline", 200)["spans"][0][1] == "200"
    assert history.latest("timeline")["step"] == 300
    assert len(history.events("checkpoint")) == 300 + len(
        [e for e in read_events(small.events(1))[0] if e["event"] == "checkpoint"]
    )
    assert history.steps_with("nothing") == ()


# ---- while it goes on ------------------------------------------------------------------------------------------------


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    run = write_run(tmp_path, ranks=1, steps=1, incidents=0, finished=False, hosts=1)
    history = RunHistory.open(run)
    assert not history.refresh()
    writer = EventWriter(run.events(0), rank=0, rotate_bytes=60_000)
    seen = []
    for step in range(1, 1200):
        writer.write("step", step=step, loss=step)
        if step % 97 == 0:
            writer.flush()
            seen.append(history.refresh())
            assert history.last_step == step
            assert history.latest("step")["step"] == step
    writer.close()
    assert (all(seen), history.refresh(), history.refresh()) == (True, True, False)
    assert history.curve("loss", points=2000).step == tuple(range(1200))
    assert len(list(run.path.glob("events-00000-*.jsonl"))) > 0, "also over rotation"
    assert history.damage() == []


def losses(history: RunHistory) -> list[tuple[int, float | None]]:
    curve = history.curve("loss", points=5_000)
    return list(zip(curve.step, curve.mean, strict=True))


def test_parts_with_lines_of_one_length_are_told_apart(tmp_path: Path) -> None:
    """Blocks of the next file lie where those of the last one lay, and under its old name."""
    run = Run(path=tmp_path)
    writer = EventWriter(run.events(0), rank=0, rotate_bytes=40_000, clock=lambda: 1000.0)
    history = RunHistory.open(run)
    for step in range(1_000, 2_500):
        writer.write("step", step=step, loss=float(step))
        if step % 60 == 0:
            writer.flush()
            history.refresh()
            assert losses(history) == [(one, one) for one in range(1_000, step + 1)]
    assert len(run.event_parts()[0]) > 1


def test_a_part_closed_since_the_last_refresh_is_still_read(tmp_path: Path) -> None:
    run = Run(path=tmp_path)
    writer = EventWriter(run.events(0), rank=0, rotate_bytes=50_000)
    for step in range(1_000):
        writer.write("step", step=step, loss=step)
        writer.flush()
        if step == 300:
            writer.write("evaluate", step=step, loss=1.0)
            seen, unseen = RunHistory.open(run), RunHistory.open(run)
            assert len(losses(seen)) == 301
            seen._cache = seen._rank_file(0)._cache = rankfile.RowCache()
            size = run.events(0).stat().st_size
    writer.close()
    assert (run.event_parts()[0], run.events(0).stat().st_size > size) == ([1], True)
    for history in (seen, unseen):
        assert losses(history) == [(step, step) for step in range(301)]
        assert history.latest("evaluate")["step"] == 300
        assert [event["step"] for event in history.steps(0, 295, 305)] == list(range(295, 301))
        assert history.refresh()
        assert losses(history) == [(step, step) for step in range(1_000)]


def test_rows_that_could_not_be_read_are_not_kept(tmp_path: Path) -> None:
    run = long_run(tmp_path, ranks=1, starts=((0, 600),))
    history = RunHistory.open(run)
    aside = run.events(0).rename(tmp_path / "aside")
    assert losses(history) == []
    aside.rename(run.events(0))
    assert len(losses(history)) == 600


def test_a_file_with_other_steps_in_its_place(tmp_path: Path) -> None:
    """A shorter one, of lines as long as before: nothing that was read of the old one is shown."""
    run = long_run(tmp_path, ranks=1, starts=((1_000, 1_600),))
    history = RunHistory.open(run)
    assert losses(history)[0] == (1_000, 1_000)
    text = run.events(0).read_text().replace('"loss":1', '"loss":7').splitlines(keepends=True)
    run.events(0).with_suffix(".index").unlink()
    run.events(0).write_text("".join(text[:590]))
    history.refresh()
    assert losses(history) == [(step, 6_000 + step) for step in range(1_000, 1_590)]


def test_steps_of_a_rank_that_left_are_undone_with_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks do 40 steps; one falls, and the other does half of them again."""
    run = Run(path=tmp_path)
    for rank in (0, 1):
        writer = EventWriter(run.events(rank), rank=rank)
        writer.write("run_start", step=0, epoch=1)
        for step in range(40):
            writer.write("step", step=step, epoch=1, compute_s=1.0)
        writer.close()
    history = RunHistory.open(run)
    assert history.mesh("compute_s", columns=60).values[1] == (1.0,) * 40
    monkeypatch.setattr(module, "RAW_MESH_STEPS", 1)
    assert history.mesh("compute_s", columns=60).values[1] == (1.0,), "of a block"
    monkeypatch.undo()
    writer = EventWriter(run.events(0), rank=0)
    writer.write("run_start", step=20, epoch=2)
    for step in range(20, 60):
        writer.write("step", step=step, epoch=2, compute_s=2.0)
    writer.close()
    history.refresh()
    for one in (history, RunHistory.open(run)):
        mesh = one.mesh("compute_s", columns=60)
        assert mesh.values == ((1.0,) * 20 + (2.0,) * 40, (1.0,) * 20 + (None,) * 40)
        assert [event["step"] for event in one.steps(1, 15, 25)] == list(range(15, 20))
        assert one.curve("compute_s", rank=1).step == tuple(range(20))
    monkeypatch.setattr(module, "RAW_MESH_STEPS", 1)
    assert history.mesh("compute_s", columns=3).step[-1] >= 20
    assert history._digests[1].last.tolist() == [19]


def test_refresh_reads_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = long_run(tmp_path, ranks=1, starts=((0, 2_000),))
    run.events(0).with_suffix(".index").unlink()
    history = RunHistory.open(run)
    assert history.last_step == 1_999
    read = []
    real = module.RankFile

    with run.events(0).open("a") as file:
        file.write('{"v":1,"event":"step","t":9999,"rank":0,"step":2000,"loss":1}\n{"v":1,"event":"st')
    history.refresh()
    read.append(history._rank_file(0).unread)
    assert (history.last_step, read[0] < 200, real) == (2_000, True, module.RankFile)
    with run.events(0).open("a") as file:
        file.write('ep","t":9999,"rank":0,"step":2001,"loss":1}\n')
    history.refresh()
    assert (history.last_step, history.damage()) == (2_001, [])


# ---- damage ----------------------------------------------------------------------------------------------------------


def test_an_empty_folder_has_a_history(tmp_path: Path) -> None:
    history = RunHistory.open(Run(path=tmp_path))
    assert (history.names(), history.ranks, history.first_step, history.supervisor()) == ((), (), None, [])
    assert (history.curve("loss").step, history.mesh("loss").values) == ((), ())
    cannot = "cannot be read: No such file or directory"
    assert history.damage() == [
        Damage(where="plan.json", what=cannot, count=1),
        Damage(where="launch.json", what=cannot, count=1),
        Damage(where="status.json", what=cannot, count=1),
    ]


def test_missing_ranks_are_named(small: Run) -> None:
    small.events(1).unlink()
    assert told(RunHistory.open(small)) == {"events: no file of rank 1": 1}
    small.set_launch(world=2_000)
    assert told(RunHistory.open(small)) == {
        "launch.json: 2,000 ranks, where the plan has 2": 1,
        "events: no file of rank 1": 1,
    }
    plan = small.plan()
    plan["layout"]["data"] = 2_000
    small.plan_json.write_text(json.dumps(plan))
    assert told(RunHistory.open(small)) == {"events: no file of 1,999 ranks from 1 to 1999": 1_999}


def test_garbage_is_counted_and_the_rest_is_shown(small: Run) -> None:
    text = small.events(0).read_bytes()
    lines = text.split(b"\n")
    noise = [b"\x00\xff\x1b[31m" * 50, b"[1]", b'{"event":"step","step":"x"}', b'{"event":"step","step":1e400}']
    lines[3:3] = [*noise, b'{"v":1,"event":"step","t":', b'{"event":7}', b"{" * 3000]
    small.events(0).write_bytes(b"\n".join(lines) + b'{"v":1,"event":"step","t":12')
    history = RunHistory.open(small)
    assert history.curve("loss").step == tuple(range(12))
    assert told(history) == {"rank 0: lines that are no events": 7, "rank 0: torn last line": 1}
    small.set_status("running")  # somebody may complete it
    assert told(history) == {"rank 0: lines that are no events": 7}


def test_numbers_that_are_none_are_left_out(small: Run) -> None:
    with small.events(0).open("a") as file:
        for number, loss in enumerate(("null", '"low"', "true", "1e400", "-1e39", "[1]", "NaN", f"1{'0' * 400}")):
            file.write(f'{{"v":1,"event":"step","t":1e9,"rank":0,"step":{12 + number},"loss":{loss},"tokens":5}}\n')
    history = RunHistory.open(small)
    assert history.last_step == 19
    values = history.curve("loss", first=12).mean
    assert [value for value in values if value is not None] == [-1e39]
    json.dumps(history.curve("loss").mean, allow_nan=False)


def test_a_clock_that_jumps_is_told(small: Run) -> None:
    with small.events(0).open("a") as file:
        file.write(
            '{"v":1,"event":"step","t":5.0,"rank":0,"step":12}\n{"v":1,"event":"step","t":-1e300,"rank":0,"step":13}\n'
        )
    history = RunHistory.open(small)
    assert history.curve("loss").step == tuple(range(12))
    assert told(history) == {"rank 0: times at which the clock went back": 2}


def test_a_flood_of_unknown_events(small: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rankfile, "MOST_EVENTS", 5_000)
    line = b'{"v":1,"event":"invented","t":1794800000.5,"rank":0,"x":1}\n'
    with small.events(0).open("ab") as file:
        file.write(line * 20_000)
        file.write(b'{"v":1,"event":"stop","t":1794800000.6,"rank":0,"step":12}\n')
    tracemalloc.start()
    history = RunHistory.open(small)
    assert (history.last_step, history.latest("stop")["step"]) == (11, 12)
    assert [event["step"] for event in history.events("evaluate", "stop")] == [12]
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 5 * 2**20
    assert told(history) == {"rank 0: events of kinds this version does not know": 20_000}
    assert len(history.events("invented")) == 5_000, "the newest"


def test_a_line_without_end(small: Run) -> None:
    size = small.events(0).stat().st_size
    with small.events(0).open("r+b") as file:
        file.truncate(size + 100 * 2**20)
        file.seek(size + 100 * 2**20)
        file.write(b'\n{"v":1,"event":"step","t":1794800000.5,"rank":0,"step":12,"loss":1.5}\n')
    tracemalloc.start()
    history = RunHistory.open(small)
    assert (history.last_step, history.curve("loss").mean[-1]) == (12, 1.5)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 20 * 2**20
    assert told(history) == {"rank 0: lines that are no events": 1}


def test_a_link_is_not_followed(small: Run, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.jsonl"
    small.events(1).rename(elsewhere)
    small.events(1).symlink_to(elsewhere)
    history = RunHistory.open(small)
    assert history.curve("loss", rank=0).step
    assert history.curve("loss", rank=1).step == ()


def test_files_that_are_none(small: Run) -> None:
    small.plan_json.write_text("{}")  # which tells of no ranks: every file may be of one
    small.events(1).unlink()
    small.events(1).mkdir()
    small.supervisor.unlink()
    small.supervisor.mkdir()
    (small.path / "events-00002.jsonl").symlink_to("/dev/zero")
    (small.path / "events-00003.jsonl").symlink_to("nowhere")
    (small.path / "events-99999999999.jsonl").write_text("")
    os.mkfifo(small.path / "events-00004.jsonl")
    history = RunHistory.open(small)
    assert history.ranks == (0, 1, 2, 3, 4)
    assert [history.curve("loss", rank=rank).step for rank in (1, 2, 3, 4)] == [()] * 4
    assert history.mesh("loss").values[4][0] is None


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    run = long_run(tmp_path, starts=((0, 300),))
    assert run.events(1).with_suffix(".index").is_file(), "which makes a reader look at the events"
    for path in (run.events(1), run.events(0).with_suffix(".index"), run.path / "lock"):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    history = RunHistory.open(run)
    assert (history.mesh("loss").values[1][0], history.last_step, run.is_held) == (None, 299, True)
    found = told(history)
    assert found["rank 1: something that is no file in its place"] == 1
    assert found["rank 0: index not used: not a file"] == 1


@pytest.mark.parametrize("how", ["gone", "empty"])
def test_without_rank_0_the_lowest_rank_with_a_record_speaks(run: Run, tmp_path: Path, how: str) -> None:
    copy = Run(path=Path(shutil.copytree(run.path, tmp_path / "copy")))
    copy.events(0).unlink()
    if how == "empty":
        copy.events(0).touch()
    history, whole = RunHistory.open(copy), RunHistory.open(run)
    assert (history.witness, history.last_step) == (1, 119)
    assert history.curve("loss").step == whole.curve("loss").step
    assert history.latest("run_start") == whole.latest("run_start", rank=1)
    before, after = read_ledger(run), read_ledger(copy)
    assert (after.steps, after.steps_lost, after.formations) == (before.steps, before.steps_lost, before.formations)
    assert after.effective == pytest.approx(before.effective, abs=0.05)


def test_a_missing_supervisor_is_told(small: Run) -> None:
    what = "incidents and memberships are unknown"
    small.supervisor.unlink()
    small.set_launch(**{key: value for key, value in small.launch().items() if key != "launched"})
    assert supervisor_damage(small, (0, 1), generation=0) == [], "torchrun has no supervisor, and counts no generations"
    assert len(supervisor_damage(small, (0, 1), generation=1)) == 1
    small.set_launch(**small.launch(), launched=1000.0)
    assert told(RunHistory.open(small)) == {f"supervisor.jsonl: is missing: {what}": 1}
    small.supervisor.mkdir()
    assert told(RunHistory.open(small)) == {f"supervisor.jsonl: is not a file: {what}": 1}
    (small.path / "status.json").write_text("{")
    assert told(RunHistory.open(small))["status.json: is not JSON"] == 1


def test_a_record_that_ends_before_the_others_is_told(tmp_path: Path) -> None:
    run = long_run(tmp_path, starts=((0, 400),))
    lines = run.events(0).read_bytes().split(b"\n")
    run.events(0).write_bytes(b"\n".join(lines[:200]) + b"\n" + lines[200][:20])
    history = RunHistory.open(run)
    history.look()
    found = told(history)
    assert found["rank 0: the record ends 200 steps before that of others"] == 1
    assert found["rank 0: torn last line"] == 1
    run.set_status("running")  # it may still write
    assert not any("ends" in what for what in told(history))


def test_a_file_that_becomes_shorter(small: Run) -> None:
    history = RunHistory.open(small)
    assert history.last_step == 11
    lines = small.events(0).read_bytes().split(b"\n")
    small.events(0).write_bytes(b"\n".join(lines[:6]) + b"\n")
    history.refresh()
    steps = [event["step"] for event in read_events(small.events(0))[0] if event["event"] == "step"]
    assert history.last_step == steps[-1] < 11
    assert told(history) == {"rank 0: the file became shorter": 1}


def test_several_meshes_at_once_are_those_one_by_one(small: Run) -> None:
    history = RunHistory.open(small)
    names = ("wait_s", "duration_s", "mfu")
    assert history.meshes(names, columns=7) == tuple(history.mesh(name, columns=7) for name in names)


def test_a_run_that_is_watched_keeps_the_newest_of_a_block_that_grows(tmp_path: Path) -> None:
    run = write_run(tmp_path, ranks=2, steps=20, incidents=0)
    history = RunHistory.open(run)
    last = next(event for event in reversed(read_events(run.events(0))[0]) if event["event"] == "step")
    for step in range(last["step"] + 1, last["step"] + 31):
        with run.events(0).open("a", encoding="utf-8") as file:
            file.write(json.dumps({**last, "step": step}) + "\n")
        history.refresh()
        assert history.curve("loss").step[-1] == step
    assert len(history._cache._rows) <= 2
