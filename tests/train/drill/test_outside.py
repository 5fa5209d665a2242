"""The suite `outside`: which drills there are, how one is judged, and the faults of the machine that it needs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.api.outside_drills import OutsideSuite
from phalanx.cli.main import main
from phalanx.errors import Problem, SystemFailure, UserError
from phalanx.train.drill import machine_faults
from phalanx.train.drill.machine_faults import BusyCore, fill_disk, listening_ports, send_strangers, set_writable
from phalanx.train.drill.outside import OutsideDrill, OutsideFinding, outside_drills, play_drill, select_drills
from phalanx.train.drill.outside_stage import OutsideStage


def test_every_drill_has_a_name_of_its_own_and_says_what_must_come_of_it() -> None:
    drills = outside_drills()
    assert len({one.name for one in drills}) == len(drills) >= 30
    assert {one.subject for one in drills} == {"control plane", "state", "damage", "doors", "stragglers"}
    assert all(one.tries and one.must for one in drills)


def test_some_are_chosen_by_name() -> None:
    assert [one.name for one in select_drills(["plan-bit", "busy-core"])] == ["busy-core", "plan-bit"]
    with pytest.raises(UserError) as caught:
        select_drills(["plan-bits", "xyzzy"])
    assert "--only plan-bits: is no drill of the suite outside\n  did you mean plan-bit?" in str(caught.value)
    assert "--list shows them all" in str(caught.value)


def test_verdicts_are_a_table_and_an_exit_code(tmp_path: Path) -> None:
    found = OutsideFinding(ok=True, reason="done after 30 steps", steps_lost=0)

    def fails(stage: OutsideStage) -> OutsideFinding:
        raise SystemFailure(Problem(where="phalanx drill", what="a small file system cannot be mounted: no"))

    stage = OutsideStage(tmp_path)
    told: list[str] = []
    stage.tell = told.append
    drills = [
        OutsideDrill(name="good", subject="state", tries="a kill", must="nothing", play=lambda _: found),
        OutsideDrill(name="no-chance", subject="state", tries="a mount", must="nothing", play=fails),
        OutsideDrill(
            name="bad",
            subject="doors",
            tries="a bit",
            must="refused",
            play=lambda _: OutsideFinding(ok=False, reason="nobody noticed: exit code 0"),
        ),
    ]
    verdicts = tuple(play_drill(one, stage) for one in drills)
    suite = OutsideSuite(verdicts=verdicts, folder=tmp_path, seconds=3.0)
    lines = str(suite).splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["verdict", "ok"]
    assert lines[2].startswith("not judged  no-chance")
    assert lines[3].startswith("not ok")
    assert lines[3].endswith("nobody noticed: exit code 0")
    assert lines[4].startswith("1 of 3 drills ok, 1 not judged; 3.00 s")
    assert (suite.exit_code, OutsideSuite(verdicts=verdicts[:1], folder=tmp_path, seconds=1.0).exit_code) == (1, 0)
    assert [one["ok"] for one in suite.to_dict()["drills"]] == [True, False, False]
    assert told == ["good: a kill", "no-chance: a mount", "bad: a bit"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--suite", "outside", "job.toml"), "JOB with --suite outside"),
        (("--suite", "outside", "--fault", "kill"), "--fault with --suite outside"),
        (("job.toml", "--only", "plan-bit"), "--only without --suite outside"),
        (("job.toml", "--list"), "--list without --suite outside"),
        (("job.toml", "--suite", "inside"), "--suite inside is unknown"),
    ],
)
def test_what_would_be_ignored_is_refused(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drill", *words]) == 2
    assert said in capsys.readouterr().err


def test_the_list_runs_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["drill", "--suite", "outside", "--list", "--runs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert all(one.name in out for one in outside_drills())
    assert not list(tmp_path.iterdir())


# ---- faults of the machine -------------------------------------------------------------------------------------------


def test_nobodys_disk_is_filled(tmp_path: Path) -> None:
    assert fill_disk(tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_a_disk_is_filled_to_the_last_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        with machine_faults.SmallDisk(tmp_path / "disk", 1 << 20) as disk:
            assert fill_disk(disk.folder)
            with pytest.raises(OSError, match="No space left"):
                (disk.folder / "more").write_bytes(b"x" * 4096)
            machine_faults.free_disk(disk.folder)
            (disk.folder / "more").write_bytes(b"x" * 4096)
            assert set_writable(disk.folder, False)
            with pytest.raises(OSError, match=r"Read-only|Permission denied"):
                (disk.folder / "third").write_bytes(b"x")
            assert set_writable(disk.folder, True)
    except SystemFailure as error:
        pytest.skip(str(error))
    assert not os.path.ismount(tmp_path / "disk")


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="no /proc")
def test_strangers_come_to_every_port_that_a_process_listens_on() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        port = ("127.0.0.1", server.getsockname()[1])
        assert port in listening_ports([os.getpid()])
        assert send_strangers([port], count=20) == 20
    assert port not in listening_ports([os.getpid()])


def test_a_core_that_others_use() -> None:
    """A process that only counts is stopped and goes on in turns, and runs at the end."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        core = BusyCore(process.pid, 0.75)
        seen: set[str] = set()
        until_s = time.monotonic() + 60
        while not {"T", "R"} <= seen and time.monotonic() < until_s:
            seen.add(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0])
        core.close()
        assert {"T", "R"} <= seen
        assert Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
