"""Steps of a run as TensorBoard events, in an MLflow file store, and as an offline W&B run, by their own libraries."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.io.values import at, printable
from phalanx.metrics.readings import plan_of
from phalanx.metrics.step_export import ExportCursor, StepRow, TrackerSink, cursor_path, make_folder, require_library
from phalanx.record.run import Run


class TensorBoardSink:
    """Tags are OpenTelemetry names with a slash, so that `train/loss` is grouped; undone steps are purged."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.where = folder
        self._folder = folder / run.name
        self._writer: Any = None  # an export without news leaves no empty file behind

    def _open_tracker(self) -> Any:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        return EventFileWriter(str(self._folder))

    def go_back(self, step: int) -> None:
        """TensorBoard drops what it read of later steps when it meets this mark."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._writer = self._writer or self._open_tracker()
        mark = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(step=step + 1, session_log=mark))  # it purges from this step on

    def write(self, rows: Sequence[StepRow]) -> None:
        """One summary per row."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._writer = self._writer or self._open_tracker()
        for row in rows:
            values = [
                Summary.Value(tag=tensorboard_tag(name), simple_value=value) for name, value in row.values.items()
            ]
            self._writer.add_event(Event(wall_time=row.t, step=row.step, summary=Summary(value=values)))
        self._writer.flush()

    def __enter__(self) -> TensorBoardSink:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()


def tensorboard_tag(name: str) -> str:
    """A name as TensorBoard and W&B group it.

    >>> tensorboard_tag("train.grad.norm")
    'train/grad.norm'
    """
    return name.replace(".", "/", 1)


def open_tensorboard(run: Run, folder: str) -> TensorBoardSink:
    """A sink for one run; several runs may share a folder."""
    require_library("tensorboard.summary.writer.event_file_writer", extra="tensorboard", what="--tensorboard")
    return TensorBoardSink(run, make_folder(folder))


# ---- MLflow: one MLflow run per run of ours, taken up again ----------------------------------------------------------


EXPERIMENT = "phalanx"
MOST_BATCH = 1000  # metrics of one call: MLflow's own limit
MOST_PARAMETERS = 100  # likewise, and of what a job has
MOST_VALUE = 500  # characters of a parameter


class MlflowSink:
    """Metrics by OpenTelemetry name. MLflow cannot take a value back: a step done again is there twice."""

    def __init__(self, run: Run, folder: Path) -> None:
        from mlflow.tracking import MlflowClient

        self.where = folder
        self._client = MlflowClient(tracking_uri=folder.resolve().as_uri())
        path = cursor_path(folder, run)
        cursor = ExportCursor.read(path)
        self._id = cursor.identity if self._knows_run(cursor.identity) else self._begin_run(run)
        # Without a run of ours there, an older cursor is about a store that was deleted.
        kept = cursor if self._id == cursor.identity else ExportCursor()
        replace(kept, identity=self._id).keep(path)

    def _knows_run(self, identity: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            return bool(identity and self._client.get_run(identity))
        except MlflowException:
            return False

    def _begin_run(self, run: Run) -> str:
        found = self._client.get_experiment_by_name(EXPERIMENT)
        experiment = found.experiment_id if found else self._client.create_experiment(EXPERIMENT)
        made = self._client.create_run(experiment, run_name=run.name)
        for name, value in _job_parameters(run):
            self._client.log_param(made.info.run_id, name, value)
        return str(made.info.run_id)

    def go_back(self, step: int) -> None:
        """Nothing can be done: MLflow keeps every value, and shows the newest of a step last."""

    def write(self, rows: Sequence[StepRow]) -> None:
        """In batches as large as MLflow allows."""
        from mlflow.entities import Metric

        found: list[Any] = [
            Metric(key=name, value=value, timestamp=int(row.t * 1000), step=row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        for first in range(0, len(found), MOST_BATCH):
            self._client.log_batch(self._id, metrics=found[first : first + MOST_BATCH])

    def __enter__(self) -> MlflowSink:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.set_terminated(self._id)


def _job_parameters(run: Run) -> list[tuple[str, str]]:
    """The job, flat: model.name, batch.sequences and so on."""
    flat = [
        (f"{section}.{key}", value)
        for section, table in at(plan_of(run), "job").items()
        for key, value in (table.items() if isinstance(table, dict) else ())
        if isinstance(value, str | int | float)
    ]
    return [(name, printable(value, most=MOST_VALUE)) for name, value in flat[:MOST_PARAMETERS]]


def open_mlflow(run: Run, folder: str) -> MlflowSink:
    """A sink for one run; several runs may share a folder."""
    # Read when MLflow is imported, and there is no other way to say so: no usage statistics over the network, and yes,
    # the file store is meant.
    os.environ.update(MLFLOW_DISABLE_TELEMETRY="true", MLFLOW_ALLOW_FILE_STORE="true")
    require_library("mlflow.tracking", extra="mlflow", what="--mlflow")
    return MlflowSink(run, make_folder(folder))


# ---- W&B without network: DIR/wandb/offline-run-…; `wandb sync` uploads it -------------------------------------------


STEP = "train/step"
MOST_ID = 64  # characters, as W&B has it


class WandbSink:
    """Each export is an offline run with the same id, which W&B joins when they are synced."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.where = folder
        self._source = run
        self._run: Any = None  # an export without news leaves no empty W&B run behind

    def _open_tracker(self) -> Any:
        import wandb

        settings = wandb.Settings(
            mode="offline",
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            x_disable_meta=True,  # neither host names nor command lines nor the environment
            x_disable_stats=True,
            x_save_requirements=False,
        )
        made = wandb.init(
            project="phalanx",
            name=self._source.name,
            id=self._source.name[-MOST_ID:],
            dir=str(self.where.resolve()),
            config=dict(at(plan_of(self._source), "job")),
            settings=settings,
        )
        # W&B's own step only grows; ours goes back with the run, so it is an axis of its own.
        made.define_metric(STEP)
        made.define_metric("*", step_metric=STEP)
        return made

    def go_back(self, step: int) -> None:
        """Nothing can be done: W&B keeps every row, and a step done again is there twice."""

    def write(self, rows: Sequence[StepRow]) -> None:
        """One W&B row per step."""
        self._run = self._run or self._open_tracker()
        for row in rows:
            self._run.log(
                {STEP: row.step, "_timestamp": row.t}
                | {tensorboard_tag(name): value for name, value in row.values.items()}
            )

    def __enter__(self) -> WandbSink:
        return self

    def __exit__(self, *_: object) -> None:
        if self._run is not None:
            self._run.finish()


def open_wandb(run: Run, folder: str) -> WandbSink:
    """A sink for one run; several runs may share a folder."""
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # read when W&B is imported: not even its crashes go over the network
    require_library("wandb", extra="wandb", what="--wandb")
    return WandbSink(run, make_folder(folder))


OPENERS: dict[str, Callable[[Run, str], TrackerSink]] = {
    "tensorboard": open_tensorboard,
    "mlflow": open_mlflow,
    "wandb": open_wandb,
}
