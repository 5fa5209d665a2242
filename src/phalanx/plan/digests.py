"""How often replicas are compared: what `fault.digest_every = "auto"` means.

Once in a checkpoint interval at least, so that a damaged state is found while a sound checkpoint is still kept, and
once in 100 steps at least (house). It costs little: 1 GB of parameters takes 3.4 ms on an H200
(benchmarks/2026-11-15-vault.md), and a core does 2.6 GB/s.
"""

from __future__ import annotations

import math

from phalanx.job.schema import Fault
from phalanx.plan.prediction import Prediction
from phalanx.plan.reliability import Reliability

MOST_STEPS = 100


def digest_every(fault: Fault, reliability: Reliability, prediction: Prediction, *, wall_s: float = math.inf) -> int:
    """Steps between two comparisons; 0 is never, and only where the job says so. `wall_s` is of the whole job."""
    if not isinstance(fault.digest_every, str):
        return fault.digest_every
    return within(min(reliability.interval_s, wall_s), prediction.step_s_high)


def within(interval_s: float, step_s: float) -> int:
    """As many steps as an interval has, from 1 to 100.

    >>> within(1800.0, 10.0), within(60.0, 7.0), within(1.0, 5.0), within(float("inf"), 1.0)
    (100, 8, 1, 100)
    """
    if not (math.isfinite(interval_s) and math.isfinite(step_s)) or step_s <= 0:
        return MOST_STEPS
    return max(1, min(MOST_STEPS, math.floor(interval_s / step_s)))
