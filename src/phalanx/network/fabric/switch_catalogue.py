"""The catalogue of switches that ships with Phalanx, lookup by name, named fabrics, and catalogues of the user."""

from __future__ import annotations

import csv
import functools
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.errors import Problem, UserError, mistake, nearest
from phalanx.io.files import csv_columns, read_text, shipped_text
from phalanx.io.visible import one_line
from phalanx.network.fabric.fabric_types import KINDS, Switch
from phalanx.network.fabric.sizing import LEAST_RADIX, MOST_NAME, MOST_NIC_GBPS, MOST_RADIX, MOST_USD, MOST_WATTS

_PORTS = re.compile(r"^(\d{1,5})x(\d{1,5}(?:\.\d{1,3})?)g$")


@functools.cache
def known_switches() -> tuple[Switch, ...]:
    """Return every box of the shipped catalogue in every port configuration.

    >>> sorted(switch.box for switch in known_switches() if switch.radix == 512 and switch.port_gbps == 100)
    ['7060X6-64PE-B', 'Silicon One G200', 'Spectrum-5', 'Tomahawk 6']
    """
    return tuple(switch_of(row) for row in _csv_rows("switches.csv"))


@functools.cache
def named_fabrics() -> dict[str, tuple[str, str]]:
    """Return the named fabrics as a mapping of name to short form and source."""
    return {row["name"]: (row["spec"], row["source"]) for row in _csv_rows("fabrics.csv")}


def find_switches(name: str, *, where: str, among: Sequence[Switch] = ()) -> tuple[Switch, ...]:
    """Return the switch configurations that match a name; an empty `among` searches the shipped catalogue.

    The name may be a box (`Tomahawk 5`, `tomahawk5`), a product (`QM9700`), one configuration (`Tomahawk 5
    256x200G`), or bare ports (`512x100G`). Bare ports match every box that has them; where none has, they give a
    switch without power and price. Raises UserError where nothing matches.
    """
    switches = tuple(among) or known_switches()
    wanted = _squeeze_name(name)
    matches = tuple(switch for switch in switches if wanted and wanted in _switch_names(switch))
    if matches:
        return matches
    ports = _PORTS.match(name.strip().lower())
    if ports and int(ports[1]) and float(ports[2]):
        return (unnamed_switch(int(ports[1]), float(ports[2])),)
    names = {
        _squeeze_name(alias): alias
        for switch in switches
        for alias in (switch.box, switch.name, *_product_names(switch))
    }
    near = names.get(nearest(wanted, names), "")
    boxes = ", ".join(dict.fromkeys(switch.box for switch in switches))
    fix = f'did you mean "{near}"?' if near else f"the catalogue has {boxes}; bare ports are written as 512x100G"
    raise mistake(where, f'there is no switch "{name[:60]}" in the catalogue', fix=fix)


def unnamed_switch(radix: int, port_gbps: float) -> Switch:
    """Return a switch of which only the ports are known: no power, no price."""
    return Switch(
        name=f"{radix}x{port_gbps:g}G", box="any", radix=radix, port_gbps=port_gbps, watts=0.0, usd=None, source="given"
    )


def switch_of(row: Mapping[str, str]) -> Switch:
    """Return the switch of a catalogue row; watts and prices may be empty. Raises ValueError for a malformed number."""
    radix, port_gbps = int(row["radix"]), float(row["port_gbps"])
    low, high = row.get("usd_low") or "", row.get("usd_high") or row.get("usd_low") or ""
    return Switch(
        name=f"{row['box']} {radix}x{port_gbps:g}G",
        box=row["box"],
        radix=radix,
        port_gbps=port_gbps,
        watts=float(row.get("watts") or 0),
        usd=(float(low), float(high)) if low else None,
        source=row.get("source") or "given",
        lanes=int(row.get("lanes") or radix),
        evidence=row.get("evidence") or "",
        also=row.get("also") or "",
        kind=(row.get("kind") or KINDS[0]).lower(),
    )


def _switch_names(one: Switch) -> list[str]:
    return [
        _squeeze_name(name) for name in (one.box, one.name, f"{one.radix}x{one.port_gbps:g}G", *_product_names(one))
    ]


def _product_names(one: Switch) -> list[str]:
    return [name.strip() for name in one.also.split(",") if name.strip()]


