"""The page `phalanx verify` prints."""

from __future__ import annotations

from phalanx.train.verify.prove import Proof
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
    how = f"{plural(proof.steps, 'step')} of {proof.optimizer} in float64"
    if proof.comparison.first is None:
        return f"PROVEN: {what}, {how}, give the same"
    return f"DIFFERS: {proof.comparison.first.render()}\n({what}, {how})"


def _axes(proof: Proof) -> list[str]:
    rows = [f"  {'axis':<18}{'real':>8}{'proven':>8}"]
    for name in AXES:
        real, small = getattr(proof.layout, name), getattr(proof.small, name)
        if real > 1 or name == "data":
            rows.append(f"  {name:<18}{real:>8,}{small:>8,}")
    rows.append(f"  {'ranks':<18}{proof.layout.devices:>8,}{proof.small.devices:>8,}")
    return rows


def _differences(proof: Proof) -> list[str]:
    found, bounds = proof.comparison, proof.bounds
    relative = f"{bounds.gradient:.0e} of each tensor's largest"
    rows = [
        ("loss", found.loss, f"{bounds.loss:.0e}"),
        ("held-out loss", found.evaluation, f"{bounds.loss:.0e}"),
        ("gradient norm", found.norm, f"{bounds.norm:.0e}"),
        ("gradients", found.gradient, relative),
        ("parameters", found.parameter, f"{bounds.parameter:.0e}"),
    ]
    lines = [f"  {'largest difference':<18}{'found':>8}  allowed"]
    return lines + [f"  {name:<18}{size:>8.0e}  {allowed}" for name, size, allowed in rows]


def _notes(proof: Proof) -> list[str]:
    lines = []
    if proof.changes:
        small = ", ".join(f"{one.name} {one.real:,} → {one.small:,}" for one in proof.changes)
        lines.append(f"  made smaller: {small}")
    if proof.left_out:
        lines.append(f"  not covered: {'; '.join(proof.left_out)}")
    split = f"{plural(proof.ranks, 'rank')} {format_seconds(proof.split_s)}"
    lines.append(f"  took {format_seconds(proof.total_s)}: one process {format_seconds(proof.one_s)}, {split}")
    return lines
