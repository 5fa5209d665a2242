"""Segments: who may write, what a reader sees, and what is left of a process that died."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace

from phalanx.elastic import replica_store
from phalanx.elastic.replica_store import HEADER_BYTES, MemorySegment, SegmentHeader
from phalanx.train.state.snapshot import pin_segment

HEADER = SegmentHeader(
    sequence=3,
    generation=2,
    step=7,
    rank=1,
    world=4,
    tensors=5,
    data_bytes=100,
    index_at=4200,
    index_bytes=50,
    index_crc32=2**32 - 1,
)


def test_a_header_comes_back_and_no_changed_byte_of_it_does():
    data = replica_store.encode_header(HEADER)
    assert len(data) == HEADER_BYTES
    assert replica_store.decode_header(data) == HEADER
    for at in range(len(data)):
        assert replica_store.decode_header(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]) is None
    assert replica_store.decode_header(data[:-1]) is None


def test_a_segment_that_another_process_writes_to_is_not_claimed_and_is_free_when_it_dies(kit):
    segment = MemorySegment("test")
    reading, writing = os.pipe()

    def hold():
        with segment.claimed() as mine:
            os.write(writing, b"y" if mine else b"n")
            signal.pause()

    child = kit.fork(hold)
    try:
        assert os.read(reading, 1) == b"y"
        with segment.claimed() as mine:
            assert not mine
    finally:
        os.kill(child, signal.SIGKILL)
        kit.reap(child)
    with segment.claimed() as mine:
        assert mine
        with segment.claimed() as again:  # by another thread of this process, say
            assert not again
    os.close(reading)
    os.close(writing)
    segment.close()


def test_what_a_forked_process_wrote_outlives_it(kit):
    segment = MemorySegment("test")

    def write():
        segment.reserve(HEADER.end)[4096:4100] = b"kept"
        segment.seal(HEADER)
        os.kill(os.getpid(), signal.SIGKILL)

    assert kit.reap(kit.fork(write)) == -signal.SIGKILL
    assert segment.header() == HEADER
    assert bytes(segment.view()[4096:4100]) == b"kept"
    segment.wipe()
    assert segment.header() is None
    segment.close()


def test_a_segment_grows_and_old_views_stay_good():
    segment = MemorySegment("test")
    small = segment.reserve(5000)
    small[4096:4100] = b"kept"
    large = segment.reserve(50_000)
    assert bytes(large[4096:4100]) == b"kept"
    large[4096:4100] = b"next"
    assert bytes(small[4096:4100]) == b"next"
    assert segment.reserve(100).nbytes == 50_000
    segment.close()


def _is_mapped(address):
    spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)


def test_memory_pinned_for_a_gpu_is_given_back_before_a_larger_segment_is_mapped_elsewhere(monkeypatch):
    # There is no GPU here: the two calls of the CUDA runtime only write down what they were asked.
    pinned, mapped_when_freed = {}, []

    def unregister(address):
        mapped_when_freed.append(_is_mapped(address))
        del pinned[address]
        return 0

    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, _: pinned.update({address: size}) or 0, cudaHostUnregister=unregister
    )
    monkeypatch.setattr("torch.cuda.cudart", lambda: runtime)
    segment = MemorySegment("test")
    for size_bytes in (4096, 4096, 1 << 20, 1 << 20, 64 << 20):
        view = segment.reserve(size_bytes)
        view[0] = 7
        pin_segment(segment, view)
        assert view[0] == 7  # what lies there stays
        assert list(pinned.values()) == [size_bytes]  # nothing of the smaller mapping is left
        assert all(map(_is_mapped, pinned))
    assert mapped_when_freed == [True, True]
    segment.close()
