"""`phalanx web` as a person starts it: a process, an address on stdout, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from synthetic import write_run

from phalanx.cli.main import main

pytest.importorskip("uvicorn")


def start(*arguments: str) -> subprocess.Popen[str]:
    call = [sys.executable, "-m", "phalanx", "web", *arguments]
    return subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_it_prints_its_address_serves_and_ends_with_open_streams(tmp_path: Path) -> None:
    write_run(tmp_path, name="live", ranks=1, steps=10, finished=False, incidents=0, hosts=1)
    server = start(str(tmp_path), "--listen", "127.0.0.1:0")
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(f"{url}api/runs", timeout=120) as answer:
            assert json.load(answer)["runs"][0]["name"] == "live"
        with urllib.request.urlopen(f"{url}api/runs/live/stream", timeout=120) as stream:
            while stream.readline() != b"event: marks\n":
                pass
            asked = time.monotonic()
            server.send_signal(signal.SIGINT)
            server.send_signal(signal.SIGINT)
            out, err = server.communicate(timeout=300)
            print(f"ended {time.monotonic() - asked:.2f} s after Ctrl-C")
        assert server.returncode == 130
        assert out == ""
        assert err.splitlines() == [f"1 run in {tmp_path}; stop with Ctrl-C", "stopped by Ctrl-C"]
    finally:
        server.kill()
        server.wait()


def test_a_token_is_made_and_printed(tmp_path: Path) -> None:
    server = start(str(tmp_path), "--listen", "0.0.0.0:0", "--token", "auto", "--json")
    try:
        assert server.stdout is not None
        told = ""
        while not told.endswith("}\n"):
            told += server.stdout.readline()
        found = json.loads(told)
        port = found["url"].rstrip("/").rpartition(":")[2]
        assert found["open"] == f"{found['url']}?token={found['token']}"
        assert len(found["token"]) >= 32
        ask = urllib.request.Request(
            f"http://127.0.0.1:{port}/api/runs", headers={"Authorization": f"Bearer {found['token']}"}
        )
        with urllib.request.urlopen(ask, timeout=120) as answer:
            assert json.load(answer)["runs"] == []
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/api/runs", timeout=120)
    finally:
        server.kill()
        server.communicate()


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    code = main(["web", *arguments])
    found = capsys.readouterr()
    assert found.out == ""
    return code, found.err.splitlines()


def test_an_open_address_without_a_token_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, str(tmp_path), "--listen", "0.0.0.0:8337") == (
        2,
        [
            "--listen 0.0.0.0:8337: this address can be reached from other machines, and there is no token",
            "  everybody who reaches it could read the run",
            "  add --token auto, or listen on 127.0.0.1 and come in through ssh -L",
        ],
    )


def test_a_port_in_use_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert told(capsys, str(tmp_path), "--listen", f"127.0.0.1:{port}") == (
            3,
            [
                f"--listen 127.0.0.1:{port}: cannot listen there: address already in use",
                "  end the program that has the port, or take a free one: 127.0.0.1:0",
            ],
        )


def test_no_such_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs").mkdir()
    assert told(capsys, str(tmp_path / "rums")) == (
        2,
        [f"{tmp_path}/rums: there is no such folder of runs", f"  did you mean {tmp_path}/runs?"],
    )


def test_a_bad_token_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text("Xyz-Tok")
    code, lines = told(capsys, str(tmp_path), "--token", str(tmp_path / "token"))
    assert code == 2
    assert lines[0].startswith(f"--token {tmp_path}/token: its first line is no token")
    assert "Xyz-Tok" not in "\n".join(lines)


def test_a_token_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = told(capsys, str(tmp_path), "--token", str(tmp_path / "none"))
    assert (code, lines[0]) == (2, f"--token {tmp_path}/none: cannot be read: No such file or directory")


def test_a_token_others_can_read_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from phalanx.api.serving import web_token
    from phalanx.cli.output import note

    path = tmp_path / "token"
    path.write_text("0123456789abcdef\n")
    os.chmod(path, 0o644)
    assert web_token(str(path), note) == "0123456789abcdef"
    assert "others on this machine can read the token" in capsys.readouterr().err
    os.chmod(path, stat.S_IRUSR)
    assert web_token(str(path), note) == "0123456789abcdef"
    assert capsys.readouterr().err == ""


def test_a_missing_extra_names_its_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else object())
    assert told(capsys, str(tmp_path)) == (
        2,
        [
            "phalanx web: needs uvicorn, which is not installed",
            "  it serves the page; training needs nothing of it",
            "  pip install 'phalanx[web]'",
        ],
    )


def test_the_browser_is_opened_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: bool(opened.append(url)) or True)
    monkeypatch.setattr("phalanx.web.serve.serve_dashboard", lambda *_, **__: None)
    assert main(["web", str(tmp_path), "--listen", "127.0.0.1:0"]) == 0
    assert opened == []
    assert main(["web", str(tmp_path), "--listen", "127.0.0.1:0", "--open"]) == 0
    assert opened[0].startswith("http://127.0.0.1:")
