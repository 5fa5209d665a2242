"""State of a single rank outside the model: tensors that only its layout has, and its random state.

Such tensors are, for example, the errors that gradient compression carries from step to step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.state.checkpoint_index import JSON, damaged_checkpoint
from phalanx.train.state.reader import StateSource

RANDOM_KEY = "random"


def is_private_tensor(name: str) -> bool:
    """Return whether a tensor of a checkpoint belongs to one rank only.

    >>> is_private_tensor("#rank-00003/exchange/0/parts"), is_private_tensor("norm.weight#exp_avg")
    (True, False)
    """
    return name.startswith("#")


def private_shards(rank: int, tensors: Mapping[str, torch.Tensor]) -> list[TensorShard]:
    """Return the tensors as shards to save, under names that no other rank and no parameter has."""
    return [
        TensorShard(
            name=_private_prefix(rank) + name,
            tensor=tensor,
            shape=tuple(tensor.shape),
            start=(0,) * tensor.dim(),
            replicas=1,
            owner=True,
            groups={},
        )
        for name, tensor in tensors.items()
    ]


def read_private_tensors(source: StateSource, rank: int) -> dict[str, torch.Tensor]:
    """Read the tensors that a rank saved by `private_shards`, on the CPU; only valid for the layout that wrote them.

    Raises DamagedCheckpoint.
    """
    prefix = _private_prefix(rank)
    own_shards = [shard for shard in source.index(rank).shards if shard.name.startswith(prefix)]
    if not own_shards:
        return {}
    with source.open(rank) as reader:
        reader.check(own_shards)
        return {shard.name.removeprefix(prefix): reader.read(shard, shard.region).clone() for shard in own_shards}


def _private_prefix(rank: int) -> str:
    return f"#rank-{rank:05d}/"


def capture_random_state(device: torch.device) -> dict[str, JSON]:
    """Return the states of torch's generators (CPU and this rank's device) for `rank_meta`, as 10 kB of hex digits."""
    state: dict[str, JSON] = {"cpu": _tensor_text(torch.get_rng_state())}
    if device.type == "cuda":
        state["cuda"] = _tensor_text(torch.cuda.get_rng_state(device))
    return {RANDOM_KEY: state}


def seed_random_state(seed: int, *, rank: int, world: int) -> None:
    """Seed a new run: every rank draws its own numbers, so that dropout does not hit the same places everywhere."""
    torch.manual_seed(_seed_from(f"seed {seed}, random state of rank {rank} of {world}"))  # seeds all devices


def restore_random_state(source: StateSource, *, rank: int, world: int, device: torch.device) -> None:
    """Continue with the numbers this rank would have drawn; raise DamagedCheckpoint.

    With another world size no stored state fits: each rank then gets its own seed, the same at every attempt.
    """
    state = source.index(rank).meta.get(RANDOM_KEY) if world == source.world else None
    if not isinstance(state, Mapping):
        torch.manual_seed(
            _seed_from(f"random state of rank {rank} of {world} at step {source.step}")
        )  # seeds all devices
        return
    try:
        torch.set_rng_state(_text_tensor(state["cpu"]))
        if device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(_text_tensor(state["cuda"]), device)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise damaged_checkpoint(source.where, f"the random state of rank {rank} is not one: {error}") from error


def _tensor_text(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _text_tensor(text: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(bytes.fromhex(text)), dtype=torch.uint8)


def _seed_from(text: str) -> int:
    digest = hashlib.sha256(text.encode()).digest()
    # 63 bits: the largest seed that manual_seed takes
    return int.from_bytes(digest[:8], "big") >> 1
