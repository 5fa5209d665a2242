"""`phalanx init` writes files that load, and never over another."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.job.load import load
from phalanx.job.model import VOCAB, known_presets
from phalanx.job.parameter_counts import count_parameters
from phalanx.plan.prediction import token_budget


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_default_is_a_tiny_model_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "job.toml\n"
    assert printed_commands(captured.err) == [
        ["phalanx", "plan", "job.toml"],
        ["phalanx", "data", "build", "data/tokens", "--corpus", "offline-english"],
        ["phalanx", "train", "job.toml"],
    ]
    resolved = load("job.toml")
    assert (resolved.job.model.name, resolved.job.cluster.target) == ("phalanx-tiny", "local")
    assert resolved.job.precision.compute == "fp32"
    assert len(Path("job.toml").read_text().splitlines()) < 67  # one page, and the line that names its schema
    assert not resolved.warnings


def printed_commands(text: str) -> list[list[str]]:
    """What a person copies from the terminal into a shell, which drops what follows a #."""
    lines = [line.removeprefix("next: ").strip() for line in text.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["jobs/my job.toml", "--cluster", "local-cpu:2"],
        ["gpt2.toml", "--model", "gpt2"],
        ["big.toml", "--model", "llama-3-8b", "--cluster", "8xH100:8"],
        ["one.toml", "--model", "gpt2-xl", "--cluster", "1xH100"],
    ],
)
def test_the_printed_commands_work(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """init, plan, data build, train, as printed. The text of the corpus is ours: no package is fetched in a test."""
    pytest.importorskip("tokenizers")
    from phalanx.train.data import corpus

    Path("jobs").mkdir()
    stories = "".join(json.dumps({"text": f"story {n}: {n * 7} ships and {n % 9} sailors"}) + "\n" for n in range(4000))
    Path("stories.jsonl").write_text(stories)
    own = (corpus.TextOrigin(path=Path("stories.jsonl").resolve()),)
    monkeypatch.setattr(corpus, "fetch_corpus", lambda name, folder, note: own if name == "offline-english" else None)
    assert main(["init", *arguments]) == 0
    plan, build, train = printed_commands(capsys.readouterr().err)
    assert main(plan[1:]) == 0, "planning needs no data"
    assert main(build[1:]) == 0
    if train[1] == "launch":
        monkeypatch.setenv("PATH", "/nonexistent")  # a login node would hold the job against its own partitions
    code = main([*train[1:], "--dry-run"])
    out, err = capsys.readouterr()
    if train[1] == "launch":  # several hosts
        assert code == 0, err
        assert "#SBATCH --nodes=8\n" in out
    elif "--cluster" in arguments and "H100" in arguments[-1]:
        assert code == 2
        assert "but this machine has 0 GPUs" in err, "everything else was found to be right"
    else:
        assert code in (0, 1), err  # 1: findings of the training specification
        assert "larger than the model's" not in err


def test_the_rate_warms_up_before_it_stays() -> None:
    assert main(["init"]) == 0
    job = load("job.toml").job
    assert (job.optim.schedule, job.optim.warmup_tokens) == ("wsd", 10 * job.batch.global_tokens)
    assert job.data.tokens == 200 * job.batch.global_tokens, "minutes on two cores, and steady before the last fifth"
    assert "in all, 200 steps;" in Path("job.toml").read_text()
    assert job.model.vocab == VOCAB, "data build trains a tokenizer of that size when nothing is said"


@pytest.mark.parametrize("model", known_presets())
def test_every_preset_makes_a_file_that_loads(model: str) -> None:
    assert main(["init", "Big Run.toml", "--model", model, "--cluster", "8xH100:16"]) == 0
    job = load("Big Run.toml").job
    assert (job.name, job.model.name, job.cluster.spec) == ("big-run", model, "8xH100:16")
    # No preset is too small for the tokenizer that data build trains when nothing is said.
    assert job.model.vocab >= VOCAB
    steps = token_budget(job.data.tokens, count_parameters(job.model).total) / job.batch.global_tokens
    assert 0 < job.optim.warmup_tokens / job.batch.global_tokens <= max(1, steps / 10)


@pytest.mark.parametrize(
    ("model", "cluster", "reason"),
    [
        ("deepseek-v3", "8xH100:256", "deepseek-v3 has latent attention (MLA), which the trainer has no layer for"),
        ("llama-3-8b", "tpu-v5p:64", "the trainer does not run on TPU-v5p"),
    ],
)
def test_what_cannot_be_trained_here_is_planned(
    capsys: pytest.CaptureFixture[str], model: str, cluster: str, reason: str
) -> None:
    assert main(["init", "job.toml", "--model", model, "--cluster", cluster]) == 0
    shown = capsys.readouterr()
    assert f"# phalanx train cannot run it: {reason}; plan it here, train it elsewhere" in shown.out + shown.err
    assert "--ntasks" not in shown.out + shown.err


def test_never_overwrites_unless_forced(capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.toml").write_text("precious")
    assert main(["init"]) == 2
    assert capsys.readouterr().err == (
        "job.toml: exists already\n  init never overwrites on its own\n  name another file, or add --force\n"
    )
    assert Path("job.toml").read_text() == "precious"
    assert main(["init", "--force"]) == 0
    assert load("job.toml").job.name == "job"


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": "job.toml", "model": "phalanx-tiny", "cluster": "local"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "lama-3-8b"], '--model: "lama-3-8b" is not a known model\n  did you mean llama-3-8b?\n'),
        (["--cluster", "8xH900:1"], "cluster '8xH900:1': unknown accelerator 'H900'"),
        (["no/such/folder.toml"], "no/such/folder.toml: cannot be written: No such file or directory"),
        (["."], ".: "),
    ],
)
def test_mistakes_write_nothing(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["init", *arguments]) == 2
    assert capsys.readouterr().err.startswith(message)
    assert list(Path().iterdir()) == []


def test_a_hostile_file_name_cannot_break_the_page() -> None:
    assert main(["init", "a\nb.toml"]) == 0
    assert load("a\nb.toml").job.name == "a-b"
