"""NVIDIA GPUs through NVML (package nvidia-ml-py, optional), else nvidia-smi. A broken driver becomes a note."""

from __future__ import annotations

import csv
import importlib
import io
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.hardware.types import Gpu, GpuPath
from phalanx.units import MIB

# GB/s per link and direction, by NVLink version: 20 in P100, 25 from V100 to H100 (18 links = 450), 50 in Blackwell.
_NVLINK_BYTES_PER_S = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}
# GB/s per lane and direction after 128b/130b coding, by PCIe generation.
_PCIE_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_MAX_NVLINKS = 18  # NVML_NVLINK_MAX_LINKS
# nvmlGpuTopologyLevel_t
_ANCESTORS = {0: "same board", 10: "PCIe switch", 20: "PCIe switches", 30: "PCIe bridge", 40: "same NUMA node"}


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuView:
    """The GPUs that NVML reports, their paths, and the reason if it reports none."""

    gpus: tuple[Gpu, ...] = ()
    paths: tuple[GpuPath, ...] = ()
    notes: tuple[str, ...] = ()
    hidden: bool = False  # CUDA_VISIBLE_DEVICES hides GPUs


def see_gpus(
    *,
    root: Path = Path("/"),
    visible: str | None = None,
    library: Any = None,
    ask: Callable[[], str] | None = None,
) -> GpuView:
    """Return the GPUs; `visible` is CUDA_VISIBLE_DEVICES; tests replace NVML and nvidia-smi by `library` and `ask`."""
    nvml = library if library is not None else _load_library()
    if nvml is None:
        return _from_nvidia_smi(root, visible, (ask or _ask_nvidia_smi)())
    try:
        nvml.nvmlInit()
    # NVMLError has no base class that could be imported, and no error of the driver may stop the caller.
    except Exception as error:
        # NVML Shared Library Not Found: this machine has no NVIDIA driver.
        missing = "not found" in str(error).lower()
        return GpuView() if missing else GpuView(notes=(f"the NVIDIA driver does not answer: {error}",))
    try:
        return _look_at_gpus(nvml, root, visible)
    except Exception as error:
        return GpuView(notes=(f"the NVIDIA driver stopped answering: {error}",))
    finally:
        _try_call(nvml.nvmlShutdown, default=None)


def _load_library() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def _ask_nvidia_smi() -> str:
    """Return one CSV line per GPU from the driver's program; empty if it is absent or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    columns = "index,uuid,name,memory.total,pci.bus_id,pcie.link.gen.max,pcie.link.width.max,memory.used"
    command = [program, f"--query-gpu={columns}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout if result.returncode == 0 else ""


def _from_nvidia_smi(root: Path, visible: str | None, text: str) -> GpuView:
    rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text))]
    rows_by_index = {int(row[0]): row for row in rows if len(row) in (7, 8) and row[0].isdigit()}
    chosen = visible_indices(visible, {index: row[1] for index, row in rows_by_index.items()})
    if not rows_by_index:
        return GpuView()
    note = "NVLink and PCIe paths are not shown: pip install nvidia-ml-py"
    gpus = tuple(_smi_gpu(root, rows_by_index[index]) for index in chosen)
    return GpuView(gpus=gpus, notes=(note,), hidden=len(chosen) < len(rows_by_index))


def _smi_gpu(root: Path, row: list[str]) -> Gpu:
    memory, generation, lanes = (int(cell) if cell.isdigit() else 0 for cell in (row[3], row[5], row[6]))
    return Gpu(
        index=int(row[0]),
        name=row[2],
        memory_bytes=memory * MIB,
        pci_address=row[4],
        numa_node=_numa_node(root, row[4]),
        pcie_bytes_per_s=_PCIE_LANE_BYTES_PER_S.get(generation, 0.0) * lanes,
        nvlinks=-1,
        nvlink_bytes_per_s=0.0,
        used_bytes=int(row[7]) * MIB if row[7:] and row[7].isdigit() else -1,
    )


def _try_call(call: Any, *args: Any, default: Any) -> Any:
    """Return the result of an NVML call, or `default`: many boards answer "not supported", which is not a failure."""
    try:
        return call(*args)
    except Exception:
        return default


def _look_at_gpus(nvml: Any, root: Path, visible: str | None) -> GpuView:
    count = nvml.nvmlDeviceGetCount()
    handles = {index: nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)}
    uuids = {
        index: _decoded_text(_try_call(nvml.nvmlDeviceGetUUID, handle, default="")) for index, handle in handles.items()
    }
    chosen = visible_indices(visible, uuids)
    gpus = tuple(_read_gpu(nvml, root, index, handles[index]) for index in chosen)
    hidden = count - len(chosen)
    notes = (f"CUDA_VISIBLE_DEVICES hides {hidden} of {count} GPUs",) if hidden else ()
    return GpuView(gpus=gpus, paths=_gpu_paths(nvml, handles, gpus), notes=notes, hidden=bool(hidden))


def visible_indices(visible: str | None, uuids: dict[int, str]) -> list[int]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves, as CUDA reads it: the list ends at the first invalid entry.

    >>> visible_indices("1,0", {0: "GPU-a", 1: "GPU-b"}), visible_indices("-1", {0: "GPU-a"})
    ([1, 0], [])
    """
    if visible is None:
        return list(uuids)
    chosen: list[int] = []
    for word in (entry.strip() for entry in visible.split(",")):
        matches = [index for index, uuid in uuids.items() if word == str(index) or (word and uuid.startswith(word))]
        if len(matches) != 1 or matches[0] in chosen:
            break
        chosen.append(matches[0])
    return chosen


