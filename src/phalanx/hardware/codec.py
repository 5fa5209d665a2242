"""A Cluster as plain JSON and back; a Plan stores it so that a run remembers what it ran on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from phalanx.errors import MOST_UNKNOWN, Problem, UserError, nearest
from phalanx.hardware.cpu_steps import CpuRates
from phalanx.hardware.types import Accelerator, Cluster


def to_dict(cluster: Cluster) -> dict[str, object]:
    """Only numbers, texts, lists and dicts: `from_dict(to_dict(c)) == c`, also through JSON."""
    data = dataclasses.asdict(cluster)
    if cluster.price_usd_per_device_hour is not None:
        data["price_usd_per_device_hour"] = list(cluster.price_usd_per_device_hour)
    return data


def from_dict(data: Mapping[str, object], *, where: str = "cluster") -> Cluster:
    """The Cluster a dict describes; raises UserError naming every wrong or missing entry."""
    problems: list[Problem] = []
    inner = data.get("accelerator")
    if not isinstance(inner, Mapping):
        raise UserError(Problem(where=where, what="accelerator is missing", fix="store it with to_dict"))
    accelerator = _checked_fields(Accelerator, inner, f"{where}.accelerator", problems)
    outer = _checked_fields(Cluster, {**data, "accelerator": ""}, where, problems)
    if problems:
        raise UserError(problems)
    return Cluster(**{**outer, "accelerator": Accelerator(**accelerator)})  # type: ignore[arg-type]


def _checked_fields(
    kind: type[Accelerator] | type[Cluster], data: Mapping[str, object], where: str, problems: list[Problem]
) -> dict[str, object]:
    known = {field.name: field for field in dataclasses.fields(kind)}
    for name, field in known.items():
        if name not in data and field.default is dataclasses.MISSING:
            problems.append(Problem(where=where, what=f"{name} is missing", fix="store it with to_dict"))
    values: dict[str, object] = {}
    for name, value in data.items():
        if name not in known:
            near = nearest(name, known) if len(problems) < MOST_UNKNOWN else ""
            problems.append(Problem(where=where, what=f"unknown entry {name}", fix=near and f"did you mean {near}?"))
        elif name == "price_usd_per_device_hour":
            values[name] = _price_field(value, where, problems)
        elif name == "cpu":
            values[name] = _cpu_rates(value, where, problems)
        else:
            values[name] = _scalar_field(name, str(known[name].type), value, where, problems)
    return values


def _cpu_rates(value: object, where: str, problems: list[Problem]) -> CpuRates | None:
    if value is None:
        return None
    names = {field.name for field in dataclasses.fields(CpuRates)}
    if isinstance(value, Mapping) and "cores" in value and set(value) <= names:  # an older plan has fewer of them
        numbers = {str(name): one for name, one in value.items() if isinstance(one, int | float)}
        if len(numbers) == len(value) and all(math.isfinite(one) and one > 0 for one in numbers.values()):
            return CpuRates(**{name: float(one) for name, one in numbers.items()})
    problems.append(Problem(where=where, what="cpu is not a set of positive rates", fix="store it with to_dict"))
    return None


def _scalar_field(name: str, kind: str, value: object, where: str, problems: list[Problem]) -> object:
    if name == "accelerator":
        return value
    if kind == "str":
        good = isinstance(value, str)
    elif kind == "int":
        good = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    else:
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    if not good:
        wanted = {"str": "a text", "int": "a whole number from 1"}.get(kind, "a number from 0")
        problems.append(Problem(where=where, what=f"{name} = {str(value)[:40]} is wrong", fix=f"{wanted} is needed"))
    return value


def _price_field(value: object, where: str, problems: list[Problem]) -> tuple[float, float, float] | None:
    if value is None:
        return None
    if isinstance(value, list | tuple) and len(value) == 3:
        low, middle, high = (float(part) if isinstance(part, int | float) else math.nan for part in value)
        if 0 <= low <= middle <= high < math.inf:
            return low, middle, high
    fix = "give [low, middle, high] in rising order"
    problems.append(Problem(where=where, what=f"price_usd_per_device_hour = {str(value)[:40]} is wrong", fix=fix))
    return None
