"""Live updates of runs as server-sent events: one watch per run polls its files, for any number of clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from anyio import to_thread

from phalanx.web.answer import AnswerParts, Json, encode_answer
from phalanx.web.run_store import GOING, Mark, RunStore, run_stamp, state_of
from phalanx.web.run_views import mark_count, plan_of, run_progress

POLL_S = 0.5
KEEP_ALIVE_S = 15.0
# A browser opens at most six per server, so this is enough for ten users.
MOST_STREAMS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class RunNews:
    """The state of a run that clients are updated on."""

    progress: Json
    marks: int
    is_over: bool

    @property
    def id(self) -> str:
        """The id that a browser sends back as Last-Event-ID when it reconnects."""
        return f"{self.progress.get('step') or 0}-{self.marks}"


def read_news(store: RunStore, name: str) -> RunNews:
    """Read the state of a run; damaged parts are left out, never an error."""
    parts, run = AnswerParts(), store.run(name)
    state, live = state_of(run)
    with store.history(name) as history:
        now = parts.read("steps", lambda: run_progress(run, plan_of(run), history), {"state": state, "live": live})
        marks = parts.read("marks", lambda: mark_count(history), 0)
    # Silence alone does not end a run: a step may take minutes. `live` has the server's judgement.
    return RunNews(progress=now, marks=marks, is_over=state not in GOING)


@dataclass(slots=True)
class _Watch:
    """The newest known state of a run, and the task that updates it."""

    listeners: int = 0
    news: RunNews | None = None
    seen: Mark | None = None
    task: asyncio.Task[None] | None = None
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)


class NewsHub:
    """Distributes updates to streams. Every method runs in the server's event loop."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._watches: dict[str, _Watch] = {}
        self._streams = 0
        self._closing = asyncio.Event()

    @property
    def is_full(self) -> bool:
        """True if no further stream is accepted."""
        return self._streams >= MOST_STREAMS or self._closing.is_set()

    def close(self) -> None:
        """End all streams, so that the server can stop."""
        self._closing.set()

    async def stream(self, name: str, last_id: str = "") -> AsyncIterator[bytes]:
        """Yield server-sent events of a run until it is over; `last_id` is the last id that the client received."""
        self._streams += 1
        watch = self._join_watch(name)
        try:
            async for chunk in self._tell_news(watch, last_id):
                yield chunk
        finally:
            self._streams -= 1
            watch.listeners -= 1
            if not watch.listeners and watch.task is not None:
                watch.task.cancel()
                self._watches.pop(name, None)

    async def _tell_news(self, watch: _Watch, last_id: str) -> AsyncIterator[bytes]:
        yield b"retry: 2000\n\n"
        sent: RunNews | None = None
        while not self._closing.is_set():
            news = await self._next_news(watch, sent)
            if news is None:
                yield b": still here\n\n"
                continue
            marks_before = sent.marks if sent else _marks_of(last_id)
            if sent is None or news.progress != sent.progress:
                yield self._stream_message("progress", news.progress, news)
            if news.marks != marks_before:
                yield self._stream_message("marks", {"count": news.marks}, news)
            sent = news
            if news.is_over:
                yield self._stream_message("end", {"state": news.progress.get("state")}, news)
                return

    def _stream_message(self, event: str, data: Json, news: RunNews) -> bytes:
        """Return one server-sent event; JSON contains no raw line breaks, so the data is always one line."""
        return b"event: %s\nid: %s\ndata: %s\n\n" % (
            event.encode(),
            news.id.encode(),
            encode_answer(data, root=self._store.root),
        )

    async def _next_news(self, watch: _Watch, sent: RunNews | None) -> RunNews | None:
        """Return news that differ from those sent, or None when a keep-alive is due or the hub is closing."""
        async with watch.changed:
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await watch.changed.wait_for(
                        lambda: (watch.news is not None and watch.news != sent) or self._closing.is_set()
                    )
            except TimeoutError:
                return None
            return None if self._closing.is_set() else watch.news

    def _join_watch(self, name: str) -> _Watch:
        watch = self._watches.setdefault(name, _Watch())
        watch.listeners += 1
        if watch.task is None:
            watch.task = asyncio.create_task(self._poll_run(name, watch))
        return watch

    async def _poll_run(self, name: str, watch: _Watch) -> None:
        while not self._closing.is_set():
            await self._look_once(name, watch)
            try:
                async with asyncio.timeout(POLL_S):
                    await self._closing.wait()
            except TimeoutError:
                continue
        async with watch.changed:
            watch.changed.notify_all()

    async def _look_once(self, name: str, watch: _Watch) -> None:
        try:
            stamp = await to_thread.run_sync(_run_stamp, self._store, name)
            if stamp == watch.seen and watch.news is not None:
                return
            news = await to_thread.run_sync(read_news, self._store, name)
        # The run was deleted: clients receive that it is over.
        except Exception:
            stamp, news = None, RunNews(progress={"state": "deleted", "live": False}, marks=0, is_over=True)
        async with watch.changed:
            watch.seen, watch.news = stamp, news
            watch.changed.notify_all()


def _run_stamp(store: RunStore, name: str) -> tuple[Any, ...]:
    run = store.run(name)
    return (*run_stamp(run), state_of(run))


def _marks_of(last_id: str) -> int:
    """Return the count of marks in an event id; -1 if it is not a valid id."""
    _, _, count = last_id.partition("-")
    return int(count) if count.isascii() and count.isdigit() and len(count) < 12 else -1
