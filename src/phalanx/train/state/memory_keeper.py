"""The keeper: puts this rank's state into the vault after a step, and has a second copy kept by another host."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from phalanx.elastic.replica_store import (
    GENERATIONS,
    MemorySegment,
    NeededReplicas,
    ReplicaStore,
    next_free_buffer,
    next_sequence_number,
)
from phalanx.record.provenance import redact
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.state.in_memory import JobThread, ReplicaAddress, ReplicaSender
from phalanx.train.state.snapshot import SnapshotDraft, seal_snapshot, take_snapshot

CLOSE_S = 3.0  # the longest wait for a copy on its way to a host that may be dead


class InMemoryCheckpointer:
    """One rank in one epoch. All ranks put the same steps, in the same order, with the same `held`.

    `restored` is the (epoch, step) in memory that this epoch began from; it is kept until all ranks hold a newer step.
    `check` is asked when a copy is taken and does not count yet: it raises where the copy is not to count, because a
    collective that it waited for was cut short.
    """

    def __init__(
        self,
        vault: ReplicaStore,
        *,
        slot: int,
        rank: int,
        world: int,
        epoch: int,
        secret: bytes,
        buddy: ReplicaAddress | None,
        restored: tuple[int, int] | None = None,
        address: str = "",
        tell: Callable[..., object] = lambda **fields: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._rank, self._world, self._epoch, self._restored = rank, world, epoch, restored
        self._segments = vault.generations("own", slot)
        self._sequence = next_sequence_number(self._segments)
        self._kept = [] if restored is None else [restored[1]]  # steps that may be needed, the same on all ranks
        self._busy: dict[int, int] = {}  # generation by step, until it counts here and with the buddy
        self._safe = -1
        self._sealer = JobThread("vault-seal")
        hello = {"role": "vault", "rank": rank, "epoch": epoch}
        self._replica = ReplicaSender(buddy, secret=secret, hello=hello, bind=address) if buddy is not None else None
        self._sender = JobThread("vault-send")
        self.skipped = 0
        self._tell, self._told, self._check = tell, ("", False), check

    @property
    def safe_step(self) -> int:
        """The newest step that is complete here and with the buddy, if there is one; -1 while there is none."""
        return self._safe

    @property
    def trouble(self) -> str:
        """Why the buddy does not have the newest snapshot; empty when all is well."""
        return self._replica.trouble if self._replica is not None else ""

    def reserve(self, pieces: Sequence[TensorShard]) -> None:
        """Take the memory of two generations now, so that the first snapshots block no longer than the others."""
        taken: list[int] = []
        while len(taken) < 2 and (generation := self._free(-1, busy=taken)) is not None:
            self._take(generation, pieces, {}, {})
            taken.append(generation)

    def put(
        self,
        step: int,
        pieces: Sequence[TensorShard],
        meta: Mapping[str, Any],
        *,
        held: int,
        rank_meta: Mapping[str, Any] | None = None,
    ) -> float:
        """Copy the state after `step` steps and go on; returns the seconds the caller was held up.

        `held` is the smallest `safe_step` of all ranks, as they last agreed. While it is three snapshots behind (a
        buddy that does not answer, say) nothing is put and `skipped` counts, on all ranks alike.
        """
        began_s = time.monotonic()
        self._kept = [kept for kept in self._kept if kept >= held]
        is_full = len(self._kept) == GENERATIONS
        self.skipped += is_full
        self._tell_changes(step, is_skipped=is_full)
        if is_full:
            return time.monotonic() - began_s
        generation = self._free(held, busy=tuple(self._busy.values()))
        assert generation is not None, f"{len(self._kept)} snapshots are needed and {GENERATIONS} fit"
        draft = self._take(generation, pieces, meta, rank_meta or {})
        self._check()
        self._kept.append(step)
        self._busy[step] = generation
        self._sequence += 1
        self._sealer.do(partial(self._seal, draft, step, self._sequence, held))
        return time.monotonic() - began_s

    def _tell_changes(self, step: int, *, is_skipped: bool) -> None:
        """When copies begin to fail or to be left out, and when they are well again; not at every step between."""
        now = (self.trouble, is_skipped)
        if now != self._told:
            self._told = now
            trouble = redact(now[0], os.environ)  # the text of a library, or of another host
            self._tell(step=step, trouble=trouble, is_skipped=is_skipped, skipped=self.skipped)

    def _free(self, held: int, *, busy: Collection[int]) -> int | None:
        needs = NeededReplicas(epoch=self._epoch, restored=self._restored, held=held)
        return next_free_buffer(self._segments, needs, busy=busy)

    def _take(
        self, generation: int, pieces: Sequence[TensorShard], meta: Mapping[str, Any], rank_meta: Mapping[str, Any]
    ) -> SnapshotDraft:
        return take_snapshot(self._segments[generation], pieces, rank=self._rank, meta=meta, rank_meta=rank_meta)

    def _seal(self, draft: SnapshotDraft, step: int, sequence: int, held: int) -> None:
        seal_snapshot(draft, sequence=sequence, rank=self._rank, world=self._world, epoch=self._epoch, step=step)
        if self._replica is None:
            self._done(step)
        else:
            self._sender.do(partial(self._send, self._replica, draft.segment, step, held))

    def _send(self, replica: ReplicaSender, segment: MemorySegment, step: int, held: int) -> None:
        needs = NeededReplicas(epoch=self._epoch, restored=self._restored, held=held)
        if replica.send(segment, needs):
            self._done(step)

    def _done(self, step: int) -> None:
        self._safe = step
        self._busy.pop(step, None)

    def close(self) -> None:
        """End of the epoch: what is copied is completed here; a copy on its way to the buddy is given up."""
        self._sealer.close()  # local work, as long as summing up takes; the next epoch must find nobody writing
        if self._replica is not None:
            self._replica.interrupt()
        if self._sender.close(CLOSE_S) and self._replica is not None:
            self._replica.hang_up()
