"""`phalanx fabric design` from the command line: the choice, its files, a catalogue of one's own, a job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.cli.main import main

JOB = str(Path(__file__).parents[2] / "examples" / "llama-3-8b-64xH100.toml")


def test_design_as_json_has_what_the_table_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabric", "design", "--gpus", "131072", "--nic-gbps", "800", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first = found["designs"][0]
    assert first["fabric"]["switches"] == 6144
    assert (first["fabric"]["hops"], first["fabric"]["paths"], first["fabric"]["hosts_one_switch_away"]) == (
        3,
        2048,
        256,
    )
    assert first["loss"]["nic_link"] == 0.125
    assert first["bill"]["optics_800g"] == 524288
    assert first["pareto"] is True
    pick = found["verdict"]["options"][0]
    assert (pick["role"], pick["design"]["fabric"]["planes"]) == ("pick", 8)
    assert found["verdict_text"].startswith("Take 8 planes in 2 tiers")
    assert found["job"] is None


def test_design_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabric", "design", "--gpus", "2048", "--nic-gbps", "400", "--switch", "quantum-2", "--top", "1"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Take 2 planes in 2 tiers of Quantum-2 128x200G: ")
    assert "\n2,048 GPUs with a 400 Gb/s NIC each: " in out
    assert "Quantum-2" in out
    assert err == ""


def test_a_refusal_is_exit_2_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["fabric", "design", "--gpus", "131072", "--nic-gbps", "800", "--switch", "Tomahawk 5", "--tiers", "2"]
    assert main([*call, "--planes", "4"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "2 tiers of Tomahawk 5 256x200G join at most 32,768" in err
    assert "use --tiers 3" in err


@pytest.mark.parametrize("gpus", ["0", "abc", "1.5", "1e12", "nan", "9" * 40])
def test_gpus_that_are_none(gpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabric", "design", "--gpus", gpus, "--nic-gbps", "800"]) == 2
    assert capsys.readouterr().err.startswith("phalanx fabric design: ")


def test_nothing_to_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabric", "design", "--gpus", "64", "--nic-gbps", "800", "--top", "0"]) == 2
    assert "--top 0 shows nothing" in capsys.readouterr().err


def test_a_saved_pick_can_be_shown_and_decided_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml, table = tmp_path / "pick.toml", tmp_path / "all.csv"
    call = ["fabric", "design", "--gpus", "1024", "--nic-gbps", "800", "--planes", "8", "--json"]
    assert main([*call, "--save", str(toml), "--csv", str(table)]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert f"wrote {toml}" in err
    assert len(table.read_text().splitlines()) == 1 + len(found["designs"])
    assert main(["fabric", "show", str(toml), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["fabric"]["switches"] == found["designs"][0]["fabric"]["switches"]
    assert shown["bill"] == found["verdict"]["options"][0]["design"]["bill"]
    assert main(["fabric", "decisions", "--fabric", str(toml)]) == 0
    assert "1,024" in capsys.readouterr().out


def test_a_catalogue_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.csv"
    path.write_text("box,port_gbps,radix,watts,usd_low,usd_high\nLeaf 9,400,128,900,30000,40000\n")
    assert main(["fabric", "design", "--gpus", "1k", "--nic-gbps", "400", "--catalogue", str(path)]) == 0
    out = capsys.readouterr().out
    assert "of Leaf 9 128x400G" in out
    assert "Spectrum" not in out


def test_what_is_missing_or_out_of_range(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabric", "design", "--nic-gbps", "400"]) == 2
    assert "--gpus is missing" in capsys.readouterr().err
    assert main(["fabric", "design", "--gpus", "64", "--nic-gbps", "400", "--gpu-hour-usd", "nan"]) == 2
    assert "--gpu-hour-usd nan is out of range" in capsys.readouterr().err
    for bad in ("-1", "nan", "inf"):
        assert main(["fabric", "design", "--gpus", "64", "--nic-gbps", "400", "--recovery-s", bad]) == 2
        assert f"--recovery-s {bad} is out of range" in capsys.readouterr().err


def test_a_job_says_its_gpus_its_nic_and_which_oversubscription_is_harmless(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["fabric", "design", "--job", JOB, "--planes", "1", "--rails", "1", "--tiers", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {one["fabric"]["hosts"] for one in found["designs"]} == {64}
    assert {one["fabric"]["nic_gbps"] for one in found["designs"]} == {400}
    steps = found["job"]["steps"]
    assert len(steps) == 3  # full bisection, 2:1 and 4:1
    assert all(one["step_s"] > 0 for one in steps)
    assert found["verdict"]["options"][0]["economics"]["step_s"] in [one["step_s"] for one in steps]


def test_a_job_larger_than_the_fabric(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabric", "design", "--job", JOB, "--gpus", "32"]) == 2
    assert "32 GPUs, but the job runs on 64" in capsys.readouterr().err
