"""Words of `phalanx fabric simulate --engine packets` as transports and faults."""

from __future__ import annotations

import math

import pytest

from phalanx.errors import UserError
from phalanx.network.fabric.parse import parse_fabric
from phalanx.sim.failures import Break, faults_of
from phalanx.sim.packets.faults import Fault
from phalanx.sim.packets.transport import ECMP, HTSIM, MRC
from phalanx.sim.simulate_packets import compared, transport_of


@pytest.mark.parametrize(
    ("word", "fault"),
    [
        ("nic:1/7", Fault(part="nic", plane=1, number=7)),
        ("link:1/2/3", Fault(part="link", plane=1, number=2, port=3)),
        ("t1link:1/2/3", Fault(part="t1_link", plane=1, number=2, port=3)),
        ("T0:1/2", Fault(part="t0", plane=1, number=2)),
        ("transceiver:5", Fault(part="transceiver", number=5)),
        ("t1:1/2@1.5ms", Fault(part="t1", plane=1, number=2, at_s=1.5e-3)),
        ("t1:1/2@50us..2s", Fault(part="t1", plane=1, number=2, at_s=50e-6, until_s=2.0)),
    ],
)
def test_faults(word: str, fault: Fault) -> None:
    assert faults_of(Break(failed=(word,))) == (fault,)


def test_transports() -> None:
    assert transport_of() == MRC
    assert transport_of("htsim", routing="adaptive").spray == HTSIM.spray == "recycle"
    assert transport_of("ecmp", routing="adaptive").spray == "skip"
    assert transport_of("mrc", routing="qp", paths=4).paths == 4
    assert transport_of("mrc", recovery="conventional", converge_s=3.0).converge_s == 3.0
    assert transport_of("mrc", recovery="none").converge_s == math.inf
    assert transport_of("ecmp", recovery="edge").recovery == "edge"
    for words in ({"routing": "flow", "paths": 2}, {"recovery": "none", "converge_s": 1.0}):
        with pytest.raises(UserError, match="--"):
            transport_of("mrc", **words)  # type: ignore[arg-type]


def test_a_comparison_gives_ecmp_a_path_on_every_plane() -> None:
    conventional, edge = compared(parse_fabric("clos2:64x800G/8p/16"), paths=64)
    assert (conventional.paths, conventional.recovery, conventional.converge_s) == (8, "routing", ECMP.converge_s)
    assert (edge.paths, edge.recovery) == (64, "edge")
