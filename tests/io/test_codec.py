"""Values as JSON and back: nothing that JSON cannot hold, every mistake with its path, and bounds of the types."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import pytest

from phalanx.errors import MOST_UNKNOWN, UserError
from phalanx.io.codec import Bounds, from_json_values, from_message, json_text, json_values


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    JSON_PROPERTIES: ClassVar = ("bits",)

    name: Annotated[str, Bounds(max_length=4)]
    nbytes: Annotated[int, Bounds(ge=1)]
    seconds: float = math.inf  # until it fails
    shares: tuple[Annotated[float, Bounds(gt=0, le=1)], ...] = ()
    by_rank: dict[int, str] = field(default_factory=dict)

    @property
    def bits(self) -> int:
        return 8 * self.nbytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Fabric:
    wires: tuple[Wire, ...]
    spare: Wire | None = None


def test_what_json_cannot_hold() -> None:
    held = {"a": {3, 1}, "b": np.float32(0.5), "c": np.arange(2), "d": Path("x"), 4: math.nan, "e": (1, -math.inf)}
    made = {"a": [1, 3], "b": 0.5, "c": [0, 1], "d": "x", "4": None, "e": [1, None]}
    assert json_values(held) == made == json.loads(json_text(held))
    assert json_text(np.int64(3)) == "3"


def test_properties_are_written_beside_the_fields() -> None:
    assert json_values(Wire(name="a", nbytes=2))["bits"] == 16
    assert json.loads(json_text([Wire(name="a", nbytes=2)]))[0] == {
        "name": "a", "nbytes": 2, "seconds": None, "shares": [], "by_rank": {}, "bits": 16,
    }  # fmt: skip


def test_null_is_infinity_and_what_is_not_there_takes_its_default() -> None:
    found = from_json_values(Fabric, {"wires": [{"name": "a", "nbytes": 1, "seconds": None, "shares": [1]}]}, "fabric")
    assert found == Fabric(wires=(Wire(name="a", nbytes=1, shares=(1.0,)),))


def test_every_mistake_is_named_with_its_path() -> None:
    wrong = {
        "wires": [{"name": "a", "nbytes": 0, "seconds": 10**400}, {"nbytes": True, "name": "much too long"}, 3],
        "spare": {"name": "a", "nbyte": 1, "nbytes": 1, "shares": [0, math.inf, "1"]},
    }
    with pytest.raises(UserError) as caught:
        from_json_values(Fabric, wrong, "fabric", noun="fabric", fix="measure again")
    told = [f"{one.where}: {one.what}"[:90] for one in caught.value.problems]
    assert told == [
        "fabric.wires[0].nbytes: 0 is not a whole number from 1",
        f"fabric.wires[0].seconds: 1{59 * '0'} is not a number"[:90],
        "fabric.wires[1].name: much too long is not a text of at most 4 characters",
        "fabric.wires[1].nbytes: True is not a whole number from 1",
        "fabric.wires[2]: 3 is not an object",
        "fabric.spare.nbyte: is not an entry of a fabric",
        "fabric.spare.shares[0]: 0 is not a number above 0 to 1",
        "fabric.spare.shares[1]: inf is not a number above 0 to 1",
        "fabric.spare.shares[2]: 1 is not a number above 0 to 1",
    ]
    assert [one.fix for one in caught.value.problems][4:6] == ["measure again", "did you mean nbytes?"]


def test_a_hostile_file_has_few_problems() -> None:
    with pytest.raises(UserError) as caught:
        from_json_values(Fabric, {f"k{number}": 1 for number in range(10**4)} | {"wires": [0] * 10**4}, "fabric")
    assert len(caught.value.problems) <= 2 * MOST_UNKNOWN


def test_messages_between_our_processes() -> None:
    wire = Wire(name="a", nbytes=2, seconds=1.5, by_rank={3: "x"})
    assert from_message(Wire, json.loads(json_text(wire))) == wire
    with pytest.raises(ValueError, match="nbytes"):
        from_message(Wire, {"name": "a", "nbytes": "2"})
