"""Hardware profiles and scaling classes: values that rules assume where no measurement exists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from phalanx.errors import mistake, nearest
from phalanx.hardware.types import Cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareProfile:
    """The assumptions of the rules about one kind of hardware.

    None means that no figure is published, so it must be measured.
    """

    name: str
    title: str
    scale_up: int  # devices of a scale-up domain; 0 means the cluster's own value
    formats: tuple[str, ...]  # number formats of matrix products
    mfu_floor: float | None  # None: reported, not judged
    utilization_sources: tuple[str, ...]  # trustworthy sources of utilization, as monitor events name them
    is_gpu: bool
    note: str
    must_measure: bool = False  # verdicts on time and utilization are unknown until `phalanx probe` or a calibration


PROFILES: Mapping[str, HardwareProfile] = {
    profile.name: profile
    for profile in (
        HardwareProfile(
            name="cpu-gloo",
            title="CPU ranks over gloo",
            scale_up=0,
            formats=("fp32", "bf16"),
            mfu_floor=None,
            utilization_sources=("cpu-time", "gemm"),
            is_gpu=False,
            note="peak is the measured matrix product; a host is the domain; every bit can be checked",
        ),
        HardwareProfile(
            name="nvidia-a100",
            title="NVIDIA A100",
            scale_up=8,
            formats=("fp32", "bf16", "fp16"),
            mfu_floor=0.40,
            utilization_sources=("dcgm-sm", "dcgm-tensor", "gpm-sm", "gpm-tensor"),
            is_gpu=True,
            note="DCGM's profiling groups conflict on Ampere: SM and tensor activity by turns",
        ),
        HardwareProfile(
            name="nvidia-h100",
            title="NVIDIA H100, H800, GH200",
            scale_up=8,
            formats=("fp32", "bf16", "fp16", "fp8"),
            mfu_floor=0.35,
            utilization_sources=("gpm-sm", "gpm-tensor", "dcgm-sm", "dcgm-tensor"),
            is_gpu=True,
            note="fp8: MFU floor 0.30 over the 16-bit peak",
        ),
        HardwareProfile(
            name="nvidia-h200",
            title="NVIDIA H200",
            scale_up=8,
            formats=("fp32", "bf16", "fp16", "fp8"),
            mfu_floor=0.35,
            utilization_sources=("gpm-sm", "gpm-tensor", "dcgm-sm", "dcgm-tensor"),
            is_gpu=True,
            note="as the H100, with 141 GB",
        ),
        HardwareProfile(
            name="nvidia-b200",
            title="NVIDIA B200, B300, GB200, GB300",
            scale_up=0,
            formats=("fp32", "bf16", "fp16", "fp8", "fp4"),
            mfu_floor=0.30,
            utilization_sources=("gpm-sm", "gpm-tensor", "dcgm-sm", "dcgm-tensor"),
            is_gpu=True,
            note="domain of 8 (HGX) or 72 (NVL72): the cluster says; failure rates are hearsay, measure yours",
        ),
        HardwareProfile(
            name="amd-mi300x",
            title="AMD MI300X, MI325X",
            scale_up=8,
            formats=("fp32", "bf16", "fp16", "fp8"),
            mfu_floor=None,
            utilization_sources=("amdsmi-gfx",),
            is_gpu=True,
            note="no published failure rate or MFU of training jobs: reported, not judged",
        ),
        HardwareProfile(
            name="tpu",
            title="Google TPU",
            scale_up=0,
            formats=("fp32", "bf16"),
            mfu_floor=0.35,
            utilization_sources=("libtpu-tensorcore",),
            is_gpu=False,
            note="algorithms, timeouts and buffers belong to the compiler and the runtime; MFU floor 0.45 on v5",
        ),
        HardwareProfile(
            name="custom",
            title="anything else",
            scale_up=0,
            formats=("fp32", "bf16", "fp16", "fp8", "fp4"),
            mfu_floor=None,
            utilization_sources=("gpm-sm", "dcgm-sm", "amdsmi-gfx", "libtpu-tensorcore", "cpu-time", "gemm"),
            is_gpu=True,
            note="nothing is assumed: rates must be measured (phalanx probe, phalanx calibrate) or given",
            must_measure=True,
        ),
    )
}

# By the beginning of the accelerator's name. Workstation and consumer cards of the same families are `custom`: they
# have different links and memory, and no published rates.
_BY_NAME = {
    "nvidia-a100": ("A100", "A800"),
    # H200 must precede H100, whose prefix H20 it matches too.
    "nvidia-h200": ("H200",),
    "nvidia-h100": ("H100", "H800", "H20", "GH200"),
    "nvidia-b200": ("B200", "B300", "GB200", "GB300"),
    "amd-mi300x": ("MI300", "MI325"),
    "tpu": ("TPU",),
    "cpu-gloo": ("CPU",),
}


def profile_of(cluster: Cluster) -> HardwareProfile:
    """Return the hardware profile of a cluster's accelerator; `custom` for an accelerator that is not known.

    >>> from phalanx.hardware.cluster import resolve_cluster
    >>> specs = ("8xH100:2", "72xGB200:1", "8xA100:1", "local-cpu:2", "8xL40S:1")
    >>> [profile_of(resolve_cluster(spec)).name for spec in specs]
    ['nvidia-h100', 'nvidia-b200', 'nvidia-a100', 'cpu-gloo', 'custom']
    """
    accelerator = cluster.accelerator
    name = next((name for name, starts in _BY_NAME.items() if accelerator.name.upper().startswith(starts)), "custom")
    if accelerator.family == "cpu":  # a user's own entry may have any name
        name = "cpu-gloo"
    if name == "tpu":
        # Unlike earlier TPUs, v7 multiplies in fp8.
        tpu = PROFILES["tpu"]
        return replace(tpu, formats=(*tpu.formats, "fp8")) if accelerator.family == "tpu-v7" else tpu
    return PROFILES[name]


def find_profile(name: str) -> HardwareProfile:
    """Return the profile with this name; raises UserError that suggests the nearest name."""
    if name in PROFILES:
        return PROFILES[name]
    close = nearest(name, PROFILES)
    names = ", ".join(PROFILES)
    raise mistake(
        f"--profile {name[:60]}",
        "is not a profile",
        fix=f"did you mean {close}? the profiles are {names}" if close else f"the profiles are {names}",
    )


# Scaling classes: advice on 64 devices becomes a requirement on 100,000.


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """A range of sizes, up to `most` devices."""

    name: str
    most: float
    text: str


CLASSES = (
    Scaling(name="S1", most=64, text="up to 64 devices: timing rules of CKP and FLT warn"),
    Scaling(name="S2", most=1_024, text="up to 1,024 devices"),
    Scaling(name="S3", most=4_096, text="up to 4,096 devices: spares and copies in memory are required"),
    Scaling(name="S4", most=32_768, text="up to 32,768 devices: replicas are compared, collectives are hierarchical"),
    Scaling(name="S5", most=100_000, text="up to 100,000 devices: steps commit or do not, whoever is lost"),
    Scaling(name="S6", most=float("inf"), text="beyond 100,000 devices: nothing larger has been published"),
)


def scaling_of(devices: int) -> Scaling:
    """Return the scaling class of a job on this many devices.

    >>> scaling_of(64).name, scaling_of(65).name, scaling_of(131_072).name
    ('S1', 'S2', 'S6')
    """
    return next(scaling for scaling in CLASSES if devices <= scaling.most)


def at_least(scaling: Scaling, name: str) -> bool:
    """Return whether a scaling class is `name` or a larger one."""
    return scaling.name >= name
