"""COM005, OPT002, FLT008, TOP006 and EFF006: peers on slow links."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from rules.kit import JOB, Case, Evidence, Flip, evidence

SITE = """\
[[site]]
name = "{name}"
devices = "8xH100:1"
up_mbit_s = {mbit_s}
down_mbit_s = {mbit_s}
latency_ms = 40
client_only = {client_only}
"""
SHORT = JOB.replace('tokens = "1T"', 'tokens = "1.6B"')  # 382 steps


@functools.cache
def sites_file(clients: tuple[bool, ...], mbit_s: float) -> str:
    """A cluster of sites, some of which accept no connections."""
    path = Path(mkdtemp(prefix="phalanx-sites-")) / "sites.toml"
    blocks = (
        SITE.format(name=f"s{index}", mbit_s=mbit_s, client_only=str(hidden).lower())
        for index, hidden in enumerate(clients)
    )
    path.write_text("".join(blocks), encoding="utf-8")
    return str(path)


def peers(*sets: str, text: str = JOB, clients: tuple[bool, ...] = (False,) * 3, mbit_s: float = 500.0) -> Evidence:
    """A job on a cluster of sites."""
    return evidence(*(f"sync.{one}" for one in sets), text=text, cluster=sites_file(clients, mbit_s))


def synced(*sets: str, **changes: Any) -> Evidence:
    """A job with [sync] on one cluster."""
    return evidence(*(f"sync.{one}" for one in sets), **changes)


def short(*sets: str) -> Evidence:
    return synced("mode=diloco", *sets, text=SHORT)


def exposed(ratio: float) -> Evidence:
    """A plan whose exchanges hold compute up for so many times the compute between them."""
    found = peers("mode=diloco", "codec=int8", "inner_steps=200")
    plan = found.the_plan
    assert plan.sites is not None
    row = plan.sites.row
    step_s = (1.0 + ratio) * 10.0 / row.prediction.inner_steps
    prediction = replace(row.prediction, exposed_s=10.0 * ratio, step_s=step_s)
    rows = list(plan.sites.rows)
    rows[plan.sites.chosen] = replace(row, prediction=prediction)
    return replace(found, plan=replace(plan, sites=replace(plan.sites, rows=tuple(rows))))


CASES = [
    Case(rule="COM005", name="no peers", verdict="pass", evidence=evidence, says="no peers"),
    Case(rule="COM005", name="int8", verdict="pass", evidence=lambda: synced("mode=target-batch", "codec=int8")),
    Case(
        rule="COM005",
        name="top-k of raw gradients",
        verdict="fail",
        evidence=lambda: synced("mode=target-batch", "codec=topk-2bit"),
        severity="error",
        says="Adam takes the rest for zeros",
        at="sync.codec",
    ),
    Case(
        rule="COM005",
        name="top-k of updates",
        verdict="pass",
        evidence=lambda: synced("mode=diloco", "codec=topk-2bit"),
    ),
    Case(
        rule="COM005",
        name="no feedback",
        verdict="fail",
        evidence=lambda: synced("mode=diloco", "codec=int4", "feedback=0"),
        severity="error",
        says="carries 0% of what it leaves out",
        at="sync.feedback",
    ),
    Case(
        rule="COM005",
        name="just enough feedback",
        verdict="pass",
        evidence=lambda: synced("mode=diloco", "codec=topk-2bit", "feedback=0.5"),
        boundary=True,
    ),
    Case(
        rule="COM005",
        name="just too little feedback",
        verdict="fail",
        evidence=lambda: synced("mode=diloco", "codec=topk-2bit", "feedback=0.49"),
        boundary=True,
    ),
    Case(rule="OPT002", name="every step", verdict="pass", evidence=evidence, says="no peer takes steps alone"),
    Case(rule="OPT002", name="auto", verdict="pass", evidence=lambda: short("inner_steps=20"), says="76 of 382 steps"),
    Case(
        rule="OPT002",
        name="cold start",
        verdict="fail",
        evidence=lambda: short("inner_steps=20", "synchronous_steps=0"),
        severity="warning",
        says="0 of 382 steps at the start are synchronous",
        at="sync.synchronous_steps",
    ),
    Case(
        rule="OPT002",
        name="just warm",
        verdict="pass",
        evidence=lambda: short("inner_steps=20", "synchronous_steps=20"),
        boundary=True,
    ),
    Case(
        rule="OPT002",
        name="just not",
        verdict="fail",
        evidence=lambda: short("inner_steps=20", "synchronous_steps=19"),
        boundary=True,
    ),
    Case(
        rule="OPT002", name="a long run", verdict="pass", evidence=lambda: synced("mode=diloco", "synchronous_steps=0")
    ),
    Case(
        rule="OPT002",
        name="hardly any round",
        verdict="fail",
        evidence=lambda: short("inner_steps=100"),
        says="peers exchange 3.1 times",
        at="sync.inner_steps",
    ),
    Case(
        rule="OPT002",
        name="from trained weights",
        verdict="pass",
        evidence=lambda: _trained(short("inner_steps=20", "synchronous_steps=0")),
        says="trained weights",
    ),
    Case(rule="FLT008", name="no quorum", verdict="pass", evidence=lambda: synced("mode=diloco")),
    Case(
        rule="FLT008", name="all", verdict="pass", evidence=lambda: synced("mode=quorum", "peers=4"), says="all peers"
    ),
    Case(
        rule="FLT008",
        name="half",
        verdict="fail",
        evidence=lambda: synced("mode=quorum", "peers=4", "quorum=2"),
        severity="error",
        says="2 of 4 peers, and no more than half can commit none",
        at="sync.quorum",
        boundary=True,
    ),
    Case(
        rule="FLT008",
        name="a majority",
        verdict="pass",
        evidence=lambda: synced("mode=quorum", "peers=4", "quorum=3"),
        boundary=True,
    ),
    Case(
        rule="FLT008",
        name="more than the sites",
        verdict="fail",
        evidence=lambda: peers("mode=quorum", "quorum=4", "codec=int8"),
        says="a round needs 4 of 3 peers: it never commits",
    ),
    Case(
        rule="FLT008",
        name="of the sites",
        verdict="pass",
        evidence=lambda: peers("mode=quorum", "quorum=2", "codec=int8"),
        says="2 of 3 peers",
    ),
    Case(rule="FLT008", name="unknown peers", verdict="unknown", evidence=lambda: synced("mode=quorum", "quorum=2")),
    Case(rule="TOP006", name="one cluster", verdict="pass", evidence=evidence, says="one cluster"),
    Case(
        rule="TOP006",
        name="two of three",
        verdict="pass",
        evidence=lambda: peers("mode=diloco", clients=(True, False, False)),
        boundary=True,
    ),
    Case(
        rule="TOP006",
        name="one of two",
        verdict="fail",
        evidence=lambda: peers("mode=diloco", clients=(False, True)),
        severity="warning",
        says="1 of 2 sites accept connections: s0 averages for all",
        boundary=True,
    ),
    Case(rule="EFF006", name="one cluster", verdict="pass", evidence=evidence, says="no exchange"),
    Case(
        rule="EFF006",
        name="gradients of 8B parameters",
        verdict="fail",
        evidence=lambda: peers("mode=target-batch"),
        severity="warning",
        says="sites wait longer than they compute",
        at="sync.mode",
    ),
    Case(
        rule="EFF006",
        name="two hundred steps",
        verdict="pass",
        evidence=lambda: peers("mode=diloco", "codec=int8", "inner_steps=200"),
    ),
    Case(rule="EFF006", name="just as long", verdict="pass", evidence=lambda: exposed(1.0), boundary=True),
    Case(rule="EFF006", name="just longer", verdict="fail", evidence=lambda: exposed(1.001), boundary=True),
]


def _trained(found: Evidence) -> Evidence:
    return replace(found, job=replace(found.the_job, train=replace(found.the_job.train, weights="weights")))


FLIPS = [
    Flip(
        rule="COM005",
        limit="not_gradients",
        value=(),
        evidence=lambda: synced("mode=target-batch", "codec=topk-2bit"),
        before="fail",
        after="pass",
    ),
    Flip(
        rule="COM005",
        limit="biased",
        value=("topk-2bit",),
        evidence=lambda: synced("mode=diloco", "codec=int4", "feedback=0"),
        before="fail",
        after="pass",
    ),
    Flip(
        rule="COM005",
        limit="least_feedback",
        value=0.99,
        evidence=lambda: synced("mode=diloco", "codec=topk-2bit"),
        before="pass",
        after="fail",
    ),
    Flip(
        rule="OPT002",
        limit="least_share",
        value=0.5,
        evidence=lambda: short("inner_steps=20"),
        before="pass",
        after="fail",
    ),
    Flip(
        rule="OPT002",
        limit="short_steps",
        value=100,
        evidence=lambda: short("inner_steps=20", "synchronous_steps=0"),
        before="fail",
        after="pass",
    ),
    Flip(
        rule="OPT002",
        limit="least_rounds",
        value=100,
        evidence=lambda: short("inner_steps=20"),
        before="pass",
        after="fail",
    ),
    Flip(
        rule="FLT008",
        limit="more_than_share",
        value=0.4,
        evidence=lambda: synced("mode=quorum", "peers=4", "quorum=2"),
        before="fail",
        after="pass",
    ),
    Flip(
        rule="TOP006",
        limit="least_owners",
        value=1,
        evidence=lambda: peers("mode=diloco", clients=(False, True)),
        before="fail",
        after="pass",
    ),
    Flip(
        rule="EFF006",
        limit="most_ratio",
        value=1e6,
        evidence=lambda: peers("mode=target-batch"),
        before="fail",
        after="pass",
    ),
]
