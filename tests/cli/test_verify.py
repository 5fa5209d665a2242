"""`phalanx verify`: the page, the exit codes, and what it says of a layout that is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.hardware.discover import discover

JOB = """\
name = "small"
[model]
preset = "phalanx-tiny"
[data]
sequence = 256
tokens = 4_096_000
[batch]
global_tokens = 8192
[precision]
compute = "fp32"
[cluster]
spec = "local:4"
"""


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return str(path)


def test_page_of_a_proof(job, capsys):
    assert main(["verify", job, "--set", "parallel.pipeline=2", "--set", "parallel.schedule=1f1b", "--steps", "2"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("small: phalanx-tiny, TP1·CP1·PP2·")
    assert lines[1] == "VERIFIED: 4 ranks and one process compute the same, 2 steps of adamw in float64"
    assert ["pipeline", "2", "2"] in [line.split() for line in lines]
    assert any(line.startswith("  parameters ") and line.endswith("  1e-09") for line in lines)
    assert "hidden 128 → 32" in out
    assert "not covered: fp32 arithmetic" in out
    assert "4 ranks: TP1·CP1·PP2·" in err


def test_json(job, capsys):
    assert main(["verify", job, "--set", "parallel.data=4", "--steps", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["proven"] is True
    assert found["proof"]["small"]["data"] == 4  # four ranks fit here, and stay four
    assert found["proof"]["terms"] == {
        "device": "cpu", "precision": "fp64", "compile": False, "full_size": False, "ranks": 8
    }  # fmt: skip
    assert found["proof"]["comparison"]["first"] is None
    assert found["proof"]["comparison"]["parameter"] < 1e-12


def test_a_difference_is_exit_1_with_its_tensor(job, capsys, monkeypatch):
    from phalanx.train.verify import proof

    honest = proof.run_trial

    def wrong(trial, **options):
        """One weight's gradient is lost on the split run, as a forgotten all-reduce would lose it."""
        found = honest(trial, **options)
        if trial.settings.layout.devices == 1:
            return found
        lost = found.grads[0] | {"layers.0.attn.wq.weight": found.grads[0]["layers.0.attn.wq.weight"] / 2}
        return replace(found, grads=[lost, *found.grads[1:]])

    monkeypatch.setattr(proof, "run_trial", wrong)
    assert main(["verify", job, "--set", "parallel.data=4", "--steps", "2"]) == 1
    verdict = capsys.readouterr().out.splitlines()[1]
    assert verdict.startswith("DIFFERS: gradient of layers.0.attn.wq.weight differs by ")
    assert verdict.endswith(" at step 1, 0 of 19 other tensors too")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--steps", "0"], "phalanx verify: --steps 0 is not between 1 and 1,000\n  use 5\n"),
        (["--timeout", "0"], "phalanx verify: --timeout 0 is not above 0\n  use 120\n"),
        (["--plan", "x", "--cluster", "local:2"], "phalanx verify: --plan and --cluster exclude each other\n"),
        (["--ranks-per-gpu", "2"], "phalanx verify: --ranks-per-gpu 2 without --device cuda has no effect\n"),
        (["--ranks-per-gpu", "0", "--device", "cuda"], "phalanx verify: --ranks-per-gpu 0 is not between 1 and 64\n"),
        (["--precision", "fp8"], "phalanx verify: --precision fp8 on a CPU\n"),
        (
            ["--full-size", "--set", "parallel.data=16", "--cluster", "local-cpu:16"],
            "phalanx verify: --full-size needs 16 ranks, and 8 can run here\n",
        ),
    ],
)
def test_a_wrong_call_is_exit_2(job, options, text, capsys):
    assert main(["verify", job, *options]) == 2
    assert capsys.readouterr().err.startswith(text)


def test_a_loss_of_your_own_is_proven_with_consent_alone(job, capsys):
    mine = Path(__file__).parents[1] / "train" / "plugin_files" / "mine.py"
    call = ["verify", job, "--set", f"plugins.loss={mine}:smooth_loss", "--cluster", "local-cpu:2", "--steps", "2"]
    assert main(call) == 2
    assert capsys.readouterr().err == (
        f"plugins.loss: '{mine}:smooth_loss' is code that this job wants to run\n"
        "  a job file from a stranger could do anything with your account\n"
        "  read it, then give --allow-code (allow_code=True in Python)\n"
    )
    assert main([*call, "--allow-code"]) == 0
    assert "VERIFIED: 2 ranks and one process compute the same" in capsys.readouterr().out


