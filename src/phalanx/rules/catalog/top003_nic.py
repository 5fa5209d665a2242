"""TOP003: every device uses a network card near it."""

from __future__ import annotations

from phalanx.rules.evidence import Evidence
from phalanx.rules.facts.host import NicPath
from phalanx.rules.outcome import Outcome, exempt, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import plural

# Grace CPUs: the card is reached over a coherent link, without a PCIe switch between.
COHERENT = ("GB", "GH")
GPUS = ("nvidia-a100", "nvidia-h100", "nvidia-h200", "nvidia-b200", "amd-mi300x", "custom")


def check(evidence: Evidence, limits: Limits) -> Outcome:
    """Judge the PCIe path of each device to its card, as found on the host."""
    plan = evidence.the_plan
    if plan.layout.devices <= plan.cluster.domain_devices:
        return exempt("the job stays inside one domain: no network card is used")
    if plan.cluster.accelerator.name.upper().startswith(COHERENT):
        return exempt(f"{plan.cluster.accelerator.name} reaches its network card over a coherent link")
    paths = evidence.host.nic_paths if evidence.host is not None else None
    if paths is None:
        return unknown(
            "no evidence from the host: which network card each device uses is not known",
            fix="check on a node of the cluster itself, with nvidia-smi or amd-smi there",
        )
    if not paths:
        return unknown("the host reports no network card", fix="look at nvidia-smi topo -m on the node")
    return _judge_paths(evidence, paths, limits)


def _judge_paths(evidence: Evidence, paths: tuple[NicPath, ...], limits: Limits) -> Outcome:
    near_kinds = limits.words("near")
    far_paths = [path for path in paths if path.path.upper() not in near_kinds]
    path_list = ", ".join(
        f"{path.device[:24]}→{path.nic[:24]} {path.path[:8]}" for path in (far_paths or list(paths))[:8]
    )
    if not far_paths:
        return passed(
            f"{plural(len(paths), 'device')}, each at most a PCIe switch from its network card", formula=(path_list,)
        )
    share = len(far_paths) / len(paths)
    shown_s = sum(group.shown_s for group in evidence.the_plan.mapping if "NIC" in group.tier)
    slower = limits.number("far_rate")
    lost_share = share * shown_s * (1 / max(slower, 0.01) - 1) / max(evidence.the_plan.prediction.step_s, 1e-30)
    return failed(
        f"{len(far_paths)} of {len(paths)} devices reach their network card through the CPU",
        formula=(path_list, f"near: {', '.join(near_kinds)}"),
        value=len(far_paths),
        threshold=0,
        unit="devices",
        impact=evidence.loses(
            lost_share, f"network traffic of these devices at {slower:.0%} of its rate, by our estimate"
        ),
        fix="give each device the card behind its own switch (NCCL_IB_HCA, CUDA_VISIBLE_DEVICES order, the VM's "
        "topology file), and pin its process to that socket",
    )


RULE = Rule(
    id="TOP003",
    slug="nic-affinity",
    severity="warning",
    requires="P",
    uses="H",
    requirement="Each device uses a network card no farther away than its own PCIe switch complex.",
    why="""
Only behind a common PCIe switch do card and GPU talk to each other directly (GPUDirect RDMA). NCCL's default for it
stops where the path goes through the CPU (`NCCL_NET_GDR_LEVEL`, NVIDIA/nccl docs env.rst): then every byte is copied
through host memory, and over the socket link where the card is on the other socket.
""",
    how="""
`path(device, card)` is `PIX` or `PXB` in the terms of `nvidia-smi topo -m` (or `amd-smi topology`), for every device of
a job that leaves its domain. `PHB`, `NODE` and `SYS` go through the CPU. CPUs, TPUs and hosts with coherent links
(Grace) are exempt. Virtual machines that hide the tree give no paths: unknown. Whether a process is pinned to the
socket of its card shows only while it runs, so that is advised and not judged.
""",
    limits={
        "near": Limit(value=("PIX", "PXB"), note="paths that stay behind a PCIe switch complex: NCCL's GDR levels"),
        "far_rate": Limit(
            value=0.5, note="share of the line rate over a path through the CPU: our choice, for the impact"
        ),
    },
    bad="""
GPU0  mlx5_4  SYS
""",
    good="""
GPU0  mlx5_0  PIX
""",
    fix="`NCCL_IB_HCA` and the order of devices so that card i serves device i; numactl for the process.",
    waive="A cloud machine that hides its PCIe tree, where nccl-tests reach the line rate.",
    references=(Reference(text="NVIDIA/nccl docs, env.rst: NCCL_NET_GDR_LEVEL", mark="read"),),
    check=check,
    profiles=GPUS,
)
