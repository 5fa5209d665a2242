"""Networks as people publish them, each with what a trainer may lose: buffers, initialisations, tied weights.

A test names them as `model.module = "own_networks.py:positions"` and builds them the same way for a plain loop.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


class Own(nn.Module):
    """An embedding, blocks by number and a head: what all of them share."""

    def __init__(self, shape, block, layers=None, *, first=True, last=True):
        super().__init__()
        self.shape, self.block = shape, block
        self.table = nn.Embedding(shape.vocab, shape.hidden) if first else None
        held = range(shape.layers) if layers is None else layers
        self.layers = nn.ModuleDict({str(i): block(shape.hidden) for i in held})
        self.head = nn.Linear(shape.hidden, shape.vocab) if last else None

    def forward(self, x):
        x = x if self.table is None else self.table(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)

    def blocks(self):
        return {f"layers.{name}": layer for name, layer in self.layers.items()}

    def stage(self, layers, *, first, last):
        return type(self)(self.shape, self.block, layers, first=first, last=last)


# ---- learned positions as in BERT of Hugging Face, sines as in PyTorch's tutorial ------------------------------------


class Positions(Own):
    """Learned positions, looked up by an arange of a buffer; a table of sines that is a buffer too."""

    def __init__(self, shape, block, layers=None, *, first=True, last=True):
        super().__init__(shape, block, layers, first=first, last=last)
        if first:
            self.places = nn.Embedding(16, shape.hidden)
            self.register_buffer("position_ids", torch.arange(16).expand((1, -1)), persistent=False)
            angle = torch.arange(16).unsqueeze(1) * torch.exp(
                torch.arange(0, shape.hidden, 2) * (-math.log(10000.0) / shape.hidden)
            )
            sines = torch.zeros(1, 16, shape.hidden)
            sines[0, :, 0::2], sines[0, :, 1::2] = torch.sin(angle), torch.cos(angle)
            self.register_buffer("sines", sines)
        self.apply(self.draw)

    @staticmethod
    def draw(module):
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.constant_(module.bias, 0.25)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, x):
        if self.table is not None:
            x = self.table(x) + self.places(self.position_ids[:, : x.shape[1]]) + self.sines[:, : x.shape[1]]
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


class Mlp(nn.Module):
    """A residual branch whose start is scaled by a vector of its own, as in CaiT."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gamma = nn.Parameter(1e-2 * torch.ones(width))

    def forward(self, x):
        return x + self.gamma * self.down(F.gelu(self.up(x)))


# ---- torch's own attention and recurrence ----------------------------------------------------------------------------


class Attend(nn.Module):
    """nn.MultiheadAttention with a causal mask in a buffer that no checkpoint holds."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attend = nn.MultiheadAttention(width, 4, batch_first=True, add_bias_kv=True)
        nn.init.normal_(self.attend.in_proj_bias, std=0.3)
        self.register_buffer("mask", torch.triu(torch.ones(16, 16, dtype=torch.bool), 1), persistent=False)

    def forward(self, x):
        y = self.norm(x)
        mask = self.mask[: x.shape[1], : x.shape[1]]
        return x + self.attend(y, y, y, attn_mask=mask, need_weights=False)[0]


class Recur(nn.Module):
    """nn.GRU, whose biases are called bias_ih_l0 and bias_hh_l0, and start at random."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.GRU(width, width, num_layers=2, batch_first=True)

    def forward(self, x):
        return x + self.mix(self.norm(x))[0]


# ---- running statistics ----------------------------------------------------------------------------------------------


class Normalise(nn.Module):
    """nn.BatchNorm1d over the channels, one of two without a momentum; buffers change in every forward."""

    def __init__(self, width):
        super().__init__()
        self.first = nn.BatchNorm1d(width)
        self.second = nn.BatchNorm1d(width, momentum=None)
        self.mix = nn.Conv1d(width, width, 3, padding=2, bias=False)

    def forward(self, x):
        y = self.mix(self.first(x.transpose(1, 2)))[..., : x.shape[1]]
        return x + self.second(y).relu().transpose(1, 2)


# ---- tied and frozen weights -----------------------------------------------------------------------------------------


class Tied(Own):
    """The head is the embedding; blocks share one table, one of their weights is frozen, drop rates are read off."""

    def __init__(self, shape, block, layers=None, *, first=True, last=True):
        super().__init__(shape, block, layers, first=first, last=last)
        nn.init.normal_(self.table.weight, std=0.02)
        self.head.weight = self.table.weight
        rates = [rate.item() for rate in torch.linspace(0.1, 0.3, shape.layers)]  # as vision transformers do
        for layer, rate in zip(self.layers.values(), rates, strict=True):
            layer.rate = rate
        for layer in self.layers.values():
            layer.scales = self.layers["0"].scales


class Frozen(nn.Module):
    """A random projection that is not trained, a table of scales, and a tensor that is no buffer at all."""

    def __init__(self, width):
        super().__init__()
        self.project, self.mix = nn.Linear(width, width), nn.Linear(width, width)
        self.project.requires_grad_(False)
        self.register_buffer("scales", torch.rand(width))
        self.shift = torch.randn(width)
        self.rate = 0.0

    def forward(self, x):
        return x + self.rate * self.mix(self.project(x) * self.scales + self.shift.to(x)).tanh()


def positions(shape):
    return Positions(shape, Mlp)


def attention(shape):
    return Own(shape, Attend)


def recurrent(shape):
    return Own(shape, Recur)


def batch_norm(shape):
    return Own(shape, Normalise)


def tied(shape):
    return Tied(shape, Frozen)


# ---- buffers that forward changes, each in another way ---------------------------------------------------------------


class Counting(Own):
    """A counter that is replaced, a mark that is written behind autograd's back, one that nobody saves, a constant."""

    def __init__(self, shape):
        super().__init__(shape, Mlp)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("constant", torch.arange(5.0), persistent=False)

    def forward(self, x):
        if self.training:
            self.steps = self.steps + 1
            self.seen.data[1] = x[-1, -1].double()
            self.scratch += 1
        return super().forward(x)


def counting(shape):
    return Counting(shape)


class Growing(Own):
    """A buffer that is another size after a forward: a cache, say."""

    def __init__(self, shape):
        super().__init__(shape, Mlp)
        self.register_buffer("cache", torch.zeros(2))

    def forward(self, x):
        self.cache = torch.cat([self.cache, self.cache])
        return super().forward(x)


def growing(shape):
    return Growing(shape)
