"""Model replicas that come and go within a membership: the others keep their groups, and this follows who is present.

The coordinator numbers the changes ("rounds"). At each of them the ranks that hold the same shard connect anew, compare
how many steps their replicas have done, and whoever is behind takes the state of a replica that is furthest ahead: one
that was lost in the step and missed its end, or one that was built anew. The decision to learn from a step is taken by
a replica as a whole, so a replica is never ahead in parts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from phalanx.elastic.rank_link import Interrupted
from phalanx.train.engine import Engine
from phalanx.train.parallel.across_replicas import AcrossReplicas
from phalanx.train.state.training_state import state_numbers, take_state_numbers

NO_STATE = -1  # in place of the number of steps: nothing that others could go on from
MOST_NUMBERS = 1 << 16  # bytes of the numbers beside tensors
Message = Mapping[str, Any]


class ReplicaRounds:
    """Of one rank in one membership. `wait` gives the next round after a number, and waits for it."""

    def __init__(
        self,
        across: AcrossReplicas,
        *,
        generation: int,
        first: Message | None,
        wait: Callable[[int], Message],
        is_due: Callable[[], bool],
        timeout_s: float,
        tell: Callable[..., object] = lambda **fields: None,
        confirm: Callable[..., object] = lambda **fields: None,
    ) -> None:
        self.across = across
        self._generation, self._first, self._wait, self._timeout_s = generation, first, wait, timeout_s
        self.is_due, self._tell, self._confirm = is_due, tell, confirm
        self._number = -1
        self._is_dirty = first is None  # a replica that joins late has nothing yet

    def regroup(self, engine: Engine, step: int) -> int:
        """Connect to the replicas of the next round, once or until it holds; the steps that all of them have done now.

        Every rank of the replica calls this together. Raises Interrupted where this replica is the one left out.
        """
        began_s = time.monotonic()
        while True:
            reached = self._enter_next(engine, step)
            newest, is_lost = self._vote_on_round(engine, is_lost=reached is None)
            while newest > self._number:  # others of this replica have heard more than we
                reached = self._enter_next(engine, step)
                newest, is_lost = self._vote_on_round(engine, is_lost=reached is None)
            if reached is not None and not is_lost:
                self._is_dirty = False
                self._tell(
                    step=reached,
                    round=self._number,
                    present=self.across.present,
                    behind=reached != step,
                    seconds=time.monotonic() - began_s,
                )
                if self.across.position == 0:  # one speaks for the replica: all of its ranks are connected
                    self._confirm(round=self._number)
                return reached
            self._is_dirty = self._is_dirty or (reached is not None and reached != step)

    def are_all_here(self, engine: Engine, step: int) -> bool:
        """Whether all replicas of the round came as far as `step`, so that none is left behind that needs another.

        All ranks of a replica get the same answer.
        """
        lost = torch.tensor([self.across.gather(torch.tensor([step])) is None], dtype=torch.int32, device=engine.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(lost, op=dist.ReduceOp.MAX)
        return not lost.item()

    def _enter_next(self, engine: Engine, step: int) -> int | None:
        """Connect in the next round; the steps that are done, or None where somebody was lost meanwhile."""
        while True:
            message, self._first = self._first or self._wait(self._number), None
            present = [int(replica) for replica in message["present"]]
            if self.across.replica in present:
                self._number = int(message["round"])
                return self._meet_replicas(engine, step, message, present)
            if self._number >= 0:
                raise Interrupted
            # Not yet one of them: others were lost while we were built.

    def _vote_on_round(self, engine: Engine, *, is_lost: bool) -> tuple[int, bool]:
        """In step with the others of this replica: the newest round that one is in, and whether all are connected.

        Whoever is in the newest already says the same again until the others are there.
        """
        while True:
            mine = torch.tensor([self._number, -self._number, int(is_lost)], device=engine.device)
            if dist.get_world_size() > 1:
                dist.all_reduce(mine, op=dist.ReduceOp.MAX)
            newest, oldest, lost = int(mine[0]), -int(mine[1]), bool(mine[2])
            if newest == oldest or self._number < newest:
                return newest, lost

    def _meet_replicas(self, engine: Engine, step: int, message: Message, present: list[int]) -> int | None:
        host, port = message["store"]
        try:
            place = TCPStore(
                str(host),
                int(port),
                is_master=False,
                timeout=timedelta(seconds=self._timeout_s),
                wait_for_workers=False,
            )
            store = PrefixStore(f"{self._generation}", place)
            self.across.join(store, number=self._number, present=present, timeout_s=self._timeout_s)
        except (RuntimeError, OSError):
            self.across.leave()
            return None
        own = NO_STATE if self._is_dirty else step
        told = self.across.gather(torch.tensor([own]))
        if told is None:
            return None
        steps = {replica: int(one.item()) for replica, one in told.items()}
        newest = max(steps.values())
        if newest == NO_STATE:
            raise ConnectionError("connection to every replica that had a state was lost")
        if set(steps.values()) == {newest}:
            return newest
        source = min(replica for replica, one in steps.items() if one == newest)
        return newest if self._take_over(engine, source, is_behind=own != newest) else None

    def _take_over(self, engine: Engine, source: int, *, is_behind: bool) -> bool:
        """Those that are behind take the state of `source`; all ranks of the round call this."""
        self._is_dirty = self._is_dirty or is_behind
        text = json.dumps(state_numbers(engine)).encode()
        numbers = torch.zeros(MOST_NUMBERS, dtype=torch.uint8)
        numbers[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if not self.across.copy_from(source, [numbers]):
            return False
        # Of a replica that is not behind these are the same bits already.
        optimizer = engine.optimizer.state()
        tensors = [shard.tensor for shard in (*engine.weights(), *optimizer)]
        if not self.across.copy_from(source, tensors if is_behind else [one.clone() for one in tensors]):
            return False
        if is_behind:
            take_state_numbers(engine, optimizer, json.loads(numbers.numpy().tobytes().rstrip(b"\0")))
            engine.publish()
        return True
