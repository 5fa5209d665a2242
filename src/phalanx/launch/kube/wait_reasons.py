"""Explanations of a job's state on Kubernetes, from its object, Kueue's Workload, its pods and events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.io.visible import one_line
from phalanx.launch.kube.client import Document, conditions_of, has_condition
from phalanx.launch.system import DONE, FAILED, RUNNING, WAITING
from phalanx.units import first_few, plural

MOST_TEXT = 300
# Kueue's reasons for a Workload without quota -> the sentence and the remedy. A specific reason decides; by default
# (0.19 too) the reason is Pending or Inadmissible, and parts of the message decide, the first row first: a message
# names every flavour, and one that only lacks free quota may still take the job where another never could.
# `{message}`, `{queue}` and `{id}` are filled in.
QUOTA: tuple[tuple[str, str, str], ...] = (
    (
        "WaitingForPreemptedWorkloads|the preemption of|overlapping preemption targets",
        "jobs that give way to it are saving their checkpoints ({message})",
        "wait a few minutes",
    ),
    (
        "WaitingForQuota|insufficient unused quota|no longer fits",
        "queue {queue} has no quota left for it now ({message})",
        "wait for other jobs of the team, ask for fewer --hosts, or for another --queue",
    ),
    (
        "does not contain the requested level|does not support TopologyAware|no requested topology level"
        "|no topology domains at level",
        "nodes of queue {queue} have no label that launch.topology names ({message})",
        "correct launch.topology: kubectl get topologies -o yaml shows the labels; then launch it again",
    ),
    (
        "TopologyPlacementFailed|topology ",
        "no part of the network has room for it in one piece ({message})",
        'wait, set launch.placement = "preferred", or ask for fewer --hosts',
    ),
    (
        "ExceedsMaxQuota|maximum capacity",
        "it asks for more than queue {queue} can ever have ({message})",
        "cancel it and ask for fewer --hosts, or for another --queue",
    ),
    (
        "NoMatchingFlavor|flavor .* not found|untolerated taint|node affinity",
        "queue {queue} has no nodes of the kind it asks for ({message})",
        "use another --queue, or ask the operator for a ResourceFlavor that fits",
    ),
    (
        "LocalQueue doesn't exist|LocalQueue .* doesn't exist|LocalQueue .* is terminating or missing",
        "there is no queue {queue} in its namespace",
        "cancel it and launch it with another --queue: kubectl get localqueues lists them",
    ),
    (
        "ClusterQueue doesn't exist|ClusterQueue .* doesn't exist|ClusterQueue .* is terminating or missing"
        "|ClusterQueue .* not found",
        "the ClusterQueue behind {queue} does not exist",
        "ask the operator: phalanx cluster init --on k8s makes it",
    ),
    (
        "Suspended|is inactive|is stopped|OnHold",
        "queue {queue} is stopped or not set up ({message})",
        "ask the operator; kubectl describe clusterqueue says what is missing",
    ),
    (
        "WaitingForPodsReady",
        "Kueue waits until the pods of an earlier job are ready",
        "wait; phalanx queue shows the jobs before it",
    ),
    (
        "AdmissionGated|Admission is gated",
        "something else holds it back from Kueue ({message})",
        "ask whoever set the annotation kueue.x-k8s.io/admission-gated-by",
    ),
    (
        "Misconfigured|Inadmissible",
        "Kueue cannot admit it to queue {queue} ({message})",
        "ask the operator; kubectl describe workloads.kueue.x-k8s.io says more",
    ),
    (
        "PendingEvaluation|",  # and any other reason of Kueue
        "Kueue has not admitted it to queue {queue} yet ({message})",
        "wait a moment; if it stays so, kubectl describe workloads.kueue.x-k8s.io says more",
    ),
)
EVICTED = {
    "Preempted": ("another job took its quota or nodes ({message})", "wait: it resumes from its newest checkpoint"),
    "PodsReadyTimeout": (
        "its pods were not ready in time",
        "phalanx logs {id}; kubectl get pods says what they wait for",
    ),
    "NodeFailures": ("nodes of it failed and Kueue found no replacement", "wait: it resumes on other nodes"),
    "ClusterQueueStopped": ("the operator stopped its queue", "wait, or ask the operator"),
    "LocalQueueStopped": ("the operator stopped its queue", "wait, or ask the operator"),
    "Deactivated": ("it was deactivated ({message})", "phalanx requeue {id} activates it again"),
    "MaximumExecutionTimeExceeded": ("its time limit is over", "phalanx requeue {id} resumes it"),
}
# Reasons that an operator or user can undo.
LIFTED = ("Deactivated", "ClusterQueueStopped", "LocalQueueStopped")
IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
SETUP = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "ContainerCannotRun")


@dataclass(frozen=True, kw_only=True, slots=True)
class KubeFacts:
    """The cluster's objects about one job."""

    id: str
    main: Document | None  # JobSet, Job or TrainJob
    workload: Document | None = None  # Kueue's Workload
    pods: Sequence[Document] = ()
    events: Sequence[Document] = ()
    queue: str = ""
    said: str = ""  # the run folder's message about its end
    hosts: int = 0


