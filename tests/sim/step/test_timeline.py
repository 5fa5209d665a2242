"""The step as events, against what the schedules' papers say."""

from itertools import pairwise

import pytest
from tests.sim.step.conftest import by_hand, sharing
from phalanx.errors import UserError
