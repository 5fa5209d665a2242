"""Speed of the fluid engine at full scale, and its anchors: published means of uet-htsim, load of sprayed links.

    python benchmarks/fluid_speed.py [--quick] [--part rates|completions|fit|oversubscribed|loads]

Seconds are CPU-seconds of this process. The first call compiles (or loads the compiled code) and is not counted.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from phalanx.network.fabric.fabric_file import parse_fabric
from phalanx.sim import fluid, routes, traffic_matrix
from phalanx.sim.packets.packet_run import run_connections
from phalanx.sim.packets.transport import HTSIM

FULL = 131_072
# Means of uet-htsim @40ccb05 (network_validation.csv): 1,024 hosts, permutation of 2 MB, 100G, oblivious spraying.
HTSIM_US = {
    "clos2:1024x100G/1p/64/wide": {1: 348.093, 4: 254.452, 16: 213.512, 64: 194.428, 256: 187.563},
    "clos3:1024x100G/1p/16": {1: 403.38, 4: 281.315, 8: 255.217, 16: 232.321, 32: 216.135, 64: 206.682, 256: 195.652},
}
BITMAP_US = {64: 185.9, 256: 186.549}  # leaf-spine, `bitmap`: a path that was marked is skipped
WORST_LOAD = {128: 2.375, 256: 1.906, 2048: 1.332}  # of T0-T1 links, oblivious, network_validation.csv


def timed(call: Callable[[], fluid.Rates]) -> tuple[fluid.Rates, float]:
    start = time.process_time()
    found = call()
    return found, time.process_time() - start


def rates() -> None:
    print("| case | rows | mean of line rate | slowest | CPU s |\n|---|---|---|---|---|")
    flows = traffic_matrix.permutation(FULL, 2e6, seed=1)
    one, eight = f"clos2:{FULL}x100G/1p/512", f"clos2:{FULL}x800G/8p/512"
    cases = (
        ("one path, one plane", one, routes.by_flow(seed=2)),
        ("one path, one plane, another seed", one, routes.by_flow(seed=3)),
        ("8 QPs hashed over 8 planes", eight, routes.by_qp(8, seed=2)),
        ("one path in each of 8 planes", eight, routes.spray_routing(8, seed=2)),
        ("32 paths, adaptive, one plane", one, routes.spray_routing(32, seed=2)),
        ("all paths of 8 planes", eight, routes.every_path(8)),
    )
    for name, text, routing in cases:
        fabric = parse_fabric(text)
        found, seconds = timed(lambda f=fabric, r=routing: fluid.solve_rates(f, flows, routing=r))  # type: ignore[misc]
        rows = FULL * routing.paths
        print(f"| {name} | {rows:,} | {found.mean:.4f} | {found.slowest:.4f} | {seconds:.2f} |", flush=True)


def completions() -> None:
    print(
        "\n| fabric | paths | uet-htsim mean µs | fluid mean µs | difference | fluid tail µs |"
        "\n|---|---|---|---|---|---|"
    )
    for text, row in HTSIM_US.items():
        for paths, mean_us in row.items():
            routing = (
                routes.by_flow if paths == 1 else lambda k=paths, **kw: routes.spray_routing(k, adaptive=False, **kw)
            )
            compare(text, str(paths), mean_us, routing)
    for paths, mean_us in BITMAP_US.items():
        compare(
            "clos2:1024x100G/1p/64/wide",
            f"{paths} adaptive",
            mean_us,
            lambda k=paths, **kw: routes.spray_routing(k, **kw),
        )


def compare(text: str, name: str, mean_us: float, routing: Callable[..., routes.Routing]) -> None:
    seeds = range(2 if "256" in name or "64" in name else 4)
    runs = [
        fluid.complete_flows(
            parse_fabric(text),
            traffic_matrix.permutation(1024, 2e6, seed=seed),
            routing=routing(seed=seed),
            wire=fluid.HTSIM,
        )
        for seed in seeds
    ]
    mean = 1e6 * float(np.mean([one.mean_s for one in runs]))
    tail = 1e6 * float(np.mean([one.tail_s for one in runs]))
    print(f"| {text} | {name} | {mean_us:.1f} | {mean:.1f} | {mean / mean_us - 1:+.1%} | {tail:.0f} |", flush=True)


def fit() -> None:
    """Largest error of a mean for each pair of fitted numbers, on the rows of one fabric and of the other."""
    trips, sigmas = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0), (0.0, 0.25, 0.5, 0.75, 1.0)
    names = list(HTSIM_US)
    worst = {(name, sigma, trip): 0.0 for name in names for sigma in sigmas for trip in trips}
    for name, row in HTSIM_US.items():
        for paths, mean_us in row.items():
            for sigma in sigmas:
                without, with_one = (1e6 * _mean_s(name, paths, sigma, trip) for trip in (0.0, 1.0))
                for trip in trips:  # the queue's delay is added, so it is linear
                    error = abs((without + trip * (with_one - without)) / mean_us - 1)
                    worst[name, sigma, trip] = max(worst[name, sigma, trip], error)
    print("\n| fitted on | sigma | round trips | largest error there | on the other fabric |\n|---|---|---|---|---|")
    for here, there in (names, names[::-1]):
        error, sigma, trip = min((worst[here, s, t], s, t) for s in sigmas for t in trips)
        print(f"| {here} | {sigma} | {trip} | {error:.1%} | {worst[there, sigma, trip]:.1%} |", flush=True)


def _mean_s(name: str, paths: int, sigma: float, trips: float) -> float:
    over = replace(fluid.HTSIM, unequal=sigma, queue_trips=trips)
    seeds = range(1 if paths >= 64 else 2)
    return float(np.mean([_completion(name, paths, seed, over).mean_s for seed in seeds]))


def _completion(name: str, paths: int, seed: int, over: fluid.Wire) -> fluid.Completion:
    routing = routes.by_flow(seed=seed) if paths == 1 else routes.spray_routing(paths, adaptive=False, seed=seed)
    flows = traffic_matrix.permutation(1024, 2e6, seed=seed)
    return fluid.complete_flows(parse_fabric(name), flows, routing=routing, wire=over, batch=0.02)


def oversubscribed() -> None:
    """No mean of uet-htsim is published for these: our packet engine stands in for it."""
    print(
        "\n| fabric | fluid mean µs | packets mean µs | difference | fastest: fluid, packets |\n|---|---|---|---|---|"
    )
    for text in ("clos2:1024x100G/1p/40/4:1/wide", "clos2:1024x100G/1p/36/8:1/wide"):
        fabric, flows = replace(parse_fabric(text), hop_s=1e-6), traffic_matrix.permutation(1024, 2e6)
        ours = fluid.complete_flows(fabric, flows, routing=routes.spray_routing(128), wire=fluid.HTSIM, batch=0.02)
        theirs = run_connections(fabric, flows, transport=replace(HTSIM, paths=128))
        fast = f"{ours.times_s.min() * 1e6:.1f}, {theirs.best_s * 1e6:.1f}"
        mean, other = ours.mean_s * 1e6, theirs.mean_s * 1e6
        print(f"| {text} | {mean:.0f} | {other:.0f} | {mean / other - 1:+.1%} | {fast} |", flush=True)


def loads(quick: bool) -> None:
    print("\n| paths per flow | worst T0-T1 load, table | ours, two seeds | CPU s |\n|---|---|---|---|")
    fabric = parse_fabric(f"clos2:{FULL}x800G/8p/512")
    for paths, expected in WORST_LOAD.items():
        if quick and paths > 256:
            continue
        start = time.process_time()
        worst = [
            routes.offered_load(
                fabric, traffic_matrix.permutation(FULL, 1.0, seed=seed), routing=routes.spray_routing(paths, seed=seed)
            ).worst_fabric
            for seed in ((1, 2) if paths <= 256 else (1,))
        ]
        seconds = (time.process_time() - start) / len(worst)
        print(f"| {paths} | {expected} | {', '.join(f'{one:.3f}' for one in worst)} | {seconds:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="leave out the load of 2,048 paths")
    parser.add_argument("--part", choices=("rates", "completions", "fit", "oversubscribed", "loads"))
    args = parser.parse_args()
    fluid.solve_rates(parse_fabric("clos2:64x100G/1p/16"), traffic_matrix.ring(64, 1.0), routing=routes.by_flow())
    parts: dict[str, Callable[[], None]] = {
        "rates": rates,
        "completions": completions,
        "fit": fit,
        "oversubscribed": oversubscribed,
        "loads": lambda: loads(args.quick),
    }
    for name, part in parts.items():
        if args.part in (None, name):
            part()
    print(f"\nmost memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB")


if __name__ == "__main__":
    main()
