"""A traffic pattern on a fabric by name, as plain values: what `phalanx fabric simulate` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from phalanx.errors import mistake, nearest
from phalanx.network.fabric.types import Fabric
from phalanx.sim.failures import Break, broken_of
from phalanx.sim.fluid import Completion, Rates, batch_of, complete, solve
from phalanx.sim.fluid_budget import afford
from phalanx.sim.links import links_of
from phalanx.sim.matrices import Flows, traffic
from phalanx.sim.packets.budget import Budget
from phalanx.sim.routes import Recovery, Routing
from phalanx.sim.wire import HTSIM, IDEAL, MRC, Wire

ROUTINGS = ("flow", "qp", "oblivious", "adaptive", "all")
RECOVERIES = ("none", "conventional", "edge")
BUDGET = Budget()
MOST_CONVERGE_S = 86400.0  # what takes longer than a day is no convergence
WIRES: dict[str, Wire] = {"mrc": MRC, "htsim": HTSIM, "ideal": IDEAL}
ROWS = 1 << 20  # sub-flows that are solved in about two seconds


def simulate(
    fabric: Fabric,
    traffic_name: str,
    *,
    nbytes: float = 2e6,
    spread: str = "all",
    paths: int = 0,
    failed: Sequence[str] = (),
    left: float = 0.0,
    denied: Sequence[str] = (),
    recovery: str = "",
    wire: str = "mrc",
    seed: int = 0,
    flows: Flows | None = None,
    watched: int | None = None,
    budget: Budget = BUDGET,
) -> dict[str, object]:
    """Rates and completion times; `paths` of 0 is one per flow, 8 QPs, or what a million rows allow.

    `flows`, when given, are the traffic, and `traffic_name` is only what they are called.
    """
    flows = traffic(traffic_name, fabric, nbytes, seed=seed) if flows is None else flows
    routing = routing_of(fabric, spread, paths or usual_paths(fabric, spread, len(flows)), recovery, seed)
    over = WIRES[choice("--wire", wire, tuple(WIRES))]
    links = links_of(fabric)
    afford(links, len(flows), routing, budget)
    if denied:
        check_deny(routing.recovery)
    broken = broken_of(links, Break(failed=tuple(failed), left=left, denied=tuple(denied)))
    rates = solve(fabric, flows, routing=routing, broken=broken)
    batch = batch_of(len(flows) * routing.paths)
    done = complete(fabric, flows, routing=routing, broken=broken, wire=over, batch=batch)
    asked = asked_for("fluid", fabric, traffic_name, flows, seed)
    chosen = {"spread": spread, "paths": routing.paths, "recovery": routing.recovery, "wire": wire}
    parts = {"failed": list(failed), "left": left, "denied": list(denied)}
    victim = {} if watched is None else {"victim_rate": float(rates.share[watched])}
    return {**asked, **chosen, **parts, **_rates(rates), **victim, **_times(done)}


def asked_for(engine: str, fabric: Fabric, traffic_name: str, flows: Flows, seed: int) -> dict[str, object]:
    """What every result begins with; `bytes_per_flow` is their mean."""
    total = float(flows.nbytes.sum())
    sizes = {"flows": len(flows), "bytes_per_flow": total / len(flows), "bytes_total": total}
    return {"engine": engine, "fabric": fabric.name, "traffic": traffic_name, **sizes, "seed": seed}


def usual_paths(fabric: Fabric, spread: str, flows: int) -> int:
    """Paths per flow when nobody says: as many in each plane, 16 at most, and about a million rows in all."""
    if spread == "qp":
        return 8  # "little gain past 8 QPs" (arXiv:2605.04333 section 5.2.7)
    if spread == "all":
        return fabric.planes
    per_plane = max(1, min(16, ROWS // (flows * fabric.planes)))
    return 1 if spread == "flow" else per_plane * fabric.planes


def routing_of(fabric: Fabric, spread: str, paths: int, recovery: str, seed: int) -> Routing:
    """A routing by its words."""
    choice("--routing", spread, ROUTINGS)
    if spread == "all" and (paths != fabric.planes or recovery not in ("", "edge")):
        raise mistake(
            "--routing all",
            f"--paths {paths} or --recovery {recovery or 'edge'} has no meaning when every working path is used",
            fix="leave both out, or use --routing adaptive",
        )
    by_packet = spread in ("oblivious", "adaptive", "all")
    chosen = choice("--recovery", recovery, RECOVERIES) if recovery else "edge" if by_packet else "conventional"
    return Routing(
        spread=spread,  # type: ignore[arg-type]  # choice() holds it
        paths=paths,
        planes="equal" if by_packet else "hash",
        recovery=cast(Recovery, chosen),
        seed=seed,
    )


def check_deny(recovery: str) -> None:
    """A controller tells senders, or switches, which parts to leave alone; somebody must choose other paths."""
    if recovery == "none":
        raise mistake("--deny", "with --recovery none nobody leaves a path", fix="use --recovery conventional or edge")


def choice(option: str, word: str, choices: tuple[str, ...]) -> str:
    if word not in choices:
        guess = nearest(word, choices)
        fix = f"use {guess}" if guess else f"use {', '.join(choices)}"
        raise mistake(option, f'there is no "{word[:40]}"', fix=fix)
    return word


def _rates(rates: Rates) -> dict[str, object]:
    low, middle = np.percentile(rates.share, [1, 50])
    return {
        "rate_mean": rates.mean,
        "rate_slowest": rates.slowest,
        "rate_p1": float(low),
        "rate_median": float(middle),
        "stalled_flows": rates.stalled,
        "full_links": int((rates.load >= 0.999).sum()),
        "idle_links": int((rates.load <= 0).sum()),
    }


def _times(done: Completion) -> dict[str, object]:
    finite = done.times_s[np.isfinite(done.times_s)]
    return {
        "mean_s": done.mean_s,
        "p99_s": float(np.percentile(finite, 99)) if len(finite) else float("inf"),
        "tail_s": done.tail_s,
        "finished_flows": len(finite),
        "rounds": done.rounds,
        "stopped": done.stopped,
    }
