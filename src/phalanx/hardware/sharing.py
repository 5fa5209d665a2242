"""Whether several ranks may share one GPU: only where somebody said so, in the job, by an option or in the environment.

They share its cores and its memory, so nothing becomes faster. It is for proofs and drills on fewer GPUs than ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.errors import mistake

VARIABLE = "PHALANX_RANKS_PER_GPU"
MOST_RANKS_PER_GPU = 64


def allowed_ranks(written: int, environ: Mapping[str, str]) -> int:
    """Ranks that may share a GPU: the larger of the job's train.ranks_per_gpu and the environment's word.

    >>> allowed_ranks(1, {}), allowed_ranks(1, {"PHALANX_RANKS_PER_GPU": "4"}), allowed_ranks(8, {})
    (1, 4, 8)
    """
    text = environ.get(VARIABLE, "").strip()
    if not text:
        return written
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_RANKS_PER_GPU):
        raise mistake(
            VARIABLE,
            f"{text[:40]!r} is no number of ranks from 1 to {MOST_RANKS_PER_GPU}",
            fix="export PHALANX_RANKS_PER_GPU=4, or unset it",
        )
    return max(written, int(text))
