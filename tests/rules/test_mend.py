"""Edits are chosen so that a second look asks for none; rules that pull at one key move nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rules.toy import bad, made, rule

from phalanx.errors import UserError, mistake
from phalanx.rules.fixes import find_fix
from phalanx.rules.outcome import Edit, passed
from phalanx.rules.run_rules import CheckReport


class World:
    """A job of one key per rule: a rule is met when its keys have the values it wants."""

    def __init__(self, **wants: dict[str, int]) -> None:
        self.wants = wants
        self.unsafe: set[str] = set()
        self.fatal: set[str] = set()
        self.asked = 0

    def judge(self, sets: tuple[str, ...]) -> CheckReport:
        self.asked += 1
        held = dict(one.split("=") for one in sets)
        if self.fatal & held.keys():
            raise mistake("job.toml", "is refused")
        return made([rule(self._says(name, held), name) for name in self.wants])

    def _says(self, name: str, held: dict[str, str]):
        wants = self.wants[name]
        if all(held.get(key) == str(value) for key, value in wants.items()):
            return passed("met")
        return bad(edits=tuple(Edit(key=key, value=value, safe=key not in self.unsafe) for key, value in wants.items()))


def keys(cure) -> dict[str, object]:
    return {edit.key: edit.value for edit in cure.edits}


def test_all_cures_are_found_in_three_looks() -> None:
    world = World(CKP901={"a.x": 1}, CKP902={"b.y": 2, "b.z": 3})
    cure = find_fix(world.judge, unsafe=False)
    assert keys(cure) == {"a.x": 1, "b.y": 2, "b.z": 3}
    assert (cure.cured, cure.left, world.asked) == (2, (), 3)


def test_unsafe_cures_wait_for_leave_and_are_taken_whole() -> None:
    world = World(CKP901={"a.x": 1, "a.y": 2}, CKP902={"b.y": 2})
    world.unsafe = {"a.y"}
    assert keys(find_fix(world.judge, unsafe=False)) == {"b.y": 2}
    assert keys(find_fix(world.judge, unsafe=True)) == {"a.x": 1, "a.y": 2, "b.y": 2}


def test_two_rules_that_want_different_values_move_nothing() -> None:
    cure = find_fix(World(CKP901={"a.x": 1}, CKP902={"a.x": 2}, CKP903={"b.y": 2}).judge, unsafe=False)
    assert keys(cure) == {"b.y": 2}
    assert "CKP901" in cure.left[0]
    assert "CKP902" in cure.left[0]
    assert "a.x" in cure.left[0]


def test_a_rule_may_want_another_value_when_another_edit_moved_its_optimum() -> None:
    def moving(sets: tuple[str, ...]) -> CheckReport:
        held = dict(one.split("=") for one in sets)
        best = 20 if held.get("b.y") == "2" else 10
        first = passed("met") if held.get("a.x") == str(best) else wants("a.x", best)
        return made([rule(first), rule(passed("met") if "b.y" in held else wants("b.y", 2), "CKP902")])

    cure = find_fix(moving, unsafe=False)
    assert keys(cure) == {"a.x": 20, "b.y": 2}
    assert (cure.cured, cure.left) == (2, ())


def test_edits_that_never_settle_are_not_made() -> None:
    def restless(sets: tuple[str, ...]) -> CheckReport:
        value = int(dict(one.split("=") for one in sets).get("a.x", 0))
        return made([rule(wants("a.x", value + 1))])

    cure = find_fix(restless, unsafe=False)
    assert (keys(cure), cure.cured) == ({}, 0)
    assert "do not settle" in cure.left[0]


def wants(key: str, value: int):
    return bad(edits=(Edit(key=key, value=value, safe=True),))


def test_an_edit_that_ruins_the_job_is_left_out() -> None:
    world = World(CKP901={"a.x": 1}, CKP902={"b.y": 2})
    world.fatal = {"a.x"}
    cure = find_fix(world.judge, unsafe=False)
    assert keys(cure) == {"b.y": 2}
    assert cure.left == ("CKP901 asks for a.x = 1, with which the job cannot be read",)


def test_an_edit_with_which_nothing_can_be_planned_is_left_out() -> None:
    world = World(CKP901={"a.x": 1}, CKP902={"b.y": 2})

    def judge(sets: tuple[str, ...]) -> CheckReport:
        report = world.judge(sets)
        return replace(report, evidence="J") if "a.x=1" in sets else report

    cure = find_fix(judge, unsafe=True)
    assert keys(cure) == {"b.y": 2}
    assert cure.left == ("CKP901 asks for a.x = 1, with which the job can no longer be planned",)


def test_an_edit_that_breaks_what_no_edit_mends_is_left_out() -> None:
    world = World(CKP901={"a.x": 1}, CKP902={"b.y": 2})

    def judge(sets: tuple[str, ...]) -> CheckReport:
        report = world.judge(sets)
        extra = made([rule(bad(edits=(), fix="by hand"), "MEM901")]).findings if "a.x=1" in sets else ()
        return replace(report, findings=(*report.findings, *extra))

    cure = find_fix(judge, unsafe=True)
    assert keys(cure) == {"b.y": 2}
    assert cure.left == ("CKP901 asks for a.x = 1, which breaks MEM901",)


def test_an_edit_that_does_not_help_is_left_out() -> None:
    stubborn = made([rule(bad())])
    cure = find_fix(lambda sets: stubborn, unsafe=False)
    assert (keys(cure), cure.cured) == ({}, 0)
    assert "does not cure it" in cure.left[0]


def test_a_job_that_cannot_be_read_at_all_is_the_callers_error() -> None:
    def refuse(sets):
        raise mistake("job.toml", "is no job")

    with pytest.raises(UserError, match="is no job"):
        find_fix(refuse, unsafe=False)