def _csv_rows(name: str) -> list[dict[str, str]]:
    text = shipped_text(__file__, f"data/{name}")
    return list(csv.DictReader(io.StringIO(text)))


def _squeeze_name(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


# A user's own catalogue: the switches on offer, at quoted prices.
# A CSV with the columns of data/switches.csv; only box, port_gbps and radix are required.


NEEDED = ("box", "port_gbps", "radix")
COLUMNS = (*NEEDED, "kind", "lanes", "watts", "usd_low", "usd_high", "evidence", "also", "source")
MOST_ROWS = 2000  # searched in well under a second
EXAMPLE = "box,port_gbps,radix,watts,usd_low,usd_high"


def read_catalogue(path: Path) -> tuple[Switch, ...]:
    """Read every row of a catalogue file as a switch; raises UserError with all wrong lines at once."""
    text = read_text(path)
    if "," not in text:
        raise mistake(str(path), "is not a table with commas", fix=f"begin it with {EXAMPLE}")
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True, restkey="", restval="")
    try:
        _check_columns(path, [name.strip() for name in csv_columns(reader, str(path))])
        rows = [
            (reader.line_num, {(key or "").strip(): str(value).strip() for key, value in row.items()}) for row in reader
        ]
    except csv.Error as error:
        raise mistake(f"{path}:{reader.line_num}", f"is not CSV: {error}", fix=f"begin it with {EXAMPLE}") from None
    if not 1 <= len(rows) <= MOST_ROWS:
        raise mistake(str(path), f"has {len(rows):,} switches", fix=f"write 1 to {MOST_ROWS:,}, one in a line")
    results = [_read_switch(f"{path}:{line}", row) for line, row in rows]
    problems = [result for result in results if isinstance(result, Problem)]
    if problems:
        raise UserError(problems)
    return tuple({result.name: result for result in results if isinstance(result, Switch)}.values())


def _check_columns(path: Path, names: list[str]) -> None:
    where = f"{path}:1"
    for name in names:
        if name and name not in COLUMNS:
            near = nearest(name, COLUMNS)
            fix = f"did you mean {near}?" if near else f"the columns are {', '.join(COLUMNS)}"
            raise mistake(where, f'there is no column "{name[:40]}" in a catalogue', fix=fix)
    missing = [name for name in NEEDED if name not in names]
    if missing:
        raise mistake(where, f"the column {missing[0]} is missing", fix=f"begin the file with {EXAMPLE}")


def _read_switch(where: str, row: Mapping[str, str]) -> Switch | Problem:
    try:
        switch = switch_of(row)
    except (ValueError, OverflowError) as error:
        return Problem(where=where, what=f"{error}"[:120], fix="write plain numbers, as 512 or 100")
    problem = _what_is_wrong(switch)
    return Problem(where=where, what=problem[0], fix=problem[1]) if problem else switch


def _what_is_wrong(one: Switch) -> tuple[str, str] | None:
    """Return the problem of a switch and its fix, or None."""
    if not one.box:
        return "the box has no name", "write its name first"
    if len(one.box) > MOST_NAME:
        return f"the name of the box has {len(one.box):,} characters", f"use at most {MOST_NAME}"
    unprintable = next((text for text in (one.box, one.also, one.evidence, one.source) if one_line(text) != text), None)
    if unprintable is not None:
        return f'"{one_line(unprintable)[:80]}" has characters that cannot be printed', "leave them out"
    if not LEAST_RADIX <= one.radix <= MOST_RADIX:
        return f"a radix of {one.radix:,}", f"use {LEAST_RADIX} to {MOST_RADIX:,} ports"
    if not 0 < one.port_gbps <= MOST_NIC_GBPS:
        return f"ports of {one.port_gbps:g} Gb/s", "use 100, 200, 400, 800 or 1600"
    if not 0 <= one.watts <= MOST_WATTS:
        return f"{one.watts:g} W", f"use watts from 0 to {MOST_WATTS:,.0f}, or leave them empty"
    if one.kind not in KINDS:
        return f'"{one_line(one.kind)[:40]}" is no kind of switch', f"use {' or '.join(KINDS)}"
    low, high = one.usd or (1.0, 1.0)
    if not 0 < low <= high <= MOST_USD:
        return f"a price of {low:g} to {high:g} dollars", "use a low and a high price above 0, or leave both empty"
    return None
