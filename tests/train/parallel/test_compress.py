"""Compressed sums on 2 and 4 gloo ranks: what is applied, what is carried on, what travels, and that nothing hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from phalanx.errors import UserError
from phalanx.hardware.cluster import resolve_cluster
from phalanx.job.load import load
from phalanx.plan.auto_settings import compression_pays
from phalanx.plan.layout import Layout
from phalanx.plan.request import request_from_job
from phalanx.train.parallel.compress import FORMATS, KINDS, Quantised, build_codec
from phalanx.train.parallel.compress_fsdp import compress_sharded
from phalanx.train.parallel.compress_powersgd import saves_bytes

SHAPES = [torch.Size(shape) for shape in ((96, 64), (64,), (170, 257), (2, 24, 16), (7, 3))]
SIZE = sum(shape.numel() for shape in SHAPES)
BUCKETS, STEPS = 7, 5


def gradient(rank: int, key: int, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * rank + 100 * key + step)
    return torch.randn(SIZE, generator=draw) * 10.0 ** (key - 3)


def on_rank_steps(rank: int, group: Any, *, kind: str) -> dict[str, Any]:
    """Many buckets over many steps: how far the applied sum is from the true one, step by step."""
    codec = build_codec(kind)
    ranks = group.size()
    for key in range(BUCKETS):
        codec.prepare(key, SHAPES)
    applied, true = torch.zeros(BUCKETS, SIZE), torch.zeros(BUCKETS, SIZE)
    drift, single, same = [], [], []
    for step in range(STEPS):
        for key in range(BUCKETS):
            bucket = gradient(rank, key, step)
            codec.all_reduce(bucket, group, key)
            exact = torch.stack([gradient(peer, key, step) for peer in range(ranks)]).sum(0)
            applied[key] += bucket
            true[key] += exact
            single.append(((bucket - exact).norm() / exact.norm()).item())
            same.append(int(bucket.view(torch.int32).sum()))
        drift.append(((applied - true).norm(dim=1) / (true.norm(dim=1) / (step + 1) ** 0.5)).max().item())
    return {
        "drift": drift,
        "single": max(single),
        "same": same,
        "bytes": (codec.bytes_sent, codec.bytes_raw),
        "state": {name: tuple(tensor.shape) for name, tensor in codec.state().items()},
    }


# The largest relative error of one rounded sum: 2^-9 of bf16 twice; half of 1/127 of the block's largest (about 3.5 σ),
# twice; e4m3 has 3 bits of mantissa.
ROUNDING = {"bf16": 0.004, "int8": 0.03, "fp8": 0.08}


@pytest.mark.parametrize("kind", ROUNDING)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_is_rounded_away_returns_in_the_next_step(ranks: Any, kind: str, size: int) -> None:
    answers = ranks(__file__, "steps", size, kind=kind)
    for answer in answers:
        # The running sum stays within one step's rounding of the truth, however many steps.
        assert max(answer["drift"]) < ROUNDING[kind], answer["drift"]
        assert answer["single"] < 2 * ROUNDING[kind]
        assert answer["same"] == answers[0]["same"]  # every rank ends with the same bits


@pytest.mark.parametrize(("kind", "least"), [("bf16", 2.0), ("int8", 3.9), ("fp8", 3.9)])
@pytest.mark.parametrize("size", [2, 4])
def test_bytes_on_the_wire(ranks: Any, kind: str, least: float, size: int) -> None:
    for answer in ranks(__file__, "steps", size, kind=kind):
        sent, raw = answer["bytes"]
        assert raw == 2 * (size - 1) * SIZE * 4 // size * BUCKETS * STEPS
        assert least * 0.999 <= raw / sent < least + 0.1  # tensors and parts are filled up to whole blocks


@pytest.mark.parametrize("size", [2, 4])
def test_powersgd_sends_two_thin_factors(ranks: Any, size: int) -> None:
    values = sum(4 * (s[0] + s[1]) if saves_bytes(s, 4) else s.numel() for s in SHAPES)
    for answer in ranks(__file__, "steps", size, kind="powersgd"):
        sent, raw = answer["bytes"]
        assert sent == pytest.approx(2 * (size - 1) * values * 4 / size * BUCKETS * STEPS, rel=1e-3)
        assert raw / sent == pytest.approx(SIZE / values, rel=1e-3)
        assert answer["state"]["6/0/error"] == (96, 64)
        assert answer["state"]["6/0/factor"] == (64, 4)
        assert "6/1/error" not in answer["state"]


def on_rank_neighbours(rank: int, group: Any, *, kind: str) -> bool:
    """Whether a tensor is summed to the same bits beside large neighbours as beside small ones, in both sums."""
    shared, part = gradient(rank, 3, 0)[:100], gradient(rank, 3, 1)
    results = []
    for scale in (1.0, 1e4):
        codec = Quantised(FORMATS[kind])
        codec.prepare(0, [torch.Size([300]), torch.Size([100]), torch.Size([7])])
        bucket = torch.cat([part[:300] * scale, shared, part[:7] * scale])
        output, rows = torch.empty(407), torch.cat([bucket, bucket])
        codec.reduce_scatter(output, rows, group, 0)
        codec.load({})
        codec.all_reduce(bucket, group, 0)
        results.append(torch.cat([bucket[300:400], output[300:400]]))
    return torch.equal(*results)


@pytest.mark.parametrize("kind", FORMATS)
def test_what_lies_beside_a_tensor_does_not_change_its_rounding(ranks: Any, kind: str) -> None:
    # Tensor ranks hold norms in common, beside different slices of matrices: rounded unlike, they would drift apart.
    assert ranks(__file__, "neighbours", 2, kind=kind) == [True, True]


def on_rank_low_rank(rank: int, group: Any) -> dict[str, Any]:
    """Gradients of rank 2, the same directions every step, and the error that is carried."""
    draw = torch.Generator().manual_seed(5)
    rows, columns = torch.randn(40, 2, generator=draw), torch.randn(2, 30, generator=draw)
    codec = build_codec("powersgd", rank=2)
    codec.prepare(0, [torch.Size([40, 30])])
    codec.prepare(1, [torch.Size([40, 30])])
    apart, applied, true = [], torch.zeros(40, 30), torch.zeros(40, 30)
    for step in range(4):
        mixes = torch.randn(group.size(), 2, 2, generator=torch.Generator().manual_seed(step))
        exact = rows @ mixes.sum(0) @ columns
        bucket = (rows @ mixes[rank] @ columns).flatten()
        codec.all_reduce(bucket, group, 0)
        apart.append(((bucket.view(40, 30) - exact).norm() / exact.norm()).item())
        full = torch.randn(40, 30, generator=torch.Generator().manual_seed(100 * step + rank))
        bucket = full.flatten().clone()
        codec.all_reduce(bucket, group, 1)
        applied += bucket.view(40, 30)
        dist.all_reduce(full, group=group)
        true += full
    carried = codec.state()["1/0/error"].clone()
    dist.all_reduce(carried, group=group)
    return {"apart": apart, "lost": (applied + carried - true).norm().item() / true.norm().item()}


def test_powersgd_is_exact_on_gradients_of_its_rank_and_loses_nothing_on_others(ranks: Any) -> None:
    for answer in ranks(__file__, "low_rank", 4):
        assert max(answer["apart"]) < 1e-4
        assert answer["lost"] < 1e-5  # applied + carried = true


def on_rank_not_finite(rank: int, group: Any, *, kind: str) -> list[bool]:
    """A step with one infinity on one rank, then a healthy one."""
    codec = build_codec(kind)
    codec.prepare(0, SHAPES)
    seen = []
    for step, bad in enumerate((False, True, False)):
        bucket = gradient(rank, 3, step)
        if bad and rank == 1:
            bucket[5] = float("inf")
        codec.all_reduce(bucket, group, 0)
        seen.append(bool(bucket.isfinite().all()))
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_not_finite_is_seen_by_all_and_forgotten(ranks: Any, kind: str) -> None:
    assert ranks(__file__, "not_finite", 4, kind=kind) == [[True, False, True]] * 4


def on_rank_resumed(rank: int, group: Any, *, kind: str) -> bool:
    """Whether a codec that loads another's state goes on with the same bits."""
    one, other = build_codec(kind), build_codec(kind)
    for codec in (one, other):
        codec.prepare(0, SHAPES)
    one.all_reduce(gradient(rank, 3, 0), group, 0)
    other.load(one.state())
    first, second = gradient(rank, 3, 1), gradient(rank, 3, 1)
    one.all_reduce(first, group, 0)
    other.all_reduce(second, group, 0)
    fresh = build_codec(kind)
    fresh.prepare(0, SHAPES)
    third = gradient(rank, 3, 1)
    fresh.all_reduce(third, group, 0)
    return torch.equal(first, second) and not torch.equal(first, third)


