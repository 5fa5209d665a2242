"""The grid of a sweep: the small models to train, with their tokens, learning rates and batches.

N counts all parameters, embedding and head included; C = 6·N·D. Both are columns of the table that `scale fit` reads.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from phalanx.errors import mistake
from phalanx.io.codec import json_values
from phalanx.job.model import TOKENS_PER_PARAMETER, ModelShape
from phalanx.job.parameter_counts import count_parameters
from phalanx.job.schema import Job
from phalanx.scale.step_law import STEP_LAW_SIZES, carry_rates, step_law
from phalanx.scale.sweep_shapes import distinct_shapes, refuse_unscalable
from phalanx.units import format_count

METHODS = ("isoflop", "wsd")
BUDGETS = 5  # default number of budgets in a range LO..HI
# By default sizes reach from a fourth to four times the presently known optimum of a budget.
SPREAD = 4.0
LEAST_STEPS = 20  # steps of a run: fewer give no useful loss
MOST_RUNS = 10_000
# Largest share of the tokens of a size's shortest run; the job's own warm-up where that is less.
WARMUP = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRun:
    """One point of the grid: a job, and for wsd the run that it continues."""

    name: str
    job: Job  # complete except for data paths and cluster
    budget: float  # FLOPs of the curve it belongs to
    params: int
    tokens: int
    # wsd: a checkpoint of this step is kept for the next run of this size; 0: none.
    decay_step: int = 0
    trunk: str = ""  # wsd: name of the run whose checkpoint this run continues from

    @property
    def flops(self) -> float:
        """6·N·D of the tokens that are really trained."""
        return 6.0 * self.params * self.tokens

    @property
    def steps(self) -> int:
        """The number of optimizer steps."""
        return self.tokens // self.job.batch.global_tokens


def parse_budgets(text: str) -> tuple[float, ...]:
    """Parse the FLOPs of IsoFLOP curves: "1e15..1e17", "1e15..1e17:7", or a list such as "1e15,3e15".

    A range has five budgets, or the number after the colon, evenly spaced in the logarithm. Raises UserError for
    other texts, values out of range, and budgets that do not rise.

    >>> [f"{budget:.2g}" for budget in parse_budgets("1e15..1e17")]
    ['1e+15', '3.2e+15', '1e+16', '3.2e+16', '1e+17']
    >>> parse_budgets("1e12,4e12")
    (1000000000000.0, 4000000000000.0)
    """
    where, fix = f"--budgets {text[:60]}", "write 1e15..1e17, 1e15..1e17:7 for seven of them, or 1e15,3e15,1e16"
    try:
        if ".." in text:
            ends, _, number = text.partition(":")
            low, high = (float(end) for end in ends.split(".."))
            count = int(number) if number else BUDGETS
            if not 2 <= count <= 100:
                raise mistake(where, f"{count} budgets", fix="ask for 2 to 100")
            budgets = [low * (high / low) ** (index / (count - 1)) for index in range(count)]
        else:
            budgets = [float(number_text) for number_text in text.split(",")]
    except (ValueError, OverflowError, ZeroDivisionError) as error:
        raise mistake(where, "is not a list of FLOPs", fix=fix) from error
    if not all(math.isfinite(budget) and 1e6 <= budget <= 1e30 for budget in budgets):
        raise mistake(where, "holds a budget that is not between 1e6 and 1e30 FLOPs", fix=fix)
    if any(after <= before for before, after in pairwise(budgets)):
        raise mistake(where, "budgets do not rise", why="each curve needs more compute than the one before", fix=fix)
    return tuple(budgets)


def budget_list(budgets: object) -> str:
    """Format budgets from a Python caller as text for `parse_budgets`.

    >>> budget_list([1e12, 4e12])
    '1000000000000.0,4000000000000.0'
    """
    if isinstance(budgets, str):
        return budgets
    where, fix = "--budgets", 'give "1e15..1e17", or a list of numbers'
    if not isinstance(budgets, Iterable):
        raise mistake(where, f"{str(budgets)[:60]!r} is of type {type(budgets).__name__}, not a list", fix=fix)
    texts = []
    for budget in budgets:
        try:
            texts.append(repr(float(budget)))
        except (TypeError, ValueError, OverflowError) as error:
            raise mistake(where, f"{str(budget)[:60]!r} is not a number of FLOPs", fix=fix) from error
    if not texts:
        raise mistake(where, "is empty", fix=fix)
    return ",".join(texts)


def sweep_runs(
    job: Job,
    *,
    budgets: Sequence[float],
    sizes: int,
    method: str,
    tokens_per_parameter: float = TOKENS_PER_PARAMETER,
    spread: float = SPREAD,
) -> list[SweepRun]:
    """Return the grid around the presently known optimum, N* = √(C / 6r) with r tokens per parameter.

    Sizes of a budget reach from N* / `spread` to N* · `spread`. The smallest budget comes first.
    """
    refuse_unscalable(job.model)
    if method not in METHODS:
        raise mistake(f"--method {method[:40]}", "is not a way to sweep", fix=f"use {' or '.join(METHODS)}")
    if not 3 <= sizes <= 100:
        why = "a curve with fewer than three sizes has no lowest point"
        raise mistake(f"--sizes {sizes}", "is not between 3 and 100", why=why, fix="use 6 to 9")
    if not 0.01 <= tokens_per_parameter <= 1e5:
        raise mistake(f"--tokens-per-parameter {tokens_per_parameter:g}", "is not between 0.01 and 100,000")
    if not 1.1 <= spread <= 100:
        why = "sizes of a budget reach from the present optimum divided by it to the optimum times it"
        raise mistake(f"--spread {spread:g}", "is not between 1.1 and 100", why=why, fix="use 2 to 8")
    if sizes * len(budgets) > MOST_RUNS:
        raise mistake("--sizes", f"{sizes} sizes of {len(budgets)} budgets are more than {MOST_RUNS:,} runs")
    if method == "wsd" and job.optim.schedule != "wsd":
        raise mistake(
            "optim.schedule",
            f'"{job.optim.schedule}" with --method wsd',
            why="runs share their first steps only where the learning rate does not depend on the end",
            fix='set optim.schedule = "wsd", or use --method isoflop',
        )
    # C = 6·N·D and D = r·N give N* = √(C / 6r).
    optimum = [math.sqrt(budget / (6.0 * tokens_per_parameter)) for budget in budgets]
    make_runs = _wsd_runs if method == "wsd" else _isoflop_runs
    return make_runs(job, budgets, optimum, sizes, spread)


def _isoflop_runs(
    job: Job, budgets: Sequence[float], optimum: Sequence[float], sizes: int, spread: float
) -> list[SweepRun]:
    runs = []
    for number, (budget, centre) in enumerate(zip(budgets, optimum, strict=True)):
        for shape in distinct_shapes(_spread_sizes(centre / spread, centre * spread, sizes), job.model):
            tokens = budget / (6.0 * count_parameters(shape).total)
            sized = _sized_job(job, shape, tokens=tokens, longest=tokens, shortest=tokens)
            runs.append(_made_run(f"c{number}-{_size_name(shape)}", sized, budget))
    return runs


def _wsd_runs(
    job: Job, budgets: Sequence[float], optimum: Sequence[float], sizes: int, spread: float
) -> list[SweepRun]:
    """Return the runs of each size for the budgets whose optimum is near.

    Each run continues from the step where the decay of the previous one begins.
    """
    sizes_wanted = _spread_sizes(optimum[0] / math.sqrt(spread), optimum[-1] * math.sqrt(spread), sizes)
    runs = []
    for shape in distinct_shapes(sizes_wanted, job.model):
        params = count_parameters(shape).total
        near = [
            (number, budget)
            for number, (budget, centre) in enumerate(zip(budgets, optimum, strict=True))
            if 1 / spread <= params / centre <= spread * 1.01
        ]
        tokens = [budget / (6.0 * params) for _, budget in near]
        trunk = ""
        for (number, budget), count in zip(near, tokens, strict=True):
            sized = _sized_job(job, shape, tokens=count, longest=tokens[-1], shortest=tokens[0])
            run = _made_run(f"c{number}-{_size_name(shape)}", sized, budget)
            # The first step whose rate is below the peak: before it, longer runs are identical.
            # The same formula as train.optim.learning_rate.
            stable = run.tokens - sized.optim.decay * run.tokens
            decay_step = math.floor(stable / sized.batch.global_tokens)
            is_last = number == near[-1][0]
            runs.append(replace(run, trunk=trunk, decay_step=0 if is_last else decay_step))
            trunk = run.name
    return runs


def _spread_sizes(low: float, high: float, count: int) -> list[float]:
    return [low * (high / low) ** (index / (count - 1)) for index in range(count)]


def _size_name(shape: ModelShape) -> str:
    return f"w{shape.hidden}-d{shape.layers}-h{shape.heads}"


def _made_run(name: str, job: Job, budget: float) -> SweepRun:
    named = replace(job, name=name)
    assert isinstance(named.data.tokens, int)
    return SweepRun(
        name=name, job=named, budget=budget, params=count_parameters(job.model).total, tokens=named.data.tokens
    )


def _sized_job(job: Job, shape: ModelShape, *, tokens: float, longest: float, shortest: float) -> Job:
    """Return the job with another model and whole steps of about `tokens` tokens.

    Batch and rate follow the longest run of the size.
    """
    sequence = job.data.sequence
    lr, batch_tokens = learning_rate_and_batch(job, shape, longest)
    # A batch of whole sequences, with enough steps even for the shortest run.
    sequences = max(1, min(round(batch_tokens / sequence), int(shortest / sequence / LEAST_STEPS)))
    batch_tokens = sequences * sequence
    steps = round(tokens / batch_tokens)
    if steps < LEAST_STEPS:
        raise mistake(
            "--budgets",
            f"a model of {count_parameters(shape).total:,} parameters would take {steps} steps of one sequence",
            why=f"fewer than {LEAST_STEPS} steps say nothing about its loss",
            fix="raise the budgets, shorten data.sequence, or give more --tokens-per-parameter",
        )
    warmup = min(job.optim.warmup_tokens or WARMUP * shortest, WARMUP * shortest)
    return replace(
        job,
        model=shape,
        data=replace(job.data, tokens=steps * batch_tokens),
        batch=replace(job.batch, global_tokens=batch_tokens, global_sequences=sequences, micro="auto", ramp=()),
        optim=replace(job.optim, lr=lr, warmup_tokens=round(warmup / batch_tokens) * batch_tokens),
    )


def learning_rate_and_batch(job: Job, shape: ModelShape, tokens: float) -> tuple[float, float]:
    """Return the peak learning rate and tokens per step of one run.

    Within the sizes it was fitted to, Step Law gives both. Outside, only its exponents are used, scaled from the
    job's own learning rate, batch, size and tokens. muP and CompleteP transfer the rate to other widths and depths,
    but not to longer training, so only the exponents of the tokens are used. With one batch for all, short runs have
    too few steps, which looks like a law that levels off (docs/decisions/0043-a-sweep-follows-tokens.md).
    """
    size = _without_embeddings(shape)
    is_carried = job.scale.parametrization != "standard"
    if STEP_LAW_SIZES[0] <= size <= STEP_LAW_SIZES[1] and not is_carried:
        return step_law(size, tokens)
    return carry_rates(
        job.optim.lr,
        job.batch.global_tokens,
        larger=size / _without_embeddings(job.model),
        more_tokens=tokens / own_tokens(job),
        is_carried=is_carried,
    )


def own_tokens(job: Job) -> float:
    """Return the tokens to which the job's own learning rate and batch apply."""
    if job.data.tokens != "auto":
        return float(job.data.tokens)
    return float(TOKENS_PER_PARAMETER * count_parameters(job.model).total)


