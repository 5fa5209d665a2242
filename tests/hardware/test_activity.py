from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.hardware.meters import CpuTime, gpu_activity
from phalanx.hardware.nvml import GpuMeter


def test_cpu_time_is_shared_fairly_and_never_above_one() -> None:
    wall_s, used_s = [0.0], [0.0]
    activity = CpuTime(4, clock=lambda: wall_s[0], used=lambda: used_s[0])
    assert activity.share(1) is None  # no time has passed
    wall_s[0], used_s[0] = 10.0, 20.0
    assert activity.share(1) == 0.5
    wall_s[0], used_s[0] = 20.0, 30.0
    assert activity.share(2) == 0.5  # two of the four cores are its own
    wall_s[0], used_s[0] = 30.0, 70.0
    assert activity.share(4) == 1.0


class Gpm:
    """Enough of pynvml to measure: the multiprocessors are busy by `percent`."""

    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_GPM_METRIC_SM_UTIL = 2

    def __init__(self, *, supported: int = 1, percent: float = 87.5, code: int = 0) -> None:
        self.supported, self.percent, self.code = supported, percent, code
        self.held: set[int] = set()
        self.taken = 0
        self.broken = False

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlGpmQueryDeviceSupport(self, handle: str) -> Any:
        return SimpleNamespace(isSupportedDevice=self.supported)

    def nvmlGpmSampleAlloc(self) -> int:
        self.taken += 1
        self.held.add(self.taken)
        return self.taken

    def nvmlGpmSampleGet(self, handle: str, sample: int) -> None:
        if self.broken:
            raise RuntimeError("GPU is lost")

    def nvmlGpmSampleFree(self, sample: int) -> None:
        self.held.remove(sample)

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        return SimpleNamespace(metrics=[SimpleNamespace(nvmlReturn=0, value=0.0)])

    def nvmlGpmMetricsGet(self, asked: Any) -> None:
        assert asked.sample1 < asked.sample2
        assert (asked.numMetrics, asked.metrics[0].metricId) == (1, self.NVML_GPM_METRIC_SM_UTIL)
        asked.metrics[0].value, asked.metrics[0].nvmlReturn = self.percent, self.code


def test_sm_activity_between_two_samples_frees_what_it_took() -> None:
    library = Gpm()
    activity = gpu_activity(GpuMeter.open("GPU-0", library=library))
    assert [activity.share(8) for _ in range(5)] == [0.875] * 5
    assert activity.source == "gpm-sm"
    assert len(library.held) == 1


@pytest.mark.parametrize(("percent", "code"), [(float("nan"), 0), (50.0, 3)])
def test_a_metric_that_could_not_be_had_is_none(percent: float, code: int) -> None:
    activity = gpu_activity(GpuMeter.open("GPU-0", library=Gpm(percent=percent, code=code)))
    assert activity.share(1) is None


def test_a_gpu_that_stops_answering_gives_none_and_then_goes_on() -> None:
    library = Gpm()
    activity = gpu_activity(GpuMeter.open("GPU-0", library=library))
    library.broken = True
    assert [activity.share(1), activity.share(1)] == [None, None]
    library.broken = False
    assert [activity.share(1), activity.share(1)] == [0.875, 0.875]
    assert len(library.held) == 1


def test_without_gpm_there_is_no_activity_rather_than_kernel_residency() -> None:
    older = gpu_activity(GpuMeter.open("GPU-0", library=Gpm(supported=0)))
    assert (older.share(1), older.source) == (None, None)
    absent = gpu_activity(GpuMeter(None, None))
    assert (absent.share(1), absent.source) == (None, None)
