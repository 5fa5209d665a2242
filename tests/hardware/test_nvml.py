from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.hardware.nvml import see_gpus, visible_indices


class FakeNvml:
    """Enough of pynvml for two kinds of board; unsupported questions raise, as the real one does."""

    def __init__(
        self, *, count: int = 8, name: str = "NVIDIA H100 80GB HBM3", links: int = 18, broken: str = ""
    ) -> None:
        self.count, self.name, self.links, self.broken = count, name, links, broken
        self.closed = False

    def nvmlInit(self) -> None:
        if self.broken:
            raise RuntimeError(self.broken)

    def nvmlShutdown(self) -> None:
        self.closed = True

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return f"GPU-{handle:04x}".encode()

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return self.name.encode()

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=85_520_809_984)

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:{handle + 1:02X}:00.0".encode())

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= self.links:
            raise RuntimeError("Not Supported")
        return 1

    def nvmlDeviceGetNvLinkVersion(self, handle: int, link: int) -> int:
        return 4

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return 5

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return 16

    def nvmlDeviceGetTopologyCommonAncestor(self, first: int, second: int) -> int:
        return 30 if first // 2 == second // 2 else 50


def test_nvlink_board(tmp_path: Path) -> None:
    node = tmp_path / "sys/bus/pci/devices/0000:01:00.0/numa_node"
    node.parent.mkdir(parents=True)
    node.write_text("1\n")
    library = FakeNvml()
    view = see_gpus(root=tmp_path, library=library)
    first = view.gpus[0]
    assert (len(view.gpus), first.name, first.numa_node) == (8, "NVIDIA H100 80GB HBM3", 1)
    assert (first.nvlinks, first.nvlink_bytes_per_s) == (18, 450e9)
    assert first.pcie_bytes_per_s == pytest.approx(63e9, rel=0.01)
    assert {path.kind for path in view.paths} == {"NVLink"}
    assert len(view.paths) == 28
    assert library.closed


def test_pcie_cards_show_what_joins_them() -> None:
    view = see_gpus(library=FakeNvml(count=4, name="NVIDIA L40S", links=0))
    kinds = {(path.first, path.second): path.kind for path in view.paths}
    assert kinds[(0, 1)] == "PCIe bridge"
    assert kinds[(1, 2)] == "across NUMA nodes"


def test_a_broken_driver_is_a_note_and_a_missing_one_is_nothing() -> None:
    broken = see_gpus(library=FakeNvml(broken="Driver/library version mismatch"))
    assert broken.gpus == ()
    assert broken.notes == ("the NVIDIA driver does not answer: Driver/library version mismatch",)
    assert see_gpus(library=FakeNvml(broken="NVML Shared Library Not Found")).notes == ()


def test_a_driver_that_dies_in_between_is_a_note() -> None:
    library = FakeNvml()
    library.nvmlDeviceGetCount = lambda: 1 // 0  # type: ignore[method-assign]
    assert "stopped answering" in see_gpus(library=library).notes[0]
    assert library.closed


def test_visible_devices_are_respected() -> None:
    view = see_gpus(library=FakeNvml(), visible="3,1")
    assert [gpu.index for gpu in view.gpus] == [3, 1]
    assert view.notes == ("CUDA_VISIBLE_DEVICES hides 6 of 8 GPUs",)
    assert visible_indices("GPU-0002", {1: "GPU-0001", 2: "GPU-0002"}) == [2]
    assert visible_indices("0,9,1", {0: "a", 1: "b"}) == [0]
    assert visible_indices("", {0: "a"}) == []


def test_nvidia_smi_stands_in_when_pynvml_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.hardware.nvml._load_library", lambda: None)
    line = "0, GPU-ab, NVIDIA H200, 143771, 00000000:1B:00.0, 5, 16\n"
    view = see_gpus(ask=lambda: line)
    assert (view.gpus[0].name, view.gpus[0].nvlinks, view.gpus[0].memory_bytes) == ("NVIDIA H200", -1, 143771 << 20)
    assert see_gpus(ask=lambda: "").gpus == ()
    assert see_gpus(ask=lambda: "No devices were found\n").gpus == ()
