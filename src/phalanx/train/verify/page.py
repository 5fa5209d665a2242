"""The page `phalanx verify` prints."""

from __future__ import annotations

from phalanx.train.verify.compare import Bounds
from phalanx.train.verify.prove import Proof
from phalanx.train.verify.terms import format_name
from phalanx.units import format_seconds, plural

AXES = ("tensor", "context", "pipeline", "virtual_pipeline", "data", "shard", "expert")


def render(proof: Proof) -> str:
    """The proof as a person reads it: the verdict, what was split how far, what differed how much."""
    blocks = [
        [f"{proof.job}: {proof.model}, {proof.layout.name}", _verdict(proof)],
        _axes(proof),
        _differences(proof),
        _notes(proof),
    ]
    return "\n\n".join("\n".join(block) for block in blocks)


def _verdict(proof: Proof) -> str:
    what = f"{plural(proof.ranks, 'rank')} against one process"
    if proof.gpus:
        what += f" on {plural(proof.gpus, 'GPU')} over NCCL"
    how = f"{plural(proof.steps, 'step')} of {proof.optimizer} in {format_name(proof.terms.precision)}"
    how += ", compiled" if proof.compiled else ""
    if proof.comparison.first is not None:
        return f"DIFFERS: {proof.comparison.first.render()}\n({what}, {how})"
    if proof.again is not None and proof.again.first is not None:
        return f"DIFFERS from the compile cache: {proof.again.first.render()}\n({what}, {how}, second start)"
    twice = (
        f", twice: {plural(proof.cached, 'graph')} of the second start came from the compile cache"
        if proof.again
        else ""
    )
    return f"PROVEN: {what}, {how}, give the same{twice}"


def _axes(proof: Proof) -> list[str]:
    rows = [f"  {'axis':<18}{'real':>8}{'proven':>8}"]
    for name in AXES:
        real, small = getattr(proof.layout, name), getattr(proof.small, name)
        if real > 1 or name == "data":
            rows.append(f"  {name:<18}{real:>8,}{small:>8,}")
    rows.append(f"  {'ranks':<18}{proof.layout.devices:>8,}{proof.small.devices:>8,}")
    return rows


def _differences(proof: Proof) -> list[str]:
    """How far apart, and how far is allowed; of both starts the worse."""
    bounds = proof.bounds
    rows = [
        ("loss", "loss", _allowed(bounds.loss, bounds)),
        ("held-out loss", "evaluation", _allowed(bounds.loss, bounds)),
        ("gradient norm", "norm", _allowed(bounds.norm, bounds)),
    ]
    if not proof.terms.full_size:
        of = "each tensor, first step" if bounds.rounding else "each tensor's largest"
        rows.append(("gradients", "gradient", f"{_number(bounds.gradient, bounds)} of {of}"))
        if bounds.parameter is not None:
            rows.append(("parameters", "parameter", _number(bounds.parameter, bounds)))
    head = "relative difference" if bounds.rounding else "largest difference"
    runs = [one for one in (proof.comparison, proof.again) if one is not None]
    return [f"  {head:<{len(head)}}{'found':>8}  allowed"] + [
        f"  {name:<{len(head)}}{max(getattr(one, key) for one in runs):>8.0e}  {allowed}" for name, key, allowed in rows
    ]


def _allowed(size: float, bounds: Bounds) -> str:
    later = f" (later steps {size * bounds.later:.1e})" if bounds.rounding else ""
    return f"{_number(size, bounds)}{later}"


def _number(size: float, bounds: Bounds) -> str:
    return f"{size:.1e}" if bounds.rounding else f"{size:.0e}"


def _notes(proof: Proof) -> list[str]:
    lines = []
    if proof.changes:
        small = ", ".join(f"{one.name} {one.real:,} → {one.small:,}" for one in proof.changes)
        lines.append(f"  made smaller: {small}")
    if proof.bounds.rounding:
        lines.append(
            f"  allowed: the loss 1, the gradient norm 4, each gradient 16 roundings of {proof.bounds.rounding:.1e} "
            f"({proof.terms.precision}); 4 times that after the first update"
        )
    if proof.left_out:
        lines.append(f"  not covered: {'; '.join(proof.left_out)}")
    split = f"{plural(proof.ranks, 'rank')} {format_seconds(proof.split_s)}"
    lines.append(f"  took {format_seconds(proof.total_s)}: one process {format_seconds(proof.one_s)}, {split}")
    return lines
