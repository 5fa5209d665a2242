"""SEC001 to SEC004: formats, addresses, paths, and what stands in the record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rules.kit import Case, Flip, evidence
from rules.logs import good_log
from rules.swap import swapped

from phalanx.rules.evidence import Evidence
from phalanx.rules.facts.host import HostFacts
from phalanx.rules.facts.log_facts import GrammarFacts
from phalanx.rules.facts.trainers import PHALANX, Practice
from phalanx.rules.outcome import Spot

SPOT = Spot(file="runs/x/logs/rank-00000.log", line=3)


def job(*sets: str, **changes: Any) -> Evidence:
    return swapped(evidence(**{"practice": PHALANX, **changes}), *sets)


def run(*sets: str, **facts: Any) -> Evidence:
    return job(*sets, log=good_log(**facts))


def dcp(torch: str = "", **habits: Any) -> Evidence:
    """Another trainer that writes torch's distributed checkpoints."""
    host = HostFacts(name="box", source="this machine", packages={"torch": torch}) if torch else None
    return job(practice=Practice(trainer="torchtitan", checkpoint_format="dcp", **habits), host=host)


def metrics(listen: str) -> Evidence:
    return job("telemetry.prometheus=true", f'telemetry.listen="{listen}"')


def named(**changes: Any) -> Evidence:
    """A job that the loader would refuse: a plan or another trainer's file may hold one."""
    found = job()
    return replace(found, job=replace(found.the_job, **changes))


def saved_in(path: str) -> Evidence:
    found = job()
    return replace(found, job=replace(found.the_job, checkpoint=replace(found.the_job.checkpoint, path=path)))


def logged(**facts: Any) -> Evidence:
    return run(grammar=GrammarFacts(**{"has_provenance": True, **facts}))


SEC001 = [
    Case(rule="SEC001", name="as it is", verdict="pass", evidence=job),
    Case(rule="SEC001", name="a pickle", verdict="fail", evidence=dcp, says="dcp, which holds pickles"),
    Case(
        rule="SEC001",
        name="torch 2.10 and digests",
        verdict="pass",
        evidence=lambda: dcp("2.10.0", verifies_digests=True),
        boundary=True,
    ),
    Case(
        rule="SEC001",
        name="torch 2.9",
        verdict="fail",
        evidence=lambda: dcp("2.9.1", verifies_digests=True),
        boundary=True,
        says="with torch 2.9.1",
    ),
    Case(rule="SEC001", name="no digests", verdict="fail", evidence=lambda: dcp("2.13.0")),
    Case(
        rule="SEC001",
        name="nobody knows",
        verdict="unknown",
        evidence=lambda: job(practice=Practice(trainer="x")),
    ),
    Case(
        rule="SEC001",
        name="weights that are a pickle",
        verdict="fail",
        evidence=lambda: job('train.weights="models/pytorch_model.BIN"'),
        at="train.weights",
    ),
    Case(rule="SEC001", name="a folder", verdict="pass", evidence=lambda: job('train.weights="models/llama-3.1"')),
]

SEC002 = [
    Case(rule="SEC002", name="as it is", verdict="pass", evidence=job),
    Case(rule="SEC002", name="a private address", verdict="pass", evidence=lambda: job('fault.interface="10.0.0.7"')),
    Case(
        rule="SEC002",
        name="everywhere",
        verdict="fail",
        evidence=lambda: job('fault.interface="0.0.0.0"'),
        at="fault.interface",
        says="every address of the host",
    ),
    Case(
        rule="SEC002",
        name="a public one",
        verdict="fail",
        evidence=lambda: job('fault.interface="8.8.8.8"'),
        says="public",
    ),
    Case(rule="SEC002", name="a name", verdict="unknown", evidence=lambda: job('fault.interface="ib0"')),
    Case(
        rule="SEC002",
        name="the last private address",
        verdict="pass",
        evidence=lambda: job('fault.interface="172.31.255.255"'),
        boundary=True,
    ),
    Case(
        rule="SEC002",
        name="the next one",
        verdict="fail",
        evidence=lambda: job('fault.interface="172.32.0.0"'),
        boundary=True,
    ),
    Case(
        rule="SEC002",
        name="metrics for everybody",
        verdict="fail",
        evidence=lambda: metrics("0.0.0.0:9400"),
        at="telemetry.listen",
    ),
    Case(rule="SEC002", name="metrics on IPv6", verdict="pass", evidence=lambda: metrics("[::1]:9400")),
    Case(
        rule="SEC002",
        name="not served",
        verdict="pass",
        evidence=lambda: job('telemetry.listen="0.0.0.0:9400"'),
    ),
    Case(rule="SEC002", name="as it was", verdict="pass", evidence=lambda: run(listens=("127.0.0.1:80", "10.1.1.1"))),
    Case(rule="SEC002", name="it was open", verdict="fail", evidence=lambda: run(listens=("[::]:80",))),
    Case(
        rule="SEC002",
        name="another trainer lets everybody in",
        verdict="fail",
        evidence=lambda: job(practice=Practice(trainer="x", authenticated=False, listens=("0.0.0.0",))),
        severity="warning",
    ),
    Case(rule="SEC002", name="nobody knows", verdict="unknown", evidence=lambda: job(practice=Practice(trainer="x"))),
]

