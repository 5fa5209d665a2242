"""The TOML file of a fabric: its keys and their limits. Every mistake is told at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.errors import Problem, UserError, nearest
from phalanx.io.toml import TomlFile, read_toml
from phalanx.io.visible import one_line
from phalanx.network.fabric.fabric_types import KINDS
from phalanx.network.fabric.sizing import MOST_NAME, MOST_USD, MOST_WATTS, ClosShape

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
    reading = _Reading(file=read_toml(path))
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
class _Reading:
    """Reads on after a mistake, with a value that nobody will see."""

    file: TomlFile
    problems: list[Problem] = field(default_factory=list)

    def wrong(self, key: str, what: str, fix: str) -> None:
        self.problems.append(Problem(where=self.file.where(key), what=what, fix=fix))

    def check_keys(self) -> None:
        for key in self.file.table:
            if key not in KEYS:
                near = nearest(key, KEYS)
                fix = f"did you mean {near}?" if near else f"the keys are {', '.join(KEYS)}"
                self.wrong(key, f'there is no key "{one_line(key)[:MOST_NAME]}" in a fabric', fix)

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
        low, high = (_float(one) for one in pair)
        if not 0 < low <= high <= MOST_USD:
            self.wrong("usd", f"usd is not a low and a high price up to {MOST_USD:,.0f}", "write usd = [50000, 90000]")
        return low, high

    def number(self, key: str, *, default: float | None = None, whole: bool = False, most: float = math.inf) -> float:
        """Above 0, unless it is the default."""
        given = self.file.table.get(key, default)
        if given is None:
            self.wrong("", f"{key} is missing", f"write {key} = …, as in docs/fabric.md")
            return 1.0
        value = _float(given)
        if key not in self.file.table or (0 < value <= min(most, 1e300) and (not whole or value == int(value))):
            return value
        kind = "a whole number above 0" if whole else "a number above 0"
        kind += f", at most {most:,.0f}" if math.isfinite(most) else ""
        self.wrong(key, f"{key} = {str(given)[:40]} is not {kind}", f"write {kind}")
        return 1.0


def _float(value: object) -> float:
    """A number of the file, NaN where it is none; float() of hundreds of digits would overflow."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(max(-(10**18), min(value, 10**18))) if isinstance(value, int) else value