def job_state(main: Mapping[str, Any] | None, workload: Mapping[str, Any] | None, running: int) -> tuple[str, str]:
    """Return the state of a job and the cluster's own term for it; `running` is the number of running pods."""
    if main is None:
        return FAILED, "not in the cluster"
    for kind in ("Completed", "Complete"):
        if has_condition(main, kind):
            return DONE, kind
    if (failed_condition := has_condition(main, "Failed")) is not None:
        return FAILED, f"Failed, {failed_condition.get('reason') or 'no reason'}"
    if (evicted := _eviction(workload)) is not None and not has_condition(workload, "Admitted"):
        return WAITING, f"Evicted, {evicted.get('reason')}"
    if has_condition(main, "Suspended") or main.get("spec", {}).get("suspend"):
        quota_condition = has_condition(workload, "QuotaReserved", "False")
        return WAITING, f"Suspended, {quota_condition.get('reason') if quota_condition else 'not admitted'}"
    return (RUNNING, "Running") if running else (WAITING, "Starting")


def explain_job(facts: KubeFacts) -> tuple[str, str, str]:
    """Return state, reason and remedy of a job."""
    running = [pod for pod in facts.pods if _phase(pod) == "Running"]
    state, term = job_state(facts.main, facts.workload, len(running))
    if state == DONE:
        return state, "the training is complete", ""
    if facts.main is None:
        reason_gone = f"the cluster has no object of it any more{f'; the run says: {facts.said}' if facts.said else ''}"
        return state, reason_gone, f"phalanx requeue {facts.id} resumes it from its newest checkpoint"
    if state == FAILED:
        reason, remedy = _why_failed(facts)
    elif term.startswith(("Suspended", "Evicted")):
        reason, remedy = _why_not_admitted(facts, term)
    else:
        reason, remedy = _why_not_running(facts, len(running))
    fill = {"id": facts.id, "queue": facts.queue or "its queue"}
    return state, reason, remedy.format(**fill)


