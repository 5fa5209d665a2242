"""Measurements out of nccl-tests' output and out of tables."""

from __future__ import annotations

import pytest

from phalanx.errors import UserError
from phalanx.network.collective_fit import Operation, Point, read_points, worst_error

HEAD = """\
# nccl-tests version 2.18.3 nccl-headers=23004 nccl-library=23004
# Collective test starting: all_reduce_perf
# Using devices
#  Rank  0 Group  0 Pid   8738 on a device  0 [0000:1b:00] NVIDIA B200
#  Rank 15 Group  0 Pid   6474 on b device  7 [0000:dc:00] NVIDIA B200
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
"""
NEW = (
    "    16777216     4194304   float     sum      -1   190.47   88.08  165.16       0   188.98   88.78  166.46       0"
)
LARGE = (
    " 17179869184  4294967296   float     sum      -1    44871  382.87  717.88       0    44872  382.86  717.87     N/A"
)
OLD = "  1073741824     268435456   float     sum    22661   47.38   47.38  0e+00    22658   47.39   47.39  0e+00"
GATHER = (
    "    33554432     1048576   float    none      -1    76.98  435.87  408.63     0    75.19  446.24  418.35       0"
)
EMPTY = (
    "           0           0   float    none      -1     0.17    0.00    0.00     0     0.13    0.00    0.00       0"
)


def read(text: str, operation: Operation = "all-reduce", ranks: int = 16) -> list[tuple[float, float]]:
    found = read_points(text, where="file", operation=operation, ranks=ranks)
    return [(one.nbytes, round(one.seconds * 1e6, 2)) for one in found.points]


def test_out_of_place_times_whatever_the_log_puts_before_them() -> None:
    text = HEAD + "\n".join(
        [f"2026-02-16T10:00:02.0Z {NEW}", f" 0: {LARGE}", "[0] NCCL INFO done", "# Avg bus bandwidth : 9"]
    )
    assert read(text) == [(2**24, 190.47), (2**34, 44871.0)]


def test_versions_without_a_root_column() -> None:
    assert read(OLD, ranks=2) == [(2**30, 22661.0)]
    assert read(OLD.replace("0e+00", "0"), ranks=2) == [(2**30, 22661.0)]
    assert read(OLD.replace(" sum ", "     "), "broadcast") == [(2**30, 22661.0)]  # and without the operator's


def test_one_log_with_several_tests() -> None:
    text = HEAD + f"{NEW}\n# Collective test starting: all_gather_perf\n{EMPTY}\n{GATHER}\n"
    assert read(text) == [(2**24, 190.47)]
    assert read(text, "all-gather") == [(2**25, 76.98)]
    bare = f"{NEW}\n{GATHER}\n"
    assert read(bare) == [(2**24, 190.47)]
    assert read(bare, "all-gather") == [(2**25, 76.98)]


def test_the_kind_is_named_or_assumed() -> None:
    def named(text: str, operation: Operation = "all-reduce") -> bool:
        return read_points(text, where="file", operation=operation, ranks=16).named

    assert named(HEAD + NEW)
    assert not named(NEW)
    assert not named("bytes,us\n16MiB,190.5\n")
    assert named("bytes,us,kind\n16MiB,190.5,AllReduce\n")


def test_a_table_with_kinds() -> None:
    text = "collective,bytes,us\nall_reduce_perf,16MiB,190.5\nAllGather,16MiB,80\nall-to-all,16MiB,90\n"
    assert read(text) == [(2**24, 190.5)]
    assert read(text, "all-gather") == [(2**24, 80.0)]
    assert read(text, "all-to-all") == [(2**24, 90.0)]


@pytest.mark.parametrize("head", ["bytes,us", "Size, time_us", "# mine\nnbytes,us,busbw"])
def test_a_table(head: str) -> None:
    assert read(f"{head}\n16MiB,190.5,9\n\n17179869184,44871,9\n") == [(2**24, 190.5), (2**34, 44871.0)]


