"""One sentence per decision, with the numbers of the table."""

from __future__ import annotations

from phalanx.network.fabric.decisions import decisions_of, fabric_decisions
from phalanx.network.fabric.decisions_picture import decisions_svg
from phalanx.network.fabric.fabric_file import parse_fabric
from phalanx.network.fabric.fabric_text import decision_findings, formula_basis


def test_the_published_fabric() -> None:
    assert decision_findings(fabric_decisions(131072)) == (
        "8 planes of 512 ports reach 131,072 hosts in 2 tiers; one plane of 64 needs 4 for 131,072",
        "A flow per port puts 8.8 times the mean on the worst link, 256 random paths 2.0, packets 1.08",
        "2,829 GPU-hours lost a day, 137,106 if each failure restarts the job",
    )


def test_the_picture_says_the_same() -> None:
    one = fabric_decisions(131072)
    words = " ".join(decisions_svg(one).replace("</text>", " ").split())
    for number in ("131,072 hosts", "8.8 times", "137,106", "3/5 of the switches"):
        assert number in words


def test_other_boxes_and_one_plane() -> None:
    assert formula_basis(fabric_decisions(8, nic_gbps=1600)) == "2 planes in 3 tiers"
    only = fabric_decisions(1000, box="Quantum-X800")
    assert decision_findings(only)[0] == "One plane of 144 ports reaches 10,368 hosts in 2 tiers"
    late = decision_findings(fabric_decisions(131072, recovery_s=60))[2]
    assert late == "A bypass this late restarts the job: 137,106 GPU-hours lost a day"
    few = decisions_of(parse_fabric("clos2:64x800G/2p/64"))
    assert decision_findings(few)[0] == "2 planes of 64 ports reach 2,048 hosts in 2 tiers, one plane of 32 only 512"
