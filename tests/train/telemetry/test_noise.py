"""The noise scale: against gradients whose noise is known, and the same from every way of measuring it."""

from __future__ import annotations

import importlib
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phalanx.train.telemetry.noise import LocalNorms, Noise, NoiseScale, estimate_noise
from phalanx.train.verify.ranks import run_ranks

sys.path.insert(0, str(Path(__file__).parent))  # a task is named by its module, which the new process must find too
noise_tasks = importlib.import_module("noise_tasks")

IGNORED = -100
DIMS, SEQUENCE, MICRO = 400, 8, 2


def _one_step(draw: torch.Generator, mean_D: torch.Tensor, sigma: float, *, chunks: int, uneven: bool) -> Noise | None:
    """A step of one rank: a token's gradient is the mean, plus its sequence's noise, in units of the batch's tokens."""
    targets_BS = torch.zeros(chunks * MICRO, SEQUENCE, dtype=torch.int64)
    if uneven:
        targets_BS[: MICRO * chunks // 2, 1:] = IGNORED  # half of the sequences count one token of eight
        targets_BS[-1] = IGNORED  # and one only fills up
    norms = LocalNorms(frozenset())
    norms.begin()
    whole_D = torch.zeros(DIMS, dtype=torch.float64)
    valid_B = (targets_BS != IGNORED).sum(1)
    tokens_each = valid_B.sum() / (valid_B > 0).sum()
    for rows in valid_B.split(MICRO):
        # Noise of a token mean over v tokens falls as that of v / tokens_each sequences.
        spread = [
            torch.randn(DIMS, generator=draw, dtype=torch.float64) * sigma * (v * tokens_each).sqrt() for v in rows
        ]
        sum_D = mean_D * rows.sum() + sum(spread)
        norms.hear("all", [sum_D])
        whole_D += sum_D
    local, counted, sequences = norms.numbers(targets_BS, micro=MICRO, ignored=IGNORED, speaks=True)
    valid = float(valid_B.sum())
    total = float(whole_D.square().sum()) / valid**2
    return estimate_noise(local=float(local) / valid, total=total, chunks=float(counted), samples=float(sequences))


@pytest.mark.parametrize("uneven", [False, True])
def test_known_noise_is_found_within_five_percent(uneven):
    draw = torch.Generator().manual_seed(5)
    mean_D = torch.randn(DIMS, generator=draw, dtype=torch.float64)
    mean_D /= mean_D.norm()
    sigma = 0.2  # per dimension: tr Σ = 400 · 0.04 = 16 against |G|² = 1, so 16 sequences
    scale = NoiseScale(decay=0.999)
    for _ in range(400):
        found = _one_step(draw, mean_D, sigma, chunks=4, uneven=uneven)
        assert found is not None
        scale.take(found, grad_norm=1.0)
    assert scale.samples == pytest.approx(16.0, rel=0.05)


def test_chunks_of_one_size_and_of_many_agree_with_the_formula_of_mccandlish():
    """|G|² = (B A − b a)/(B − b), tr Σ = (a − A)/(1/b − 1/B), for four chunks of b = 2 of B = 8."""
    a, total, b, whole = 5.0, 2.0, 2.0, 8.0
    found = estimate_noise(local=a, total=total, chunks=4, samples=whole)
    assert found is not None
    assert found.squared == pytest.approx((whole * total - b * a) / (whole - b))
    assert found.trace == pytest.approx((a - total) / (1 / b - 1 / whole))


@pytest.mark.parametrize("local", [math.nan, math.inf])
def test_nothing_to_compare_is_no_estimate(local):
    assert estimate_noise(local=1.0, total=1.0, chunks=1, samples=8) is None
    assert estimate_noise(local=local, total=1.0, chunks=4, samples=8) is None


def test_chunks_that_cannot_be_told_apart_are_not_guessed():
    norms = LocalNorms(frozenset())
    norms.begin()
    targets_BS = torch.zeros(6, 4, dtype=torch.int64)
    for _ in range(2):  # two lumps of three micro-batches
        norms.hear("all", [torch.ones(3)])
    assert math.isnan(norms.numbers(targets_BS, micro=2, ignored=IGNORED, speaks=True)[0])
    norms.begin()  # the next step is a new one
    norms.hear("all", [torch.ones(3)])
    local, chunks, sequences = norms.numbers(targets_BS, micro=2, ignored=IGNORED, speaks=True)
    assert (float(local), float(chunks), float(sequences)) == (pytest.approx(3 / 24), 1.0, 6.0)


def test_micro_batches_are_measured_in_every_fourth_step_only():
    norms = LocalNorms(frozenset())
    norms.every = 4
    heard = []
    for _ in range(8):
        norms.begin()
        heard.append(norms.on)
    assert heard == [True, False, False, False] * 2
    again = LocalNorms(frozenset())  # taken up at step 6
    again.every, again.next = 4, 6
    for place in range(6, 8):
        again.begin()
        assert again.on == heard[place]
    again.begin()
    assert again.on
    scale = NoiseScale(every=4)  # and told as early, and forgotten as late, as where every step is
    for _ in range(3):
        assert scale.samples is None
        scale.take(Noise(trace=8.0, squared=2.0), grad_norm=1.0)
    assert scale.samples == pytest.approx(4.0)


def test_the_mean_is_told_late_survives_a_restart_and_leaves_spikes_out():
    scale = NoiseScale(first=3)
    for _ in range(2):
        scale.take(Noise(trace=8.0, squared=2.0), grad_norm=1.0)
        scale.take(None, grad_norm=1.0)
    assert scale.samples is None
    scale.take(Noise(trace=8.0, squared=2.0), grad_norm=1.0)
    assert scale.samples == pytest.approx(4.0)
    scale.take(Noise(trace=100.0, squared=900.0), grad_norm=30.0)
    assert scale.samples == pytest.approx(4.0)
    again = NoiseScale(first=3)
    again.load(scale.state())
    assert again.samples == scale.samples


def test_large_first_gradients_do_not_drown_the_later_ones():
    scale = NoiseScale()
    for step in range(200):
        size = 100.0 * 0.9 ** min(step, 60)
        quotient = 1.0 if step < 60 else 5.0
        scale.take(Noise(trace=size * quotient, squared=size), grad_norm=math.sqrt(size))
    assert scale.samples is not None
    assert scale.samples > 3.5


def test_noise_drowning_the_mean_is_no_number():
    scale = NoiseScale(first=1)
    scale.take(Noise(trace=8.0, squared=-0.1), grad_norm=1.0)
    assert scale.samples is None


# ---- real ranks ------------------------------------------------------------------------------------------------------

# The same eight sequences as four chunks of two, in five ways.
WAYS = {
    "data ranks": {"data": 4},
    "fsdp": {"data": 4, "shard": 2, "zero": 3},
    "fsdp and micro-batches": {"data": 2, "shard": 2, "zero": 2},
    "tensor ranks": {"tensor": 2, "sequence_parallel": True},
    "pipeline": {"pipeline": 2},
}


@pytest.fixture(scope="module")
def alone(trial):
    """Four micro-batches on one process."""
    return run_ranks(noise_tasks.steps, 1, trial(steps=2))[0]


@pytest.mark.parametrize("way", WAYS)
def test_all_ways_of_measuring_agree(way, trial, alone):
    made = trial(steps=2, **WAYS[way])
    ranks = run_ranks(noise_tasks.steps, made.settings.layout.devices, made)
    for rank in ranks:
        for found, wanted in zip(rank.steps, alone.steps, strict=True):
            assert found.noise is not None
            assert found.noise.trace == pytest.approx(wanted.noise.trace, rel=1e-6)
            assert found.noise.squared == pytest.approx(wanted.noise.squared, rel=1e-6)
            assert found.noise == ranks[0].steps[rank.steps.index(found)].noise


def test_the_estimate_is_that_of_the_gradients_themselves(trial, alone):
    """Against torch alone: micro-batch by micro-batch, without anything of ours."""
    import torch.nn.functional as F

    from phalanx.train.models.decoder import Decoder
    from phalanx.train.verify.trial import make_batch

    made = trial()
    model = Decoder(made.shape).double()
    model.init_weights(0)
    tokens_BS, targets_BS = make_batch(0, sequences=8, sequence=16, vocab=64)
    valid = int((targets_BS != IGNORED).sum())
    local, whole = 0.0, 0.0
    for x, y in zip(tokens_BS.split(2), targets_BS.split(2), strict=True):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
        grads = torch.autograd.grad(loss, list(model.parameters()))
        flat = torch.cat([grad.flatten() for grad in grads])
        local += float(flat.square().sum()) / int((y != IGNORED).sum()) / valid
        whole = whole + flat / valid
    wanted = estimate_noise(local=local, total=float(whole.square().sum()), chunks=4, samples=8)
    assert alone.steps[0].noise.trace == pytest.approx(wanted.trace, rel=1e-9)
    assert alone.steps[0].noise.squared == pytest.approx(wanted.squared, rel=1e-6)


def test_listening_changes_no_bit(trial):
    made = trial(kind="fp32", steps=2, data=2, shard=2, zero=3)
    heard, deaf = (run_ranks(noise_tasks.steps, 2, made, hearing) for hearing in (True, False))
    assert [one.weights for one in heard] == [one.weights for one in deaf]
    assert heard[0].steps[0].grad_norm == deaf[0].steps[0].grad_norm
    assert deaf[0].steps[0].noise is None


def test_where_gradients_are_mixed_first_nothing_is_claimed(trial, llama):
    """Context ranks share sequences; a zero-bubble schedule hands gradients over in lumps."""
    for changes in ({"context": 2, "sequences": 4}, {"pipeline": 2, "schedule": "zero-bubble"}):
        made = trial(steps=1, **changes)
        assert run_ranks(noise_tasks.steps, 2, made)[0].steps[0].noise is None
    tied = trial(replace(llama, tied=True), steps=1, pipeline=2)  # the two copies of the table are left out
    assert run_ranks(noise_tasks.steps, 2, tied)[0].steps[0].noise.trace > 0
