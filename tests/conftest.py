"""What all tests share: a busy machine is no reason to fail, and nothing is measured that a test does not ask for."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

# Every `phalanx train` would measure this machine first, and time its layout: half a minute of two cores each.
os.environ.setdefault("PHALANX_PROBE", "0")
