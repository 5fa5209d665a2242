"""The schema by columns and by single events says what a JSON Schema library says."""

from __future__ import annotations

import json
import random

import pytest
from jsonschema import Draft202012Validator
from synthetic import write_run

from phalanx.record.event_schema import EventColumns, known_kinds, load_schema, schema_breaks


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    run = write_run(tmp_path_factory.mktemp("shape"), ranks=2, hosts=1, steps=80, incidents=1)
    lines = [line for path in (run.events(0), run.supervisor) for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def test_all_events_of_a_run_are_valid(events):
    assert {schema_breaks(event) for event in events} == {""}
    assert known_kinds() >= {event["event"] for event in events}


def test_mutated_events_are_judged_as_by_a_library(events):
    judge, rng = Draft202012Validator(load_schema()), random.Random(0)
    odd = [None, -1, 0, 1, 1.0, 2.5, "x", "", [], {}, [None], [{}], True, False, "stage", "memory", [["a"]]]
    invalid = 0
    for event in rng.sample(events, 50):
        for name in event:
            for changed in (event | {name: rng.choice(odd)}, {key: event[key] for key in event if key != name}):
                wanted = judge.is_valid(changed)
                assert (schema_breaks(changed) == "") == wanted, (changed, schema_breaks(changed))
                kind = changed.get("event")
                if isinstance(kind, str) and kind in known_kinds() and not wanted:
                    invalid += 1
                    if not _is_deep(changed, judge):
                        assert EventColumns(kind, [changed, changed]).doubts() == [0, 1], changed
    assert invalid > 200


def _is_deep(event, judge) -> bool:
    """Within a list or a table: columns leave that to samples."""
    return all(len(error.absolute_path) > 1 for error in judge.iter_errors(event))


def test_columns_of_events_that_have_different_fields(events):
    steps = [event for event in events if event["event"] == "step"][:4]
    steps[1] = {name: steps[1][name] for name in steps[1] if name != "loss"}
    steps[2] = steps[2] | {"mine": 1}
    columns = EventColumns("step", steps)
    assert not columns.is_even
    assert columns.get("loss")[1] is None
    assert columns.get("mine") == (None, None, 1, None)
    assert columns.doubts() == []
    assert columns.get("nobody's") == (None,) * 4
