"""The switches that ship with Phalanx, how one is found by name, and fabrics that have a name."""

from __future__ import annotations

import csv
import functools
import importlib.resources
import io
import re
from collections.abc import Mapping, Sequence

from phalanx.errors import mistake, nearest
from phalanx.network.fabric.types import KINDS, Switch

_PORTS = re.compile(r"^(\d{1,5})x(\d{1,5}(?:\.\d{1,3})?)g$")


@functools.cache
def switches() -> tuple[Switch, ...]:
    """Every box in every port configuration.

    >>> sorted(one.box for one in switches() if one.radix == 512 and one.port_gbps == 100)
    ['7060X6-64PE-B', 'Silicon One G200', 'Spectrum-5', 'Tomahawk 6']
    """
    return tuple(switch_of(row) for row in _rows("switches.csv"))


@functools.cache
def named_fabrics() -> dict[str, tuple[str, str]]:
    """Name to short form and source."""
    return {row["name"]: (row["spec"], row["source"]) for row in _rows("fabrics.csv")}


def find_switches(name: str, *, where: str, among: Sequence[Switch] = ()) -> tuple[Switch, ...]:
    """The configurations a name means; `among` nothing is the shipped catalogue.

    A box (`Tomahawk 5`, `tomahawk5`), a product (`QM9700`), one configuration (`Tomahawk 5 256x200G`), or bare ports
    (`512x100G`): every box that has them or, where none has, a switch without power and price.
    """
    known = tuple(among) or switches()
    wanted = _squeeze(name)
    found = tuple(one for one in known if wanted and wanted in _names(one))
    if found:
        return found
    ports = _PORTS.match(name.strip().lower())
    if ports and int(ports[1]) and float(ports[2]):
        return (unnamed(int(ports[1]), float(ports[2])),)
    names = {_squeeze(one): one for switch in known for one in (switch.box, switch.name, *_products(switch))}
    near = names.get(nearest(wanted, names), "")
    boxes = ", ".join(dict.fromkeys(one.box for one in known))
    fix = f'did you mean "{near}"?' if near else f"the catalogue has {boxes}; bare ports are written as 512x100G"
    raise mistake(where, f'there is no switch "{name[:60]}" in the catalogue', fix=fix)


def unnamed(radix: int, port_gbps: float) -> Switch:
    """A switch of which only the ports are known: no power, no price."""
    return Switch(
        name=f"{radix}x{port_gbps:g}G", box="any", radix=radix, port_gbps=port_gbps, watts=0.0, usd=None, source="given"
    )


def switch_of(row: Mapping[str, str]) -> Switch:
    """A row of a catalogue; watts and prices may be left empty. Raises ValueError for what is no number."""
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


def _names(one: Switch) -> list[str]:
    return [_squeeze(name) for name in (one.box, one.name, f"{one.radix}x{one.port_gbps:g}G", *_products(one))]


def _products(one: Switch) -> list[str]:
    return [name.strip() for name in one.also.split(",") if name.strip()]


def _rows(name: str) -> list[dict[str, str]]:
    text = (importlib.resources.files("phalanx.network.fabric") / "data" / name).read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO(text)))


def _squeeze(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
