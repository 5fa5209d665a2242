"""Constants of NCCL 2.30's tuning model, for every algorithm, protocol and GPU family.

From NVIDIA/nccl src/graph/tuning.cc (2.30.7 @5067397c), src/graph/topo.h and src/graph/search.cc; the numbers are
NCCL's (Apache-2.0), the code is not. Units are microseconds and GB/s; triples are LL / LL128 / Simple, or one, two
and more nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Algorithm = Literal["Tree", "Ring", "CollnetDirect", "CollnetChain", "NVLS", "NVLSTree", "PAT"]
Protocol = Literal["LL", "LL128", "Simple"]
Family = Literal["volta", "ampere", "hopper", "blackwell"]
Hop = Literal["base", "NVLINK", "PCI", "NET"]
Triple = tuple[float, float, float]

ALGORITHMS: tuple[Algorithm, ...] = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "NVLS", "NVLSTree", "PAT")
PROTOCOLS: tuple[Protocol, ...] = ("LL", "LL128", "Simple")
FAMILIES: tuple[Family, ...] = ("volta", "ampere", "hopper", "blackwell")

_NONE: Triple = (0.0, 0.0, 0.0)

LATENCY_US: Mapping[Hop, Mapping[Algorithm, Triple]] = {
    "base": {
        "Tree": (6.8, 14.0, 8.4),
        "Ring": (6.6, 14.0, 8.4),
        "CollnetDirect": _NONE,
        "CollnetChain": _NONE,
        "NVLS": _NONE,
        "NVLSTree": _NONE,
        "PAT": (8.0, 8.0, 8.0),
    },
    "NVLINK": {
        "Tree": (0.6, 1.25, 4.0),
        "Ring": (0.6, 1.9, 3.4),
        "CollnetDirect": (0.0, 0.0, 3.7),
        "CollnetChain": (0.0, 0.0, 2.8),
        "NVLS": (0.0, 0.0, 25.0),
        "NVLSTree": (0.0, 0.0, 25.0),
        "PAT": (0.0, 0.0, 4.0),
    },
    "PCI": {
        "Tree": (1.0, 1.9, 4.0),
        "Ring": (1.0, 2.5, 5.7),
        "CollnetDirect": (0.0, 0.0, 3.7),
        "CollnetChain": (0.0, 0.0, 2.8),
        "NVLS": _NONE,
        "NVLSTree": _NONE,
        "PAT": (0.0, 0.0, 4.0),
    },
    "NET": {
        "Tree": (5.0, 8.5, 14.0),
        "Ring": (2.7, 4.0, 14.0),
        "CollnetDirect": (0.0, 0.0, 31.0),
        "CollnetChain": (0.0, 0.0, 30.0),
        "NVLS": (0.0, 0.0, 18.0),
        "NVLSTree": (0.0, 0.0, 20.9),
        "PAT": (0.0, 0.0, 14.0),
    },
}

# Limits of the LL protocol. Between nodes NCCL takes the row by the CPU's vendor: Volta's for Intel, Ampere's for
# AMD.
LL_MOST_GB: Mapping[Family, Triple] = {
    "volta": (39.0, 39.0, 20.4),
    "ampere": (87.7, 22.5, 19.0),
    "hopper": (141.0, 45.0, 35.0),
    "blackwell": (282.0, 90.0, 70.0),
}
# Limits of one channel.
RING_LL128_CHANNEL_GB: Mapping[Family, Triple] = {
    "volta": (20.0, 20.0, 20.0),
    "ampere": (20.0, 20.0, 20.0),
    "hopper": (36.7, 36.7, 36.7),
    "blackwell": (40.0, 40.0, 40.0),
}
TREE_LL128_CHANNEL_GB: Mapping[Family, Triple] = {
    "volta": (20.0, 20.0, 20.0),
    "ampere": (20.0, 20.0, 20.0),
    "hopper": (36.7, 36.7, 29.0),
    "blackwell": (55.6, 31.67, 20.0),
}
TREE_CHANNEL_GB: Mapping[Family, Triple] = {
    "volta": (26.5, 18.5, 10.0),
    "ampere": (24.0, 23.6, 17.8),
    "hopper": (38.7, 41.4, 36.0),
    "blackwell": (70.0, 42.8, 24.0),
}
NVLS_TREE_CHANNEL_GB: Mapping[Family, Triple] = {
    "volta": (26.5, 18.5, 10.0),
    "ampere": (24.0, 23.6, 17.8),
    "hopper": (0.0, 57.7, 45.5),
    "blackwell": (0.0, 96.0, 80.0),
}
NVLS_EFFICIENCY: Mapping[Family, float] = {"volta": 0.0, "ampere": 0.0, "hopper": 0.85, "blackwell": 0.74}

# c(S) by power of two from 64 B; NCCL reads the first 23 entries for trees and 24 for NVLS trees.
TREE_CORRECTION: Mapping[Protocol, tuple[float, ...]] = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1, 1),
    "LL128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, *(0.6,) * 6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1, 1),
    "Simple": (*(0.9,) * 7, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9),
}

# GB/s of one NVLink, and NVLinks per GPU on NVSwitch boards (src/graph/topo.h; boards: V100 6, A100 12, later 18).
NVLINK_GB: Mapping[Family, float] = {"volta": 20.0, "ampere": 20.0, "hopper": 20.6, "blackwell": 40.1}
NVLINKS: Mapping[Family, int] = {"volta": 6, "ampere": 12, "hopper": 18, "blackwell": 18}
NET_GB_PER_100G = 12.0

# Channel speeds that the search for rings and trees tries, fastest first (src/graph/search.cc).
_OLD_INSIDE = (40.0, 30.0, 20.0, 18.0, 15.0, 12.0, 10.0, 9.0, 7.0, 6.0, 5.0, 4.0, 3.0)
_OLD_ACROSS = (48.0, 30.0, 28.0, 24.0, 20.0, 18.0, 15.0, 12.0, 10.0, 9.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.4, 1.2, 0.24, 0.12)
_SLOW = (40.0, 30.0, 24.0, 22.0, 20.0, 17.5, 15.0, 12.0, 6.0, 3.0, 2.4, 1.2, 0.24, 0.12)
SPEEDS_INSIDE_GB: Mapping[Family, tuple[float, ...]] = {
    "volta": _OLD_INSIDE,
    "ampere": _OLD_INSIDE,
    "hopper": (60.0, 50.0, 40.0, 30.0, 24.0, 20.0, 15.0, 12.0, 11.0, 6.0, 3.0),
    "blackwell": (90.0, 80.0, 70.0, 60.0, 50.0, 45.0, 40.0, 30.0, 24.0, 20.0, 19.0, 18.0),
}
SPEEDS_ACROSS_GB: Mapping[Family, tuple[float, ...]] = {
    "volta": _OLD_ACROSS,
    "ampere": _OLD_ACROSS,
    "hopper": (48.0, 45.0, 42.0, *_SLOW),
    "blackwell": (96.0, 48.0, 45.1, 42.0, *_SLOW),
}
MOST_NVLS_HEADS = 32  # NCCL_MAX_NVLS_ARITY
