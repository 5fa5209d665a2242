"""Compares copies of the state across the job, and memory that must not change with its earlier content.

Every `every` steps each rank digests what it holds, in sets of boxes that the same ranks hold, and all ranks exchange
16 bytes per set. No process group is made for this: ranks of the same set find each other by the digest of its boxes.
State that no other rank holds (a shard of ZeRO) is compared with itself, in every step: before an update it must be
what the last update left (`memory_sums`). An error inside an update of such a shard is detected by neither.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from phalanx.train.guard.divergence_verdict import DigestClaim, Divergence, judge_claims
from phalanx.train.guard.memory_sums import MemorySums
from phalanx.train.parallel.tensor_shard import TensorShard

HOST = torch.device("cpu")
# Bytes of a digest on the wire: two of 2^20 sets would have the same by chance once in 2^24 jobs.
SHORT = 8
TEXT = 512  # bytes of the message with the names of tensors
MOST_NAMES = 4


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShardSet:
    """Shards of this rank that the same ranks hold, with the digest of their names and places."""

    shards: tuple[TensorShard, ...]
    boxes: bytes
    moves: bool  # True if forward may change them: then they are compared with other ranks' copies only

    @property
    def replicas(self) -> int:
        """Number of ranks that hold these shards."""
        return self.shards[0].replicas

    def digest(self) -> bytes:
        """Return the digest of the shards' bytes."""
        hasher = hashlib.blake2b(digest_size=SHORT, usedforsecurity=False)
        for words in fold_shards(self.shards):
            hasher.update(words.tobytes())
        return hasher.digest()


def shard_sets(shards: Sequence[TensorShard]) -> list[ShardSet]:
    """Group the shards by the ranks that hold them: cut by the same groups, with as many copies.

    Buffers that forward may change are separate sets.
    """
    sets: dict[tuple[frozenset[int], int, bool], list[TensorShard]] = {}
    for shard in shards:
        cut_by = frozenset(id(group) for groups in shard.groups.values() for group in groups)
        sets.setdefault((cut_by, shard.replicas, shard.moves), []).append(shard)
    return [
        ShardSet(shards=tuple(members), boxes=_short_digest(b"".join(map(shard_place, members))), moves=moves)
        for (_, _, moves), members in sets.items()
    ]


