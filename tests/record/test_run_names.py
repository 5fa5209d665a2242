"""Names of runs: none leads out of the folder they are in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import write_run

from phalanx.errors import UserError
from phalanx.record.run import NAME, list_runs, run_in


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with two runs and everything else that may lie about."""
    folder = tmp_path / "runs"
    for number, name in enumerate(("first", "second.run")):
        run = write_run(folder, name=name, ranks=1, steps=1, incidents=0, hosts=1)
        os.utime(run.plan_json, (1000 + number, 1000 + number))
    outside = write_run(tmp_path, name="outside", ranks=1, steps=1, incidents=0, hosts=1)
    (folder / "link").symlink_to(outside.path)
    (folder / "inner-link").symlink_to(folder / "first")
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "plan.json").write_text("{}")
    (folder / "empty").mkdir()
    (folder / "file").write_text("")
    (folder / "two\nlines").mkdir()
    (folder / "two\nlines" / "plan.json").write_text("{}")
    return folder


def test_runs_newest_first_and_nothing_else(root: Path) -> None:
    assert [run.name for run in list_runs(root)] == ["second.run", "first"]
    assert list_runs(root / "nowhere") == list_runs(root / "file") == []


@pytest.mark.parametrize(
    "name",
    ["..", ".", "", "../outside", "first/../../outside", "/", "first/", "link", "inner-link", ".hidden", "empty",
     "file", "first\0", "\0", "a" * 10_000, "two\nlines", "first\n", "~", "%2e%2e", "-first", "FIRST"],
)  # fmt: skip
def test_a_name_that_is_none_of_them_is_refused(root: Path, name: str) -> None:
    with pytest.raises(UserError) as caught:
        run_in(root, name)
    text = str(caught.value)
    assert "has no run called" in text
    assert len(text) < 500 + len(str(root))
    assert "\0" not in text
    assert text.count("\n") < 3


def test_the_events_of_a_run_and_their_size(root: Path) -> None:
    run = run_in(root, "first")
    one = run.events(0).stat().st_size
    (run.path / "events-00000-0002.jsonl").write_text("12345")
    (run.path / "events-100000.jsonl").write_text("123")
    (run.path / "events-00001.jsonl").symlink_to(run.events(0))
    (run.path / "events-000001.jsonl").write_text("not a name we give")
    (run.path / "events-00000.index").write_text("no events")
    assert run.event_bytes() == one + 8
    assert 0 < run.event_bytes(beyond=0) <= one + 8, "enough is known after the first file"
    # The plan of this run has one rank.
    assert (run.event_parts(), run.stray_files()) == ({0: [2]}, 2)
    assert [path.name for path in run.event_files()] == ["events-00000.jsonl"]
    run.plan_json.write_text("{}")  # nobody tells how many ranks there are: every file may be of one
    assert (list(run.event_parts()), run.stray_files()) == ([0, 1, 100_000], 0)


def test_a_run_by_its_name(root: Path) -> None:
    assert run_in(root, "first").path == root / "first"
    with pytest.raises(UserError, match="did you mean first"):
        run_in(root, "frist")


@given(name=st.text(max_size=120))
def test_whatever_the_name_the_run_is_in_the_folder(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    root = tmp_path_factory.getbasetemp()
    if NAME.fullmatch(name):
        assert (root / name).resolve().parent == root.resolve()
    else:
        with pytest.raises(UserError):
            run_in(root, name)
