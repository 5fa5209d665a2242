"""Errors for jobs without a layout: the constraint that excludes every layout, and the nearest possible change."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np

from phalanx.errors import UserError, mistake
from phalanx.plan.layout import Layout
from phalanx.plan.memory import INDEX_LIMIT
from phalanx.plan.request import PlanRequest
from phalanx.plan.score import LayoutScores, score_layouts
from phalanx.plan.space import build_space, device_splits, tensor_sizes
from phalanx.units import all_divisors, format_bytes, plural

# The rules rephrase these two for files of other trainers, which have no such planner.
PLANNER_FINDS = "the planner then finds layouts that fit"
WITH_OFFLOAD = ", with offload to host memory"
RELEASES = ("recompute", "zero", "shard", "micro", "offload", "sequence_parallel", "schedule", "tensor", "pipeline")
BY_MODE = 'parallel.mode = "fixed"'  # the origin of settings that fixed mode fills in (job.load)
FREE_IN_FIXED_MODE = ("data", "shard", "micro")  # they follow from the number of devices
MOST_GROWTH = 64  # how many times the cluster may grow, by doubling, when searching for enough devices


def no_layout(request: PlanRequest) -> UserError:
    """Return the error for sizes without any legal combination, naming the setting that prevents it."""
    devices, fixed = request.cluster.devices, request.fixed
    fixed_sizes = {name: int(fixed[name]) for name in ("tensor", "context", "pipeline", "data") if name in fixed}
    product = int(np.prod(list(fixed_sizes.values()), dtype=np.int64)) if fixed_sizes else 1
    product_text = " × ".join(f"{name} {size}" for name, size in fixed_sizes.items())
    if devices % product or ("data" in fixed_sizes and len(fixed_sizes) == 4 and product != devices):
        verb = "is not" if len(fixed_sizes) == 4 else "does not divide"
        closest = max(n for n in all_divisors(devices) if n <= product)
        fix = f"make the product {closest:,}, or use a cluster of {_next_multiple(devices, product):,} devices"
        if len(fixed_sizes) == 4:  # only one product is possible
            other_sizes = product // fixed_sizes["data"]
            data = f"parallel.data = {devices // other_sizes:,}" if devices % other_sizes == 0 else "other sizes"
            fix = f"use {data}, or a cluster of {plural(product, 'device')}"
        return mistake(
            request.place(f"parallel.{next(iter(fixed_sizes))}"),
            f"{product_text} = {product:,} {verb} the {plural(devices, 'device')} of {request.cluster.name}",
            why="tensor × context × pipeline × data must use every device",
            fix=fix,
        )
    if (conflict := _shards_do_not_divide(request)) is not None:
        return conflict
    if _has_legal(request):  # a layout is legal, but none can run
        return _cannot_run(request)
    for release in ("expert", "virtual_pipeline", "schedule", "micro", "shard", "sequence_parallel", "data"):
        if release in fixed and _has_legal(_without_settings(request, release)):
            return _blame_setting(request, release)
    return _no_batch(request)


def _has_legal(request: PlanRequest) -> bool:
    return next(build_space(request).grids(), None) is not None


def _shards_do_not_divide(request: PlanRequest) -> UserError | None:
    """Return the error for shard groups that do not fit: tensor × pipeline × shard must divide the devices."""
    devices, fixed = request.cluster.devices, request.fixed
    if int(fixed.get("shard", 1)) == 1 or int(fixed.get("zero", 1)) == 0:
        return None
    sizes = {name: int(fixed[name]) for name in ("tensor", "pipeline", "shard") if int(fixed.get(name, 1)) > 1}
    product = math.prod(sizes.values())
    if devices % product == 0:
        return None
    product_text = " × ".join(f"{name} {size}" for name, size in sizes.items())
    ranks, remainder = divmod(devices, product // sizes["shard"])
    closest = max(n for n in all_divisors(ranks) if n <= sizes["shard"]) if not remainder else 0
    smaller_fix = f"use parallel.shard = {closest:,}, smaller sizes" if closest else "use smaller sizes"
    return mistake(
        request.place(f"parallel.{next(iter(sizes))}"),
        f"{product_text} = {product:,} does not divide the {plural(devices, 'device')} of {request.cluster.name}",
        why="each tensor and pipeline rank needs its own shard group, and all of them must use every device",
        fix=f"{smaller_fix}, or a cluster of {_next_multiple(devices, product):,} devices",
    )


def _cannot_run(request: PlanRequest) -> UserError:
    """Return the error for legal sizes that leave a pipeline stage empty or a tensor too large for its index."""
    micro, tensor = int(request.fixed.get("micro", 1)), int(request.fixed.get("tensor", request.cluster.domain_devices))
    logits = micro * request.sequence * request.model.vocab / tensor
    if logits > INDEX_LIMIT:
        max_micro = int(micro * INDEX_LIMIT / logits)
        return mistake(
            request.place("batch.micro"),
            f"no layout can run: a micro-batch of {micro} × {request.sequence:,} tokens has {logits:,.0f} logits "
            f"on a rank",
            why="a tensor of more than 2^31 elements exceeds a 32-bit index",
            fix=f"use batch.micro = {max_micro} or less"
            if max_micro
            else "use more tensor ranks, or shorter sequences",
        )
    stages = request.fixed.get("pipeline", "auto")
    return mistake(
        request.place("parallel.pipeline"),
        f"no layout can run: parallel.pipeline = {stages} leaves a stage without any of the "
        f"{request.model.layers} layers",
        why="every stage holds at least one layer",
        fix=f"use a pipeline depth that divides {request.model.layers} or is well below it",
    )


def _no_batch(request: PlanRequest) -> UserError:
    """Return the error for a global batch that no legal number of data ranks divides evenly."""
    devices = request.cluster.devices
    # A batch that every number of data ranks divides.
    data = sorted({dp for *_, dp in device_splits(replace(request, global_sequences=devices), devices)})
    if not data:
        heads = ", ".join(str(n) for n in tensor_sizes(request, request.model.heads)[-4:])
        return mistake(
            request.cluster.name,
            f"{devices:,} devices cannot be divided among the {request.model.layers} layers, "
            f"{request.model.heads} heads "
            f"and {plural(request.global_sequences, 'sequence')} of {request.model.name}",
            why="tensor × context × pipeline × data must use every device",
            fix=f"tensor sizes that keep whole heads: {heads}; use a device count with such factors",
        )
    min_ranks, micro = data[0], int(request.fixed.get("micro", 1))
    unit = min_ranks * micro
    below, above = request.global_sequences // unit * unit, _next_multiple(request.global_sequences, unit)
    sizes = " or ".join(f"{n:,}" for n in (below, above) if n)
    return mistake(
        request.place("batch.global_sequences"),
        f"the global batch of {request.global_sequences:,} sequences cannot be divided evenly over {devices:,} devices",
        why=f"every data rank takes the same number of sequences, and there are at least {min_ranks:,} data ranks",
        fix=f"use batch.global_sequences = {sizes}, or another number of devices",
    )


def _next_multiple(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _blame_setting(request: PlanRequest, name: str) -> UserError:
    key = "batch.micro" if name == "micro" else f"parallel.{name}"
    table = build_space(_without_settings(request, name))
    column = {"expert": "ep", "virtual_pipeline": "vpp", "micro": "micro_batch", "data": "dp"}.get(name)
    fix = f"leave {key} out"
    if _by_mode(request, name):
        fix = f"set another {key}"
    if column:
        sizes = np.unique(table.base[column])
        nearest_sizes = sizes[np.argsort(np.abs(sizes - int(request.fixed[name])), kind="stable")[:3]]
        sizes_near = " or ".join(f"{n:,}" for n in np.sort(nearest_sizes))
        fix = f"set {key} = {sizes_near}" if _by_mode(request, name) else f"use {sizes_near}, or leave {key} out"
    return mistake(
        request.place(key),
        f"{key} = {request.fixed[name]} leaves no valid layout on {plural(request.cluster.devices, 'device')}",
        why="it does not divide evenly with the other sizes",
        fix=fix,
    )


def _without_settings(request: PlanRequest, *names: str) -> PlanRequest:
    return replace(request, fixed={name: value for name, value in request.fixed.items() if name not in names})


def no_fit(request: PlanRequest, scores: LayoutScores) -> UserError:
    """Return the error for layouts of which none fits, with a change that would make one fit."""
    row = int(scores.memory_bytes.argmin())
    least_bytes, usable_bytes = float(scores.memory_bytes[row]), scores.usable_bytes
    return mistake(
        request.cluster.name,
        f"{request.model.name} does not fit: every valid layout needs at least {format_bytes(least_bytes)} per device, "
        f"and {format_bytes(usable_bytes)} of {format_bytes(request.cluster.accelerator.memory_bytes)} are usable",
        why=f"the smallest is {scores.layout(row).name}",
        fix=_what_would_fit(request, scores),
    )


def _what_would_fit(request: PlanRequest, scores: LayoutScores) -> str:
    for name in RELEASES:
        if name in request.fixed:
            released_scores = score_layouts(
                build_space(_without_settings(request, name), offload=request.offload_kinds)
            )
            if released_scores.fits.any():
                key = "batch.micro" if name == "micro" else f"parallel.{name}"
                step = np.where(released_scores.fits, released_scores.step_s, np.inf)
                layout = released_scores.layout(int(step.argmin()))
                return f"{_released_setting(request, name, key, layout)}: {layout.name} fits"
    unfixed = replace(request, fixed={})
    if request.fixed and _fits_on(unfixed, 1, offload=request.offload_kinds):
        action = 'set parallel.mode = "auto"' if _fixed_mode(request) else "remove the sizes under [parallel]"
        host = "" if _fits_on(unfixed, 1, offload=("none",)) else WITH_OFFLOAD
        return f"{action}: {PLANNER_FINDS}{host}"
    if fix := _more_devices(unfixed):
        return fix
    gap = float(scores.memory_bytes.min()) - scores.usable_bytes
    return f"use devices with at least {format_bytes(gap)} more memory, or a smaller model or sequence"


def _fixed_mode(request: PlanRequest) -> bool:
    """Return whether the job sets `parallel.mode = "fixed"`, which fills in omitted settings without a search."""
    return any(request.place(f"parallel.{name}") == BY_MODE for name in request.fixed)


def _by_mode(request: PlanRequest, name: str) -> bool:
    """Return whether fixed mode would fill in the setting again if it were omitted."""
    return _fixed_mode(request) and name not in FREE_IN_FIXED_MODE


def _released_setting(request: PlanRequest, name: str, key: str, layout: Layout) -> str:
    if not _by_mode(request, name):
        return f"leave {key} out"
    value = getattr(layout, "micro_batch" if name == "micro" else name)
    return f"set {key} = {json.dumps(value)}"


def _more_devices(request: PlanRequest) -> str:
    """Return the fewest devices, in doublings, on which a layout would fit, with and without offload."""
    plain = _devices_needed(request, ("none",))
    offloaded = _devices_needed(request, ("optimizer",)) if "optimizer" in request.offload_kinds else 0
    if offloaded and (not plain or offloaded < plain):
        without = f" ({plain:,} without)" if plain else ""
        return f"use {offloaded:,} such devices with the optimizer in host memory{without}, or devices with more memory"
    return f"use about {plain:,} such devices, or devices with more memory" if plain else ""


def _devices_needed(request: PlanRequest, offload: tuple[str, ...]) -> int:
    growth = 2
    while growth <= MOST_GROWTH:
        if _fits_on(request, growth, offload=offload):
            return request.cluster.devices * growth
        growth *= 2
    return 0


def _fits_on(request: PlanRequest, growth: int, *, offload: tuple[str, ...]) -> bool:
    grown_request = replace(request, cluster=replace(request.cluster, domains=request.cluster.domains * growth))
    return bool(score_layouts(build_space(grown_request, offload=offload)).fits.any())