class ReplicaGuard:
    """One rank's part in the comparison; made anew for every membership, since it remembers this rank's storage.

    Call `check` after every update and `compare_memory` before the next; if some rank's memory changed,
    `name_changed`. Without `each_step` memory is compared only after steps in which copies are compared: for state
    that code other than the optimizer may change.
    """

    def __init__(
        self,
        shards: Callable[[], Sequence[TensorShard]],
        *,
        every: int,
        each_step: bool = False,
        at_rest: Callable[[], Sequence[TensorShard]] | None = None,
        device: torch.device = HOST,
    ) -> None:
        self._shards, self._every, self._each_step = shards, every, each_step
        self._at_rest = at_rest or (lambda: [shard for shard in shards() if not shard.moves])
        self._sums = MemorySums(device)  # sums of the `at_rest` shards after the last update
        # Largest number of sets on any rank; negative until the ranks have agreed on it.
        self._most_sets = -1
        # Digests at the last check without a difference, by boxes; for `settle_divergence`.
        self.last: dict[str, str] = {}

    @property
    def is_on(self) -> bool:
        """True if anything is compared at all."""
        return self._every > 0

    def is_due(self, step: int) -> bool:
        """Return True if `check` compares after this many steps; the same on every rank."""
        return self._every > 0 and step % self._every == 0

    @property
    def remembers(self) -> bool:
        """True if `compare_memory` has sums to compare with."""
        return self._sums.is_known

    def forget(self) -> None:
        """Drop the sums: the state was taken over from elsewhere since the last update."""
        self._sums.forget()

    def compare_memory(self) -> torch.Tensor:
        """Return 1 if this rank's memory changed since the last update, else 0, as a tensor on the device.

        Called before an update.
        """
        return self._sums.compare()

    def name_changed(self, step: int) -> Divergence:
        """Return the ranks whose memory changed, and which tensors; every rank must call this together."""
        changed = self._sums.changed()
        rows = _gather_tensors(torch.tensor([len(changed), changed[0][1] if changed else 0]))
        counts = {rank: int(row[1]) for rank, row in enumerate(rows) if row[0]}
        names = [name for name, _ in changed[:MOST_NAMES]]
        return Divergence(
            step=step,
            kind="rest",
            suspects=tuple(counts),
            # Memory does not fail on every rank at once: then code other than the optimizer wrote to it.
            certain=0 < len(counts) < max(2, len(rows)),
            boxes="",
            digests={rank: f"{total % 2**64:016x}" for rank, total in counts.items()},
            tensors=_broadcast_names(names, source=min(counts, default=0)),
        )

    def check(self, step: int, *, is_saved: bool = False) -> Divergence | None:
        """Compare copies after an update, before anything keeps its result; return the divergence or None.

        Every rank must call this, and gets the same result. A state that is about to be saved (`is_saved`) is
        compared even if the step is not due.
        """
        self._sums.forget()
        is_compared = self.is_due(step) or (is_saved and self.is_on)
        if is_compared or (self._each_step and self.is_on):
            self._sums.remember(self._at_rest(), offloaded=is_compared)
        if not is_compared:
            return None
        sets = shard_sets(self._shards())
        claims = self._exchange_digests(sets, {shard_set.boxes: shard_set.digest() for shard_set in sets})
        divergence = judge_claims(step, claims)
        if divergence is not None:
            return replace(divergence, tensors=_name_tensors(divergence, sets, claims))
        self.last = {claim.boxes: claim.digest for claim in claims}
        return None

    def _exchange_digests(self, sets: Sequence[ShardSet], digests: Mapping[bytes, bytes]) -> list[DigestClaim]:
        """Return the claims of all ranks on sets that have copies."""
        copied = [shard_set for shard_set in sets if shard_set.replicas > 1]
        if self._most_sets < 0:
            most_sets = torch.tensor([len(copied)])
            if _world_size() > 1:
                dist.all_reduce(most_sets, op=dist.ReduceOp.MAX)
            self._most_sets = int(most_sets.item())
        if not self._most_sets:
            return []
        own_rows = torch.zeros(self._most_sets, 3, dtype=torch.int64)
        for row, shard_set in zip(own_rows, copied, strict=False):
            row[:] = torch.tensor(
                [_digest_number(shard_set.boxes), _digest_number(digests[shard_set.boxes]), len(shard_set.shards)]
            )
        return [
            DigestClaim(
                rank=rank, boxes=_number_digest(boxes).hex(), digest=_number_digest(digest).hex(), tensors=count
            )
            for rank, rows in enumerate(_gather_tensors(own_rows))
            for boxes, digest, count in rows.tolist()
            if count
        ]


def _name_tensors(found: Divergence, sets: Sequence[ShardSet], claims: Sequence[DigestClaim]) -> tuple[str, ...]:
    """Return the names of the tensors that differ in a set.

    Its holders exchange a digest of each tensor; one of them sends the names to all ranks.
    """
    count = next(claim.tensors for claim in claims if claim.boxes == found.boxes)
    shards = next((shard_set.shards for shard_set in sets if shard_set.boxes.hex() == found.boxes), ())
    own_digests = torch.zeros(count, dtype=torch.int64)
    for index, words in enumerate(fold_shards(shards)):
        own_digests[index] = _digest_number(_short_digest(words.tobytes()))
    all_digests = _gather_tensors(own_digests)
    differing = []
    for index, shard in enumerate(shards):
        if len({int(all_digests[rank][index]) for rank in found.digests}) > 1:
            differing.append(shard.name)
    return _broadcast_names(differing[:MOST_NAMES], source=min(found.digests))


def _broadcast_names(names: Sequence[str], *, source: int) -> tuple[str, ...]:
    """Return the names that rank `source` passes, on every rank."""
    text = "\n".join(names).encode()[:TEXT]
    sent = torch.zeros(TEXT, dtype=torch.uint8)
    sent[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    if _world_size() > 1:
        dist.broadcast(sent, src=source)
    reported = sent.numpy().tobytes().rstrip(b"\0").decode(errors="replace")
    return tuple(reported.split("\n")) if reported else ()


def _gather_tensors(mine: torch.Tensor) -> list[torch.Tensor]:
    """Return every rank's tensor. In host memory: a job on GPUs has a gloo group in addition to NCCL."""
    if _world_size() == 1:
        return [mine]
    tensors = [torch.empty_like(mine) for _ in range(_world_size())]
    dist.all_gather(tensors, mine)
    return tensors


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _short_digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=SHORT, usedforsecurity=False).digest()


