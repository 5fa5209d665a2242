"""Simulation of a plan on a cluster of sites whose peers come and go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.api.results import INTERRUPTED, PublicResult, Tell
from phalanx.errors import mistake
from phalanx.io.codec import json_values
from phalanx.plan.plan import Plan
from phalanx.units import plural

if TYPE_CHECKING:
    from phalanx.sim.peer_churn import ChurnOutcome, ChurnPolicy
    from phalanx.sim.peer_forecast import PeerForecast


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class PeersSimulation(PublicResult):
    """The forecast of goodput, tokens and cost for sites on slow links whose peers come and go."""

    plan: Plan
    policy: ChurnPolicy
    forecast: PeerForecast
    interrupted: bool

    def __str__(self) -> str:
        from phalanx.sim.peer_forecast import peer_forecast_text

        return peer_forecast_text(self.plan, self.policy, self.forecast)

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast."""
        return dict(json_values(self.forecast))

    @property
    def exit_code(self) -> int:
        """130 if Ctrl-C left runs out."""
        return INTERRUPTED if self.interrupted else 0


def simulate_peers(plan: Plan, *, days: float, runs: int, seed: int, tell: Tell) -> PeersSimulation:
    """Simulate all runs, or those finished before Ctrl-C."""
    from phalanx.sim.peer_churn import MOST_CHANGES, churn_policy, expected_changes, simulate_churn
    from phalanx.sim.peer_forecast import forecast_peers

    policy = churn_policy(plan)
    each = expected_changes(policy, days)
    if each * runs > MOST_CHANGES:
        raise mistake(
            "phalanx sim",
            f"{plural(runs, 'run')} of {plural(days, 'day')} would see {each * runs:,.0f} peers come or go",
            why=f"more than {MOST_CHANGES:,} take minutes",
            fix=f"use --runs {max(1, int(MOST_CHANGES / each)):,}, fewer --days or a longer session_h",
        )
    if not each:
        tell("no [[site]] has a session_h: nobody leaves")
    outcomes: list[ChurnOutcome] = []  # those before Ctrl-C are kept
    interrupted = False
    try:
        for outcome in simulate_churn(policy, days=days, count=runs, seed=seed):
            outcomes.append(outcome)
    except KeyboardInterrupt:
        if not outcomes:
            raise
        interrupted = True
        tell(f"stopped by Ctrl-C: {len(outcomes):,} of {runs:,} runs are finished, and shown")
    forecast = forecast_peers(plan, policy, outcomes, seed=seed)
    return PeersSimulation(plan=plan, policy=policy, forecast=forecast, interrupted=interrupted)
