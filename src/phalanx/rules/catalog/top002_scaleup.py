"""TOP002: tensor groups stay inside one scale-up domain."""

from __future__ import annotations

from phalanx.rules.catalog.com_messages import members_per_domain, sane
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Edit, Outcome, exempt, failed, passed
from phalanx.rules.rule import Limit, Limits, Reference, Rule


def check(evidence: Evidence, limits: Limits) -> Outcome:
    """Compare the ranks of a tensor group that share a domain with the size of the group."""
    plan = evidence.the_plan
    size, domain = plan.layout.tensor, plan.cluster.domain_devices
    if size <= 1:
        return exempt("no tensor parallelism")
    together = members_per_domain(size, 1, domain=domain, devices=plan.layout.devices)
    link = plan.cluster.accelerator.link
    formula = (f"{together} of the {size} ranks of a tensor group share one domain of {domain:,} devices ({link})",)
    if together >= size * limits.number("together"):
        statement = f"tensor groups of {size} stay inside a domain of {domain:,}"
        return passed(statement, formula=formula, value=together, threshold=size, unit="ranks")
    # The largest size that divides both the group and the domain.
    fitting = max(n for n in range(1, max(1, min(size, domain)) + 1) if domain % n == 0 and size % n == 0)
    return failed(
        f"tensor groups of {size} span {-(-size // together)} domains of {domain:,} devices",
        formula=formula,
        value=together,
        threshold=size,
        unit="ranks",
        at="parallel.tensor",
        severity="warning" if evidence.profile.name == "cpu-gloo" else "error",
        impact=evidence.loses(
            _lost_seconds(evidence), "tensor traffic at the speed of the network instead of the links"
        ),
        fix="split the model over pipeline stages or shards instead",
        edits=(Edit(key="parallel.tensor", value=fitting, safe=False, note=f"fits a domain of {domain:,}"),),
    )


def _lost_seconds(evidence: Evidence) -> float:
    """Return the share of the step that exposed tensor traffic loses to the network, compared with the links."""
    plan = evidence.the_plan
    shown_s = sum(group.shown_s for group in plan.mapping if group.axis == "tensor")
    slower = sane(plan.cluster.link_bytes_per_s) / sane(plan.cluster.nic_bytes_per_s)
    return shown_s * max(0.0, 1.0 - 1.0 / max(slower, 1.0)) / max(plan.prediction.step_s, 1e-30)


RULE = Rule(
    id="TOP002",
    slug="tp-inside-scaleup",
    severity="error",
    requires="JP",
    requirement="Tensor groups stay inside one scale-up domain.",
    why="""
Tensor parallelism sends every layer's activations several times a step, in the way of the compute that waits for them.
Inside an H100 node a GPU has 450 GB/s, between nodes 50: nine times less. Megatron keeps tensor groups inside a node
(arXiv:2104.04473); and a device lost takes its whole tensor group with it, which in a domain of 72 can cost 10 % of the
throughput for 0.1 % of the GPUs (NTP, arXiv:2504.06095).
""",
    how="""
The ranks of a tensor group that share a domain, when ranks fill domains in order, are all of them. A group that does
not tile its domain (3 in 8) straddles two. The domain is the cluster's: 8 on HGX boards, 72 on NVL72, the slice of a
TPU, the host of CPU ranks (where a breach is a warning). Expert groups may span domains: their traffic has its own
kernels and hides (see TOP004).
""",
    limits={
        "together": Limit(value=1.0, note="share of a tensor group that must share a domain: all of it, by definition"),
    },
    bad="""
[parallel]
tensor = 16         # on nodes of 8
""",
    good="""
[parallel]
tensor = 8
pipeline = 2
""",
    fix="At most as many tensor ranks as a domain has devices, and a divisor of them.",
    waive="A fabric between nodes as fast as the links inside (then correct the domain in the cluster file).",
    references=(
        Reference(text="Megatron-LM, arXiv:2104.04473", mark="recalled"),
        Reference(text="nonuniform tensor parallelism, arXiv:2504.06095", mark="read"),
        Reference(text="450 and 50 GB/s: NVLink 4 and a 400 Gb/s card", mark="recalled"),
    ),
    check=check,
)
