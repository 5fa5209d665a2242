"""`phalanx scale sweep --on slurm`: one group of jobs, collected by repeating the command; nothing is trained twice."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import phalanx
from phalanx.api import launching
from phalanx.errors import UserError
from phalanx.launch.resource_request import LaunchRequest
from phalanx.launch.slurm import SlurmSystem
from phalanx.launch.system import CANCELLED, FAILED, RUNNING, WAITING, QueuedJob, Submitted
from phalanx.record.run import open_run
from phalanx.scale.run_points import read_run_losses
from phalanx.train.lone_rank import train_lone_rank

sys.path.append(str(Path(__file__).parents[1]))
from scale.test_sweep import JOB
from tiny_dataset import write_dataset


class WaitingRoom:
    """A scheduler that takes jobs, and says of each what the test decides."""

    name = "slurm"
    is_here = True

    def __init__(self) -> None:
        self.taken: list[list[LaunchRequest]] = []
        self.states: dict[str, str] = {}
        self.requeued: list[str] = []
        self.queue = ""

    def check(self, requests: Sequence[LaunchRequest], *, submits: bool = True) -> list[str]:
        return []

    def render(self, requests: Sequence[LaunchRequest]) -> dict[str, str]:
        return SlurmSystem({}).render(requests)

    def submit(self, requests: Sequence[LaunchRequest]) -> list[Submitted]:
        # Killed from here on, the sweep knows by its results which run folders are in the queue.
        sweep = Path(requests[0].run).parents[1]
        known = {json.loads(one.read_text())["folder"] for one in (sweep / "results").iterdir()}
        assert {Path(one.run).name for one in requests} <= known
        # A volume of the cluster is mounted around the sweep's folder, where there is room for the dataset too.
        assert {str(one.volume_folder) for one in requests} == {str(sweep.parent)}
        self.taken.append(list(requests))
        made = [Submitted(id=f"{len(self.taken)}_{place}", request=one) for place, one in enumerate(requests)]
        self.states |= {one.id: WAITING for one in made}
        return made

    def list_jobs(self, ids: Sequence[str] = ()) -> list[QueuedJob]:
        every = [
            (f"{call}_{place}", one) for call, asked in enumerate(self.taken, 1) for place, one in enumerate(asked)
        ]
        return [
            QueuedJob(
                id=id_,
                system=self.name,
                name=one.name,
                state=self.states[id_],
                said="",
                run=one.run,
                group=one.group,
                queue=self.queue,
            )
            for id_, one in every
            if not ids or id_ in ids
        ]

    def requeue(self, job: str) -> str:
        self.requeued.append(job)
        self.states[job] = WAITING
        return job


def test_a_group_is_submitted_once_and_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_dataset(tmp_path, documents=300)
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    room = WaitingRoom()
    monkeypatch.setattr(launching, "_open_system", lambda name: room)

    def sweep(*, dry_run: bool = False, queue: str | None = None) -> phalanx.scale.Sweep:
        return phalanx.scale.sweep(
            tmp_path / "job.toml",
            budgets=(1.2e9,),
            sizes=3,
            tokens_per_parameter=0.12,
            out=tmp_path / "sweep-a",
            on="slurm",
            queue=queue,
            dry_run=dry_run,
            progress=False,
        )

    dry = str(sweep(dry_run=True))
    assert "#SBATCH --array=0-2" in dry
    assert "--exclusive" not in dry
    assert not room.taken
    assert not (tmp_path / "sweep-a").exists()

    first = sweep()
    assert [len(one) for one in room.taken] == [3]
    assert {one.group for one in room.taken[0]} == {"sweep-a"}
    assert first.exit_code == 0
    assert "0 of 3 runs have ended" in str(first)

    trained, failed = room.taken[0][0], room.taken[0][1]
    assert train_lone_rank(open_run(trained.run), stop=lambda: False, sharers=8) == "done"
    room.states |= {"1_0": "done", "1_1": FAILED, "1_2": RUNNING}
    second = sweep()
    assert len(room.taken) == 1, "what waits or trains is not submitted again"
    assert room.requeued == ["1_1"], failed.name
    done = [one for one in second.outcomes if one.state == "done"]
    assert [one.folder for one in done] == [Path(trained.run).name]
    assert done[0].loss == pytest.approx(open_run(trained.run).summary().evaluation.loss)  # type: ignore[union-attr]
    assert "1 of 3 runs have ended" in str(second)

    # The record of a run says what the table says of its tokenizer and data.
    with (tmp_path / "sweep-a" / "points.csv").open(newline="") as file:
        row = next(one for one in csv.DictReader(file) if one["status"] == "done")
    recorded = read_run_losses(Path(trained.run), counted="total")
    assert (recorded.tokenizer, recorded.data) == (row["tokenizer"], row["data"])
    lines = [f"{n},{d},{2 + 9 / n**0.3 + 9 / d**0.3},foreign" for n in (1e3, 3e3, 9e3) for d in (1e3, 3e3, 9e3)]
    (tmp_path / "law.csv").write_text("\n".join(["params,tokens,loss,tokenizer", *lines]) + "\n")
    law = phalanx.scale.fit(tmp_path / "law.csv", draws=0)
    assert f"the law is of other tokenizer (foreign, here {row['tokenizer']})" in str(
        phalanx.scale.predict(law, trained.run)
    )

    # Gradients that break twice at the same step: divergence, which starting again does not mend.
    broken = open_run(room.taken[0][2].run)
    cause = {"kind": "Astray", "message": "the gradient was not finite", "signal": 0}
    incidents = [{"v": 1, "event": "incident", "t": 1.0, "rank": 0, "epoch": 1, "step": 7, "cause": cause}] * 2
    broken.supervisor.write_text("".join(f"{json.dumps(one)}\n" for one in incidents))
    (broken.path / "status.json").write_text('{"state": "failed"}')
    room.states |= {"1_1": CANCELLED, "1_2": FAILED}
    # Another queue, and nothing trained yet: submitted anew, not started again in the old one.
    room.queue = "old"
    third = sweep(queue="new")
    assert room.requeued == ["1_1"]
    assert [one.name for one in room.taken[1]] == [failed.name]
    states = {one.run.name: (one.state, one.message) for one in third.outcomes}
    assert states[room.taken[0][2].name] == ("diverged", "step 7: the gradient was not finite, twice")
    assert third.exit_code == 1


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"on": "moon"}, "is no system a sweep can be launched on"),
        ({"on": "slurm", "method": "wsd"}, "each run is a job of its own"),
        ({"on": "slurm", "parallel": 2}, "decides how many jobs run"),
        ({"queue": "cpu"}, "add --on slurm"),
    ],
)
def test_what_cannot_be_launched_is_refused(options: dict[str, object], what: str, tmp_path: Path) -> None:
    job = JOB.replace("lr = 1e-2", 'lr = 1e-2\nschedule = "wsd"')
    (tmp_path / "job.toml").write_text(job)
    with pytest.raises(UserError, match=what):
        phalanx.scale.sweep(
            tmp_path / "job.toml",
            **{  # type: ignore[arg-type]
                "budgets": (1.2e9, 2e9),
                "sizes": 3,
                "tokens_per_parameter": 0.12,
                "dry_run": True,
                "progress": False,
                **options,
            },
        )
