"""Size the large run by a law: N*, D*, the price of being off, over-training for serving, the layout and its bill."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import UserError, mistake
from phalanx.hardware.cluster import resolve_cluster
from phalanx.hardware.types import Cluster
from phalanx.io.codec import from_json_values
from phalanx.io.files import read_text
from phalanx.job.load import load_table
from phalanx.job.model import ModelShape
from phalanx.plan.make import make_plan
from phalanx.plan.plan import Plan
from phalanx.scale.fit_points import optimum_estimates
from phalanx.scale.fit_result import FORMAT, FitEstimate, ScalingFit
from phalanx.scale.laws import law_loss, law_optimum
from phalanx.scale.published import EXTRAPOLATIONS
from phalanx.scale.shapes import counted_params, nearest_shape
from phalanx.scale.step_law import RunRates, rates_of_run, step_law
from phalanx.units import format_count, parse_count

FIRST_MFU = 0.4  # of the first guess from GPU-hours; the planner's own replaces it
FAR_SHAPE = 1.5  # times off the best size: the page says why
MOST_DECADES = 2.0
LARGEST_FIT_BYTES = 64 * 2**20
BATCH_TRIES = 5  # doublings of the batch until the planner can place it


@dataclass(frozen=True, kw_only=True, slots=True)
class OffOptimum:
    """A model of another size for the same budget."""

    factor: float
    params: float
    tokens: float
    loss: float
    wasted_compute: float  # share of the budget that the optimum would need less for this loss


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingChoice:
    """A smaller model, trained longer to the same loss, that is cheaper once it is served."""

    inference_tokens: float
    params: float
    tokens: float
    training_flops: float
    total_flops: float
    saved: float  # of training and serving together, against the compute-optimal model


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """What to train for a budget, and on what."""

    method: str
    fit_sha256: str
    flops: float
    budget_source: str
    decades_beyond: float
    best: dict[str, FitEstimate]  # params, tokens, tokens_per_param, loss
    chinchilla_rule_inside: bool | None  # whether 20 tokens per parameter are inside the interval
    off: tuple[OffOptimum, ...]
    serving: ServingChoice | None
    params_counted: str
    shape: ModelShape
    shape_params: int  # as the law counts
    tokens: float
    predicted_loss: float
    lr: float
    batch_tokens: int
    rates_from: str  # "step law", "step law, bounded", or "runs": those of the sweep
    step_law_lr: float
    step_law_batch_tokens: float
    plan: Plan | None
    job_toml: str
    notes: tuple[str, ...]


def read_fit(path: Path) -> ScalingFit:
    """The file that `phalanx scale fit --out` wrote."""
    text = read_text(path, noun="fit", most_bytes=LARGEST_FIT_BYTES)
    fix = "phalanx scale fit TABLE.csv --out FIT writes one"
    try:
        data = json.loads(text)
    except ValueError as error:
        raise mistake(str(path), f"is not JSON: {error}", fix=fix) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT or "parameters" not in data:
        raise mistake(str(path), "is not a fit of this version", fix=fix)
    found = from_json_values(ScalingFit, data, str(path), noun="fit", fix=fix)
    names = tuple(found.parameters)
    if any(len(row) != len(names) for row in found.draws) or not all(
        math.isfinite(one.value) for one in found.parameters.values()
    ):
        raise mistake(str(path), "its resamples do not belong to its parameters", fix=fix)
    return found


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
    """All of it; raises UserError where the law would be extended further than it can carry."""
    if (budget is None) == (gpu_hours is None):
        raise mistake("phalanx scale allocate", "needs either --budget or --gpu-hours", fix="e.g. --budget 1e24")
    if gpu_hours is not None and cluster is None:
        raise mistake("--gpu-hours", "means nothing without a cluster", fix="add --cluster, e.g. 8xH100:512")
    machine = resolve_cluster(cluster) if isinstance(cluster, str) else cluster
    served = _budget_amount("--inference-tokens", inference_tokens) if inference_tokens else 0.0
    settings = _Settings(fit=fit, vocab=vocab, sequence=sequence, data=data, name=name, served=served)
    if budget is not None:
        flops = _budget_amount("--budget", budget)
        _refuse_far(fit, flops, extrapolate=extrapolate)
        return _allocate_flops(settings, flops, f"--budget {budget}", machine)
    assert gpu_hours is not None
    assert machine is not None
    device_s = _budget_amount("--gpu-hours", gpu_hours) * 3600.0
    flops = device_s * float(machine.accelerator.peak_bf16_flops) * FIRST_MFU
    made = None
    for _ in range(3):  # the budget that the planned speed reaches; two rounds settle it within a per cent
        _refuse_far(fit, flops, extrapolate=extrapolate)
        made = _allocate_flops(settings, flops, f"{gpu_hours} GPU-hours", machine)
        if made.plan is None:
            break
        tokens = made.plan.prediction.tokens_per_s * device_s / made.plan.layout.devices
        reached = 6.0 * made.shape_params * tokens
        if abs(reached / flops - 1.0) < 0.01:
            break
        flops = reached
    assert made is not None
    return made


@dataclass(frozen=True, kw_only=True, slots=True)
class _Settings:
    fit: ScalingFit
    vocab: int
    sequence: int
    data: str
    name: str
    served: float


def _budget_amount(option: str, text: str) -> float:
    """A positive number such as 1e24 or 2T."""
    try:
        value = parse_count(text) if text[-1:].isalpha() else float(text)
    except (ValueError, UserError):
        value = math.nan
    if not (math.isfinite(value) and value > 0.0):
        raise mistake(option, f'"{text[:40]}" is not a positive number', fix="write it as 1e24 or 2T")
    return value


def _refuse_far(fit: ScalingFit, flops: float, *, extrapolate: bool) -> None:
    decades = math.log10(flops / fit.data.flops_range[1])
    if decades > MOST_DECADES and not extrapolate:
        raise mistake(
            "phalanx scale allocate",
            f"{flops:.2e} FLOP is {decades:.1f} decades beyond the largest run of the fit "
            f"({fit.data.flops_range[1]:.2e}); more than {MOST_DECADES:.0f} needs --extrapolate",
            why=f"errors of such extrapolations on public data: {'; '.join(EXTRAPOLATIONS)}",
            fix="add larger runs to the fit, or pass --extrapolate",
        )


def _allocate_flops(settings: _Settings, flops: float, source: str, machine: Cluster | None) -> Allocation:
    fit, values = settings.fit, settings.fit.values()
    best = optimum_estimates(fit, flops)
    params, tokens = best["params"].value, best["tokens"].value
    serving = _serving_choice(fit, flops, settings.served) if settings.served else None
    if serving is not None:
        params, tokens = serving.params, serving.tokens
    counted = fit.data.params_counted
    shape = nearest_shape(params, counted=counted, vocab=settings.vocab, name=settings.name)
    size = counted_params(shape, counted)
    far = max(size / params, params / size)
    training = serving.training_flops if serving is not None else flops
    tokens = training / (6.0 * size)  # the shape is not exactly N*: the budget stays, the tokens follow
    used = fit.used_rates
    bare = counted_params(shape, "no-embedding-no-head")
    rates = rates_of_run(size=bare, tokens=tokens, larger=size / used.params if used else None, used=used)
    law_lr, law_batch = step_law(bare, tokens)
    notes = [rates.sentence] if rates.sentence else []
    plan, job_toml, batch = _plan_allocation(settings, shape, tokens, rates, machine, notes)
    if far > FAR_SHAPE:
        notes.append(
            f"the nearest shape with a vocabulary of {settings.vocab:,} is {far:.1f} times off N*: "
            "give the vocabulary of the runs with --vocab"
        )
    decades = max(0.0, math.log10(flops / fit.data.flops_range[1]))
    if decades > 1.0:
        notes += [
            f"this is {decades:.1f} decades beyond the runs of the fit; errors of such extrapolations on public data:"
        ]
        notes += [f"  {one}" for one in EXTRAPOLATIONS]
    if fit.method == "overtrain":
        notes.append("overtrain holds α = β: its N* grows as C^0.5 whatever the runs say")
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
        job_toml=job_toml,
        notes=tuple(notes),
    )


def _off_optimum(fit: ScalingFit, flops: float, factor: float) -> OffOptimum:
    """The loss of a model `factor` times the best size, and the budget that the best size would need for it."""
    values = fit.values()
    params, _ = law_optimum(fit.method, values, flops)
    size = params * factor
    tokens = flops / (6.0 * size)
    loss = law_loss(fit.method, values, size, tokens)
    low, high = flops / 1e3, flops
    for _ in range(60):
        middle = math.sqrt(low * high)
        reached = law_loss(fit.method, values, *law_optimum(fit.method, values, middle))
        low, high = (low, middle) if reached < loss else (middle, high)
    return OffOptimum(factor=factor, params=size, tokens=tokens, loss=loss, wasted_compute=1.0 - high / flops)


def _serving_choice(fit: ScalingFit, flops: float, served: float) -> ServingChoice:
    """The model of the same loss with the least training and serving compute (2·N per served token).

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
    """Tokens after which a model reaches a loss; None where it never does (within a million times as many)."""
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
    """The job, and its plan where there is a cluster; the batch is doubled until the planner can place it."""
    sequences = 2 ** max(0, round(math.log2(rates.batch_tokens / settings.sequence)))
    spec = machine.name if machine is not None else "local"
    for attempt in range(BATCH_TRIES + 1):
        batch = sequences * 2**attempt * settings.sequence
        text = job_text(settings, shape, tokens, rates, batch, spec)
        job = load_table(Path("job.toml"), tomllib.loads(text), {})
        if machine is None:
            return None, text, batch
        try:
            plan = make_plan(job, machine, allow_unfinishable=True)
        except UserError as error:
            if attempt == BATCH_TRIES:
                notes.append(f"the planner cannot place it: {str(error).splitlines()[0]}")
                return None, text, batch
            continue
        if attempt:
            notes.append(
                f"a batch of {format_count(rates.batch_tokens)} tokens cannot be placed on {machine.name}: "
                f"{format_count(batch)} is the smallest doubling that can; expect some loss of sample efficiency"
            )
        return plan, text, batch
    raise AssertionError("unreachable")


def job_text(settings: _Settings, shape: ModelShape, tokens: float, rates: RunRates, batch: int, spec: str) -> str:
    """The job file."""
    steps = max(1, round(tokens / batch))
    warmup = min(2000, max(10, steps // 100)) * batch
    fit = settings.fit
    # A fit is a file that anybody may have written.
    digest = "".join(one for one in fit.data.sha256 if one in "0123456789abcdef")[:16]
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
    cluster = f'\n[cluster]\nspec = "{spec}"\n' if spec != "local" else ""
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
