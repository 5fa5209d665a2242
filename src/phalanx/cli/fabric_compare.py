"""`phalanx fabric simulate --compare` and `--scenario`: conventional fabrics beside recovery at the edge."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from phalanx.cli.fabric_files import Traffic
from phalanx.cli.output import note, print_json
from phalanx.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from phalanx.network.fabric.types import Fabric
    from phalanx.sim.compare import Question
    from phalanx.sim.scenarios import Scenario

INTERRUPTED = 130  # 128 + SIGINT, as shells count
CPU_S = 600.0


def run_compare(args: argparse.Namespace, fabric: Fabric, traffic: Traffic, engine: str) -> int:
    """One failure, a column for each way of sending."""
    found, code = _columns(question_of(args, fabric, traffic, engine), engine)
    if args.json:
        print_json({"compare": found, "not_mapped": traffic.not_mapped})
    else:
        print("\n".join([columns_text(found), *(f"  not mapped: {one}" for one in traffic.not_mapped), _job(args)]))
    return code


def run_scenarios(args: argparse.Namespace, fabric: Fabric, engine: str) -> int:
    """Named failures: one as a table, several as a line each."""
    from phalanx.sim.scenarios import chosen

    picked = chosen(args.scenario, fabric)
    done: dict[str, list[dict[str, Any]]] = {}
    code = 0
    for one in picked:
        if len(picked) > 1:
            note(f"{one.name}: {one.what}")
        question = _scenario(args, fabric, one, engine)
        done[one.name], code = _columns(question, engine)
        if code:
            break
    if args.json:
        print_json({"scenarios": [{"scenario": name, "compare": found} for name, found in done.items()]})
        return code
    if len(picked) == 1:
        print("\n".join([f"{picked[0].name}: {picked[0].what}", columns_text(done[picked[0].name]), _job(args)]))
    else:
        print("\n".join([lines_text(done), _job(args)]))
    return code


def question_of(args: argparse.Namespace, fabric: Fabric, traffic: Traffic, engine: str) -> Question:
    """What the options ask to compare."""
    from phalanx.sim import compare, compare_packets
    from phalanx.sim.failures import Break
    from phalanx.sim.packets.budget import Budget

    usual_s = compare.CONVERGE_S if engine == "fluid" else compare_packets.CONVERGE_S
    return compare.Question(
        fabric=fabric,
        flows=traffic.flows,
        traffic=traffic.name,
        broken=Break(failed=(*args.fail, *traffic.failed), left=args.left, loss=args.loss or 0.0),
        paths=args.paths,
        converge_s=compare.checked_converge_s(args.converge, usual_s),
        seed=args.seed,
        budget=Budget(cpu_s=args.cpu or CPU_S),
    )


def _scenario(args: argparse.Namespace, fabric: Fabric, one: Scenario, engine: str) -> Question:
    from phalanx.cli.fabric_files import load_traffic
    from phalanx.sim.scenarios import incast_beside

    traffic = load_traffic(args, fabric)
    if not one.incast:
        return replace(question_of(args, fabric, traffic, engine), broken=one.broken)
    crowd = incast_beside(fabric, float(traffic.flows.nbytes[0]))
    made = question_of(args, fabric, Traffic(name="incast", flows=crowd), engine)
    return replace(made, watched=len(crowd) - 1)


def _columns(question: Question, engine: str) -> tuple[list[dict[str, Any]], int]:
    """What each way of sending gives, up to Ctrl-C, and the exit code."""
    from phalanx.sim.compare import compare, fluid_runs
    from phalanx.sim.compare_packets import packet_runs

    found: list[dict[str, Any]] = []
    rows: Iterator[dict[str, Any]] = compare(question, fluid_runs if engine == "fluid" else packet_runs)
    try:
        for one in rows:
            found.append(one)
            say(one)
    except KeyboardInterrupt:
        if not found:
            raise
        return found, INTERRUPTED
    return found, INTERRUPTED if found[-1]["stopped"] == "interrupted" else 0


def say(one: dict[str, Any]) -> None:
    """What a reader must know beside the numbers."""
    for part in one.get("failed_too_late", ()):
        note(f"{one['transport']}: {part} had no effect: all was over after {format_seconds(one['simulated_s'])}")
    if one["stopped"]:
        note(f"stopped ({one['stopped']}): {one['finished_flows']:,} of {one['flows']:,} flows are finished")


def columns_text(found: list[dict[str, Any]]) -> str:
    """One column for each way of sending."""
    first = found[0]
    rows = [
        ("", [one["transport"] for one in found]),
        ("paths per flow", [f"{one['paths']} {one['spread']}" if one["paths"] > 1 else "1" for one in found]),
        *_broken_rows(found),
        ("throughput", [_gbps(_healthy_gbps(one)) for one in found] if not first["failed"] else []),
        ("over time", [one["bars"] for one in found]),
        ("done, mean", [_time(one["mean_s"]) for one in found]),
        ("done, 99 %", [_time(one["p99_s"]) for one in found]),
        ("done, last", [_time(one["tail_s"]) for one in found]),
        ("without failure", [_time(one["healthy_tail_s"]) for one in found] if first["failed"] else []),
        ("later, at most", [_time(one["later_s"]) for one in found] if first["failed"] else []),
        ("packets lost", [f"{one['lost']:,}" for one in found]),
        ("flows touched", [_of(one["touched_flows"], one["flows"]) for one in found]),
        ("victim gets", [_victim(one) for one in found] if "victim_share" in first else []),
    ]
    if any(one["finished_flows"] < one["flows"] for one in found):
        rows.append(("flows unfinished", [f"{one['flows'] - one['finished_flows']:,}" for one in found]))
    return "\n".join([_head(first), *_table([row for row in rows if row[1]])])


def _broken_rows(found: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    if not found[0]["failed"]:
        return []
    return [
        ("dead paths left", [_after(one) for one in found]),
        ("Gb/s before", [_gbps(one["before_gbps"]) for one in found]),
        ("  until left", [_gbps(one["during_gbps"]) for one in found]),
        ("  afterwards", [_gbps(one["after_gbps"]) for one in found]),
    ]


def lines_text(done: dict[str, list[dict[str, Any]]]) -> str:
    """One line for each scenario, three groups of columns."""
    first = next(iter(done.values()))
    names = [one["transport"] for one in first]
    head = ["done, last (without failure)", "packets lost", "flows touched"]
    rows = [("", [name for _ in head for name in names])]
    for name, found in done.items():
        cells = [f"{_time(one['tail_s'])} ({_time(one['healthy_tail_s'])})" for one in found]
        cells += [f"{one['lost']:,}" for one in found]
        cells += [_of(one["touched_flows"], one["flows"]) for one in found]
        rows.append((name, cells))
    whole = [row for row in rows if len(row[1]) == len(rows[0][1])]  # Ctrl-C may have cut the last
    table = _table(whole)
    if "incast" in done and len(whole) == len(rows):
        victims = ", ".join(f"{one['transport']} {_victim(one)}" for one in done["incast"])
        table.append(f"  victim of the incast: {victims}")
    return "\n".join([_head(first[0], broken=False), f"  {' | '.join(head)}, each by way of sending", *table])


def _table(rows: list[tuple[str, list[str]]]) -> list[str]:
    widths = [max(len(cells[at]) for _, cells in rows) for at in range(len(rows[0][1]))]
    return [
        f"  {name:<16}" + "".join(f"  {cell:>{wide}}" for cell, wide in zip(cells, widths, strict=True))
        for name, cells in rows
    ]


def _head(one: dict[str, Any], *, broken: bool = True) -> str:
    size, total = format_bytes(one["bytes_per_flow"]), format_bytes(one["bytes_total"])
    head = f"{one['fabric']}: {one['traffic']}, {one['flows']:,} flows of {size}, {total} in all, {one['engine']} engine"
    if not broken:
        return head
    how = f"losing {one['loss']:.2%}" if one["loss"] else f"at {one['left']:.0%}"
    return f"{head}\n  broken: {', '.join(one['failed'])} {how}" if one["failed"] else f"{head}\n  broken: nothing"


def _job(args: argparse.Namespace) -> str:
    return f"  step time of a job with such a failure: phalanx sim JOB --fabric {args.fabric} --break t1"


def _after(one: dict[str, Any]) -> str:
    if one["loss"] and one["recovery"] != "edge":
        return "never: the port is up"
    after = one["left_after_s"]
    return "never" if math.isinf(after) else f"after {format_seconds(after)}"


def _time(value: float) -> str:
    return "never" if math.isinf(value) else "-" if math.isnan(value) else format_seconds(value)


def _gbps(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _healthy_gbps(one: dict[str, Any]) -> float | None:
    series = one["throughput_over_time"]
    return 8e-9 * one["bytes_total"] / series[-1]["until_s"] if series and math.isfinite(one["tail_s"]) else None


def _of(part: int, whole: int) -> str:
    return f"{part:,} ({part / whole:.1%})" if part else "0"


def _victim(one: dict[str, Any]) -> str:
    return f"{one['victim_gbps']:,.0f} Gb/s ({one['victim_share']:.0%})"
