"""How long a fabric needs to get over a lost part, as public texts word it; the step and the months use the same.

The figures are readings of wording, not measurements: docs/simulation/step.md says which.
"""

from __future__ import annotations

from phalanx.network.fabric.budget import EDGE_RECOVERY_S, GIVE_UP_S

# "Seconds or even tens of seconds" until a conventional fabric routes around (openai.com/index/mrc-supercomputer-
# networking): the middle of 1 to 100. NCCL waits 30 s before it gives up, so the job lives.
CONVERGE_S = 10.0
# All QPs of a NIC move off a dead port in "a few seconds" (arXiv:2605.04333 section 3); a dead T0 is that for each of
# its NICs.
REMAP_S = 3.0

__all__ = ["CONVERGE_S", "EDGE_RECOVERY_S", "GIVE_UP_S", "REMAP_S"]
