"""News as they are written: server-sent events over a real socket."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from dashboard import Dashboard, dashboard
from synthetic import write_run

from phalanx.record.run import Run

pytest.importorskip("uvicorn")


class Listener:
    """Reads a stream message by message."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response

    def next(self) -> dict[str, Any]:
        """The next message; comments have the name "comment", the end of the stream "closed"."""
        found: dict[str, Any] = {}
        while True:
            line = self._response.readline().decode()
            if not line:
                return {"event": "closed"}
            if line == "\n":
                if found:
                    return found
                continue
            name, _, value = line.rstrip("\n").partition(": ")
            found[name or "comment"] = json.loads(value) if name == "data" else value

    def until(self, event: str) -> dict[str, Any]:
        """The next message of that name."""
        while (found := self.next()).get("event") != event:
            assert found.get("event") != "closed", f"closed before {event}"
        return found


@contextmanager
def listening(page: Dashboard, name: str, **headers: str) -> Iterator[Listener]:
    caller = http.client.HTTPConnection("127.0.0.1", page.port, timeout=120)
    try:
        caller.request("GET", f"/api/runs/{name}/stream", headers={k.replace("_", "-"): v for k, v in headers.items()})
        response = caller.getresponse()
        assert response.status == 200
        yield Listener(response)
    finally:
        caller.close()


def append(run: Run, **event: Any) -> None:
    with run.events(0).open("a") as file:
        file.write(json.dumps({"v": 1, "t": time.time(), "rank": 0, **event}) + "\n")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return write_run(tmp_path, name="live", ranks=2, steps=30, finished=False, incidents=0)


def test_steps_and_marks_arrive_as_they_are_written_and_the_end_ends_it(run: Run) -> None:
    with dashboard(run.path.parent) as page, listening(page, "live") as stream:
        first = stream.until("progress")["data"]
        assert (first["step"], first["steps"], first["state"], first["live"]) == (30, 60, "running", True)
        assert first["tokens_per_s"] > 0
        assert first["left_s"] > 0
        count = stream.until("marks")["data"]["count"]
        append(run, event="step", step=30, loss=1.5, tokens=1000, duration_s=0.5)
        assert stream.until("progress")["data"]["loss"] == 1.5
        append(run, event="evaluate", step=31, loss=1.25)
        assert stream.until("marks")["data"]["count"] == count + 1
        assert page.json("/api/runs/live/marks")["count"] == count + 1
        assert page.json("/api/runs/live")["summary"]["state"] == "running"
        run.set_status("done")
        assert stream.until("end")["data"] == {"state": "done"}
        assert stream.next()["event"] == "closed"
        while not (found := page.json("/api/runs/live"))["settled"]:
            time.sleep(0.1)
        assert found["summary"]["state"] == "done"  # not what was kept from a moment ago


def test_whoever_comes_back_is_told_what_was_missed(run: Run) -> None:
    with dashboard(run.path.parent) as page:
        with listening(page, "live") as stream:
            last_id = stream.until("marks")["id"]
        with listening(page, "live", Last_Event_ID=last_id) as stream:
            assert stream.until("progress")["data"]["step"] == 30
            append(run, event="step", step=30, loss=1.5)
            assert stream.next()["event"] == "progress"  # and no marks: it had those
        append(run, event="evaluate", step=31, loss=1.25)
        with listening(page, "live", Last_Event_ID=last_id) as stream:
            assert stream.until("marks")["id"] != last_id
        for odd in ("", "x", "1-2-3", "9" * 400, "-", "5-²"):
            with listening(page, "live", Last_Event_ID=odd.encode("utf-8").decode("latin-1")) as stream:
                stream.until("marks")


def test_many_listeners_share_one_look(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    from phalanx.web import event_stream as module

    read = module.read_news
    monkeypatch.setattr(module, "read_news", lambda store, name: looks.append(name) or read(store, name))
    with dashboard(run.path.parent) as page:
        with listening(page, "live") as one, listening(page, "live") as two, listening(page, "live") as three:
            for listener in (one, two, three):
                listener.until("progress")
            time.sleep(1.2)
        assert len(looks) <= 2  # nothing was written: the files' sizes alone were looked at


def test_a_quiet_stream_shows_signs_of_life(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.web.event_stream.KEEP_ALIVE_S", 0.2)
    with dashboard(run.path.parent) as page, listening(page, "live") as stream:
        stream.until("marks")
        assert stream.next() == {"comment": "still here"}


def test_too_many_streams_are_refused_and_closed_ones_make_room(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.web.event_stream.MOST_STREAMS", 2)
    monkeypatch.setattr("phalanx.web.event_stream.KEEP_ALIVE_S", 0.2)
    with dashboard(run.path.parent) as page:
        with listening(page, "live") as one, listening(page, "live") as two:
            one.until("progress")
            two.until("progress")
            assert page.get("/api/runs/live/stream").status == 503
        end = time.monotonic() + 300
        while page.get("/api/runs/live/stream", method="HEAD").status == 503:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_open_streams_end_with_the_server_and_properly(run: Run) -> None:
    with ExitStack() as callers:
        with dashboard(run.path.parent) as page:
            streams = [callers.enter_context(socket.create_connection(("127.0.0.1", page.port), 20)) for _ in range(5)]
            told = [b""] * len(streams)
            for number, stream in enumerate(streams):
                stream.sendall(b"GET /api/runs/live/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
                while b"event: marks" not in told[number]:
                    told[number] += stream.recv(65536)
        for number, stream in enumerate(streams):
            while data := stream.recv(65536):
                told[number] += data
    assert all(one.endswith(b"\r\n0\r\n\r\n") for one in told)  # the last chunk: not cut off
    assert not any(b"event: end" in one for one in told)  # the run goes on


def test_a_run_that_is_deleted_ends_its_stream(run: Run, tmp_path: Path) -> None:
    with dashboard(run.path.parent) as page, listening(page, "live") as stream:
        stream.until("marks")
        run.path.rename(tmp_path / "elsewhere")
        assert stream.until("end")["data"] == {"state": "deleted"}
