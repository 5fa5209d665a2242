"""The TOML file of a fabric: its keys and their limits. All mistakes of a file are reported at once."""

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
    """The values of a fabric file."""

    name: str
    hosts: int
    nic_gbps: float
    shape: ClosShape
    switch: str  # a name of the catalogue, or a number of ports
    # `box`, `watts`, `usd` and `kind` count only where `switch` is a number; "", 0 and None mean absent.
    box: str
    watts: float
    usd: tuple[float, float] | None
    kind: str


def read_fabric_file(path: Path) -> FabricFile:
    """Read the values of a file; raises UserError with all of its mistakes."""
    reading = _FabricReading(file=read_toml(path))
    reading.check_keys()
    values = FabricFile(
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
    return values


@dataclass(frozen=True, kw_only=True, slots=True)
class _FabricReading:
    """A reader that collects mistakes: after each it continues with a placeholder value that is never used."""

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
        """Return a short printable text, as it is printed on terminals and in pictures; empty where it is missing."""
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
        kind_text = (self.text("kind", KINDS[0]) or KINDS[0]).lower()
        if kind_text not in KINDS:
            self.wrong("kind", f'there is no kind "{one_line(kind_text)[:40]}" of switch', f"use {' or '.join(KINDS)}")
        return kind_text

    def prices(self) -> tuple[float, float] | None:
        usd = self.file.table.get("usd")
        if usd is None:
            return None
        pair = usd if isinstance(usd, list) and len(usd) == 2 else (math.nan, math.nan)
        low, high = (_file_number(number) for number in pair)
        if not 0 < low <= high <= MOST_USD:
            self.wrong("usd", f"usd is not a low and a high price up to {MOST_USD:,.0f}", "write usd = [50000, 90000]")
        return low, high

    def number(self, key: str, *, default: float | None = None, whole: bool = False, most: float = math.inf) -> float:
        """Return a number above 0, or the default where the key is missing."""
        raw = self.file.table.get(key, default)
        if raw is None:
            self.wrong("", f"{key} is missing", f"write {key} = …, as in docs/fabric.md")
            return 1.0
        value = _file_number(raw)
        if key not in self.file.table or (0 < value <= min(most, 1e300) and (not whole or value == int(value))):
            return value
        kind = "a whole number above 0" if whole else "a number above 0"
        kind += f", at most {most:,.0f}" if math.isfinite(most) else ""
        self.wrong(key, f"{key} = {str(raw)[:40]} is not {kind}", f"write {kind}")
        return 1.0


def _file_number(value: object) -> float:
    """Return a number of the file, or NaN; integers are clipped, as float() of hundreds of digits would overflow."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(max(-(10**18), min(value, 10**18))) if isinstance(value, int) else value


# A fabric from a short form, a TOML file or a name.
# Short form: `clos2:131072x800G/8p/512` is two tiers, 131,072 NICs of 800 Gb/s, 8 planes, 512-port switches. The
# ports may be followed by an oversubscription (`/2:1`), rails (`/8r`) and `/wide` (a T1 for every uplink of a T0). A
# switch of the catalogue (`/Spectrum-5`) may replace the ports; it adds power and price.


_SHORT = re.compile(r"^clos(\d+):(\d[\d_]*)x(\d+(?:\.\d+)?)G((?:/[^/]+)+)$", re.IGNORECASE)
_PLANES = re.compile(r"^(\d+)p$", re.IGNORECASE)
_RAILS = re.compile(r"^(\d+)r$", re.IGNORECASE)
_RATIO = re.compile(r"^(\d+(?:\.\d+)?):1$")
_NOT_TO_1 = re.compile(r"^(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)$")
# Longer numbers are typing errors, and Python itself refuses int() of thousands of digits.
_DIGITS = 15
# Ethernet and InfiniBand port speeds on the market; 25 and 50 are single lanes, 3,200 is announced.
PORT_SPEEDS_GBPS = (10.0, 25.0, 40.0, 50.0, 100.0, 200.0, 400.0, 800.0, 1600.0, 3200.0)
EXAMPLE = "clos2:131072x800G/8p/512"


def parse_fabric(text: str) -> Fabric:
    """Build the fabric that a text names: a known name, the path of a TOML file, or a short form.

    Raises UserError where the text is none of these, or the fabric is impossible.

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
        values = read_fabric_file(path)
        built = _build_fabric(
            values.hosts, values.nic_gbps, values.shape, values.switch, name=values.name, where=str(path)
        )
        return replace(built, switch=_own_switch(values, built.switch)) if values.switch.isdecimal() else built
    if text.lower().startswith("clos"):
        return _parse_short_form(text)
    near = nearest(text, named_fabrics())
    names = ", ".join(named_fabrics())
    fix = f"did you mean {near}?" if near else f"use {EXAMPLE}, a .toml file, or one of {names}"
    raise mistake("fabric", f'"{text[:80]}" is not a fabric', fix=fix)


def _parse_short_form(text: str, *, name: str = "") -> Fabric:
    """Build the fabric of a short form; raises UserError for malformed text."""
    match = _SHORT.match(text)
    if match is None or any(len(digits) > _DIGITS for digits in re.findall(r"\d+", text)):
        raise mistake(
            "fabric",
            f'"{text[:80]}" is not a fabric',
            why="a short form is closTIERS:HOSTSxSPEEDG/PLANESp/PORTS[/RATIO:1][/RAILSr]",
            fix=f"write it as {EXAMPLE}",
        )
    tiers, hosts, nic_gbps, suffix = int(match[1]), int(match[2].replace("_", "")), float(match[3]), match[4]
    planes, rails, ratio, wide, box, where = 1, 1, 1.0, False, "", f"fabric {text[:80]}"
    for suffix_field in suffix.strip("/").split("/"):
        if match_field := _PLANES.match(suffix_field):
            planes = int(match_field[1])
        elif match_field := _RAILS.match(suffix_field):
            rails = int(match_field[1])
        elif match_field := _RATIO.match(suffix_field):
            ratio = float(match_field[1])
        elif _NOT_TO_1.match(suffix_field):
            raise _not_to_1(suffix_field, where)
        elif suffix_field.lower() == "wide":
            wide = True
        elif box:
            raise mistake(where, f'two switches: "{box}" and "{suffix_field[:40]}"', fix="name one")
        else:
            box = suffix_field
    if not box:
        raise mistake(where, "it names no switch", fix=f"end with its ports, as {EXAMPLE}")
    shape = ClosShape(planes=planes, tiers=tiers, oversubscription=ratio, rails=rails, wide=wide)
    return _build_fabric(hosts, nic_gbps, shape, box, name=name, where=where)


def _not_to_1(part: str, where: str) -> UserError:
    """Return the error for a ratio that is inverted or does not end in 1."""
    down, up = (float(number) for number in part.split(":"))
    near = max(down, up) / min(down, up) if min(down, up) else 0.0
    why = "an oversubscription is R:1, capacity down over capacity up"
    return mistake(where, f'"{part[:40]}" is not a ratio to 1', why=why, fix=f"write {near or 2:g}:1")


def _build_fabric(hosts: int, nic_gbps: float, shape: ClosShape, box: str, *, name: str, where: str) -> Fabric:
    check_fabric(hosts, nic_gbps, shape, where=where)
    return size_fabric(hosts, nic_gbps, _switch_of(box, nic_gbps, shape, where), shape, name=name, where=where)


def _switch_of(box: str, nic_gbps: float, shape: ClosShape, where: str) -> Switch:
    """Return the switch of a name or a number of ports, at the port speed that the planes need; raises UserError."""
    port_gbps = nic_gbps / shape.planes
    if box.isdecimal():
        _check_split(nic_gbps, shape.planes, where)
        return unnamed_switch(int(box), port_gbps)
    choices = find_switches(box, where=where)
    for switch in choices:
        if abs(switch.port_gbps - port_gbps) < 1e-6:
            return switch
    speeds = sorted({nic_gbps / switch.port_gbps for switch in choices if nic_gbps % switch.port_gbps == 0})
    raise mistake(
        where,
        f"{choices[0].box} has no ports of {port_gbps:g} Gb/s, which {shape.planes} planes of {nic_gbps:g} Gb/s need",
        why=f"its port speeds are {', '.join(f'{switch.port_gbps:g}' for switch in choices)} Gb/s",
        fix=f"use {' or '.join(f'{count:g}' for count in speeds)} planes" if speeds else "use another NIC or switch",
    )


def _check_split(nic_gbps: float, planes: int, where: str) -> None:
    """Raise UserError where planes make ports of a speed that is not sold; other NICs are split into whole Gb/s."""
    common_nic = nic_gbps in PORT_SPEEDS_GBPS

    def fits(count: int) -> bool:
        port_gbps = nic_gbps / count
        sold = port_gbps in PORT_SPEEDS_GBPS if common_nic else port_gbps.is_integer()
        return count == 1 or (count <= MOST_PLANES and sold)

    if fits(planes):
        return
    choices = [count for count in range(1, MOST_PLANES + 1) if fits(count)]
    near = [count for count in choices if count < planes][-1:] + [count for count in choices if count > planes][:1]
    raise mistake(
        where,
        f"{planes:,} planes make ports of {nic_gbps / planes:g} Gb/s of a {nic_gbps:g} Gb/s NIC",
        why="a NIC is split into equal ports of a speed that switches have",
        fix=f"use {' or '.join(map(str, near))} plane{'s' if near != [1] else ''}",
    )


def _own_switch(asked: FabricFile, ports: Switch) -> Switch:
    """Return the switch of a file that sets the name, power, price or kind of its box."""
    name, box = (f"{asked.box} {ports.name}", asked.box) if asked.box else (ports.name, ports.box)
    return replace(ports, name=name, box=box, watts=asked.watts, usd=asked.usd, kind=asked.kind)
