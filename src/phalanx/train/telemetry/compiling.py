"""How long torch has compiled so far in this process."""

from __future__ import annotations

import sys

PARTS = ("entire_frame_compile", "entire_backward_compile")  # what torch itself adds up to its whole (2.11 to 2.13)


def compiled_s() -> float:
    """Seconds since the process began; 0 where nothing was compiled, or torch counts in another way."""
    counters = sys.modules.get("torch._dynamo.utils")  # importing it costs seconds: whoever compiles has done so
    spent_ns = getattr(counters, "cumulative_time_spent_ns", {})
    return float(sum(spent_ns.get(part, 0) for part in PARTS)) / 1e9
