"""Kept plans: the same answer without the search, and never a stale or a damaged one."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.hardware.cluster import resolve_cluster
from phalanx.job.load import load
from phalanx.plan import plan_cache as kept

JOB = 'name = "kept"\n[model]\npreset = "llama-3-8b"\n[batch]\nglobal_sequences = 64\n[data]\nsequence = 4096\n'


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    job = tmp_path / "job.toml"
    job.write_text(JOB, encoding="utf-8")
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    monkeypatch.setattr(kept, "LEAST_S", 0.0)
    searches = []
    real = kept.make_plan

    def counted(*args, **settings):
        searches.append(1)
        return real(*args, **settings)

    monkeypatch.setattr(kept, "make_plan", counted)

    def request(*overrides: str, spec: str = "8xH100:2"):
        return kept.cached_plan(load(job, overrides=overrides), resolve_cluster(spec), environ=environ)

    return request, searches, kept.plan_cache_folder(environ)


def test_the_second_time_nothing_is_searched_and_the_plan_is_equal(asked) -> None:
    request, searches, _ = asked
    assert request() == request()
    assert len(searches) == 1


def test_another_job_cluster_or_planner_is_planned_anew(asked, monkeypatch: pytest.MonkeyPatch) -> None:
    request, searches, _ = asked
    request()
    assert request("batch.global_sequences=128").job.batch.global_sequences == 128
    assert request(spec="8xH100:4").layout.devices == 32
    monkeypatch.setattr(kept, "_planner_files", lambda: [("plan/step.py", 1, 2)])
    request()
    assert len(searches) == 4


def test_a_damaged_file_is_found_again_and_mended(asked) -> None:
    request, searches, folder = asked
    first = request()
    (file,) = folder.glob("*.json")
    file.write_text('{"schema": "phalanx.plan/1"', encoding="utf-8")
    assert request().layout == first.layout
    assert len(searches) == 2
    assert request() == request()
    assert len(searches) == 2


def test_no_more_are_kept_than_allowed(asked, monkeypatch: pytest.MonkeyPatch) -> None:
    request, _, folder = asked
    monkeypatch.setattr(kept, "MOST_KEPT", 2)
    for count in (64, 128, 256):
        request(f"batch.global_sequences={count}")
    assert len(list(folder.glob("*.json"))) == 2


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(asked, tmp_path: Path) -> None:
    request, searches, _ = asked
    (tmp_path / "cache").write_text("a file", encoding="utf-8")
    assert request().layout == request().layout
    assert len(searches) == 2


def test_a_plan_of_another_job_under_our_name_is_not_believed(asked) -> None:
    request, searches, folder = asked
    request()
    (ours,) = folder.glob("*.json")
    request("batch.global_sequences=128")
    (other,) = set(folder.glob("*.json")) - {ours}
    ours.write_text(other.read_text(encoding="utf-8"), encoding="utf-8")
    assert request().job.batch.global_sequences == 64
    assert len(searches) == 3


def test_without_a_home_nothing_is_kept_in_the_current_folder() -> None:
    assert kept.plan_cache_folder({}) is None
    assert kept.plan_cache_folder({"XDG_CACHE_HOME": "relative"}) is None
    assert kept.plan_cache_folder({"HOME": "/home/a"}) == Path("/home/a/.cache/phalanx/plans")
