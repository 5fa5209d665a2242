"""A plan file is read from disk: whatever layout, mapping and cards it tells of, TOP, COM and BAT rules answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from rules.cases.com import small
from rules.kit import PROFILES, evidence

from phalanx.rules.edition import all_rules
from phalanx.rules.evidence import Evidence
from phalanx.rules.facts.host import HostFacts, NicPath
from phalanx.rules.run_rules import limits_of

RULES = [rule for rule in all_rules() if rule.group in ("TOP", "COM", "BAT")]
ODD = (0.0, -1.0, float("nan"), float("inf"), 1e300)
HOST = HostFacts(
    name="\x1b[31m<b>",
    source="this machine",
    nic_paths=(NicPath(device="\x1b[2J" * 99, nic="../" * 99, path="?"),),
    link_latency_s=float("nan"),
    link_bytes_per_s=0.0,
    environment={"NCCL_ALGO": "^tree;" * 999},
)


def changed(value: Any) -> Iterator[Any]:
    for field in dataclasses.fields(value):
        old = getattr(value, field.name)
        if isinstance(old, float):
            yield from (replace(value, **{field.name: odd}) for odd in ODD)
        elif isinstance(old, int) and not isinstance(old, bool):
            yield from (replace(value, **{field.name: odd}) for odd in (0, -1, 7, 10**12))
        elif isinstance(old, str):
            yield replace(value, **{field.name: "\x1b[31m<b>"})


def odd_plans(found: Evidence) -> Iterator[Evidence]:
    plan = found.the_plan
    for layout in changed(plan.layout):
        yield replace(found, plan=replace(plan, layout=layout))
    for axis in plan.mapping:
        for one in changed(axis):
            yield replace(found, plan=replace(plan, mapping=(one, *plan.mapping[1:])))
    for cluster in changed(plan.cluster):
        yield replace(found, plan=replace(plan, cluster=cluster))
    yield replace(found, plan=replace(plan, mapping=(), rank_order=()))


STARTS = {
    "sharded": evidence,
    "stages": lambda: evidence("parallel.pipeline=8", "parallel.tensor=4", "parallel.zero=1", "comm.algorithm=tree"),
    "compressed": lambda: small("parallel.compression=int8", "comm.bucket_mib=3"),
    "cpu": lambda: evidence(profile="cpu-gloo", host=HOST),
    "host": lambda: small(host=HOST),
}


@pytest.mark.parametrize("start", STARTS)
def test_odd_plans_are_answered(start: str) -> None:
    for found in odd_plans(STARTS[start]()):
        for rule in RULES:
            if all(found.has(letter) for letter in rule.requires):
                assert rule.check(found, limits_of(rule, found)), rule.id


def test_every_profile_is_answered() -> None:
    for name in PROFILES:
        found = small("comm.algorithm=ring", profile=name, host=HOST)
        assert all(rule.check(found, limits_of(rule, found)) for rule in RULES if not set(rule.requires) & set("LHD"))
