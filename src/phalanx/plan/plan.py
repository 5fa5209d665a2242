"""A Plan: job, cluster and layout, with everything they predict and why; the value every later stage reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from phalanx.errors import mistake
from phalanx.hardware.types import Cluster
from phalanx.io.codec import from_json_values, json_text, json_values
from phalanx.job.schema import Job
from phalanx.plan.bill import Bill
from phalanx.plan.layout import Layout
from phalanx.plan.mapping import AxisUse
from phalanx.plan.prediction import Duration, MemoryReport, Prediction
from phalanx.plan.reasons import Alternative
from phalanx.plan.reliability import Reliability
from phalanx.plan.site_forecast import SiteForecast

SCHEMA = "phalanx.plan/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParetoPoint:
    """A layout nothing beats in time, money and memory at once, perhaps on fewer devices."""

    layout: Layout
    devices: int
    step_s: float
    training_s: float  # to the token budget, without failures
    usd: float | None  # at the middle price, without failures
    memory_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchStats:
    """How much was looked at, and the fastest found: the plan's own layout, or one that needs more machinery."""

    legal: int
    fitting: int
    seconds: float
    fastest: Layout
    fastest_step_s: float
    fastest_memory_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationNote:
    """Which measurements a plan rests on: the file, and its factors on the parts of the step."""

    file: str
    scalars: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to run, what it will take, and why. `to_json` and `from_json` are exact inverses.

    >>> import phalanx
    >>> plan = phalanx.plan("examples/llama-3-8b-64xH100.toml", "8xH100:4")
    >>> plan.layout.devices, Plan.from_json(plan.to_json()) == plan
    (32, True)
    """

    schema: str
    version: str
    job: Job
    cluster: Cluster
    layout: Layout
    prediction: Prediction
    memory: MemoryReport
    rank_order: tuple[str, ...]
    mapping: tuple[AxisUse, ...]
    duration: Duration
    reliability: Reliability
    bill: Bill
    alternatives: tuple[Alternative, ...]
    pareto: tuple[ParetoPoint, ...]
    search: SearchStats
    calibration: CalibrationNote | None
    warnings: tuple[str, ...]
    sites: SiteForecast | None = None  # of a cluster of sites; layout, step and memory are then the first site's
    JSON_UNLESS_DEFAULT: ClassVar[tuple[str, ...]] = ("sites",)

    def __str__(self) -> str:
        """The page that `phalanx plan` prints."""
        return self.page()

    def page(self, *, top: int = 6) -> str:
        """The page that `phalanx plan` prints; `top` limits runners-up and Pareto points."""
        from phalanx.plan.text import plan_text

        return plan_text(self, top=top)

    def __repr__(self) -> str:
        """One line: what, where, how, how fast."""
        return (
            f"<Plan {self.job.name} on {self.cluster.name}: {self.layout.short}, {self.prediction.step_s:.4g} s/step>"
        )

    def _repr_html_(self) -> str:
        """The plan in a notebook."""
        from phalanx.plan.html import plan_html

        return plan_html(self)

    def to_dict(self) -> dict[str, Any]:
        """The whole plan as JSON values."""
        return dict(json_values(self))

    def to_json(self) -> str:
        """The whole plan as text."""
        return json_text(self, indent=1) + "\n"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: str = "plan") -> Plan:
        """The plan that JSON values describe; raises UserError when they are not of this schema."""
        found = data.get("schema") if isinstance(data, dict) else None
        if found != SCHEMA:
            raise mistake(
                where,
                f"schema {str(found)[:40]!r} is not {SCHEMA!r}",
                why="another version of Phalanx wrote it, or it is no plan",
                fix="write it again with phalanx plan JOB --out",
            )
        return from_json_values(cls, dict(data), where)

    @classmethod
    def from_json(cls, text: str, *, where: str = "plan") -> Plan:
        """The plan in a JSON text; raises UserError when it is none."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise mistake(where, f"is not JSON: {error}", fix="write it with phalanx plan JOB --out") from None
        return cls.from_dict(data, where=where)
