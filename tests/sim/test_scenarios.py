"""Named failures, and the incast beside which a victim sends."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.errors import UserError
from phalanx.network.fabric.fabric_file import parse_fabric
from phalanx.sim.compare_recovery import RecoveryQuestion, compare_recoveries, fluid_manners, fluid_runs
from phalanx.sim.fabric_failures import SCENARIOS, chosen_scenarios, faults_of, usual_bytes
from phalanx.sim.fabric_links import links_of
from phalanx.sim.packets.transport import MRC
from phalanx.sim.traffic_matrix import all_to_all, incast

FABRIC = parse_fabric("clos2:64x800G/8p/16/wide")


def test_every_scenario_names_parts_that_exist_and_meets_its_traffic() -> None:
    lasts_s = usual_bytes(FABRIC) * 8 / 800e9
    for one in chosen_scenarios("all", FABRIC):
        for fault in faults_of(one.broken):
            assert fault.at_s < lasts_s / 2
    assert [one.name for one in chosen_scenarios("all", FABRIC)] == list(SCENARIOS)
    assert "incast" not in [one.name for one in chosen_scenarios("all", parse_fabric("clos2:9x800G/8p/16"))]
    assert chosen_scenarios("incast", FABRIC) == (SCENARIOS["incast"],)


@pytest.mark.parametrize("text", ["clos2:64x800G/8p/16/wide", "clos2:64x400G/1p/16/8r"])
def test_a_victim_shares_switches_but_no_host(text: str) -> None:
    fabric = parse_fabric(text)
    flows, home = incast(fabric, 1e6), links_of(fabric).host_t0(np.arange(fabric.hosts))
    assert len(flows) == 8
    assert len(set(flows.source.tolist())) == 8
    assert len(set(flows.target[:7].tolist())) == 1
    assert flows.target[7] not in flows.target[:7]
    assert home[flows.target[7]] == home[flows.target[0]]
    assert len(set(home[flows.source].tolist())) == 1
    with pytest.raises(UserError, match="at least 10 hosts"):
        incast(parse_fabric("clos2:9x800G/8p/16"), 1e6)


def test_ways_of_sending_are_alike_but_for_what_is_compared() -> None:
    off, on, edge = fluid_manners(RecoveryQuestion(fabric=FABRIC, flows=incast(FABRIC, 1e6), converge_s=3.0))
    assert (off.routing, off.go_back, off.react_s) == (on.routing, on.go_back, on.react_s)
    assert (off.pauses, on.pauses, off.routing.paths, off.react_s) == (False, True, 8, 3.0)
    assert (edge.routing.paths, edge.least_paths, edge.probe_s) == (256, MRC.least_paths, MRC.probe_s)
    many = RecoveryQuestion(fabric=FABRIC, flows=all_to_all(64, 1e6), paths=16)
    assert fluid_manners(many)[2].routing.paths == 16


def test_runs_without_failure_are_kept() -> None:
    question = RecoveryQuestion(fabric=FABRIC, flows=incast(FABRIC, 1e6), broken=SCENARIOS["nic-port"].broken)
    kept: list[object] = []
    first = list(compare_recoveries(question, fluid_runs, kept))  # type: ignore[arg-type]
    assert len(first) == len(kept) == 3
    asked = []

    def runs(one: RecoveryQuestion) -> object:
        asked.append(one.broken.failed)
        return fluid_runs(one)

    again = list(compare_recoveries(question, runs, kept))  # type: ignore[arg-type]
    assert asked == [("nic:0/0@50us",)]
    assert again == first
