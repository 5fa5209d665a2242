"""What differs between two runs, plans or jobs."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest
from synthetic import make_plan, write_run

from phalanx.job.key_rules import rule_of
from phalanx.job.schema import SECTIONS, Job
from phalanx.record.report.diff import (
    SPELLING,
    Difference,
    compare_sides,
    of_job,
    of_plan,
    of_run,
    of_runs,
    render_difference,
)


def keys(found: list[Difference], section: str) -> set[str]:
    return {one.key for one in found if one.section == section}


def test_two_plans() -> None:
    a, b = make_plan(ranks=4, steps=10, hosts=2), make_plan(ranks=8, steps=10, hosts=2)
    b["job"]["optim"]["lr"] = 1.0
    b["prediction"]["step_s"] *= 2
    b["prediction"]["tokens_per_s"] *= 1 + 1e-12  # rounding
    found = compare_sides(of_plan("a", a), of_plan("b", b))
    assert keys(found, "settings") == {"optim.lr"}
    assert keys(found, "layout") == {"data", "shard"}
    assert keys(found, "prediction") == {"step_s"}
    assert keys(found, "cluster") == {"name", "domain_devices", "host_devices"}
    text = render_difference(of_plan("a", a), of_plan("b", b), found)
    assert "  step_s  6.65 s  13.3 s  +100.0%" in text
    assert compare_sides(of_plan("a", a), of_plan("b", json.loads(json.dumps(a)))) == []


def test_two_runs(tmp_path: Path) -> None:
    a = write_run(tmp_path, name="a", steps=60, incidents=0)
    b = write_run(tmp_path, name="b", steps=40, incidents=1, seed=3)
    found = compare_sides(*of_runs(a, b))
    assert not keys(found, "settings")
    assert keys(found, "results") >= {"steps", "tokens", "incidents", "effective_time", "wall_s", "usd", "energy_j"}
    losses = {one.key: one for one in found if one.key.startswith("loss at")}
    assert not losses  # of the same text at the same step, the synthetic loss is the same
    assert next(one for one in found if one.key == "steps").change == pytest.approx(-1 / 3)


def test_the_loss_where_both_have_come(tmp_path: Path) -> None:
    a, b = (write_run(tmp_path, name=name, steps=40, incidents=0) for name in "ab")
    events = [json.loads(line) for line in b.events(0).read_text().splitlines()][:-5]
    for event in events:
        if event["event"] == "step":
            event |= {"loss": event["loss"] + 1.0, "tokens": 2 * event["tokens"]}
    b.events(0).write_text("\n".join(map(json.dumps, events)) + "\n")
    found = {one.key: one for one in compare_sides(*of_runs(a, b)) if one.key.startswith("loss at")}
    same_step, same_tokens = found.values()
    assert (same_step.key, same_tokens.key) == ("loss at step 40", "loss at 10.5M tokens")
    assert same_step.b == pytest.approx(same_step.a + 1.0)
    assert same_tokens.b > same_step.b  # half as many steps


def test_measured_numbers_within_a_share_are_the_same(tmp_path: Path) -> None:
    a, b = (write_run(tmp_path, name=name, steps=40, incidents=0, seed=seed) for seed, name in enumerate("ab"))
    exact = compare_sides(*of_runs(a, b))
    assert keys(exact, "results")
    assert not keys(compare_sides(*of_runs(a, b), within=0.2), "results")


def test_a_job_has_settings_only(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=5, incidents=0)
    job = json.loads((run.path / "job.json").read_text())
    job["optim"]["betas"] = (0.9, 0.95)  # as the loader has it
    found = compare_sides(of_run(run), of_job("job.toml", job | {"name": "other"}))
    assert [(one.section, one.key) for one in found] == [("settings", "name")]


def test_a_job_file_and_the_plan_made_of_it() -> None:
    """A plan spells some settings as the code does, and knows where the corpus was built."""
    data = {"corpus": "offline-english", "seed": 0}
    plan = {"job": {"data": data | {"paths": ["/there/offline-english-512-1"]}, "checkpoint": {"asynchronous": True}}}
    job = {"data": data | {"path": ()}, "checkpoint": {"async": True}}
    assert compare_sides(of_plan("plan.json", plan), of_job("job.toml", job)) == []
    other = {"data": data | {"path": ("/mine",)}, "checkpoint": {"async": False}}
    found = compare_sides(of_plan("plan.json", plan), of_job("job.toml", other))
    assert [(one.key, one.a, one.b) for one in found] == [
        ("data.path", [], ["/mine"]),
        ("checkpoint.async", True, False),
    ]


def test_every_setting_that_has_another_name_in_the_file_is_known() -> None:
    types = get_type_hints(Job)
    renamed = {
        (section, item.name): rule_of(item.metadata).key
        for section in SECTIONS
        for item in fields(types[section])
        if item.metadata and rule_of(item.metadata).key not in ("", item.name)
    }
    assert renamed == SPELLING


def test_hostile_values() -> None:
    a = {"job": {"x": "\x1b[2J", "deep": {"y": [1, {"z": 10**400}]}}, "layout": 3, "bill": {"usd": [1]}}
    text = render_difference(
        of_plan("a", a), of_plan("b\x1b", {}), compare_sides(of_plan("a", a), of_plan("b", {"job": {}, "layout": {}}))
    )
    assert "\x1b" not in text
