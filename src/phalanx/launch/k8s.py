"""Kubernetes as a launch system: the run folder is made, the manifests are written; kubectl applies them."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from phalanx.errors import Problem, UserError, mistake
from phalanx.io.files import replace_bytes
from phalanx.launch.book import find_record, read_records
from phalanx.launch.manifests import FLAVOURS, render_dstack, render_manifests, render_skypilot
from phalanx.launch.pod_template import object_name
from phalanx.launch.request import LaunchRequest
from phalanx.launch.system import CANCELLED, DONE, FAILED, RUNNING, WAITING, JobExplanation, QueuedJob, Submitted
from phalanx.record.run import open_run
from phalanx.record.secret import SECRET_BYTES

MANIFEST = "kubernetes.yaml"  # in the run folder
EXPORTS = {"skypilot": render_skypilot, "dstack": render_dstack}
ALL_FLAVOURS = (*FLAVOURS, *EXPORTS)
LABEL = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
UNTOUCHED = ("", "created")  # what a run says that no pod has made ready
STATES = {"done": DONE, "failed": FAILED, "stopped": CANCELLED, **dict.fromkeys(UNTOUCHED, WAITING)}


class KubernetesSystem:
    """Manifests of jobs. The cluster itself is not asked: states come from the run folder."""

    name = "k8s"
    is_here = True  # manifests are made anywhere, and checked also in a dry run

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def check(self, requests: Sequence[LaunchRequest]) -> list[str]:
        """What the manifests need is said."""
        problems, remarks = [], []
        for request in requests:
            settings = request.settings
            flavour = settings.flavour or "jobset"
            if flavour in EXPORTS:
                continue
            for key, value, why in (
                ("image", settings.image, "pods run a container image with Phalanx in it"),
                ("claim", settings.claim, "all pods see the run folder on a volume that many nodes may write"),
            ):
                if not value:
                    problems.append(
                        Problem(
                            where=f"launch.{key}",
                            what="is not set, and Kubernetes needs it",
                            why=why,
                            fix=f"--set launch.{key}=… or {key} in launch.toml",
                        )
                    )
            problems += [
                Problem(
                    where="launch.topology", what=f"{label[:60]!r} is no label of a node", fix="such as topology/rack"
                )
                for label in settings.topology
                if not LABEL.fullmatch(label)
            ]
            if settings.mounts:
                what = "mounts folders of the host, which pods of this profile may not"
                problems.append(Problem(where="launch.mounts", what=what, fix="put the data on the claim"))
            if not settings.queue:
                remarks.append(f"{request.name}: no --queue, so Kueue neither counts nor places it")
            if settings.host_network:
                remarks.append(f"{request.name}: in the network of its nodes, where no NetworkPolicy holds")
        names = [object_name(request) for request in requests]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            problems.append(
                Problem(where=twice[0], what="would be the name of two jobs in Kubernetes", fix="use --name or --group")
            )
        if problems:
            raise UserError(list({problem.render(): problem for problem in problems}.values()))
        return remarks

    def render(self, requests: Sequence[LaunchRequest]) -> dict[str, str]:
        """A file per job, without the run's key."""
        texts = {}
        for request in requests:
            flavour = request.settings.flavour or "jobset"
            if flavour in EXPORTS:
                ending = "sky.yaml" if flavour == "skypilot" else "dstack.yml"
                texts[f"{object_name(request)}.{ending}"] = EXPORTS[flavour](request)
            else:
                texts[f"{object_name(request)}.yaml"] = render_manifests(request)
        return texts

    def submit(self, requests: Sequence[LaunchRequest]) -> list[Submitted]:
        """Write the manifests into the run folders, with the key, for their owner alone."""
        for request in requests:
            run = Path(request.run)
            flavour = request.settings.flavour or "jobset"
            if flavour in EXPORTS:
                text = EXPORTS[flavour](request)
            else:
                text = render_manifests(request, secret=secrets.token_hex(SECRET_BYTES))
            replace_bytes(run / MANIFEST, text.encode(), mode=0o600)
        return [Submitted(id=object_name(request), request=request) for request in requests]

    def list_jobs(self, ids: Sequence[str] = ()) -> list[QueuedJob]:
        """Jobs whose run folders are still there, with what the runs say of themselves."""
        found = []
        for record in read_records(self._environ, system=self.name):
            if ids and record.id not in ids:
                continue
            with suppress(UserError):
                said = str(open_run(record.run).status().get("state") or "")
                found.append(
                    QueuedJob(
                        id=record.id,
                        system=self.name,
                        name=record.name,
                        state=STATES.get(said, RUNNING),
                        said="manifests written" if said in UNTOUCHED else said,
                        queue=record.queue,
                        run=record.run,
                        group=record.group,
                    )
                )
        return found

    def explain(self, job: str) -> JobExplanation:
        """What the run folder knows; the rest kubectl does."""
        record = find_record(job, self._environ, system=self.name)
        run = open_run(record.run)
        said = str(run.status().get("state") or "")
        state = STATES.get(said, RUNNING)
        if said in UNTOUCHED:
            reason, cure = "no pod has begun", f"kubectl apply --server-side -f {run.path / MANIFEST}, if not done yet"
        else:
            reason, cure = f"the run says {said}", f"kubectl get jobset,pods -l phalanx.run={record.id}"
        return JobExplanation(id=record.id, state=state, reason=reason, cure=cure)

    def logs(self, job: str) -> list[str]:
        """Logs that agents wrote into the run folder."""
        run = open_run(find_record(job, self._environ, system=self.name).run)
        return [str(path) for path in sorted((run.path / "logs").glob("agent*.log"))]

    def cancel(self, job: str) -> None:
        """Not from here: this version does not talk to the cluster."""
        raise self._by_kubectl(job, "delete")

    def requeue(self, job: str) -> str:
        """Not from here: this version does not talk to the cluster."""
        raise self._by_kubectl(job, "replace --force")

    def _by_kubectl(self, job: str, verb: str) -> UserError:
        record = find_record(job, self._environ, system=self.name)
        what = "this version writes manifests and does not talk to the cluster"
        return mistake(record.id, what, fix=f"kubectl {verb} -f {Path(record.run) / MANIFEST}")
