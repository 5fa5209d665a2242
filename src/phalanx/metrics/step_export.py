"""Export of a run's steps, one row each, to tools that draw curves: TensorBoard, MLflow, W&B.

An export may be repeated: a small file in its folder holds the position reached, and only new steps are written. If a
run went back and repeated steps, the sink is informed first and undoes what it can.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from phalanx.errors import PhalanxError, mistake
from phalanx.io.files import write_text
from phalanx.io.values import integer, number, text
from phalanx.io.write_errors import write_failure
from phalanx.metrics import names
from phalanx.record.account.memberships import LayoutSpan, layout_spans
from phalanx.record.archive.history import RunHistory
from phalanx.record.run import Run
from phalanx.record.run_files import read_json

CHUNK = 1000  # steps read and written at once


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow:
    """The values after a step: `step` counts steps done, `values` are by OpenTelemetry name."""

    step: int
    t: float  # Unix seconds
    values: Mapping[str, float]


class TrackerSink(Protocol):
    """The target of an export."""

    where: Path

    def go_back(self, step: int) -> None:
        """Undo rows written before with more than `step` steps done."""

    def write(self, rows: Sequence[StepRow]) -> None:
        """Write at least one row; the first call opens the target."""

    def __enter__(self) -> TrackerSink: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportCursor:
    """The position of an export: the last step event and evaluation; `identity` is the sink's id of the run."""

    step: int = -1
    t: float = 0.0
    evaluated_t: float = 0.0
    identity: str = ""

    @classmethod
    def read(cls, path: Path) -> ExportCursor:
        """Read the position from its file; start at the beginning if the file is missing or damaged."""
        try:
            data = read_json(path)
        except PhalanxError:
            return cls()
        step, t, evaluated_t = integer(data, "step"), number(data, "t"), number(data, "evaluated_t")
        return cls(
            step=-1 if step is None else step,
            t=t or 0.0,
            evaluated_t=evaluated_t or 0.0,
            identity=text(data, "identity"),
        )

    def keep(self, path: Path) -> None:
        """Write the position to its file."""
        data = {"step": self.step, "t": self.t, "evaluated_t": self.evaluated_t, "identity": self.identity}
        write_text(path, json.dumps(data) + "\n", fix="name a writable folder")


def cursor_path(folder: Path, run: Run) -> Path:
    """Return the file with the position of a run's export into a folder."""
    return folder / f".phalanx-{run.name}.json"


class StepExporter:
    """Writes the new steps of a run to a sink at every call of `export`."""

    def __init__(self, run: Run, sink: TrackerSink, *, every: int = 1) -> None:
        self._history = RunHistory.open(run)
        self._segments: list[LayoutSpan] = []
        self._sink = sink
        self._every = every
        self._path = cursor_path(sink.where, run)
        self._cursor = ExportCursor.read(self._path)
        self.written = 0  # number of rows

    def export(self) -> None:
        """Write all steps that the sink does not have yet."""
        self._history.refresh()
        last, first = self._history.last_step, self._history.first_step
        if last is None or first is None:
            return
        self._segments = layout_spans(self._history.run, self._history)
        begin = self._first_to_export(first, last)
        if begin <= self._cursor.step:
            self._sink.go_back(begin)
        while begin <= last:
            end = min(last, begin + CHUNK - 1)
            self._export_chunk(begin, end, is_last=end == last)
            begin = end + 1

    def _export_chunk(self, begin: int, end: int, *, is_last: bool) -> None:
        events = list(self._history.steps(self._history.witness, begin, end))
        rows = [row for event in events if (row := self._step_row(event)) and row.step % self._every == 0]
        evaluated = list(self._evaluation_rows()) if is_last else []
        if rows or evaluated:
            self._sink.write(rows + evaluated)
        self.written += len(rows)
        newest = events[-1] if events else {}
        self._cursor = ExportCursor(
            step=end,
            t=number(newest, "t") or self._cursor.t,
            evaluated_t=max([self._cursor.evaluated_t, *(row.t for row in evaluated)]),
            identity=ExportCursor.read(self._path).identity,
        )
        self._cursor.keep(self._path)

    def _first_to_export(self, first: int, last: int) -> int:
        """Return the first step that was not exported: its event is younger than the last exported one."""
        if self._cursor.step < first:
            return first
        low, high = first, min(last, self._cursor.step) + 1
        while low < high:
            middle = (low + high) // 2
            events = self._history.steps(self._history.witness, middle, min(last, middle + CHUNK))
            event = next(iter(events), {})
            low, high = (middle + 1, high) if (number(event, "t") or 0.0) <= self._cursor.t else (low, middle)
        return low

    def _step_row(self, event: Mapping[str, Any]) -> StepRow | None:
        step, t = integer(event, "step"), number(event, "t")
        if step is None or t is None:
            return None
        values = {metric.name: number(event, metric.field) for metric in names.STEP}
        # The layout that did this step: a run may have several.
        segment = next((segment for segment in reversed(self._segments) if segment.first <= step), None)
        rate, scale = number(event, "tokens_per_s"), (segment.mfu_per_token if segment is not None else None)
        values[names.MFU.name] = rate * scale if rate is not None and rate >= 0.0 and scale is not None else None
        return StepRow(step=step + 1, t=t, values={name: value for name, value in values.items() if value is not None})

    def _evaluation_rows(self) -> Iterator[StepRow]:
        for event in self._history.events("evaluate"):
            step, t, loss = integer(event, "step"), number(event, "t"), number(event, "loss")
            if step is not None and loss is not None and t is not None and t > self._cursor.evaluated_t:
                yield StepRow(step=step, t=t, values={names.EVALUATION.name: loss})


def make_folder(folder: str) -> Path:
    """Return the folder, created if missing; raise SystemFailure if it cannot be created."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_failure(folder, error, fix="name a writable folder") from error
    return path


def require_library(module: str, *, extra: str, what: str) -> None:
    """Import a library; raise UserError with the pip command if it is missing."""
    try:
        import_module(module)
    except ImportError as error:
        missing = error.name or module
        raise mistake(
            what, f'needs the Python package "{missing}", which is not installed', fix=f"pip install 'phalanx[{extra}]'"
        ) from error
