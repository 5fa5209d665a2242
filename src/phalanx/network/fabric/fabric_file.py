"""The TOML file of a fabric: its keys and their limits. Every mistake is told at once."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from phalanx.errors import MOST_UNKNOWN, Problem, UserError, mistake, nearest
from phalanx.io.toml import TomlFile, read_toml
from phalanx.io.visible import one_line
from phalanx.network.fabric.fabric_types import KINDS, Fabric, Switch
from phalanx.network.fabric.sizing import (
    MOST_NAME,
    MOST_PLANES,
    MOST_USD,
    MOST_WATTS,
    ClosShape,
    check_fabric,
    size_fabric,
)
from phalanx.network.fabric.switch_catalogue import find_switches, named_fabrics, unnamed_switch

KEYS = (
    "hosts", "nic_gbps", "planes", "tiers", "radix", "switch", "oversubscription", "rails", "wide", "name", "box",
    "watts", "usd", "kind",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class FabricFile:
    """What a file asks for."""

    name: str
    hosts: int
    nic_gbps: float
    shape: ClosShape
    switch: str  # a name of the catalogue, or a number of ports
    box: str  # this and the rest only where `switch` is a number: "", 0 and None are not given
    watts: float
    usd: tuple[float, float] | None
    kind: str


def read_fabric_file(path: Path) -> FabricFile:
    """The values of a file; raises UserError with all that is wrong in it."""
    reading = _FabricReading(file=read_toml(path))
    reading.check_keys()
    found = FabricFile(
        name=reading.text("name", "my fabric") or one_line(path.stem)[:MOST_NAME],
        hosts=int(reading.number("hosts", whole=True)),
        nic_gbps=reading.number("nic_gbps"),
        shape=ClosShape(
            planes=int(reading.number("planes", default=1, whole=True)),
            tiers=int(reading.number("tiers", whole=True)),
            oversubscription=reading.number("oversubscription", default=1),
            rails=int(reading.number("rails", default=1, whole=True)),
            wide=reading.flag("wide"),
        ),
        switch=reading.switch(),
        box=reading.text("box", "SN5600"),
        watts=reading.number("watts", default=0, most=MOST_WATTS),
        usd=reading.prices(),
        kind=reading.kind(),
    )
    if reading.problems:
        raise UserError(reading.problems)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _FabricReading:
    """Reads on after a mistake, with a value that nobody will see."""

    file: TomlFile
    problems: list[Problem] = field(default_factory=list)

    def wrong(self, key: str, what: str, fix: str) -> None:
        self.problems.append(Problem(where=self.file.where(key), what=what, fix=fix))

    def check_keys(self) -> None:
        unknown = [key for key in self.file.table if key not in KEYS]
        for key in unknown[:MOST_UNKNOWN]:
            near = nearest(key, KEYS)
            fix = f"did you mean {near}?" if near else f"the keys are {', '.join(KEYS)}"
            self.wrong(key, f'there is no key "{one_line(key)[:MOST_NAME]}" in a fabric', fix)
        if len(unknown) > MOST_UNKNOWN:
            more = f"{len(unknown) - MOST_UNKNOWN:,} more keys that a fabric does not have"
            self.wrong(unknown[MOST_UNKNOWN], more, "leave them out")

    def text(self, key: str, example: str) -> str:
        """Short and printable, for it goes to terminals and into pictures; empty where there is none."""
        value = self.file.table.get(key, "")
        if not isinstance(value, str):
            self.wrong(key, f"{key} is no text", f'write {key} = "{example}"')
            return ""
        if len(value) > MOST_NAME:
            self.wrong(key, f"{key} has {len(value):,} characters", f"use at most {MOST_NAME}")
        elif one_line(value) != value:
            self.wrong(key, f'{key} = "{one_line(value)}" has characters that cannot be printed', "leave them out")
        return value

    def flag(self, key: str) -> bool:
        value = self.file.table.get(key, False)
        if not isinstance(value, bool):
            self.wrong(key, f"{key} = {str(value)[:40]} is neither true nor false", f"write {key} = true")
        return value is True

    def switch(self) -> str:
        if ("switch" in self.file.table) == ("radix" in self.file.table):
            self.wrong("switch", "a fabric needs either radix or switch", 'write radix = 512 or switch = "…"')
            return ""
        if "switch" in self.file.table:
            return self.text("switch", "Spectrum-5")
        return f"{int(self.number('radix', whole=True))}"

    def kind(self) -> str:
        found = (self.text("kind", KINDS[0]) or KINDS[0]).lower()
        if found not in KINDS:
            self.wrong("kind", f'there is no kind "{one_line(found)[:40]}" of switch', f"use {' or '.join(KINDS)}")
        return found

    def prices(self) -> tuple[float, float] | None:
        usd = self.file.table.get("usd")
        if usd is None:
            return None
        pair = usd if isinstance(usd, list) and len(usd) == 2 else (math.nan, math.nan)
        low, high = (_file_number(one) for one in pair)
        if not 0 < low <= high <= MOST_USD:
            self.wrong("usd", f"usd is not a low and a high price up to {MOST_USD:,.0f}", "write usd = [50000, 90000]")
        return low, high

    def number(self, key: str, *, default: float | None = None, whole: bool = False, most: float = math.inf) -> float:
        """Above 0, unless it is the default."""
        given = self.file.table.get(key, default)
        if given is None:
            self.wrong("", f"{key} is missing", f"write {key} = …, as in docs/fabric.md")
            return 1.0
        value = _file_number(given)
        if key not in self.file.table or (0 < value <= min(most, 1e300) and (not whole or value == int(value))):
            return value
        kind = "a whole number above 0" if whole else "a number above 0"
        kind += f", at most {most:,.0f}" if math.isfinite(most) else ""
        self.wrong(key, f"{key} = {str(given)[:40]} is not {kind}", f"write {kind}")
        return 1.0


def _file_number(value: object) -> float:
    """A number of the file, NaN where it is none; float() of hundreds of digits would overflow."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(max(-(10**18), min(value, 10**18))) if isinstance(value, int) else value


