"""Words of `phalanx fabric simulate --engine packets` as transports."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from phalanx.errors import UserError
from phalanx.network.fabric.fabric_file import parse_fabric
from phalanx.sim.packets.transport import HTSIM, MRC, ROCE, ROCE_PFC, Roce, Transport
from phalanx.sim.simulate import SHORT_CONVERGE_S, compared_transports, converge_of, paths_of, recovery_of, transport_of


def sprayed(*words: str, **more: Any) -> Transport:
    made = transport_of(*words, **more)
    assert isinstance(made, Transport)
    return made


def test_transports_that_spray() -> None:
    assert transport_of() == MRC
    assert sprayed("htsim", routing="adaptive").spray == HTSIM.spray == "recycle"
    assert sprayed("ecmp", routing="adaptive").spray == "skip"
    assert sprayed("mrc", routing="qp", paths=4).paths == 4
    assert sprayed("mrc", recovery="conventional", converge_s=3.0).converge_s == 3.0
    assert sprayed("mrc", recovery="none").converge_s == math.inf
    assert sprayed("ecmp", recovery="edge").recovery == "edge"


def test_roce_by_its_words() -> None:
    assert transport_of("roce") == replace(ROCE, converge_s=SHORT_CONVERGE_S)  # packets cannot wait ten seconds
    assert converge_of(transport_of("ecmp")) == SHORT_CONVERGE_S
    made = transport_of("roce", routing="qp", pfc=False, dcqcn=False, converge_s=2.0)
    assert isinstance(made, Roce)
    assert (made.qps, made.pfc, made.dcqcn, made.converge_s, made.name) == (8, False, None, 2.0, "RoCE")
    assert transport_of("roce", dcqcn=False) == replace(ROCE_PFC, converge_s=SHORT_CONVERGE_S)
    assert (paths_of(made), recovery_of(made), converge_of(made)) == (8, "conventional", 2.0)
    assert converge_of(transport_of("roce", recovery="none")) is None


@pytest.mark.parametrize(
    ("name", "words", "text"),
    [
        ("mrc", {"routing": "flow", "paths": 2}, "use --routing qp"),
        ("mrc", {"recovery": "none", "converge_s": 1.0}, "nothing converges"),
        ("mrc", {"converge_s": 1.0}, "waits for no routing"),
        ("mrc", {"pfc": True}, "add --transport roce"),
        ("mrc", {"dcqcn": False}, "add --transport roce"),
        ("mrc", {"routing": "all"}, "use --routing adaptive"),
        ("roce", {"routing": "adaptive"}, "use flow or qp"),
        ("roce", {"routing": "adaptve"}, "use adaptive"),
        ("roce", {"recovery": "edge"}, "use --recovery conventional"),
        ("roce", {"converge_s": -1.0}, "-1 seconds"),
        ("rocee", {}, "use roce"),
    ],
)
def test_words_that_do_not_fit(name: str, words: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as caught:
        transport_of(name, **words)
    assert text in str(caught.value)


def test_a_comparison_gives_roce_a_queue_pair_on_every_plane() -> None:
    off, on, edge = compared_transports(parse_fabric("clos2:64x800G/8p/16"), paths=64, converge_s=2.0)
    assert (off.qps, off.pfc, off.converge_s) == (on.qps, not on.pfc, on.converge_s) == (8, False, 2.0)
    assert (edge.paths, edge.recovery) == (64, "edge")
