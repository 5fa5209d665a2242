"""`phalanx check`: exit codes, formats, edits, and what goes to which stream."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rules.kit import JOB
from synthetic import write_run

from phalanx.cli.main import main

BAD = JOB + "\n[checkpoint]  # rarely\ninterval_s = 864000  # ten days\nkeep = 3\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("CACHE", "DATA", "CONFIG"):  # neither plans nor drills of whoever runs the test
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    (tmp_path / "good.toml").write_text(JOB)
    (tmp_path / "bad.toml").write_text(BAD)
    return tmp_path


def test_a_finding_has_its_line_its_formula_its_cost_and_its_cure(folder, capsys) -> None:
    assert main(["check", "bad.toml", "--select", "CKP001"]) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    number = BAD.splitlines().index("interval_s = 864000  # ten days") + 1
    assert lines[0].startswith(f"bad.toml:{number}: E CKP001 interval-daly  interval 864,000 s is ")
    assert lines[1].startswith("  M = 86400 / (16 hosts")
    assert any("points of effective training time, about $" in line for line in lines)
    assert any(line.startswith("  fix (safe): checkpoint.interval_s = ") for line in lines)
    assert lines[-1] == "  fixable: 1 with --fix; --diff shows the edits"
    assert lines[-3].startswith("bad.toml: 0 pass, 1 fail (1 error), 0 unknown")
    assert err == ""


def test_the_good_job_is_clean(folder, capsys) -> None:
    assert main(["check", "good.toml"]) == 0
    assert main(["check", "good.toml", "--require-evidence"]) == 1
    assert main(["check", "good.toml", "--select", "CKP001", "-v"]) == 0
    assert "ok CKP001 interval-daly  interval " in capsys.readouterr().out


def test_several_targets_one_of_them_broken(folder, capsys) -> None:
    (folder / "broken.toml").write_text("name = 3\n[batch]\nmicro = -1\n")
    assert main(["check", "broken.toml", "bad.toml", "good.toml", "--select", "CKP001"]) == 2
    out, err = capsys.readouterr()
    assert "broken.toml:1: name = 3" in err
    assert "broken.toml:3: batch.micro" in err
    assert "bad.toml: 0 pass, 1 fail" in out
    assert "good.toml: 1 pass, 0 fail" in out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nothing.toml"], "there is no such file or folder"),
        (["good.toml", "--select", "CPK"], "did you mean CKP?"),
        (["good.toml", "--profile", "nvidia-h10"], "did you mean nvidia-h100?"),
        (["good.toml", "--cluster", "8xH1000:2"], "8xH1000"),
        (["good.toml", "--json", "--format", "html"], "exclude each other"),
        (["good.toml", "--fix", "--set", "batch.micro=1"], "exclude each other"),
        (["good.toml", "--fix", "--cluster", "8xH100:1"], "--cluster and --fix exclude each other"),
        (["good.toml", "--diff", "--profile", "custom"], "--profile and --fix exclude each other"),
        (["good.toml", "--unsafe-fixes", "--plan", "p.json"], "--plan and --fix exclude each other"),
        (["good.toml", "--select", "CKP", "--ignore", "CKP"], "leaves no rule to check"),
        (["good.toml", "--out", "nowhere/report"], "its folder does not exist"),
        (["good.toml", "--waivers", "nowhere.toml"], "nowhere.toml"),
        (["good.toml", "--plan", "p.json", "--cluster", "8xH100:2"], "exclude each other"),
        (["good.toml", "--drills", "nowhere"], "is not a folder"),
        (["good.toml", "--format", "xml"], "invalid choice"),
        (["good.toml", "--fixes"], "unrecognized"),
        ([], "TARGET"),
    ],
)
def test_a_wrong_call_is_told_and_exits_2(folder, capsys, arguments, told) -> None:
    assert main(["check", *arguments]) == 2
    out, err = capsys.readouterr()
    assert told in err
    assert out == ""


def test_fix_writes_the_safe_edits_and_keeps_the_rest(folder, capsys) -> None:
    assert main(["check", "bad.toml", "--fix", "--select", "CKP001"]) == 0
    out, err = capsys.readouterr()
    after = (folder / "bad.toml").read_text()
    changed = [(old, new) for old, new in zip(BAD.splitlines(), after.splitlines(), strict=True) if old != new]
    assert len(changed) == 1
    assert changed[0][0] == "interval_s = 864000  # ten days"
    assert changed[0][1].startswith("interval_s = ")
    assert changed[0][1].endswith("  # ten days")
    assert "bad.toml: CKP001: checkpoint.interval_s = " in err
    assert "bad.toml: 1 finding fixed" in err
    assert "1 pass, 0 fail" in out
    assert main(["check", "bad.toml", "--fix", "--select", "CKP001"]) == 0
    assert (folder / "bad.toml").read_text() == after


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_diff_is_exact_but_on_a_terminal(is_terminal: bool, folder, capsys, monkeypatch) -> None:
    (folder / "bad.toml").write_text(BAD.replace("ten days", "ten\x9b2J days"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    assert main(["check", "bad.toml", "--diff", "--select", "CKP001"]) == 1
    shown = "ten\\x9b2J" if is_terminal else "ten\x9b2J"
    assert f"-interval_s = 864000  # {shown} days\n" in capsys.readouterr().out


def test_diff_shows_and_writes_nothing(folder, capsys) -> None:
    assert main(["check", "bad.toml", "--diff", "--select", "CKP001"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("--- a/bad.toml\n+++ b/bad.toml\n@@ ")
    assert "-interval_s = 864000  # ten days\n+interval_s = " in out
    assert "1 finding would be fixed" in err
    assert (folder / "bad.toml").read_text() == BAD
    (folder / "p.diff").write_text(out)
    subprocess.run(["patch", "-p1", "-s", "-i", "p.diff"], check=True, cwd=folder)
    assert main(["check", "bad.toml", "--select", "CKP001"]) == 0


def test_unsafe_edits_wait_for_their_option(folder) -> None:
    path = folder / "fp16.toml"
    path.write_text(JOB + '\n[precision]\ncompute = "fp16"\nloss_scale = 1024\n')
    assert main(["check", "fp16.toml", "--fix", "--select", "PRC001"]) == 1
    assert "loss_scale = 1024" in path.read_text()
    assert main(["check", "fp16.toml", "--unsafe-fixes", "--select", "PRC001"]) == 0
    assert 'loss_scale = "auto"' in path.read_text()


def test_an_edit_keeps_the_port(folder) -> None:
    (folder / "bad.toml").write_text(JOB + '\n[telemetry]\nprometheus = true\nlisten = "0.0.0.0:9000"\n')
    assert main(["check", "bad.toml", "--fix", "--select", "SEC002"]) == 0
    assert 'listen = "127.0.0.1:9000"' in (folder / "bad.toml").read_text()


def test_waivers_of_a_file_waive(folder, capsys) -> None:
    (folder / "w.toml").write_text('[[waiver]]\nrule = "CKP001"\nreason = "a trial"\nexpires = 2099-01-01\n')
    assert main(["check", "bad.toml", "--select", "CKP001", "--waivers", "w.toml"]) == 0
    assert "waived CKP001" in capsys.readouterr().out
    assert main(["check", "good.toml", "--select", "CKP001,SPC", "--waivers", "w.toml"]) == 0
    assert "w.toml:2: I SPC001" in capsys.readouterr().out


def test_only_job_files_are_mended(folder, capsys) -> None:
    run = write_run(folder, ranks=2, steps=10, incidents=0)
    before = run.job_toml.read_bytes()
    assert main(["plan", "good.toml", "--out", "plan.json"]) == 0
    for target, told in (("run", "is a run"), ("run/job.toml", "belongs to a run"), ("plan.json", "is a plan")):
        capsys.readouterr()
        assert main(["check", target, "--fix"]) == 2
        assert told in capsys.readouterr().err
    assert run.job_toml.read_bytes() == before


@pytest.mark.parametrize("form", ["sarif", "html"])
def test_every_format_goes_into_a_file_whole(folder, capsys, form) -> None:
    assert main(["check", "bad.toml", "--select", "CKP001", "--format", form, "--out", "report"]) == 1
    assert "CKP001" in (folder / "report").read_text()
    out, err = capsys.readouterr()
    assert (out, err) == ("", "wrote report\n")


def test_json_on_stdout(folder, capsys) -> None:
    assert main(["check", "bad.toml", "--select", "CKP001", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["target"], found["exit_code"], found["findings"][0]["rule"]) == ("bad.toml", 1, "CKP001")


def test_a_run_is_checked_with_its_log(folder, capsys) -> None:
    write_run(folder, ranks=2, steps=20, incidents=1)
    assert main(["check", "run", "--json"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert set("JPL") <= set(found["evidence"])


def test_a_job_is_checked_without_torch_or_scipy(folder) -> None:
    script = (
        "import sys; from phalanx.cli.main import main; code = main(['check', 'good.toml']);"
        "bad = {'torch', 'scipy', 'starlette'} & sys.modules.keys(); sys.exit(f'{code} {bad}' if code or bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_ctrl_c_says_what_was_read(folder, capsys, monkeypatch) -> None:
    import phalanx.rules.log.stream as streaming

    def interrupted(run, *, progress=None):
        progress(3_000_000, 10_000_000)
        raise KeyboardInterrupt

    write_run(folder, ranks=2, steps=10, incidents=0)
    monkeypatch.setattr(streaming, "read_log", interrupted)
    assert main(["check", "run"]) == 130
    assert "run: read 3 of 10 MB" in capsys.readouterr().err
    assert Path("run").is_dir()


def test_colours_are_for_terminals_only(folder, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["check", "bad.toml", "--select", "CKP001"]) == 1
    painted = capsys.readouterr().out
    assert "\x1b[1;31mbad.toml:" in painted
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["check", "bad.toml", "--select", "CKP001"]) == 1
    assert "\x1b" not in capsys.readouterr().out
