"""Kubernetes as a launch system: apply manifests server-side, all or none, and read states, reasons and logs.

All objects of a job carry the label `phalanx.run`; the main object owns the others, so they are deleted with it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from phalanx.errors import PhalanxError, Problem, SystemFailure, UserError, mistake
from phalanx.io.files import replace_bytes
from phalanx.io.values import text
from phalanx.launch.book import LaunchRecord, find_record, read_records
from phalanx.launch.folder_answer import explain_from_folder
from phalanx.launch.kube.access import has_access, read_access
from phalanx.launch.kube.client import Document, KubeClient, KubeRefusal, kind_path, object_path, plural_of
from phalanx.launch.kube.job_objects import (
    MAIN_KINDS,
    MANIFEST,
    grace_s,
    job_shape,
    main_document,
    main_path,
    read_manifest,
    said_to_be_cancelled,
)
from phalanx.launch.kube.preflight import KUEUE, check_cluster
from phalanx.launch.kube.refusals import explain_refusal
from phalanx.launch.kube.settings_check import EXPORTS, NAMESPACE, check_settings
from phalanx.launch.kube.wait_reasons import KubeFacts, explain_job, find_workload, job_state
from phalanx.launch.manifests import render_manifests
from phalanx.launch.pod import READY
from phalanx.launch.pod_template import RUN_LABEL, object_name
from phalanx.launch.resource_request import LaunchRequest
from phalanx.launch.system import (
    CANCELLED,
    DONE,
    FAILED,
    OVER,
    RUNNING,
    WAITING,
    WANTS_TO_GO_ON,
    JobExplanation,
    QueuedJob,
    Submitted,
)
from phalanx.record.run import Run, open_run
from phalanx.record.run_files import read_json, write_json
from phalanx.record.secret import SECRET_BYTES
from phalanx.units import plural

PLACE = "kubernetes.json"  # in the run folder: the cluster and namespace it was submitted to
# Followed by a token of the launch, so that values that two launches set differently conflict.
MANAGER = "phalanx-"
UNTOUCHED = ("", "created")  # states of a run that no pod has made ready
STATES = {"done": DONE, "failed": FAILED, "stopped": CANCELLED, **dict.fromkeys(UNTOUCHED, WAITING)}
GONE_S = 180.0  # for the pods of a cancelled job to end, beyond their grace period
POLL_S = 1.0
MOST_POD_LOGS = 16
WITHOUT_CLUSTER = "without a cluster, --dry-run prints the manifests and --no-submit writes them into run folders"
LOG_QUERY = {"tailLines": "2000", "limitBytes": str(1 << 20)}


class KubernetesSystem:
    """Jobs of a cluster; an id is the name of the job's main object."""

    name = "k8s"
    is_here = True  # manifests can be made anywhere, and are checked in a dry run too

    def __init__(self, environ: Mapping[str, str], *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._environ = environ
        self._sleep = sleep
        # By context: one connection and one request rate each.
        self._clients: dict[str, KubeClient] = {}

    # ---- before a job is submitted -----------------------------------------------------------------------------------

    def check(self, requests: Sequence[LaunchRequest], *, submits: bool = True) -> list[str]:
        """Check that the settings are complete and that the live cluster can run the requests."""
        problems, remarks = check_settings(requests)
        if problems:
            raise UserError(problems)
        cluster_requests = [request for request in requests if (request.settings.flavour or "jobset") not in EXPORTS]
        if submits and len(cluster_requests) < len(requests):
            flavour = next(request.settings.flavour for request in requests if request not in cluster_requests)
            raise mistake(
                f"--flavour {flavour}",
                "is a file for another tool, and nothing that a cluster takes",
                fix="--dry-run prints it, --no-submit writes it into the run folder",
            )
        if not cluster_requests:
            return remarks
        if not submits and not has_access(self._environ):
            return [*remarks, "no cluster is configured here: namespace, queue, quota and rights were not checked"]
        client = self._client(instead=WITHOUT_CLUSTER)
        try:
            for namespace in sorted({self._namespace(client, request) for request in cluster_requests}):
                namespace_requests = [
                    request for request in cluster_requests if self._namespace(client, request) == namespace
                ]
                new_problems, new_remarks = check_cluster(client, namespace_requests, namespace)
                problems += new_problems
                remarks += new_remarks
        except SystemFailure as error:
            if submits:
                raise
            return [*remarks, f"{error.problems[0].where}: {error.problems[0].what}: the cluster was not checked"]
        if problems:
            raise UserError(problems)
        return remarks

    def render(self, requests: Sequence[LaunchRequest]) -> dict[str, str]:
        """Return a file per job, without the run's key."""
        texts = {}
        for request in requests:
            flavour = request.settings.flavour or "jobset"
            if flavour in EXPORTS:
                ending = "sky.yaml" if flavour == "skypilot" else "dstack.yml"
                texts[f"{object_name(request)}.{ending}"] = EXPORTS[flavour](request)
            else:
                texts[f"{object_name(request)}.yaml"] = render_manifests(request)
        return texts

    # ---- submitting --------------------------------------------------------------------------------------------------

    def write(self, requests: Sequence[LaunchRequest]) -> list[Submitted]:
        """Write the manifests with the key into the run folders, readable only by their owner (`--no-submit`)."""
        for request in requests:
            flavour = request.settings.flavour or "jobset"
            if flavour in EXPORTS:
                manifest = EXPORTS[flavour](request)
            else:
                manifest = render_manifests(request, secret=secrets.token_hex(SECRET_BYTES))
            replace_bytes(Path(request.run) / MANIFEST, manifest.encode(), mode=0o600)
        return [Submitted(id=object_name(request), request=request) for request in requests]

    def submit(self, requests: Sequence[LaunchRequest]) -> list[Submitted]:
        """Apply all objects or none: first as a dry run, then what pods need, then what creates pods."""
        submitted = self.write(requests)
        client = self._client()
        jobs = [
            (read_manifest(Path(job.request.run)), self._namespace(client, job.request), job.request)
            for job in submitted
        ]
        for _, namespace, request in jobs:
            self._keep_place(client, Path(request.run), namespace)
        self._apply_all(client, [(documents, namespace) for documents, namespace, _ in jobs])
        return submitted

    def _apply_all(self, client: KubeClient, jobs: Sequence[tuple[Sequence[Document], str]]) -> None:
        manager = MANAGER + secrets.token_hex(4)
        all_documents = [(item, namespace) for documents, namespace in jobs for item in documents]
        # Each launch marks its objects, so that another launch of the same name is a conflict and never overwrites
        # them.
        for document, _ in all_documents:
            document["metadata"].setdefault("annotations", {})["phalanx.launch"] = manager
        # Jobs of a sweep differ only in their name, so one dry run is enough for all of one shape.
        for documents, namespace in {job_shape(*job): job for job in reversed(jobs)}.values():
            for document in documents:
                with self._sentences(client, document):
                    client.apply(object_path(document, namespace), document, manager=manager, dry_run=True)
        applied: list[tuple[Document, str]] = []
        try:
            for document, namespace in sorted(all_documents, key=lambda item: item[0]["kind"] in MAIN_KINDS):
                # Before the call, because its answer may be lost.
                applied.append((document, namespace))
                with self._sentences(client, document):
                    answer = client.apply(object_path(document, namespace), document, manager=manager)
                document["metadata"]["uid"] = answer.get("metadata", {}).get("uid", "")
        except BaseException as error:
            self._take_back(client, applied, error)
            raise
        # The job runs without it; only the key would then stay after the TTL.
        with suppress(KubeRefusal, PhalanxError):
            self._set_owners(client, jobs, manager)

    def _take_back(self, client: KubeClient, made: Sequence[tuple[Document, str]], error: BaseException) -> None:
        """Delete the objects of this launch; if that fails too, raise SystemFailure naming those that remain."""
        remaining = []
        for document, namespace in reversed(made):
            if "uid" not in document["metadata"] and isinstance(error, UserError):
                continue  # the refused object was not made by this launch
            try:
                client.delete(object_path(document, namespace))
            except (KubeRefusal, PhalanxError):
                remaining.append(f"{plural_of(document['kind'])}/{document['metadata']['name']}")
        if remaining:
            where = f"-n {made[0][1]}"
            raise SystemFailure(
                Problem(
                    where=client.access.server,
                    what=f"the API went away in mid-launch, and {plural(len(remaining), 'object')} may be left",
                    why=str(error),
                    fix=f"when it is back: kubectl delete {where} --ignore-not-found {' '.join(remaining)}",
                )
            ) from error

    def _set_owners(self, client: KubeClient, jobs: Sequence[tuple[Sequence[Document], str]], manager: str) -> None:
        for documents, namespace in jobs:
            main_object = main_document(documents)
            owner = {
                "apiVersion": main_object["apiVersion"],
                "kind": main_object["kind"],
                "name": main_object["metadata"]["name"],
                "uid": main_object["metadata"]["uid"],
            }
            for document in documents:
                if document is not main_object:
                    owned = {**document["metadata"], "ownerReferences": [owner]}
                    owned.pop("uid", None)
                    client.apply(object_path(document, namespace), {**document, "metadata": owned}, manager=manager)

    # ---- jobs that were submitted ------------------------------------------------------------------------------------

    def list_jobs(self, ids: Sequence[str] = ()) -> list[QueuedJob]:
        """Return the jobs launched from here as the cluster reports them, with three list calls per namespace."""
        records = [record for record in read_records(self._environ, system=self.name) if not ids or record.id in ids]
        places: dict[tuple[str, str, str], list[LaunchRecord]] = {}
        jobs: dict[str, QueuedJob] = {}
        for record in records:
            place = _read_place(record)
            if place is None:
                with suppress(UserError):
                    jobs[record.id] = _from_run_folder(record)
            elif Run(path=Path(record.run)).status().get("state") == "done":
                jobs[record.id] = _queued(record, DONE, "done", place)
            else:
                key = (place["context"], place["namespace"], place["kind"])
                places.setdefault(key, []).append(record)
        errors_by_place: dict[tuple[str, str, str], UserError] = {}
        for place_key, place_records in places.items():
            try:
                jobs |= self._list_place(*place_key, place_records)
            except UserError as error:
                if getattr(error.__cause__, "status", 0) != 403:
                    raise
                errors_by_place[place_key] = error
        if errors_by_place and not jobs:
            raise next(iter(errors_by_place.values()))
        # A namespace that the user may no longer read must not hide jobs in others.
        for place_key in errors_by_place:
            for record in places[place_key]:
                with suppress(UserError):
                    jobs[record.id] = _from_run_folder(record, unseen=place_key[1])
        return [jobs[record.id] for record in records if record.id in jobs]

    def _list_place(
        self, context: str, namespace: str, kind: str, records: Sequence[LaunchRecord]
    ) -> dict[str, QueuedJob]:
        client = self._client(context)
        with self._sentences(client, {"kind": kind, "metadata": {"name": namespace}}):
            main_objects, _ = client.list_objects(main_path(kind, namespace), labels=RUN_LABEL)
            pods, _ = client.list_objects(kind_path("v1", "pods", namespace), labels=RUN_LABEL)
            workloads = self._workloads(client, namespace) if any(main_object.queue for main_object in records) else []
        by_name = {main_object["metadata"]["name"]: main_object for main_object in main_objects}
        running: dict[str, int] = {}
        for pod in pods:
            if (pod.get("status") or {}).get("phase") == "Running":
                run = str(pod["metadata"].get("labels", {}).get(RUN_LABEL))
                running[run] = running.get(run, 0) + 1
        jobs = {}
        for record in records:
            job_object = by_name.get(record.id)
            workload = find_workload(workloads, job_object) if job_object is not None else None
            state, term = job_state(job_object, workload, running.get(record.id, 0))
            run_state = str(Run(path=Path(record.run)).status().get("state")) if job_object is None else ""
            if run_state in ("stopped", "failed"):
                state, term = STATES[run_state], run_state
            restarts = int(((job_object or {}).get("status") or {}).get("restarts") or 0)
            jobs[record.id] = _queued(record, state, term, _read_place(record) or {}, restarts=restarts)
        return jobs

    def _workloads(self, client: KubeClient, namespace: str) -> list[Document]:
        try:
            return client.list_objects(kind_path(KUEUE, "workloads", namespace))[0]
        except KubeRefusal as error:
            if error.status in (403, 404):
                return []
            raise

    def explain(self, job: str) -> JobExplanation:
        """Explain why a job waits, runs or has ended."""
        record = find_record(job, self._environ, system=self.name)
        run, place = open_run(record.run), _read_place(record)
        if place is not None and not has_access(self._environ):
            ask = f"phalanx why {record.id} with its kubeconfig asks the cluster"
            return explain_from_folder(record, unseen="no cluster is configured here", ask=ask)
        run_state = str(run.status().get("state") or "")
        if place is None:
            state = STATES.get(run_state, RUNNING)
            reason, remedy = f"the run says {run_state}", f"kubectl get jobset,pods -l {RUN_LABEL}={record.id}"
            if run_state in UNTOUCHED:
                reason, remedy = (
                    "no pod has begun",
                    f"kubectl apply --server-side -f {run.path / MANIFEST}, if not done yet",
                )
            return JobExplanation(id=record.id, state=state, reason=reason, cure=remedy)
        if run_state == "stopped" and self._get_main(record, place) is None:
            resume_fix = f"phalanx requeue {record.id} resumes it"
            return JobExplanation(id=record.id, state=CANCELLED, reason="it was cancelled", cure=resume_fix)
        facts = self._facts(record, place, text(run.status(), "message").partition("\n")[0])
        state, reason, remedy = explain_job(facts)
        if state == DONE:
            remedy = f"phalanx report {record.run}"
        return JobExplanation(id=record.id, state=state, reason=reason, cure=remedy.replace("RUN", record.run))

    def _facts(self, record: LaunchRecord, place: Mapping[str, str], said: str) -> KubeFacts:
        client, namespace = self._client(place["context"]), place["namespace"]
        main_object = self._get_main(record, place)
        with self._sentences(client, {"kind": place["kind"], "metadata": {"name": record.id}}):
            pods, _ = client.list_objects(kind_path("v1", "pods", namespace), labels=f"{RUN_LABEL}={record.id}")
            try:
                events, _ = client.list_objects(kind_path("v1", "events", namespace), fields="type=Warning")
            except KubeRefusal as error:
                if error.status != 403:
                    raise
                events = []
            workloads = self._workloads(client, namespace) if main_object is not None and record.queue else []
        names = {record.id, *(str(pod["metadata"]["name"]) for pod in pods)}
        job_events = [event for event in events if _is_about(event, record.id, names)]
        return KubeFacts(
            id=record.id,
            main=main_object,
            workload=find_workload(workloads, main_object) if main_object is not None else None,
            pods=pods,
            events=sorted(
                job_events, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or "")
            ),
            queue=record.queue,
            said=said,
            hosts=int(place.get("hosts") or 0),
        )

    def _get_main(self, record: LaunchRecord, place: Mapping[str, str]) -> Document | None:
        client = self._client(place["context"])
        with self._sentences(client, {"kind": place["kind"], "metadata": {"name": record.id}}):
            return client.get(f"{main_path(place['kind'], place['namespace'])}/{record.id}")

    def logs(self, job: str) -> list[str]:
        """Fetch the output of pods into the run folder, and return these files and those of the agents."""
        record = find_record(job, self._environ, system=self.name)
        run, place = open_run(record.run), _read_place(record)
        folder = run.path / "logs"
        if place is not None:
            self._fetch_pod_logs(record, place, folder)
        return [str(path) for pattern in ("pod-*.log", "agent*.log") for path in sorted(folder.glob(pattern))]

    def _fetch_pod_logs(self, record: LaunchRecord, place: Mapping[str, str], folder: Path) -> None:
        client, namespace = self._client(place["context"]), place["namespace"]
        path = kind_path("v1", "pods", namespace)
        with self._sentences(client, {"kind": "Pod", "metadata": {"name": record.id}}):
            pods, _ = client.list_objects(path, labels=f"{RUN_LABEL}={record.id}")
        # Failed pods first; of a thousand pods only some are fetched.
        order = sorted(pods, key=lambda pod: ((pod.get("status") or {}).get("phase") != "Failed", _pod_name(pod)))
        folder.mkdir(exist_ok=True)
        for pod in order[:MOST_POD_LOGS]:
            with suppress(KubeRefusal):  # 400: its container has not started
                log_text = client.text(f"{path}/{_pod_name(pod)}/log", LOG_QUERY)
                replace_bytes(folder / f"pod-{_pod_name(pod)}.log", log_text.encode())

    def cancel(self, job: str) -> None:
        """Delete a job's objects, and wait until its pods are gone."""
        record, place = self._placed(job)
        [queued_job] = self.list_jobs([record.id])
        if queued_job.state in OVER and queued_job.said != "not in the cluster":
            raise mistake(job, "has already ended", fix=f"phalanx why {job} says how")
        with said_to_be_cancelled(Run(path=Path(record.run))):
            self._delete_job(record, place)

    def _delete_job(self, record: LaunchRecord, place: Mapping[str, str]) -> None:
        client, namespace = self._client(place["context"]), place["namespace"]
        # The file is in a folder that others may write to, so only objects labelled with this run are deleted.
        documents = [
            document
            for document in read_manifest(Path(record.run))
            if document["metadata"].get("labels", {}).get(RUN_LABEL) == record.id
        ]
        for document in sorted(documents, key=lambda document: document["kind"] not in MAIN_KINDS):
            with self._sentences(client, document):
                client.delete(object_path(document, namespace))
        waited_s, max_wait_s = 0.0, GONE_S + max((grace_s(document) for document in documents), default=0.0)
        pods = kind_path("v1", "pods", namespace)
        while True:
            with self._sentences(client, {"kind": "Pod", "metadata": {"name": record.id}}):
                remaining, _ = client.list_objects(pods, labels=f"{RUN_LABEL}={record.id}")
            if not remaining and self._get_main(record, place) is None:
                return
            if waited_s > max_wait_s:
                raise SystemFailure(
                    Problem(
                        where=record.id,
                        what=f"{plural(len(remaining), 'pod')} of it are still there after {max_wait_s:g} s",
                        fix=f"kubectl get pods -n {namespace} -l {RUN_LABEL}={record.id} says on which nodes",
                    )
                )
            self._sleep(POLL_S)
            waited_s += POLL_S

    def requeue(self, job: str) -> str:
        """Requeue a job: a running one saves and restarts, a deactivated one is activated, an ended one reapplied."""
        record, place = self._placed(job)
        run = open_run(record.run)
        [queued_job] = self.list_jobs([record.id])
        if queued_job.state == DONE:
            raise mistake(job, "is done", fix="to train longer, raise data.tokens and launch the job again")
        if queued_job.state == RUNNING:
            run.stop_file.write_text(WANTS_TO_GO_ON + "\n", encoding="utf-8")
            return record.id
        if queued_job.state == WAITING:
            self._activate(record, place)
            return record.id
        self._delete_job(record, place)
        # number 0 makes the run ready again, for pods with other addresses
        for path in (run.stop_file, run.path / READY):
            path.unlink(missing_ok=True)
        run.set_status("created", message="requeued")
        self._apply_all(self._client(place["context"]), [(read_manifest(run.path), place["namespace"])])
        return record.id

    def _activate(self, record: LaunchRecord, place: Mapping[str, str]) -> None:
        client, main_object = self._client(place["context"]), self._get_main(record, place)
        workload = find_workload(self._workloads(client, place["namespace"]), main_object or {})
        if workload is None or workload.get("spec", {}).get("active") is not False:
            raise mistake(record.id, "is already waiting", fix=f"phalanx why {record.id} says for what")
        with self._sentences(client, workload):
            client.patch(object_path({**workload, "apiVersion": KUEUE}, place["namespace"]), {"spec": {"active": True}})

    # ---- how ---------------------------------------------------------------------------------------------------------

    def _client(self, context: str = "", *, instead: str = "") -> KubeClient:
        if context not in self._clients:
            client = KubeClient(read_access(self._environ, context=context, instead=instead))
            client.rate.sleep = self._sleep
            self._clients[context] = self._clients.setdefault(client.access.context, client)
        return self._clients[context]

    def _namespace(self, client: KubeClient, request: LaunchRequest) -> str:
        return request.settings.namespace or client.access.namespace

    def _keep_place(self, client: KubeClient, run: Path, namespace: str) -> None:
        main_object = main_document(read_manifest(run))
        spec = main_object["spec"]
        pods = spec.get("completions") or spec.get("trainer", {}).get("numNodes")
        pods = pods or sum(job["template"]["spec"]["completions"] for job in spec["replicatedJobs"])
        place = {"context": client.access.context, "server": client.access.server, "namespace": namespace}
        write_json(run / PLACE, {**place, "kind": main_object["kind"], "hosts": str(pods)})

    def _placed(self, job: str) -> tuple[LaunchRecord, dict[str, str]]:
        record = find_record(job, self._environ, system=self.name)
        place = _read_place(record)
        if place is None:
            what = "was written as manifests (--no-submit), which this command has not submitted"
            raise mistake(record.id, what, fix=f"kubectl delete or apply -f {Path(record.run) / MANIFEST}")
        return record, place

    @contextmanager
    def _sentences(self, client: KubeClient, document: Document) -> Iterator[None]:
        """Turn refusals of the API into errors that name the object."""
        try:
            yield
        except KubeRefusal as error:
            what = f"{document.get('kind')} {document['metadata']['name']}"
            raise explain_refusal(error, client.access, what=what) from error


