"""The pods of a Kubernetes manifest as processes of this machine: the very command, key and variables of the manifest.

No cluster runs here: the loopback has the pods' addresses, and this test does what the Job controller would do.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from slurm_cluster import wait_for
from tiny_dataset import write_dataset
from tiny_job import ENDLESS, ON_KUBERNETES, tiny_job

import phalanx
from phalanx.record.events import read_events
from phalanx.record.run import Run

JOB = tiny_job(
    data=ENDLESS,
    parallel={"tensor": 1, "pipeline": 1, "shard": 1},
    fault={"dead_after_s": 8},
    launch={name: value for name, value in ON_KUBERNETES.items() if name != "on"},
    cluster={"spec": "local-cpu:2"},
)
REQUEUE = 75
ADDRESSES = ("127.0.0.1", "127.0.0.2")

pytestmark = pytest.mark.slow


class Pods:
    """Pods of one manifest, by number."""

    def __init__(self, manifest: str, folder: Path) -> None:
        documents = [one for one in yaml.safe_load_all(manifest) if one]
        [secret] = [one for one in documents if one["kind"] == "Secret"]
        [job] = [one for one in documents if one["kind"] == "JobSet"]
        template = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        [self._container] = template["spec"]["containers"]
        self._key = folder / "key"
        self._key.write_text(secret["stringData"]["secret"])
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, index: int, *, attempt: str = "0") -> None:
        """Begin a pod; its whole session is what a lost node would take along."""
        words = [sys.executable, *map(str, self._container["command"][1:])]  # the image's Python is ours
        words[words.index("--names") + 1] = ",".join(ADDRESSES)
        words[words.index("--key") + 1] = str(self._key)
        given = {one["name"]: one["value"] for one in self._container["env"] if "value" in one}
        environ = {**os.environ, **given, "JOB_COMPLETION_INDEX": str(index), "PHALANX_ATTEMPT": attempt}
        environ |= {"PHALANX_POD_IP": ADDRESSES[index], "HOME": os.environ.get("HOME", "/tmp"), "TMPDIR": "/tmp"}
        self._running[index] = subprocess.Popen(words, env=environ, start_new_session=True)

    def lose(self, index: int) -> None:
        """The node is gone: the pod and all it started, at once."""
        for process in reversed(self._family(self._running[index].pid)):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._running.pop(index).wait()

    def evict(self) -> dict[int, int]:
        """SIGTERM to every pod, as a preemption does; the exit codes."""
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)
        codes = {index: process.wait(timeout=300) for index, process in self._running.items()}
        self._running.clear()
        return codes

    def close(self) -> None:
        """End what is left."""
        for index in list(self._running):
            self.lose(index)

    def _family(self, root: int) -> list[int]:
        """A process and all below it."""
        found = [root]
        for one in found:
            with suppress(OSError):
                for thread in Path(f"/proc/{one}/task").iterdir():
                    found += [int(child) for child in (thread / "children").read_text().split()]
        return found


@contextmanager
def pods_of(run: Run, folder: Path) -> Iterator[Pods]:
    pods = Pods((run.path / "kubernetes.yaml").read_text(), folder)
    try:
        yield pods
    finally:
        pods.close()


def supervisor_events(run: Run, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run.supervisor)[0] if event["event"] == kind]


def joined_hosts(run: Run) -> int:
    return sum(event["state"] == "joined" for event in supervisor_events(run, "host"))


def restored_steps(run: Run) -> list[int]:
    return [event["step"] for event in supervisor_events(run, "restore")]


def last_step(run: Run) -> int:
    return max((int(event["step"]) for event in read_events(run.events(0))[0] if event["event"] == "step"), default=-1)


def test_a_lost_pod_comes_back_and_preempted_pods_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_dataset(tmp_path, documents=2500)
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data-home"))
    monkeypatch.chdir(tmp_path)
    done = phalanx.launch("job.toml", on="k8s", hosts=2, runs=tmp_path, progress=False, check=False, submit=False)
    [job], run = done.ids, Run(path=Path(done.requests[0].run))
    assert phalanx.why(job).explanation.reason == "no pod has begun"
    assert [(one.state, one.said) for one in phalanx.queue().jobs] == [("waiting", "manifests written")]
    with pods_of(run, tmp_path) as pods:
        pods.start(1)  # waits for number 0, which makes the run ready
        pods.start(0)
        wait_for(lambda: run.events(0).exists() and last_step(run) >= 3, "steps of two pods", patience_s=600)
        assert [one.state for one in phalanx.queue().jobs] == ["running"]
        assert run.launch()["addresses"] == list(ADDRESSES)

        pods.lose(1)
        pods.start(1)
        wait_for(lambda: joined_hosts(run) >= 3, "the lost pod to join again", patience_s=600)
        assert supervisor_events(run, "incident")
        wait_for(lambda: supervisor_events(run, "epoch")[-1]["world"] == 2, "both pods to train", patience_s=600)
        steps = last_step(run)
        wait_for(lambda: last_step(run) > steps + 2, "steps after the loss", patience_s=600)

        assert pods.evict() == {0: REQUEUE, 1: REQUEUE}  # which the manifest's failure policy ignores
        saved = run.saved_steps()[-1]
        assert saved > steps

        for index in (0, 1):
            pods.start(index, attempt="1")
        wait_for(lambda: restored_steps(run)[-1] == saved, "the preempted run to go on", patience_s=600)
        wait_for(lambda: last_step(run) > saved, "steps after the preemption", patience_s=600)
