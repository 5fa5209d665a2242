"""The differences between two runs, plans or jobs: settings, cluster, layout, prediction, and measured results."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, ClassVar

from phalanx.io.tables import text_table
from phalanx.io.values import at, integer, number, printable
from phalanx.record.account.ledger import walk_ledger
from phalanx.record.account.summary import Summary, summarize_run
from phalanx.record.archive.history import RunHistory
from phalanx.record.run import Run
from phalanx.units import format_bytes, format_carbon, format_count, format_energy, format_money, format_seconds

# Relative: plans that were computed twice may differ by this much.
ROUNDING = 1e-9
NEAR = 20  # steps averaged for a loss that is compared
WIDEST = 44  # maximum characters of a value in the table

# A plan contains a job with the names of its Python fields; the job file has other names for these
# (tests/record/page/test_diff.py).
SPELLING = {("data", "paths"): "path", ("checkpoint", "asynchronous"): "async"}

Value = Any  # a JSON value


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One side of the comparison; empty where it has no data."""

    name: str
    kind: str  # run, plan or job
    settings: Mapping[str, Value]  # the job
    plan: Mapping[str, Value]
    results: Mapping[str, Value]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One value that differs; None where a side has none."""

    JSON_PROPERTIES: ClassVar = ("change",)

    section: str
    key: str
    a: Value
    b: Value

    @property
    def change(self) -> float | None:
        """b over a, minus one; None unless both are numbers and a is not 0."""
        a_number, b_number = number({"": self.a}, ""), number({"": self.b}, "")
        return b_number / a_number - 1.0 if a_number and b_number is not None else None


def of_plan(name: str, plan: Mapping[str, Value]) -> Side:
    """Return the side of a plan, as `phalanx plan --json` prints it."""
    return Side(name=name, kind="plan", settings=at(plan, "job"), plan=plan, results={})


def of_job(name: str, job: Mapping[str, Value]) -> Side:
    """Return the side of a job with every value resolved."""
    # Lists instead of tuples, as in the JSON of a plan.
    settings = json.loads(json.dumps(job, default=str))
    return Side(name=name, kind="job", settings=settings, plan={}, results={})


def of_runs(a: Run, b: Run) -> tuple[Side, Side]:
    """Return the sides of two runs, measured up to the last step that both have reached."""
    measured_a, measured_b = _Measured(a), _Measured(b)
    return measured_a.side(measured_b), measured_b.side(measured_a)


def of_run(run: Run) -> Side:
    """Return the side of a run for comparison with a plan or a job: only what those have too."""
    plan = run.plan()
    return Side(name=str(run.path), kind="run", settings=at(plan, "job"), plan=plan, results={})


def compare_sides(a: Side, b: Side, *, within: float = 0.0) -> list[Difference]:
    """Return all values that differ among those both could have; measured numbers may differ by the share `within`."""
    sections: list[tuple[str, Mapping[str, Value], Mapping[str, Value], float]] = [
        ("settings", _as_in_file(a.settings), _as_in_file(b.settings), 0.0)
    ]
    if a.plan and b.plan:
        sections += [
            ("cluster", at(a.plan, "cluster"), at(b.plan, "cluster"), ROUNDING),
            ("layout", at(a.plan, "layout"), at(b.plan, "layout"), 0.0),
            ("prediction", _predicted_numbers(a.plan), _predicted_numbers(b.plan), ROUNDING),
        ]
    if a.results and b.results:
        sections.append(("results", a.results, b.results, max(within, ROUNDING)))
    return [difference for section in sections for difference in _differing_keys(*section)]


def _as_in_file(job: Mapping[str, Value]) -> dict[str, Value]:
    """Return a job with the job file's names, and without the folder of a built corpus, chosen by each machine."""
    spelt = {
        section: {SPELLING.get((section, name), name): value for name, value in settings.items()}
        if isinstance(settings, Mapping)
        else settings
        for section, settings in job.items()
    }
    data = spelt.get("data")
    if isinstance(data, dict) and _is_built(data.get("corpus"), data.get("path")):
        spelt["data"] = data | {"path": []}
    return spelt


def _is_built(corpus: Value, paths: Value) -> bool:
    """Return True if the only dataset is the one built for the corpus, not one that the user chose."""
    if not (isinstance(corpus, str) and corpus and isinstance(paths, list) and len(paths) == 1):
        return False
    name = PurePath(paths[0]).name if isinstance(paths[0], str) else ""
    return re.fullmatch(rf"{re.escape(corpus)}(-\d+)+", name) is not None


def _differing_keys(
    section: str, a: Mapping[str, Value], b: Mapping[str, Value], within: float
) -> Iterator[Difference]:
    a_values, b_values = dict(_flat_items(a)), dict(_flat_items(b))
    for key in [*a_values, *(key for key in b_values if key not in a_values)]:
        if {key in a_values, key in b_values} == {True, False} and (a_values.get(key) or b_values.get(key)) in (
            "",
            [],
            None,
        ):
            # A setting that one version does not have, and that the other side leaves empty.
            continue
        if not _same_values(a_values.get(key), b_values.get(key), within):
            yield Difference(section=section, key=key, a=a_values.get(key), b=b_values.get(key))


def _flat_items(tree: Mapping[str, Value], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Value]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and depth < 8:
            yield from _flat_items(value, f"{name}.", depth + 1)
        else:
            yield name, value


def _same_values(a: Value, b: Value, within: float) -> bool:
    a_number, b_number = number({"": a}, ""), number({"": b}, "")
    if a_number is None or b_number is None:
        return bool(a == b)
    return math.isclose(a_number, b_number, rel_tol=within, abs_tol=0.0)