# A fabric from a short form, a TOML file or a name.
#
# Short form: `clos2:131072x800G/8p/512` is two tiers, 131,072 NICs of 800 Gb/s, 8 planes, 512-port switches. After
# the ports may follow an oversubscription (`/2:1`), rails (`/8r`) and `/wide` (a T1 for every uplink of a T0).
# Instead of the ports a switch of the catalogue may stand (`/Spectrum-5`), which adds power and price.


_SHORT = re.compile(r"^clos(\d+):(\d[\d_]*)x(\d+(?:\.\d+)?)G((?:/[^/]+)+)$", re.IGNORECASE)
_PLANES = re.compile(r"^(\d+)p$", re.IGNORECASE)
_RAILS = re.compile(r"^(\d+)r$", re.IGNORECASE)
_RATIO = re.compile(r"^(\d+(?:\.\d+)?):1$")
_NOT_TO_1 = re.compile(r"^(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)$")
_DIGITS = 15  # beyond these a number is a slip, and int() of thousands of digits is refused by Python itself
# Ethernet and InfiniBand as sold; 25 and 50 are single lanes, 3,200 is announced.
PORT_SPEEDS_GBPS = (10.0, 25.0, 40.0, 50.0, 100.0, 200.0, 400.0, 800.0, 1600.0, 3200.0)
EXAMPLE = "clos2:131072x800G/8p/512"


