"""The monitor against sensors that work, fail, hang, and belong to the real process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from phalanx.record.events import Event, EventWriter, read_events
from phalanx.train.telemetry import monitor as module
from phalanx.train.telemetry.monitor import Monitor
from phalanx.train.telemetry.sensors import CpuSensors, GpuSensors, SensorReading, sensors_of
from phalanx.train.telemetry.sharing import Sharers


class Prepared:
    """Sensors that give prepared answers, then the last one again; an exception is raised."""

    def __init__(self, *answers: SensorReading | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[Sharers] = []

    def read(self, sharers: Sharers) -> SensorReading:
        self.asked.append(sharers)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def events(tmp_path: Path) -> EventWriter:
    return EventWriter(tmp_path / "events-00000.jsonl", rank=0)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the last sample however slow this machine is."""
    monkeypatch.setattr(module, "LEAVE_S", 60.0)


def written(tmp_path: Path) -> list[Event]:
    found, skipped = read_events(tmp_path / "events-00000.jsonl")
    assert not skipped
    return found


def until(ready: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 300
    while not ready() and time.monotonic() < end_s:
        time.sleep(0.01)
    assert ready()


@pytest.mark.usefixtures("patient")
def test_samples_at_the_interval_and_one_at_the_end(tmp_path: Path, events: EventWriter) -> None:
    sensors = Prepared(
        SensorReading(utilization=0.5, utilization_source="cpu-time", energy_j=10.0, energy_source="rapl")
    )
    monitor = Monitor(events, lambda: sensors, sharers=Sharers(host=4), interval_s=0.02, generation=3)
    monitor.start()
    until(lambda: len(sensors.asked) >= 3)
    monitor.close()
    taken = written(tmp_path)
    assert {event["event"] for event in taken} == {"monitor"}
    assert [event["energy_j"] for event in taken] == [10.0 * (place + 1) for place in range(len(taken))]
    assert (taken[0]["epoch"], taken[0]["utilization"], taken[0]["energy_source"]) == (3, 0.5, "rapl")
    assert set(sensors.asked) == {Sharers(host=4)}
    count = len(taken)
    monitor.close()
    assert len(written(tmp_path)) == count  # nothing after the end


@pytest.mark.usefixtures("patient")
def test_a_long_interval_still_gives_a_sample_at_the_end(tmp_path: Path, events: EventWriter) -> None:
    monitor = Monitor(events, lambda: Prepared(SensorReading(utilization=0.25)), sharers=Sharers(), interval_s=1e9)
    monitor.start()
    monitor.close()
    assert [event["utilization"] for event in written(tmp_path)] == [0.25]


@pytest.mark.usefixtures("patient")
def test_what_goes_wrong_is_told_once_and_sampling_goes_on(
    tmp_path: Path, events: EventWriter, capsys: pytest.CaptureFixture[str]
) -> None:
    sensors = Prepared(RuntimeError("GPU is lost"), RuntimeError("still lost"), SensorReading(utilization=0.75))
    monitor = Monitor(events, lambda: sensors, sharers=Sharers(), interval_s=0.01)
    monitor.start()
    until(lambda: len(sensors.asked) >= 4)
    monitor.close()
    said = capsys.readouterr().err
    assert said == "monitor: a sample could not be taken (RuntimeError: GPU is lost); training goes on\n"
    assert written(tmp_path)[0]["utilization"] == 0.75


@pytest.mark.usefixtures("patient")
def test_sensors_that_cannot_be_made_leave_the_rank_without_a_monitor(
    events: EventWriter, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor = Monitor(events, lambda: 1 // 0, sharers=Sharers(), interval_s=0.01)  # type: ignore[arg-type, return-value]
    monitor.start()
    monitor.close()
    assert "ZeroDivisionError" in monitor.trouble
    assert "training goes on" in capsys.readouterr().err


def test_a_driver_that_hangs_is_left_behind_and_writes_nothing_later(tmp_path: Path, events: EventWriter) -> None:
    release, left = threading.Event(), threading.Event()

    class Hung:
        def read(self, sharers: Sharers) -> SensorReading:
            release.wait(600)
            left.set()
            return SensorReading()

    monitor = Monitor(events, Hung, sharers=Sharers(), interval_s=0.01)
    monitor.start()
    monitor.close()
    assert not left.is_set()  # it was not waited for
    events.close()
    release.set()
    assert left.wait(600)
    time.sleep(0.05)
    assert written(tmp_path) == []


def test_the_sensors_of_this_process() -> None:
    sensors = sensors_of(torch.device("cpu"), power_w=6.25)
    kept = torch.ones(8 * 2**20)  # 32 MiB
    end_s = time.process_time() + 0.05
    while time.process_time() < end_s:
        kept.add_(1)
    reading = sensors.read(Sharers())
    assert reading.utilization is not None
    assert 0 < reading.utilization <= 1
    assert reading.memory_bytes is not None
    assert reading.memory_bytes >= 30 * 2**20
    assert reading.memory_limit_bytes == 2 * sensors.read(Sharers(host=2)).memory_limit_bytes  # type: ignore[operator]
    assert reading.energy_source in ("rapl", "estimate")
    assert reading.energy_j is not None
    assert reading.power_w is not None
    assert (reading.temperature_c, reading.allocation_retries) == (None, None)


def test_a_hosts_counter_is_shared_by_its_ranks_and_an_estimate_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "sys/class/powercap/intel-rapl:0"
    folder.mkdir(parents=True)
    (folder / "name").write_text("package-0")
    (folder / "max_energy_range_uj").write_text("1000000000")
    (folder / "energy_uj").write_text("0")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\n")
    sensors = CpuSensors(power_w=6.25, root=tmp_path)
    (folder / "energy_uj").write_text("8000000")
    reading = sensors.read(Sharers(host=4))
    assert (reading.energy_j, reading.energy_source, reading.memory_limit_bytes) == (2.0, "rapl", 256_000)
    assert (reading.memory_bytes, reading.memory_pressure) == (None, None)  # no /proc/self/status there
    (folder / "energy_uj").unlink()
    assert CpuSensors(power_w=6.25, root=tmp_path).read(Sharers(host=4)).energy_source == "estimate"


def test_a_gpu_is_shared_by_the_ranks_on_it_whatever_each_of_them_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks of a host that see one GPU each, as `srun --gpus-per-task=1` shows them."""

    class Meter:
        taken_j = 0.0

        def energy_j(self) -> float:
            self.taken_j += 8.0
            return self.taken_j

        def memory_bytes(self) -> tuple[int, int]:
            return 1, 2

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *args: None

    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    sensors = GpuSensors(torch.device("cuda"), Meter(), power_w=700.0)  # type: ignore[arg-type]
    reading = sensors.read(Sharers(host=8, device=1))
    assert (reading.energy_j, reading.energy_source) == (8.0, "nvml")
    assert sensors.read(Sharers(host=8, device=2)).energy_j == 4.0
