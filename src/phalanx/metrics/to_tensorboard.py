"""TensorBoard event files, written with TensorBoard's own writer: DIR/RUN/events.out.tfevents.…"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.metrics.need import need
from phalanx.metrics.steps import Row, made_folder
from phalanx.record.run import Run


class TensorBoardSink:
    """Tags are OpenTelemetry names with a slash, so that `train/loss` is grouped; undone steps are purged."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.where = folder
        self._folder = folder / run.name
        self._writer: Any = None  # an export without news leaves no empty file behind

    def _opened(self) -> Any:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        return EventFileWriter(str(self._folder))

    def go_back(self, step: int) -> None:
        """TensorBoard drops what it read of later steps when it meets this mark."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._writer = self._writer or self._opened()
        mark = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(step=step + 1, session_log=mark))  # it purges from this step on

    def write(self, rows: Sequence[Row]) -> None:
        """One summary per row."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._writer = self._writer or self._opened()
        for row in rows:
            values = [Summary.Value(tag=tag(name), simple_value=value) for name, value in row.values.items()]
            self._writer.add_event(Event(wall_time=row.t, step=row.step, summary=Summary(value=values)))
        self._writer.flush()

    def __enter__(self) -> TensorBoardSink:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()


def tag(name: str) -> str:
    """A name as TensorBoard and W&B group it.

    >>> tag("train.grad.norm")
    'train/grad.norm'
    """
    return name.replace(".", "/", 1)


def open_sink(run: Run, folder: str) -> TensorBoardSink:
    """A sink for one run; several runs may share a folder."""
    need("tensorboard.summary.writer.event_file_writer", extra="tensorboard", what="--tensorboard")
    return TensorBoardSink(run, made_folder(folder))
