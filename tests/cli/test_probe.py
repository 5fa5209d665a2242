import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.hardware.probe import load_profile


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PHALANX_PROFILE", "PHALANX_HARDWARE", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_the_profile_is_stored_and_used_by_local(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["probe", "--engine", "numpy", "--seconds", "2", "--disk", str(tmp_path), "--json"]
    assert main(command) == 0
    printed = capsys.readouterr()
    data = json.loads(printed.out)
    stored = list((tmp_path / ".local/share/phalanx/profiles").iterdir())
    assert [load_profile(path).matmul_flops for path in stored] == [data["matmul_flops"]]
    assert "matmul 1024: " in printed.err
    assert f"profile stored in {stored[0]}" in printed.err
    assert main(["cluster", "--json"]) == 0
    cluster = json.loads(capsys.readouterr().out)["cluster"]
    if cluster["accelerator"]["family"] == "cpu":
        assert cluster["disk_bytes_per_s"] == data["disk_bytes_per_s"]
        assert "measured by phalanx probe" in cluster["source"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seconds", "0"], "--seconds: 0 is out of range"),
        (["--seconds", "nan"], "--seconds: nan is out of range"),
        (["--disk", "/no/such/folder"], "--disk: /no/such/folder is not a folder"),
    ],
)
def test_bad_calls_are_exit_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_profile_stored_elsewhere_says_how_to_use_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "p.json"
    assert main(["probe", "--engine", "numpy", "--seconds", "2", "--disk", str(tmp_path), "--out", str(out)]) == 0
    text = capsys.readouterr().err
    assert (
        f"set PHALANX_PROFILE={out} to plan with it for the cluster local; phalanx cluster takes --profile {out}"
        in text
    )
    assert "now use it" not in text


def test_a_missing_folder_is_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "typo" / "p.json"
    assert main(["probe", "--engine", "numpy", "--out", str(out)]) == 3
    expected = f"{out}: cannot be written: there is no folder {out.parent}\n  make the folder, or name another --out\n"
    assert capsys.readouterr().err.endswith(expected)
    assert not out.parent.exists()


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    out = tmp_path / "p.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "phalanx.cli.main", "probe", "--engine", "numpy", "--seconds", "600", "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(scratch)},
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "matmul" in line:
            break
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)  # while it ends its workers
    _, rest = process.communicate(timeout=300)  # the workers alone would go on for longer
    assert process.returncode == 130
    assert "Traceback" not in rest
    assert not out.exists()
    deadline = time.monotonic() + 300
    while list(scratch.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(scratch.iterdir()) == []
