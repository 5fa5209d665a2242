"""`phalanx fabric simulate` and `export` as a person calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.cli.main import main
from phalanx.network.fabric.failure_budget import CONVERGE_S, EDGE_RECOVERY_S
from phalanx.sim.episode import run_episode
from phalanx.sim.fabric_failures import SCENARIOS
from phalanx.sim.fair_rates import fair_rates_of
from phalanx.sim.packets import kernel

SMALL = "clos2:32x100G/1p/8"


def call(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["fabric", *words]) == code
    return capsys.readouterr().out


def found(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    made = json.loads(call(capsys, "simulate", *words, "--json"))
    assert isinstance(made, dict)
    return made


def test_text_names_rates_times_and_stalled_flows(capsys: pytest.CaptureFixture[str]) -> None:
    out = call(capsys, "simulate", "clos2:64x800G/8p/16", "--fail", "transceiver:3")
    assert "permutation, 64 flows of 2.00 MB, 128 MB in all" in out
    assert "failed: transceiver:3 at 0%" in out
    assert "last never" in out
    assert "2 flows without a working path" in out


def test_json_is_repeatable(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("clos2:64x100G/1p/16", "--routing", "flow", "--seed", "7")
    first, second = found(capsys, *words), found(capsys, *words)
    assert first == second
    assert 0.3 < first["rate_mean"] < 0.8
    assert first["recovery"] == "conventional"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--traffic", "rng"], "use ring"),
        (["--bytes", "0"], "a transfer of 0 bytes"),
        (["--bytes", "many"], "--bytes"),
        (["--bytes", "1e30"], "a transfer of 1e+30 bytes"),
        (["--seed", "-1"], "below zero"),
        (["--fail", "t1:0/77"], "there is no plane 0, T1 77"),
        (["--fail", "t1:0/1@5us", "--routing", "all"], "use --routing adaptive"),
        (["--fail", "t1:0/1@5us", "--converge", "0"], "0 seconds"),
        (["--fail", "t9:0/1"], "names no part of a fabric"),
        (["--each-plane"], "the fluid engine has all planes anyway"),
        (["--each-plane", "--engine", "packets", "--compare"], "do what a failure needs"),
        (["--fail", "nic:0/64"], "planes are 0 to 0, hosts are 0 to 63"),
        (["--bytes", "1e-9"], "at least one byte"),
        (["--compare", "--fail", "t1:0/0", "--converge", "1e300"], "1e+300 seconds"),
        (["--fail", "t1:0/1@5us", "--recovery", "egde"], "use edge"),
        (["--pfc", "--routing", "adaptive"], "use --routing qp, or flow"),
        (["--dcqcn"], "add --engine packets"),
        (["--routing", "qp", "--paths", "-2"], "-2 paths per flow"),
        (["--paths", "0"], "0 paths per flow"),
        (["--scenario", ""], "--scenario: is empty"),
        (["--traffic", ""], "--traffic: is empty"),
        (["--recovery", ""], "--recovery: is empty"),
        (["--fail", ""], "--fail: is empty"),
        (["--loss", "0.1"], "add --fail"),
        (["--deny", "all"], "nothing would be left"),
        (["--deny", "t1:0/1@5us"], "leave it out"),
        (["--deny", "t9:0/1"], '--deny: "t9:0/1" names no part'),
        (["--deny", "t1:0/1", "--routing", "flow", "--recovery", "none"], "nobody leaves a path"),
        (["--deny", "nic:0/0", "--engine", "packets"], "deny fewer parts"),
        (["--converge", "1"], "--recovery conventional"),
        (["--routing", "adaptive", "--paths", "4096", "--cpu", "0.1"], "the budget is 0.1 s"),
        (["--scenario", "t1-rebot"], "use t1-reboot"),
        (["--scenario", "all", "--fail", "t1:0/1"], "use --compare for your own"),
        (["--scenario", "incast", "--bytes", "0"], "a transfer of 0 bytes"),
        (["--traffic", "none.csv"], "none.csv: cannot be read"),
        (["--traffic", "none.csv", "--bytes", "2M"], "leave out --bytes"),
        (["--traffic", "none.toml"], "none.toml"),
        (["--cm", "none.cm"], "none.cm: cannot be read"),
        (["--cm", "none.cm", "--bytes", "2M"], "leave out --traffic and --bytes"),
        (["--engine", "packets", "--wire", "mrc"], "--transport mrc or htsim"),
        (["--engine", "packets", "--transport", "mcr"], "use mrc"),
        (["--engine", "packets", "--routing", "all"], "use --routing adaptive"),
        (["--engine", "packets", "--paths", "99999"], "99999 paths per connection"),
        (["--engine", "packets", "--fail", "t1:0/77"], "there is no plane 0, T1 77"),
        (["--engine", "packets", "--fail", "t1:0/1@soon"], "has no time after @"),
        (["--engine", "packets", "--fail", "t1:0/1@5us..2us"], "ends before it begins"),
        (["--engine", "packets", "--loss", "0.1"], "nothing is named that loses packets"),
        (["--engine", "packets", "--bytes", "9T"], "the engine counts to"),
        (["--engine", "packets", "--bytes", "20M", "--cpu", "0.1"], "the budget is 0 s"),
        (["--engine", "packets", "--converge", "1"], "waits for no routing"),
        (["--engine", "packets", "--transport", "mrc", "--pfc"], "add --transport roce"),
        (["--engine", "packets", "--compare", "--fail", "t1:0/1", "--converge", "9"], "or use --engine fluid"),
        (["--compare", "--recovery", "edge"], "leave one of the two out"),
    ],
)
def test_mistakes_end_with_two_and_a_fix(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabric", "simulate", "clos2:64x100G/1p/16", *words]) == 2
    assert text in capsys.readouterr().err


def test_parts_that_a_fabric_has_not_and_waits_that_cost_too_much(capsys: pytest.CaptureFixture[str]) -> None:
    for part in ("t1:0/0", "link:0/0/0"):
        assert main(["fabric", "simulate", "clos1:12x800G/8p/512", "--fail", part]) == 2
        assert "there are no " in capsys.readouterr().err
    waits = ("--transport", "roce", "--fail", "t1:0/1@1us", "--converge", "1e-6", "--cpu", "0.03")
    assert main(["fabric", "simulate", SMALL, "--engine", "packets", *waits]) == 2
    assert "0.067" in capsys.readouterr().err  # the sender's timer, though routing knows after a microsecond


def test_packets_have_the_times_of_the_fluid_and_their_losses(capsys: pytest.CaptureFixture[str]) -> None:
    words = (SMALL, "--routing", "adaptive", "--paths", "16")
    fluid, packets = found(capsys, *words), found(capsys, *words, "--engine", "packets")
    assert packets["mean_s"] == pytest.approx(fluid["mean_s"], rel=0.15)
    assert packets["finished_flows"] == packets["flows"] == fluid["flows"] == 32
    assert packets["mean_s"] <= packets["p99_s"] <= packets["tail_s"]
    assert packets["sent"] == packets["delivered"] + packets["lost"] + packets["trimmed"]
    assert packets["lost"] == 0
    assert (packets["engine"], packets["paths"], packets["spread"]) == ("packets", 16, "skip")


def test_what_is_hardly_broken_is_hardly_slower_on_several_planes(capsys: pytest.CaptureFixture[str]) -> None:
    # Planes served in one order made it 1.6 times slower than the one plane that stood for all without a failure.
    words = ("clos2:96x400G/4p/32/3:1/wide", "--engine", "packets", "--bytes", "4M", "--seed", "3")
    slow = ("--fail", "link:0/0/0", "--left", "0.99")
    whole, broken = found(capsys, *words), found(capsys, *words, *slow)
    assert (whole["planes_simulated"], broken["planes_simulated"]) == (1, 4)
    assert broken["mean_s"] / whole["mean_s"] == pytest.approx(1, abs=0.05)
    assert np.array(broken["sent_by_plane"]) / broken["sent"] == pytest.approx(0.25, rel=0.01)
    assert "1 of 4, alike" in call(capsys, "simulate", *words)
    assert "4 of 4\n" in call(capsys, "simulate", *words, "--each-plane")
    edge = found(capsys, *words, *slow, "--compare")["compare"][-1]
    each = found(capsys, *words, "--each-plane")
    assert (edge["tail_s"], edge["healthy_tail_s"]) == (broken["tail_s"], each["tail_s"])


def test_one_path_is_slower_than_many(capsys: pytest.CaptureFixture[str]) -> None:
    flow = found(capsys, SMALL, "--engine", "packets", "--routing", "flow")
    qp = found(capsys, SMALL, "--engine", "packets", "--routing", "qp")
    assert (flow["paths"], qp["paths"]) == (1, 8)
    assert flow["mean_s"] > 1.1 * qp["mean_s"]


@pytest.mark.parametrize("engine", ["fluid", "packets"])
def test_edge_recovery_beside_convergence(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = (SMALL, "--engine", engine, "--compare", "--bytes", "1M", "--fail", "t1:0/1@20us", "--converge", "0.02")
    off, on, edge = json.loads(call(capsys, "simulate", *words, "--json"))["compare"]
    assert (off["transport"], on["transport"], edge["transport"]) == ("RoCE, PFC off", "RoCE, PFC on", "MRC, edge")
    assert (off["recovery"], on["recovery"], edge["recovery"]) == ("conventional", "conventional", "edge")
    assert off["recovered_after_s"] >= 0.02 > 100 * edge["recovered_after_s"]
    for conventional in (off, on):
        assert conventional["tail_s"] > 0.02 > 20 * edge["tail_s"]
        assert conventional["later_s"] > 0.015 > 20 * edge["later_s"]
        assert conventional["lost"] > 0
        assert conventional["during_gbps"] < 0.7 * conventional["before_gbps"]
    assert edge["lost"] > 0
    assert edge["touched_flows"] > on["touched_flows"]
    delivered = np.diff([0.0, *(one["until_s"] for one in edge["throughput_over_time"])])
    rates = [one["gbps"] for one in edge["throughput_over_time"]]
    assert sum(delivered * rates) == pytest.approx(8e-9 * 32e6, rel=0.02)


def test_scenarios_are_one_table_or_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    fabric = "clos2:64x800G/8p/16/wide"
    text = call(capsys, "simulate", fabric, "--scenario", "t1-reboot")
    assert "t1-reboot: a T1 switch stops" in text
    assert "failed: t1:0/0@50us at 0%" in text
    assert "time to recover" in text
    assert "█" in text
    assert "phalanx sim JOB --fabric clos2:64x800G/8p/16/wide --break t1" in text
    every = call(capsys, "simulate", fabric, "--scenario", "all")
    for name in SCENARIOS:
        assert f"\n  {name} " in every
    assert "victim of the incast: PFC off" in every
    made = {one["scenario"]: one["compare"] for one in found(capsys, fabric, "--scenario", "all")["scenarios"]}
    assert set(made) == set(SCENARIOS)
    assert [one["tail_s"] is None for one in made["nic-port"]] == [True, True, False]
    assert made["incast"][2]["victim_share"] > 0.99
    assert made["incast"][1]["victim_share"] < 0.3 < 0.6 < made["incast"][0]["victim_share"]
    assert [one["recovered_after_s"] for one in made["grey-path"]] == [None, None, pytest.approx(30e-6)]
    assert [one["recovered_after_s"] for one in made["grey-all"]] == [None, None, None]
    assert [one["recovered_after_s"] for one in made["link-flap"]] == pytest.approx([67.1e-3, 67.1e-3, 30e-6], rel=1e-3)
    assert [one["recovered_after_s"] for one in made["t1-reboot"]] == pytest.approx(
        [CONVERGE_S, CONVERGE_S, EDGE_RECOVERY_S], rel=0.01
    )
    # Not the mean of the second that the last wait.
    assert made["t1-reboot"][0]["during_gbps"] > 0.1 * made["t1-reboot"][0]["before_gbps"]
    assert made["grey-path"][0]["tail_s"] > 1.4 * made["grey-path"][0]["healthy_tail_s"]
    assert all(one["lost"] > one["healthy_lost"] == 0 for one in made["t0-loss"])
    assert "link-flap" not in call(capsys, "simulate", "clos1:12x800G/8p/512", "--scenario", "all")
    assert main(["fabric", "simulate", "clos1:12x800G/8p/512", "--scenario", "link-flap"]) == 2


def test_an_incast_is_the_same_by_traffic_and_by_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    fabric = "clos2:64x800G/8p/16/wide"
    named = found(capsys, fabric, "--scenario", "incast")["scenarios"][0]["compare"]
    assert found(capsys, fabric, "--compare", "--traffic", "incast")["compare"] == named
    assert found(capsys, fabric, "--traffic", "incast")["rate_median"] == pytest.approx(1 / 7, rel=1e-3)
    assert "victim gets" in call(capsys, "simulate", fabric, "--compare", "--traffic", "incast")


def test_what_a_comparison_leaves_out_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = (SMALL, "--compare", "--bytes", "100k", "--fail")
    text = call(capsys, "simulate", *words, "nic:0/0@2us", "--engine", "packets")
    assert "note: routing knows after 10.0 ms here; a conventional fabric takes seconds or tens of" in text
    assert "moving all queue pairs of a NIC off it takes a few seconds" in text
    assert "note:" not in call(capsys, "simulate", *words, "t1:0/0@2us")
    assert "note:" not in call(capsys, "simulate", *words, "link:0/0/0@2us..5us", "--engine", "packets")
    one = found(capsys, SMALL, "--engine", "packets", "--transport", "ecmp", "--fail", "t1:0/0@20us")
    assert one["converge_s"] == pytest.approx(0.01)
    assert "routing knows after 10.0 ms" in one["notes"][0]
    assert found(capsys, SMALL, "--fail", "t1:0/0@20us", "--routing", "flow", "--converge", "3")["notes"]
    assert not found(capsys, SMALL, "--fail", "t1:0/0@20us", "--routing", "flow")["notes"]


def test_an_incast_names_its_hosts_and_its_victim(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("clos2:64x400G/4p/16/wide", "--traffic", "incast")
    text = call(capsys, "simulate", *words)
    assert "victim    1.000 of line rate" in text
    for more in ((), ("--engine", "packets", "--bytes", "100k"), ("--compare",)):
        text = call(capsys, "simulate", *words, *more)
        assert "incast: hosts 0, 1, 2, 3, 4, 5, 6 to 63; the victim sends from 7 to 62" in text


def test_all_scenarios_have_one_budget(capsys: pytest.CaptureFixture[str]) -> None:
    fabric = "clos2:2048x800G/8p/64"
    assert main(["fabric", "simulate", fabric, "--scenario", "all", "--cpu", "1"]) == 2
    every = capsys.readouterr().err
    assert "in three ways of sending and 8 scenarios need about" in every
    assert main(["fabric", "simulate", fabric, "--scenario", "t1-reboot", "--cpu", "1"]) == 2
    once = capsys.readouterr().err
    seconds = [float(text.split("need about ")[1].split(" s")[0]) for text in (every, once)]
    assert 4 * seconds[1] <= seconds[0] < 5 * seconds[1]  # one of two passes is spared in all but the first


@pytest.mark.parametrize("engine", ["fluid", "packets"])
def test_what_is_denied_loses_nothing(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    breaks = (SMALL, "--engine", engine, "--fail", "link:0/0/0@1us", "--loss", "0.2", "--bytes", "1M")
    words = (*breaks, "--routing", "adaptive", "--paths", "16")
    assert found(capsys, *words)["lost"] > 0
    told = found(capsys, *words, "--deny", "link:0/0/0")
    assert (told["lost"], told["finished_flows"], told["denied"]) == (0, 32, ["link:0/0/0"])
    assert "; denied: link:0/0/0" in call(capsys, "simulate", *words, "--deny", "link:0/0/0")
    compared = found(capsys, *breaks, "--compare", "--deny", "link:0/0/0")["compare"]
    assert [one["touched_flows"] for one in compared if one["transport"] != "RoCE, PFC off"] == [0, 0]


def test_a_failure_after_the_end_has_no_effect_in_the_fluid_either(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabric", "simulate", SMALL, "--fail", "t1:0/1@5s"]) == 0
    out, err = capsys.readouterr()
    assert "t1:0/1@5s had no effect" in err
    assert "no effect" in out
    made = found(capsys, SMALL, "--fail", "t1:0/1@5s")
    assert made["before_gbps"] > 100
    assert made["recovered_after_s"] is None


def test_ctrl_c_before_anything(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: object, **words: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("phalanx.sim.fluid.fair_rates_of", stop)
    assert main(["fabric", "simulate", SMALL]) == 130
    assert "nothing is finished yet" in capsys.readouterr().err


def test_the_fluid_engine_has_time_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("clos2:64x800G/8p/16", "--bytes", "20M", "--fail", "nic:0/0@50us..1ms")
    edge = found(capsys, *words)
    assert edge["spread"] == "adaptive"
    assert edge["finished_flows"] == 64
    assert edge["healthy_tail_s"] < edge["tail_s"] < 1.2 * edge["healthy_tail_s"]
    hashed = found(capsys, *words[:-1], "t0:0/0@50us..1ms", "--routing", "qp", "--pfc", "--converge", "0.5")
    assert hashed["recovered_after_s"] == pytest.approx(4.096e-6 * 2**14)  # the port is back, the sender's timer runs
    assert 0.067 < hashed["tail_s"] < 0.07
    assert "time to recover" in call(capsys, "simulate", *words)


def test_traffic_of_a_file_and_of_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.csv").write_text("src,dst,bytes\n0,5,1M\n5,9,3000000\n")
    made = found(capsys, SMALL, "--traffic", str(tmp_path / "m.csv"))
    assert (made["flows"], made["bytes_total"], made["traffic"]) == (2, 4e6, "m.csv")
    example = Path(__file__).parents[2] / "examples" / "llama-3-8b-64xH100.toml"
    job = tmp_path / "job.toml"
    job.write_text(example.read_text() + "\n[parallel]\ntensor = 1\ncontext = 1\npipeline = 1\nzero = 3\nshard = 8\n")
    assert main(["fabric", "simulate", "clos2:64x400G/1p/32", "--traffic", f"{job}:replica", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["flows"] == 64
    assert "replica: all-reduce, 64 flows" in err
    assert main(["fabric", "simulate", "clos2:64x400G/1p/32", "--traffic", f"{job}:tensor"]) == 2
    assert "sends nothing between hosts" in capsys.readouterr().err
    assert main(["fabric", "simulate", SMALL, "--traffic", str(job)]) == 2
    assert "use a fabric of at least 64 NICs" in capsys.readouterr().err


def test_without_recovery_flows_stay_unfinished(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--engine", "packets", "--transport", "ecmp", "--recovery", "none", "--fail", "t1:0/1")
    out = call(capsys, "simulate", SMALL, *words)
    assert "flows unfinished" in out
    assert "not in 10" in out  # 0.1 s after the last change, and what is under way


def test_a_failure_that_ends_and_one_that_only_loses(capsys: pytest.CaptureFixture[str]) -> None:
    words = (SMALL, "--engine", "packets", "--routing", "flow", "--recovery", "none", "--fail")
    ends = found(capsys, *words, "t1:0/1@10us..300us")
    assert ends["finished_flows"] == 32
    assert ends["tail_s"] > 300e-6
    grey = found(capsys, *words, "link:0/0/0", "--loss", "0.01")
    assert 0 < grey["lost"] < 0.05 * grey["sent"]
    assert grey["finished_flows"] == 32


def test_a_failure_after_the_end_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabric", "simulate", SMALL, "--engine", "packets", "--fail", "t1:0/1@900s"]) == 0
    assert "t1:0/1@900s had no effect" in capsys.readouterr().err


def test_ctrl_c_prints_what_is_finished(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls, advance = [], kernel.advance

    def stop_at_ten(*args: object) -> object:
        calls.append(1)
        if len(calls) == 10:
            raise KeyboardInterrupt
        return advance(*args)

    monkeypatch.setattr(kernel, "advance", stop_at_ten)
    assert main(["fabric", "simulate", SMALL, "--engine", "packets", "--traffic", "ring", "--bytes", "1M"]) == 130
    out, err = capsys.readouterr()
    assert "flows unfinished" in out
    assert "stopped (interrupted): 0 of 32 flows are finished" in err


def test_ctrl_c_between_two_keeps_the_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def stop_the_third(*args: Any, **words: Any) -> object:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return run_episode(*args, **words)

    monkeypatch.setattr("phalanx.sim.compare_recovery.run_episode", stop_the_third)
    assert main(["fabric", "simulate", SMALL, "--compare", "--traffic", "ring"]) == 130
    out = capsys.readouterr().out
    assert "PFC on" in out
    assert "MRC" not in out


def test_ctrl_c_while_flows_finish(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def stop_the_fourth(*args: Any, **words: Any) -> object:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return fair_rates_of(*args, **words)

    monkeypatch.setattr("phalanx.sim.fluid.fair_rates_of", stop_the_fourth)
    assert main(["fabric", "simulate", SMALL, "--routing", "flow"]) == 130
    out, err = capsys.readouterr()
    assert "last not yet" in out
    assert "of 32 flows are finished" in err
    assert "stopped (interrupted)" in err


def test_files_of_htsim_give_what_the_fabric_itself_gives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    topo, cm = str(tmp_path / "f.topo"), str(tmp_path / "f.cm")
    out = call(capsys, "export", SMALL, "--topo", topo, "--cm", cm, "--seed", "5")
    assert "f.topo: 32 nodes, 2 tiers" in out
    assert "f.cm: 32 nodes, 32 connections" in out
    own = found(capsys, SMALL, "--engine", "packets", "--seed", "5")
    theirs = found(capsys, topo, "--engine", "packets", "--seed", "5", "--cm", cm)
    assert (own["mean_s"], own["tail_s"], own["sent"]) == (theirs["mean_s"], theirs["tail_s"], theirs["sent"])
    assert theirs["not_mapped"] == []
    assert found(capsys, topo, "--cm", cm)["not_mapped"] == ["latencies: the fluid engine takes them from --wire"]


def test_failures_of_a_matrix_are_simulated_or_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cm = tmp_path / "f.cm"
    lines = ["0->15 id 1 start 0 size 400000", "failure switch_type AGG switch_id 0 link_id 1"]
    cm.write_text("\n".join(["Nodes 16", "Connections 1", "Failures 1", *lines]))
    packets = found(capsys, "clos3:16x100G/1p/4", "--engine", "packets", "--cm", str(cm))
    assert packets["failed"] == ["t1link:0/0/1"]
    assert packets["lost"] > 0
    fluid = found(capsys, "clos3:16x100G/1p/4", "--cm", str(cm))
    assert fluid["failed"] == ["t1link:0/0/1"]
    assert fluid["not_mapped"] == []


def test_an_export_says_what_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("export", "clos2:60x800G/8p/16", "--cm", str(tmp_path / "f.cm"), "--json")
    made = json.loads(call(capsys, *words))
    assert [one.split(":")[0] for one in made["not_mapped"]] == [
        "8 planes",
        "empty ports",
        "every connection has 1/8 of its bytes",
    ]
    assert made["files"][0]["connections"] == 60
    assert main(["fabric", "export", SMALL]) == 2
    assert "nothing to write" in capsys.readouterr().err
