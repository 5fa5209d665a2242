"""Pages of `phalanx fabric simulate`: one way of sending, a comparison of several, and named failures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from phalanx.io.tables import text_table
from phalanx.units import format_bytes, format_seconds, plural

if TYPE_CHECKING:
    from phalanx.api.fabric_inputs import FabricTraffic


def incast_text(traffic: FabricTraffic) -> list[str]:
    """Return the hosts of an incast, which the simulation chose."""
    if traffic.watched is None:
        return []
    source, target = traffic.flows.source.tolist(), traffic.flows.target.tolist()
    crowd = ", ".join(f"{host:,}" for place, host in enumerate(source) if place != traffic.watched)
    victim = f"{source[traffic.watched]:,} to {target[traffic.watched]:,}"
    return [f"  incast: hosts {crowd} to {target[0]:,}; the victim sends from {victim}"]


def not_mapped_text(said: Sequence[str]) -> list[str]:
    """Return lines about the parts of a file that are not simulated."""
    return [f"  not mapped: {remark}" for remark in said]


def notes_text(notes: Sequence[str]) -> list[str]:
    """Return lines below a table, wrapped to the width of a page."""
    return [line for note in notes for line in wrap(note, 110, initial_indent="  note: ", subsequent_indent="        ")]


def columns_text(found: list[dict[str, Any]]) -> str:
    """Return a table with one column for each way of sending."""
    first = found[0]
    rows = [
        ("", [column["transport"] for column in found]),
        (
            "paths per flow",
            [f"{column['paths']} {column['spread']}" if column["paths"] > 1 else "1" for column in found],
        ),
        *_broken_rows(found),
        ("throughput", [_gbps_text(_healthy_gbps(column)) for column in found] if not first["failed"] else []),
        ("over time", [column["bars"] for column in found]),
        ("done, mean", [_time_text(column["mean_s"]) for column in found]),
        ("done, 99 %", [_time_text(column["p99_s"]) for column in found]),
        ("done, last", [_finish_text(column, "tail_s") for column in found]),
        ("without failure", [_time_text(column["healthy_tail_s"]) for column in found] if first["failed"] else []),
        (
            "delay, at most",
            [_finish_text(column, "later_s", less_s=column["healthy_tail_s"]) for column in found]
            if first["failed"]
            else [],
        ),
        ("packets lost", [f"{column['lost']:,}" for column in found]),
        ("flows affected", [_part_of(column["touched_flows"], column["flows"]) for column in found]),
        ("victim gets", [_victim_text(column) for column in found] if "victim_share" in first else []),
    ]
    if any(column["finished_flows"] < column["flows"] for column in found):
        rows.append(("flows unfinished", [f"{column['flows'] - column['finished_flows']:,}" for column in found]))
    return "\n".join([_head_line(first), *_cell_table([row for row in rows if row[1]])])


def _broken_rows(found: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    if not found[0]["failed"]:
        return []
    return [
        ("time to recover", [_time_text(column["recovered_after_s"], none="no effect") for column in found]),
        ("Gb/s before", [_gbps_text(column["before_gbps"]) for column in found]),
        ("  until then", [_gbps_text(column["during_gbps"]) for column in found]),
        ("  afterwards", [_gbps_text(column["after_gbps"]) for column in found]),
    ]


def lines_text(done: dict[str, list[dict[str, Any]]]) -> str:
    """Return one line for each scenario: completion time, packets lost and flows affected, by way of sending."""
    first = next(iter(done.values()))
    names = [str(column["transport"]).rpartition(", ")[2] for column in first]
    groups = ("done, last", "packets lost", "flows affected")
    intact_cells = [_time_text(column["healthy_tail_s"]) for column in first] + [
        f"{column['healthy_lost']:,}" for column in first
    ]
    rows = [
        ("no failure", intact_cells + [_part_of(column["healthy_touched_flows"], column["flows"]) for column in first])
    ]
    for name, columns in done.items():
        cells = [_finish_text(column, "tail_s") for column in columns] + [f"{column['lost']:,}" for column in columns]
        rows.append((name, cells + [_part_of(column["touched_flows"], column["flows"]) for column in columns]))
    complete_rows = [row for row in rows if len(row[1]) == len(rows[0][1])]  # Ctrl-C may have cut the last row
    table = _cell_table([("", names * len(groups)), *complete_rows])
    places = [at for at in range(len(table[0])) if table[0].startswith(names[0], at)]
    head = " " * len(table[0])
    for group, place in zip(groups, places, strict=True):
        head = head[:place] + group + head[place + len(group) :]
    if "incast" in done and len(complete_rows) == len(rows):
        victims = ", ".join(
            f"{name} {_victim_text(column)}" for name, column in zip(names, done["incast"], strict=True)
        )
        table.append(f"  victim of the incast: {victims}")
    return "\n".join([_head_line(first[0], broken=False), head.rstrip(), *table])


def _cell_table(rows: list[tuple[str, list[str]]]) -> list[str]:
    return text_table([(name, *cells) for name, cells in rows], right=range(1, 1 + len(rows[0][1])), indent=2)


def _head_line(one: dict[str, Any], *, broken: bool = True) -> str:
    head = f"{_flow_head(one)}, {one['engine']} engine"
    return f"{head}\n  failed: {_broken_text(one)}" if broken else head


def job_hint(fabric: str, failed: Sequence[str], *, loss: bool) -> str:
    """Return the command for the step time of a job under this failure."""
    kind = "grey" if loss else failed[0].partition(":")[0].strip().lower() if failed else ""
    kind = {"t1link": "link"}.get(kind, kind)
    breaks = f" --break {kind}" if kind in ("link", "t1", "t0", "nic", "transceiver", "grey") else ""
    return f"  step time of a job: phalanx sim JOB --fabric {fabric}{breaks}"


def _time_text(value: float | None, none: str = "-") -> str:
    if value is None:
        return none
    return "never" if math.isinf(value) else "-" if math.isnan(value) else format_seconds(value)


def _finish_text(one: dict[str, Any], key: str, *, less_s: float = 0.0) -> str:
    """Format a completion time; the simulation of packets stops some time after the last failure is over."""
    if math.isinf(one[key]) and one["stopped"]:
        return "-"
    if math.isinf(one[key]) and "simulated_s" in one:
        return f">{format_seconds(one['simulated_s'] - less_s)}"
    return _time_text(one[key])


def _gbps_text(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _healthy_gbps(one: dict[str, Any]) -> float | None:
    series = one["throughput_over_time"]
    return 8e-9 * one["bytes_total"] / series[-1]["until_s"] if series and math.isfinite(one["tail_s"]) else None


def _part_of(part: int, whole: int) -> str:
    return f"{part:,} ({part / whole:.1%})" if part else "0"


def _victim_text(one: dict[str, Any]) -> str:
    return f"{one['victim_gbps']:,.0f} Gb/s ({one['victim_share']:.0%})"


# ---- one way of sending ----------------------------------------------------------------------------------------------


def _flow_head(found: dict[str, Any]) -> str:
    size, total = format_bytes(found["bytes_per_flow"]), format_bytes(found["bytes_total"])
    return f"{found['fabric']}: {found['traffic']}, {plural(found['flows'], 'flow')} of {size}, {total} in all"


def _broken_text(found: dict[str, Any]) -> str:
    denied = f"; denied: {', '.join(found['denied'])}" if found["denied"] else ""
    if not found["failed"]:
        return f"nothing{denied}"
    effect = f"losing {found['loss']:.2%}" if found.get("loss") else f"at {found['left']:.0%}"
    return f"{', '.join(found['failed'])} {effect}{denied}"


def settled_text(found: dict[str, Any]) -> str:
    paths = f"{plural(found['paths'], 'path')} per flow"
    paths = "every path of every plane" if found["spread"] == "all" else paths
    never = "not yet" if found["stopped"] else "never"
    lines = [
        _flow_head(found),
        f"  routing   {found['spread']}, {paths}, recovery {found['recovery']}; failed: {_broken_text(found)}",
        f"  rate      mean {found['rate_mean']:.3f} of line rate, median {found['rate_median']:.3f}, "
        f"slowest 1 % {found['rate_p1']:.3f}, slowest {found['rate_slowest']:.3f}",
        f"  links     {found['full_links']:,} full, {found['idle_links']:,} idle",
        f"  done      mean {_seconds_or(found['mean_s'], never)}, 99 % {_seconds_or(found['p99_s'], never)}, "
        f"last {_seconds_or(found['tail_s'], never)}",
    ]
    if "victim_rate" in found:
        lines.append(f"  victim    {found['victim_rate']:.3f} of line rate")
    if found["stalled_flows"]:
        lines.append(
            f"  stalled   {plural(found['stalled_flows'], 'flow')} without a working path: give hosts ports in more "
            "planes, or "
            "let the part return (PART@0us..1ms)"
        )
    return "\n".join(lines)


def packet_text(one: dict[str, Any]) -> str:
    after = one["converge_s"]
    recovery_text = f"{one['recovery']}, {format_seconds(after)}" if after is not None else str(one["recovery"])
    rows = [
        ("", one["transport"]),
        ("paths per flow", f"{one['paths']} {one['spread']}" if one["paths"] > 1 else "1"),
        ("recovery", recovery_text),
        ("done, mean", _finished_share(one, "mean_s")),
        ("done, 99 %", _finished_share(one, "p99_s")),
        ("done, last", _last_packet(one)),
        ("planes simulated", _planes_text(one)),
        ("packets sent", f"{one['sent']:,}"),
        ("packets lost", f"{one['lost']:,}" + (f", {one['dropped']:,} dropped" if one["dropped"] else "")),
        ("packets trimmed", f"{one['trimmed']:,}"),
        ("ports paused", f"{one['paused_share']:.1%} of the time" if one["paused_share"] else ""),
        ("flows affected", f"{one['touched_flows']:,}, {one['touched_by_loss_flows']:,} by loss"),
    ]
    if one["finished_flows"] < one["flows"]:
        rows.append(("flows unfinished", f"{one['flows'] - one['finished_flows']:,}"))
    table = text_table([row for row in rows if row[1]], right=(1,), indent=2)
    return "\n".join([_flow_head(one), f"  failed: {_broken_text(one)}", *table])


def _planes_text(one: dict[str, Any]) -> str:
    if one["planes"] == 1:
        return ""
    return f"{one['planes_simulated']} of {one['planes']}" + (", alike" if one["planes_simulated"] == 1 else "")


def _finished_share(one: dict[str, Any], key: str) -> str:
    """Format a time over the flows that finished."""
    return format_seconds(one[key]) if one["finished_flows"] else "-"


def _last_packet(one: dict[str, Any]) -> str:
    if one["finished_flows"] < one["flows"]:
        return f"not in {format_seconds(one['simulated_s'])}"
    return format_seconds(one["tail_s"])


def _seconds_or(value: float, never: str) -> str:
    return never if value == float("inf") else format_seconds(value)
