import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import SystemFailure
from phalanx.hardware.discover import discover
from phalanx.hardware.probe import fit_ring, load_profile, measure_disk, probe, save_profile
from phalanx.hardware.probe_worker import seconds_per_call

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26)


@given(
    st.floats(min_value=1e-7, max_value=1e-2),
    st.floats(min_value=1e8, max_value=1e12),
    st.integers(min_value=2, max_value=64),
)
def test_fit_finds_the_latency_and_bandwidth_that_made_the_points(alpha: float, bandwidth: float, ranks: int) -> None:
    steps = 2 * (ranks - 1)
    points = [(size, steps * alpha + steps / ranks * size / bandwidth) for size in SIZES]
    found_alpha, found_bandwidth = fit_ring(points, ranks)
    predicted = [steps * found_alpha + steps / ranks * size / found_bandwidth for size in SIZES]
    assert predicted == pytest.approx([elapsed for _, elapsed in points], rel=0.01)


def test_fit_stays_positive_when_larger_messages_were_faster() -> None:
    alpha, bandwidth = fit_ring([(1024, 2e-3), (16384, 1e-3)], 2)
    assert alpha > 0
    assert 0 < bandwidth < 1e12


def test_seconds_per_call_is_the_time_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("phalanx.hardware.probe_worker.time.perf_counter", lambda: clock[0])

    def call() -> None:
        clock[0] += 0.002

    assert seconds_per_call(call, lambda: None, 1.0) == pytest.approx(0.002)
    assert clock[0] < 1.5


def test_disk_that_cannot_be_written_is_said_and_skipped(tmp_path: Path) -> None:
    said: list[str] = []
    assert measure_disk(tmp_path / "absent", 0.1, said.append) == 0
    assert said[0].startswith(f"disk: not measured, {tmp_path / 'absent'} cannot be written")


def test_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    assert measure_disk(tmp_path, 0.05, lambda text: None) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_fails_is_a_world_error_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(SystemFailure) as caught:
        probe(
            discover(),
            worker="phalanx.no_such_worker",
            ranks=2,
            seconds=2,
            disk_folder=tmp_path,
            environ=os.environ,
            report=lambda text: None,
        )
    assert "ended without a result" in str(caught.value)
    assert "No module named phalanx.no_such_worker" in str(caught.value)


def test_a_real_probe_of_two_cores(tmp_path: Path) -> None:
    said: list[str] = []
    profile = probe(discover(), ranks=2, seconds=2, disk_folder=tmp_path, environ=os.environ, report=said.append)
    assert profile.matmul_flops > 1e8
    assert [size for size, _ in profile.matmul_by_size] == [64, 128, 256, 512, 1024, 2048]
    assert profile.memory_bytes_per_s > 1e7
    assert profile.link_latency_s > 0
    assert profile.link_bytes_per_s > 1e6
    assert (profile.backend, profile.precision) == ("tcp", "fp32")
    assert profile.seconds > 0
    assert any(text.startswith("all-reduce of 1.05 MB on 2 ranks") for text in said)
    save_profile(profile, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile
