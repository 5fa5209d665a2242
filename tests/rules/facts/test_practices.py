"""What is stated of Phalanx is written somewhere, and is what the code does."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from phalanx.elastic import decide, host_agent, rank_link
from phalanx.job.run_sections import FaultSettings, Telemetry
from phalanx.rules.facts.trainers import PHALANX, Practice, habits_of
from phalanx.train.models.hf_weights import SINGLE

ROOT = Path(__file__).parents[3]
SAID_BY_THE_JOB = {"sums_in", "pipeline_fill", "saves"}  # of Phalanx; for files that have no key of the schema for them


def test_every_habit_is_stated_and_has_a_source() -> None:
    named = {one.name for one in fields(Practice)} - {"trainer", "sources"} - SAID_BY_THE_JOB
    assert all(getattr(PHALANX, name) is not None for name in named)
    assert set(PHALANX.sources) == named


def test_the_pages_that_sources_name_exist() -> None:
    words = " ".join(PHALANX.sources.values()).replace(";", " ").replace(",", " ").replace(":", " ").split()
    paths = [word.strip("()") for word in words if word.startswith(("docs/", "train/", "elastic/"))]
    assert len(paths) > 15
    for path in paths:
        places = (ROOT / path, ROOT / "src/phalanx" / path, ROOT / "src/phalanx/train" / path)
        assert any(place.is_file() for place in places), path


def test_numbers_are_those_of_the_code() -> None:
    assert max(rank_link.BEAT_S, host_agent.BEAT_S) == PHALANX.heartbeat_s
    assert decide.sign_every_s(131_072) <= 5.0
    assert FaultSettings().restarts == PHALANX.bounded_restarts
    assert Telemetry().listen.startswith(PHALANX.listens)
    assert SINGLE.endswith(f".{PHALANX.checkpoint_format}")


def test_nothing_is_assumed_of_others() -> None:
    assert habits_of("somebody") == Practice(trainer="somebody")