def _read_place(record: LaunchRecord) -> dict[str, str] | None:
    """Return the cluster and namespace a job was submitted to; None if it was only written."""
    path = Path(record.run) / PLACE
    if not path.is_file():
        return None
    values = read_json(path)
    place = {name: text(values, name) for name in ("context", "server", "namespace", "kind", "hosts")}
    return place if place["kind"] in MAIN_KINDS and NAMESPACE.fullmatch(place["namespace"]) else None


def _from_run_folder(record: LaunchRecord, *, unseen: str = "") -> QueuedJob:
    """Return a job from its run folder, if it was not submitted or the cluster does not show its namespace `unseen`."""
    run_state = str(open_run(record.run).status().get("state") or "")
    term = "manifests written" if run_state in UNTOUCHED else run_state
    term = f"namespace {unseen} refused; the run says {run_state}" if unseen else term
    return _queued(record, STATES.get(run_state, RUNNING), term, {})


def _queued(record: LaunchRecord, state: str, said: str, place: Mapping[str, str], *, restarts: int = 0) -> QueuedJob:
    with suppress(OSError):
        restarts = max(restarts, len(Run(path=Path(record.run)).launches()) - 1)
    return QueuedJob(
        id=record.id,
        system="k8s",
        name=record.name,
        state=state,
        said=said,
        queue=record.queue,
        hosts=int(place.get("hosts") or 0),
        run=record.run,
        group=record.group,
        restarts=max(0, restarts),
    )


def _is_about(event: Document, job: str, names: set[str]) -> bool:
    subject = str((event.get("involvedObject") or {}).get("name") or "")
    return subject in names or subject == f"{job}-w-0"


def _pod_name(pod: Document) -> str:
    return str(pod["metadata"]["name"])
