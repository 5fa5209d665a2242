"""Steps of a run as TensorBoard events, in an MLflow file store, and as an offline W&B run."""

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
    """Writes TensorBoard events, and purges undone steps.

    Tags are OpenTelemetry names with a slash, so that `train/loss` is grouped.
    """

    def __init__(self, run: Run, folder: Path) -> None:
        self.where = folder
        self._folder = folder / run.name
        # Opened on first use: an export without new steps leaves no empty file.
        self._writer: Any = None

    def _open_tracker(self) -> Any:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        return EventFileWriter(str(self._folder))

    def go_back(self, step: int) -> None:
        """Write a session mark, at which TensorBoard drops the later steps it has read."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._writer = self._writer or self._open_tracker()
        mark = SessionLog(status=SessionLog.START)
        # TensorBoard purges from this step on.
        self._writer.add_event(Event(step=step + 1, session_log=mark))

    def write(self, rows: Sequence[StepRow]) -> None:
        """Write one summary per row."""
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
    """Return a name in the form that TensorBoard and W&B group.

    >>> tensorboard_tag("train.grad.norm")
    'train/grad.norm'
    """
    return name.replace(".", "/", 1)


def open_tensorboard(run: Run, folder: str) -> TensorBoardSink:
    """Open a sink for one run; several runs may share a folder."""
    require_library("tensorboard.summary.writer.event_file_writer", extra="tensorboard", what="--tensorboard")
    return TensorBoardSink(run, make_folder(folder))


# ---- MLflow: one MLflow run per Phalanx run, continued by later exports ----------------------------------------------


EXPERIMENT = "phalanx"
MOST_BATCH = 1000  # metrics per call: MLflow's limit
MOST_PARAMETERS = 100  # parameters per call: MLflow's limit
MOST_VALUE = 500  # characters of a parameter


class MlflowSink:
    """Writes metrics by OpenTelemetry name. MLflow cannot delete a value: a repeated step is there twice."""

    def __init__(self, run: Run, folder: Path) -> None:
        from mlflow.tracking import MlflowClient

        self.where = folder
        self._client = MlflowClient(tracking_uri=folder.resolve().as_uri())
        path = cursor_path(folder, run)
        cursor = ExportCursor.read(path)
        self._id = cursor.identity if self._knows_run(cursor.identity) else self._begin_run(run)
        # If the run is not in the store, an older cursor refers to a store that was deleted.
        valid_cursor = cursor if self._id == cursor.identity else ExportCursor()
        replace(valid_cursor, identity=self._id).keep(path)

    def _knows_run(self, identity: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            return bool(identity and self._client.get_run(identity))
        except MlflowException:
            return False

    def _begin_run(self, run: Run) -> str:
        existing = self._client.get_experiment_by_name(EXPERIMENT)
        experiment = existing.experiment_id if existing else self._client.create_experiment(EXPERIMENT)
        created = self._client.create_run(experiment, run_name=run.name)
        for name, value in _job_parameters(run):
            self._client.log_param(created.info.run_id, name, value)
        return str(created.info.run_id)

    def go_back(self, step: int) -> None:
        """Do nothing: MLflow keeps every value, and shows the newest of a step last."""

    def write(self, rows: Sequence[StepRow]) -> None:
        """Write the rows in batches of at most MLflow's limit."""
        from mlflow.entities import Metric

        metrics: list[Any] = [
            Metric(key=name, value=value, timestamp=int(row.t * 1000), step=row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        for first in range(0, len(metrics), MOST_BATCH):
            self._client.log_batch(self._id, metrics=metrics[first : first + MOST_BATCH])

    def __enter__(self) -> MlflowSink:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.set_terminated(self._id)


def _job_parameters(run: Run) -> list[tuple[str, str]]:
    """Return the job as flat parameters: model.name, batch.sequences and so on."""
    flat = [
        (f"{section}.{key}", value)
        for section, table in at(plan_of(run), "job").items()
        for key, value in (table.items() if isinstance(table, dict) else ())
        if isinstance(value, str | int | float)
    ]
    return [(name, printable(value, most=MOST_VALUE)) for name, value in flat[:MOST_PARAMETERS]]


def open_mlflow(run: Run, folder: str) -> MlflowSink:
    """Open a sink for one run; several runs may share a folder."""
    # Environment variables, because MLflow reads them on import and offers no other way: send no usage statistics over
    # the network, and permit the file store.
    os.environ.update(MLFLOW_DISABLE_TELEMETRY="true", MLFLOW_ALLOW_FILE_STORE="true")
    require_library("mlflow.tracking", extra="mlflow", what="--mlflow")
    return MlflowSink(run, make_folder(folder))


# ---- W&B offline: DIR/wandb/offline-run-…, which `wandb sync` uploads ------------------------------------------------


STEP = "train/step"
MOST_ID = 64  # characters, W&B's limit


class WandbSink:
    """Writes each export as an offline run with the same id; W&B joins them when they are synced."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.where = folder
        self._source = run
        # Opened on first use: an export without new steps leaves no empty W&B run.
        self._run: Any = None

    def _open_tracker(self) -> Any:
        import wandb

        settings = wandb.Settings(
            mode="offline",
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            # No host names, command lines or environment variables.
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        wandb_run = wandb.init(
            project="phalanx",
            name=self._source.name,
            id=self._source.name[-MOST_ID:],
            dir=str(self.where.resolve()),
            config=dict(at(plan_of(self._source), "job")),
            settings=settings,
        )
        # W&B's step only grows; a Phalanx run may go back, so its step is a separate axis.
        wandb_run.define_metric(STEP)
        wandb_run.define_metric("*", step_metric=STEP)
        return wandb_run

    def go_back(self, step: int) -> None:
        """Do nothing: W&B keeps every row, so a repeated step is there twice."""

    def write(self, rows: Sequence[StepRow]) -> None:
        """Write one W&B row per step."""
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
    """Open a sink for one run; several runs may share a folder."""
    # Read when W&B is imported: its crash reports must not be sent over the network either.
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    require_library("wandb", extra="wandb", what="--wandb")
    return WandbSink(run, make_folder(folder))


OPENERS: dict[str, Callable[[Run, str], TrackerSink]] = {
    "tensorboard": open_tensorboard,
    "mlflow": open_mlflow,
    "wandb": open_wandb,
}
