"""The incidents of a launch with the time each one cost, as the next coordinator reads them from the saved state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.elastic.membership import HostSlot

# The history is in the file that is written every second: about 10 kB.
MAX_INCIDENTS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class PastIncident:
    """One incident; it lasts from the last new step before it to the first new step after it."""

    began_s: float  # Unix time
    place: HostSlot  # of the rank that failed first
    # Kind of the failure, with the number of a signal.
    cause: str
    lost_s: float | None = None  # None until a new step is done


@dataclass(frozen=True, kw_only=True, slots=True)
class IncidentHistory:
    """The last incidents, the useful time between them, and the hosts that were excluded because of them."""

    incidents: tuple[PastIncident, ...] = ()
    # Unix time of the first new step after the last incident, or of the launch; 0 before it.
    resumed_s: float = 0.0
    resumed_step: int = 0
    # Duration of a step where several were done in a row; 0 as long as there were none.
    step_s: float = 0.0
    excluded: Mapping[str, str] = field(default_factory=dict)  # host -> reason

    def after_step(self, step: int, unix_s: float) -> IncidentHistory:
        """Return the history after a step further than any before; the same object where no incident ends with it."""
        if self.resumed_s and (not self.incidents or self.incidents[-1].lost_s is not None):
            return self
        resumed = replace(self, resumed_s=unix_s, resumed_step=step)
        if not self.incidents:
            return resumed
        last = self.incidents[-1]
        # The step that ends the incident is useful work.
        lost_s = max(0.0, unix_s - last.began_s - self.step_s)
        return replace(resumed, incidents=(*self.incidents[:-1], replace(last, lost_s=lost_s)))

    def after_incident(self, place: HostSlot, cause: str, *, began_s: float, best_step: int) -> IncidentHistory:
        """Return the history after another incident; one that no new step has ended lasts until this one begins."""
        began_s = max(began_s, self.resumed_s)
        earlier, step_s = self.incidents, self.step_s
        if earlier and earlier[-1].lost_s is None:
            last = earlier[-1]
            began_s = max(began_s, last.began_s)
            earlier = (*earlier[:-1], replace(last, lost_s=began_s - last.began_s))
        elif self.resumed_s and best_step > self.resumed_step:
            step_s = (began_s - self.resumed_s) / (best_step - self.resumed_step)
        incident = PastIncident(began_s=began_s, place=place, cause=cause)
        return replace(self, incidents=(*earlier, incident)[-MAX_INCIDENTS:], step_s=step_s)

    def costly_since(self, max_lost: float, *, min_lost_s: float) -> int | None:
        """Return the index of the oldest incident since which incidents cost more than a share of the time, or None.

        The time runs until the newest incident begins: the cost of that one is not known yet.
        """
        if not self.incidents:
            return None
        until_s, lost_s = self.incidents[-1].began_s, 0.0
        oldest: int | None = None
        for index in reversed(range(len(self.incidents) - 1)):
            incident = self.incidents[index]
            lost_s += incident.lost_s or 0.0
            if lost_s >= min_lost_s and lost_s > max_lost * (until_s - incident.began_s) > 0:
                oldest = index
        return oldest

    def lost_s(self, first: int) -> float:
        """Return the seconds that the incidents cost from the given one until the newest began."""
        return sum(incident.lost_s or 0.0 for incident in self.incidents[first:-1])

    def to_json(self) -> dict[str, Any]:
        """Return the history as JSON values."""
        return {
            "incidents": [
                [incident.began_s, incident.place.host, incident.place.slot, incident.cause, incident.lost_s]
                for incident in self.incidents
            ],
            "resumed": [self.resumed_s, self.resumed_step],
            "step_s": self.step_s,
            "excluded": dict(self.excluded),
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> IncidentHistory:
        """Read what `to_json` returned, an empty history from an empty mapping.

        Raises KeyError, TypeError or ValueError.
        """
        if not body:
            return cls()
        resumed_s, resumed_step = body["resumed"]
        return cls(
            incidents=tuple(
                PastIncident(
                    began_s=float(began_s),
                    place=HostSlot(str(host), int(slot)),
                    cause=str(cause),
                    lost_s=float(lost_s) if lost_s is not None else None,
                )
                for began_s, host, slot, cause, lost_s in body["incidents"][-MAX_INCIDENTS:]
            ),
            resumed_s=float(resumed_s),
            resumed_step=int(resumed_step),
            step_s=float(body["step_s"]),
            excluded={str(host): str(reason) for host, reason in body["excluded"].items()},
        )
