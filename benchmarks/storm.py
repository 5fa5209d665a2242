"""Kills, hangs, full disks, flipped bits and frozen coordinators at random, over two hosts, for half an hour.

python benchmarks/storm.py [--minutes 30] [--seed 22] [--rate 6] [--round-minutes 5] [--runs runs] [--json FILE]
                           [--init-timeout 60] [--rounds 2 3]

The faults are real, drawn from the seed, and hit a run of four ranks on two hosts (an agent each, with spare slots).
The storm comes in rounds, each a run of its own: a flipped bit takes its slot out of service for good, as it should,
and a single run would end for want of slots. Each round is then trained once more in the same memberships and without
a fault, and every loss and digest is compared. The same seed gives the same faults.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path

import phalanx
from phalanx.train.drill.schedule import poisson_times

SPARES = 4  # two on each host: what flips take away in a round
FLIPS = 2  # at most, in a round
FREEZES = 2  # of the host with the coordinator, in a round
LAST_RESTORE_S = 60.0  # before the end: there need not be another restore in which a rank could be killed
LEAST_GAP_S = 25.0  # between two that take a host away: one is back before the next goes


def draw_faults(draw: random.Random, *, minutes: float, rate: float) -> list[str]:
    """The faults of a round, as `phalanx drill --fault` takes them."""
    found, counts = [], Counter[str]()
    last_host_s = last_hang_s = -LEAST_GAP_S
    for at_s in poisson_times(draw, rate_per_min=rate, until_s=60 * minutes - 20):
        kinds = ["kill", "kill", "kill", "hang", "disk-full", "disk-full", "save"]
        kinds += ["flip"] * (counts["flip"] < FLIPS) * 2
        if at_s - last_hang_s > LEAST_GAP_S:  # else nobody is there who would tell of the rank that hangs
            kinds += ["coordinator"]
            kinds += ["freeze"] * (counts["freeze"] < FREEZES and at_s - last_host_s > LEAST_GAP_S) * 3
        kind, rank = draw.choice(kinds), draw.randrange(4)
        counts[kind] += 1
        match kind:
            case "kill":
                point = draw.choice(("step", "collective", "restore"))
                if point == "restore" and at_s > 60 * minutes - LAST_RESTORE_S:
                    point = "step"
                text = f"kill:rank={rank},point={point}"
            case "save":
                text = f"kill:rank=0,point=save-{draw.choice(('begin', 'data', 'manifest', 'commit', 'prune'))}"
            case "hang":
                text, last_hang_s = f"hang:rank={rank}", at_s
            case "disk-full":
                text = f"disk-full:rank={rank},for_s={draw.randrange(2, 8)},how={draw.choice(('raise', 'limit'))}"
            case "flip":
                text = f"flip:rank={rank},how={draw.choice(('weight', 'moment'))},seed={draw.randrange(10**6)}"
            case "freeze":
                text, last_host_s = f"freeze:how=coordinator,for_s={draw.randrange(8, 16)}", at_s
            case _:
                text = "coordinator"
        found.append(f"{text}{',' if ':' in text else ':'}at_s={at_s:.1f}")
    return found


def main() -> int:
    """Rounds until the time is over; a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--round-minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=22)
    parser.add_argument("--rate", type=float, default=6.0, help="faults per minute")
    parser.add_argument("--job", default="examples/drill.toml")
    parser.add_argument("--runs", default="runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--init-timeout", type=float, default=60.0, help="comm.init_timeout_s, for a busy machine")
    parser.add_argument("--rounds", type=int, nargs="+", help="only these; the faults of the others are drawn too")
    args = parser.parse_args()
    draw, rounds, began_s = random.Random(args.seed), [], time.monotonic()
    total, ok = Counter[str](), True
    print("| round | faults | steps | lost | redone | recovery, worst | equal to the run without faults | verdicts |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for number in range(max(1, round(args.minutes / args.round_minutes))):
        faults = draw_faults(draw, minutes=args.round_minutes, rate=args.rate)
        if args.rounds and number + 1 not in args.rounds:
            continue
        found = phalanx.drill(
            args.job,
            faults,
            minutes=args.round_minutes,
            hosts=2,
            spares=SPARES,
            runs=args.runs,
            overrides=[
                "fault.restarts=10",
                "fault.digest_every=auto" if number % 2 else "fault.digest_every=1",
                f"comm.init_timeout_s={args.init_timeout:g}",
            ],
            progress=lambda text: print(text, file=sys.stderr, flush=True),
        )
        outcome = found.outcome
        lost = sum(one.steps_lost or 0 for one in outcome.outcomes)
        redone = sum(one.steps_redone or 0 for one in outcome.outcomes)
        wrong = [f"{one.name}: {one.evidence}" for one in outcome.verdicts if not one.ok and one.judged]
        told = (one.evidence for one in outcome.verdicts if one.name == "equal to a fault-free replay")
        equal = next(told, "")
        total.update(one.kind for one in outcome.outcomes)
        worst = outcome.numbers.recovery_worst_s
        row = (
            str(number + 1),
            f"{outcome.numbers.faults:,}",
            f"{outcome.numbers.steps:,}",
            f"{lost:,}",
            f"{redone:,}",
            f"{worst:.1f} s" if worst is not None else "",
            equal or f"not compared: {outcome.message.splitlines()[0]}",  # a run that never began
            "; ".join(wrong) or "hold",
        )
        print("| " + " | ".join(row) + " |", flush=True)
        ok = ok and not wrong and not lost and bool(equal)
        rounds.append({"faults": faults, "result": found.to_dict()})
        if args.json:
            args.json.write_text(json.dumps({"seed": args.seed, "rounds": rounds}, indent=1))
    kinds = ", ".join(f"{count} {kind}" for kind, count in total.most_common())
    print(f"\n{sum(total.values())} faults fired in {(time.monotonic() - began_s) / 60:.0f} min with replays: {kinds}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
