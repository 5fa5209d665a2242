"""SEC004: the record holds no credentials, and states which code and configuration ran."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Impact, Outcome, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import plural

if TYPE_CHECKING:
    from phalanx.rules.facts.log_facts import GrammarFacts


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check for lines that look like credentials, and the provenance of the run."""
    grammar = evidence.the_log.grammar
    return (_judge_secrets(grammar, limits), _judge_provenance(grammar, limits))


def _judge_secrets(grammar: GrammarFacts, limits: Limits) -> Outcome:
    max_lines, count = limits.number("lines"), grammar.secrets
    statement = f"{plural(count, 'line')} of events and logs look like credentials"
    statement += "; searched in part, there is more than is searched" if grammar.secrets_partial else ""
    if count <= max_lines:
        return passed(statement, value=count, threshold=max_lines, unit="lines")
    return failed(
        statement,
        value=count,
        threshold=max_lines,
        unit="lines",
        at=grammar.secrets_spot or "",
        impact=Impact(note="no time by itself: logs are copied to more places than anybody remembers"),
        fix="revoke it first, then delete the line; hand secrets over in the environment, which is not logged",
    )


def _judge_provenance(grammar: GrammarFacts, limits: Limits) -> Outcome:
    if not limits.flag("provenance"):
        return passed("what ran need not be on record")
    if grammar.has_provenance is None:
        return unknown(
            "the log does not say which code and configuration ran", fix="check a run of this version of phalanx"
        )
    if grammar.job_changed:
        return failed(
            "job.json is not the configuration that was launched: its digest is another",
            impact=Impact(note="no time by itself: what a record says of a run must be what ran"),
            fix="restore job.json from the job file of that launch; another configuration is another run",
        )
    if grammar.has_provenance:
        return passed("versions, the commit or digest of the code and the digest of the configuration are on record")
    return failed(
        "versions, the commit or digest of the code, or the digest of the configuration are missing",
        impact=Impact(note="no time by itself: a run that nobody can repeat proves nothing"),
        fix="start the run with phalanx train, which writes them; keep plan.json and launch.json beside the events",
    )


RULE = Rule(
    id="SEC004",
    slug="no-secrets",
    severity="error",
    requires="L",
    requirement="Events and logs hold no credentials, and the run records which code and configuration it was.",
    why="""
Logs travel: to a dashboard, into a ticket, with a bug report. A key that stands in one is known to all of them. What
a run must say of itself is what another needs to repeat it: versions, the commit of the code, the digest of the
configuration.
""",
    how="""
Lines of the events and of the ranks' logs that match known forms of keys (cloud access keys, tokens of hubs, private
key blocks, passwords in URLs), or in which a word of much entropy follows a name that asks for a secret: none. At most
8 MiB of one log, 64 MiB of all and the texts of 100,000 events are searched; where there is more, the answer says so.
Provenance: versions, the commit of the code or a digest of its files, and the digest of job.json, which must be that
of the file. No hash of a lock file is asked for: few environments have one, and the versions of what computes are
named. Checkpoints hold numbers and the names of tensors alone, so they are not searched.
""",
    limits={
        "lines": Limit(value=0, unit="lines", note="that look like credentials: none, our choice"),
        "provenance": Limit(value=True, note="whether code, versions and configuration must be on record: our choice"),
    },
    bad="""
{"event":"remark","t":1794750000.0,"rank":0,"step":1,"text":"login with hf_abcdefghijklmnopqrstuvwxyz012345"}
""",
    good="""
{"event":"remark","t":1794750000.0,"rank":0,"step":1,"text":"login with [HF_TOKEN]"}
""",
    fix="Revoke, delete, and hand secrets over in the environment; phalanx redacts values of secret-looking variables.",
    waive="A line that only looks like a key (a hash, a test's dummy), named in the reason.",
    references=(
        Reference(text="our own patterns: cloud keys, hub tokens, key blocks, URLs with passwords", mark="our choice"),
    ),
    check=check,
)
