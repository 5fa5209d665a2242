from pathlib import Path

import pytest

from phalanx.hardware.meters import anonymous_bytes, memory_stall


def put(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


HOST = "some avg10=12.50 avg60=3.00 avg300=1.00 total=99\nfull avg10=80.00 avg60=1.00 avg300=1.00 total=9\n"


def test_the_groups_own_stalls_count_before_the_hosts(tmp_path: Path) -> None:
    put(tmp_path, "proc/pressure/memory", HOST)
    stall = memory_stall(tmp_path)
    assert stall is not None
    assert (stall.share, stall.source) == (0.125, "psi-host")  # "some", not "full"
    put(tmp_path, "proc/self/cgroup", "0::/job/rank\n")
    put(tmp_path, "sys/fs/cgroup/job/memory.pressure", HOST.replace("12.50", "99.00"))  # of the parent: not ours
    assert memory_stall(tmp_path) == stall
    put(tmp_path, "sys/fs/cgroup/job/rank/memory.pressure", HOST.replace("12.50", "0.25"))
    own = memory_stall(tmp_path)
    assert own is not None
    assert (own.share, own.source) == (0.0025, "psi-cgroup")


@pytest.mark.parametrize(
    "text", ["", "some avg10=nan avg60=0", "some\n", "full avg10=3.00 ", "\x00" * 100, "some" * 9999]
)
def test_no_stalls_where_the_kernel_says_nothing_sensible(tmp_path: Path, text: str) -> None:
    put(tmp_path, "proc/pressure/memory", text)
    assert memory_stall(tmp_path) is None
    assert memory_stall(tmp_path / "nowhere") is None


def test_a_stall_is_never_more_than_all_the_time(tmp_path: Path) -> None:
    put(tmp_path, "proc/pressure/memory", "some avg10=250.00 avg60=0 avg300=0 total=0\n")
    stall = memory_stall(tmp_path)
    assert stall is not None
    assert stall.share == 1.0


def test_own_memory_leaves_out_what_others_share(tmp_path: Path) -> None:
    put(tmp_path, "proc/self/status", "VmRSS:\t 9000 kB\nRssAnon:\t    1000 kB\nRssFile:\t 8000 kB\n")
    assert anonymous_bytes(tmp_path) == 1000 * 1024
    assert anonymous_bytes(tmp_path / "nowhere") is None
    real = anonymous_bytes()
    assert real is None or real > 2**20
