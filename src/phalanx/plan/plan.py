"""A Plan: a job, a cluster and the chosen layout, with every prediction and the reasons for the choice."""

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
    """A Pareto-optimal layout in time, cost and memory; it may use fewer devices than the cluster has."""

    layout: Layout
    devices: int
    step_s: float
    training_s: float  # to the token budget, without failures
    usd: float | None  # at the middle price, without failures
    memory_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchStats:
    """The size of the search, and the fastest layout it found, which is the plan's own or a more complex one."""

    legal: int
    fitting: int
    seconds: float
    fastest: Layout
    fastest_step_s: float
    fastest_memory_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationNote:
    """The calibration behind a plan: the file, and the factors that it puts on the parts of the step."""

    file: str
    scalars: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A layout for a job on a cluster, with its predicted time, memory, reliability and cost, and the reasons for it.

    `to_json` and `from_json` are exact inverses.

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
    sites: SiteForecast | None = None  # of a cluster of sites; layout, step and memory are then those of the first
    JSON_UNLESS_DEFAULT: ClassVar[tuple[str, ...]] = ("sites",)

    def __str__(self) -> str:
        """Return the page that `phalanx plan` prints."""
        return self.page()

    def page(self, *, top: int = 6) -> str:
        """Return the page that `phalanx plan` prints;

        `top` limits the numbers of alternatives and Pareto points shown.
        """
        from phalanx.plan.text import plan_text

        return plan_text(self, top=top)

    def __repr__(self) -> str:
        """Return one line: the job, the cluster, the layout and the step time."""
        return (
            f"<Plan {self.job.name} on {self.cluster.name}: {self.layout.short}, {self.prediction.step_s:.4g} s/step>"
        )

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows for the plan."""
        from phalanx.plan.html import plan_html

        return plan_html(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the whole plan as a dict of JSON values."""
        return dict(json_values(self))

    def to_json(self) -> str:
        """Return the whole plan as JSON text."""
        return json_text(self, indent=1) + "\n"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: str = "plan") -> Plan:
        """Build a plan from JSON values.

        Raises UserError if they are not a plan of this schema version; `where` names the source in the message.
        """
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema != SCHEMA:
            raise mistake(
                where,
                f"schema {str(schema)[:40]!r} is not {SCHEMA!r}",
                why="another version of Phalanx wrote it, or it is no plan",
                fix="write it again with phalanx plan JOB --out",
            )
        return from_json_values(cls, dict(data), where)

    @classmethod
    def from_json(cls, text: str, *, where: str = "plan") -> Plan:
        """Build a plan from JSON text; raises UserError if the text is not JSON or not a plan."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise mistake(where, f"is not JSON: {error}", fix="write it with phalanx plan JOB --out") from None
        return cls.from_dict(data, where=where)