def _read_gpu(nvml: Any, root: Path, index: int, handle: Any) -> Gpu:
    address = _decoded_text(_try_call(lambda: nvml.nvmlDeviceGetPciInfo(handle).busId, default=""))
    links = [
        _try_call(nvml.nvmlDeviceGetNvLinkVersion, handle, link, default=0)
        for link in range(_MAX_NVLINKS)
        if _try_call(nvml.nvmlDeviceGetNvLinkState, handle, link, default=0) == 1
    ]
    generation = _try_call(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle, default=0)
    lanes = _try_call(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle, default=0)
    return Gpu(
        index=index,
        name=_decoded_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(_try_call(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total, default=0)),
        pci_address=address,
        numa_node=_numa_node(root, address),
        pcie_bytes_per_s=_PCIE_LANE_BYTES_PER_S.get(generation, 0.0) * lanes,
        nvlinks=len(links),
        nvlink_bytes_per_s=sum(_NVLINK_BYTES_PER_S.get(version, 25e9) for version in links),
        used_bytes=int(_try_call(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used, default=-1)),
    )


def _numa_node(root: Path, address: str) -> int:
    # NVML writes 00000000:17:00.0, sysfs 0000:17:00.0
    short = address.lower()[-12:]
    try:
        return int((root / "sys/bus/pci/devices" / short / "numa_node").read_text()) if short else -1
    except (OSError, ValueError):
        return -1


def _gpu_paths(nvml: Any, handles: dict[int, Any], gpus: tuple[Gpu, ...]) -> tuple[GpuPath, ...]:
    paths = []
    for position, first in enumerate(gpus):
        for second in gpus[position + 1 :]:
            if first.nvlinks and second.nvlinks:
                kind = "NVLink"
            else:
                pair = handles[first.index], handles[second.index]
                level = _try_call(nvml.nvmlDeviceGetTopologyCommonAncestor, *pair, default=50)
                kind = _ANCESTORS.get(level, "across NUMA nodes")
            paths.append(GpuPath(first=first.index, second=second.index, kind=kind))
    return tuple(paths)


def _decoded_text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


class GpuMeter:
    """Counters of one GPU while a job runs. Every method may return None: not supported, or not available now."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    @classmethod
    def open(cls, uuid: str, *, library: Any = None) -> GpuMeter:
        """Return the meter of the GPU with this UUID; without NVML or such a GPU all its methods return None."""
        nvml = library if library is not None else _load_library()
        if nvml is None or _try_call(_is_initialised, nvml, default=None) is None:
            return cls(None, None)
        handle = _try_call(nvml.nvmlDeviceGetHandleByUUID, uuid, default=None)
        return cls(None if handle is None else nvml, handle)

    def energy_j(self) -> float | None:
        """Return joules since the driver was loaded."""
        energy_mj = self._ask_driver("nvmlDeviceGetTotalEnergyConsumption")
        return None if energy_mj is None else float(energy_mj) / 1e3

    def temperature_c(self) -> float | None:
        """Return the temperature of the chip in °C."""
        value = self._ask_driver("nvmlDeviceGetTemperature", 0)  # NVML_TEMPERATURE_GPU
        return None if value is None else float(value)

    def memory_bytes(self) -> tuple[int, int] | None:
        """Return the memory used by all processes on this GPU, and its total."""
        memory = self._ask_driver("nvmlDeviceGetMemoryInfo")
        return None if memory is None else (int(memory.used), int(memory.total))

    def has_gpm(self) -> bool:
        """Return whether the GPU measures its own activity: Hopper and newer."""
        support = self._ask_driver("nvmlGpmQueryDeviceSupport")
        return bool(support is not None and support.isSupportedDevice)

    def gpm_sample(self) -> Any:
        """Return the present counters, of which two make a measurement; free them with `gpm_free`."""
        if self._nvml is None:
            return None
        sample = _try_call(lambda: self._nvml.nvmlGpmSampleAlloc(), default=None)
        if sample is not None and _try_call(_take_sample, self._nvml, self._handle, sample, default=None) is None:
            self.gpm_free(sample)
            return None
        return sample

    def sm_percent(self, before: Any, after: Any) -> float | None:
        """Return the percentage of multiprocessors that had a warp between two samples."""
        value = _try_call(_gpm_metric, self._nvml, before, after, default=None)
        # NaN if nothing was counted.
        return value if value is not None and value == value else None

    def gpm_free(self, sample: Any) -> None:
        """Free a sample."""
        _try_call(lambda: self._nvml.nvmlGpmSampleFree(sample), default=None)

    def _ask_driver(self, question: str, *args: Any) -> Any:
        if self._nvml is None:
            return None
        return _try_call(lambda: getattr(self._nvml, question)(self._handle, *args), default=None)


def _is_initialised(nvml: Any) -> bool:
    nvml.nvmlInit()
    return True


def _take_sample(nvml: Any, handle: Any, sample: Any) -> bool:
    nvml.nvmlGpmSampleGet(handle, sample)
    return True


def _gpm_metric(nvml: Any, before: Any, after: Any) -> float:
    request = nvml.c_nvmlGpmMetricsGet_t()
    request.version = nvml.NVML_GPM_METRICS_GET_VERSION
    request.numMetrics = 1
    request.sample1, request.sample2 = before, after
    request.metrics[0].metricId = nvml.NVML_GPM_METRIC_SM_UTIL
    nvml.nvmlGpmMetricsGet(request)
    if request.metrics[0].nvmlReturn:
        raise RuntimeError(f"NVML code {request.metrics[0].nvmlReturn}")
    return float(request.metrics[0].value)
