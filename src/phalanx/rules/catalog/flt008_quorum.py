"""FLT008: the quorum of a round is more than half of the peers, and no more than there are."""

from __future__ import annotations

from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Edit, Impact, Outcome, exempt, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule


def check(evidence: Evidence, limits: Limits) -> Outcome:
    """Compare the quorum with the number of sites in the plan, or of peers in the job."""
    sync = evidence.the_job.sync
    if sync.mode != "quorum":
        return exempt("no quorum")
    if not sync.quorum:
        return passed("a round waits for all peers", value=0)
    sites = evidence.plan.sites if evidence.plan is not None else None
    peers = len(sites.sites) if sites is not None else sync.peers
    if not peers:
        fix = "plan on a cluster of sites, or set sync.peers"
        return unknown("how many peers there are is not known", fix=fix, at="sync.quorum")
    half = limits.number("more_than_share") * peers
    share = f"{sync.quorum} of {peers} peers"
    enough = int(half) + 1
    if sync.quorum > peers:
        return failed(
            f"a round needs {share}: it never commits",
            value=sync.quorum,
            threshold=peers,
            at="sync.quorum",
            impact=Impact(note="nothing is ever learnt"),
            edits=(Edit(key="sync.quorum", value=enough, safe=False, note="the smallest majority"),),
        )
    if sync.quorum <= half:
        return failed(
            f"a round begins with {share}, and no more than half can commit none",
            formula=(f"{sync.quorum} <= {limits.number('more_than_share'):g} · {peers} = {half:g}",),
            value=sync.quorum,
            threshold=half,
            at="sync.quorum",
            impact=Impact(note="two halves of a divided network must not both commit: such rounds are discarded"),
            edits=(Edit(key="sync.quorum", value=enough, safe=False, note="the smallest majority"),),
        )
    return passed(f"a round commits with {share}", value=sync.quorum, threshold=half, at="sync.quorum")


RULE = Rule(
    id="FLT008",
    slug="quorum-is-majority",
    severity="error",
    requires="J",
    uses="P",
    requirement="A quorum is more than half of the peers, and no more than there are.",
    why="""
When the network between sites breaks, both parts may have half of the peers. If half were enough, both would commit the
same round with other results, and nothing could join them again. More than there are is never reached.
""",
    how="""
`peers / 2 < quorum <= peers`, with the sites of the plan's cluster, or `sync.peers`; `quorum = 0` waits for all.
""",
    limits={"more_than_share": Limit(value=0.5, note="of the peers: two majorities always have a peer in common")},
    bad="""
[sync]
mode = "quorum"
peers = 4
quorum = 2
""",
    good="""
[sync]
mode = "quorum"
peers = 4
quorum = 3
""",
    fix="`quorum` of more than half of the peers.",
    waive="Never: such rounds are discarded.",
    history="2026.1: added with training over slow links.",
    references=(
        Reference(
            text="two majorities intersect: Gifford, Weighted Voting for Replicated Data, SOSP 1979", mark="recalled"
        ),
    ),
    check=check,
)
