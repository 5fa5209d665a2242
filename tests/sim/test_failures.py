"""Words of `--fail` as faults."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.errors import UserError
from phalanx.network.fabric.fabric_file import parse_fabric
from phalanx.sim.fabric_failures import FabricBreak, broken_of, denied_of, faults_of
from phalanx.sim.fabric_links import NOTHING, links_of
from phalanx.sim.packets.link_faults import FabricFault


@pytest.mark.parametrize(
    ("word", "fault"),
    [
        ("nic:1/7", FabricFault(part="nic", plane=1, number=7)),
        ("link:1/2/3", FabricFault(part="link", plane=1, number=2, port=3)),
        ("t1link:1/2/3", FabricFault(part="t1_link", plane=1, number=2, port=3)),
        ("T0:1/2", FabricFault(part="t0", plane=1, number=2)),
        ("transceiver:5", FabricFault(part="transceiver", number=5)),
        ("t1:1/2@1.5ms", FabricFault(part="t1", plane=1, number=2, at_s=1.5e-3)),
        ("t1:1/2@50us..2s", FabricFault(part="t1", plane=1, number=2, at_s=50e-6, until_s=2.0)),
    ],
)
def test_faults(word: str, fault: FabricFault) -> None:
    assert faults_of(FabricBreak(failed=(word,))) == (fault,)


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (FabricBreak(failed=("plug:1",)), '"plug:1" names no part of a fabric'),
        (FabricBreak(failed=("nic:1",)), "write nic:PLANE/HOST"),
        (FabricBreak(failed=("linc:0/0/0",)), "write link:PLANE/T0/PORT"),
        (FabricBreak(failed=("t1:0/3@",)), "has no time after @"),
        (FabricBreak(failed=("t1:0/3@50",)), "has no time after @"),
        (FabricBreak(failed=("t1:0/3@2ms..",)), "has no time after @"),
        (FabricBreak(failed=("t1:0/3@2ms..50us",)), "ends before it begins"),
        (FabricBreak(failed=("t1:0/3@..50us",)), "has no time after @"),
        (FabricBreak(failed=("all",)), "nothing would be left"),
        (FabricBreak(failed=("t1:0/3",), left=1.0), "1 of the capacity is left"),
        (FabricBreak(failed=("t1:0/3",), loss=2.0), "2 of the packets are lost"),
        (FabricBreak(failed=("t1:0/3",), loss=0.1, left=0.1), "either slow or loses packets"),
        (FabricBreak(loss=0.1), "nothing is named that loses packets"),
        (FabricBreak(left=0.1), "nothing is named that is slow"),
    ],
)
def test_words_that_name_nothing(broken: FabricBreak, text: str) -> None:
    with pytest.raises(UserError) as caught:
        faults_of(broken)
    assert text in str(caught.value)


def test_what_is_left_of_links() -> None:
    links = links_of(parse_fabric("clos2:64x800G/8p/16/wide"))
    assert broken_of(links, FabricBreak()) is NOTHING
    left = broken_of(links, FabricBreak(failed=("t1:3/2", "transceiver:5"), left=0.25)).links
    assert left is not None
    # A T1 has a link to each of 8 T0s, a transceiver a lane in each of 8 planes; both count in both directions.
    assert np.unique(left).tolist() == [0.25, 1.0]
    assert (left < 1).sum() == 2 * 8 + 2 * 8
    assert FabricBreak(failed=("t1:0/3@50us",)).timed
    assert not FabricBreak(failed=("t1:0/3",)).timed


def test_what_is_denied_counts_as_dead_and_has_no_time() -> None:
    links = links_of(parse_fabric("clos2:64x800G/8p/16/wide"))
    left = broken_of(links, FabricBreak(failed=("t1:3/2",), left=0.25, denied=("nic:0/5",))).links
    assert left is not None
    assert ((left == 0).sum(), (left == 0.25).sum()) == (2, 16)
    assert FabricBreak(failed=("t1:3/2",), loss=0.1, denied=("nic:0/5",)).healthy == FabricBreak(denied=("nic:0/5",))
    for word, text in (("nic:0/5@1us", "holds from the start"), ("all", "name parts"), ("nic", "--deny")):
        with pytest.raises(UserError, match=text):
            denied_of(FabricBreak(denied=(word,)))
