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
    for heading in ("COMMUNICATION PER STEP", "FLOPS PER STEP", "PEAK MEMORY, in "):
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
    assert "no hang: the collectives of the traced ranks match" in out
    assert code == (1 if "more than" in out else 0)


def test_a_rank_the_job_does_not_have(job, capsys):
    assert main(["trace", job, "--rank", "4"]) == 2
    assert capsys.readouterr().err.splitlines()[-3:] == [
        "phalanx trace --rank: 4 is not a rank of TP1·CP1·PP2·DP2 (ZeRO-0, EP1) mbs1 no-recompute",
        "  its ranks are 0 to 3",
        "  name one of them, or use --all-stages",
    ]


OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, shape, momentum):
        super().__init__()
        self.table = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(nn.BatchNorm1d(shape.hidden, momentum=momentum) for _ in range(shape.layers))
        self.head = nn.Linear(shape.hidden, shape.vocab)
        self.register_buffer("mask", torch.zeros(1 << 20), persistent=False)

    def forward(self, x):
        x = self.table(x).transpose(1, 2)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.transpose(1, 2))

    def blocks(self):
        return {f"layers.{i}": layer for i, layer in enumerate(self.layers)}

def build(shape, momentum=0.1):
    return Net(shape, momentum or None)
"""


def test_a_network_of_ones_own(job, tmp_path, capsys):
    """Its file beside the job, its buffers counted; what reads values is refused, not a broken pool of processes."""
    (tmp_path / "net.py").write_text(OWN)
    own = [
        "trace", job, "--set", "model.module=net.py:build", "--set", "parallel.pipeline=1", "--set", "parallel.data=4",
        "--set", "precision.compute=fp32",
    ]  # fmt: skip
    assert main(own) == 2
    assert "is code that this job wants to run" in capsys.readouterr().err
    assert main([*own, "--allow-code", "--json"]) == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    assert rank["layers"] == [0, 1, 2, 3]
    assert rank["peak"]["parts_bytes"]["parameters"] > 4 << 20
    assert main([*own, "--allow-code", "--all-ranks", "--set", 'model.arguments={"momentum" = 0}']) == 2
    line = 1 + OWN.splitlines().index("            x = x + layer(x)")
    assert f"net.py:{line}: {tmp_path / 'net.py'}:build reads the value of a tensor" in capsys.readouterr().err
