"""What a mode and codec cost in loss against synchronous training, as far as anybody measured it.

Ours: 4 workers, 0.37M-parameter byte model, 400 steps, movie-review text, one seed, validation nats per byte; the table
stands in docs/slow-links.md. Differences below 0.01 nats (0.4 %) mean nothing there. Where we measured nothing, a
published statement is named, and where there is none, the penalty is said to be unknown.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.job.sync_section import SyncSettings

OURS = "our runs, 0.37M parameters, 400 steps, one seed (docs/slow-links.md)"
SYNCHRONOUS_NATS = 2.4840
# (what is exchanged, H, codec family, with warm-up): validation nats per byte. bf16 and int8 round without a bias and
# share a family: int8 gave 2.4838 every step, and in DiLoCo the same digits as fp32.
MEASURED_NATS = {
    ("gradients", 1, "fp32", False): 2.4840,
    ("gradients", 1, "int8", False): 2.4838,
    ("gradients", 1, "topk-2bit", False): 3.0509,  # top 1 % with error feedback, into AdamW
    ("updates", 10, "fp32", False): 2.5998,
    ("updates", 20, "fp32", False): 2.5492,
    ("updates", 50, "fp32", False): 2.5579,
    ("updates", 20, "int8", False): 2.5492,
    ("updates", 20, "fp32", True): 2.4884,
    ("updates", 20, "int8", True): 2.4884,
    ("updates", 20, "topk-2bit", False): 2.5657,
    ("updates", 20, "topk-2bit", True): 2.5495,
}
# With a warm-up, other models and seeds (benchmarks/2026-11-17-slow-links-drills.md, 2026-11-18-peers-quality.md).
OTHER_RUNS = {
    "fp32": "other runs of ours lost 1.2, 1.2 and 2.5 %",
    "int8": "other runs of ours lost 1.3 % twice",
    "topk-2bit": "other runs of ours lost 2.3 and 2.9 %",
}
PUBLISHED = {
    "fp32": "none up to H = 500 with 8 workers on C4 (DiLoCo, arXiv:2311.08105, abstract)",
    "bf16": "none for 16-bit updates (OpenDiLoCo, arXiv:2407.07852, abstract)",
    "int8": "none reported at H = 100, 10B parameters (INTELLECT-1, arXiv:2412.01152, abstract)",
    "int4": "none for 4-bit updates (Streaming DiLoCo, arXiv:2501.18512, abstract)",
    "topk-2bit": "as DiLoCo or better at 512M parameters, H = 15 to 250 (SparseLoCo, arXiv:2508.15706, abstract)",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LossPenalty:
    """Expected rise of the validation loss over synchronous training with the same tokens."""

    percent: float | None  # None: nobody measured it here
    source: str
    note: str = ""


def expected_penalty(sync: SyncSettings, *, warm: bool) -> LossPenalty:
    """The penalty of a mode, H and codec; `warm` where synchronous steps come first.

    >>> from phalanx.job.sync_section import SyncSettings
    >>> round(expected_penalty(SyncSettings(mode="diloco", inner_steps=20, codec="int8"), warm=True).percent, 2)
    0.18
    >>> expected_penalty(SyncSettings(mode="diloco", inner_steps=500), warm=True).percent is None
    True
    """
    updates = sync.mode in ("diloco", "quorum")
    family = "int8" if sync.codec == "bf16" else sync.codec
    if not updates:
        if family == "int4":
            return LossPenalty(percent=None, source="", note="int4 gradients of every step: nobody measured them here")
        found = MEASURED_NATS["gradients", 1, family, False]
        note = "top-k of raw gradients breaks Adam's moments" if family == "topk-2bit" else ""
        return LossPenalty(percent=_percent(found), source=OURS, note=note)
    known = MEASURED_NATS.get(("updates", sync.inner_steps, family, warm))
    if known is not None:
        return LossPenalty(percent=_percent(known), source=OURS, note=OTHER_RUNS[family] if warm else "")
    if not warm and family in ("fp32", "int8"):
        # Cold starts at H = 10, 20 and 50 lost 2.6 to 4.7 %, without an order in H.
        nearest = min((10, 20, 50), key=lambda steps: abs(steps - sync.inner_steps))
        lost = _percent(MEASURED_NATS["updates", nearest, "fp32", False])
        return LossPenalty(percent=lost, source=OURS, note=f"measured at H = {nearest}, without a warm-up")
    return LossPenalty(percent=None, source=PUBLISHED[sync.codec], note="not measured by us at this H")


def _percent(nats: float) -> float:
    return 100 * (nats / SYNCHRONOUS_NATS - 1)
