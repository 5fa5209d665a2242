from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from phalanx.job.schema import Optim
from phalanx.train.optim.adamw import AdamW
from phalanx.train.optim.build_optimizer import Optimizer, build_optimizer
from phalanx.train.optim.muon import orthogonal_matrix
from phalanx.train.parallel.tensor_shard import TensorShard

KINDS = [
    ("adamw", "fp32"),
    ("adamw", "bf16"),
    ("adamw", "int8"),
    ("adamw8bit", "fp32"),
    ("adafactor", "fp32"),
    ("muon", "fp32"),
    ("muon", "bf16"),
]


def shards_of(tensors: dict[str, torch.Tensor]) -> list[TensorShard]:
    return [
        TensorShard(
            name=name,
            tensor=tensor,
            shape=tuple(tensor.shape),
            start=(0,) * tensor.ndim,
            replicas=1,
            owner=True,
            groups={},
        )
        for name, tensor in tensors.items()
    ]


def build(shards: list[TensorShard], name: str, state_dtype: str = "fp32", **optim: float) -> Optimizer:
    settings = Optim(name=name, **optim)  # type: ignore[arg-type]
    return build_optimizer(shards, optim=settings, state_dtype=state_dtype, decays=lambda name: "norm" not in name)


def some_tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed.tokens.weight": (40, 16), "layers.0.mlp.up.weight": (33, 16), "norm.weight": (16,)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def step_with(optimizer: Optimizer, shards: list[TensorShard], seed: int, lr: float = 1e-2) -> None:
    generator = torch.Generator().manual_seed(seed)
    for shard in shards:
        shard.tensor.grad = torch.randn(shard.shape, generator=generator).to(shard.tensor.dtype)
    optimizer.step(lr)


