"""fp8 layers with norms and SwiGLU fused: the error of every kernel, of a whole layer, compiled, and who takes them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.job.model import ModelShape
from phalanx.plan.layout import Layout
from phalanx.train.kernels.float8_norm import float8_norm_rows
from phalanx.train.kernels.float8_rows import power_scale, scaled_matrices, scaled_rows, turned_rows
from phalanx.train.kernels.float8_swiglu import (
    exact_gradients,
    exact_product,
    float8_swiglu_gradient_rows,
    float8_swiglu_rows,
)
from phalanx.train.kernels.kernel_op import KERNELS
from phalanx.train.kernels.selector import Timing
from phalanx.train.models.decoder import Block
from phalanx.train.models.layers import rope_tables
from phalanx.train.parallel import float8_choice
from phalanx.train.parallel.float8 import use_float8
from phalanx.train.parallel.float8_choice import choose_float8_layers, fuse_layers
from phalanx.train.parallel.float8_layer import can_fuse, fused_layer
from phalanx.train.rank_settings import Settings

SHAPE = ModelShape(name="t", layers=1, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=160, vocab=64)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def numbers(tokens: int, columns: int, device: str) -> torch.Tensor:
    """Rows of very different size, one of zeros, and columns with a single large number."""
    torch.manual_seed(0)
    rows = torch.randn(tokens, columns) * torch.logspace(-2, 2, tokens)[:, None]
    rows[1], rows[3, 2] = 0, 5000.0
    return rows.to(device, torch.bfloat16)


def assert_rounded(rows, scale, turned, whole, exact) -> None:
    exact, scale, whole = exact.double(), scale.double(), whole.double()
    assert (torch.frexp(scale)[0] == 0.5).all(), "powers of two"
    assert (rows.float().abs().amax(dim=1)[exact.abs().amax(dim=1) > 0] >= 208).all(), "the range is used"
    allowed = torch.maximum(exact.abs() / 16, scale * 2.0**-10) * (1 + 1e-4)
    assert ((rows.double() * scale - exact).abs() <= allowed).all()
    allowed = torch.maximum(exact.abs() / 16, whole * 2.0**-9) * (1 + 1e-4)
    assert turned.is_contiguous()
    assert ((turned.double().t() * whole - exact).abs() <= allowed).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [48, 50])  # 50 is no multiple of 4: the words of the transposing kernel
def test_no_element_is_off_by_more_than_is_promised(device: str, tokens: int) -> None:
    x, more, grad = (numbers(tokens, 40, device) for _ in range(3))
    more, wide, weight = more.flip(0), numbers(tokens, 80, device), (torch.rand(40, device=device) + 0.5).bfloat16()
    stream = (x + more).double()
    normed = stream * torch.rsqrt(stream.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    cases = [
        (scaled_rows(x), x),
        (float8_norm_rows(x, more, weight, 1e-5)[:2], normed),
        (float8_swiglu_rows(wide), exact_product(wide.double())),
        (float8_swiglu_gradient_rows(grad, wide), exact_gradients(grad.double(), wide.double())),
    ]
    for (rows, scale), exact in cases:
        whole = scale.amax()
        assert_rounded(rows, scale, turned_rows(rows, scale, whole), whole, exact)
    kept = float8_norm_rows(x, more, weight, 1e-5)
    assert torch.equal(kept[2], x + more)
    torch.testing.assert_close(kept[3].double(), torch.rsqrt(stream.square().mean(-1) + 1e-5), rtol=1e-5, atol=0)
    below, apart = scaled_matrices([x, grad]), [scaled_rows(one) for one in (x, grad)]
    for place in (0, 1):
        assert torch.equal(below[place].float(), torch.cat([one[place].float() for one in apart]))


def test_scales_at_the_edges() -> None:
    found = power_scale(torch.tensor([0.0, 448.0 * 2**5, 448.0 * 2**5 * (1 + 2**-22), torch.inf, torch.nan]))
    assert found[:3].tolist() == [2.0**-48, 2.0**5, 2.0**6]
    assert found[3:].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_not_a_number_stays_visible(device: str) -> None:
    x = numbers(16, 16, device)
    x[5, 7] = torch.nan
    rows, scale = scaled_rows(x)
    assert (rows[5].float() * scale[5]).isnan().any()
    assert not (rows[6].float() * scale[6]).isnan().any()
    assert turned_rows(rows, scale, scale.amax()).float().isnan().any()


def fp8_block() -> tuple[Block, Block]:
    torch.manual_seed(0)
    block = Block(SHAPE, 0)
    for value in block.parameters():
        if value.ndim > 1:
            torch.nn.init.normal_(value, std=0.1)
    exact = copy.deepcopy(block).double()
    use_float8([block])
    return block, exact


def run_block(block: Block, call, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    x, grad = (torch.randn(2, 32, 64, dtype=torch.float64).to(dtype) for _ in range(2))
    x.requires_grad_()
    block.zero_grad()
    out = call(x, rope_tables(SHAPE, torch.arange(32), dtype))
    out.backward(grad)
    found = {"out": (out - x).detach(), "x": x.grad - grad}
    return found | {name: value.grad.clone() for name, value in block.named_parameters()}


def test_a_fused_layer_is_off_by_its_rounding_and_compiles() -> None:
    """As far from float64 as each matrix on its own, in every result and gradient; compiled, bit for bit the same."""
    block, exact = fp8_block()
    assert can_fuse(block, 64)
    assert not can_fuse(block, 72)  # no multiple of 16
    truth = run_block(exact, exact, torch.float64)
    apart = run_block(block, block, torch.float32)
    fuse_layers([block], fused=True)
    fused = run_block(block, block, torch.float32)
    compiled = run_block(block, torch.compile(block, backend="aot_eager", fullgraph=True), torch.float32)
    for name, expected in truth.items():
        off, before = (float((one[name].double() - expected).norm() / expected.norm()) for one in (fused, apart))
        assert off < 0.12, (name, off)
        assert off < 1.4 * before, (name, off, before)
        assert torch.equal(compiled[name], fused[name]), name
    with torch.no_grad():
        fuse_layers([block], fused=False)
        plain = block(torch.ones(1, 16, 64), None)
        fuse_layers([block], fused=True)
        assert torch.equal(block(torch.ones(1, 16, 64), None), plain)  # nothing is kept for a backward that never comes


def test_attention_keeps_no_more_than_its_own_values() -> None:
    """Of the product that holds queries, keys and values side by side, nothing stays for backward."""
    block, _ = fp8_block()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        fused_layer(
            block, torch.randn(2, 32, 64, requires_grad=True), rope_tables(SHAPE, torch.arange(32), torch.float32)
        )
    together = 64 * (64 + 32 + 32) * 4  # bytes of all three
    assert not [one.shape for one in kept if one.untyped_storage().nbytes() == together]


def test_shapes_without_data() -> None:
    block, _ = fp8_block()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(torch.randn(2, 32, 64)).requires_grad_()
        out = fused_layer(block, x, None)
        assert (out.shape, out.dtype) == (x.shape, x.dtype)
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert grad.shape == x.shape


def test_only_layers_that_the_operators_compute() -> None:
    gelu = ModelShape(
        name="t", layers=1, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=160, vocab=64, activation="gelu"
    )
    block = Block(gelu, 0)
    assert not can_fuse(block, 64)  # not in fp8
    use_float8([block], recomputed=1)
    assert not can_fuse(block, 64)
    other = Block(gelu, 0)
    use_float8([other])
    assert not can_fuse(other, 64)


def test_the_faster_way_is_taken_and_remembered(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured once, and again when nothing is known; never where there is nothing to choose."""
    from phalanx.train.models.decoder import Decoder

    model = Decoder(SHAPE)
    use_float8(list(model.layers.values()))
    layout = Layout(
        data=1, shard=1, tensor=1, context=1, pipeline=1, virtual_pipeline=1, expert=1, zero=0, sequence_parallel=False,
        micro_batch=2, accumulation=1, recompute="none", precision="fp8", schedule="1f1b", offload="none",
        compression="none",
    )  # fmt: skip
    settings = Settings(layout=layout, sequence=32, compute="fp8")
    assert choose_float8_layers([model], settings, torch.device("cpu"), world=1, folder=tmp_path) is None
    asked, times = [], {"builtin": 2.0, "fused": 1.0}
    monkeypatch.setattr(
        float8_choice,
        "measure_layer",
        lambda *given: asked.append(given) or {name: Timing(median_ms=took) for name, took in times.items()},
    )
    monkeypatch.setattr(float8_choice, "choice_key", lambda *given: "key")
    cuda = torch.device("cuda")
    real = torch.tensor
    monkeypatch.setattr(float8_choice.torch, "tensor", lambda values, device: real(values))
    first = choose_float8_layers([model], settings, cuda, world=1, folder=tmp_path)
    assert first is not None
    assert (first.variant, model.layers["0"].fused) == ("fused", fused_layer)
    times["builtin"] = 0.5
    again = choose_float8_layers([model], settings, cuda, world=1, folder=tmp_path)
    assert again is not None
    assert (again.variant, again.is_remembered, len(asked)) == ("fused", True, 1)
    slower = choose_float8_layers([model], settings, cuda, world=1, folder=None)
    assert slower is not None
    assert (slower.variant, model.layers["0"].fused) == ("builtin", None)


def test_catalogue_has_the_kernels() -> None:
    import phalanx.train.kernels.float8_catalogue

    assert {one.name for one in phalanx.train.kernels.float8_catalogue.FLOAT8_OPS} <= KERNELS.keys()
