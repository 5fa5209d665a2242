"""The step's own arithmetic: what the loss is a mean of, what clipping does, what evaluation leaves alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from phalanx.job.schema import Optim
from phalanx.plan import lean_step
from phalanx.train.engine import Engine
from phalanx.train.models.decoder import Decoder
from phalanx.train.verify.trial import make_batch, run_trial


def test_loss_is_per_valid_token_of_the_whole_batch(trial, once):
    """Targets that do not count lie on one data rank only: a mean of means would be another number."""
    one, two = once(trial()), run_trial(trial(data=2))
    assert one.tokens == two.tokens == [8 * 16 - 3] * 5
    assert two.losses == pytest.approx(one.losses, abs=1e-12)


@pytest.mark.parametrize("tied", [False, True])
def test_one_process_is_a_plain_torch_loop(tied, trial, llama):
    """The oracle of the oracle: the model, cross-entropy, torch's clipping and torch's AdamW, nothing of ours."""
    made = trial(replace(llama, tied=tied), optim=Optim(clip=0.5))
    found = run_trial(made)
    model = Decoder(made.shape).double()
    model.init_weights(0)
    decayed = {True: [], False: []}
    for name, param in model.named_parameters():
        decayed["norm" not in name].append(param)
    groups = [{"params": decayed[True], "weight_decay": 0.1}, {"params": decayed[False], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=made.lr, betas=(0.9, 0.95))
    for step in range(made.steps):
        tokens_BS, targets_BS = make_batch(step, sequences=8, sequence=16, vocab=64)
        loss = F.cross_entropy(model(tokens_BS).flatten(0, 1), targets_BS.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert (found.losses[step], found.norms[step]) == pytest.approx((loss.item(), norm.item()), abs=1e-12)
        for name, param in model.named_parameters():
            assert abs(found.grads[step][name] - param.grad.numpy()).max() < 1e-12, name
        optimizer.step()
    for name, param in model.named_parameters():
        assert abs(found.params[-1][name] - param.detach().numpy()).max() < 1e-12, name


def test_the_first_loss_is_that_of_guessing(trial, once):
    assert once(trial()).losses[0] == pytest.approx(math.log(64), rel=0.01)


def test_clipping_scales_all_gradients_by_one_factor(trial, once):
    free, clipped = (run_trial(trial(steps=1, optim=Optim(clip=clip))) for clip in (0.0, 0.1))
    assert free.norms == clipped.norms  # told as it was
    factor = 0.1 / (free.norms[0] + 1e-6)
    for name, grad in free.grads[0].items():
        assert clipped.grads[0][name] == pytest.approx(grad * factor, rel=1e-12), name


def test_evaluation_changes_nothing(trial, once):
    """Both evaluations of a trial of no learning are the same."""
    found = run_trial(trial(lr=0.0, steps=2))
    assert found.evaluations[0] == found.evaluations[1]
    assert found.evaluations[0][1] == 8 * 16 - 3


def test_the_seed_is_the_model(trial):
    digests = {seed: run_trial(trial(steps=1, seed=seed)).digest for seed in (0, 1)}
    assert digests[0] != digests[1]
    assert run_trial(trial(steps=1, seed=1)).digest == digests[1]


@pytest.mark.parametrize("zero", [0, 3])
def test_a_lean_step_learns_the_same(zero, trial, llama, monkeypatch):
    """Logits in parts and products made again: sums in another order, so 1e-12 in float64 and not the same bits."""
    for name, value in {"LEAST_LOGITS": 1, "LEAST_PRODUCT": 1, "CHUNK_LOGITS": 700.0, "CHUNK_UNIT": 1}.items():
        monkeypatch.setattr(lean_step, name, value)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        lean, held = (_two_steps(trial(lean=lean, zero=zero, micro_batch=2)) for lean in (True, False))
    finally:
        dist.destroy_process_group()
    assert lean != held
    assert lean == pytest.approx(held, rel=1e-11)


def _two_steps(made):
    """Losses, norms, a held-out loss and the sums of all weights after two steps."""
    engine = Engine(made.shape, made.settings, made.optim, device=torch.device("cpu"))
    engine.initialise()
    numbers = []
    for step in range(2):
        batch = make_batch(step, sequences=8, sequence=16, vocab=made.shape.vocab)
        result = engine.step(*batch, lr=made.lr)
        numbers += [result.loss, result.grad_norm, engine.evaluate(*batch)[0]]
    return [*numbers, *(float(shard.tensor.abs().sum()) for shard in engine.shards)]