def test_adamw_is_torch_adamw() -> None:
    ours, theirs = some_tensors(), [nn.Parameter(tensor) for tensor in some_tensors().values()]
    shards = shards_of(ours)
    optimizer = build(shards, "adamw")
    groups = [{"params": theirs[:2], "weight_decay": 0.1}, {"params": theirs[2:], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for seed in range(5):
        step_with(optimizer, shards, seed)
        for shard, parameter in zip(shards, theirs, strict=True):
            parameter.grad = shard.tensor.grad
        reference.step()
    for shard, parameter in zip(shards, theirs, strict=True):
        torch.testing.assert_close(shard.tensor, parameter.detach(), rtol=0, atol=1e-6)


def test_both_kernels_of_adamw_learn_the_same() -> None:
    """On a CPU there is no choice; ours then runs by plain operations, which must be the same step."""
    both = {}
    for kernel in ("builtin", "triton"):
        shards = shards_of(some_tensors())
        optimizer = build(shards, "adamw", weight_decay=0.1)
        assert isinstance(optimizer, AdamW)
        assert optimizer.choose_kernel(None) is None
        assert optimizer.kernel == "builtin"
        optimizer.kernel = kernel
        for seed in range(3):
            step_with(optimizer, shards, seed)
        both[kernel] = [one.tensor for one in (*shards, *optimizer.state())]
    for one, other in zip(both["builtin"], both["triton"], strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-7)


def test_compact_adamw_with_wide_moments_is_adamw() -> None:
    """bf16 weights without a master copy: the update is AdamW's, rounded to a bf16 neighbour."""
    wide, narrow = shards_of(some_tensors()), shards_of(some_tensors(torch.bfloat16))
    for shard, other in zip(wide, narrow, strict=True):
        shard.tensor.copy_(other.tensor)
    optimizers = build(wide, "adamw"), build(narrow, "adamw")
    for optimizer, shards in zip(optimizers, (wide, narrow), strict=True):
        for shard in shards:
            shard.tensor.grad = torch.ones_like(shard.tensor)
        optimizer.step(1e-2)
    for shard, other in zip(wide, narrow, strict=True):
        torch.testing.assert_close(other.tensor.float(), shard.tensor, rtol=2.0**-7, atol=1e-6)
        assert float((other.tensor.float() - shard.tensor).abs().max()) > 0


@pytest.mark.parametrize(("name", "state_dtype"), KINDS)
def test_an_absent_gradient_is_a_zero_gradient(name: str, state_dtype: str) -> None:
    absent, zero = shards_of(some_tensors()), shards_of(some_tensors())
    one, other = build(absent, name, state_dtype), build(zero, name, state_dtype)
    for optimizer, shards in ((one, absent), (other, zero)):
        step_with(optimizer, shards, 1)
    absent[1].tensor.grad, zero[1].tensor.grad = None, torch.zeros_like(zero[1].tensor)
    one.step(1e-2)
    other.step(1e-2)
    for a, b in zip(absent + one.state(), zero + other.state(), strict=True):
        assert torch.equal(a.tensor, b.tensor), a.name


@pytest.mark.parametrize(("name", "state_dtype"), KINDS)
def test_a_reloaded_optimizer_goes_on_bit_by_bit(name: str, state_dtype: str) -> None:
    straight = shards_of(some_tensors())
    optimizer = build(straight, name, state_dtype)
    for seed in range(3):
        step_with(optimizer, straight, seed)
    resumed = shards_of({shard.name: shard.tensor.clone() for shard in straight})
    again = build(resumed, name, state_dtype)
    assert [shard.name for shard in again.state()] == [shard.name for shard in optimizer.state()]
    assert all(shard.tensor.is_floating_point() for shard in optimizer.state())
    again.load({shard.name: shard.tensor.clone() for shard in optimizer.state()}, optimizer.steps)
    for seed in range(3, 6):
        step_with(optimizer, straight, seed)
        step_with(again, resumed, seed)
    assert again.steps == optimizer.steps == 6
    for a, b in zip(straight, resumed, strict=True):
        assert torch.equal(a.tensor, b.tensor), a.name


@pytest.mark.parametrize(
    ("name", "state_dtype", "per_parameter"),
    [
        ("adamw", "fp32", 8.0),
        ("adamw", "bf16", 4.0),
        ("adamw", "int8", 2 + 8 / 256),
        ("adamw8bit", "fp32", 2 + 8 / 256),
        ("adafactor", "fp32", 4 * (512 + 1024) / (512 * 1024)),
        ("muon", "fp32", 4.0),
        ("muon", "bf16", 2.0),
    ],
)
def test_bytes_per_parameter(name: str, state_dtype: str, per_parameter: float) -> None:
    shards = shards_of({"layers.0.mlp.up.weight": torch.zeros(512, 1024)})
    assert build(shards, name, state_dtype).state_bytes() / (512 * 1024) == pytest.approx(per_parameter, rel=1e-9)


def test_muon_leaves_embeddings_head_and_vectors_to_adamw() -> None:
    tensors = {
        "embed.tokens.weight": torch.zeros(8, 4),
        "layers.0.mlp.experts.up": torch.zeros(2, 4, 4),
        "head.weight": torch.zeros(8, 4),
        "norm.weight": torch.zeros(4),
    }
    names = [shard.name for shard in build(shards_of(tensors), "muon").state()]
    assert [name for name in names if name.endswith("#momentum")] == ["layers.0.mlp.experts.up#momentum"]
    assert sum(name.endswith("#exp_avg_sq") for name in names) == 3


def test_newton_schulz_brings_singular_values_near_one() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((64, 64), (48, 96), (3, 96, 32)):
        values = torch.linalg.svdvals(orthogonal_matrix(torch.randn(shape, generator=generator, dtype=torch.float64)))
        assert float(values.max()) < 1.25
        assert float(values.quantile(0.05)) > 0.5
    assert torch.equal(orthogonal_matrix(torch.zeros(3, 4)), torch.zeros(3, 4))


def test_adafactor_by_hand() -> None:
    """Squares of rank one: the factored second moment is exact, so after one step every element moved by lr."""
    tensor = torch.zeros(2, 3, dtype=torch.float64)
    tensor.grad = torch.tensor([[1.0, -2.0, 3.0], [2.0, 4.0, -6.0]], dtype=torch.float64)
    build(shards_of({"w": tensor}), "adafactor", weight_decay=0.0).step(0.5)
    torch.testing.assert_close(tensor, -0.5 * tensor.grad.sign())


def test_adafactor_scales_an_update_down_to_its_largest_rms() -> None:
    tensor = torch.zeros(4, 4, dtype=torch.float64)
    shards = shards_of({"w": tensor})
    optimizer = build(shards, "adafactor", weight_decay=0.0)
    tensor.grad = torch.full((4, 4), 1e-3, dtype=torch.float64)
    optimizer.step(1.0)
    before = tensor.clone()
    tensor.grad = torch.full((4, 4), 1e3, dtype=torch.float64)  # unclipped it would move by 1 / sqrt(1 - beta2) = 1.3
    optimizer.step(1.0)
    torch.testing.assert_close(before - tensor, torch.ones(4, 4, dtype=torch.float64))


class Toy(nn.Module):
    """A next-token model small enough to learn a Markov chain in a second."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


def learn(name: str, state_dtype: str, lr: float) -> float:
    """The mean loss of the last 40 of 160 steps on a random Markov chain of 64 tokens."""
    torch.manual_seed(0)
    chain = torch.softmax(2.0 * torch.randn(64, 64), dim=1)
    model = Toy(64, 32)
    shards = shards_of(dict(model.named_parameters()))
    optimizer = build(shards, name, state_dtype, weight_decay=0.0)
    losses = []
    for step in range(160):
        tokens = torch.randint(64, (512,))
        following = torch.multinomial(chain[tokens], 1).view(-1)
        loss = nn.functional.cross_entropy(model(tokens), following)
        model.zero_grad()
        loss.backward()
        optimizer.step(lr * min(1.0, (step + 1) / 20, (160 - step) / 60))
        losses.append(float(loss.detach()))
    return sum(losses[-40:]) / 40


@pytest.fixture(scope="module")
def adamw_loss() -> float:
    loss = learn("adamw", "fp32", 1e-2)
    assert loss < 0.75 * math.log(64)  # it did learn: an untrained model stands at ln 64
    return loss


@pytest.mark.parametrize(
    ("name", "state_dtype"), [("adamw", "bf16"), ("adamw8bit", "fp32"), ("adafactor", "fp32"), ("muon", "fp32")]
)
def test_every_optimizer_learns_as_well_as_adamw(adamw_loss: float, name: str, state_dtype: str) -> None:
    assert learn(name, state_dtype, 1e-2) == pytest.approx(adamw_loss, rel=0.01)
