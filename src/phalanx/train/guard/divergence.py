"""Copies that must be equal, compared across the job; memory that must not change, compared with itself.

Every `every` steps each rank digests what it holds, in sets of boxes that the same ranks hold, and all ranks exchange
16 bytes a set: no group is made for it, and ranks of the same set find each other by the digest of its boxes. What no
other rank holds (a shard of ZeRO) is compared with itself, in every step: before an update it must be what the last one
left (`memory_sums`). An error inside an update of such a shard shows in neither.
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
SHORT = 8  # bytes of a digest on the wire: two of 2^20 sets would be alike by chance once in 2^24 jobs
TEXT = 512  # bytes that tell the names of tensors
MOST_NAMES = 4


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShardSet:
    """Shards of this rank that the same ranks hold, with the digest of which boxes they are."""

    shards: tuple[TensorShard, ...]
    boxes: bytes
    moves: bool  # forward may change them: they are compared with other ranks' only

    @property
    def replicas(self) -> int:
        """Ranks that hold them."""
        return self.shards[0].replicas

    def digest(self) -> bytes:
        """Of their bytes."""
        found = hashlib.blake2b(digest_size=SHORT, usedforsecurity=False)
        for words in fold_shards(self.shards):
            found.update(words.tobytes())
        return found.digest()


def shard_sets(shards: Sequence[TensorShard]) -> list[ShardSet]:
    """The shards by who holds them: those cut by the same groups, with as many copies; buffers that move apart."""
    held: dict[tuple[frozenset[int], int, bool], list[TensorShard]] = {}
    for shard in shards:
        cut_by = frozenset(id(group) for groups in shard.groups.values() for group in groups)
        held.setdefault((cut_by, shard.replicas, shard.moves), []).append(shard)
    return [
        ShardSet(shards=tuple(some), boxes=_short_digest(b"".join(map(shard_place, some))), moves=moves)
        for (_, _, moves), some in held.items()
    ]


class ReplicaGuard:
    """One rank's part in the comparison. Made anew for every membership: what it remembers is of its own storage.

    `check` after every update; `compare_memory` before the next, and where some rank found a change, `name_changed`.
    `each_step` is not for state that others than the optimizer may change: then the steps that are compared alone.
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
        self._sums = MemorySums(device)  # of what `at_rest` gives, after the last update that was looked at
        self._most_sets = -1  # of any rank; not yet agreed on
        self.last: dict[str, str] = {}  # what the most holders of each set said at the last check, for `settle`

    @property
    def is_on(self) -> bool:
        """Whether anything is compared at all."""
        return self._every > 0

    def is_due(self, step: int) -> bool:
        """Whether `check` compares after so many steps; the same on every rank."""
        return self._every > 0 and step % self._every == 0

    @property
    def remembers(self) -> bool:
        """Whether `compare_memory` has something to compare with."""
        return self._sums.is_known

    def forget(self) -> None:
        """The state is no longer what the last update left here: it was taken over from elsewhere."""
        self._sums.forget()

    def compare_memory(self) -> torch.Tensor:
        """Before an update: 1 where this rank's memory is not as the last update left it, else 0, on the device."""
        return self._sums.compare()

    def name_changed(self, step: int) -> Divergence:
        """Whose memory changed, and which tensors. Every rank must call this, and gets the same."""
        changed = self._sums.changed()
        rows = _gather_tensors(torch.tensor([len(changed), changed[0][1] if changed else 0]))
        counts = {rank: int(row[1]) for rank, row in enumerate(rows) if row[0]}
        names = [name for name, _ in changed[:MOST_NAMES]]
        return Divergence(
            step=step,
            kind="rest",
            suspects=tuple(counts),
            certain=0 < len(counts) < max(2, len(rows)),  # memory does not fail on every rank at once: code does it
            boxes="",
            digests={rank: f"{total % 2**64:016x}" for rank, total in counts.items()},
            tensors=_broadcast_names(names, source=min(counts, default=0)),
        )

    def check(self, step: int, *, is_saved: bool = False) -> Divergence | None:
        """After an update, before anything keeps its result: compare copies. Every rank must call this, and gets
        the same. A state that is about to be saved (`is_saved`) is compared whether it is due or not."""
        self._sums.forget()
        is_compared = self.is_due(step) or (is_saved and self.is_on)
        if is_compared or (self._each_step and self.is_on):
            self._sums.remember(self._at_rest(), offloaded=is_compared)
        if not is_compared:
            return None
        sets = shard_sets(self._shards())
        claims = self._exchange_digests(sets, {one.boxes: one.digest() for one in sets})
        found = judge_claims(step, claims)
        if found is not None:
            return replace(found, tensors=_name_tensors(found, sets, claims))
        self.last = {claim.boxes: claim.digest for claim in claims}
        return None

    def _exchange_digests(self, sets: Sequence[ShardSet], digests: Mapping[bytes, bytes]) -> list[DigestClaim]:
        """The claims of all ranks on sets that have copies."""
        copied = [one for one in sets if one.replicas > 1]
        if self._most_sets < 0:
            found = torch.tensor([len(copied)])
            if _world_size() > 1:
                dist.all_reduce(found, op=dist.ReduceOp.MAX)
            self._most_sets = int(found.item())
        if not self._most_sets:
            return []
        mine = torch.zeros(self._most_sets, 3, dtype=torch.int64)
        for row, one in zip(mine, copied, strict=False):
            row[:] = torch.tensor([_digest_number(one.boxes), _digest_number(digests[one.boxes]), len(one.shards)])
        return [
            DigestClaim(
                rank=rank, boxes=_number_digest(boxes).hex(), digest=_number_digest(digest).hex(), tensors=count
            )
            for rank, rows in enumerate(_gather_tensors(mine))
            for boxes, digest, count in rows.tolist()
            if count
        ]


