"""A little beyond a threshold is a warning: no threshold of the specification is exact to the last per cent."""

from __future__ import annotations

from phalanx.rules.outcome import Severity
from phalanx.rules.rule import Limit, Limits

MARGIN = Limit(value=0.10, note="beyond a threshold by up to this share is a warning, more is an error: house")


def beyond(value: float, most: float, limits: Limits) -> Severity | None:
    """Of a value above its threshold: a warning within the margin, else the rule's own severity."""
    return "warning" if value <= most * (1 + limits.number("margin")) else None


def beyond_count(count: int, most: float, limits: Limits) -> Severity | None:
    """The same of whole numbers, of which one more is always within the margin."""
    return "warning" if count <= max(most + 1, most * (1 + limits.number("margin"))) else None


def below(value: float, least: float, limits: Limits) -> Severity | None:
    """Of a share below its target, as of effective time: the margin is of what may be lost."""
    return "warning" if 1 - value <= (1 - least) * (1 + limits.number("margin")) else None
