"""The state of a peer for newcomers: weights, optimizer, outer momentum and position, as whole vectors.

A newcomer may have another layout than the peer it takes the state from, so nothing of a layout is in it.
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
MOST_META_BYTES = 64 * 2**20  # names and shapes of a hundred thousand tensors take a tenth of it
WIDEST_BYTES = 8  # of a value: peers may keep theirs in fp32 or fp64
FREEZE_S = 5.0  # between the begin of a round and training's wait for it: no more than a thread's start
PATIENCE_S = 120.0  # that the group's thread waits for training to reach the end of a step


def copy_state(
    engine: Engine, outer: OuterOptimizer | None, position: Mapping[str, Any], *, is_shared: bool
) -> PeerState | None:
    """The state as of `position`, on rank 0; every rank of the peer calls this.

    `is_shared`: the weights are those of all peers; else the outer optimizer has them.
    """
    optimizer = engine.optimizer.state()
    maps = {"weights": VectorMap(engine.shards), "optimizer": VectorMap(optimizer)}
    weights = outer.weights if outer is not None and not is_shared else [one.tensor for one in engine.shards]
    vectors = {
        "weights": maps["weights"].gather(weights),
        "optimizer": maps["optimizer"].gather([one.tensor for one in optimizer]),
    }
    if outer is not None:
        vectors["outer_momentum"] = maps["weights"].gather(outer.momenta)
    if vectors["weights"] is None:
        return None
    meta = {
        "position": dict(position),
        "numbers": state_numbers(engine),
        "shapes": {name: one.description for name, one in maps.items()},
        "wide": [name for name, one in vectors.items() if one is not None and one.dtype == np.float64],
    }
    tensors = {name: one.tobytes() for name, one in vectors.items() if one is not None}
    tensors[META] = json.dumps(meta).encode()
    return PeerState(round_number=int(position["round"]) - 1, tensors=tensors)


def most_state_bytes(engine: Engine, outer: OuterOptimizer | None) -> dict[str, int]:
    """Bytes that each tensor of another peer's state can have. Every rank of the peer calls this."""
    lengths = {"weights": VectorMap(engine.shards).length, "optimizer": VectorMap(engine.optimizer.state()).length}
    if outer is not None:
        lengths["outer_momentum"] = lengths["weights"]
    return {name: WIDEST_BYTES * length for name, length in lengths.items()} | {META: MOST_META_BYTES}


@torch.no_grad()
def take_state(engine: Engine, outer: OuterOptimizer | None, found: Mapping[str, bytes]) -> dict[str, Any]:
    """Go on from the state that rank 0 has of another peer; its position. Every rank of the peer calls this."""
    meta = spread_object(_read_meta(found) if found else None)
    optimizer = engine.optimizer.state()
    maps = {"weights": VectorMap(engine.shards), "optimizer": VectorMap(optimizer)}
    for name, one in maps.items():
        if meta["shapes"].get(name) != one.description:
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
    """Of a stranger's bytes, although of one whom the run's owner allowed."""
    try:
        meta = json.loads(found[META])
        lengths = {name: sum(int(np.prod(one)) for one in shapes.values()) for name, shapes in meta["shapes"].items()}
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
    """Hands newcomers a copy: made by the training thread between two steps, or by theirs while training waits."""

    def __init__(self) -> None:
        self._copy: Callable[[], PeerState | None] = lambda: None
        self._lock = threading.Condition()
        self._is_frozen, self._is_wanted = False, False
        self._made: PeerState | None = None

    def serve(self, copy: Callable[[], PeerState | None]) -> None:
        """From now on copies can be made by `copy`."""
        self._copy = copy

    @property
    def is_wanted(self) -> bool:
        """Whether a newcomer waits for a copy."""
        return self._is_wanted

    def provide(self) -> PeerState | None:
        """For the group, on a thread of its own; None where training does not come to the end of a step."""
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
        """Whether training waits for others, or soon does; it goes on only when this ends."""
        with self._lock:
            yield self._lock.wait_for(lambda: self._is_frozen, timeout=FREEZE_S)

    def make_copy(self) -> None:
        """Between two steps, on every rank of the peer alike."""
        made = self._copy()
        with self._lock:
            self._made = made
            self._lock.notify_all()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """While training waits for others, and changes nothing."""
        with self._lock:
            self._is_frozen = True
            self._lock.notify_all()
        try:
            yield
        finally:
            with self._lock:
                self._is_frozen = False