def _predicted_numbers(plan: Mapping[str, Value]) -> dict[str, Value]:
    """Return the numbers by which plans are compared."""
    prediction, bill, reliability = at(plan, "prediction"), at(plan, "bill"), at(plan, "reliability")
    usd = bill.get("usd")
    return {
        "step_s": prediction.get("step_s"),
        "tokens_per_s": prediction.get("tokens_per_s"),
        "mfu": prediction.get("mfu"),
        "parameters": prediction.get("parameters"),
        "memory_bytes": at(plan, "memory").get("total_bytes"),
        "steps": at(plan, "duration").get("steps"),
        "tokens": at(plan, "duration").get("tokens"),
        "wall_s": at(plan, "duration").get("wall_s"),
        "usd": usd[1] if isinstance(usd, list) and len(usd) == 3 else usd,
        "kwh": bill.get("kwh"),
        "kgco2e": bill.get("kgco2e"),
        "effective_time": reliability.get("effective_time"),
        "checkpoint_interval_s": reliability.get("interval_s"),
    }


# ---- runs ------------------------------------------------------------------------------------------------------------


class _Measured:
    """The summary and history of one run."""

    def __init__(self, run: Run) -> None:
        self._history = RunHistory.open(run)
        self.summary: Summary = summarize_run(run, self._history, walk_ledger(run, self._history))
        self._plan = run.plan()

    def side(self, other: _Measured) -> Side:
        """Return the side of this run, with its losses where both runs have values."""
        results = self._result_values() | self._loss_values(other)
        return Side(name=self.summary.run, kind="run", settings=at(self._plan, "job"), plan=self._plan, results=results)

    def _result_values(self) -> dict[str, Value]:
        s = self.summary
        return {
            "state": s.state,
            "steps": s.steps,
            "tokens": s.tokens,
            "step_s": s.step_s.measured,
            "tokens_per_s": s.tokens_per_s.measured,
            "mfu": s.mfu.measured,
            "memory_bytes": s.memory_bytes.measured,
            "wall_s": s.ledger.wall_s if s.ledger is not None else None,
            "effective_time": s.effective_time.measured,
            "incidents": len(s.incidents),
            "usd": s.cost.so_far.usd if s.cost is not None else None,
            "energy_j": s.cost.so_far.energy_j if s.cost is not None else None,
            "last_loss": s.last_loss,
            "bits_per_byte": s.evaluation.bits_per_byte if s.evaluation is not None else None,
        }

    def _loss_values(self, other: _Measured) -> dict[str, Value]:
        last = [last_step for last_step in (self._history.last_step, other._history.last_step) if last_step is not None]
        if len(last) < 2:
            return {}
        step = min(last)
        losses = {f"loss at step {step + 1:,}": self._loss_at(step)}
        tokens, per_step = min(self.summary.tokens, other.summary.tokens), self._tokens_per_step
        if per_step and other._tokens_per_step and per_step != other._tokens_per_step:
            losses[f"loss at {format_count(tokens)} tokens"] = self._loss_at(int(tokens / per_step) - 1)
        return losses

    @property
    def _tokens_per_step(self) -> float:
        return self.summary.tokens / self.summary.steps if self.summary.steps else 0.0

    def _loss_at(self, step: int) -> float | None:
        """Return the mean loss over the last NEAR steps up to `step`."""
        near = self._history.curve("loss", first=max(0, step - NEAR + 1), last=max(0, step), points=1)
        return next(iter(near.mean), None)


# ---- text ------------------------------------------------------------------------------------------------------------


def render_difference(a: Side, b: Side, found: Sequence[Difference]) -> str:
    """Format the differences as tables, by section."""
    lines = [f"A  {a.kind} {printable(a.name)}", f"B  {b.kind} {printable(b.name)}"]
    if not found:
        return "\n".join([*lines, "", "no difference"])
    for section in dict.fromkeys(difference.section for difference in found):
        rows = [("", "A", "B", "")]
        rows += [_difference_row(difference) for difference in found if difference.section == section]
        lines += ["", section.upper(), *(f"  {line}" for line in text_table(rows))]
    return "\n".join(lines)


def _difference_row(one: Difference) -> tuple[str, str, str, str]:
    change = f"{one.change:+.1%}" if one.change is not None and one.section in ("prediction", "results") else ""
    return printable(one.key, most=60), _shown_value(one.key, one.a), _shown_value(one.key, one.b), change


def _shown_value(key: str, value: Value) -> str:
    if value is None:
        return "-"
    number_value = number({"": value}, "")
    if number_value is None or isinstance(value, bool):
        return printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), most=WIDEST)
    return _shown_number(key.rsplit(".", 1)[-1], number_value, whole=integer({"": value}, "") is not None)


def _shown_number(key: str, value: float, *, whole: bool) -> str:
    """Format a number with the unit that its name ends in."""
    if key.endswith("_s") and not key.endswith("_per_s") and value:
        return format_seconds(value)
    if key.endswith("_bytes"):
        return format_bytes(value)
    if key == "usd":
        return format_money(value)
    if key == "energy_j":
        return format_energy(value)
    if key == "kwh":
        return format_energy(value * 3.6e6)
    if key == "kgco2e":
        return format_carbon(value)
    if key in ("mfu", "effective_time"):
        return f"{value:.1%}"
    if key.endswith("_per_s"):
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"{value:,.0f}" if whole else f"{value:.6g}"
