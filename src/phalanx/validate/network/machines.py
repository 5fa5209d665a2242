"""The machine a row's words describe, as NCCL would see it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from phalanx.network.nccl_system import System, system
from phalanx.network.nccl_tables import Family
from phalanx.validate.network.words import number

FAMILY_OF: Mapping[str, Family] = {
    "V100": "volta",
    "A100": "ampere",
    "A800": "ampere",
    "H100": "hopper",
    "H200": "hopper",
    "H800": "hopper",
    "GH200": "hopper",
    "B200": "blackwell",
    "B300": "blackwell",
    "GB200": "blackwell",
    "GB300": "blackwell",
}
NIC_GBPS = 400.0  # per GPU, where a row with several nodes names none: the common NIC of Hopper and Blackwell boards
MOST = 1 << 20
_NODES = re.compile(r"\b(\d+) nodes? x (\d+) ([A-Z]+\d+)\b|\b(\d+) ?x ?(\d+) ([A-Z]+\d+)\b|\b(\d+)x ([A-Z]+\d+)\b")
_RACK = re.compile(r"\bNVL(\d+)\b")


def machine(text: str, *, nvls: bool = True) -> System | None:
    """`4 nodes x 8 B200 ... 8x400G`, `4x8 H100, 3.2T IB`, `8x H200` or `NVL72`; None where there is no such thing."""
    shape = _shape(text)
    if shape is None:
        return None
    nodes, per_node, gpu = shape
    family = FAMILY_OF.get(gpu)
    if family is None or not 0 < nodes * per_node <= MOST or nodes * per_node < 2:
        return None
    return system(nodes=nodes, per_node=per_node, family=family, nic_gbps=_nic(text, per_node), nvls=nvls)


def _shape(text: str) -> tuple[int, int, str] | None:
    if found := _NODES.search(text):
        first = found[1] or found[4]
        if first:
            return int(first[:7]), int((found[2] or found[5])[:7]), found[3] or found[6]
        return 1, int(found[7][:7]), found[8]
    if found := _RACK.search(text):
        return 1, int(found[1][:4]), "GB200"
    return None


def _nic(text: str, per_node: int) -> float:
    if found := re.search(r"\b\d+x(\d+)G\b", text):
        return float(found[1])
    whole = number(text, r"([\d.]+)T (?:IB|RoCE|EFA)")
    return 1000.0 * whole / per_node if whole else NIC_GBPS
