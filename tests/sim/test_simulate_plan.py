"""What Python asks the simulators for prints as the verbs do."""

from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.errors import UserError
from phalanx.plan.make import plan
from phalanx.sim.simulate_plan import simulate_months, simulate_step

JOB = """\
name = "small"
[model]
preset = "llama-3-8b"
[data]
sequence = 4096
tokens = "100B"
[batch]
global_sequences = 128
[cluster]
spec = "8xH100:2"
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "job.toml"
    path.write_text(JOB)
    return path


def test_months_print_as_the_verb_prints_them(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished: list[int] = []
    found = simulate_months(plan(job), 30, runs_count=4, seed=3, progress=finished.append)
    assert main(["sim", str(job), "--days", "30", "--runs", "4", "--seed", "3"]) == 0
    assert capsys.readouterr().out.rstrip() == str(found).rstrip()
    assert finished == [1, 2, 3, 4]
    assert repr(found).startswith("<MonthsSimulation small: effective training time 9")


def test_a_step_prints_as_the_verb_prints_it(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = simulate_step(plan(job), broken="nic")
    assert main(["sim", str(job), "--break", "nic"]) == 0
    assert capsys.readouterr().out.rstrip() == str(found).rstrip()
    assert len(found.aftermath) == 2
    assert "\n" not in repr(found)
    with pytest.raises(UserError, match='use "spray" or "ecmp"'):
        simulate_step(plan(job), routing="hash")


def test_what_would_take_minutes_is_refused(job: Path) -> None:
    with pytest.raises(UserError, match="use fewer runs or days"):
        simulate_months(plan(job), 3650, runs_count=10**9)
