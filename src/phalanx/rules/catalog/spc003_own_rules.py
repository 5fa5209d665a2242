"""SPC003: every rule that a job or an installed package defines is run."""

from __future__ import annotations

from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Outcome, exempt
from phalanx.rules.rule import Limit, Limits, Reference, Rule


def check(evidence: Evidence, limits: Limits) -> Outcome:
    """Return an exempt outcome; the verdict comes from run_rules.py, since left-out rules are not evidence of a
    job.
    """
    return exempt("no rules of your own")


RULE = Rule(
    id="SPC003",
    slug="own-rules-asked",
    severity="error",
    requires="",
    uses="J",
    requirement="Every rule that the job or an installed package brings along is asked.",
    why="""
A team writes down what its jobs must do, and trusts a clean report to say so. A rule whose file moved, or that cannot
be imported any more, would otherwise be missed by nobody.
""",
    how="""
Each name in the job's `rules` and each entry point of the group `phalanx.rules` gives at least one rule, with an id of
its own. Code that a job file names runs only with consent (`--allow-code`); without it the verdict is unknown. A job
without rules of its own is not asked.
""",
    limits={"left_out": Limit(value=0, unit="rules", note="named and not asked, before the rule fails: our choice")},
    bad='rules = ["checks/gone.py:owner"]   # there is no such file',
    good='rules = ["checks/acme.py:owner"]',
    fix="Correct the name or the code; the finding says where. Give `--allow-code` for rules of a job file you trust.",
    waive="While the rules are being moved.",
    history="2026.1: added with rules of the user's own.",
    references=(Reference(text="a check that silently does not run is no check", mark="our choice"),),
    check=check,
)
