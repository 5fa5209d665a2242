"""Faults as texts and as JSON; what is wrong with one is said with the nearest right word."""

from __future__ import annotations

import pytest

from phalanx.errors import UserError
from phalanx.train.drill.faults import EVERY_TIME, FAULT_KINDS, POINTS, Fault, parse_fault, parse_faults


@pytest.mark.parametrize(
    "text",
    [
        "kill",
        "kill:rank=2,step=5",
        "kill:rank=1+3,at_s=2.5,point=collective",
        "kill:rank=0,epoch=2,point=save-set-aside",
        "hang:rank=0,for_s=7",
        "flip:rank=3,how=moment,seed=9",
        "host:host=0,at_s=3",
        "lossy-link:share=0.2",
        "crash-loop:rank=0",
    ],
)
def test_a_text_comes_back_as_it_was_meant(text: str) -> None:
    fault = parse_fault(text, id=7)
    assert parse_fault(fault.text, id=7) == fault
    assert Fault.from_dict(fault.to_dict()) == fault


@pytest.mark.parametrize("kind", FAULT_KINDS)
def test_every_kind_works_with_nothing_said(kind: str) -> None:
    assert parse_fault(kind).text == kind


def test_what_is_meant_when_nothing_is_said() -> None:
    assert parse_fault("kill").rank == (1,)
    assert (parse_fault("crash-loop").times, parse_fault("crash-loop").point) == (EVERY_TIME, "init")
    assert parse_fault("flip").how == "weight"
    assert parse_fault("partition").for_s == 5.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kil:rank=2", "--fault kil:rank=2: 'kil' is not a fault that can be injected\n  did you mean kill?"),
        ("kill:rnk=1", "--fault kill:rnk=1: kill has no key 'rnk'\n  did you mean rank=…?"),
        (
            "kill:rank",
            "--fault kill:rank: 'rank' has no value\n  kill takes rank, point, step, at_s, epoch, times",
        ),
        (
            "kill:rank=x",
            "--fault kill:rank=x: rank=x must be a whole number, 0 or more\n"
            "  write rank=2, or rank=1+3 for two at once",
        ),
        ("kill:step=-1", "--fault kill:step=-1: step=-1 must be a whole number, 0 or more\n  write step=2"),
        ("slow:sleep_s=nan", "--fault slow:sleep_s=nan: sleep_s=nan must be a number, 0 or more\n  write sleep_s=2"),
        ("lossy-link:share=2", "--fault lossy-link:share=2: share=2 is above 1\n  write share=0.05"),
        ("memory:how=much", "--fault memory:how=much: how=much is unknown\n  use one of raise, limit"),
        ("kill:step=1,at_s=2", "--fault kill:step=1,at_s=2: step and at_s exclude each other\n  give one of them"),
    ],
)
def test_mistakes(text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_fault(text)
    assert str(caught.value) == said


def test_a_point_that_is_none_names_all_of_them() -> None:
    with pytest.raises(UserError) as caught:
        parse_fault("kill:point=middle")
    assert str(caught.value).endswith(f"use one of {', '.join(POINTS)}")


def test_all_mistakes_at_once_and_numbers_in_order() -> None:
    with pytest.raises(UserError) as caught:
        parse_faults(["kil", "kill", "hnag"])
    assert len(caught.value.problems) == 2
    assert [fault.id for fault in parse_faults(["kill", "hang"])] == [0, 1]
