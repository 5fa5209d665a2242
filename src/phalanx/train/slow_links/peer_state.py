"""The state that a peer gives newcomers: weights, optimizer, outer momentum and position, as complete vectors.

A newcomer may have another layout than the peer it takes the state from, so the state contains nothing of a layout.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from phalanx.errors import mistake
from phalanx.peers.facts import PeerState, Vector
from phalanx.train.engine import Engine
from phalanx.train.slow_links.outer_optimizer import OuterOptimizer
from phalanx.train.slow_links.peer_vector import VectorMap, spread_object
from phalanx.train.state.training_state import state_numbers, take_state_numbers

META = "meta.json"
MOST_META_BYTES = 64 * 2**20  # ten times the names and shapes of a hundred thousand tensors
WIDEST_BYTES = 8  # of a value: peers may hold fp32 or fp64
# Limit between the beginning of a round and training's wait for it, usually a thread's start.
FREEZE_S = 5.0
PATIENCE_S = 120.0  # limit of the group's wait for training to reach the end of a step


def copy_state(
    engine: Engine, outer: OuterOptimizer | None, position: Mapping[str, Any], *, is_shared: bool
) -> PeerState | None:
    """Return the state as of `position` on rank 0, None elsewhere; every rank of the peer calls this.

    `is_shared` means that the engine's weights are those of all peers; otherwise the outer optimizer's are taken.
    """
    optimizer = engine.optimizer.state()
    maps = {"weights": VectorMap(engine.shards), "optimizer": VectorMap(optimizer)}
    weights = outer.weights if outer is not None and not is_shared else [shard.tensor for shard in engine.shards]
    vectors = {
        "weights": maps["weights"].gather(weights),
        "optimizer": maps["optimizer"].gather([shard.tensor for shard in optimizer]),
    }
    if outer is not None:
        vectors["outer_momentum"] = maps["weights"].gather(outer.momenta)
    if vectors["weights"] is None:
        return None
    meta = {
        "position": dict(position),
        "numbers": state_numbers(engine),
        "shapes": {name: vector_map.description for name, vector_map in maps.items()},
        "wide": [name for name, vector in vectors.items() if vector is not None and vector.dtype == np.float64],
    }
    tensors = {name: vector.tobytes() for name, vector in vectors.items() if vector is not None}
    tensors[META] = json.dumps(meta).encode()
    return PeerState(round_number=int(position["round"]) - 1, tensors=tensors)


def most_state_bytes(engine: Engine, outer: OuterOptimizer | None) -> dict[str, int]:
    """Return the largest size in bytes of each tensor of another peer's state; every rank of the peer calls this."""
    lengths = {"weights": VectorMap(engine.shards).length, "optimizer": VectorMap(engine.optimizer.state()).length}
    if outer is not None:
        lengths["outer_momentum"] = lengths["weights"]
    return {name: WIDEST_BYTES * length for name, length in lengths.items()} | {META: MOST_META_BYTES}


@torch.no_grad()
def take_state(engine: Engine, outer: OuterOptimizer | None, found: Mapping[str, bytes]) -> dict[str, Any]:
    """Take over the state that rank 0 received, `found`, and return its position; every rank of the peer calls this."""
    meta = spread_object(_read_meta(found) if found else None)
    optimizer = engine.optimizer.state()
    maps = {"weights": VectorMap(engine.shards), "optimizer": VectorMap(optimizer)}
    for name, vector_map in maps.items():
        if meta["shapes"].get(name) != vector_map.description:
            raise mistake(
                "peers",
                f"another peer's {name} have other names or shapes than this job's",
                why="its state cannot be taken over",
                fix="join with the job file of the run",
            )

    def boxes(name: str, over: VectorMap) -> list[torch.Tensor]:
        vector: Vector | None = None
        if found:
            vector = np.frombuffer(found[name], np.float64 if name in meta["wide"] else np.float32)
        return over.spread(vector)

    for shard, tensor in zip(engine.shards, boxes("weights", maps["weights"]), strict=True):
        shard.tensor.copy_(tensor)
    for shard, tensor in zip(optimizer, boxes("optimizer", maps["optimizer"]), strict=True):
        shard.tensor.copy_(tensor)
    take_state_numbers(engine, optimizer, meta["numbers"])
    if outer is not None:
        outer.reset()
        for momentum, tensor in zip(outer.momenta, boxes("outer_momentum", maps["weights"]), strict=True):
            momentum.copy_(tensor)
    engine.publish()
    return dict(meta["position"])


def _read_meta(found: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the checked metadata of a received state; raises UserError. The sender is allowed, but not trusted."""
    try:
        meta = json.loads(found[META])
        lengths = {
            name: sum(int(np.prod(shape)) for shape in shapes.values()) for name, shapes in meta["shapes"].items()
        }
        lengths["outer_momentum"] = lengths["weights"]
        for name, data in found.items():
            size = 8 if name in meta["wide"] else 4
            if name != META and len(data) != size * lengths[name]:
                raise ValueError(f"{name} has {len(data):,} bytes")
        position = meta["position"]
        int(position["round"]), int(position["step"]), list(position["members"]), dict(meta["numbers"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise mistake("peers", f"another peer's state cannot be read: {error}", fix="join again") from error
    return dict(meta)


class StateServer:
    """Provides newcomers with a copy of the state.

    The training thread makes it between two steps, or the newcomer's thread while training waits for a round.
    """

    def __init__(self) -> None:
        self._copy: Callable[[], PeerState | None] = lambda: None
        self._lock = threading.Condition()
        self._is_frozen, self._is_wanted = False, False
        self._made: PeerState | None = None

    def serve(self, copy: Callable[[], PeerState | None]) -> None:
        """Set the function that makes copies."""
        self._copy = copy

    @property
    def is_wanted(self) -> bool:
        """True while a newcomer waits for a copy."""
        return self._is_wanted

    def provide(self) -> PeerState | None:
        """Return a copy for a newcomer, on a worker thread; None if training does not reach the end of a step."""
        with self._lock:
            self._is_wanted, self._made = True, None
            if not self._is_frozen:
                self._lock.wait_for(lambda: self._made is not None or self._is_frozen, timeout=PATIENCE_S)
            if self._made is None and self._is_frozen:
                self._made = self._copy()
            self._is_wanted = False
            return self._made

    @contextmanager
    def while_frozen(self) -> Iterator[bool]:
        """Wait until training waits for others, and hold it there; yields False if that does not happen in time."""
        with self._lock:
            yield self._lock.wait_for(lambda: self._is_frozen, timeout=FREEZE_S)

    def make_copy(self) -> None:
        """Make a copy between two steps; called on every rank of the peer."""
        state = self._copy()
        with self._lock:
            self._made = state
            self._lock.notify_all()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Mark that training waits for others and changes nothing, so that other threads may copy the state."""
        with self._lock:
            self._is_frozen = True
            self._lock.notify_all()
        try:
            yield
        finally:
            with self._lock:
                self._is_frozen = False
