"""`phalanx import` as a person calls it, and `phalanx check` on the same files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.cli.main import main

DATA = Path(__file__).parents[1] / "rules" / "foreign" / "data"
TITAN = str(DATA / "torchtitan_llama3_8b.toml")


def test_a_job_file_is_written_that_plans_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "job.toml"
    assert main(["import", TITAN, "--cluster", "8xH100:8", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{out}\n"
    assert "torchtitan: 34 settings, 22 mapped, 12 outside the specification, 0 not mapped" in said.err
    assert "timeout_s = 100  # default of torchtitan" in out.read_text()
    assert main(["plan", str(out)]) == 0
    assert "TP1·CP1·PP1·DP64 (ZeRO-3, EP1) mbs1 selective" in capsys.readouterr().out
    assert main(["check", str(out), "--select", "COM004,CKP001"]) in (0, 1)


def test_nothing_is_overwritten_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "job.toml"
    out.write_text("mine")
    assert main(["import", TITAN, "--cluster", "8xH100:8", "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert main(["import", TITAN, "--cluster", "8xH100:8", "--out", str(out), "--force"]) == 0
    assert out.read_text().startswith("# Made by phalanx import")


def test_json_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(DATA / "megatron_llama3_8b.txt"), "--cluster", "8xH100:1", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["trainer"] == "megatron"
    assert {"key": "--tensor-model-parallel-size", "job_key": "parallel.tensor"} in said["mapped"]
    assert [one["key"] for one in said["unmapped"]] == ["--fp8-param-gather", "--overlap-param-gather"]
    assert said["missing"] == []


def test_what_the_file_does_not_say_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(DATA / "deepspeed_zero3_auto.json"), "--cluster", "8xA100:8"]) == 2
    said = capsys.readouterr().err
    assert "does not say which model is trained\n  give --set model.preset=llama-3-8b" in said
    assert "does not say how many sequences a step takes" in said


def test_a_strangers_key_says_nothing_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "a\\u001b]0;owned\\u0007\\n": "\\u009b2J"}'
    )
    settings = ["--set", "model.preset=gpt2", "--set", "data.sequence=1024"]
    assert main(["import", str(path), "--cluster", "8xA100:1", *settings]) == 0
    said = capsys.readouterr()
    assert "not mapped: a" in said.err
    assert all(one.isprintable() or one == "\n" for one in said.err + said.out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.yaml"], "there is no such configuration"),
        ([TITAN, "--from", "megatrn"], "did you mean megatron?"),
        ([TITAN, "--cluster", "8xH999:1"], "unknown accelerator"),
        ([TITAN, "--set", "x"], "is not an override"),
    ],
)
def test_wrong_calls(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_nobody_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    assert main(["import", str(path)]) == 2
    assert "say whose it is with --from: torchtitan, megatron" in capsys.readouterr().err


def test_a_path_in_the_job_is_relative_to_where_it_is_written(tmp_path: Path) -> None:
    source, out = tmp_path / "theirs" / "ds.json", tmp_path / "ours" / "job.toml"
    source.parent.mkdir()
    out.parent.mkdir()
    source.write_text('{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1}')
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"intermediate_size": 128, "vocab_size": 512}
    (source.parent / "config.json").write_text(json.dumps(config))
    settings = ["--from", "deepspeed", "--set", "model.hf_config=config.json", "--set", "data.sequence=64"]
    assert main(["import", str(source), *settings, "--cluster", "8xA100:1", "--out", str(out)]) == 0
    assert 'hf_config = "../theirs/config.json"' in out.read_text()
    assert main(["plan", str(out)]) == 0


def test_check_reads_the_file_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    path = DATA / "megatron_gpt3_175b.sh"
    assert main(["check", str(path), "--format", "json", "--select", "CKP001,COM004"]) == 0
    said = json.loads(capsys.readouterr().out)
    verdicts = {(one["rule"], one["verdict"]) for one in said["findings"]}
    assert ("CKP001", "unknown") in verdicts  # no cluster, no plan
    assert ("COM004", "unknown") in verdicts  # ten minutes by default: how long a save takes, only a plan tells
    assert "--save" in {one["key"] for one in said["unmapped"]}
    assert main(["check", str(path), "--cluster", "8xA100:128", "--format", "json", "--select", "CKP001,PRC002"]) == 1
    said = json.loads(capsys.readouterr().out)
    found = said["findings"]
    spots = {one["rule"]: (one["file"], one["line"]) for one in found if one["verdict"] == "fail"}
    assert spots["CKP001"] == (str(path), 65)  # the line of --save-interval
    assert "PRC002" in {one["rule"] for one in said["trainer_notes"]}  # gradients of fp16 are summed in fp16 by default


def test_a_cluster_file_is_named_from_where_the_caller_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ours").mkdir()
    Path("mine.toml").write_text('accelerator = "H100"\ndomain_devices = 8\ndomains = 8\n')
    assert main(["import", TITAN, "--cluster", "mine.toml", "--out", "ours/job.toml"]) == 0
    assert 'file = "../mine.toml"' in Path("ours/job.toml").read_text()
    assert main(["plan", "ours/job.toml"]) == 0


def test_devices_of_a_file_without_a_cluster_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(DATA / "megatron_gpt3_175b.sh"), "--select", "COM004", "--format", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["devices"], said["scaling"]) == (1024, "S2")


@pytest.mark.parametrize(
    ("file", "cluster", "rule", "words"),
    [
        ("torchtitan_llama3_405b.toml", "8xH100:16", "COM004", "torchtitan: comm.train_timeout_seconds"),
        ("megatron_gpt3_175b.sh", "8xA100:128", "CKP001", "Megatron-LM: --save-interval, in steps"),
    ],
)
def test_a_cure_is_told_in_the_words_of_the_file(
    file: str, cluster: str, rule: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(DATA / file), "--cluster", cluster, "--select", rule]) == 1
    said = capsys.readouterr().out
    assert words in said
    assert "--fix" not in said  # only job files are mended
