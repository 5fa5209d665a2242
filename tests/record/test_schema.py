"""The schema of events: valid, on its page, and what is written fits it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from synthetic import write_run

from phalanx.record.archive.series import KINDS, SERIES
from phalanx.record.event_schema import event_fields, load_schema
from phalanx.record.events import Event, EventWriter, read_events

PAGE = Path(__file__).parents[2] / "docs" / "events.md"
COMMON = ("v", "event", "t", "rank")
# Lists in an event whose entries have fields of their own: pairs of peers, sums over collectives, who is in an epoch,
# groups of ranks.
LISTS = {"peers": "pairs", "timeline": "collectives", "epoch": "members", "communicators": "groups"}


def inner_fields() -> dict[str, tuple[str, ...]]:
    defs = load_schema()["$defs"]
    return {kind: tuple(defs[kind]["properties"][name]["items"]["properties"]) for kind, name in LISTS.items()}


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = load_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def test_the_page_has_every_event_and_field_of_the_schema_and_no_other() -> None:
    sections = re.split(r"^### `(\w+)`$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    told = {kind: text.partition("\n## ")[0] for kind, text in zip(sections[1::2], sections[2::2], strict=True)}
    on_page = {kind: tuple(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) for kind, text in told.items()}
    assert on_page == {kind: (*fields, *inner_fields().get(kind, ())) for kind, fields in event_fields().items()}
    assert tuple(re.findall(r"^\| `(\w+)` \|", sections[0], re.MULTILINE)) == COMMON


def test_everything_in_a_run_folder_fits_and_is_in_the_schema(tmp_path: Path, validator: Draft202012Validator) -> None:
    run = write_run(tmp_path, steps=120)
    events = [event for path in (*run.event_files(), run.supervisor) for event in read_events(path)[0]]
    known = event_fields()
    for event in events:
        validator.validate(event)
        assert set(event) - set(COMMON) <= set(known[event["event"]]), event["event"]
    kinds = {event["event"] for event in events}
    assert kinds >= set(KINDS) - {"stop", "remark", "memory", "communicators", "compile_check", "regroup", "exchange", "peer"}
    assert kinds >= {"host", "epoch", "restore", "incident", "evidence", "end"}


def test_what_the_archive_knows_is_what_ranks_write() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## The supervisor")[0]
    assert set(re.findall(r"^### `(\w+)`$", text, re.MULTILINE)) == set(KINDS)


@pytest.mark.parametrize(
    "event",
    [
        {"event": "step", "step": 1.5},
        {"event": "step", "step": 1, "loss": "low"},
        {"event": "step"},
        {"event": "monitor", "utilization": 1.2},
        {"event": "timeline", "step": 1, "spans": [["nap", "x", 0, 1, None, None]]},
        {"event": "timeline", "step": 1, "spans": [["data", "x", 0]]},
        {"event": "peers", "pairs": [{"axis": "data"}]},
        {"event": "checkpoint", "step": 3, "phase": "begun"},
        {"event": "run_end", "step": 3, "state": "gone"},
    ],
)
def test_what_does_not_fit_is_refused(validator: Draft202012Validator, event: Event) -> None:
    assert not validator.is_valid({"v": 1, "t": 1.0, "rank": 0, **event})


def test_old_runs_and_events_to_come_fit_too(validator: Draft202012Validator) -> None:
    old = '{"v":1,"event":"step","t":1794734961.9,"rank":0,"step":0,"loss":null,"tokens":1024,"duration_s":0.27}'
    validator.validate(json.loads(old))
    validator.validate({"v": 1, "event": "not yet invented", "t": 1.0, "rank": 0, "anything": []})
    assert not validator.is_valid({"v": 2, "event": "step", "t": 1.0, "rank": 0, "step": 1})


def test_series_are_numbers_of_the_schema() -> None:
    defs = load_schema()["$defs"]
    for series in SERIES:
        assert {"number", "integer"} & set(defs[series.event]["properties"][series.field]["type"]), series
    ranks = [kind for kind in defs if kind in KINDS]
    assert sorted(ranks) == sorted(KINDS), "a kind that ranks write has a bit in the index"


def test_a_writer_writes_what_fits(tmp_path: Path, validator: Draft202012Validator) -> None:
    writer = EventWriter(tmp_path / "e.jsonl", rank=0)
    writer.write("step", step=0, loss=float("nan"), samples=(1, 2))
    writer.close()
    validator.validate(read_events(tmp_path / "e.jsonl")[0][0])