def _name_tensors(found: Divergence, sets: Sequence[ShardSet], claims: Sequence[DigestClaim]) -> tuple[str, ...]:
    """Which tensors of a set differ: its holders exchange a digest of each, one of them tells all ranks the names."""
    count = next(claim.tensors for claim in claims if claim.boxes == found.boxes)
    held = next((one.shards for one in sets if one.boxes.hex() == found.boxes), ())
    mine = torch.zeros(count, dtype=torch.int64)
    for index, words in enumerate(fold_shards(held)):
        mine[index] = _digest_number(_short_digest(words.tobytes()))
    everyone = _gather_tensors(mine)
    differing = []
    for index, shard in enumerate(held):
        if len({int(everyone[rank][index]) for rank in found.digests}) > 1:
            differing.append(shard.name)
    return _broadcast_names(differing[:MOST_NAMES], source=min(found.digests))


def _broadcast_names(names: Sequence[str], *, source: int) -> tuple[str, ...]:
    """One rank's few names, on every rank."""
    text = "\n".join(names).encode()[:TEXT]
    sent = torch.zeros(TEXT, dtype=torch.uint8)
    sent[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else 0
    if _world_size() > 1:
        dist.broadcast(sent, src=source)
    reported = sent.numpy().tobytes().rstrip(b"\0").decode(errors="replace")
    return tuple(reported.split("\n")) if reported else ()


def _gather_tensors(mine: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's tensor. In host memory: a job on GPUs has a gloo group beside NCCL."""
    if _world_size() == 1:
        return [mine]
    everyone = [torch.empty_like(mine) for _ in range(_world_size())]
    dist.all_gather(everyone, mine)
    return everyone


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _short_digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=SHORT, usedforsecurity=False).digest()


def _digest_number(short: bytes) -> int:
    return int.from_bytes(short, "little", signed=True)


def _number_digest(number: int) -> bytes:
    return number.to_bytes(SHORT, "little", signed=True)


# A digest of what a rank holds, made where the tensors are: a GPU sends 8 bytes to the host for every 16 KiB.
#
# Rows of 4,096 words of 32 bits are folded to one number each, Σ w·x modulo 2^64 with fixed odd w of 64 bits
# (multilinear hashing): whole numbers, so every device gives the same. blake2b over those, names and places makes the
# digest. A change inside one word always changes its row's number; changes of several cancel with a chance of about
# 2^-32. So this finds accidents; it is no proof against somebody who wants a collision. On one core 2.6 GB/s where
# sha256 gave 0.7.


Words = NDArray[np.int64]
ROW = 4096  # words of a row
WORD = 4  # bytes
PASS = {"cpu": 16, "cuda": 4096}  # rows at a time: what they need besides fits a core's cache, or is 128 MiB of a GPU


def digest_shards(shards: Sequence[TensorShard]) -> str:
    """128 bits in hex of the shards' names, places and bytes, in their order."""
    found = hashlib.blake2b(digest_size=16, usedforsecurity=False)
    for shard in shards:
        found.update(shard_place(shard))
    for words in fold_shards(shards):
        found.update(words.tobytes())
    return found.hexdigest()


def shard_place(shard: TensorShard) -> bytes:
    """Which box of which tensor a shard is, and how its values are written."""
    return f"{shard.name} {shard.shape} {shard.start} {tuple(shard.tensor.shape)} {shard.tensor.dtype}\n".encode()


def fold_shards(shards: Sequence[TensorShard]) -> list[Words]:
    """The folded rows of every shard; each device is waited for once."""
    folded = [fold_tensor(shard.tensor) for shard in shards]
    found: list[Words] = [np.empty(0, np.int64)] * len(shards)
    for device in {words.device for words in folded}:
        mine = [index for index, words in enumerate(folded) if words.device == device]
        together = torch.cat([folded[index] for index in mine]).cpu().numpy()
        ends = np.cumsum([len(folded[index]) for index in mine])
        for index, words in zip(mine, np.split(together, ends[:-1]), strict=True):
            found[index] = words
    return found


@torch.no_grad()
def fold_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A number for each row of the tensor's bytes, on its device."""
    weights = _digest_weights(tensor.device)
    folded = [_fold_rows(words, weights) for words in _tensor_words(tensor)]
    return torch.cat(folded) if folded else torch.empty(0, dtype=torch.int64, device=tensor.device)


def _tensor_words(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes as 32-bit words, some rows at a time; zeros fill the last word up."""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    for part in raw.split(ROW * WORD * PASS.get(tensor.device.type, 16)):
        if len(part) % WORD:
            part = torch.nn.functional.pad(part, (0, -len(part) % WORD))
        elif part.storage_offset() % WORD:
            part = part.clone()  # a shard of 16-bit values may begin in the middle of a word
        yield part.view(torch.int32)


def _fold_rows(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    whole = len(words) // ROW * ROW
    folded = (words[:whole].view(-1, ROW) * weights).sum(dim=1)
    rest = words[whole:]
    return torch.cat([folded, (rest * weights[: len(rest)]).sum().view(1)]) if len(rest) else folded


@cache
def _digest_weights(device: torch.device) -> torch.Tensor:
    """Odd numbers by splitmix64 (Steele, Lea, Flood 2014): any fixed ones without a pattern would do."""
    word = np.arange(1, ROW + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((word ^ (word >> np.uint64(31))) | np.uint64(1)).view(np.int64)).to(device)
