"""`phalanx trace` as a person uses it."""

from __future__ import annotations

import json

import pytest

from phalanx.cli.main import main

JOB = """
spec = "2026.1"
name = "small"
[model]
layers = 4
hidden = 64
heads = 4
kv_heads = 2
head_dim = 16
ffn = 128
vocab = 256
[data]
sequence = 64
tokens = "1M"
[batch]
global_sequences = 4
micro = 1
[parallel]
mode = "fixed"
data = 2
pipeline = 2
[cluster]
spec = "4xH100:1"
"""


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB, "utf-8")
    return str(path)


def test_one_rank(job, capsys, tmp_path):
    log = tmp_path / "log.jsonl"
    assert main(["trace", job, "--rank", "3", "--log", str(log)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("rank 3 (pipeline 1 of 2, data 1 of 2): layers 2-3\n")
    for heading in ("MESSAGES PER STEP", "FLOPS PER STEP", "PEAK MEMORY, in "):
        assert heading in out
    lines = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    assert [line["index"] for line in lines] == list(range(len(lines)))
    assert {line["kind"] for line in lines} == {"send", "receive", "all-reduce"}
    assert all(line["peer"] == 1 for line in lines if line["kind"] in ("send", "receive"))


def test_all_ranks_as_json(job, capsys):
    assert main(["trace", job, "--all-ranks", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["rank"] for one in found["ranks"]] == [0, 1, 2, 3]
    assert found["hang"] is None
    assert found["ranks"][0]["operations"] == found["ranks"][1]["operations"]
    assert sum(found["ranks"][0]["peak"]["parts_bytes"].values()) == found["ranks"][0]["peak"]["nbytes"]


def test_against_the_plan_exits_1_where_a_line_is_off(job, capsys):
    """A model this small keeps more in odds and ends than the planner counts."""
    code = main(["trace", job, "--against-plan", "--workers", "1"])
    out = capsys.readouterr().out
    assert "AGAINST THE PLAN" in out
    assert "the traced ranks meet in every operation" in out
    assert code == (1 if "more than" in out else 0)


def test_a_rank_the_job_does_not_have(job, capsys):
    assert main(["trace", job, "--rank", "4"]) == 2
    assert capsys.readouterr().err.splitlines()[-3:] == [
        "phalanx trace --rank: 4 is not a rank of TP1·CP1·PP2·DP2 (ZeRO-0, EP1) mbs1 no-recompute",
        "  its ranks are 0 to 3",
        "  name one of them, or use --all-stages",
    ]