def _why_not_admitted(facts: KubeFacts, word: str) -> tuple[str, str]:
    queue, fill = facts.queue or "its queue", {"id": facts.id}
    if facts.workload is None:
        if not facts.queue:
            return (
                "it is suspended, and no queue would release it",
                "kubectl patch it with suspend: false, or launch it again",
            )
        return (
            f"Kueue has not taken notice of it in queue {queue}",
            "wait a moment; if it stays so, ask the operator whether Kueue runs and manages JobSets in this namespace",
        )
    if facts.workload.get("spec", {}).get("active") is False:
        eviction = has_condition(facts.workload, "Evicted") or has_condition(facts.workload, "DeactivationTarget") or {}
        reason, remedy = _eviction_row(str(eviction.get("reason") or ""), EVICTED["Deactivated"])
        return reason.format(message=_message(eviction)), remedy.format(**fill)
    pending = has_condition(facts.workload, "QuotaReserved", "False")
    evicted = _eviction(facts.workload)
    if evicted is not None and (word.startswith("Evicted") or pending is None):
        unknown = ("Kueue took its quota away ({message})", "wait, or phalanx requeue {id}")
        reason, remedy = _eviction_row(str(evicted.get("reason") or ""), unknown)
        return reason.format(message=_message(evicted)), remedy.format(**fill)
    if pending is None:
        if has_condition(facts.workload, "QuotaReserved") and not has_condition(facts.workload, "Admitted"):
            checks = [
                f"{check.get('name')}: {check.get('message') or check.get('state')}"
                for check in facts.workload.get("status", {}).get("admissionChecks") or ()
                if check.get("state") != "Ready"
            ]
            return (
                f"it has quota and waits for a check ({first_few(checks, 3) or 'admission'})",
                "wait, or ask the operator",
            )
        return f"Kueue has not looked at it yet in queue {queue}", "wait a moment"
    message = _message(pending)
    reason, remedy = _quota_row(str(pending.get("reason") or ""), message)
    return reason.format(message=message, queue=queue), remedy.format(queue=queue, id=facts.id)


