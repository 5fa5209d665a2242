"""`phalanx drill --peers`: what is refused, and a real drill of three peers from the command to the signed record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_dataset import write_dataset

from phalanx.cli.main import main

JOB = """
name = "peers"
[model]
layers = 1
hidden = 16
heads = 2
head_dim = 8
ffn = 32
vocab = 300
[data]
path = "data"
sequence = 16
tokens = 1536
[batch]
global_sequences = 6
micro = 1
[precision]
compute = "fp32"
[train]
samples = 0
evaluate_sequences = 0
[telemetry]
timeline_every = 0
[cluster]
spec = "local-cpu:1"
[sync]
mode = "target-batch"
heartbeat_s = 0.2
dead_after_s = 4.0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peer-drill")
    write_dataset(folder, documents=400)
    (folder / "job.toml").write_text(JOB)
    return folder


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], 'sync.mode = "target-batch": its peers are what is drilled\n  add --peers 4'),
        (["--peers", "1"], "--peers 1 is nobody to exchange with"),
        (["--peers", "3", "--hosts", "2"], "--peers with --hosts or --spares"),
        (["--peers", "3", "--fault", "kill:rank=1"], "kill has no key 'rank'\n  kill takes peer, for_s, step, at_s"),
        (["--peers", "3", "--fault", "kill:peer=4"], "there is no peer 4: the drill has 3"),
        (["--peers", "3", "--fault", "partition:peer=1+2+3"], "cuts nobody off: it names all peers"),
        (["--peers", "2", "--fault", "nan"], "of two peers nobody can tell who is wrong"),
        (["--peers", "3", "--fault", "poison:how=loss"], 'sync.screening = "norm"'),
        (["--peers", "4", "--fault", "lie"], 'a lie with sync.mode = "target-batch"'),
        (["--peers", "4", "--fault", "lie:peer=2+3", "--set", "sync.mode=diloco"], "2 of 4 peers lie"),
        (["--peers", "3", "--set", "sync.mode=every-step"], "such a job exchanges nothing with peers"),
        (["--peers", "3", "--cluster", "local-cpu:2"], "each peer has 2 ranks"),
    ],
)
def test_what_cannot_be_drilled_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    monkeypatch.chdir(folder)
    assert main(["drill", "job.toml", *words]) == 2
    assert said in capsys.readouterr().err
    assert not (folder / "runs").exists()


def test_a_peer_is_killed_another_sends_nan_and_the_record_holds_all_of_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    faults = ["--fault", "nan:peer=3,step=2", "--fault", "kill:peer=2,step=5"]
    code = main(["drill", "job.toml", "--peers", "3", "--runs", str(tmp_path / "runs"), "--json", *faults])
    found = json.loads(capsys.readouterr().out)
    wrong = [one for one in found["result"]["verdicts"] if not one["ok"]]
    assert (code, wrong) == (0, [])
    nan, kill = found["result"]["outcomes"]
    assert (nan["kind"], nan["peers"], kill["kind"], kill["members"]) == ("nan", [3], "kill", 2)
    assert found["result"]["numbers"]["steps"] == 16
    record = Path(found["record"])
    assert main(["drill", "--read-record", str(record)]) == 0
    assert "3 peers" not in capsys.readouterr().err
    others = next(record.parent.glob("others/*/events-00000.jsonl"))
    others.write_text(others.read_text() + "\n")
    assert main(["drill", "--read-record", str(record)]) == 1
    assert f"{others.relative_to(record.parent)} has changed" in capsys.readouterr().out
