"""`phalanx watch`: the screen, the lines and the objects; of runs that go on, that are over, and that are damaged."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic import write_run

from phalanx.api.watching import BackgroundCheck, KnownVerdicts
from phalanx.cli import watch
from phalanx.cli.main import main
from phalanx.cli.watch_screen import frame, sparkline
from phalanx.record.account.summary import Pair
from phalanx.record.report.live import View, Watcher
from phalanx.record.run import Run
from phalanx.record.run_lock import SILENT_S
from phalanx.rules.live_check import LiveCheck

Output = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write_run(tmp_path_factory.mktemp("watch"), steps=60, straggler=2)


@pytest.fixture(scope="module")
def view(done: Run) -> View:
    return Watcher(done).look()


def screen(view: View, *, width: int = 110, height: int = 60, check: KnownVerdicts | None = None) -> list[str]:
    lines = frame(view, ["step 9: something"], name="run", width=width, height=height, check=check)
    return [line.plain for line in lines]


def test_the_screen(view: View) -> None:
    lines = screen(view)
    text = "\n".join(lines)
    assert lines[0] == "run  done  step 60 of 60 (100.0%)"
    for word in ("loss", "tokens/s", "MFU", "memory", "noise", "effective", "time", "checkpoint", "money", "energy"):
        assert f"\n{word} " in text
    assert "planned 39.4k" in text
    assert "data 1, tensor 0  straggler" in text
    assert "1; step 30: rank 3 on host-1: killed by signal 9, next step after" in text
    assert lines[-1] == "  step 9: something"


def test_tokens_per_second_are_compared_with_the_plan_in_the_mean(view: View) -> None:
    assert view.progress is not None
    mean = Pair(predicted=1000.0, measured=900.0)
    now = replace(view.progress, tokens_per_s=2000.0)
    over = replace(view, progress=now, summary=replace(view.summary, tokens_per_s=mean))
    (line,) = (line for line in screen(over) if line.startswith("tokens/s"))
    assert re.fullmatch(r"tokens/s   900 .*  planned 1\.00k \(-10\.0%\)", line)
    (line,) = (line for line in screen(replace(over, state="running")) if line.startswith("tokens/s"))
    assert re.fullmatch(r"tokens/s   2\.00k now .*  mean 900, planned 1\.00k \(-10\.0%\)", line)


@pytest.mark.parametrize("width", [12, 40, 60, 80, 200])
@pytest.mark.parametrize("height", [1, 5, 24])
def test_every_terminal_is_wide_enough(view: View, width: int, height: int) -> None:
    lines = screen(view, width=width, height=height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("run  done"[: width - 1])


def test_many_ranks_are_cut_to_the_slowest(tmp_path: Path) -> None:
    run = write_run(tmp_path, ranks=12, steps=20, incidents=0, straggler=11, hosts=1)
    lines = screen(Watcher(run).look())
    number = next(index for index, line in enumerate(lines) if line.startswith("the 8 slowest of 12 ranks"))
    assert lines[number + 1].endswith("straggler")
    assert lines[number + 1].split()[0] == "11"


def test_plain_lines_of_a_run_that_is_over(done: Run, capsys: Output) -> None:
    assert main(["watch", str(done.path)]) == 0  # stdout is no terminal here
    lines = capsys.readouterr().out.splitlines()
    assert "step 30: failed: rank 3 on host-1: killed by signal 9" in lines
    assert any(line.startswith("step 60/60  loss ") for line in lines)
    assert any(line.startswith("straggler: rank 2 ") for line in lines)
    assert any(line.startswith("check: warning TEL004 stragglers-named: rank 2 ") for line in lines)
    (counts,) = (line for line in lines if re.match(r"check: \d+ pass, \d+ fail", line))
    assert "so far" not in counts
    assert lines[-1] == "done"


def test_objects(done: Run, capsys: Output) -> None:
    assert main(["watch", str(done.path), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    assert (told["state"], told["step"], told["steps"], told["incidents"]) == ("done", 60, 60, 1)
    assert told["stragglers"][0]["rank"] == 2
    assert told["so_far"]["usd"] > 0
    check = told["check"]
    assert (check["so_far"], check["counts"]["fail"] > 0) == (False, True)
    assert "TEL004" in {one["rule"] for one in check["findings"]}


def test_objects_hold_no_raw_controls(done: Run, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KnownVerdicts, "as_json", lambda self: {"what": "a\x9b\u202e"})
    assert main(["watch", str(done.path), "--json"]) == 0
    line = capsys.readouterr().out.rstrip("\n")
    assert line.isprintable()
    assert json.loads(line)["check"] == {"what": "a\x9b\u202e"}


def test_verdicts_on_the_screen(done: Run, view: View) -> None:
    known = BackgroundCheck(done).last()
    lines = screen(view, width=200, check=known)
    number = next(index for index, line in enumerate(lines) if line.startswith("check "))
    assert re.match(r"check +\d+ pass, \d+ fail", lines[number])
    worst = known.problems()[0]
    assert f"{worst.severity} {worst.rule.id} {worst.rule.slug}: {worst.outcome.what}" in lines[number + 1]
    assert lines[number + 4].endswith(f"and {len(known.problems()) - 3} more: phalanx check RUN")
    assert any(line.startswith("check      reading") for line in screen(view, check=KnownVerdicts()))


def test_the_screen_never_waits_for_a_verdict(done: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    going = threading.Event()
    look = LiveCheck.look
    monkeypatch.setattr(LiveCheck, "look", lambda check: (going.wait(300), look(check, 5_000))[1])
    checker = BackgroundCheck(done)
    assert checker.known == KnownVerdicts()
    assert checker.last(wait_s=0.05) == KnownVerdicts()
    going.set()
    assert checker.last(wait_s=300.0).is_last


def test_a_fault_in_a_rule_does_not_end_the_watching(
    done: Run, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LiveCheck, "look", lambda check: {}["fault"])
    assert main(["watch", str(done.path), "--plain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "check: could not be worked out (KeyError)" in lines
    assert lines[-1] == "done"


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_a_run_that_goes_on_is_followed_to_its_end(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "REDRAW_S", 0.02)
    monkeypatch.setattr(watch, "PLAIN_S", 0.0)
    run = write_run(tmp_path, ranks=2, steps=20, incidents=0, hosts=1)
    whole = {rank: run.events(rank).read_text() for rank in (0, 1)}
    told = run.supervisor.read_text()
    cut = whole[0].index('"step":11,')
    for rank, text in whole.items():
        run.events(rank).write_text(text[:cut])
    begun = told.index("\n") + 1
    run.supervisor.write_text(told[:begun])
    run.set_status("running")
    begins, ends = threading.Event(), threading.Event()

    def show(said: object, **_: object) -> None:
        line = str(said)
        sys.stdout.write(f"{line}\n")
        if line.startswith("step 11/20 "):
            begins.set()
        if line.startswith("step 20/20 "):
            ends.set()

    def go_on() -> None:
        begins.wait(300)
        append(run.events(1), whole[1][cut:])
        append(run.events(0), whole[0][cut:])
        append(run.supervisor, told[begun:])
        ends.wait(300)
        run.set_status("done")

    monkeypatch.setattr(watch, "say", show)
    thread = threading.Thread(target=go_on)
    thread.start()
    assert main(["watch", str(run.path), "--plain"]) == 0
    thread.join()
    lines = capsys.readouterr().out.splitlines()
    steps = [line.split()[1] for line in lines if line.startswith("step ") and "/" in line]
    assert (steps[0], steps[-1]) == ("11/20", "20/20")
    assert lines.count("step 20: checkpoint saved (56.0 GB of rank 0, 9.50 s)") == 1  # each remark once
    assert lines[-1] == "done"


def test_ctrl_c_is_a_good_end(tmp_path: Path) -> None:
    run = write_run(tmp_path, ranks=2, steps=5, incidents=0, hosts=1, finished=False)
    words = [sys.executable, "-m", "phalanx", "watch", str(run.path), "--plain"]

    def heed() -> None:  # a shell's background job ignores SIGINT, and so would its children
        signal.signal(signal.SIGINT, signal.default_int_handler)

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with run.held(), subprocess.Popen(words, **pipes, preexec_fn=heed) as process:  # type: ignore[call-overload]
        assert process.stdout is not None
        line = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    assert line


def test_a_run_whose_processes_are_gone(tmp_path: Path, capsys: Output) -> None:
    run = write_run(tmp_path, ranks=2, steps=5, incidents=0, hosts=1, finished=False)
    assert Watcher(run).look().state == "running"  # it may have begun a moment ago, on another host
    for path in run.path.iterdir():
        os.utime(path, (time.time() - 2 * SILENT_S,) * 2)
    assert main(["watch", str(run.path), "--plain"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "interrupted"


@pytest.mark.parametrize("content", [b"", b"\x00\x1b[2J\xff" * 99, b'{"event":"step","step":"\\u001b[2J"}\n' * 9])
def test_a_damaged_run(tmp_path: Path, capsys: Output, content: bytes) -> None:
    run = write_run(tmp_path, ranks=2, steps=5, incidents=0, hosts=1)
    for name in ("events-00000.jsonl", "events-00001.jsonl", "supervisor.jsonl"):
        (run.path / name).write_bytes(content)
    run.set_status("failed", message="\x1b[2J<b>")
    assert main(["watch", str(run.path), "--plain"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.splitlines()[-1] == "failed:  [2J<b>"
    assert all("\x1b" not in line for line in screen(Watcher(run).look()))


def test_small_bars() -> None:
    assert sparkline([], 5) == sparkline([None, None], 5) == sparkline([1.0], 0) == ""
    assert sparkline([3.0], 5) == "▁"
    assert len(sparkline([float(number) for number in range(500)], 30)) == 30


def test_a_terminal_gets_a_screen(done: Run) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 90, 0, 0))
    words = [sys.executable, "-m", "phalanx", "watch", str(done.path)]
    environ = {**os.environ, "TERM": "xterm-256color"}
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, env=environ) as process:
        os.close(theirs)
        shown = b""
        while chunk := _read(ours):
            shown += chunk
        assert process.wait(300) == 0
    os.close(ours)
    assert "step 60 of 60 (100.0%)" in shown.decode()
    assert b"\x1b[?25l" in shown  # the cursor is hidden while it draws,
    assert b"\x1b[?25h" in shown  # and there again at the end


def _read(file: int) -> bytes:
    try:
        return os.read(file, 4096)
    except OSError:  # Linux says EIO when the other end is closed
        return b""
