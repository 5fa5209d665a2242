"""Limits on incidents between which the run still does steps: the rank moves, its host is excluded, or the run ends."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from phalanx.elastic.failure import HOST_LOST, UNCLEAR, Failure
from phalanx.elastic.incident_history import MAX_INCIDENTS, IncidentHistory
from phalanx.elastic.membership import HostSlot
from phalanx.units import format_seconds, plural

# The time in which incidents of any slot and cause may cost more than fault.max_lost.
WINDOW_S = 3600.0
# A few restarts of a small job cost less, whatever their share of the time.
MIN_LOST_S = 10.0
# Characters of an exception's name that the history stores.
MAX_CAUSE = 80


@dataclass(frozen=True, kw_only=True, slots=True)
class IncidentLimit:
    """A limit that is reached: the measure to take, and the reason."""

    # The rank leaves the slot; all ranks leave the host; the run ends.
    measure: Literal["move", "exclude", "end"]
    reason: str
    # Exceeded by one incident: where there is no other slot or host, the run ends.
    is_exceeded: bool = False


def cause_of(failure: Failure) -> str:
    """Return the cause by which incidents are counted: the kind of failure, and the signal if there is one."""
    return f"{failure.kind} {failure.signal}" if failure.signal else failure.kind[:MAX_CAUSE]


def reached_limit(history: IncidentHistory, *, restarts: int, max_lost: float) -> IncidentLimit | None:
    """Return the limit that the newest incident reaches, or None.

    Incidents count since the oldest one from which on they cost more than `max_lost` of the wall time: a slot that
    fails once a day reaches no limit, however long the run.
    """
    first = history.costly_since(max_lost, min_lost_s=MIN_LOST_S)
    if first is None:
        return None
    newest, costly = history.incidents[-1], history.incidents[first:]
    place, cause = newest.place, newest.cause
    by_slot = Counter(incident.place for incident in costly if incident.cause == cause)
    times = max(2, min(restarts, MAX_INCIDENTS // 8))
    span_s = newest.began_s - costly[0].began_s
    cost = (
        f"incidents cost {format_seconds(history.lost_s(first))} of the last {format_seconds(span_s)} "
        f"(fault.max_lost = {max_lost:g})"
    )
    where = f"slot {place.slot} of host {place.host}"
    count = sum(by_slot.values())
    on_host = sum(by_slot[slot] for slot in by_slot if slot.host == place.host)
    if cause in UNCLEAR:
        if count >= 2 * times:
            reason = f"{plural(count, 'failure')} with {cause}, last of {where}, and no rank is known to blame; {cost}"
            return IncidentLimit(measure="end", reason=reason)
    elif cause == HOST_LOST:
        if on_host >= times:
            reason = f"host {place.host} was lost {plural(on_host, 'time')}; {cost}"
            return IncidentLimit(measure="exclude", reason=reason, is_exceeded=on_host > times)
    else:
        is_host_full = on_host > by_slot[place] and on_host >= 2 * times
        other_hosts = sorted(_hosts_at_limit(by_slot, times) - {place.host})
        if other_hosts and (is_host_full or by_slot[place] >= times):
            reason = f"{where} failed {plural(by_slot[place], 'time')} with {cause}"
            hosts = ", ".join(other_hosts)
            return IncidentLimit(
                measure="end", reason=f"{reason}, as others on {hosts} did: it is no fault of a host; {cost}"
            )
        if is_host_full:
            reason = f"host {place.host} failed {plural(on_host, 'time')} with {cause}, last in {where}; {cost}"
            return IncidentLimit(measure="exclude", reason=reason, is_exceeded=on_host > 2 * times)
        if by_slot[place] >= times:
            reason = f"{where} failed {plural(by_slot[place], 'time')} with {cause}; {cost}"
            return IncidentLimit(measure="move", reason=reason, is_exceeded=by_slot[place] > times)
    if len(costly) > times and (span_s >= WINDOW_S or len(costly) == MAX_INCIDENTS):
        failures = plural(len(costly), "failure")
        return IncidentLimit(measure="end", reason=f"{failures}, the last with {newest.cause} in {where}; {cost}")
    return None


def _hosts_at_limit(by_slot: Counter[HostSlot], times: int) -> set[str]:
    """Return the hosts on which one slot, or several together, have reached a limit."""
    by_host: dict[str, list[int]] = {}
    for place, failures in by_slot.items():
        by_host.setdefault(place.host, []).append(failures)
    return {host for host, counts in by_host.items() if max(counts) >= times or sum(counts) >= 2 * times}
