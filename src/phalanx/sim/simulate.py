"""A traffic pattern on a fabric by name, as plain values: what `phalanx fabric simulate` prints."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from phalanx.errors import mistake, nearest
from phalanx.network.fabric.types import Fabric
from phalanx.sim.broken import Broken, transceiver
from phalanx.sim.fluid import Completion, Rates, complete, solve
from phalanx.sim.matrices import Flows, traffic
from phalanx.sim.routes import Recovery, Routing
from phalanx.sim.wire import HTSIM, IDEAL, MRC, Wire

ROUTINGS = ("flow", "qp", "oblivious", "adaptive", "all")
RECOVERIES = ("none", "conventional", "edge")
WIRES: dict[str, Wire] = {"mrc": MRC, "htsim": HTSIM, "ideal": IDEAL}
PARTS = {"nic": 2, "link": 3, "t0": 2, "t1": 2, "transceiver": 1}
ROWS = 1 << 20  # sub-flows that are solved in about two seconds
_PART = re.compile(r"^(?P<kind>[a-z0-9]+):(?P<numbers>\d{1,9}(?:/\d{1,9})*)$")


def simulate(
    fabric: Fabric,
    traffic_name: str,
    *,
    nbytes: float = 2e6,
    spread: str = "all",
    paths: int = 0,
    failed: Sequence[str] = (),
    left: float = 0.0,
    recovery: str = "",
    wire: str = "mrc",
    seed: int = 0,
    flows: Flows | None = None,
) -> dict[str, object]:
    """Rates and completion times; `paths` of 0 is one per flow, 8 QPs, or what a million rows allow.

    `flows`, when given, are the traffic, and `traffic_name` is only what they are called.
    """
    flows = traffic(traffic_name, fabric.hosts, nbytes, seed=seed) if flows is None else flows
    routing = routing_of(fabric, spread, paths or usual_paths(fabric, spread, len(flows)), recovery, seed)
    broken = broken_of(fabric, failed, left)
    over = WIRES[choice("--wire", wire, tuple(WIRES))]
    rates = solve(fabric, flows, routing=routing, broken=broken)
    # A hundred rounds of a million rows are minutes: large cases take larger steps.
    batch = 0.01 if len(flows) * routing.paths <= ROWS // 8 else 0.05
    done = complete(fabric, flows, routing=routing, broken=broken, wire=over, batch=batch)
    asked = asked_for("fluid", fabric, traffic_name, flows, seed)
    chosen = {"spread": spread, "paths": routing.paths, "recovery": routing.recovery, "wire": wire}
    return {**asked, **chosen, "failed": list(failed), "left": left, **_rates(rates), **_times(done)}


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


def broken_of(fabric: Fabric, failed: Sequence[str], left: float = 0.0) -> Broken:
    """Failed parts from words: nic:PLANE/HOST, link:PLANE/T0/PORT, t0:PLANE/N, t1:PLANE/N, transceiver:HOST."""
    if not 0 <= left < 1:
        raise mistake("--left", f"{left:g} of the capacity is left", fix="use 0 (dead) to below 1")
    found: dict[str, list[tuple[int, ...]]] = {kind: [] for kind in PARTS}
    for text in failed:
        kind, numbers = part_of(text, PARTS)
        found[kind].append(numbers)
    lanes = [lane for (host,) in found["transceiver"] for lane in transceiver(fabric.planes, host)]
    return Broken(
        nics=tuple((a, b) for a, b in [*found["nic"], *lanes]),
        uplinks=tuple((a, b, c) for a, b, c in found["link"]),
        t0=tuple((a, b) for a, b in found["t0"]),
        t1=tuple((a, b) for a, b in found["t1"]),
        left=left,
    )


def part_of(text: str, parts: Mapping[str, int]) -> tuple[str, tuple[int, ...]]:
    """A part's kind and numbers; `parts` says how many numbers each kind has."""
    match = _PART.match(text.strip().lower())
    numbers = tuple(int(one) for one in match["numbers"].split("/")) if match else ()
    if match is None or parts.get(match["kind"]) != len(numbers):
        forms = "nic:PLANE/HOST, link:PLANE/T0/PORT, t0:PLANE/N, t1:PLANE/N or transceiver:HOST"
        why = "t1link and times (@) need --engine packets" if "@" in text or text.startswith("t1link") else ""
        raise mistake("--fail", f'"{text[:60]}" names no part of a fabric', why=why, fix=f"write {forms}")
    return match["kind"], numbers


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
        "rounds": done.rounds,
    }
