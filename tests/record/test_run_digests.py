"""SHA256SUMS of a run: one changed bit of its job or plan is refused by whoever trains with it."""

from __future__ import annotations

import hashlib
import json
import random
import re
from pathlib import Path

import pytest

from phalanx.errors import UserError
from phalanx.io.checksums import CHECKSUMS
from phalanx.record import run_settings as module
from phalanx.record.archive.damage import folder_damage
from phalanx.record.events import EventWriter
from phalanx.record.run import Run, create_run, open_run
from phalanx.record.run_settings import SETTINGS

PLAN = json.dumps({"job": {"optim": {"lr": 0.003}}, "layout": {"data": 2}}, indent=1)
OTHER = PLAN.replace("0.003", "0.004")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create_run(tmp_path, "x", job_toml="[optim]\nlr = 0.003\n", job={"optim": {"lr": 0.003}}, plan_json=PLAN)


def test_every_flipped_bit_is_refused(run: Run) -> None:
    draw = random.Random(22)
    run.check_settings()
    for name in (*SETTINGS, "run_id", CHECKSUMS) * 3:
        path = run.path / name
        whole = path.read_bytes()
        data = bytearray(whole)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        with pytest.raises(UserError, match=re.escape(str(run.path))):
            run.check_settings()
        path.write_bytes(whole)
    run.check_settings()


def test_the_message_says_what_to_do(run: Run) -> None:
    changed = PLAN.replace("0.003", "0.007")
    run.plan_json.write_text(changed)
    found, said = (hashlib.sha256(text.encode()).hexdigest()[:12] for text in (changed, PLAN))
    with pytest.raises(UserError) as caught:
        run.plan_text()
    assert str(caught.value) == (
        f"{run.plan_json}: has changed since it was written: its sha256 is {found}…, and SHA256SUMS says {said}…\n"
        "  the run would go on with settings that nobody asked for\n"
        f"  put it back from a copy; to change a setting: phalanx train --resume {run.path} --set KEY=VALUE; "
        f"to keep the file as it is: delete {run.path / CHECKSUMS}"
    )
    (run.path / CHECKSUMS).unlink()
    assert run.plan_text() == changed


def test_a_run_of_06_is_read_and_gets_digests_when_it_goes_on(run: Run) -> None:
    (run.path / CHECKSUMS).unlink()
    (run.path / "run_id").unlink()
    assert (run.plan_text(), run.run_id) == (PLAN, "")
    run.check_settings()
    run.replan(job_toml="", job={}, plan_json=PLAN)
    run.plan_json.write_text(OTHER)
    with pytest.raises(UserError, match="has changed since it was written"):
        run.check_settings()


def test_another_plan_takes_its_place(run: Run) -> None:
    before = run.run_id
    run.replan(job_toml="a = 1\n", job={"a": 1}, plan_json=OTHER)
    run.check_settings()
    assert (run.plan_text(), run.run_id) == (OTHER, before)
    assert len((run.path / CHECKSUMS).read_text().splitlines()) == 4


@pytest.mark.parametrize("written", range(4))
def test_a_process_that_dies_between_two_files_leaves_nothing_that_looks_damaged(
    run: Run, written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, count = module.write_run_file, 0

    def dies(path: Path, text: str) -> None:
        nonlocal count
        if path.name in SETTINGS:
            if count == written:
                raise KeyboardInterrupt
            count += 1
        put(path, text)

    monkeypatch.setattr(module, "write_run_file", dies)
    try:
        run.replan(job_toml="a = 1\n", job={"a": 1}, plan_json=OTHER)
    except KeyboardInterrupt:
        assert written < 3
    run.check_settings()


def test_every_run_has_an_id_of_its_own(tmp_path: Path, run: Run) -> None:
    other = create_run(tmp_path, "x", job_toml="", job={}, plan_json=PLAN)
    assert re.fullmatch(r"[0-9a-f]{32}", run.run_id)
    assert run.run_id != other.run_id
    moved = run.path.rename(tmp_path / "moved")
    assert open_run(moved).run_id == Run(path=moved).run_id != ""


def test_the_newest_step_that_was_saved(run: Run) -> None:
    assert run.committed_step() is None
    events = EventWriter(run.events(0), rank=0)
    events.write("checkpoint", step=10, phase="stage")
    events.write("checkpoint", step=10, phase="commit", path="step-00000010")
    events.write("checkpoint", step=20, phase="commit", path="step-00000020")
    assert run.committed_step() == 20
    events.write("ready", step=15, source="memory")  # it went back behind it
    assert run.committed_step() == 10
    events.write("checkpoint", step=20, phase="commit", path="step-00000020")
    supervisor = EventWriter(run.supervisor, rank=-1)
    supervisor.write("rollback", step=22, target=10, set_aside=[20])
    supervisor.close()
    assert run.committed_step() == 10, "set aside, and the run ended before it was ready again"
    events.write("checkpoint", step=20, phase="commit", path="step-00000020")
    assert run.committed_step() == 20, "saved again"
    events.close()


def test_a_launch_that_changed_is_refused(run: Run) -> None:
    run.set_launch(v=1, world=4, hosts=["a"], data_s=0.5, baselines={"x": 4.1})
    assert run.launch() == {"v": 1, "world": 4, "hosts": ["a"], "data_s": 0.5, "baselines": {"x": 4.1}}
    path = run.path / "launch.json"
    whole = path.read_text()
    path.write_text(whole.replace('"world": 4', '"world": 5'))
    with pytest.raises(UserError, match=r"launch.json: has changed since it was written"):
        run.launch()
    assert any("has changed" in one.what for one in folder_damage(run, ()))
    path.write_text('{"v": 1, "world": 6}')  # of 0.6, or a person's own
    assert run.launch()["world"] == 6
    path.write_text(whole)
    run.set_launch(**{**run.launch(), "join": 2})  # what was read is written again with more
    assert run.launch()["join"] == 2
