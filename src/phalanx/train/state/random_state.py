"""The random state of a rank, as text for its index: torch's generators of the CPU and of its device."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from phalanx.train.state.damage import damaged
from phalanx.train.state.jsontext import JSON
from phalanx.train.state.source import Source

KEY = "random"


def random_state(device: torch.device) -> dict[str, JSON]:
    """What belongs into `rank_meta`: 10 kB of hexadecimal digits."""
    state: dict[str, JSON] = {"cpu": _text(torch.get_rng_state())}
    if device.type == "cuda":
        state["cuda"] = _text(torch.cuda.get_rng_state(device))
    return {KEY: state}


def seed_random(seed: int, *, rank: int, world: int) -> None:
    """Start a run: every rank draws its own numbers (dropout must not fall on the same places everywhere)."""
    torch.manual_seed(_key(f"seed {seed}, random state of rank {rank} of {world}"))  # of all devices


def restore_random(source: Source, *, rank: int, world: int, device: torch.device) -> None:
    """Go on with the numbers this rank would have drawn. Raises Damaged.

    In a world of another size there is no such rank: each then draws from a seed of its own, the same at every try.
    """
    state = source.index(rank).meta.get(KEY) if world == source.world else None
    if not isinstance(state, Mapping):
        torch.manual_seed(_key(f"random state of rank {rank} of {world} at step {source.step}"))  # of all devices
        return
    try:
        torch.set_rng_state(_tensor(state["cpu"]))
        if device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(_tensor(state["cuda"]), device)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise damaged(source.where, f"the random state of rank {rank} is not one: {error}") from error


def _text(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _tensor(text: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(bytes.fromhex(text)), dtype=torch.uint8)


def _key(text: str) -> int:
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # 63 bits: manual_seed takes no more from Python
