"""The same question about a collective, asked of the command, of two rules and of the plan, has one answer."""

from __future__ import annotations

import json
import re

import pytest

from phalanx.cli.main import main
from phalanx.job.load import load
from phalanx.network.nccl_choice import expect_collective
from phalanx.network.nccl_cluster import group_system
from phalanx.plan.make import make_plan

JOB = """\
name = "same"
[model]
preset = "{preset}"
[data]
sequence = 1024
tokens = "2B"
[batch]
global_sequences = 256
[cluster]
spec = "8xH100:8"
[parallel]
mode = "fixed"
data = {data}
tensor = {tensor}
zero = 0
[comm]
bucket_mib = {mib}
"""


@pytest.mark.parametrize("mib", [1, 16, 64, 128, 256, 512, 1024])
def test_one_question_one_answer(mib, tmp_path, capsys):
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(mib=mib, data=64, tensor=1, preset="gpt2-xl"))
    capsys.readouterr()
    main(["fabric", "collective", "8xH100:8", "--bytes", f"{mib}MiB", "--json"])
    (size,) = json.loads(capsys.readouterr().out)["sizes"]
    pick, us = size["pairs"][0], 1e6 * size["expected_s"]
    low, high = size["expected_interval_s"]
    assert low < size["expected_s"] < high

    plan = make_plan(load(path), allow_unfinishable=True)
    (data,) = (one for one in plan.mapping if one.axis == "data")
    assert (data.algorithm, data.protocol) == (pick["algorithm"], pick["protocol"])
    assert data.message_bytes == mib * 2**20
    assert data.message_s == pytest.approx(size["expected_s"])
    assert data.message_interval_s == pytest.approx((low, high))

    main(["check", str(path), "--json", "--select", "COM001,COM003"])
    found = {one["rule"]: " ".join(one["formula"]) for one in json.loads(capsys.readouterr().out)["findings"]}
    named = f"{pick['algorithm']} {pick['protocol']}"
    assert f"NCCL picks {named} (80 % of systems: {1e6 * low:,.0f} to {1e6 * high:,.0f} µs)" in found["COM001"]
    assert f"{pick['algorithm']} {us:,.0f} µs" in found["COM001"]
    assert f"by {named}, {us:,.0f} µs (80 % of systems: {1e6 * low:,.0f} to {1e6 * high:,.0f})" in found["COM003"]
    start, rest = re.search(r"= ([\d,]+) µs / \(\1 \+ ([\d,]+) µs\)", found["COM003"]).groups()
    assert int(start.replace(",", "")) + int(rest.replace(",", "")) == pytest.approx(us, abs=1.5)


def test_a_group_inside_the_node_is_asked_for_as_one(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(mib=25, data=8, tensor=8, preset="llama-3-8b"))
    plan = make_plan(load(path), allow_unfinishable=True)
    tensor = next(one for one in plan.mapping if one.axis == "tensor")
    alone = expect_collective(
        group_system(plan.cluster, nodes=1, per_node=8), tensor.message_bytes, operation="all-gather"
    )
    assert "all-gather" in tensor.operation or tensor.operation == "all-reduce"
    assert tensor.message_s > 0
    if "all-gather" in tensor.operation:
        assert (tensor.algorithm, tensor.message_s) == (alone.algorithm, pytest.approx(alone.seconds, rel=0.01))
    data = next(one for one in plan.mapping if one.axis == "data")
    across = expect_collective(group_system(plan.cluster, nodes=8, per_node=1), data.message_bytes)
    assert (data.algorithm, data.message_s) == (across.algorithm, pytest.approx(across.seconds))
