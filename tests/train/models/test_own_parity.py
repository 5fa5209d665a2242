"""A network of the user's own under the layouts it can have: the losses of one process, in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.job.model import ModelShape

CODE = """
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.GRU(width, width, batch_first=True)

    def forward(self, x_BSD):
        return x_BSD + self.mix(self.norm(x_BSD))[0]

class Recurrent(nn.Module):
    def __init__(self, shape, layers, first=True, last=True):
        super().__init__()
        self.shape = shape
        self.table = nn.Embedding(shape.vocab, shape.hidden) if first else None
        self.layers = nn.ModuleDict({str(i): Block(shape.hidden) for i in layers})
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False) if last else None

    def forward(self, x):
        x = x if self.table is None else self.table(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)

    def blocks(self):
        return {f"layers.{name}": layer for name, layer in self.layers.items()}

    def stage(self, layers, *, first, last):
        return Recurrent(self.shape, layers, first, last)

def build(shape):
    return Recurrent(shape, range(shape.layers))
"""


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    path: Path = tmp_path_factory.mktemp("own") / "recurrent.py"
    path.write_text(CODE)
    return ModelShape(
        name="own",
        layers=2,
        hidden=32,
        heads=4,
        kv_heads=4,
        head_dim=8,
        ffn=32,
        vocab=64,
        module=f"{path}:build",
    )


@pytest.mark.parametrize(
    "layout",
    [
        {"data": 2},
        {"data": 2, "shard": 2, "zero": 3, "recompute": "full"},
        {"pipeline": 2},
    ],
)
def test_equals_one_process(
    shape: ModelShape, layout: dict[str, Any], trial: Callable[..., Any], prove: Callable[..., Any]
) -> None:
    prove(trial(shape, allow_code=True, **layout))