SEC003 = [
    Case(rule="SEC003", name="as it is", verdict="pass", evidence=job),
    Case(rule="SEC003", name="63 characters", verdict="pass", evidence=lambda: named(name="a" * 63), boundary=True),
    Case(rule="SEC003", name="64", verdict="fail", evidence=lambda: named(name="a" * 64), boundary=True, at="name"),
    Case(rule="SEC003", name="a name that climbs", verdict="fail", evidence=lambda: named(name="../x")),
    Case(rule="SEC003", name="inside", verdict="pass", evidence=lambda: saved_in("a/../b"), boundary=True),
    Case(
        rule="SEC003",
        name="outside",
        verdict="fail",
        evidence=lambda: saved_in("a/../../b"),
        boundary=True,
        at="checkpoint.path",
        says="leads out of the run",
    ),
    Case(rule="SEC003", name="absolute", verdict="pass", evidence=lambda: saved_in("/mnt/checkpoints")),
    Case(rule="SEC003", name="absolute, and back", verdict="fail", evidence=lambda: saved_in("/mnt/../etc")),
    Case(rule="SEC003", name="a store", verdict="pass", evidence=lambda: saved_in("s3://bucket/prefix")),
    Case(rule="SEC003", name="at home", verdict="fail", evidence=lambda: saved_in("~/checkpoints")),
    Case(rule="SEC003", name="an escape", verdict="fail", evidence=lambda: saved_in("a\x1b[2Jb")),
]

SEC004 = [
    Case(rule="SEC004", name="before a run", verdict="unknown", evidence=job, says="no evidence from the run log"),
    Case(rule="SEC004", name="clean", verdict="pass", evidence=logged, boundary=True),
    Case(
        rule="SEC004",
        name="a key",
        verdict="fail",
        evidence=lambda: logged(secrets=1, secrets_spot=SPOT),
        boundary=True,
        at=SPOT.file,
        says="1 line of",
    ),
    Case(rule="SEC004", name="nobody knows what ran", verdict="fail", evidence=lambda: logged(has_provenance=False)),
    Case(
        rule="SEC004",
        name="searched in part",
        verdict="pass",
        evidence=lambda: logged(secrets_partial=True),
        says="searched in part",
    ),
    Case(
        rule="SEC004",
        name="another configuration than was launched",
        verdict="fail",
        evidence=lambda: logged(job_changed=True),
        says="job.json is not the configuration that was launched",
    ),
    Case(rule="SEC004", name="not told", verdict="unknown", evidence=lambda: logged(has_provenance=None)),
]

CASES = [*SEC001, *SEC002, *SEC003, *SEC004]
FLIPS = [
    Flip(rule="SEC001", limit="formats", value=("raw",), evidence=job, before="pass", after="fail"),
    Flip(
        rule="SEC001",
        limit="torch",
        value=("2.11.0",),
        evidence=lambda: dcp("2.10.0", verifies_digests=True),
        before="pass",
        after="fail",
    ),
    Flip(
        rule="SEC001",
        limit="endings",
        value=(".1",),
        evidence=lambda: job('train.weights="models/llama-3.1"'),
        before="pass",
        after="fail",
    ),
    Flip(
        rule="SEC002",
        limit="reach",
        value=("loopback",),
        evidence=lambda: job('fault.interface="10.0.0.7"'),
        before="pass",
        after="fail",
    ),
    Flip(rule="SEC003", limit="name_most", value=3, evidence=job, before="pass", after="fail"),
    Flip(rule="SEC003", limit="climbs", value=1, evidence=lambda: saved_in("../b"), before="fail", after="pass"),
    Flip(rule="SEC004", limit="lines", value=1, evidence=lambda: logged(secrets=1), before="fail", after="pass"),
    Flip(
        rule="SEC004",
        limit="provenance",
        value=False,
        evidence=lambda: logged(has_provenance=False),
        before="fail",
        after="pass",
    ),
]
