"""The command itself: help without imports, near misses, exit codes, no tracebacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from phalanx.cli import main as cli


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300, check=False
    )


HEAVY = ("numpy", "scipy", "torch", "rich", "starlette", "uvicorn", "asyncio")


@pytest.mark.parametrize("arguments", [["--help"], ["show", "--help"], ["init", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = f"""
import sys
from phalanx.cli.main import main
try:
    code = main({arguments!r})
except SystemExit as stop:
    code = stop.code
print("heavy:", [name for name in {HEAVY!r} if name in sys.modules], "code:", code)
"""
    done = run_python(code)
    assert done.stdout.splitlines()[-1] == "heavy: [] code: 0", done.stdout + done.stderr


def test_help_lists_every_verb_without_importing_it() -> None:
    code = "import sys; from phalanx.cli.main import main; main(['--help']); print(list(sys.modules))"
    done = run_python(code)
    *text, modules = done.stdout.splitlines()
    for verb, (module, _, help_line) in cli.VERBS.items():
        assert f"  {verb:<11} {help_line}" in text
        assert repr(module) not in modules


def test_no_arguments_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert capsys.readouterr().out.startswith("usage: phalanx VERB")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("phalanx 0.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plna"], 'phalanx: there is no verb "plna"\n  did you mean phalanx plan?\n'),
        (["zzzz"], 'phalanx: there is no verb "zzzz"\n  the verbs are init, show'),
        (["--vresion"], 'phalanx: there is no option "--vresion"'),
        (["show"], "phalanx show: the following arguments are required: JOB\n"),
        (
            ["show", "x", "--jsn"],
            "phalanx show: unrecognized arguments: --jsn\n  did you mean --json? phalanx show --help",
        ),
        (["show", "x", "--js"], "phalanx show: unrecognized arguments: --js\n"),
        (["show", "no-such.toml"], "no-such.toml: there is no such job file"),
    ],
)
def test_wrong_calls(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(message)
    assert captured.out == ""


def verb_that(monkeypatch: pytest.MonkeyPatch, action: object) -> None:
    module = ModuleType("fake_verb")
    module.configure_parser = lambda parser: None  # type: ignore[attr-defined]
    module.run_command = action  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_verb", module)
    monkeypatch.setitem(cli.VERBS, "fake", ("fake_verb", "", "a verb of the test"))


def raising(error: BaseException) -> object:
    def run(args: SimpleNamespace) -> int:
        raise error

    return run


def test_own_mistakes_are_short_unless_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verb_that(monkeypatch, raising(RuntimeError("boom\nsecond line")))
    monkeypatch.delenv("PHALANX_DEBUG", raising=False)
    assert cli.main(["fake"]) == 3
    short = capsys.readouterr().err
    assert short.startswith("phalanx: internal error: RuntimeError: boom\n")
    assert "Traceback" not in short
    monkeypatch.setenv("PHALANX_DEBUG", "1")
    assert cli.main(["fake"]) == 3
    assert "Traceback" in capsys.readouterr().err


def test_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    verb_that(monkeypatch, raising(KeyboardInterrupt()))
    assert cli.main(["fake"]) == 130
    assert capsys.readouterr().err == "stopped by Ctrl-C\n"


def test_exit_code_of_the_verb_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    verb_that(monkeypatch, lambda args: 1)
    assert cli.main(["fake"]) == 1


def test_closed_pipe_is_quiet(tmp_path: Path) -> None:
    code = """
import sys
from phalanx.cli import main as cli
from types import ModuleType
module = ModuleType("fake_verb")
module.configure_parser = lambda parser: None
module.run_command = lambda args: print("x" * 10_000_000) or 0
sys.modules["fake_verb"] = module
cli.VERBS["fake"] = ("fake_verb", "", "")
sys.exit(cli.main(["fake"]))
"""
    script = tmp_path / "pipe.py"
    script.write_text(code)
    done = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" "{script}" | head -c 1; echo "${{PIPESTATUS[0]}}"'],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert done.stdout == "x141\n"
    assert done.stderr == ""


def test_a_full_disk_behind_stdout_names_its_file() -> None:
    done = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -m phalanx cluster --list > /dev/full'],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert done.stderr == (
        "/dev/full: cannot be written: No space left on device\n  free space there, or redirect the output elsewhere\n"
    )


def test_ctrl_c_while_a_verb_is_imported_is_quiet() -> None:
    code = """
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name in ("argparse", "phalanx.cli.parser", "phalanx.errors"):
            raise KeyboardInterrupt
sys.modules.pop("argparse", None)
sys.meta_path.insert(0, Interrupt())
from phalanx.cli.main import main
sys.exit(main(["plan", "job.toml"]))
"""
    done = run_python(code)
    assert (done.returncode, done.stderr) == (130, "stopped by Ctrl-C\n")
