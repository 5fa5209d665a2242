"""Predict the step time and memory of every row of a published table from its layout columns."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import UserError
from phalanx.job.model import ModelShape
from phalanx.plan.case_columns import PRECISION_INDEX, machine_columns, model_columns
from phalanx.plan.cases import RECOMPUTE, SCHEDULES, Cases, Floats
from phalanx.plan.memory import MemoryUse, predict_memory
from phalanx.plan.memory_profile import memory_profiles, stack_memory
from phalanx.plan.physics import Physics, Profile, profile_name, shipped_physics, shipped_profiles, stack_profiles
from phalanx.plan.step import StepTimes, predict_step
from phalanx.validate import throughput_table
from phalanx.validate.throughput_table import PublishedRun, number, published_cluster, why_not_priced

# A candidate setting that does not fit loses against every one that fits.
NO_FIT_PENALTY = 1e6
# Published runs that do not state recompute or micro-batch were tuned by experts with more ways to save memory than
# the table names (offload, fused losses, in-place norms): a setting this far over the limit still counts.
UNSTATED_SLACK = 1.3


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPredictions:
    """Predictions in the order of the rows; `reason` is not empty if a row could not be predicted."""

    cases: Cases  # of the predicted rows, with unstated settings chosen
    priced: NDArray[np.intp]  # their positions in the table
    times: StepTimes
    memory: MemoryUse
    frameworks: tuple[str, ...]  # framework profile of each predicted row
    reason: tuple[str, ...]


def row_columns(row: PublishedRun, micro_batch: float, recompute: str) -> dict[str, float]:
    """Return all columns of one case: a row with a micro-batch and a recompute setting."""
    degrees = {name: max(1.0, number(row, name) or 1.0) for name in ("tp", "pp", "vpp", "cp", "ep")}
    dp = data_ranks(row)
    zero = throughput_table.zero_stage(row)
    model_key = tuple(row.get(name, "") for name in _MODEL_COLUMNS)
    return {
        **model_columns(_shape_of_key(model_key)),
        **machine_columns(published_cluster(row)),
        **degrees,
        "flash": float(throughput_table.attention_is_fused(row)),
        "seq": number(row, "seq") or 1.0,
        "global_batch": number(row, "global_batch") or 1.0,
        "micro_batch": micro_batch,
        "dp": dp,
        "shard": dp * degrees["cp"] if zero else 1.0,
        "zero": float(zero),
        "sp": float(throughput_table.sequence_parallel(row) and degrees["tp"] > 1),
        "recompute": float(RECOMPUTE.index(recompute)),
        "precision": float(PRECISION_INDEX[throughput_table.precision(row)]),
        "schedule": float(SCHEDULES.index("interleaved" if degrees["vpp"] > 1 else "1f1b")),
        "offload": 0.0,
        "compression": 0.0,
    }


def data_ranks(row: PublishedRun) -> float:
    """Return the stated data-parallel degree, or the devices divided by the other degrees."""
    other_degrees = (number(row, "tp") or 1.0) * (number(row, "pp") or 1.0) * (number(row, "cp") or 1.0)
    return number(row, "dp") or max(1.0, (number(row, "gpus") or 1.0) / other_degrees)


_MODEL_COLUMNS = ("model_name", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "experts", "topk", "moe_ffn",
                  "params_b")  # fmt: skip


@lru_cache(maxsize=65536)
def _shape_of_key(key: tuple[str, ...]) -> ModelShape:
    return throughput_table.model_shape(dict(zip(_MODEL_COLUMNS, key, strict=True)))


def to_cases(columns: list[dict[str, float]]) -> Cases:
    """Build a table of cases from one dict per row."""
    names = [field.name for field in fields(Cases)]
    return Cases(
        **{name: np.asarray([columns_of_row[name] for columns_of_row in columns], dtype=np.float64) for name in names}
    )


def candidates(row: PublishedRun) -> list[dict[str, float]]:
    """Return every case that a row may stand for: one if micro-batch and recompute are stated."""
    sizes = throughput_table.micro_batches(row, int(data_ranks(row)))
    settings = [(size, recompute) for recompute in throughput_table.recomputes(row) for size in sizes]
    return [row_columns(row, size, recompute) for size, recompute in settings]


def predict_rows(rows: tuple[PublishedRun, ...], *, constants: Physics | None = None,
                 framework_profiles: dict[str, Profile] | None = None) -> RowPredictions:  # fmt: skip
    """Predict every row that has the required columns."""
    profiles = framework_profiles or shipped_profiles()
    columns: list[dict[str, float]] = []
    owner: list[int] = []
    names: list[str] = []
    reasons: list[str] = []
    for index, row in enumerate(rows):
        reason, row_cases = _cases_of(row)
        reasons.append(reason)
        name = profile_name(row.get("framework", ""), row.get("date", ""))
        columns += row_cases
        owner += [index] * len(row_cases)
        names += [name if name in profiles else "default"] * len(row_cases)
    if not columns:
        columns, owner, names = [_EMPTY], [-1], ["default"]
    table = to_cases(columns)
    memory_by = memory_profiles()
    memory = predict_memory(table, stack_memory([memory_by.get(name, memory_by["default"]) for name in names]))
    times = predict_step(table, constants or shipped_physics(), stack_profiles([profiles[name] for name in names]))
    best = _best_candidates(np.asarray(owner), times.step_s, memory.total <= UNSTATED_SLACK * memory.usable)
    return RowPredictions(
        cases=table.take(best),
        priced=np.asarray(owner, dtype=np.intp)[best],
        times=times.take(best),
        memory=MemoryUse(**{f.name: getattr(memory, f.name)[best] for f in fields(MemoryUse)}),
        frameworks=tuple(names[i] for i in best),
        reason=tuple(reasons),
    )


def _cases_of(row: PublishedRun) -> tuple[str, list[dict[str, float]]]:
    reason = why_not_priced(row)
    if reason:
        return reason, []
    try:
        return "", candidates(row)
    except UserError as error:
        return error.problems[0].what, []


def _best_candidates(owner: NDArray[np.int_], seconds: Floats, fits: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Return, for each row, the fastest candidate that fits, or the fastest if none fits."""
    rank = np.where(fits, seconds, seconds * NO_FIT_PENALTY)
    order = np.lexsort((rank, owner))
    first = np.ones(order.size, dtype=bool)
    first[1:] = owner[order][1:] != owner[order][:-1]
    best = order[first]
    return best[owner[best] >= 0]


_EMPTY = dict.fromkeys((field.name for field in fields(Cases)), 1.0)
