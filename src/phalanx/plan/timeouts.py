"""How long a rank waits for another once steps are steady: what `train.timeout_s = "auto"` means.

Five steps, from 30 to 120 s. Five is the factor of NVIDIA's resiliency extension over what it observed
(NVIDIA/nvidia-resiliency-ext); a network card that flaps comes back within seconds (MegaScale, arXiv:2402.15627), so
below 30 s a healthy job would be ended; 120 s is near torchtitan's 100 s, where PyTorch's default for NCCL is 600 s.
The last clause of `bounded`, one whole step at least, is a house choice: ranks of a pipeline wait for a part of a step.
"""

from __future__ import annotations

import math

from phalanx.job.schema import Job
from phalanx.plan.prediction import Prediction

STEPS = 5.0
LEAST_S = 30.0
MOST_S = 120.0


def steady_timeout_s(job: Job, prediction: Prediction) -> float:
    """Seconds until a collective gives up: the job's own number, or five steps at the slow end of the prediction."""
    if not isinstance(job.train.timeout_s, str):
        return job.train.timeout_s
    return bounded(prediction.step_s_high)


def bounded(step_s: float, *, steps: float = STEPS, least_s: float = LEAST_S, most_s: float = MOST_S) -> float:
    """So many steps, between two bounds, and never less than one step.

    >>> bounded(1.0), bounded(10.0), bounded(60.0), bounded(200.0), bounded(float("nan"))
    (30.0, 50.0, 120.0, 200.0, 120.0)
    """
    if not math.isfinite(step_s):
        return most_s
    return max(min(max(steps * step_s, least_s), most_s), step_s)
