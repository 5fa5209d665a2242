"""Kubernetes as a launch system, against an API server on the loopback: submitted, refused, explained, undone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kube_server import Fault, KubeServer, running_server
from tiny_dataset import write_dataset
from tiny_job import ON_KUBERNETES, tiny_job

import phalanx
from phalanx.launch.book import LaunchRecord, record_launch
from phalanx.launch.k8s import KubernetesSystem
from phalanx.launch.kube import client as kube_client
from phalanx.launch.kube.wait_reasons import QUOTA, KubeFacts, explain_job
from phalanx.launch.resource_request import LaunchRequest
from phalanx.launch.settings import LaunchSettings
from phalanx.record.run import Run

JOB = tiny_job(data={"tokens": 2560}, cluster={"spec": "local-cpu:2"}, launch={**ON_KUBERNETES, "queue": "team-a"})
ROOT = "/apis/kueue.x-k8s.io/v1beta2"
SPACE = "namespaces/default"
JOBSETS = f"/apis/jobset.x-k8s.io/v1alpha2/{SPACE}/jobsets"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeServer]:
    """A cluster with two nodes, a claim, and a queue with four cores."""
    monkeypatch.setattr(kube_client, "FIRST_WAIT_S", 0.001)
    with running_server() as made:
        made.put(f"/api/v1/{SPACE}/persistentvolumeclaims/runs", {"spec": {"accessModes": ["ReadWriteMany"]}})
        made.put(f"{ROOT}/{SPACE}/localqueues/team-a", {"spec": {"clusterQueue": "a"}})
        for name, cores in (("a", "4"), ("b", "500m")):
            made.put(f"{ROOT}/clusterqueues/{name}", {"spec": cluster_queue(cores)})
        ready = [{"type": "Ready", "status": "True"}]
        for name in ("n1", "n2", "n3"):
            made.put(f"/api/v1/nodes/{name}", {"status": {"allocatable": {"cpu": "2"}, "conditions": ready}})
        monkeypatch.setenv("KUBECONFIG", str(made.kubeconfig(tmp_path / "kubeconfig")))
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data-home"))
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
        write_dataset(tmp_path, documents=200)
        (tmp_path / "job.toml").write_text(JOB)
        monkeypatch.chdir(tmp_path)
        yield made


def cluster_queue(cores: str) -> dict[str, Any]:
    quota = {"name": "f", "resources": [{"name": "cpu", "nominalQuota": cores}]}
    return {"cohortName": "all", "resourceGroups": [{"coveredResources": ["cpu"], "flavors": [quota]}]}


def launch(**more: Any) -> Any:
    options = {"hosts": 2, "progress": False, "check": False, "runs": ".", **more}  # with the data, on the claim
    return phalanx.launch("job.toml", **options)


def test_submit_list_logs_requeue_cancel(server: KubeServer) -> None:
    before = set(server.objects)
    done = launch()
    [job], run = done.ids, Run(path=Path(done.requests[0].run))
    kinds = sorted(path.split("/")[-2] for path in set(server.objects) - before)
    assert kinds == ["jobsets", "networkpolicies", "secrets"]
    made = server.objects[f"{JOBSETS}/{job}"]
    secret = server.objects[f"/api/v1/{SPACE}/secrets/{job}-key"]
    [owner] = secret["metadata"]["ownerReferences"]
    assert owner["uid"] == made["metadata"]["uid"]  # what deletes the JobSet deletes the key
    written = [one for one in server.requests if one.startswith("PATCH") and "dryRun" not in one]
    assert "secrets" in written[0]
    assert any("/jobsets/" in one for one in written)
    with pytest.raises(phalanx.UserError, match="job tiny is already waiting"):
        launch()

    assert [(one.state, one.hosts) for one in phalanx.queue().jobs] == [("waiting", 2)]
    made["status"] = {"conditions": []}
    for number in (0, 1):
        labels = {"phalanx.run": job}
        server.put(f"/api/v1/{SPACE}/pods/{job}-w-0-{number}", {"metadata": {"labels": labels}, "status": running()})
    assert [(one.state, one.said) for one in phalanx.queue().jobs] == [("running", "Running")]
    assert str(phalanx.why(job)) == f"{job} is running: on 2 pods; phalanx watch {run.path}"
    assert "log of" in str(phalanx.logs(job))
    phalanx.requeue(job)
    assert run.stop_file.read_text() == "requeue\n"  # a running one saves and goes on by itself

    made["status"] = {"conditions": [{"type": "Failed", "status": "True", "reason": "FailedJobs", "message": "gone"}]}
    assert phalanx.why(job).explanation.state == "failed"
    with pytest.raises(phalanx.UserError, match="has already ended"):
        phalanx.cancel(job)
    phalanx.requeue(job)  # applied anew: another object under the same name
    again = server.objects[f"{JOBSETS}/{job}"]
    assert again["metadata"]["uid"] != made["metadata"]["uid"]
    assert not run.stop_file.exists()

    phalanx.cancel(job)
    assert set(server.objects) == before
    assert str(phalanx.why(job)) == f"{job} is cancelled: it was cancelled; phalanx requeue {job} resumes it"
    with pytest.raises(phalanx.UserError, match="has already ended"):
        phalanx.cancel(job)


def test_a_run_is_said_to_be_cancelled_before_its_objects_are_gone(
    server: KubeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = launch()
    [job], run = done.ids, Run(path=Path(done.requests[0].run))
    told: list[str] = []

    def delete(self: kube_client.KubeClient, path: str) -> bool:
        told.append(run.status()["state"])
        raise phalanx.SystemFailure(phalanx.errors.Problem(where="API", what="went away"))

    with monkeypatch.context() as patch:
        patch.setattr(kube_client.KubeClient, "delete", delete)
        with pytest.raises(phalanx.SystemFailure, match="went away"):
            phalanx.cancel(job)
    assert (told, run.status()["state"]) == (["stopped"], "created")  # and not cancelled, when it was not
    del server.objects[f"{JOBSETS}/{job}"]
    run.set_status("stopped", message="cancelled")
    assert [(one.state, one.said) for one in phalanx.queue().jobs] == [("cancelled", "stopped")]


def test_why_without_a_cluster_tells_what_the_run_folder_does(
    server: KubeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = launch()
    [job], run = done.ids, Run(path=Path(done.requests[0].run))
    run.set_status("running")
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    assert str(phalanx.why(job)) == (
        f"{job} is running: its run folder says running (no cluster is configured here); "
        f"phalanx watch {run.path} follows it from here; phalanx why {job} with its kubeconfig asks the cluster"
    )


def test_a_namespace_that_refuses_hides_no_job_of_another(server: KubeServer, tmp_path: Path) -> None:
    for name in ("mine", "left"):
        server.put(f"/api/v1/namespaces/{name}", {"kind": "Namespace"})
        run = request(name, namespace=name).run
        Path(run, "plan.json").write_text("{}")
        Run(path=Path(run)).set_status("created")
        record_launch(LaunchRecord(id=name, system="k8s", name=name, run=run), os.environ)
        system().submit([request(name, namespace=name)])

    def refuse(names: str) -> None:
        server.faults = [Fault("GET", f"/namespaces/({names})/jobsets$", 403, "Forbidden", "no", times=2)]

    refuse("left")
    said = {one.id: (one.state, one.said) for one in phalanx.queue(on="k8s").jobs}
    assert said["mine"][0] == "waiting"
    assert said["left"][1] == "namespace left refused; the run says created"
    refuse("left|mine")
    with pytest.raises(phalanx.UserError, match="may not do this"):
        phalanx.queue(on="k8s")


def running() -> dict[str, Any]:
    return {"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]}


def request(name: str = "tiny", *, spares: int = 0, **chosen: Any) -> LaunchRequest:
    """Two hosts with a core each, and a run folder."""
    given = {"on": "k8s", "queue": "team-a", "image": "registry.example/phalanx:0.7", "claim": "runs"}
    run = Path("made", name).absolute()
    run.mkdir(parents=True, exist_ok=True)
    return LaunchRequest(
        name=name,
        group="",
        run=str(run),
        hosts=2,
        spares=spares,
        devices_per_host=1,
        accelerator="cpu",
        time_limit_s=600.0,
        save_s=60.0,
        environ={},
        checkpoint=str(run),
        placement=(),
        agent=("python",),
        settings=LaunchSettings(**{**given, **chosen}),
    )


def system() -> KubernetesSystem:
    return KubernetesSystem(os.environ, sleep=lambda seconds: None)


def refused(*, spares: int = 0, **chosen: Any) -> str:
    with pytest.raises(phalanx.UserError) as caught:
        system().check([request(spares=spares, **chosen)])
    return str(caught.value)


def test_a_cluster_that_cannot_take_it_is_said_before_anything_is_made(server: KubeServer) -> None:
    before = set(server.objects)
    with pytest.raises(phalanx.UserError) as caught:
        launch(queue="team-b", overrides=["launch.claim=rusn"])
    said = str(caught.value)
    assert "--queue team-b: namespace default has no such LocalQueue\n  did you mean team-a?" in said
    assert "launch.claim rusn: namespace default has no such PersistentVolumeClaim\n  did you mean runs?" in said
    assert not list(Path().glob("tiny-*"))
    with pytest.raises(phalanx.UserError) as caught:
        launch(runs="runs")
    runs = Path("runs").absolute()
    assert str(caught.value).startswith(
        f"data.path {Path('data').absolute()}: would not be seen by the pods\n"
        f"  the claim is mounted where --runs is, {runs}, and pods see nothing else of this machine\n"
        f"  put it below {runs} "
    )
    assert not runs.exists()
    assert system().check([request()]) == []
    assert "asks for 4 nodes with 1 cpu, but the cluster has 3" in refused(spares=2)
    said = refused(spares=3)
    assert "tiny asks for 5 cpu (5 hosts × 1), but the queue gets at most 4, borrowed ones included" in said
    server.put(f"{ROOT}/clusterqueues/b", {"spec": cluster_queue("1")})  # which it may borrow
    assert "the queue gets" not in refused(spares=3)
    server.objects["/api/v1/nodes/n1"]["spec"] = {"unschedulable": True}
    assert system().check([request(spares=1)]) == ["2 of 3 nodes can be used now: tiny waits for more"]
    server.denied = {("create", "jobsets"), ("delete", "jobsets"), ("get", "pods")}
    said = refused()
    assert "namespace default: you may not get pods, get pods/log, create/delete jobsets.jobset.x-k8s.io there" in said
    server.denied = set()
    # Who may not see the whole cluster is not held up by it.
    server.faults = [
        Fault("GET", path, 403, "Forbidden", "no", times=9)
        for path in ("/nodes", "clusterqueues", "namespaces/default$")
    ]
    assert system().check([request(spares=2)]) == []
    server.faults = []
    assert "namespace ml: does not exist" in refused(namespace="ml")
    server.objects[f"/api/v1/{SPACE}/persistentvolumeclaims/runs"]["spec"] = {"accessModes": ["ReadWriteOnce"]}
    assert "has access mode ReadWriteOnce, so 2 hosts cannot share it" in refused()
    server.apis.clear()
    said = refused()
    assert "--queue team-a: the cluster has no Kueue" in said
    assert "--flavour jobset: the cluster has no JobSet" in said
    assert "is no image name" in refused(image="two words")
    assert "--flavour skypilot: is a file for another tool" in refused(flavour="skypilot")
    server.faults = [Fault("GET", "jobset", 401, "Unauthorized", "Unauthorized")]
    assert "the token is wrong or has expired" in refused()
    server.faults = [Fault("POST", "", times=99)]
    with pytest.raises(phalanx.SystemFailure, match="the Kubernetes API does not answer"):
        system().check([request()])
    [remark] = system().check([request()], submits=False)  # a dry run needs no cluster
    assert remark.endswith("the cluster was not checked")
    assert set(server.objects) == before


def test_nothing_is_left_of_a_launch_that_fails_half_way(server: KubeServer) -> None:
    before = set(server.objects)
    jobs = [request("job-1"), request("job-2")]
    server.faults = [Fault("PATCH", "jobsets/job-1", 403, "Forbidden", "no such right")]
    with pytest.raises(phalanx.UserError, match="JobSet job-1: context test may not do this: no such right"):
        system().submit(jobs)
    assert [one for one in server.requests if "PATCH" in one and "dryRun" not in one] == []  # found on trial

    # Refused when it is no trial any more: the objects of the first one, and the key of both, are taken back.
    server.faults = [Fault("PATCH", "jobsets/job-2", 422, "Invalid", "spec is wrong", without="dryRun")]
    with pytest.raises(phalanx.UserError, match="JobSet job-2: the cluster refuses it: spec is wrong"):
        system().submit(jobs)
    assert any(one.startswith("PATCH") and "jobsets/job-1" in one and "dryRun" not in one for one in server.requests)
    assert set(server.objects) == before
    assert not any("dryRun" in one and "/job-2" in one for one in server.requests)  # of one shape: one trial is enough
    other = [jobs[0], request("job-2", spares=1)]
    server.faults = [Fault("PATCH", "jobsets/job-2", 422, "Invalid", "too many", query="dryRun")]
    with pytest.raises(phalanx.UserError, match="JobSet job-2: the cluster refuses it: too many"):
        system().submit(other)

    # The API goes away in the middle, and stays away: what may be left is named.
    server.faults = [Fault("PATCH", "jobsets", without="dryRun", times=99), Fault("DELETE", "", times=99)]
    with pytest.raises(phalanx.SystemFailure) as caught:
        system().submit(jobs[:1])
    assert "the API went away in mid-launch, and 3 objects may be left" in str(caught.value)
    assert "kubectl delete -n default --ignore-not-found jobsets/job-1 networkpolicies/job-1 secrets/job-1-key" in str(
        caught.value
    )
    server.faults = []

    # An answer that is lost is asked for again: the apply is the same, and nothing is there twice.
    server.objects = {path: server.objects[path] for path in before}
    server.faults = [Fault("PATCH", "jobsets", without="dryRun", after=True)]
    assert [one.id for one in system().submit(jobs[:1])] == ["job-1"]
    assert len(server.paths("/jobsets/")) == 1


def test_a_name_that_exists_is_never_written_over(server: KubeServer) -> None:
    system().submit([request()])
    kept = {path: dict(one) for path, one in server.objects.items()}
    with pytest.raises(phalanx.UserError, match="Secret tiny-key: is there already, made by another launch"):
        system().submit([request()])
    assert server.objects == kept


@pytest.mark.parametrize(
    ("facts", "state", "said"),
    [
        ({"pending": ("Pending", "insufficient unused quota for cpu")}, "waiting", "queue team-a has no quota left"),
        ({"pending": ("ExceedsMaxQuota", "8 > 4")}, "waiting", "more than queue team-a can ever have (8 > 4)"),
        ({"pending": ("Inadmissible", "LocalQueue team-a doesn't exist")}, "waiting", "there is no queue team-a"),
        ({"pending": ("Inadmissible", "ClusterQueue a is inactive")}, "waiting", "is stopped or not set up"),
        (
            {"pending": ("Pending", 'topology "t" allows to fit only 3 out of 4 pod(s)')},
            "waiting",
            "no part of the network has room for it in one piece",
        ),
        ({"evicted": ("Preempted", "by b, reclaim")}, "waiting", "another job took its quota or nodes (by b, reclaim)"),
        (
            {"active": False, "evicted": ("Deactivated", "limit")},
            "waiting",
            "it was deactivated (limit); phalanx requeue",
        ),
        (
            {"active": False, "evicted": ("DeactivatedDueToMaximumExecutionTimeExceeded", "exceeding the maximum")},
            "waiting",
            "its time limit is over; phalanx requeue",
        ),
        (  # activated again: Kueue leaves its word of the eviction until there is quota
            {"evicted": ("Deactivated", "limit"), "pending": ("Pending", "insufficient unused quota for cpu")},
            "waiting",
            "queue team-a has no quota left",
        ),
        (
            {"evicted": ("Preempted", "by b"), "pending": ("Pending", "insufficient unused quota for cpu")},
            "waiting",
            "another job took its quota or nodes (by b)",
        ),
        ({"workload": False}, "waiting", "Kueue has not taken notice of it in queue team-a"),
        ({"pod": {"unschedulable": "0/3 nodes"}}, "waiting", "no node can take pod p-0: 0/3 nodes"),
        ({"pod": {"waiting": "ImagePullBackOff"}}, "waiting", "the image img cannot be pulled"),
        ({"pod": {"event": "FailedMount"}}, "waiting", "pod p-0 waits for a volume or its network: no volume"),
        ({"pod": {"exit": 1}}, "failed", "pod p-0 ended with exit code 1: rank 3 died"),
        ({"pod": {"exit": 137, "reason": "OOMKilled"}}, "failed", "pod p-0 had too little memory"),
        ({"main": None}, "failed", "the cluster has no object of it any more; the run says: rank 3 died"),
        ({"create": "exceeded quota"}, "waiting", "its pods cannot be made: exceeded quota"),
        ({}, "waiting", "its pods are being made"),
    ],
)
def test_why(facts: dict[str, Any], state: str, said: str) -> None:
    found, reason, cure = explain_job(facts_of(**facts))
    assert found == state
    assert said in f"{reason}; {cure}"
    assert cure
    assert "{" not in cure + reason


def facts_of(
    *,
    main: object = (),
    pending: tuple[str, str] | None = None,
    evicted: tuple[str, str] | None = None,
    active: bool = True,
    workload: bool = True,
    pod: dict[str, Any] | None = None,
    create: str = "",
) -> KubeFacts:
    conditions = []
    if pending:
        conditions.append({"type": "QuotaReserved", "status": "False", "reason": pending[0], "message": pending[1]})
    if evicted:
        conditions.append({"type": "Evicted", "status": "True", "reason": evicted[0], "message": evicted[1]})
    suspended = bool(conditions) or not workload
    failed = pod is not None and "exit" in pod
    status = [{"type": "Suspended", "status": "True"}] if suspended else []
    status += [{"type": "Failed", "status": "True"}] if failed else []
    pods, events = [], []
    if pod is not None:
        container: dict[str, Any] = {"image": "img", "state": {}}
        if "waiting" in pod:
            container["state"] = {"waiting": {"reason": pod["waiting"]}}
        if failed:
            container["state"] = {"terminated": {"exitCode": pod["exit"], "reason": pod.get("reason", "Error")}}
        seen: dict[str, Any] = {"phase": "Failed" if failed else "Pending", "containerStatuses": [container]}
        if "unschedulable" in pod:
            why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            seen["conditions"] = [{**why, "message": pod["unschedulable"]}]
        pods.append({"metadata": {"name": "p-0"}, "status": seen})
        if "event" in pod:
            events.append({"reason": pod["event"], "message": "no volume", "involvedObject": {"name": "p-0"}})
    if create:
        events.append({"reason": "FailedCreate", "message": create, "involvedObject": {"name": "j"}})
    return KubeFacts(
        id="j",
        main=None if main is None else {"metadata": {"name": "j"}, "spec": {}, "status": {"conditions": status}},
        workload={"spec": {"active": active}, "status": {"conditions": conditions}} if workload else None,
        pods=pods,
        events=events,
        queue="team-a",
        said="rank 3 died",
        hosts=2,
    )


def test_every_quota_sentence_can_be_reached() -> None:
    """The table is read from above: a row that an earlier one hides would never be said."""
    for parts, reason, _ in QUOTA:
        word = parts.split("|")[0].replace(" .* ", " x ")
        assert explain_job(facts_of(pending=(word, "m")))[1] == reason.format(message="m", queue="team-a")


# What Kueue 0.19.2 writes into QuotaReserved, with the reason that it has by default (read in its sources).
NOT_ASSIGNED = "couldn't assign flavors to pod set w: "
KUEUE_SAYS = (
    (
        NOT_ASSIGNED + "insufficient quota for nvidia.com/gpu in flavor a100, previously considered "
        "podsets requests (0) + current podset request (16) > maximum capacity (0), insufficient unused quota for "
        "nvidia.com/gpu in flavor h100, 8 more needed",
        "queue team-a has no quota left for it now (",
    ),
    (
        NOT_ASSIGNED + "flavor a100 doesn't match node affinity, insufficient unused quota for "
        "nvidia.com/gpu in flavor h100, 8 more needed",
        "queue team-a has no quota left for it now (",
    ),
    (
        NOT_ASSIGNED + "insufficient quota for cpu in flavor f, previously considered podsets "
        "requests (0) + current podset request (16) > maximum capacity (8)",
        "it asks for more than queue team-a can ever have (",
    ),
    (
        NOT_ASSIGNED + "insufficient unused quota for cpu in flavor f, 8 more needed. Pending the "
        "preemption of 2 workload(s)",
        "jobs that give way to it are saving their checkpoints (",
    ),
    (
        NOT_ASSIGNED + 'topology "lab" allows to fit only 1 out of 2 pod(s). Total nodes: 3; '
        'excluded: resource "cpu": 2',
        "no part of the network has room for it in one piece (",
    ),
    (
        NOT_ASSIGNED + 'Flavor "h100" does not contain the requested level',
        "nodes of queue team-a have no label that launch.topology names (",
    ),
    ("LocalQueue team-a is terminating or missing", "there is no queue team-a in its namespace"),
    ("ClusterQueue a is terminating or missing", "the ClusterQueue behind team-a does not exist"),
    ("ClusterQueue a is stopped", "queue team-a is stopped or not set up ("),
    ("Workload no longer fits after processing another workload", "queue team-a has no quota left for it now ("),
    ("The workload has failed admission checks", "Kueue has not admitted it to queue team-a yet ("),
)


@pytest.mark.parametrize(("message", "begin"), KUEUE_SAYS)
def test_the_messages_of_kueue_are_understood(message: str, begin: str) -> None:
    assert explain_job(facts_of(pending=("Pending", message)))[1].startswith(begin)


def test_a_reason_of_its_own_outweighs_the_message() -> None:
    said = explain_job(facts_of(pending=("ExceedsMaxQuota", "insufficient unused quota for cpu in flavor f")))[1]
    assert said.startswith("it asks for more than queue team-a can ever have")