def _digest_number(short: bytes) -> int:
    return int.from_bytes(short, "little", signed=True)


def _number_digest(number: int) -> bytes:
    return number.to_bytes(SHORT, "little", signed=True)


# Digests of what a rank holds, computed where the tensors are: a GPU sends 8 bytes to the host for every 16 KiB.
#
# Rows of 4,096 words of 32 bits are folded to one number each, Σ w·x modulo 2^64 with fixed odd w of 64 bits
# (multilinear hashing): whole numbers, so every device gives the same. The digest is blake2b over those, names and
# places. A change inside one word always changes its row's number; changes of several words cancel with a probability
# of about 2^-32. So this finds accidents; it does not resist a deliberate collision. One core digests 2.6 GB/s, with
# sha256 0.7 GB/s.


Words = NDArray[np.int64]
ROW = 4096  # words of a row
WORD = 4  # bytes
# Rows at a time: the temporary memory fits a core's cache, or takes 128 MiB of a GPU.
PASS = {"cpu": 16, "cuda": 4096}


def digest_shards(shards: Sequence[TensorShard]) -> str:
    """Return 128 bits in hex: the digest of the shards' names, places and bytes, in their order."""
    hasher = hashlib.blake2b(digest_size=16, usedforsecurity=False)
    for shard in shards:
        hasher.update(shard_place(shard))
    for words in fold_shards(shards):
        hasher.update(words.tobytes())
    return hasher.hexdigest()


def shard_place(shard: TensorShard) -> bytes:
    """Return the shard's name, shape, place and dtype as bytes for a digest."""
    return f"{shard.name} {shard.shape} {shard.start} {tuple(shard.tensor.shape)} {shard.tensor.dtype}\n".encode()


def fold_shards(shards: Sequence[TensorShard]) -> list[Words]:
    """Return the folded rows of every shard, in host memory; each device is waited for once."""
    folded = [fold_tensor(shard.tensor) for shard in shards]
    rows: list[Words] = [np.empty(0, np.int64)] * len(shards)
    for device in {words.device for words in folded}:
        indices = [index for index, words in enumerate(folded) if words.device == device]
        joined = torch.cat([folded[index] for index in indices]).cpu().numpy()
        ends = np.cumsum([len(folded[index]) for index in indices])
        for index, words in zip(indices, np.split(joined, ends[:-1]), strict=True):
            rows[index] = words
    return rows


@torch.no_grad()
def fold_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return one number for each row of the tensor's bytes, on its device."""
    weights = _digest_weights(tensor.device)
    return torch.cat([_fold_rows(words, weights) for words in _tensor_words(tensor)])


def _tensor_words(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bytes as 32-bit words, some rows at a time; the last word is filled up with zeros."""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    for chunk in raw.split(ROW * WORD * PASS.get(tensor.device.type, 16)):
        if len(chunk) % WORD:
            chunk = torch.nn.functional.pad(chunk, (0, -len(chunk) % WORD))
        elif chunk.storage_offset() % WORD:
            # A shard of 16-bit values may begin in the middle of a word.
            chunk = chunk.clone()
        yield chunk.view(torch.int32)


def _fold_rows(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return one number for each row of words, and one for an incomplete last row."""
    whole_words = len(words) // ROW * ROW
    folded = (words[:whole_words].view(-1, ROW) * weights).sum(dim=1)
    rest = words[whole_words:]
    return torch.cat([folded, (rest * weights[: len(rest)]).sum().view(1)]) if len(rest) else folded


@cache
def _digest_weights(device: torch.device) -> torch.Tensor:
    """Return fixed odd 64-bit numbers by splitmix64 (Steele, Lea, Flood 2014).

    Any fixed numbers without a pattern would do.
    """
    word = np.arange(1, ROW + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((word ^ (word >> np.uint64(31))) | np.uint64(1)).view(np.int64)).to(device)