def parse_fabric(text: str) -> Fabric:
    """The fabric a text names.

    >>> fabric = parse_fabric("clos2:131072x800G/8p/512")
    >>> fabric.switches, fabric.t0, fabric.t1, fabric.paths, fabric.hops
    (6144, 512, 256, 2048, 3)
    """
    text = text.strip()
    named = named_fabrics().get(text.lower())
    if named is not None:
        return _parse_short_form(named[0], name=text.lower())
    if text.lower().endswith(".toml"):
        path = Path(text)
        asked = read_fabric_file(path)
        built = _build_fabric(asked.hosts, asked.nic_gbps, asked.shape, asked.switch, name=asked.name, where=str(path))
        return replace(built, switch=_own_switch(asked, built.switch)) if asked.switch.isdecimal() else built
    if text.lower().startswith("clos"):
        return _parse_short_form(text)
    near = nearest(text, named_fabrics())
    names = ", ".join(named_fabrics())
    fix = f"did you mean {near}?" if near else f"use {EXAMPLE}, a .toml file, or one of {names}"
    raise mistake("fabric", f'"{text[:80]}" is not a fabric', fix=fix)


def _parse_short_form(text: str, *, name: str = "") -> Fabric:
    match = _SHORT.match(text)
    if match is None or any(len(part) > _DIGITS for part in re.findall(r"\d+", text)):
        raise mistake(
            "fabric",
            f'"{text[:80]}" is not a fabric',
            why="a short form is closTIERS:HOSTSxSPEEDG/PLANESp/PORTS[/RATIO:1][/RAILSr]",
            fix=f"write it as {EXAMPLE}",
        )
    tiers, hosts, nic_gbps, rest = int(match[1]), int(match[2].replace("_", "")), float(match[3]), match[4]
    planes, rails, ratio, wide, box, where = 1, 1, 1.0, False, "", f"fabric {text[:80]}"
    for part in rest.strip("/").split("/"):
        if found := _PLANES.match(part):
            planes = int(found[1])
        elif found := _RAILS.match(part):
            rails = int(found[1])
        elif found := _RATIO.match(part):
            ratio = float(found[1])
        elif _NOT_TO_1.match(part):
            raise _not_to_1(part, where)
        elif part.lower() == "wide":
            wide = True
        elif box:
            raise mistake(where, f'two switches: "{box}" and "{part[:40]}"', fix="name one")
        else:
            box = part
    if not box:
        raise mistake(where, "it names no switch", fix=f"end with its ports, as {EXAMPLE}")
    shape = ClosShape(planes=planes, tiers=tiers, oversubscription=ratio, rails=rails, wide=wide)
    return _build_fabric(hosts, nic_gbps, shape, box, name=name, where=where)


def _not_to_1(part: str, where: str) -> UserError:
    """A ratio the other way round, or of two numbers."""
    down, up = (float(number) for number in part.split(":"))
    near = max(down, up) / min(down, up) if min(down, up) else 0.0
    why = "an oversubscription is R:1, capacity down over capacity up"
    return mistake(where, f'"{part[:40]}" is not a ratio to 1', why=why, fix=f"write {near or 2:g}:1")


def _build_fabric(hosts: int, nic_gbps: float, shape: ClosShape, box: str, *, name: str, where: str) -> Fabric:
    check_fabric(hosts, nic_gbps, shape, where=where)
    return size_fabric(hosts, nic_gbps, _switch_of(box, nic_gbps, shape, where), shape, name=name, where=where)


def _switch_of(box: str, nic_gbps: float, shape: ClosShape, where: str) -> Switch:
    port_gbps = nic_gbps / shape.planes
    if box.isdecimal():
        _check_split(nic_gbps, shape.planes, where)
        return unnamed_switch(int(box), port_gbps)
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
        sold = port_gbps in PORT_SPEEDS_GBPS if known else port_gbps.is_integer()
        return count == 1 or (count <= MOST_PLANES and sold)

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


def _own_switch(asked: FabricFile, ports: Switch) -> Switch:
    """The switch of a file that says what its box is called, draws and costs."""
    name, box = (f"{asked.box} {ports.name}", asked.box) if asked.box else (ports.name, ports.box)
    return replace(ports, name=name, box=box, watts=asked.watts, usd=asked.usd, kind=asked.kind)
