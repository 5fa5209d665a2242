"""An MLflow file store, written with MLflow's own client: one MLflow run per run of ours, taken up again by its id."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.io.values import at, printable
from phalanx.metrics.need import need
from phalanx.metrics.readings import plan_of
from phalanx.metrics.steps import Cursor, Row, cursor_path, made_folder
from phalanx.record.run import Run

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
        cursor = Cursor.read(path)
        self._id = cursor.identity if self._knows(cursor.identity) else self._begin(run)
        # Without a run of ours there, an older cursor is about a store that was deleted.
        kept = cursor if self._id == cursor.identity else Cursor()
        replace(kept, identity=self._id).keep(path)

    def _knows(self, identity: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            return bool(identity and self._client.get_run(identity))
        except MlflowException:
            return False

    def _begin(self, run: Run) -> str:
        found = self._client.get_experiment_by_name(EXPERIMENT)
        experiment = found.experiment_id if found else self._client.create_experiment(EXPERIMENT)
        made = self._client.create_run(experiment, run_name=run.name)
        for name, value in _parameters(run):
            self._client.log_param(made.info.run_id, name, value)
        return str(made.info.run_id)

    def go_back(self, step: int) -> None:
        """Nothing can be done: MLflow keeps every value, and shows the newest of a step last."""

    def write(self, rows: Sequence[Row]) -> None:
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


def _parameters(run: Run) -> list[tuple[str, str]]:
    """The job, flat: model.name, batch.sequences and so on."""
    flat = [
        (f"{section}.{key}", value)
        for section, table in at(plan_of(run), "job").items()
        for key, value in (table.items() if isinstance(table, dict) else ())
        if isinstance(value, str | int | float)
    ]
    return [(name, printable(value, most=MOST_VALUE)) for name, value in flat[:MOST_PARAMETERS]]


def open_sink(run: Run, folder: str) -> MlflowSink:
    """A sink for one run; several runs may share a folder."""
    # Read when MLflow is imported, and there is no other way to say so: no usage statistics over the network, and yes,
    # the file store is meant.
    os.environ.update(MLFLOW_DISABLE_TELEMETRY="true", MLFLOW_ALLOW_FILE_STORE="true")
    need("mlflow.tracking", extra="mlflow", what="--mlflow")
    return MlflowSink(run, made_folder(folder))
