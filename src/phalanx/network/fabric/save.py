"""A design as a file: TOML that `fabric show`, `fabric simulate` and `sim --fabric` read, and all designs as CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence

from phalanx.network.fabric.catalogue import switches
from phalanx.network.fabric.design import Design, nominal_ratio
from phalanx.network.fabric.sizing import split_t0
from phalanx.network.fabric.types import KINDS, Fabric


def fabric_toml(fabric: Fabric) -> str:
    """The file that parse_fabric reads back as the same fabric, but for its name."""
    switch = fabric.switch
    shipped = switch in switches()
    values: dict[str, object] = {
        "hosts": fabric.hosts,
        "nic_gbps": fabric.nic_gbps,
        "planes": fabric.planes,
        "tiers": fabric.tiers,
        **({"switch": switch.name} if shipped else {"radix": switch.radix, "box": switch.box}),
        **({"watts": switch.watts} if switch.watts and not shipped else {}),
        **({"usd": list(switch.usd)} if switch.usd and not shipped else {}),
        **({"kind": switch.kind} if switch.kind != KINDS[0] and not shipped else {}),
        "oversubscription": _ratio(fabric),
        "rails": fabric.rails,
    }
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    return "\n".join([f"# {fabric.switches:,} switches: {fabric.name}", *lines]) + "\n"


def _ratio(fabric: Fabric) -> float:
    """As it was asked for, where that splits a T0's ports in the same way."""
    asked = nominal_ratio(fabric)
    same = split_t0(fabric.switch.radix, fabric.tiers, asked) == (fabric.t0_down, fabric.t0_up)
    return asked if same else fabric.oversubscription


def designs_csv(found: Sequence[Design]) -> str:
    """One line per design, units in the names, in the order of the table."""
    out = io.StringIO()
    rows = [_row(one) for one in found]
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _row(one: Design) -> dict[str, object]:
    fabric, parts, lost = one.fabric, one.bill, one.loss
    low, high = parts.usd or ("", "")
    return {
        "fabric": fabric.name,
        "switch": fabric.switch.name,
        "planes": fabric.planes,
        "tiers": fabric.tiers,
        "oversubscription": round(fabric.oversubscription, 4),
        "rails": fabric.rails,
        **{f"t{tier}": fabric.planes * n for tier, n in enumerate((fabric.t0, fabric.t1, fabric.t2, fabric.t3))},
        "switches": fabric.switches,
        "cables": parts.cables,
        "optics_800g": parts.optics_800g,
        "hops": fabric.hops,
        "paths": fabric.paths,
        "hosts_one_switch_away": fabric.hosts_per_t0,
        "lost_nic_link": lost.nic_link,
        "lost_t0_t1_link": lost.t0_t1_link,
        "lost_t0": lost.t0,
        "lost_t1": lost.t1,
        "lost_t2": "" if lost.t2 is None else lost.t2,
        "watts": "" if parts.watts is None else parts.watts,
        "usd_low": low,
        "usd_high": high,
        "cable_failures_per_day": one.cable_failures_per_day,
        "switch_failures_per_day": one.switch_failures_per_day,
        "interruptions_per_day": one.interruptions_per_day,
        "pareto": one.pareto,
    }
