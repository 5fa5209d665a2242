"""`phalanx metrics`: what it prints, serves and refuses, and the server that `phalanx train` starts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from synthetic import write_run

from phalanx.api import serving as metrics
from phalanx.cli.main import main
from phalanx.cli.output import note
from phalanx.errors import UserError
from phalanx.job.run_sections import Telemetry
from phalanx.metrics.prometheus import TOKEN_FILE, serve_metrics
from phalanx.record.run import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write_run(tmp_path_factory.mktemp("runs"), name="first", ranks=2, steps=30, incidents=0)


def test_prints_what_a_scrape_would_see(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", str(run.path)]) == 0
    text, errors = capsys.readouterr()
    assert 'train_step{run="first"} 30.0\n' in text
    assert errors == ""


def test_json(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", str(run.path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    found = [one for one in told["metrics"] if one["name"] == "train.compute.duration"]
    assert [one["labels"] for one in found] == [{"rank": "0", "host": "host-0"}, {"rank": "1", "host": "host-1"}]
    assert {one["unit"] for one in found} == {"s"}


def test_the_dashboard(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", "--grafana"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Phalanx run"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--otlp", "http://127.0.0.1:1", "--listen", "127.0.0.1:0"], "--listen and --otlp exclude each other"),
        (["--every", "0"], "--every 0 is out of range"),
        (["--interval", "nan"], "--interval nan is out of range"),
        (["--listen", "nowhere"], "--listen: 'nowhere' is not an address"),
        (["--listen", "0.0.0.0:0"], "there is no token"),
        (["--token", "auto"], "--token guards --listen, which is not given"),
        (["--listen", "127.0.0.1:0", "--token", "no/such/file"], "--token no/such/file: cannot be read"),
        (["--otlp", "collector:4318"], "'collector:4318' is not a URL"),
    ],
)
def test_what_is_refused(run: Run, options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", str(run.path), *options]) == 2
    text, errors = capsys.readouterr()
    assert told in errors
    assert text == ""


def test_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics"]) == 2
    assert "phalanx metrics: no run is named" in capsys.readouterr().err
    assert main(["metrics", str(tmp_path / "none")]) == 2
    assert "there is no such run" in capsys.readouterr().err


def test_serves_until_ctrl_c(run: Run, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token-of-some-length\n")
    options = ["--listen", "127.0.0.1:0", "--token", str(tmp_path / "token")]
    command = [sys.executable, "-m", "phalanx", "metrics", str(run.path), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            asked = urllib.request.Request(url, headers={"Authorization": "Bearer a-token-of-some-length"})
            with urllib.request.urlopen(asked, timeout=120) as answer:
                assert b'train_step{run="first"} 30.0' in answer.read()
            server.send_signal(signal.SIGINT)
            server.send_signal(signal.SIGINT)
            assert server.communicate(timeout=120)[1].splitlines()[-1] == "stopped by Ctrl-C"
            assert server.returncode == 130
        finally:
            server.kill()


def test_training_serves_its_own_metrics(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with serve_metrics(run, Telemetry(prometheus=True), tell=note):
        told = capsys.readouterr().err
        with urllib.request.urlopen(told.removeprefix("  metrics: ").strip(), timeout=120) as answer:
            assert b"train_loss" in answer.read()
    with serve_metrics(run, Telemetry(prometheus=False), tell=note):
        assert capsys.readouterr() == ("", "")


def test_training_makes_a_token_where_others_reach_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path, ranks=1, hosts=1, steps=3, incidents=0)
    path = run.path / TOKEN_FILE
    tokens = []
    for _ in range(2):  # resumed: the same token, or every Prometheus would have to be told
        with serve_metrics(run, Telemetry(prometheus=True, listen="0.0.0.0:0"), tell=note):
            url = capsys.readouterr().err.split()[1].replace("0.0.0.0", "127.0.0.1")
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(url, timeout=120)
            assert caught.value.code == 401
            caught.value.close()
        tokens.append(path.read_text())
    assert tokens[0] == tokens[1]
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_address_that_cannot_be_stops_before_the_ranks(run: Run) -> None:
    with (
        pytest.raises(UserError) as caught,
        serve_metrics(run, Telemetry(prometheus=True, listen="no-such-host.invalid:9400"), tell=note),
    ):
        pass
    assert str(caught.value).startswith("telemetry.listen no-such-host.invalid:9400: the host is not known")


def test_following_ends_with_a_last_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run writes just before it ends is exported too."""
    run = write_run(tmp_path, ranks=1, hosts=1, steps=3, incidents=0, finished=False)
    run.set_status("launching")
    looks: list[str] = []

    def sleep(seconds: float) -> None:
        assert seconds == 15.0
        run.set_status("done")

    monkeypatch.setattr(metrics.time, "sleep", sleep)
    assert metrics._repeat(lambda: looks.append(str(run.status()["state"])), run, follow=True, interval_s=15.0) == 2
    assert looks == ["launching", "done"]


def test_following_a_run_whose_lock_is_not_seen_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on on another host: as long as somebody writes, it is believed."""
    run = write_run(tmp_path, ranks=1, hosts=1, steps=3, incidents=0, finished=False)
    assert not run.is_held
    monkeypatch.setattr(metrics.time, "sleep", lambda _: run.set_status("done"))
    assert metrics._repeat(lambda: None, run, follow=True, interval_s=15.0) == 2
