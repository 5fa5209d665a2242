"""What belongs to a rank alone: its random numbers, and tensors of its layout."""

import pytest
import torch

from phalanx.train.state.checkpoint_index import DamagedCheckpoint
from phalanx.train.state.rank_state import (
    capture_random_state,
    private_shards,
    read_private_tensors,
    restore_random_state,
)
from phalanx.train.state.reader import CheckpointReader
from phalanx.train.state.save import save_checkpoint
from phalanx.train.state.whole_tensors import read_state, state_digest

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_numbers():
    """Leave torch's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        yield


def saved(tmp_path, ranks, **options):
    for rank in reversed(range(len(ranks))):
        path = save_checkpoint(
            tmp_path, step=3, attempt="a", shards=ranks[rank], meta={}, rank=rank, world=len(ranks), **options
        ).path
    return path


def test_a_rank_goes_on_with_its_own_numbers(tmp_path):
    expected = []
    for rank in (1, 0):
        torch.manual_seed(rank)
        torch.rand(rank + 3)  # somewhere in the middle
        save_checkpoint(
            tmp_path, step=3, attempt="a", shards=[], meta={}, rank=rank, world=2, rank_meta=capture_random_state(CPU)
        )
        expected.insert(0, torch.rand(4).tolist())
    source = CheckpointReader(tmp_path / "step-00000003")
    for rank in (0, 1):
        torch.manual_seed(99)
        restore_random_state(source, rank=rank, world=2, device=CPU)
        assert torch.rand(4).tolist() == expected[rank]


def test_another_world_draws_numbers_of_its_own_the_same_at_every_try(tmp_path):
    source = CheckpointReader(saved(tmp_path, [[], []], rank_meta=capture_random_state(CPU)))
    drawn = []
    for rank in (0, 1, 2, 0, 1, 2):
        restore_random_state(source, rank=rank, world=3, device=CPU)
        drawn.append(torch.rand(4).tolist())
    assert drawn[:3] == drawn[3:]
    assert len({tuple(numbers) for numbers in drawn}) == 3


def test_a_checkpoint_without_random_state_gives_a_seed(tmp_path):
    source = CheckpointReader(saved(tmp_path, [[]]))
    restore_random_state(source, rank=0, world=1, device=CPU)
    first = torch.rand(2).tolist()
    restore_random_state(source, rank=0, world=1, device=CPU)
    assert torch.rand(2).tolist() == first


@pytest.mark.parametrize("state", [{"cpu": "zz"}, {"cpu": 7}, {"cpu": "00ff"}, {}])
def test_a_random_state_that_is_none_is_refused(tmp_path, state):
    source = CheckpointReader(saved(tmp_path, [[]], rank_meta={"random": state}))
    with pytest.raises(DamagedCheckpoint, match="the random state of rank 0 is not one"):
        restore_random_state(source, rank=0, world=1, device=CPU)


def test_private_tensors_come_back_to_their_rank_and_are_no_weights(kit, tmp_path):
    carried = [{"0/parts": torch.randn(3, 5), "0/sum": torch.randn(1, 2)}, {"0/parts": torch.randn(3, 5)}]
    weight = [[kit.shard("w", torch.ones(4))], []]
    plain = state_digest(saved(tmp_path / "plain", weight))
    path = saved(tmp_path, [weight[rank] + private_shards(rank, carried[rank]) for rank in (0, 1)])
    source = CheckpointReader(path)
    for rank in (0, 1):
        found = read_private_tensors(source, rank)
        assert found.keys() == carried[rank].keys()
        assert all(torch.equal(found[name], carried[rank][name]) for name in found)
    assert list(read_state(path)) == ["w"]
    assert state_digest(path) == plain  # equal states of two layouts have equal digests
    assert read_private_tensors(CheckpointReader(tmp_path / "plain" / path.name), 1) == {}
