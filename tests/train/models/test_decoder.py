"""The decoder as one piece, as stages, as slices: always the same network."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.errors import UserError
from phalanx.job.model import ModelShape, known_presets
from phalanx.job.parameter_counts import count_parameters
from phalanx.train.models.decoder import Decoder
from phalanx.train.models.initial_values import ROWS, STD, draw_values
from phalanx.train.models.layers import Attention, causal_attention, repeat_heads, rope_tables
from phalanx.train.models.moe import Moe, run_evenly

LLAMA = ModelShape(name="l", layers=3, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=61)
TIED = replace(LLAMA, tied=True)
GPT = replace(
    TIED,
    kv_heads=4,
    gated=False,
    norm="layer",
    bias=True,
    positions="learned",
    max_positions=24,
    activation="gelu_tanh",
)
MOE = replace(
    LLAMA,
    experts=8,
    experts_per_token=2,
    expert_ffn=16,
    shared_experts=2,
    dense_layers=1,
    router_bias=True,
    balance="bias",
    router_score="sigmoid",
    qk_norm=True,
)
SHAPES = {"llama": LLAMA, "tied": TIED, "gpt": GPT, "moe": MOE, "bloom-norm": replace(GPT, embedding_norm=True)}


def built(shape: ModelShape, **kwargs: object) -> Decoder:
    model = Decoder(shape, **kwargs)  # type: ignore[arg-type]
    model.init_weights(7)
    return model.double()


def some_tokens(length: int = 20) -> Tensor:
    return torch.randint(0, LLAMA.vocab, (2, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", SHAPES)
def test_it_has_exactly_the_parameters_the_planner_counts(name: str) -> None:
    model = Decoder(SHAPES[name])
    held = sum(value.numel() for value in model.state_dict().values())  # with the router's bias, a buffer
    assert held == count_parameters(SHAPES[name]).total


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "llama-3.1-405b", "mixtral-8x7b", "qwen3-30b-a3b"])
def test_presets_build_on_the_meta_device(name: str) -> None:
    shape = known_presets()[name].model()
    with torch.device("meta"):
        model = Decoder(shape)
    assert sum(value.numel() for value in model.state_dict().values()) == count_parameters(shape).total
    assert model.is_tied_here == shape.tied == ("head.weight" not in model.state_dict())


@pytest.mark.parametrize("name", SHAPES)
def test_stages_compute_what_the_whole_does(name: str) -> None:
    shape = SHAPES[name]
    whole = built(shape)
    first = built(shape, layers=range(2), last=False)
    last = built(shape, layers=range(2, 3), first=False)
    assert torch.equal(last(first(some_tokens())), whole(some_tokens()))
    assert "layers.2.attn.wq.weight" in last.state_dict()
    assert last.state_dict().keys() | first.state_dict().keys() == whole.state_dict().keys() | {"head.weight"}


@pytest.mark.parametrize("name", SHAPES)
def test_nothing_later_changes_what_was_before(name: str) -> None:
    model = built(SHAPES[name])
    tokens = some_tokens()
    changed = tokens.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % LLAMA.vocab
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :12], after[:, :12])
    assert (before[:, 12:] != after[:, 12:]).any()


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_positions_say_where_the_tokens_stand(name: str) -> None:
    """Context parallelism hands a rank any positions: a permuted sequence with permuted positions is the same one."""
    model = built(SHAPES[name])
    tokens = some_tokens(8)
    order = torch.tensor([3, 0, 7, 1, 2, 6, 4, 5])

    def unmasked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = torch.nn.functional.scaled_dot_product_attention(
            q, repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        )
        return out

    for module in model.modules():
        if isinstance(module, Attention):
            module.core = unmasked
    straight = model(tokens)
    model.positions = order
    torch.testing.assert_close(model(tokens[:, order]), straight[:, order])


def test_a_tied_weight_is_one_parameter_through_everything() -> None:
    with torch.device("meta"):
        model = Decoder(TIED)
    model.to_empty(device="cpu")
    model.init_weights(7)
    model = model.double()
    assert model.head is not None
    assert model.embed is not None
    assert model.head.weight is model.embed.tokens.weight
    names = [name for name, _ in model.named_parameters()]
    assert names == list(model.state_dict())
    assert "head.weight" not in names
    twin = copy.deepcopy(model)
    twin.load_state_dict(built(TIED).state_dict())
    assert torch.equal(twin(some_tokens()), built(TIED)(some_tokens()))
    assert twin.head.weight is twin.embed.tokens.weight  # type: ignore[union-attr]


@pytest.mark.parametrize("name", SHAPES)
def test_initial_weights_depend_on_seed_and_name_only(name: str) -> None:
    shape = SHAPES[name]
    model, other = Decoder(shape), Decoder(shape, layers=range(1, 2), first=False, last=False)
    model.init_weights(7)
    other.init_weights(7)
    whole = model.state_dict()
    assert all(torch.equal(value, whole[key]) for key, value in other.state_dict().items())
    model.init_weights(8)
    changed = [key for key, value in other.state_dict().items() if not torch.equal(value, model.state_dict()[key])]
    assert changed == [key for key in changed if "norm" not in key and "bias" not in key]
    assert changed


def test_initial_spread() -> None:
    flat = draw_values("layers.0.mlp.up.weight", (512, 256), seed=0, layers=8)
    residual = draw_values("layers.0.mlp.down.weight", (256, 512), seed=0, layers=8)
    assert abs(flat.std().item() / STD - 1) < 0.02
    assert abs(residual.std().item() / (STD / 4) - 1) < 0.02  # √(2 · 8) = 4
    assert torch.equal(draw_values("norm.weight", (9,), seed=0, layers=8), torch.ones(9))
    assert torch.equal(draw_values("layers.0.attn.wq.bias", (9,), seed=0, layers=8), torch.zeros(9))


@pytest.mark.parametrize("size", [(3 * ROWS + 5, 4), (7, 4, 3)])
def test_rows_drawn_alone_are_those_of_the_whole(size: tuple[int, ...]) -> None:
    whole = draw_values("layers.0.mlp.experts.up", size, seed=3, layers=2)
    for rows in (range(1), range(2, 5), range(size[0] - 3, size[0]), range(1, size[0] - 1)):
        part = draw_values("layers.0.mlp.experts.up", size, seed=3, layers=2, rows=rows)
        assert torch.equal(part, whole[rows.start : rows.stop])
    assert torch.equal(
        draw_values("layers.0.mlp.experts.up", size, seed=3, layers=2, dtype=torch.float64).float(), whole
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grouped_attention_and_its_gradient(dtype: torch.dtype) -> None:
    """enable_gqa on the CPU, against attention written out."""
    generator = torch.Generator().manual_seed(0)
    heads = {"q": 6, "k": 2, "v": 2, "out": 6}
    made = {name: torch.randn(2, n, 17, 8, dtype=dtype, generator=generator) for name, n in heads.items()}
    inputs = [made[name].requires_grad_() for name in "qkv"]
    q, k, v = inputs
    scores = (q @ repeat_heads(k, 6).mT) / 8**0.5
    later = torch.ones(17, 17, dtype=torch.bool).triu(1)
    written_out = scores.masked_fill(later, float("-inf")).softmax(-1) @ repeat_heads(v, 6)
    fused = causal_attention(q, k, v)
    torch.testing.assert_close(fused, written_out)
    ours = torch.autograd.grad(fused, inputs, made["out"])
    torch.testing.assert_close(ours, torch.autograd.grad(written_out, inputs, made["out"]))


def test_rotation_depends_on_distance_only() -> None:
    x = torch.randn(1, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).expand(1, 50, 1, 8)
    turned = rope_tables(LLAMA, torch.arange(50), torch.float64).turn(x)[0, :, 0]
    torch.testing.assert_close(turned[3] @ turned[10], turned[40] @ turned[47])
    assert rope_tables(LLAMA, torch.arange(4), torch.bfloat16).cos_SR.dtype is torch.float32


@pytest.mark.parametrize("name", ["llama", "gpt", "moe"])
def test_a_step_traces_on_fake_tensors(name: str) -> None:
    with FakeTensorMode():
        model = Decoder(SHAPES[name])
        for module in model.modules():
            if isinstance(module, Moe):
                module.dispatch = run_evenly
        model.init_weights(0)
        logits = model(torch.zeros(3, 16, dtype=torch.int64))
        logits.sum().backward()
    assert logits.shape == (3, 16, LLAMA.vocab)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_what_cannot_be_trained_is_said_all_at_once() -> None:
    shape = replace(known_presets()["deepseek-v3"].model(), positions="alibi", bias=True, router_bias=False)
    with pytest.raises(UserError) as caught:
        Decoder(shape)
    heads = [problem.what for problem in caught.value.problems]
    assert heads == [
        "deepseek-v3 has latent attention (MLA), which the trainer has no layer for",
        '"alibi" is planned but not trained',
        "biases inside experts are not trained",
        '"bias" needs the bias it moves',
    ]


def test_blocks_name_real_parts() -> None:
    model = Decoder(MOE)
    parts = dict(model.named_modules())
    assert [parts[name] for name in model.blocks()] == list(model.layers.values())
    assert list(model.stage(range(1, 3), first=False, last=True).blocks()) == ["layers.1", "layers.2"]