def test_without_a_gpu_there_is_no_proof_on_one(job, capsys, monkeypatch):
    from phalanx.train import prepare

    monkeypatch.setattr(prepare, "discover", lambda: replace(discover(), gpus=(), notes=()))
    assert main(["verify", job, "--device", "cuda", "--ranks-per-gpu", "4"]) == 2
    assert capsys.readouterr().err.startswith("--device cuda: no GPU is visible on this machine\n")


@pytest.mark.slow
def test_compiled_in_the_format_of_training(job, capsys, monkeypatch):
    """Started twice, the second time with the compile cache of the first. Without C++, which takes minutes."""
    from phalanx.train.verify import proof

    honest = proof.make_small_trial

    def quick(*args, **options):
        made = honest(*args, **options)
        return replace(made, settings=replace(made.settings, compile_backend="aot_eager"))

    monkeypatch.setattr(proof, "make_small_trial", quick)
    call = ["verify", job, "--cluster", "local-cpu:2", "--set", "parallel.context=2", "--steps", "2", "--compile"]
    assert main([*call, "--set", "parallel.context_kind=ulysses", "--precision", "bf16"]) == 0
    out = capsys.readouterr().out
    verdict = out.splitlines()[1]
    assert verdict == (
        "VERIFIED: 2 ranks and one process compute the same, 2 steps of adamw in bf16, compiled, twice: 0 graphs "
        "of the second start came from the compile cache"  # without inductor there is none
    )
    assert ["context", "2", "2"] in [line.split() for line in out.splitlines()]
    assert "  gradient norm " in out
    assert "  1.6e-02 (later steps 6.2e-02)" in out
    assert "16 roundings of 3.9e-03 (bf16)" in out
    assert "not covered: fp32 arithmetic (bf16 here)" in out


def test_what_cannot_be_trained_is_exit_2_before_anything_starts(tmp_path, capsys):
    path = tmp_path / "job.toml"
    path.write_text(JOB.replace("phalanx-tiny", "deepseek-v3").replace("local:4", "8xH800:256"))
    assert main(["verify", str(path)]) == 2
    assert "latent attention (MLA)" in capsys.readouterr().err


def test_a_failing_process_is_exit_3(job, capsys):
    """A timeout that no process can keep."""
    assert main(["verify", job, "--set", "parallel.data=4", "--timeout", "0.01"]) == 3
    assert "within 0.01 s" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_of_it_outlives_a_signal(job, number):
    """Ctrl-C twice, as a terminal sends it: to the ranks and to the server that forks them too. SIGTERM to it alone."""
    mark = f"PHALANX_TEST_MARK={os.getpid()}-{number}"
    process = subprocess.Popen(
        [sys.executable, "-m", "phalanx", "verify", job, "--set", "parallel.data=4"],
        env={**os.environ, **dict([mark.split("=")])}, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    said: list[str] = []
    for line in process.stderr:
        said.append(line)
        if "ranks: " in line:
            break
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    said.append(process.communicate(timeout=300)[1])
    assert process.returncode == (130 if number == signal.SIGINT else -number), said
    assert "Traceback" not in "".join(said)
    until_s = time.monotonic() + 300
    while marked(mark) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert marked(mark) == []


def marked(mark):
    """Commands of living processes with this in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes())
    return found


def test_help_needs_no_torch():
    text = (
        "import sys\nfrom phalanx.cli.main import main\ntry:\n    main(['verify', '--help'])\n"
        "except SystemExit:\n    pass\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", text], check=True, capture_output=True, timeout=300)


def test_a_network_of_ones_own_is_refused_with_what_to_do(job, capsys):
    assert main(["verify", job, "--set", "model.module=net.py:build"]) == 2
    assert "net.py:build' can only be scaled down by its author" in capsys.readouterr().err
