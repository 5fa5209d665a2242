"""Traces and policies as people write them, and the command itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import phalanx
from phalanx.api.queue_simulating import simulate_queue
from phalanx.cli.main import main
from phalanx.sim.queue.job_trace_file import read_trace
from phalanx.sim.queue.queue_policy import read_policy

SWF = """; Version: 2.2
; MaxNodes: 4
  1  100 -1  60  16 -1 -1  16  600 -1 1 3 7 -1 -1 -1 -1 -1
  2  130 -1  -1  -1 -1 -1   8  600 -1 5 3 7 -1 -1 -1 -1 -1
  3  120 -1  30   9 -1 -1   9   20 -1 1 3 8 -1 -1 -1 -1 -1
"""


def test_standard_workload_format(tmp_path: Path) -> None:
    path = tmp_path / "site.swf"
    path.write_text(SWF)
    trace = read_trace(path, devices_per_node=8)
    shown = [(job.name, job.submit_s, job.nodes, job.duration_s, job.limit_s, job.team) for job in trace.jobs]
    # Times begin at 0; 9 processors are two nodes of 8; job 2 was cancelled; job 3 ran longer than it asked for.
    assert shown == [("job 1", 0, 2, 60, 600, "group 7"), ("job 3", 20, 2, 30, 30, "group 8")]
    assert trace.left_out == 1


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        (
            "a.csv",
            "submit_s,nodes,duration_s\n0,1,5\n1,x,5\n2,1,-5\n",
            ["a.csv:3: nodes 'x' is not a number", "a.csv:4"],
        ),
        ("a.csv", "submit_s,nodes,duration_s\n0,1\n", ["a.csv:2: does not have as many values"]),
        ("a.csv", "submit_s,nodes,time\n0,1,5\n", ["no column 'time'", "lacks the column duration_s"]),
        ("a.csv", "submit_s,nodes,duration_s\n", ["holds no job"]),
        ("a.csv", "submit_s,nodes,duration_s,domain\n0,1,5,row\n", ["a.csv:2: domain 'row' is none of"]),
        ("a.csv", "submit_s,nodes,duration_s\n0,1e30,nan\n", ["a.csv:2: duration_s 'nan' is not a number"]),
        ("a.csv", "submit_s,nodes,duration_s\n0,200000,9\n", ["a.csv:2: 200,000 nodes: use 1 to 131,072"]),
        ("a.swf", "1 2 3\n", ["a.swf:1: has 3 fields"]),
        ("a.swf", SWF.replace(" 9 -1 -1   9", " q -1 -1   9"), ["a.swf:5: processors (field 5) 'q'"]),
        ("a.txt", "", ["neither a .csv nor a .swf"]),
    ],
)
def test_bad_traces_are_refused_with_the_line(tmp_path: Path, name: str, text: str, wanted: list[str]) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(phalanx.UserError) as error:
        read_trace(path, devices_per_node=8)
    assert all(part in str(error.value) for part in wanted), str(error.value)


def test_policy_files_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "teams.toml"
    team = '[[team]]\nname = "a"\nnodes = 8\n'
    drain = "[[drain]]\nstart_h = 1\nhours = 2\nfirst_node = 0\nnodes = 4\n"
    path.write_text(f'backfill = "conservative"\n{team}{drain}')
    policy = read_policy(path, ["preemption=true", "packing=required"])
    assert (policy.backfill, policy.preemption, policy.packing) == ("conservative", True, "required")
    assert (policy.team[0].name, policy.drain[0].hours) == ("a", 2.0)
    assert read_policy(policy, {"depth": 7}).team == policy.team
    for wrong, wanted in (
        (["dept=3"], "did you mean depth?"),
        (["depth=0"], "is not a whole number from 1"),
        (["backfill=some"], "is not one of"),
        (["depth"], "has no ="),
    ):
        with pytest.raises(phalanx.UserError) as error:
            read_policy("easy", wrong)
        assert wanted in str(error.value)
    with pytest.raises(phalanx.UserError, match="use conservative"):
        read_policy("conservatve")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "jobs.csv"
    trace.write_text("submit_s,nodes,duration_s,limit_s,team,priority\n0,4,100,200,a,0\n10,2,50,60,b,1\n20,9,5,5,a,0\n")
    call = ["sim", "--queue", str(trace), "--cluster", "8xH100:4", "--set", "failures_per_node_day=0"]
    assert main([*call, "--policy", "fifo", "--json"]) == 0
    out = capsys.readouterr()
    found = json.loads(out.out)
    assert (found["finished"], found["never_fit"], found["jobs"]) == (2, 1, 3)
    assert found["by_team"][1]["waiting"]["most_s"] == 90
    assert "can never start here, such as job 3 with 9 nodes" in out.err
    assert main([*call, "--set", "preemption=true"]) == 0
    page = capsys.readouterr().out
    assert "EASY backfill, preemption" in page
    assert "1 preemption" in page
    for wrong, wanted in (
        (["sim"], "neither JOB nor --queue"),
        (["sim", "job.toml", "--load", "0.5"], "--load belongs to --queue"),
        ([*call, "--fabric", "x"], "--fabric has no effect on --queue"),
        ([*call, "--jobs", "5"], "--jobs applies to synthetic"),
        (["sim", "--queue", "synthetic", "--load", "9"], "load 9 is out of range"),
    ):
        assert main(wrong) == 2
        assert wanted in capsys.readouterr().err


@pytest.mark.parametrize(
    ("teams", "what"),
    [
        (("b", "a"), "the policy does not define team b"),
        (("b", "c"), "the policy does not define teams b, c"),
        (("", "a"), "the trace has jobs without a team, but the policy defines teams"),
    ],
)
def test_teams_that_the_policy_does_not_define(tmp_path: Path, teams: tuple[str, ...], what: str) -> None:
    policy, trace = tmp_path / "teams.toml", tmp_path / "trace.csv"
    policy.write_text('[[team]]\nname = "a"\nnodes = 8\n')
    rows = "".join(f"0,4,100,200,{team},0\n" for team in teams)
    trace.write_text(f"submit_s,nodes,duration_s,limit_s,team,priority\n{rows}")
    with pytest.raises(phalanx.UserError) as caught:
        simulate_queue(str(trace), "8xH100:16", policy=str(policy))
    assert what in str(caught.value).splitlines()[0]
