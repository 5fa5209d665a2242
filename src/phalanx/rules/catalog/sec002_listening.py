"""SEC002: control, collective and metrics sockets are not open to strangers."""

from __future__ import annotations

import ipaddress
from typing import Literal

from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Edit, Impact, Outcome, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule

Reach = Literal["loopback", "private", "everywhere", "public", "a name"]
NO_TIME = Impact(note="no time by itself: whoever reaches the port may read the run, or give it orders")


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check the addresses of agents and metrics, those in the run's record, and the trainer's default behaviour."""
    allowed = limits.words("reach")
    return (
        *_judge_agents(evidence, allowed),
        *_judge_metrics(evidence, allowed),
        *_judge_log(evidence, allowed),
        *_judge_trainer(evidence, allowed),
    )


def reach_of(host: str) -> Reach:
    """Classify an address by the hosts that can reach it.

    >>> [reach_of(one) for one in ("", "127.0.0.1", "10.0.0.1", "fd00::1", "0.0.0.0", "8.8.8.8", "ib0")]
    ['loopback', 'loopback', 'private', 'private', 'everywhere', 'public', 'a name']
    >>> reach_of("[::ffff:0.0.0.0]"), reach_of("[::ffff:127.0.0.1]")
    ('everywhere', 'loopback')
    """
    bare = host.strip("[]").partition("%")[0]
    if bare in ("", "localhost"):
        return "loopback"
    if bare in ("*", "::", "0"):
        return "everywhere"
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        return "a name"
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped  # ::ffff:0.0.0.0 means 0.0.0.0
    if address.is_unspecified:
        return "everywhere"
    if address.is_loopback:
        return "loopback"
    return "private" if address.is_private or address.is_link_local else "public"


def _judge_agents(evidence: Evidence, allowed: tuple[str, ...]) -> tuple[Outcome, ...]:
    if not evidence.stated("fault.interface"):
        return ()
    host = evidence.the_job.fault.interface
    subject = "agents and ranks listen on"
    return (_judge_address(host or "127.0.0.1", subject, "fault.interface", allowed),)


def _judge_metrics(evidence: Evidence, allowed: tuple[str, ...]) -> tuple[Outcome, ...]:
    telemetry = evidence.the_job.telemetry
    if not telemetry.prometheus or not evidence.stated("telemetry.listen"):
        return ()
    host, _, port = telemetry.listen.rpartition(":")
    return (_judge_address(host, "metrics are served on", "telemetry.listen", allowed, port=port),)


def _judge_address(host: str, who: str, key: str, allowed: tuple[str, ...], *, port: str = "") -> Outcome:
    reach, host_text = reach_of(host), host[:60]
    if reach in allowed:
        return passed(f"{who} {host_text} ({reach})", value=host_text, threshold=", ".join(allowed), at=key)
    if reach == "a name":
        return unknown(
            f"{who} {host_text}: whether that is a private address is not known", fix="write it in numbers", at=key
        )
    edits = (Edit(key=key, value=f"127.0.0.1:{port}", safe=True, note="come in through ssh -L"),) if port else ()
    return failed(
        f"{who} {host_text}, which is {'every address of the host' if reach == 'everywhere' else 'public'}",
        formula=(f"reach of {host_text} is {reach}, not one of {', '.join(allowed)}",),
        value=host_text,
        threshold=", ".join(allowed),
        at=key,
        impact=NO_TIME,
        edits=edits,
        fix="" if edits else f"{key}: the address of the private network that the hosts share",
    )


def _judge_log(evidence: Evidence, allowed: tuple[str, ...]) -> tuple[Outcome, ...]:
    log = evidence.log
    if log is None or not log.listens:
        return ()
    exposed = [address for address in log.listens if reach_of(_address_host(address)) in ("everywhere", "public")]
    exposed = [address for address in exposed if reach_of(_address_host(address)) not in allowed]
    addresses = ", ".join(address[:60] for address in (exposed or log.listens)[:4])
    names = [address for address in log.listens if reach_of(_address_host(address)) == "a name"]
    if not exposed and names:
        addresses = ", ".join(address[:60] for address in names[:4])
        return (unknown(f"the run listened on {addresses}: whether that is private is not known", fix="give numbers"),)
    if not exposed:
        return (passed(f"the run listened on {addresses}", value=len(log.listens), unit="addresses"),)
    return (
        failed(
            f"the run listened on {addresses}",
            value=addresses,
            threshold=", ".join(allowed),
            impact=NO_TIME,
            fix="set fault.interface (or --address) and telemetry.listen to an address of the private network",
        ),
    )


def _address_host(address: str) -> str:
    """Return the host of an address without its port: `10.0.0.1:80`, `[::1]:80`, `::1`."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.rpartition(":")[0] if address.count(":") == 1 else address


def _judge_trainer(evidence: Evidence, allowed: tuple[str, ...]) -> tuple[Outcome, ...]:
    practice = evidence.practice
    if practice.authenticated is None and practice.listens is None:
        return (
            unknown(f"where {practice.trainer} listens, and to whom, is not known", fix="see ss -tlnp while it runs"),
        )
    open_addresses = [
        address for address in practice.listens or () if reach_of(_address_host(address)) not in (*allowed, "a name")
    ]
    if practice.authenticated and not open_addresses:
        return (passed(f"{practice.trainer} asks for a secret on every control socket"),)
    reasons = []
    if open_addresses:
        reasons.append(f"listens on {', '.join(open_addresses[:4])} by default")
    if practice.authenticated is False:
        reasons.append("lets in whoever connects")
    if not reasons:
        return (unknown(f"whether {practice.trainer} asks who connects is not known", fix="keep its hosts private"),)
    return (
        failed(
            f"{practice.trainer} {' and '.join(reasons)}",
            value=", ".join(open_addresses) or "no authentication",
            threshold=", ".join(allowed),
            severity="warning",
            impact=NO_TIME,
            fix="keep the hosts on a private network, with no port of theirs reachable from another",
        ),
    )


RULE = Rule(
    id="SEC002",
    slug="closed-by-default",
    severity="error",
    requires="J",
    uses="L",
    requirement="Control, collective and metrics sockets listen on the loopback or on a declared private address.",
    why="""
PyTorch's c10d, RPC and TCPStore have no authorization and no encryption: whoever reaches them can run code
(pytorch SECURITY.md). Ray's dashboard without a password was exploited widely (CVE-2023-48022, "ShadowRay"), and even
endpoints behind a browser are reached by DNS rebinding when they listen on 0.0.0.0 (CVE-2026-27482).
""",
    how="""
`fault.interface`, `telemetry.listen` (where `telemetry.prometheus` is on) and every address in the run's own record
are loopback or private (RFC 1918, unique local, link local): a private address that was written down counts as
declared. 0.0.0.0, :: and public addresses need a waiver. The trainer asks for a secret on its control sockets; of
other trainers this is a warning, since a private network can make up for it.
""",
    limits={
        "reach": Limit(value=("loopback", "private"), note="kinds of addresses that may be listened on"),
    },
    bad="""
[telemetry]
prometheus = true
listen = "0.0.0.0:9400"
""",
    good="""
[telemetry]
prometheus = true
listen = "127.0.0.1:9400"
""",
    fix="Listen on 127.0.0.1 and come in through `ssh -L`; with several hosts, on their private address.",
    waive="A host whose firewall closes the port, named in the reason.",
    references=(
        Reference(text="pytorch/pytorch: SECURITY.md", mark="read"),
        Reference(text="CVE-2023-48022, CVE-2026-27482", mark="read"),
    ),
    check=check,
)
