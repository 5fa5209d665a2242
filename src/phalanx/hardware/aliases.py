"""The many names people and drivers give to one device."""

from __future__ import annotations

import re

# Left: what people write, squeezed by `squeeze`. Right: the catalogue's name. A bare family name means the part
# most training clusters hold: SXM boards, the largest memory.
ALIASES = {
    "p100": "P100-16GB-SXM",
    "v100": "V100-32GB-SXM",
    "v100sxm": "V100-32GB-SXM",
    "v10032gb": "V100-32GB-SXM",
    "v10016gb": "V100-16GB-SXM",
    "v100pcie": "V100-32GB-PCIe",
    "dgx2": "V100-32GB-SXM3",
    "a100": "A100-80GB-SXM",
    "a100sxm": "A100-80GB-SXM",
    "a100sxm4": "A100-80GB-SXM",
    "a10080gb": "A100-80GB-SXM",
    "a10040gb": "A100-40GB-SXM",
    "a100pcie": "A100-80GB-PCIe",
    "a800": "A800-80GB-SXM",
    "h100": "H100-80GB-SXM",
    "h100sxm": "H100-80GB-SXM",
    "h100sxm5": "H100-80GB-SXM",
    "h10080gb": "H100-80GB-SXM",
    "h100pcie": "H100-80GB-PCIe",
    "h10096gb": "H100-96GB-500W",
    "h800": "H800-SXM",
    "h200": "H200-141GB-SXM",
    "h200sxm": "H200-141GB-SXM",
    "gh200": "GH200-96GB",
    "b200": "B200-SXM",
    "b300": "B300-SXM",
    "gb200": "GB200-NVL72",
    "gb300": "GB300-NVL72",
    "rubinannounced": "Rubin",
    "vr200": "Rubin",
    "mi300": "MI300X",
    "mi455xannounced": "MI455X",
    "tpuv6e": "TPU-v6e-Trillium",
    "trillium": "TPU-v6e-Trillium",
    "tpuv7": "TPU-v7-Ironwood",
    "tpu7x": "TPU-v7-Ironwood",
    "ironwood": "TPU-v7-Ironwood",
    "v2": "TPU-v2",
    "v3": "TPU-v3",
    "v4": "TPU-v4",
    "v5e": "TPU-v5e",
    "v5litepod": "TPU-v5e",
    "tpuv5lite": "TPU-v5e",
    "v5p": "TPU-v5p",
    "v6e": "TPU-v6e-Trillium",
    "v7": "TPU-v7-Ironwood",
    "trn1": "Trainium1",
    "trainium": "Trainium1",
    "trn2": "Trainium2",
    "910b": "Ascend-910B",
    "cpu": "CPU-core",
    "core": "CPU-core",
    "3090": "RTX-3090",
    "4090": "RTX-4090",
    "5090": "RTX-5090",
    "a6000": "RTX-A6000",
    # As NVML prints them, after `squeeze` has dropped the vendor and the memory technology.
    "a100sxm440gb": "A100-40GB-SXM",
    "a100sxm480gb": "A100-80GB-SXM",
    "a10080gbpcie": "A100-80GB-PCIe",
    "a800sxm480gb": "A800-80GB-SXM",
    "h10080gbhbm3": "H100-80GB-SXM",
    "h10096gbhbm2e": "H100-96GB-500W",
    "v100sxm232gb": "V100-32GB-SXM",
    "v100sxm216gb": "V100-16GB-SXM",
    "v100sxm332gb": "V100-32GB-SXM3",
    "v100pcie32gb": "V100-32GB-PCIe",
    "p100sxm216gb": "P100-16GB-SXM",
    "gh200480gb": "GH200-96GB",
    "gh200144ghbm3e": "GH200-141GB",
}
_VENDORS = re.compile(r"^(nvidia|amd|google|intel|aws|huawei)(corporation)?[\s_-]*", re.IGNORECASE)
_PRODUCT_LINES = re.compile(r"\b(tesla|geforce|instinct|quadro|habana)\b", re.IGNORECASE)


def squeeze(name: str) -> str:
    """A name without vendor, product line, case or punctuation, for comparing.

    >>> squeeze("NVIDIA GeForce RTX 4090"), squeeze("H100-80GB-SXM")
    ('rtx4090', 'h10080gbsxm')
    """
    short = _PRODUCT_LINES.sub("", _VENDORS.sub("", name.strip()))
    return re.sub(r"[^a-z0-9]", "", short.lower())
