"""Flips bits of a rank's live state in a real run, one at a time, and asks the trainer's own guard; for bit_flips.py.

The moment is the beginning of a step: weights and moments lie where the last update left them, and the guard remembers
what they were. A bit is flipped, the guard compares as it does before an update, and the bit and the guard's memory are
put back. So many flips fit into one run, and the run itself must come out as if nothing had happened.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import TYPE_CHECKING

import torch

from phalanx.train.callbacks import Callback

if TYPE_CHECKING:
    from phalanx.train.training_context import TrainingContext

FLIPS = 10  # of weights, and as many of moments, in every step of every rank


class FlipBits(Callback):
    """Counts what the guard said; `flips-RANK.json` in the run folder has it at the end."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def on_start(self, training: TrainingContext) -> None:
        """Memory is compared in every step, as in runs without callbacks of their own."""
        training.comparison.guard._each_step = True

    def on_step_begin(self, training: TrainingContext) -> None:
        """Between the last update and the next."""
        guard, draw = training.comparison.guard, random.Random(training.step * 1000 + training.rank)
        if not guard.remembers:
            return
        shards = [one for one in training.engine.at_rest() if one.tensor.numel()]
        for what in ("weights", "moments"):
            mine = [one for one in shards if ("#" in one.name) == (what == "moments")]
            for _ in range(FLIPS if mine else 0):
                shard = mine[draw.randrange(len(mine))]
                tensor = shard.tensor
                place = tuple(draw.randrange(size) for size in tensor.shape)
                bit = draw.randrange(8 * tensor.element_size())
                kept = guard._sums._kept
                flip(tensor, place, bit)
                is_named = bool(guard.compare_memory()) and [name for name, _ in guard._sums.changed()] == [shard.name]
                flip(tensor, place, bit)
                guard._sums._kept = kept
                self.counts[f"{what}: {'caught' if is_named else 'silent'}"] += 1

    def on_end(self, training: TrainingContext, state: str) -> None:
        """Write the counts down."""
        path = training.folder.path / f"flips-{training.rank}.json"
        path.write_text(json.dumps(self.counts))


@torch.no_grad()
def flip(tensor: torch.Tensor, place: tuple[int, ...], bit: int) -> None:
    """One bit of one element, where it lies."""
    value = tensor[place].detach().reshape(1).clone()
    value.view(torch.uint8)[bit // 8] ^= 1 << (bit % 8)
    tensor[place] = value[0]
