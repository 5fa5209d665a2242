"""Size the large run by a scaling law: model, tokens, learning rate and batch, its plan on a cluster, and its job file.

For a budget C in FLOPs, N* and D* are the parameters and training tokens with the lowest loss. A smaller model that
is trained longer may be cheaper once serving counts.
"""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.errors import UserError, mistake
from phalanx.hardware.cluster import resolve_cluster
from phalanx.hardware.types import Cluster
from phalanx.io.limits import MAX_TOKENS
from phalanx.job.load import load_table
from phalanx.job.model import ModelShape
from phalanx.plan.make import make_plan
from phalanx.plan.plan import Plan
from phalanx.scale.fit_points import optimum_estimates
from phalanx.scale.fit_result import FitEstimate, ScalingFit
from phalanx.scale.laws import law_loss, law_optimum
from phalanx.scale.published import EXTRAPOLATIONS
from phalanx.scale.shapes import counted_params, nearest_shape
from phalanx.scale.step_law import RunRates, rates_of_run, step_law
from phalanx.units import format_count, parse_count

# MFU of the first guess from GPU-hours; the planner's value replaces it.
FIRST_MFU = 0.4
# Ratio of the shape's size to the best size above which the page explains the difference.
FAR_SHAPE = 1.5
# Decades of compute between the budget and the fit's runs that need no --extrapolate.
MOST_DECADES = 2.0
# Doublings of the batch until the planner can place it.
BATCH_TRIES = 5
# Budgets that are planned until one takes the GPU-hours.
HOURS_ROUNDS = 12
# Difference from the GPU-hours, as a share of them, that is accepted.
HOURS_OFF = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class OffOptimum:
    """The outcome of training a model of another size for the same budget."""

    factor: float
    params: float
    tokens: float
    loss: float
    wasted_compute: float  # share of the budget that the best size would save for this loss


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingChoice:
    """A smaller model, trained longer to the same loss, that is cheaper when the cost of serving is included."""

    inference_tokens: float
    params: float
    tokens: float
    training_flops: float
    total_flops: float
    # Share of training and serving compute that it saves over the compute-optimal model.
    saved: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """The model to train for a budget, its training settings, and its plan on a cluster."""

    method: str
    fit_sha256: str
    flops: float
    budget_source: str
    decades_beyond: float
    best: dict[str, FitEstimate]  # params, tokens, tokens_per_param, loss
    # True if 20 tokens per parameter are inside the interval.
    chinchilla_rule_inside: bool | None
    off: tuple[OffOptimum, ...]
    serving: ServingChoice | None
    params_counted: str
    shape: ModelShape
    shape_params: int  # counted as the law counts parameters
    tokens: float
    predicted_loss: float
    lr: float
    batch_tokens: int
    rates_from: str  # "step law", "step law, bounded", or "runs": those of the sweep
    step_law_lr: float
    step_law_batch_tokens: float
    plan: Plan | None
    cluster_spec: str  # as the caller gave it; empty without a cluster
    job_toml: str
    notes: tuple[str, ...]


def allocate_budget(
    fit: ScalingFit,
    *,
    budget: str | None,
    gpu_hours: str | None,
    cluster: str | Cluster | None,
    inference_tokens: str | None,
    extrapolate: bool,
    vocab: int,
    sequence: int,
    data: str,
    name: str,
) -> Allocation:
    """Size a run for a budget in FLOPs or GPU-hours; raises UserError where the law is extrapolated too far.

    `extrapolate` permits a budget more than two decades beyond the runs of the fit. `inference_tokens` are the tokens
    that the model will serve; with them a smaller model may be cheaper in total.
    """
    if budget is None and gpu_hours is None:
        raise mistake("phalanx scale allocate", "needs either --budget or --gpu-hours", fix="e.g. --budget 1e24")
    if budget is not None and gpu_hours is not None:
        problem = "takes --budget or --gpu-hours, not both"
        raise mistake("phalanx scale allocate", problem, fix="leave one of them out: each decides the other")
    if gpu_hours is not None and cluster is None:
        raise mistake("--gpu-hours", "means nothing without a cluster", fix="add --cluster, e.g. 8xH100:512")
    machine = resolve_cluster(cluster) if isinstance(cluster, str) else cluster
    settings = _Settings(
        fit=fit,
        vocab=vocab,
        sequence=sequence,
        data=data,
        name=name,
        served=_served_tokens(inference_tokens) if inference_tokens is not None else 0.0,
        spec=cluster if isinstance(cluster, str) else machine.name if machine is not None else "",
        option="--budget" if budget is not None else "--gpu-hours",
    )
    if budget is not None:
        flops = positive_amount("--budget", budget)
        _refuse_far(fit, flops, extrapolate=extrapolate, option="--budget")
        return _allocate_flops(settings, flops, f"--budget {budget}", machine)
    assert gpu_hours is not None
    assert machine is not None
    return _allocate_hours(settings, gpu_hours, machine, extrapolate=extrapolate)


