"""TOP001 to TOP004: degrees, domains, cards, and the order of axes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rules.kit import JOB, Case, Evidence, Flip, evidence

from phalanx.errors import Problem
from phalanx.rules.facts.host import HostFacts, NicPath

LARGE = JOB.replace("llama-3-8b", "llama-3.1-405b")
GRACE = JOB.replace("global_sequences = 512", "global_sequences = 576")
STAGES = ("parallel.virtual_pipeline=4", "parallel.schedule=interleaved", "parallel.zero=1")


def laid_out(*sets: str, **changes: Any) -> Evidence:
    """The good job with a plan whose layout was edited by hand."""
    found = evidence(*sets)
    return replace(found, plan=replace(found.the_plan, layout=replace(found.the_plan.layout, **changes)))


def host(*paths: str) -> HostFacts:
    cards = tuple(NicPath(device=f"GPU{i}", nic=f"mlx5_{i}", path=path) for i, path in enumerate(paths))
    return HostFacts(name="node", source="this machine", nic_paths=cards)


def axes_at(ratio: float) -> Evidence:
    """Stages that send so much that the plan's order takes `ratio` times the best one's."""
    found = evidence("parallel.pipeline=8", *STAGES, cluster="8xH100:8")
    data, pipeline = found.the_plan.mapping
    # T(data, pipeline) = d/450 + p/50 and T(pipeline, data) = d/50 + p/450, in GB: p/d for a given ratio.
    share = (ratio / 50 - 1 / 450) / (1 / 50 - ratio / 450)
    sends = replace(pipeline, bytes_per_step=share * data.bytes_per_step)
    return replace(found, plan=replace(found.the_plan, mapping=(data, sends)))


def straddling() -> Evidence:
    """Tensor groups of 8 in domains of 12: every other one lies in two."""
    found = evidence("parallel.tensor=8")
    return replace(found, plan=replace(found.the_plan, cluster=replace(found.the_plan.cluster, domain_devices=12)))


CASES = [
    Case(rule="TOP001", name="as planned", verdict="pass", evidence=evidence),
    Case(
        rule="TOP001",
        name="a product one rank short",
        verdict="fail",
        evidence=lambda: laid_out(data=127),
        boundary=True,
        severity="error",
        says="127 ranks, and there are 128 devices",
        at="parallel.data",
    ),
    Case(
        rule="TOP001",
        name="one rank too many",
        verdict="fail",
        evidence=lambda: laid_out(data=129),
        boundary=True,
        says="129 ranks",
    ),
    Case(
        rule="TOP001",
        name="what the planner refused",
        verdict="fail",
        evidence=lambda: evidence("parallel.pipeline=3"),
        says="pipeline 3 = 3 does not divide the 128 devices",
        at="parallel.pipeline",
    ),
    Case(
        rule="TOP001",
        name="heads",
        verdict="fail",
        evidence=lambda: laid_out(tensor=64, data=2),
        says="tensor 64 does not divide the model's 32 attention heads",
        at="parallel.tensor",
    ),
    Case(
        rule="TOP001",
        name="as many chunks as layers",
        verdict="pass",
        evidence=lambda: laid_out(pipeline=8, virtual_pipeline=4, data=16),
        boundary=True,
    ),
    Case(
        rule="TOP001",
        name="more chunks than layers",
        verdict="fail",
        evidence=lambda: laid_out(pipeline=8, virtual_pipeline=5, data=16),
        boundary=True,
        says="40 chunks of the pipeline for 32 layers",
    ),
    Case(
        rule="TOP001",
        name="experts",
        verdict="fail",
        evidence=lambda: laid_out(expert=3),
        says="expert 3 does not divide data × context × tensor = 128",
    ),
    Case(
        rule="TOP001",
        name="memory is another rule's",
        verdict="pass",
        evidence=lambda: evidence(cluster="8xA100-40GB:1", text=LARGE),
        says="not the degrees",
    ),
    Case(
        rule="TOP001",
        name="a configuration that does not say",
        verdict="unknown",
        evidence=lambda: evidence(
            plan=None, refusals=(Problem(where="x.yaml", what="does not say which model is trained", fix="give --set"),)
        ),
    ),
    Case(rule="TOP001", name="no cluster", verdict="unknown", evidence=lambda: evidence(plan=None)),
    Case(rule="TOP002", name="none", verdict="pass", evidence=evidence),
    Case(
        rule="TOP002",
        name="the whole domain",
        verdict="pass",
        evidence=lambda: evidence("parallel.tensor=8"),
        boundary=True,
    ),
    Case(
        rule="TOP002",
        name="two domains",
        verdict="fail",
        evidence=lambda: evidence("parallel.tensor=16"),
        boundary=True,
        severity="error",
        says="span 2 domains of 8",
        at="parallel.tensor",
    ),
    Case(rule="TOP002", name="straddling", verdict="fail", evidence=straddling, says="span 2 domains of 12"),
    Case(
        rule="TOP002",
        name="CPU ranks are only warned",
        verdict="fail",
        evidence=lambda: evidence("parallel.tensor=16", profile="cpu-gloo"),
        severity="warning",
    ),
    Case(rule="TOP003", name="nobody looked", verdict="unknown", evidence=evidence, says="no evidence from the host"),
    Case(rule="TOP003", name="near", verdict="pass", evidence=lambda: evidence(host=host("PIX", "pxb"))),
    Case(
        rule="TOP003",
        name="one behind the CPU",
        verdict="fail",
        evidence=lambda: evidence(host=host("PIX", "PHB")),
        boundary=True,
        severity="warning",
        says="1 of 2 devices reach their network card through the CPU",
    ),
    Case(rule="TOP003", name="one node", verdict="pass", evidence=lambda: evidence(cluster="8xH100:1")),
    Case(
        rule="TOP003",
        name="Grace",
        verdict="pass",
        evidence=lambda: evidence(cluster="72xGB200:8", text=GRACE),
        says="coherent",
    ),
    Case(rule="TOP003", name="CPU ranks", verdict="pass", evidence=lambda: evidence(profile="cpu-gloo")),
    Case(rule="TOP003", name="no cards", verdict="unknown", evidence=lambda: evidence(host=host())),
    Case(rule="TOP004", name="one axis", verdict="pass", evidence=evidence, says="one axis"),
    Case(
        rule="TOP004",
        name="tensor inside, stages across",
        verdict="pass",
        evidence=lambda: evidence("parallel.tensor=8", "parallel.pipeline=4", "parallel.zero=1"),
        says="1.00x",
    ),
    Case(
        rule="TOP004",
        name="stages between nodes",
        verdict="fail",
        evidence=lambda: evidence("parallel.pipeline=8", *STAGES, cluster="8xH100:8"),
        severity="warning",
        says="3.15x the time it would with pipeline, data nearest first",
        at="plan:mapping",
    ),
    Case(rule="TOP004", name="just good", verdict="pass", evidence=lambda: axes_at(1.099), boundary=True),
    Case(rule="TOP004", name="just bad", verdict="fail", evidence=lambda: axes_at(1.101), boundary=True),
]
FLIPS = [
    Flip(
        rule="TOP001",
        limit="every_device",
        value=False,
        evidence=lambda: laid_out(data=64),
        before="fail",
        after="pass",
    ),
    Flip(
        rule="TOP002",
        limit="together",
        value=0.5,
        evidence=lambda: evidence("parallel.tensor=16"),
        before="fail",
        after="pass",
    ),
    Flip(
        rule="TOP003",
        limit="near",
        value=("PIX", "PXB", "PHB"),
        evidence=lambda: evidence(host=host("PIX", "PHB")),
        before="fail",
        after="pass",
    ),
    Flip(rule="TOP004", limit="most_ratio", value=1.2, evidence=lambda: axes_at(1.15), before="fail", after="pass"),
]