@pytest.mark.parametrize("kind", KINDS)
def test_state_carries_on_where_it_was(ranks: Any, kind: str) -> None:
    assert ranks(__file__, "resumed", 2, kind=kind) == [True, True]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(48, 48) for _ in range(6)))  # six buffers of one size


def on_rank_sharded(rank: int, group: Any, *, kind: str, copies: int) -> dict[str, Any]:
    """FSDP2 with and without compression on the same data; each layer's gradients against the exact ones."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape, names = ((copies, 4 // copies), ("copies", "shard")) if copies > 1 else ((4,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    plain, small = network(), network()
    for model in (plain, small):
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh)
            layer.set_gradient_divide_factor(1.0)  # type: ignore[operator]
            layer.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    compression = compress_sharded(small, kind)
    drift, sums = [], [torch.zeros(()) for _ in plain.parameters()]
    for step in range(4):
        x = torch.randn(3, 48, generator=torch.Generator().manual_seed(7 * step + rank))
        for model in (plain, small):
            model.zero_grad()
            model(x).pow(2).sum().backward()
        pairs = list(zip(plain.parameters(), small.parameters(), strict=True))
        sums = [s + b.grad.to_local() - a.grad.to_local() for s, (a, b) in zip(sums, pairs, strict=True)]  # type: ignore
        scale = [a.grad.to_local().norm() for a, _ in pairs]  # type: ignore[union-attr]
        drift.append(max((s.norm() / n).item() for s, n in zip(sums, scale, strict=True)))
    return {
        "drift": drift,
        "ratio": compression.bytes_raw / compression.bytes_sent,
        "modules": sorted(compression.state()),
        "held": compression.held_bytes,
    }


@pytest.mark.parametrize(("kind", "copies"), [("int8", 1), ("bf16", 1), ("int8", 2)])
def test_fsdp_reduces_rounded_gradients_and_keeps_errors_by_module(ranks: Any, kind: str, copies: int) -> None:
    for answer in ranks(__file__, "sharded", 4, kind=kind, copies=copies):
        assert max(answer["drift"]) < 2 * ROUNDING[kind]
        assert answer["modules"] == [f"{layer}/0/parts" for layer in range(6)]
        assert answer["held"] >= 6 * (48 * 48 + 48) * 4
        assert answer["ratio"] > (3.75 if kind == "int8" else 1.99)


def test_powersgd_is_refused_on_sharded_gradients() -> None:
    with pytest.raises(UserError) as caught:
        compress_sharded(network(), "powersgd", where="job.toml:9")
    assert str(caught.value) == (
        'job.toml:9: "powersgd" does not work on sharded gradients\n'
        "  FSDP2 reduces flat shards, in which matrices are cut at any row: they have no factors\n"
        "  use bf16, int8, fp8 with ZeRO, or zero = 0 with powersgd"
    )


def test_an_unknown_codec_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError) as caught:
        build_codec("int9", where="job.toml:9")
    assert str(caught.value) == (
        'job.toml:9: the trainer has no gradient compression "int9"\n'
        '  use bf16, int8, fp8, powersgd or none; did you mean "int8"?'
    )


@pytest.mark.parametrize("kind", FORMATS)
def test_formats_keep_zeros_signs_and_ragged_ends(kind: str) -> None:
    x = torch.cat([torch.zeros(300), torch.linspace(-2, 2, 300), torch.tensor([1e-30, -1e30])])[None]
    message, sizes = FORMATS[kind].encode(x, (400, 202)), (400, 202)
    back = FORMATS[kind].decode(message, sizes, torch.float32)
    assert message.shape[1] == (602 * 2 if kind == "bf16" else 602 + 4 * 3)
    assert torch.equal(back[0, :256], torch.zeros(256))
    assert back.shape == x.shape
    assert back[0, -1] == pytest.approx(-1e30, rel=0.01)
    assert (back * x >= 0).all()


def test_the_loss_scale_moves_the_errors() -> None:
    codec = Quantised(FORMATS["int8"])
    codec.load({"0/parts": torch.ones(2, 3)})
    codec.rescale(0.5)
    assert torch.equal(codec.state()["0/parts"], torch.full((2, 3), 0.5))


EIGHT_BILLION = Path(__file__).parents[3] / "examples" / "llama-3-8b-64xH100.toml"


def predicted(sequences: int, compression: str, *, data: int, tensor: int) -> str:
    """What `compression_pays` says of Llama 3 8B on 64 H100."""
    overrides = [f"batch.global_sequences={sequences}", "data.sequence=2048"]
    request, _ = request_from_job(load(EIGHT_BILLION, overrides=overrides).job, resolve_cluster("8xH100:8"))
    layout = Layout(
        data=data, shard=1, tensor=tensor, context=1, pipeline=1, virtual_pipeline=1, expert=1, zero=0,
        sequence_parallel=tensor > 1, micro_batch=1, accumulation=sequences // data, recompute="none",
        precision="bf16", schedule="1f1b", offload="none", compression=compression,
    )  # fmt: skip
    problem = compression_pays(request, layout, where="job.toml:9")
    return problem.render() if problem else ""


def test_compression_pays_where_gradients_outweigh_the_work() -> None:
    assert predicted(64, "int8", data=64, tensor=1) == ""
    assert predicted(64, "powersgd", data=64, tensor=1) == ""
    assert predicted(64, "none", data=8, tensor=8) == ""


def test_compression_that_saves_nothing_is_warned_about() -> None:
    said = predicted(2048, "int8", data=8, tensor=8)
    assert said.startswith("job.toml:9: int8 gradients save ")
    assert said.splitlines()[1:] == [
        "  gradients travel behind the backward pass already, and rounding them is not free",
        '  use compression = "none"',
    ]
