"""What the fluid engine refuses before it starts."""

from __future__ import annotations

import pytest

from phalanx.errors import UserError
from phalanx.network.fabric.fabric_file import parse_fabric
from phalanx.sim.fabric_links import links_of
from phalanx.sim.fluid import check_fluid_budget, fluid_cost
from phalanx.sim.packets.simulation_arrays import PacketBudget
from phalanx.sim.routes import by_flow, by_qp, every_path, spray_routing

LINKS = links_of(parse_fabric("clos2:131072x800G/8p/512"))
HOSTS = 131_072


def test_estimates_are_near_what_was_measured() -> None:
    """CPU seconds and GB on one core, 2026-11-15: rates and completion times of a permutation (docs: fluid.md)."""
    measured = {
        by_qp(8): (24.6, 0.61),
        spray_routing(8): (20.4, 0.57),
        spray_routing(32): (42.6, 0.98),
        every_path(8): (4.5, 0.51),
    }
    for routing, (cpu_s, gigabytes) in measured.items():
        seconds, nbytes = fluid_cost(LINKS, HOSTS, routing)
        assert 0.5 < seconds / cpu_s < 2
        assert nbytes / 1e9 == pytest.approx(gigabytes, rel=0.4)


@pytest.mark.parametrize(
    ("paths", "budget", "said"),
    [
        (256, PacketBudget(), "use --paths 128 or --routing all or simulate about"),
        (64, PacketBudget(cpu_s=20), "use --paths 8 or --routing all or simulate about 23,148 flows or raise --cpu"),
    ],
)
def test_what_is_too_much_says_what_would_fit(paths: int, budget: PacketBudget, said: str) -> None:
    with pytest.raises(UserError) as caught:
        check_fluid_budget(LINKS, HOSTS, spray_routing(paths), budget)
    assert said in str(caught.value)
    assert ("raise --cpu" in str(caught.value)) == (budget.cpu_s == 20)  # more time does not help against memory


def test_one_path_has_no_fewer() -> None:
    check_fluid_budget(LINKS, HOSTS, by_flow(), PacketBudget())
    with pytest.raises(UserError, match="simulate about 31,746 flows or raise --cpu"):
        check_fluid_budget(LINKS, HOSTS, by_flow(), PacketBudget(cpu_s=1))
