"""Messages of a plan: their groups and sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
from rules.kit import evidence

from phalanx.rules.catalog import com_messages

SOURCE = Path(com_messages.__file__).parents[2]


def found(*sets: str) -> dict[tuple[str, str], com_messages.Message]:
    return {(one.axis, one.operation): one for one in com_messages.plan_messages(evidence(*sets))}


def test_auto_is_what_the_trainer_uses() -> None:
    text = (SOURCE / "train" / "parallel" / "replicate.py").read_text(encoding="utf-8")
    assert f"BUCKET_BYTES = {com_messages.BUCKET_MIB:g} * 2**20" in text


def test_blocks_of_a_sharded_model_and_the_sums_between_its_copies() -> None:
    """Llama 3 8B has 218.1 million parameters a block; ZeRO-3 inside nodes of 8, 16 copies."""
    block, sent = 218_112_000, found("parallel.shard=8")
    assert sent["shard", "reduce-scatter"].nbytes == pytest.approx(4 * block, rel=1e-3)
    assert sent["shard", "all-gather"].nbytes == pytest.approx(2 * block, rel=1e-3)
    copies = sent["replica", "all-reduce"]
    assert (copies.ranks, copies.per_domain, copies.domains) == (16, 1, 16)
    assert copies.nbytes == pytest.approx(4 * block / 8, rel=1e-3)
    assert copies.count == pytest.approx(32, rel=0.2), "one a block, and the tables"


def test_activations_of_a_tensor_group() -> None:
    one = found("parallel.tensor=8", "parallel.sequence_parallel=false", "parallel.zero=1")["tensor", "all-reduce"]
    assert one.nbytes == 8192 * 4096 * 2
    assert (one.ranks, one.per_domain, one.where) == (8, 8, "in one domain")


def test_gradients_come_first() -> None:
    axes = [one.axis for one in com_messages.plan_messages(evidence("parallel.tensor=8", "parallel.zero=1"))]
    assert axes.index("tensor") > axes.index("data")
