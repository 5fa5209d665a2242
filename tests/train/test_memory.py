"""The most memory so far never falls while a process stays."""

from __future__ import annotations

import os

import pytest
import torch

from phalanx.train import memory_use
from phalanx.train.memory_use import MemoryMeter
from phalanx.train.telemetry import sensors

CPU = torch.device("cpu")
Status = dict[str, int]


@pytest.fixture
def status(monkeypatch: pytest.MonkeyPatch) -> Status:
    """Of a process that has made no meter yet."""
    now = {"RssAnon": 100, "RssFile": 50, "RssShmem": 0, "VmHWM": 150}
    monkeypatch.setattr(memory_use, "_memory_status", lambda: dict(now))
    monkeypatch.setattr(memory_use, "_firsts", {})
    monkeypatch.setattr(MemoryMeter, "_peaks", {})
    return now


def test_a_process_that_stays_through_a_recovery(status: Status) -> None:
    meter = MemoryMeter(CPU)
    status.update(RssAnon=700, VmHWM=1050)
    assert meter.peak_bytes() == 900
    after = MemoryMeter(CPU)
    assert after.peak_bytes() == 900, "what it held before the recovery it still holds"
    status.update(RssAnon=800, VmHWM=1150)
    assert after.peak_bytes() == 1000


def test_more_pages_of_libraries_do_not_lower_it(status: Status) -> None:
    meter = MemoryMeter(CPU)
    status.update(RssAnon=700, VmHWM=1050)
    before = meter.peak_bytes()
    status.update(RssFile=500)
    assert meter.peak_bytes() == before


def test_it_is_no_less_than_what_is_held_now(status: Status) -> None:
    meter = MemoryMeter(CPU)
    status.update(RssAnon=700, RssFile=500, VmHWM=1150)  # the pages came after the peak
    assert meter.peak_bytes() == 600


def test_the_monitor_starts_from_the_same(status: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensors, "anonymous_bytes", lambda root: status["RssAnon"])
    monitor = sensors.CpuSensors(power_w=10.0)
    status.update(RssAnon=300, VmHWM=350)  # some time passes until the rank begins to train
    meter = MemoryMeter(CPU)
    status.update(RssAnon=700, VmHWM=750)
    assert monitor.read(sensors.Sharers()).memory_bytes == meter.peak_bytes() == 600


def test_a_forked_process_begins_anew(status: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    MemoryMeter(CPU)
    status.update(RssAnon=700, VmHWM=750)
    forked = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: forked)
    assert MemoryMeter(CPU).peak_bytes() == 0