def test_a_table_of_bus_bandwidths_needs_the_ranks() -> None:
    assert read("size,busbw\n1GiB,375\n", ranks=4) == [(2**30, round(1.5 * 2**30 / 375e9 * 1e6, 2))]
    assert read("size,s\n1GiB,0.5\n") == read("size,ms\n1GiB,500\n") == [(2**30, 5e5)]


@pytest.mark.parametrize(
    ("text", "operation", "message"),
    [
        (HEAD + NEW, "all-gather", "file: holds all-reduce, not all-gather\n  add --kind all-reduce"),
        (
            HEAD.replace("Rank 15", "Rank 31") + NEW,
            "all-reduce",
            "file: was measured on 32 ranks, and the cluster has 16",
        ),
        (
            NEW,
            "all-gather",
            "file: holds all-reduce, not all-gather\n  operator sum, root -1, busbw 1.88 times algbw\n",
        ),
        (NEW, "broadcast", "file: holds all-reduce, not broadcast"),
        (NEW, "all-to-all", "file: holds all-reduce, not all-to-all"),
        (NEW, "reduce-scatter", "file: holds all-reduce, not reduce-scatter"),
        (GATHER, "all-reduce", "file: holds all-gather or all-to-all, not all-reduce"),
        (GATHER, "broadcast", "file: holds all-gather or all-to-all, not broadcast"),
        (OLD, "all-reduce", "file: holds reduce, not all-reduce"),
        (NEW.replace("165.16", "154.14"), "all-reduce", "file: busbw is 1.75 times algbw, and 1.88 for all-reduce"),
        (
            NEW.replace("165.16", "0.00"),
            "all-reduce",
            "file: busbw is 0 times algbw",
        ),  # built without MPI: 16 times one
        ("sendrecv_perf\n" + NEW, "all-reduce", "file: holds sendrecv, not all-reduce\n  measure all-reduce"),
        ("bytes,us,kind\n16MiB,9,AllGather\n", "all-reduce", "file: holds all-gather, not all-reduce"),
        ("bytes,us,kind\n16MiB,9,\n", "all-reduce", "file: holds nothing, not all-reduce"),
        ("", "all-reduce", "file: no line of it is a measurement"),
        ("\x00\x01 binary \ufffd", "all-reduce", "file: no line of it is a measurement"),
        (NEW.replace("88.08", "11.11"), "all-reduce", "file: no line of it is a measurement"),
        ("a,b\n1,2\n", "all-reduce", "file: has the columns a, b"),
        ("bytes,us\n", "all-reduce", "file: holds no rows"),
        ("bytes,us\n1MiB,0\n", "all-reduce", "file:2: us = '0'"),
        ("bytes,us\n1MiB,inf\n", "all-reduce", "file:2: us = 'inf'"),
        ("bytes,us\n1MiB\n", "all-reduce", "file:2: us = ''"),
        ("bytes,us\n" + "9" * 200_000 + ",3\n", "all-reduce", "file:1: is no table: field larger"),
        ("bytes,us\nbig,3\n", "all-reduce", "file:2: 'big' is no size"),
    ],
)
def test_refusals(text: str, operation: Operation, message: str) -> None:
    with pytest.raises(UserError) as caught:
        read(text, operation)
    assert str(caught.value).startswith(message)
    assert "\n  " in str(caught.value)


def test_of_two_ranks_only_the_root_tells_a_reduce() -> None:
    both = NEW.replace("165.16", "88.08")
    assert read(both, ranks=2) == read(both.replace(" -1 ", "  0 "), "reduce", ranks=2) == [(2**24, 190.47)]
    with pytest.raises(UserError, match="holds all-reduce, not reduce"):
        read(both, "reduce", ranks=2)
    with pytest.raises(UserError, match="holds reduce, not all-reduce"):
        read(both.replace(" -1 ", "  0 "), ranks=2)


def test_the_worst_error_keeps_its_sign() -> None:
    points = [Point(nbytes=1, seconds=1.0), Point(nbytes=2, seconds=2.0)]
    error, at = worst_error(points, [1.1, 1.0])
    assert (error, at) == (-0.5, points[1])
