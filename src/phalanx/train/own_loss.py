"""Loads and checks the user's own loss: `loss(logits_BSV, targets_BS)`, a sum over the valid tokens.

It must be a sum over tokens: a step's batch is split into micro-batches and over ranks and sequences, and the partial
losses are added and divided by the number of valid tokens of the whole batch. Any other function would train
something else under another layout, so the loss is tried on a small batch, and refused if it is not such a sum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from phalanx.errors import mistake
from phalanx.train.data.batches import IGNORED
from phalanx.train.plugins import load_function
from phalanx.train.rank_settings import Settings

TOLERANCE = 1e-3  # relative; the sums are taken in float64


def own_loss(settings: Settings, vocab: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the loss that the settings name; raise UserError if it is not a sum over valid tokens."""
    loss = load_function(settings.loss, kind="loss", allow_code=settings.allow_code)
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise mistake(
            "plugins.loss",
            f"{type(loss).__name__} has parameters",
            why="the optimizer updates the model's alone",
            fix="put them into the model",
        )
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, vocab, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, vocab, (2, 4), generator=generator)
    try:
        once = loss(logits, targets)
        twice = loss(torch.cat([logits, logits]), torch.cat([targets, targets]))
        padded = loss(torch.cat([logits, logits]), torch.cat([targets, torch.full_like(targets, IGNORED)]))
    except Exception as error:
        raise mistake(
            "plugins.loss",
            f"{settings.loss} raised {type(error).__name__} on logits [2, 4, {vocab}] and targets [2, 4]: {error}"[
                :500
            ],
            fix="it is called with logits [batch, sequence, vocab] and targets [batch, sequence], some of them -100",
        ) from error
    if not isinstance(once, torch.Tensor) or once.dim() or not once.requires_grad:
        raise mistake(
            "plugins.loss",
            f"{settings.loss} returned no number that backward can start from",
            fix="return a tensor without dimensions that was computed from the logits",
        )
    value = float(once.detach())
    _expect_close(settings.loss, "a batch twice", float(twice.detach()), 2 * value)
    _expect_close(settings.loss, "a batch with ignored targets (-100) beside it", float(padded.detach()), value)
    return loss


def _expect_close(name: str, what: str, found: float, expected: float) -> None:
    """Raise UserError unless the loss of a batch has the value that a sum over its valid tokens would have."""
    if not abs(found - expected) <= TOLERANCE * max(abs(expected), 1e-9):
        raise mistake(
            "plugins.loss",
            f"{name} is {found:.6g} for {what}, where a sum over the valid tokens is {expected:.6g}",
            why="micro-batches and ranks are added up, and divided by the number of valid tokens",
            fix='sum over the tokens whose target is not -100; torch\'s losses do with reduction="sum"',
        )