def _allocate_hours(settings: _Settings, text: str, machine: Cluster, *, extrapolate: bool) -> Allocation:
    """Return the allocation whose planned run takes the given device-hours, searched over budgets in FLOPs.

    Hours are proportional to FLOPs while shape, batch and layout stay the same, and jump where these change. Steps by
    the ratio alone could alternate across such a jump forever, so the two nearest budgets bound the next.
    """
    hours = positive_amount("--gpu-hours", text)
    # The first guess; each round replaces it by the ratio of wanted to planned hours.
    flops = hours * 3600.0 * float(machine.accelerator.peak_bf16_flops) * FIRST_MFU
    low, high = 0.0, math.inf
    best: Allocation | None = None
    for _ in range(HOURS_ROUNDS):
        candidate = _allocate_flops(settings, flops, f"{text} GPU-hours", machine)
        if candidate.plan is None:
            guess = (
                f"the GPU-hours are taken as FLOPs at a guess, {FIRST_MFU:.0%} of the peak: no plan says how fast it is"
            )
            best = replace(candidate, notes=(*candidate.notes, guess)) if best is None else best
            break
        if best is None or _hours_off(candidate, hours) < _hours_off(best, hours):
            best = candidate
        if _hours_off(best, hours) < HOURS_OFF:
            break
        spent = candidate.plan.bill.device_hours
        low, high = (max(low, flops), high) if spent < hours else (low, min(high, flops))
        flops *= hours / spent
        if not low < flops < high:
            flops = math.sqrt(low * high)
        if high / max(low, 1e-300) < 1.0 + 1e-4:
            # At a jump no budget takes exactly these hours.
            break
    assert best is not None
    _refuse_far(settings.fit, best.flops, extrapolate=extrapolate, option="--gpu-hours")
    if best.plan is None or _hours_off(best, hours) < HOURS_OFF:
        return best
    spent = best.plan.bill.device_hours
    note = (
        f"this run takes {format_count(spent)} device-hours, {100 * (spent / hours - 1):+.1f} % from --gpu-hours "
        f"{text}: model sizes, batches and layouts come in steps, and none was found nearer"
    )
    return replace(best, notes=(*best.notes, note))


