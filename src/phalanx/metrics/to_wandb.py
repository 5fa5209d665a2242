"""A W&B run without network, written with W&B's own library: DIR/wandb/offline-run-…; `wandb sync` uploads it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.io.values import at
from phalanx.metrics.need import need
from phalanx.metrics.readings import plan_of
from phalanx.metrics.steps import Row, made_folder
from phalanx.metrics.to_tensorboard import tag
from phalanx.record.run import Run

STEP = "train/step"
MOST_ID = 64  # characters, as W&B has it


class WandbSink:
    """Each export is an offline run with the same id, which W&B joins when they are synced."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.where = folder
        self._source = run
        self._run: Any = None  # an export without news leaves no empty W&B run behind

    def _opened(self) -> Any:
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

    def write(self, rows: Sequence[Row]) -> None:
        """One W&B row per step."""
        self._run = self._run or self._opened()
        for row in rows:
            self._run.log(
                {STEP: row.step, "_timestamp": row.t} | {tag(name): value for name, value in row.values.items()}
            )

    def __enter__(self) -> WandbSink:
        return self

    def __exit__(self, *_: object) -> None:
        if self._run is not None:
            self._run.finish()


def open_sink(run: Run, folder: str) -> WandbSink:
    """A sink for one run; several runs may share a folder."""
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # read when W&B is imported: not even its crashes go over the network
    need("wandb", extra="wandb", what="--wandb")
    return WandbSink(run, made_folder(folder))
