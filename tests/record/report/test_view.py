"""Looking at a run again and again: what is new is told once, and what was read is not read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from synthetic import write_run

from phalanx.record import events
from phalanx.record.archive import rank_file as rankfile
from phalanx.record.archive.history import RunHistory
from phalanx.record.events import EventWriter
from phalanx.record.report.live import Watcher
from phalanx.record.run import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return write_run(tmp_path, ranks=1, steps=20, incidents=0, hosts=1, finished=False)


def test_remarks_go_on_after_any_number_of_them(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rankfile, "MOST_EVENTS", 3)
    writer = EventWriter(run.events(0), rank=0)
    for step in range(20, 30):
        writer.write("evaluate", step=step, loss=1.0)
    watcher = Watcher(run)
    assert len(watcher.remarks()) == 11
    for step in (30, 31):
        writer.write("evaluate", step=step, loss=1.0)
        watcher.look()
        assert watcher.remarks() == [f"step {step}: held-out loss 1.0000"]
        assert watcher.remarks() == []
    writer.close()


def test_no_timeline_is_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = EventWriter(run.events(0), rank=0)
    writer.write("timeline", step=19, spans=[["forward", "x", 0.0, 1.0, None, None]] * 100)
    writer.close()
    asked, parsed, whole = [], [], RunHistory.events

    def search(self: RunHistory, *kinds: str, rank: int = 0) -> Any:
        asked.append(kinds)
        return whole(self, *kinds, rank=rank)

    def parse(line: bytes) -> Any:
        parsed.append(line)
        return None

    watcher = Watcher(run)
    monkeypatch.setattr(RunHistory, "events", search)
    monkeypatch.setattr(events, "parse_event", parse)
    watcher.look()
    watcher.remarks()
    assert asked
    assert all(kinds and "timeline" not in kinds for kinds in asked)
    assert not any(b"timeline" in line or b'"event":"step"' in line for line in parsed)
