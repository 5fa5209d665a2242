"""SPC002: the rules use the limits of the hardware's own profile."""

from __future__ import annotations

from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Edit, Impact, Outcome, exempt, failed, passed
from phalanx.rules.profiles import profile_of
from phalanx.rules.rule import Limit, Limits, Reference, Rule


def check(evidence: Evidence, limits: Limits) -> Outcome:
    """Compare the named profile with that of the plan's devices."""
    own_profile, profile = profile_of(evidence.the_plan.cluster), evidence.profile
    accelerator = evidence.the_plan.cluster.accelerator.name
    if profile.name == own_profile.name:
        return passed(f"{accelerator} is judged by {profile.name}", value=profile.name, threshold=own_profile.name)
    if own_profile.name in limits.words("free"):
        return exempt(f"{accelerator} has no profile of its own; {profile.name} was named for it")
    is_named = evidence.written("profile")
    return failed(
        f"{accelerator} is judged by the limits of {profile.name}, not by those of {own_profile.name}",
        value=profile.name,
        threshold=own_profile.name,
        at="profile",
        impact=Impact(note="not known: every threshold that differs between the two may pass what it should not"),
        fix="" if is_named else "leave --profile out: the cluster's devices name it",
        edits=(Edit(key="profile", value="auto", safe=False, note=f"{own_profile.name}, by the cluster's devices"),)
        if is_named
        else (),
    )


RULE = Rule(
    id="SPC002",
    slug="profile-fits",
    severity="warning",
    requires="JP",
    requirement="The profile that the rules take their limits from is that of the job's devices.",
    why="""
A profile carries limits: cpu-gloo does not judge effective time and lets training stand still 5 % of the time for
checkpoints, where an H100 has 1 %. Named by mistake, or copied with a job file from another cluster, it makes rules
pass without a word.
""",
    how="""
`profile` (or `--profile`) = the profile of the cluster's accelerator. Hardware without one of its own (`custom`) may
be given any.
""",
    limits={
        "free": Limit(value=("custom",), note="hardware that may be judged by a profile of another kind: our choice")
    },
    bad='profile = "cpu-gloo"   # with [cluster] spec = "8xH100:16"',
    good='profile = "auto"',
    fix='`profile = "auto"`, or leave `--profile` out.',
    waive="To see what another kind of hardware would ask of the same job.",
    references=(Reference(text="a named profile that is silently believed hides findings", mark="our choice"),),
    check=check,
)