def _eviction(workload: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return why Kueue took a job's quota, while that reason applies.

    The condition stays until there is quota again, even if the job has been activated or its queue started since; then
    the condition that it waits for now is more useful.
    """
    evicted = has_condition(workload, "Evicted")
    if workload is None or evicted is None or workload.get("spec", {}).get("active") is False:
        return evicted
    is_lifted = str(evicted.get("reason") or "").startswith(LIFTED)
    return None if is_lifted and has_condition(workload, "QuotaReserved", "False") else evicted


def _eviction_row(said: str, other: tuple[str, str]) -> tuple[str, str]:
    """Return the sentence and the remedy for Kueue's reason, such as DeactivatedDueToMaximumExecutionTimeExceeded."""
    kind, _, cause = said.partition("DueTo")
    return EVICTED.get(cause) or EVICTED.get(kind) or other


def _quota_row(said: str, message: str) -> tuple[str, str]:
    """Return the sentence and the remedy for Kueue's reason and message."""
    for patterns, reason, remedy in QUOTA:
        if said == patterns.split("|")[0]:
            return reason, remedy
    for patterns, reason, remedy in QUOTA:
        if any(_matches(pattern, f"{said} {message}") for pattern in patterns.split("|")):
            return reason, remedy
    raise AssertionError  # the last row matches everything


def _why_not_running(facts: KubeFacts, running: int) -> tuple[str, str]:
    """Explain why pods do not run; without pods, why none are created."""
    for pod in sorted(facts.pods, key=_index):
        if (explanation := _why_pod_waits(pod, facts.events)) is not None:
            return explanation
    if not facts.pods:
        create_failures = [
            event for event in facts.events if event.get("reason") in ("FailedCreate", "FailedAdmission")
        ]
        if create_failures:
            return (
                f"its pods cannot be made: {_message(create_failures[-1])}",
                "ask the operator about quota, pod security and the default service account of the namespace",
            )
        return "its pods are being made", "wait a moment; if it stays so, ask whether the JobSet controller runs"
    if running < max(facts.hosts, 1):
        return f"{running} of {plural(max(facts.hosts, len(facts.pods)), 'pod')} run", "wait: the others are starting"
    return f"on {plural(running, 'pod')}", "phalanx watch RUN"


def _why_pod_waits(pod: Document, events: Iterable[Document]) -> tuple[str, str] | None:
    if _phase(pod) != "Pending":
        return None
    name = str(pod.get("metadata", {}).get("name"))
    unplaced = has_condition(pod, "PodScheduled", "False")
    if unplaced is not None and unplaced.get("reason") != "SchedulingGated":
        return (
            f"no node can take pod {name}: {_message(unplaced)}",
            "wait for other jobs to end, ask for fewer --hosts, or use another --queue",
        )
    for container in pod.get("status", {}).get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in IMAGE:
            return (
                f"the image {container.get('image')} cannot be pulled: {_message(waiting) or waiting['reason']}",
                "correct launch.image, or give the namespace the registry's imagePullSecret; then phalanx requeue {id}",
            )
        if waiting.get("reason") in SETUP:
            return f"pod {name} cannot start: {_message(waiting)}", "correct that, then phalanx requeue {id}"
    for event in events:
        subject = (event.get("involvedObject") or {}).get("name")
        if subject == name and event.get("reason") in ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"):
            return (
                f"pod {name} waits for a volume or its network: {_message(event)}",
                "kubectl get pvc shows the claim; ask the operator if it is bound",
            )
    return None


def _why_failed(facts: KubeFacts) -> tuple[str, str]:
    """Explain a failure by the pod that failed first, else the run folder, else the object's condition."""
    resume_fix = "phalanx logs {id} shows its last lines; phalanx requeue {id} resumes it"
    pod_ends = []
    for pod in facts.pods:
        for container in pod.get("status", {}).get("containerStatuses") or ():
            terminated = (container.get("state") or {}).get("terminated") or {}
            if terminated and terminated.get("exitCode"):
                pod_ends.append((str(terminated.get("finishedAt") or ""), str(pod["metadata"]["name"]), terminated))
    if pod_ends:
        _, name, terminated = min(pod_ends, key=lambda end: end[:2])
        if terminated.get("reason") == "OOMKilled":
            return f"pod {name} had too little memory (OOMKilled)", f"a smaller batch.micro; {resume_fix}"
        message = facts.said or _message(terminated)
        return (
            f"pod {name} ended with exit code {terminated['exitCode']}{f': {message}' if message else ''}",
            resume_fix,
        )
    failed_condition = has_condition(facts.main, "Failed") or {}
    return facts.said or f"{failed_condition.get('reason')}: {_message(failed_condition)}", resume_fix


def find_workload(workloads: Iterable[Document], main: Mapping[str, Any]) -> Document | None:
    """Return Kueue's Workload of a job: the newest of those that the job owns."""
    uid = main.get("metadata", {}).get("uid")
    owned = [
        workload
        for workload in workloads
        if uid and any(owner.get("uid") == uid for owner in workload.get("metadata", {}).get("ownerReferences") or ())
    ]
    return max(owned, key=lambda workload: str(workload["metadata"].get("creationTimestamp") or ""), default=None)


def newest_message(document: Document) -> str:
    """Return the type, status and message of the condition that changed last."""
    newest = max(
        conditions_of(document), key=lambda condition: str(condition.get("lastTransitionTime") or ""), default=None
    )
    return "" if newest is None else f"{newest.get('type')}={newest.get('status')}: {_message(newest)}"


def _phase(pod: Mapping[str, Any]) -> str:
    return str((pod.get("status") or {}).get("phase") or "")


def _index(pod: Mapping[str, Any]) -> int:
    word = str((pod.get("metadata", {}).get("annotations") or {}).get("batch.kubernetes.io/job-completion-index", ""))
    return int(word) if word.isdecimal() else 0


def _message(condition: Mapping[str, Any]) -> str:
    return one_line(str(condition.get("message") or "")).strip()[:MOST_TEXT].rstrip(".")


def _matches(part: str, said: str) -> bool:
    """Return whether `said` contains `part`, in which ` .* ` matches any words."""
    position = 0
    for piece in part.split(" .* "):
        position = said.find(piece, position)
        if position < 0:
            return False
        position += len(piece)
    return True
