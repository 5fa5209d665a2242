"""Segments: who may write, what a reader sees, and what is left of a process that died."""

import os
import signal

from phalanx.elastic import replica_store
from phalanx.elastic.replica_store import HEADER_BYTES, MemorySegment, SegmentHeader

HEADER = SegmentHeader(
    sequence=3,
    epoch=2,
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
