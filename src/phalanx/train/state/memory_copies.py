"""One copy of a snapshot, in this host's memory or another's: its index and its tensors, each against its checksum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from phalanx.elastic.channel import Channel
from phalanx.elastic.replica_store import MemorySegment, SegmentHeader
from phalanx.elastic.restore_point import ReplicaPlace
from phalanx.train.state.dtypes import KINDS
from phalanx.train.state.index import Entry
from phalanx.train.state.memory_contents import checksum, tensor_at

ANSWER_S = 30.0


class Unusable(Exception):
    """This copy is gone or not what was written; another may be sound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Whose snapshot of which step it must be."""

    epoch: int
    step: int
    rank: int

    def refuse_other(self, header: SegmentHeader | None) -> SegmentHeader:
        """The header, if it is the right one."""
        if header is None or (header.epoch, header.step, header.rank) != (self.epoch, self.step, self.rank):
            raise Unusable("it is there no more")
        return header


class Copy(Protocol):
    """One copy of a snapshot."""

    def index(self) -> bytes:
        """The text of its index; raises Unusable."""

    def tensor(self, entry: Entry) -> torch.Tensor:
        """The whole box of an entry, after comparing it with its checksum; raises Unusable."""


class LocalCopy:
    """A segment of this host: tensors are views of it, not copies."""

    def __init__(self, segment: MemorySegment, wanted: Wanted) -> None:
        self._segment, self._wanted = segment, wanted

    def index(self) -> bytes:
        """The text of its index; raises Unusable."""
        header = self._wanted.refuse_other(self._segment.header())
        text = self._segment.view()[header.index_at : header.end]
        refuse_damage("its index", checksum(text), f"{header.index_crc32:08x}")
        return bytes(text)

    def tensor(self, entry: Entry) -> torch.Tensor:
        """The box of an entry as it lies in memory; raises Unusable."""
        self._wanted.refuse_other(self._segment.header())
        view = self._segment.view()
        refuse_damage(entry.name, checksum(view[entry.offset : entry.offset + entry.size_bytes]), entry.sha256)
        return tensor_at(view, entry)


class RemoteCopy:
    """A segment of another host, through its vault server."""

    def __init__(self, channel: Channel, place: ReplicaPlace, wanted: Wanted) -> None:
        self._channel, self._place, self._wanted = channel, place, wanted

    def index(self) -> bytes:
        """The text of its index; raises Unusable."""
        message = self._ask({"op": "index"})
        text = bytearray(message["data_bytes"])
        crc32 = self._read(text)
        refuse_damage("its index", crc32, f"{message['index_crc32']:08x}")
        return bytes(text)

    def tensor(self, entry: Entry) -> torch.Tensor:
        """The box of an entry in fresh memory; raises Unusable."""
        data = torch.empty(entry.size_bytes, dtype=torch.uint8)
        message = self._ask({"op": "read", "begin": entry.offset, "bytes": entry.size_bytes})
        if message.get("data_bytes") != entry.size_bytes:
            raise Unusable(f"{entry.name} came with {message.get('data_bytes')} bytes instead of {entry.size_bytes}")
        refuse_damage(entry.name, self._read(data.numpy().data), entry.sha256)
        return data.view(KINDS[entry.dtype].torch).view(entry.box.size)

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        place = {"kind": self._place.kind, "slot": self._place.slot, "generation": self._place.generation}
        wanted = {"epoch": self._wanted.epoch, "step": self._wanted.step, "rank": self._wanted.rank}
        try:
            self._channel.send({**question, **place, **wanted})
            message = self._channel.wait(ANSWER_S)
        except (OSError, TimeoutError) as error:
            raise Unusable(str(error)) from error
        if message["op"] == "gone":
            raise Unusable("it is there no more")
        return message

    def _read(self, buffer: bytearray | memoryview) -> str:
        try:
            return f"{self._channel.read_into(buffer):08x}"
        except OSError as error:
            raise Unusable(str(error)) from error


def refuse_damage(what: str, found: str, written: str) -> None:
    """Raises Unusable where a checksum differs."""
    if found != written:
        raise Unusable(f"{what} is not what was written: its checksum is {found} instead of {written}")
