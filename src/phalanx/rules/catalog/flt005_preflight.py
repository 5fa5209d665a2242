"""FLT005: hosts are checked before every membership."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Impact, Outcome, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import plural

if TYPE_CHECKING:
    from phalanx.rules.facts.log_facts import LogFacts

# Share of starts that a sick host spoils: removing lemon nodes cut failures of large jobs from 14 to 4 %
# (arXiv:2410.21680).
SPOILT = 0.10


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check the log if there is one, else the trainer's behaviour, and the packages installed on this host."""
    log = evidence.log
    first = _judge_log(evidence, log, limits) if log is not None else _judge_trainer(evidence)
    return (first, *_judge_host(evidence, limits))


def _judge_trainer(evidence: Evidence) -> Outcome:
    practice = evidence.practice
    if practice.preflight is None:
        return unknown(
            f"whether {practice.trainer} checks its hosts before it starts is not known",
            fix="run a health check in the prolog (dcgmi diag -r 1) and say so in a waiver",
        )
    if practice.preflight:
        return passed(f"{practice.trainer} checks every host before it takes part, and again before each membership")
    return failed(
        f"{practice.trainer} does not check its hosts before it starts",
        severity="warning",  # the scheduler may check hosts, which no configuration of a trainer shows
        impact=_a_start(evidence),
        fix="run a health check in the prolog of the scheduler: dcgmi diag -r 1 takes seconds",
    )


def _judge_log(evidence: Evidence, log: LogFacts, limits: Limits) -> Outcome:
    if log.preflights is None or log.memberships is None:
        return unknown(
            "the log does not say whether hosts were checked before they took part",
            fix="phalanx train writes it to supervisor.jsonl; ranks that another launcher started have no supervisor",
        )
    missing = log.memberships - log.preflights
    message = f"in {log.preflights} of {log.memberships} memberships every host had been checked when it joined"
    message += f"; {plural(log.refused_hosts, 'host')} or places were shut out" if log.refused_hosts else ""
    if missing <= limits.number("missed"):
        return passed(message, value=log.preflights, threshold=log.memberships, unit="memberships")
    return failed(
        message,
        formula=(f"{log.memberships} memberships - {log.preflights} with a preflight = {missing} without",),
        value=log.preflights,
        threshold=log.memberships,
        unit="memberships",
        impact=_a_start(evidence),
        fix="update phalanx on all hosts: agents check before every membership since 0.4",
    )


def _a_start(evidence: Evidence) -> Impact:
    restart_s = evidence.job.fault.restart_s if evidence.job is not None else 300.0
    return evidence.loses_once(SPOILT * restart_s, "a tenth of the starts are spoilt by a sick host (Meta: 14 - 4 %)")


def _judge_host(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check that this machine has the packages that a job on it needs; without them the start would be refused."""
    host, needed = evidence.host, limits.words("packages")
    if host is None or host.packages is None or evidence.practice.trainer != "phalanx":
        return ()
    missing = [name for name in needed if name not in host.packages]
    if not missing:
        versions = ", ".join(f"{name} {host.packages[name]}" for name in needed)
        return (passed(f"{host.name} has {versions}"),)
    return (
        failed(
            f"{host.name} has no {' and no '.join(missing)}",
            value=", ".join(host.packages) or "nothing",
            threshold=", ".join(needed),
            severity="warning",
            impact=_a_start(evidence),
            fix="pip install 'phalanx[train]'",
        ),
    )


RULE = Rule(
    id="FLT005",
    slug="preflight",
    severity="error",
    requires="J",
    uses="LH",
    requirement="Every start and restart looks at every host before its ranks meet: devices, memory, disk, clock.",
    why="""
Few machines cause most failures: taking lemon nodes out brought failures of large jobs at Meta from 14 to 4 %
(arXiv:2410.21680), and SuperBench flags 10.4 % of Azure's nodes as defective before they spoil a job
(arXiv:2402.06194). A look takes milliseconds to seconds, a start on a sick host minutes of all devices.
""",
    how="""
Before a run: whether the trainer checks hosts (a warning, since a scheduler may do it instead). For a run: in every
membership all hosts were checked when they joined. A host checks itself again before each membership and refuses if
something is wrong; the log records only the refusals. On the machine itself: what the trainer needs is installed.
docs/security.md lists the checks under "before a host takes part".
""",
    limits={
        "missed": Limit(
            value=0, unit="memberships", note="memberships that may begin without a look: none, our choice"
        ),
        "packages": Limit(value=("torch",), note="what a host of a local job must have installed"),
    },
    bad="""
{"event":"host","t":1794750000.0,"epoch":1,"host":"a","state":"joined"}
""",
    good="""
{"event":"host","t":1794750000.0,"epoch":1,"host":"a","state":"joined","problems":[]}
""",
    fix="`phalanx train` does it. With another launcher: `dcgmi diag -r 1` as prolog, `-r 2` after a failure.",
    waive="A platform that certifies its hosts (NVSentinel, NVIDIA's Cluster Readiness Engine) before each start.",
    references=(
        Reference(text="NVIDIA dcgmi diag, levels 1 and 2", mark="read"),
        Reference(text="SuperBench, arXiv:2402.06194", mark="secondary"),
        Reference(text="Meta RSC, arXiv:2410.21680: lemon nodes", mark="secondary"),
    ),
    check=check,
)
