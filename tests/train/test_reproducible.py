"""`numerics.reproducible`: the same bits of every parameter on 1, 2, 4 and 8 data ranks, in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.train.verify.trial import run_trial

MOE = {"experts": 4, "experts_per_token": 2, "expert_ffn": 16, "layers": 2}


@pytest.mark.parametrize("shape", [{}, {"tied": True}, MOE], ids=["dense", "tied", "moe"])
def test_same_digest_on_any_number_of_data_ranks(shape, trial, llama):
    model = replace(llama, **shape)
    found = {
        ranks: run_trial(trial(model, kind="fp32", data=ranks, micro_batch=1, reproducible=True))
        for ranks in (1, 2, 4, 8)
    }
    assert {one.digest for one in found.values()} == {found[1].digest}
    for one in found.values():
        assert one.norms == pytest.approx(found[1].norms, rel=1e-14)
    assert all(one.quarrels == [] for one in found.values())


def test_without_it_the_bits_differ(trial):
    """Or the test above would prove nothing."""
    digests = {run_trial(trial(kind="fp32", data=ranks, micro_batch=1)).digest for ranks in (1, 8)}
    assert len(digests) == 2


def test_same_layout_twice_is_the_same_bits(trial):
    """Without any setting: nothing random, nothing that depends on time."""
    layout = {"kind": "fp32", "pipeline": 2, "data": 2, "shard": 2, "zero": 3}
    assert run_trial(trial(**layout)).digest == run_trial(trial(**layout)).digest
