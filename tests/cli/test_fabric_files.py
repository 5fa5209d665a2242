"""Files of htsim at the commands that take a fabric, and starts of their connections."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.cli.main import main

TOPO = """Nodes 32
Tiers 2
Podsize 32
Tier 0
Downlink_speed_Gbps 100
Radix_Down 4
Radix_Up 4
Downlink_Latency_ns 1000
Tier 1
Downlink_speed_Gbps 100
Radix_Down 8
Downlink_Latency_ns 500
"""


@pytest.fixture
def topo(tmp_path: Path) -> str:
    path = tmp_path / "ours.topo"
    path.write_text(TOPO)
    return str(path)


@pytest.mark.parametrize(
    ("words", "has"),
    [
        (["fabric", "show", "TOPO"], "12: 8 T0 + 4 T1"),
        (["fabric", "decisions", "--fabric", "TOPO"], "reaches 32 hosts in 2 tiers"),
        (["fabric", "simulate", "TOPO"], "ours: permutation, 32 flows"),
    ],
)
def test_a_topo_file_is_a_fabric_everywhere(
    words: list[str], has: str, topo: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([topo if word == "TOPO" else word for word in words]) == 0
    out, err = capsys.readouterr()
    assert has in out
    assert "not mapped: latencies by tier: every link has 750 ns" in out + err


def test_a_topo_file_with_a_mistake_names_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.topo"
    path.write_text(TOPO.replace("Radix_Up 4", "Radix_Upp 4"))
    assert main(["fabric", "show", str(path)]) == 2
    assert 'bad.topo:7: there is no "Radix_Upp"' in capsys.readouterr().err


def test_starts_and_triggers_are_simulated_by_packets_only(
    topo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def last(rest: str) -> tuple[float, list[str]]:
        cm = tmp_path / "f.cm"
        cm.write_text(f"Nodes 32\nConnections 2\n{rest}")
        words = ["fabric", "simulate", topo, "--cm", str(cm), "--engine", "packets", "--transport", "htsim", "--json"]
        assert main(words) == 0
        found = json.loads(capsys.readouterr().out)
        return found["simulated_s"], [one.split(":")[0] for one in found["not_mapped"]]

    alone = "0->31 id 1 start 0 size 400000"
    together, _ = last(f"{alone}\n4->27 id 2 start 0 size 400000\n")
    late, said = last(f"{alone}\n4->27 id 2 start 90000000 size 400000\n")
    after, _ = last(
        f"Triggers 1\n{alone} send_done_trigger 1\n4->27 id 2 trigger 1 size 400000\ntrigger id 1 oneshot\n"
    )
    assert late == pytest.approx(together + 90e-6, rel=0.02)
    assert after == pytest.approx(2 * together, rel=0.05)
    assert said == ["latencies by tier"]
    assert main(["fabric", "simulate", topo, "--cm", str(tmp_path / "f.cm"), "--json"]) == 0
    fluid = json.loads(capsys.readouterr().out)["not_mapped"]
    assert [one.split(" ")[0] for one in fluid][1] == "triggers:"
