"""Where the time of a run went: seconds by cause and phase, which with the training that counts are all there were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

PHASES = ("checkpoint", "copies", "detect", "restart", "redone", "waiting", "stalled", "degraded", "stopped")
SAVING, PLANNED, SHORT = "saving", "planned", "no spare"  # causes that are no failures


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One simulated run. `lost_s` are seconds by (cause, phase); with `done_s` they add up to `wall_s`."""

    wall_s: float
    done_s: float  # training at the planned pace that was not lost again
    lost_s: Mapping[tuple[str, str], float]
    interruptions: Mapping[str, int]  # by cause, planned ones included
    borne: int  # failures of the network that the job outlived
    failures: int  # that struck, borne and silent ones included
    spares_used: int
    most_spares: int  # out at once
    longest_gap_s: float  # without a step
    gave_up: int  # incidents with more failures in a row than fault.restarts allows
    events: int

    @property
    def effective(self) -> float:
        """Share of the time that trained."""
        return self.done_s / self.wall_s

    @property
    def unexpected(self) -> int:
        """Interruptions that nobody planned."""
        return sum(count for cause, count in self.interruptions.items() if cause != PLANNED)


@dataclass(slots=True)
class Ledger:
    """Filled while a run goes."""

    lost_s: Counter[tuple[str, str]] = field(default_factory=Counter)
    interruptions: Counter[str] = field(default_factory=Counter)
    borne: int = 0
    failures: int = 0
    spares_used: int = 0
    most_spares: int = 0
    longest_gap_s: float = 0.0
    gave_up: int = 0

    def lose(self, cause: str, phase: str, seconds: float) -> None:
        """Book seconds that did not train."""
        if seconds:
            self.lost_s[cause, phase] += seconds  # type: ignore[assignment]  # a Counter of floats

    def close(self, *, wall_s: float, done_s: float, events: int) -> Outcome:
        """The run is over."""
        return Outcome(
            wall_s=wall_s,
            done_s=done_s,
            lost_s=dict(self.lost_s),
            interruptions=dict(self.interruptions),
            borne=self.borne,
            failures=self.failures,
            spares_used=self.spares_used,
            most_spares=self.most_spares,
            longest_gap_s=self.longest_gap_s,
            gave_up=self.gave_up,
            events=events,
        )
