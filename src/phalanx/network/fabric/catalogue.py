"""The switches that ship with Phalanx, and fabrics that have a name."""

from __future__ import annotations

import csv
import functools
import importlib.resources
import io

from phalanx.errors import mistake, nearest
from phalanx.network.fabric.types import Switch


@functools.cache
def switches() -> tuple[Switch, ...]:
    """Every box in every port configuration.

    >>> sorted(one.name for one in switches() if one.radix == 512 and one.port_gbps == 100)
    ['Silicon One G200 512x100G', 'Spectrum-5 512x100G', 'Tomahawk 6 512x100G']
    """
    return tuple(_switch(row) for row in _rows("switches.csv"))


@functools.cache
def named_fabrics() -> dict[str, tuple[str, str]]:
    """Name to short form and source."""
    return {row["name"]: (row["spec"], row["source"]) for row in _rows("fabrics.csv")}


def find_switches(name: str, *, where: str) -> tuple[Switch, ...]:
    """The configurations a name means: a box (`Tomahawk 5`, `tomahawk5`) or one configuration of it."""
    wanted = _squeeze(name)
    found = tuple(one for one in switches() if wanted in (_squeeze(one.box), _squeeze(one.name)))
    if found:
        return found
    names = list(dict.fromkeys([one.box for one in switches()] + [one.name for one in switches()]))
    squeezed = {_squeeze(one): one for one in names}
    near = squeezed.get(nearest(wanted, squeezed), "")
    boxes = ", ".join(dict.fromkeys(one.box for one in switches()))
    fix = f'did you mean "{near}"?' if near else f"the catalogue has {boxes}"
    raise mistake(where, f'there is no switch "{name[:60]}" in the catalogue', fix=fix)


def unnamed(radix: int, port_gbps: float) -> Switch:
    """A switch of which only the ports are known: no power, no price."""
    return Switch(
        name=f"{radix}x{port_gbps:g}G", box="any", radix=radix, port_gbps=port_gbps, watts=0.0, usd=None, source="given"
    )


def _switch(row: dict[str, str]) -> Switch:
    radix, port_gbps = int(row["radix"]), float(row["port_gbps"])
    return Switch(
        name=f"{row['box']} {radix}x{port_gbps:g}G",
        box=row["box"],
        radix=radix,
        port_gbps=port_gbps,
        watts=float(row["watts"]),
        usd=(float(row["usd_low"]), float(row["usd_high"])),
        source=row["source"],
        lanes=int(row["lanes"]),
        evidence=row["evidence"],
    )


def _rows(name: str) -> list[dict[str, str]]:
    text = (importlib.resources.files("phalanx.network.fabric") / "data" / name).read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO(text)))


def _squeeze(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
