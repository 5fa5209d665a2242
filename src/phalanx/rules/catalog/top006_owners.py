"""TOP006: more than one site accepts connections, so that no single site can stop the run."""

from __future__ import annotations

from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Impact, Outcome, exempt, failed, passed
from phalanx.rules.rule import Limit, Limits, Reference, Rule


def check(evidence: Evidence, limits: Limits) -> Outcome:
    """Count the sites of the plan that are not client-only."""
    sites = evidence.the_plan.sites
    if sites is None:
        return exempt("one cluster: no slow links")
    if not evidence.the_job.sync.has_peers:
        return exempt("no peers")
    accepting = [site.name for site in sites.sites if not site.client_only]
    min_owners = limits.number("least_owners")
    statement = f"{len(accepting)} of {len(sites.sites)} sites accept connections"
    if len(accepting) >= min_owners:
        return passed(statement, value=len(accepting), threshold=min_owners, at="plan:sites")
    reason = f"{accepting[0]} averages for all and leads every round" if accepting else "nobody can average"
    return failed(
        f"{statement}: {reason}",
        value=len(accepting),
        threshold=min_owners,
        at="plan:sites",
        impact=Impact(note="when that site is away, no round commits, and a client-only site cannot take over"),
        fix="open a port at another site and remove its client_only, or add a site that accepts connections",
    )


RULE = Rule(
    id="TOP006",
    slug="sites-accept-connections",
    severity="warning",
    requires="JP",
    requirement="At least two sites accept connections.",
    why="""
A site behind NAT sends its updates and fetches results; it averages for nobody, leads no round and admits no newcomer.
With one site that accepts connections the run has a centre again: while it is away nothing commits, and its link
carries the whole exchange. Of two sites with one behind NAT this is always so.
""",
    how="Sites of the cluster that are not `client_only` are at least 2.",
    limits={"least_owners": Limit(value=2, unit="sites", note="so that one may leave: our choice")},
    bad="""
[[site]]
name = "home"
client_only = true   # and one other site
""",
    good="""
[[site]]
name = "home"        # port forwarded
""",
    fix="A port that others can reach, at a second site.",
    waive="A trial between two machines.",
    history="2026.1: added with training over slow links.",
    references=(
        Reference(text="client mode: DeDLOC, arXiv:2106.10207", mark="recalled"),
        Reference(text="least number of sites", mark="our choice"),
    ),
    check=check,
)
