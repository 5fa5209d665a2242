"""A fabric from a short form, a TOML file or a name.

Short form: `clos2:131072x800G/8p/512` is two tiers, 131,072 NICs of 800 Gb/s, 8 planes, 512-port switches. After the
ports may follow an oversubscription (`/2:1`), rails (`/8r`) and `/wide` (a T1 for every uplink of a T0). Instead of the
ports a switch of the catalogue may stand (`/Spectrum-5`), which adds power and price.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

from phalanx.errors import UserError, mistake, nearest
from phalanx.hardware.tomlfile import TomlFile, read_toml
from phalanx.network.fabric.catalogue import find_switches, named_fabrics, unnamed
from phalanx.network.fabric.sizing import Shape, check, size
from phalanx.network.fabric.types import Fabric, Switch

_SHORT = re.compile(r"^clos(\d+):(\d[\d_]*)x(\d+(?:\.\d+)?)G((?:/[^/]+)+)$", re.IGNORECASE)
_PLANES = re.compile(r"^(\d+)p$", re.IGNORECASE)
_RAILS = re.compile(r"^(\d+)r$", re.IGNORECASE)
_RATIO = re.compile(r"^(\d+(?:\.\d+)?):1$")
_DIGITS = 15  # beyond these a number is a slip, and int() of thousands of digits is refused by Python itself
# Ethernet and InfiniBand as sold; 25 and 50 are single lanes, 3,200 is announced.
PORT_SPEEDS_GBPS = (10.0, 25.0, 40.0, 50.0, 100.0, 200.0, 400.0, 800.0, 1600.0, 3200.0)
MOST_PLANES = 1024  # lanes of the widest chip: beyond, a slip of the pen
EXAMPLE = "clos2:131072x800G/8p/512"
KEYS = (
    "hosts", "nic_gbps", "planes", "tiers", "radix", "switch", "oversubscription", "rails", "wide", "name", "box",
    "watts", "usd",
)  # fmt: skip


def parse_fabric(text: str) -> Fabric:
    """The fabric a text names.

    >>> fabric = parse_fabric("clos2:131072x800G/8p/512")
    >>> fabric.switches, fabric.t0, fabric.t1, fabric.paths, fabric.hops
    (6144, 512, 256, 2048, 3)
    """
    text = text.strip()
    named = named_fabrics().get(text.lower())
    if named is not None:
        return _short(named[0], name=text.lower())
    if text.lower().endswith(".toml"):
        return _from_file(read_toml(Path(text)))
    if text.lower().startswith("clos"):
        return _short(text)
    raise _unknown(text)


def _short(text: str, *, name: str = "") -> Fabric:
    match = _SHORT.match(text)
    if match is None or any(len(part) > _DIGITS for part in re.findall(r"\d+", text)):
        raise mistake(
            "fabric",
            f'"{text[:80]}" is not a fabric',
            why="a short form is closTIERS:HOSTSxSPEEDG/PLANESp/PORTS[/RATIO:1][/RAILSr]",
            fix=f"write it as {EXAMPLE}",
        )
    tiers, hosts, nic_gbps, rest = int(match[1]), int(match[2].replace("_", "")), float(match[3]), match[4]
    planes, rails, ratio, wide, box = 1, 1, 1.0, False, ""
    for part in rest.strip("/").split("/"):
        if found := _PLANES.match(part):
            planes = int(found[1])
        elif found := _RAILS.match(part):
            rails = int(found[1])
        elif found := _RATIO.match(part):
            ratio = float(found[1])
        elif part.lower() == "wide":
            wide = True
        elif box:
            raise mistake(f"fabric {text[:80]}", f'two switches: "{box}" and "{part[:40]}"', fix="name one")
        else:
            box = part
    if not box:
        raise mistake(f"fabric {text[:80]}", "it names no switch", fix=f"end with its ports, as {EXAMPLE}")
    shape = Shape(planes=planes, tiers=tiers, oversubscription=ratio, rails=rails, wide=wide)
    return _build(hosts, nic_gbps, shape, box, name=name, where=f"fabric {text[:80]}")


def _build(hosts: int, nic_gbps: float, shape: Shape, box: str, *, name: str, where: str) -> Fabric:
    check(hosts, nic_gbps, shape, where=where)
    return size(hosts, nic_gbps, _switch(box, nic_gbps, shape, where), shape, name=name, where=where)


def _switch(box: str, nic_gbps: float, shape: Shape, where: str) -> Switch:
    port_gbps = nic_gbps / shape.planes
    if box.isdecimal():
        _check_split(nic_gbps, shape.planes, where)
        return unnamed(int(box), port_gbps)
    choices = find_switches(box, where=where)
    for one in choices:
        if abs(one.port_gbps - port_gbps) < 1e-6:
            return one
    speeds = sorted({nic_gbps / one.port_gbps for one in choices if nic_gbps % one.port_gbps == 0})
    raise mistake(
        where,
        f"{choices[0].box} has no ports of {port_gbps:g} Gb/s, which {shape.planes} planes of {nic_gbps:g} Gb/s need",
        why=f"its port speeds are {', '.join(f'{one.port_gbps:g}' for one in choices)} Gb/s",
        fix=f"use {' or '.join(f'{one:g}' for one in speeds)} planes" if speeds else "use another NIC or switch",
    )


def _check_split(nic_gbps: float, planes: int, where: str) -> None:
    """Ports must have a speed that is sold; of a NIC that is not sold either, whole Gb/s."""
    known = nic_gbps in PORT_SPEEDS_GBPS

    def fits(count: int) -> bool:
        port_gbps = nic_gbps / count
        return count == 1 or (port_gbps in PORT_SPEEDS_GBPS if known else port_gbps.is_integer())

    if fits(planes):
        return
    choices = [count for count in range(1, MOST_PLANES + 1) if fits(count)]
    near = [one for one in choices if one < planes][-1:] + [one for one in choices if one > planes][:1]
    raise mistake(
        where,
        f"{planes:,} planes make ports of {nic_gbps / planes:g} Gb/s of a {nic_gbps:g} Gb/s NIC",
        why="a NIC is split into equal ports of a speed that switches have",
        fix=f"use {' or '.join(map(str, near))} plane{'s' if near != [1] else ''}",
    )


def _from_file(file: TomlFile) -> Fabric:
    for key in file.data:
        if key not in KEYS:
            near = nearest(key, KEYS)
            fix = f"did you mean {near}?" if near else f"the keys are {', '.join(KEYS)}"
            raise mistake(file.where("", key), f'there is no key "{key}" in a fabric', fix=fix)
    hosts = _number(file, "hosts", whole=True)
    shape = Shape(
        planes=int(_number(file, "planes", default=1, whole=True)),
        tiers=int(_number(file, "tiers", whole=True)),
        oversubscription=_number(file, "oversubscription", default=1),
        rails=int(_number(file, "rails", default=1, whole=True)),
        wide=file.data.get("wide") is True,
    )
    box = file.data.get("switch")
    if (box is None) == ("radix" not in file.data):
        raise mistake(str(file.path), "a fabric needs either radix or switch", fix='write radix = 512 or switch = "…"')
    if box is not None and not isinstance(box, str):
        raise mistake(file.where("", "switch"), "switch is no text", fix='write switch = "Spectrum-5"')
    text = box if box is not None else f"{int(_number(file, 'radix', whole=True))}"
    name = str(file.data.get("name", file.path.stem))
    built = _build(int(hosts), _number(file, "nic_gbps"), shape, text, name=name, where=str(file.path))
    return built if box is not None else replace(built, switch=_own_switch(file, built.switch))


def _own_switch(file: TomlFile, ports: Switch) -> Switch:
    """The switch of a file that says what its box is called, draws and costs."""
    usd = file.data.get("usd")
    if usd is not None:
        low, high = usd if isinstance(usd, list) and len(usd) == 2 else (None, None)
        good = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (low, high))
        if not (good and 0 < float(str(low)) <= float(str(high)) < math.inf):
            raise mistake(file.where("", "usd"), "usd is not a low and a high price", fix="write usd = [50000, 90000]")
        usd = (float(str(low)), float(str(high)))
    name = str(file.data["box"])[:60] if "box" in file.data else ""
    watts = _number(file, "watts") if "watts" in file.data else 0.0
    return replace(
        ports, name=f"{name} {ports.name}" if name else ports.name, box=name or ports.box, watts=watts, usd=usd
    )


def _number(file: TomlFile, key: str, *, default: float | None = None, whole: bool = False) -> float:
    value = file.data.get(key, default)
    if value is None:
        raise mistake(str(file.path), f"{key} is missing", fix=f"write {key} = …, as in docs/fabric.md")
    if isinstance(value, int) and not isinstance(value, bool):
        value = float(min(value, 10**18))  # float() of hundreds of digits would overflow
    if isinstance(value, float) and math.isfinite(value) and value > 0 and (not whole or value == int(value)):
        return value
    kind = "a whole number above 0" if whole else "a number above 0"
    raise mistake(file.where("", key), f"{key} = {str(value)[:40]} is not {kind}", fix=f"write {kind}")


def _unknown(text: str) -> UserError:
    near = nearest(text, named_fabrics())
    names = ", ".join(named_fabrics())
    fix = f"did you mean {near}?" if near else f"use {EXAMPLE}, a .toml file, or one of {names}"
    return mistake("fabric", f'"{text[:80]}" is not a fabric', fix=fix)