def _hours_off(made: Allocation, hours: float) -> float:
    """Return the difference between the bill's device-hours and `hours`, as a share of `hours`."""
    assert made.plan is not None
    return abs(made.plan.bill.device_hours / hours - 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Settings:
    """Settings of an allocation that do not depend on the budget."""

    fit: ScalingFit
    vocab: int
    sequence: int
    data: str
    name: str
    served: float
    # The cluster's spec as the caller gave it: the cluster's name may not be a spec.
    spec: str
    # The option that set the budget, for messages.
    option: str


def positive_amount(option: str, text: str) -> float:
    """Parse a positive number such as 1e24 or 2T; raises UserError."""
    try:
        value = parse_count(text) if text[-1:].isalpha() else float(text)
    except (ValueError, UserError):
        value = math.nan
    if not (math.isfinite(value) and value > 0.0):
        raise mistake(option, f'"{text[:40]}" is not a positive number', fix="write it as 1e24 or 2T")
    return value


def _served_tokens(text: str) -> float:
    """Parse the tokens that a model serves in its life; more than MAX_TOKENS are taken for a wrong exponent."""
    served = positive_amount("--inference-tokens", text)
    if served > MAX_TOKENS:
        raise mistake("--inference-tokens", f"{served:.3g} are more than {MAX_TOKENS:.0e}", fix="write it as 5T")
    return served


def _refuse_far(fit: ScalingFit, flops: float, *, extrapolate: bool, option: str) -> None:
    """Raise UserError for a budget more than two decades from the fit's runs, unless `extrapolate` is set."""
    smallest, largest = fit.data.flops_range
    beyond, below = math.log10(flops / largest), math.log10(smallest / flops)
    if extrapolate or max(beyond, below) <= MOST_DECADES:
        return
    if below > MOST_DECADES:
        raise mistake(
            option,
            f"{flops:.2e} FLOP is {_more_than(below, MOST_DECADES)} decades below the smallest run of the fit "
            f"({smallest:.2e}); more than {MOST_DECADES:.0f} needs --extrapolate",
            why="so far below its runs a law says nothing: a loss of it can be above that of a uniform guess",
            fix="name a larger budget, or pass --extrapolate",
        )
    raise mistake(
        option,
        f"{flops:.2e} FLOP is {_more_than(beyond, MOST_DECADES)} decades beyond the largest run of the fit "
        f"({largest:.2e}); more than {MOST_DECADES:.0f} needs --extrapolate",
        why=f"errors of such extrapolations on public data: {'; '.join(EXTRAPOLATIONS)}",
        fix="add larger runs to the fit, or pass --extrapolate",
    )


def _more_than(value: float, limit: float) -> str:
    """Format a number above a limit with as many digits as show that it is above.

    >>> _more_than(3.14, 2.0), _more_than(2.004, 2.0)
    ('3.1', '2.004')
    """
    for digits in range(1, 6):
        if float(text := f"{value:.{digits}f}") > limit:
            return text
    return f"{value!r}"


def _refuse_degenerate(settings: _Settings, params: float, tokens: float, flops: float) -> None:
    """Raise UserError where the optimum is at the edge of the search range, which no job can use."""
    if params <= 1.0 + 1e-9 or tokens <= 1.0 + 1e-9:
        raise mistake(
            settings.option,
            f"the best model for {flops:.2e} FLOP has {format_count(params)} parameters and {format_count(tokens)} "
            "training tokens: no optimum",
            why="the law is far from its runs, or they say nothing of size",
            fix="name a budget nearer to the runs of the fit, or add runs to it",
        )


def _refuse_run(settings: _Settings, params: float, size: int, tokens: float) -> None:
    """Raise UserError for a model or training tokens that no job can have."""
    if size * FAR_SHAPE < params:
        raise mistake(
            settings.option,
            f"asks for a model of {params:.3g} parameters, more than any shape that is known here",
            fix="name a smaller number",
        )
    if tokens < settings.sequence:
        raise mistake(
            settings.option,
            f"the smallest model of this vocabulary, of {format_count(size)} parameters, could be trained on "
            f"{format_count(tokens)} tokens: less than one sequence of {settings.sequence:,}",
            fix="name a larger budget, or a smaller --vocab and --sequence",
        )
    # MAX_TOKENS / 2, as rounding to whole steps may increase it.
    if tokens > MAX_TOKENS / 2:
        raise mistake(
            settings.option,
            f"asks for {tokens:.2e} training tokens of {format_count(size)} parameters",
            why=f"a job has at most {MAX_TOKENS:.0e}",
            fix="name a smaller number",
        )


def _allocate_flops(settings: _Settings, flops: float, source: str, machine: Cluster | None) -> Allocation:
    """Return the allocation of a budget in FLOPs, planned on `machine` if there is one."""
    fit, values = settings.fit, settings.fit.values()
    _refuse_degenerate(settings, *law_optimum(fit.method, values, flops), flops)
    best = optimum_estimates(fit, flops)
    params, tokens = best["params"].value, best["tokens"].value
    serving = _serving_choice(fit, flops, settings.served) if settings.served else None
    if serving is not None:
        params, tokens = serving.params, serving.tokens
    counted = fit.data.params_counted
    shape = nearest_shape(params, counted=counted, vocab=settings.vocab, name=settings.name)
    size = counted_params(shape, counted)
    size_ratio = max(size / params, params / size)
    training = serving.training_flops if serving is not None else flops
    # The shape has not exactly N* parameters: the budget stays, and the tokens follow.
    tokens = training / (6.0 * size)
    _refuse_run(settings, params, size, tokens)
    used = fit.used_rates
    bare = counted_params(shape, "no-embedding-no-head")
    rates = rates_of_run(size=bare, tokens=tokens, larger=size / used.params if used else None, used=used)
    law_lr, law_batch = step_law(bare, tokens)
    notes = [rates.sentence] if rates.sentence else []
    plan, job_toml, batch = _plan_allocation(settings, shape, tokens, rates, machine, notes)
    if size_ratio > FAR_SHAPE:
        notes.append(
            f"the nearest shape with a vocabulary of {settings.vocab:,} is {format_count(size_ratio)} times off N*: "
            "give the vocabulary of the runs with --vocab"
        )
    decades = max(0.0, math.log10(flops / fit.data.flops_range[1]))
    if decades > 1.0:
        notes += [
            f"this is {decades:.1f} decades beyond the runs of the fit; errors of such extrapolations on public data:"
        ]
        notes += [f"  {extrapolation}" for extrapolation in EXTRAPOLATIONS]
    if fit.method == "overtrain":
        notes.append("overtrain holds α = β: its N* grows as C^0.5 whatever the runs say")
    # Warnings about the fit apply to the allocation too.
    notes += [f"of the fit: {warning}" for warning in fit.warnings]
    ratio = best["tokens_per_param"]
    inside = None if ratio.low is None or ratio.high is None else ratio.low <= 20.0 <= ratio.high
    return Allocation(
        method=fit.method,
        fit_sha256=fit.data.sha256,
        flops=flops,
        budget_source=source,
        decades_beyond=decades,
        best=best,
        chinchilla_rule_inside=inside,
        off=tuple(_off_optimum(fit, flops, factor) for factor in (0.5, 2.0)),
        serving=serving,
        params_counted=counted,
        shape=shape,
        shape_params=size,
        tokens=tokens,
        predicted_loss=law_loss(fit.method, values, size, tokens),
        lr=rates.lr,
        batch_tokens=batch,
        rates_from=rates.source,
        step_law_lr=law_lr,
        step_law_batch_tokens=law_batch,
        plan=plan,
        cluster_spec=settings.spec,
        job_toml=job_toml,
        notes=tuple(notes),
    )


def _off_optimum(fit: ScalingFit, flops: float, factor: float) -> OffOptimum:
    """Return the loss of a model `factor` times the best size, and the share of the budget it wastes."""
    values = fit.values()
    params, _ = law_optimum(fit.method, values, flops)
    size = params * factor
    tokens = flops / (6.0 * size)
    loss = law_loss(fit.method, values, size, tokens)
    # Bisect the budget at which the best size reaches the same loss.
    low, high = flops / 1e3, flops
    for _ in range(60):
        middle = math.sqrt(low * high)
        reached = law_loss(fit.method, values, *law_optimum(fit.method, values, middle))
        low, high = (low, middle) if reached < loss else (middle, high)
    return OffOptimum(factor=factor, params=size, tokens=tokens, loss=loss, wasted_compute=1.0 - high / flops)


def _serving_choice(fit: ScalingFit, flops: float, served: float) -> ServingChoice:
    """Return the model of the same loss with the least training and serving compute (2·N per served token).

    The question of arXiv:2401.00448: a smaller model needs more training tokens, and each served token costs less.
    """
    values = fit.values()
    params, tokens = law_optimum(fit.method, values, flops)
    target = law_loss(fit.method, values, params, tokens)
    plain = flops + 2.0 * params * served
    best = (plain, params, tokens)
    for step in range(1, 400):
        size = params * math.exp(-0.01 * step)
        needed = _tokens_for_loss(fit.method, values, size, target, at_least=tokens)
        if needed is None:
            break
        total = 6.0 * size * needed + 2.0 * size * served
        if total < best[0]:
            best = (total, size, needed)
    total, size, needed = best
    return ServingChoice(
        inference_tokens=served,
        params=size,
        tokens=needed,
        training_flops=6.0 * size * needed,
        total_flops=total,
        saved=1.0 - total / plain,
    )


def _tokens_for_loss(
    method: str, values: dict[str, float], params: float, target: float, *, at_least: float
) -> float | None:
    """Return the tokens after which a model reaches a loss; None where a million times `at_least` are not enough."""
    low, high = at_least, at_least * 1e6
    if law_loss(method, values, params, high) > target:
        return None
    for _ in range(80):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if law_loss(method, values, params, middle) <= target else (middle, high)
    return high


def _plan_allocation(
    settings: _Settings,
    shape: ModelShape,
    tokens: float,
    rates: RunRates,
    machine: Cluster | None,
    notes: list[str],
) -> tuple[Plan | None, str, int]:
    """Return the plan, the job file and its batch; without a cluster the plan is None.

    The batch is doubled until the planner can place the job. A job that cannot be placed even then keeps the original
    batch, and the plan is None.
    """
    smallest_batch = 2 ** max(0, round(math.log2(rates.batch_tokens / settings.sequence))) * settings.sequence
    text = job_text(settings, shape, tokens, rates, smallest_batch)
    job = load_table(Path("job.toml"), tomllib.loads(text), {})
    if machine is None:
        return None, text, smallest_batch
    reason = ""
    for attempt in range(BATCH_TRIES + 1):
        batch = smallest_batch * 2**attempt
        doubled = job_text(settings, shape, tokens, rates, batch)
        if attempt:
            job = load_table(Path("job.toml"), tomllib.loads(doubled), {})
        try:
            plan = make_plan(job, machine, allow_unfinishable=True)
        except UserError as error:
            reason = reason or str(error).splitlines()[0]
            continue
        if attempt:
            notes.append(
                f"a batch of {format_count(rates.batch_tokens)} tokens cannot be placed on {settings.spec}: "
                f"{format_count(batch)} is the smallest doubling that can; expect some loss of sample efficiency"
            )
        return plan, doubled, batch
    notes.append(f"the planner cannot place it, nor with up to {2**BATCH_TRIES} times the batch: {reason}")
    return None, text, smallest_batch


def job_text(settings: _Settings, shape: ModelShape, tokens: float, rates: RunRates, batch: int) -> str:
    """Return the text of the job file."""
    steps = max(1, round(tokens / batch))
    warmup = min(2000, max(10, steps // 100)) * batch
    fit = settings.fit
    # A fit is a file of unknown origin: keep only the hexadecimal digits of its digest.
    digest = "".join(digit for digit in fit.data.sha256 if digit in "0123456789abcdef")[:16]
    used = fit.used_rates
    scale = ""
    if rates.source == "runs" and used is not None and used.parametrization:
        scale = f"""
[scale]  # as in the sweep: the learning rate is of this width and depth
parametrization = "{used.parametrization}"
base_width = {used.base_width}
base_depth = {used.base_depth}
base_head_dim = {used.base_head_dim}
"""
    source = "of the sweep's best run" if rates.source == "runs" else f"{rates.source.capitalize()}, arXiv:2503.04715"
    cluster = cluster_section(settings.spec) if settings.spec else ""
    return f"""\
# Sized by phalanx scale allocate from a law of {fit.data.rows} runs ({fit.method}, data sha256 {digest}).
spec = "2026.1"
name = "{settings.name}"

[model]
layers = {shape.layers}
hidden = {shape.hidden}
heads = {shape.heads}
kv_heads = {shape.kv_heads}
head_dim = {shape.head_dim}
ffn = {shape.ffn}
vocab = {shape.vocab}

[data]
path = {json.dumps(settings.data)}
sequence = {settings.sequence}
tokens = {steps * batch}  # {steps:,} steps

[batch]
global_tokens = {batch}

[optim]
lr = {rates.lr:.3g}  # {source}
warmup_tokens = {warmup}
{scale}{cluster}"""


def cluster_section(spec: str) -> str:
    """Return the [cluster] section of a job file."""
    return f"\n[cluster]\nspec = {json.dumps(spec, ensure_ascii=False)}\n"
