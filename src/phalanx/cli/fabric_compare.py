"""`phalanx fabric simulate --compare` and `--scenario`: conventional fabrics beside recovery at the edge."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from phalanx.cli.fabric_files import Traffic, load_traffic, who_text
from phalanx.cli.output import note, print_json, say
from phalanx.errors import mistake
from phalanx.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from phalanx.network.fabric.fabric_types import Fabric
    from phalanx.sim.compare_recovery import RecoveryQuestion, RecoveryRun
    from phalanx.sim.fabric_failures import FabricBreak, Scenario

INTERRUPTED = 130  # 128 + SIGINT, as shells count
CPU_S = 600.0
TELL_S = 10.0


def run_compare(args: argparse.Namespace, fabric: Fabric, traffic: Traffic, engine: str) -> int:
    """One failure, a column for each way of sending."""
    from phalanx.sim.compare_recovery import unsaid

    question = question_of(args, fabric, traffic, engine)
    _announce([question], engine)
    found, code = _columns(question, engine, [])
    notes = unsaid(question.broken, found)
    if args.json:
        print_json({"compare": found, "notes": notes, "not_mapped": traffic.not_mapped})
    else:
        job = _job(args.fabric, question.broken.failed, loss=question.broken.loss > 0)
        said = (f"  not mapped: {one}" for one in traffic.not_mapped)
        say("\n".join([columns_text(found), *who_text(traffic), *notes_text(notes), *said, job]))
    return code


def run_scenarios(args: argparse.Namespace, fabric: Fabric, engine: str) -> int:
    """Named failures: one as a table, several as a line each."""
    from phalanx.sim.compare_recovery import unsaid
    from phalanx.sim.fabric_failures import chosen_scenarios

    picked = chosen_scenarios(args.scenario, fabric)
    done: dict[str, list[dict[str, Any]]] = {}
    kept: list[RecoveryRun] = []  # without failure, of the traffic that all but the incast have
    code = 0
    questions = [_scenario(args, fabric, one, engine) for one in picked]
    _announce(questions, engine)
    for one, question in zip(picked, questions, strict=True):
        if len(picked) > 1:
            note(f"{one.name}: {one.what}")
        done[one.name], code = _columns(question, engine, [] if one.incast else kept)
        if code:
            break
    notes = tuple(dict.fromkeys(line for one in picked for line in unsaid(one.broken, done.get(one.name, ()))))
    if args.json:
        made = [{"scenario": name, "compare": found} for name, found in done.items()]
        print_json({"scenarios": made, "notes": notes})
        return code
    if len(picked) == 1:
        one = picked[0]
        job = _job(args.fabric, one.broken.failed, loss=one.broken.loss > 0)
        who = who_text(Traffic(name="", flows=questions[0].flows, watched=questions[0].watched))
        say("\n".join([f"{one.name}: {one.what}", columns_text(done[one.name]), *who, *notes_text(notes), job]))
    else:
        job = f"  step time of a job: phalanx sim JOB --fabric {args.fabric} --break t1"
        say("\n".join([lines_text(done), *notes_text(notes), job]))
    return code


def broken_by(args: argparse.Namespace, traffic: Traffic) -> FabricBreak:
    """What fails, by the options and by a file of connections."""
    from phalanx.sim.fabric_failures import FabricBreak

    failed, denied = (*args.fail, *traffic.failed), tuple(args.deny)
    return FabricBreak(failed=failed, left=args.left, loss=args.loss or 0.0, denied=denied)


def question_of(args: argparse.Namespace, fabric: Fabric, traffic: Traffic, engine: str) -> RecoveryQuestion:
    """What the options ask to compare."""
    from phalanx.network.fabric.failure_budget import CONVERGE_S
    from phalanx.sim import compare_recovery
    from phalanx.sim.packets.build import PacketBudget
    from phalanx.sim.simulate import SHORT_CONVERGE_S

    usual_s = CONVERGE_S if engine == "fluid" else SHORT_CONVERGE_S
    return compare_recovery.RecoveryQuestion(
        fabric=fabric,
        flows=traffic.flows,
        traffic=traffic.name,
        broken=broken_by(args, traffic),
        paths=args.paths or 0,
        converge_s=compare_recovery.checked_converge_s(args.converge, usual_s),
        watched=traffic.watched,
        seed=args.seed,
        budget=PacketBudget(cpu_s=args.cpu or CPU_S),
    )


def _scenario(args: argparse.Namespace, fabric: Fabric, one: Scenario, engine: str) -> RecoveryQuestion:
    from phalanx.sim.traffic_matrix import INCAST

    args = argparse.Namespace(**{**vars(args), "traffic": INCAST if one.incast else None})
    made = question_of(args, fabric, load_traffic(args, fabric), engine)
    return replace(made, broken=replace(one.broken, denied=made.broken.denied))


def _columns(question: RecoveryQuestion, engine: str, kept: list[RecoveryRun]) -> tuple[list[dict[str, Any]], int]:
    """What each way of sending gives, up to Ctrl-C, and the exit code."""
    from phalanx.sim.compare_recovery import compare_recoveries, fluid_runs, packet_runs

    found: list[dict[str, Any]] = []
    rows: Iterator[dict[str, Any]] = compare_recoveries(
        question, fluid_runs if engine == "fluid" else packet_runs, kept
    )
    try:
        for one in rows:
            found.append(one)
            say_beside(one)
    except KeyboardInterrupt:
        if not found:
            raise
        return found, INTERRUPTED
    return found, INTERRUPTED if found[-1]["stopped"] == "interrupted" else 0


def _announce(questions: Sequence[RecoveryQuestion], engine: str) -> None:
    """Say how long all will take, where that is long; raises UserError where it is too long."""
    question, cpu_s = questions[0], _cpu_s(questions, engine)
    cases = f" and {len(questions)} scenarios" if len(questions) > 1 else ""
    if cpu_s > question.budget.cpu_s:
        raise mistake(
            f"{engine} on {question.fabric.name}",
            f"{len(question.flows):,} flows in three ways of sending{cases} need about {cpu_s:,.0f} s of CPU; the "
            f"budget is {question.budget.cpu_s:,.3g} s",
            fix="raise --cpu, or simulate fewer hosts"
            + (", or one scenario" if cases else "")
            + (", or send fewer --bytes, shorten --converge, or use --engine fluid" if engine == "packets" else ""),
        )
    if cpu_s > TELL_S:
        note(f"{len(question.flows):,} flows in three ways of sending{cases}: about {cpu_s:,.0f} s of CPU")


def _cpu_s(questions: Sequence[RecoveryQuestion], engine: str) -> float:
    """Expected of all; the same traffic without failure runs once."""
    from phalanx.sim.compare_recovery import fluid_cpu_s, packet_cpu_s, whole_of

    expected = fluid_cpu_s if engine == "fluid" else packet_cpu_s
    total, seen = 0.0, set()
    for one in questions:
        total += expected(one)
        if one.traffic in seen and one.broken.failed:
            total -= expected(whole_of(one))
        seen.add(one.traffic)
    return total


def say_beside(one: dict[str, Any]) -> None:
    """What a reader must know beside the numbers."""
    for part in one.get("failed_too_late", ()):
        over_s = one.get("simulated_s", one["tail_s"])
        note(f"{one['transport']}: {part} had no effect: all was over after {format_seconds(over_s)}")
    if one["stopped"]:
        note(f"stopped ({one['stopped']}): {one['finished_flows']:,} of {one['flows']:,} flows are finished")


def notes_text(notes: Sequence[str]) -> list[str]:
    """Lines below a table, none longer than a page is wide."""
    return [line for one in notes for line in wrap(one, 110, initial_indent="  note: ", subsequent_indent="        ")]


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
        ("done, last", [_last(one) for one in found]),
        ("without failure", [_time(one["healthy_tail_s"]) for one in found] if first["failed"] else []),
        ("later, at most", [_later(one) for one in found] if first["failed"] else []),
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
        ("time to recover", [_time(one["recovered_after_s"], none="no effect") for one in found]),
        ("Gb/s before", [_gbps(one["before_gbps"]) for one in found]),
        ("  until then", [_gbps(one["during_gbps"]) for one in found]),
        ("  afterwards", [_gbps(one["after_gbps"]) for one in found]),
    ]


def lines_text(done: dict[str, list[dict[str, Any]]]) -> str:
    """One line for each scenario: when all was done, packets lost and flows touched, by way of sending."""
    first = next(iter(done.values()))
    names = [str(one["transport"]).rpartition(", ")[2] for one in first]
    groups = ("done, last", "packets lost", "flows touched")
    whole_cells = [_time(one["healthy_tail_s"]) for one in first] + [f"{one['healthy_lost']:,}" for one in first]
    rows = [("no failure", whole_cells + [_of(one["healthy_touched_flows"], one["flows"]) for one in first])]
    for name, found in done.items():
        cells = [_last(one) for one in found] + [f"{one['lost']:,}" for one in found]
        rows.append((name, cells + [_of(one["touched_flows"], one["flows"]) for one in found]))
    whole = [row for row in rows if len(row[1]) == len(rows[0][1])]  # Ctrl-C may have cut the last
    table = _table([("", names * len(groups)), *whole])
    places = [table[0].find(names[0], at) for at in _starts(table[0], names[0])]
    head = " " * len(table[0])
    for group, place in zip(groups, places, strict=True):
        head = head[:place] + group + head[place + len(group) :]
    if "incast" in done and len(whole) == len(rows):
        victims = ", ".join(f"{name} {_victim(one)}" for name, one in zip(names, done["incast"], strict=True))
        table.append(f"  victim of the incast: {victims}")
    return "\n".join([_head(first[0], broken=False), head.rstrip(), *table])


def _starts(text: str, word: str) -> list[int]:
    return [at for at in range(len(text)) if text.startswith(word, at)]


def _table(rows: list[tuple[str, list[str]]]) -> list[str]:
    widths = [max(len(cells[at]) for _, cells in rows) for at in range(len(rows[0][1]))]
    return [
        f"  {name:<16}" + "".join(f"  {cell:>{wide}}" for cell, wide in zip(cells, widths, strict=True))
        for name, cells in rows
    ]


def _head(one: dict[str, Any], *, broken: bool = True) -> str:
    size, total = format_bytes(one["bytes_per_flow"]), format_bytes(one["bytes_total"])
    head = (
        f"{one['fabric']}: {one['traffic']}, {one['flows']:,} flows of {size}, {total} in all, {one['engine']} engine"
    )
    if not broken:
        return head
    how = f"losing {one['loss']:.2%}" if one["loss"] else f"at {one['left']:.0%}"
    denied = f"; denied: {', '.join(one['denied'])}" if one["denied"] else ""
    what = f"{', '.join(one['failed'])} {how}" if one["failed"] else "nothing"
    return f"{head}\n  broken: {what}{denied}"


def _job(fabric: str, failed: Sequence[str], *, loss: bool) -> str:
    """Where the step time of a job with such a failure is to be had."""
    kind = "grey" if loss else failed[0].partition(":")[0].strip().lower() if failed else ""
    kind = {"t1link": "link"}.get(kind, kind)
    breaks = f" --break {kind}" if kind in ("link", "t1", "t0", "nic", "transceiver", "grey") else ""
    return f"  step time of a job: phalanx sim JOB --fabric {fabric}{breaks}"


def _time(value: float | None, none: str = "-") -> str:
    if value is None:
        return none
    return "never" if math.isinf(value) else "-" if math.isnan(value) else format_seconds(value)


def _last(one: dict[str, Any]) -> str:
    """When all was done; packets stop being simulated some time after the last failure is over."""
    if math.isinf(one["tail_s"]) and one["stopped"]:
        return "-"
    if math.isinf(one["tail_s"]) and "simulated_s" in one:
        return f">{format_seconds(one['simulated_s'])}"
    return _time(one["tail_s"])


def _later(one: dict[str, Any]) -> str:
    if math.isinf(one["later_s"]) and one["stopped"]:
        return "-"
    if math.isinf(one["later_s"]) and "simulated_s" in one:
        return f">{format_seconds(one['simulated_s'] - one['healthy_tail_s'])}"
    return _time(one["later_s"])


def _gbps(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _healthy_gbps(one: dict[str, Any]) -> float | None:
    series = one["throughput_over_time"]
    return 8e-9 * one["bytes_total"] / series[-1]["until_s"] if series and math.isfinite(one["tail_s"]) else None


def _of(part: int, whole: int) -> str:
    return f"{part:,} ({part / whole:.1%})" if part else "0"


def _victim(one: dict[str, Any]) -> str:
    return f"{one['victim_gbps']:,.0f} Gb/s ({one['victim_share']:.0%})"
