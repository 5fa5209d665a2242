"""Connects model replicas that come and go within a membership; their inner process groups stay as they are.

The coordinator numbers the changes of who is present ("rounds"). In each round the ranks that hold the same shard
connect again and compare how many steps their replicas have done. A replica that is behind takes the state of one
that is furthest ahead: it was lost during the step, or was built anew. All ranks of a replica decide together whether
to learn from a step, so the parts of a replica are always at the same step.
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

NO_STATE = -1  # sent instead of the number of steps by a replica without a usable state
MOST_NUMBERS = 1 << 16  # bytes of the state's numbers that are not tensors, as JSON
Message = Mapping[str, Any]


class ReplicaRounds:
    """One rank's connection to the other model replicas in one membership.

    `wait(number)` blocks until the coordinator sends the round after `number`, and returns it.
    """

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
        """Connect to the replicas of the next round; return the steps that all of them have done now.

        Later rounds are entered until one connects completely. Every rank of the replica calls this together. Raises
        Interrupted if this replica is the one left out.
        """
        began_s = time.monotonic()
        while True:
            reached = self._enter_next(engine, step)
            newest, is_lost = self._vote_on_round(engine, is_lost=reached is None)
            # Other ranks of this replica are in a newer round.
            while newest > self._number:
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
                # One rank reports for the replica, all of whose ranks are connected.
                if self.across.position == 0:
                    self._confirm(round=self._number)
                return reached
            self._is_dirty = self._is_dirty or (reached is not None and reached != step)

    def are_all_here(self, engine: Engine, step: int) -> bool:
        """Return True if every replica of the round has reached `step`, so that none is left that needs another.

        All ranks of a replica get the same answer.
        """
        lost = torch.tensor([self.across.gather(torch.tensor([step])) is None], dtype=torch.int32, device=engine.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(lost, op=dist.ReduceOp.MAX)
        return not lost.item()

    def _enter_next(self, engine: Engine, step: int) -> int | None:
        """Connect in the next round; return the steps done, or None if a replica was lost meanwhile."""
        while True:
            message, self._first = self._first or self._wait(self._number), None
            present = [int(replica) for replica in message["present"]]
            if self.across.replica in present:
                self._number = int(message["round"])
                return self._meet_replicas(engine, step, message, present)
            if self._number >= 0:
                raise Interrupted
            # A round without this late replica: another one was lost while this one was built.

    def _vote_on_round(self, engine: Engine, *, is_lost: bool) -> tuple[int, bool]:
        """Return the newest round that any rank of this replica is in, and True if some rank lost a connection.

        Every rank of the replica calls this. A rank that is in the newest round repeats its vote until the others are
        there.
        """
        while True:
            # One maximum gives the newest round, the oldest (negated), and any loss.
            vote = torch.tensor([self._number, -self._number, int(is_lost)], device=engine.device)
            if dist.get_world_size() > 1:
                dist.all_reduce(vote, op=dist.ReduceOp.MAX)
            newest, oldest, lost = int(vote[0]), -int(vote[1]), bool(vote[2])
            if newest == oldest or self._number < newest:
                return newest, lost

    def _meet_replicas(self, engine: Engine, step: int, message: Message, present: list[int]) -> int | None:
        """Connect to the replicas of a round; return the steps done, or None if a replica was lost meanwhile."""
        host, port = message["store"]
        try:
            tcp_store = TCPStore(
                str(host),
                int(port),
                is_master=False,
                timeout=timedelta(seconds=self._timeout_s),
                wait_for_workers=False,
            )
            store = PrefixStore(f"{self._generation}", tcp_store)
            self.across.join(store, number=self._number, present=present, timeout_s=self._timeout_s)
        except (RuntimeError, OSError):
            self.across.leave()
            return None
        own_step = NO_STATE if self._is_dirty else step
        gathered = self.across.gather(torch.tensor([own_step]))
        if gathered is None:
            return None
        steps = {replica: int(value.item()) for replica, value in gathered.items()}
        newest = max(steps.values())
        if newest == NO_STATE:
            raise ConnectionError("connection to every replica that had a state was lost")
        if set(steps.values()) == {newest}:
            return newest
        source = min(replica for replica, value in steps.items() if value == newest)
        return newest if self._take_over(engine, source, is_behind=own_step != newest) else None

    def _take_over(self, engine: Engine, source: int, *, is_behind: bool) -> bool:
        """Copy the state of replica `source` to the replicas that are behind; return False if one was lost meanwhile.

        All ranks of the round call this.
        """
        self._is_dirty = self._is_dirty or is_behind
        text = json.dumps(state_numbers(engine)).encode()
        numbers = torch.zeros(MOST_NUMBERS, dtype=torch.uint8)
        numbers[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if not self.across.copy_from(source, [numbers]):
            return False
        # A replica that is not behind has the same bits already, and receives into copies.
        optimizer = engine.optimizer.state()
        tensors = [shard.tensor for shard in (*engine.weights(), *optimizer)]
        if not self.across.copy_from(source, tensors if is_behind else [tensor.clone() for tensor in tensors]):
            return False
        if is_behind:
            take_state_numbers(engine, optimizer, json.loads(numbers.numpy().tobytes().rstrip(b"\0")))
            engine.publish()
        return True