def rates_text(job: Job) -> str:
    """Describe the origin of learning rates and batches, for the page."""
    if job.scale.parametrization != "standard":
        return (
            f"learning rate {job.optim.lr:g} and {job.batch.global_tokens:,} tokens per step at "
            f"{format_count(own_tokens(job))} tokens, carried over to other sizes by {job.scale.parametrization} and "
            "to other numbers of tokens by the exponents of Step Law (arXiv:2503.04715)"
        )
    return (
        "learning rate and batch by Step Law (arXiv:2503.04715); outside 119M to 1.07B parameters by its exponents, "
        "through the job's own"
    )


def _without_embeddings(shape: ModelShape) -> float:
    counts = count_parameters(shape)
    return float(counts.total - counts.embedding - counts.head)


def decides_digest(run: SweepRun, *, data: str) -> str:
    """Return the SHA-256 of everything that decides a run's numbers, except the machine.

    `data` identifies the tokens.
    """
    job = run.job
    settings = {
        "model": json_values(replace(job.model, name="")),
        "data": [data, job.data.tokens, job.data.seed, job.data.sequence],
        "batch": [job.batch.global_tokens, json_values(job.batch.ramp)],
        "optim": json_values(job.optim),
        "precision": json_values(job.precision),
        "scale": json_values(job.scale),
        "evaluate": job.train.evaluate_sequences,
        "version": 1,
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
