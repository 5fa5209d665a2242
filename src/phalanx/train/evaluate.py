"""The model on held-out documents: the same sequences every time, in bits per byte, so that tokenizers compare."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from phalanx.errors import UserError
from phalanx.train.data.dataset import TokenDataset
from phalanx.train.engine import IGNORED, Engine


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One evaluation."""

    loss: float  # nats per token
    bits_per_byte: float
    tokens: int
    seconds: float


class Heldout:
    """Held-out sequences, spread evenly over the split and shared out over the data ranks."""

    def __init__(self, folders: Sequence[Path], engine: Engine, *, sequences: int) -> None:
        self._engine = engine
        self._dataset = _open(folders) if sequences else None
        if self._dataset is None:
            return
        length = engine.settings.sequence
        there = self._dataset.num_samples(length)
        if there == 0:  # less held out than one sequence
            self._dataset = None
            return
        # The same sequences under every layout; rows of ignored targets fill the last micro-batches up.
        chosen = np.linspace(0, there - 1, min(sequences, there)).astype(np.int64)
        unit = engine.dims.data * engine.settings.layout.micro_batch
        rows = torch.from_numpy(np.ascontiguousarray(self._dataset.samples(chosen, length)))
        tokens, targets = _filled(rows[:, :-1], unit, 0), _filled(rows[:, 1:], unit, IGNORED)
        place, ranks = engine.meshes.index("data"), engine.dims.data
        self._tokens, self._targets = tokens.chunk(ranks)[place], targets.chunk(ranks)[place]

    def score(self) -> Score | None:
        """Evaluate now; None where nothing is held out. Every rank must call this together."""
        if self._dataset is None:
            return None
        began_s = time.perf_counter()
        loss_sum, tokens = self._engine.evaluate(self._tokens, self._targets)
        loss = loss_sum / max(tokens, 1)
        return Score(
            loss=loss,
            bits_per_byte=loss / math.log(2) / self._dataset.bytes_per_token,
            tokens=tokens,
            seconds=time.perf_counter() - began_s,
        )


def _filled(rows: torch.Tensor, unit: int, value: int) -> torch.Tensor:
    """Rows of `value` behind, up to a multiple of `unit`."""
    return torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % unit), value=value)


def _open(folders: Sequence[Path]) -> TokenDataset | None:
    try:
        return TokenDataset.open(list(folders), "heldout")
    except UserError:
        return None  # built with nothing held out: training needs no such thing
