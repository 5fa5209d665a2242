"""ENV001: no environment variable slows the job down, turns off what it relies on, or reveals a credential."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.rules.credential_text import is_secret
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Impact, Outcome, exempt, failed, passed
from phalanx.rules.rule import Limit, Limits, Reference, Rule

ON = ("1", "true", "yes", "on")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trap:
    """The values of a variable that cost time or turn off error handling."""

    values: tuple[str, ...]
    harm: str
    several_hosts: bool = False  # the trap matters only with several hosts
    several_devices: bool = False  # the trap matters only with several devices per host


TRAPS = {
    "NCCL_IB_DISABLE": Trap(
        values=ON, harm="InfiniBand and RoCE are off: traffic between hosts goes over TCP sockets", several_hosts=True
    ),
    "NCCL_NET": Trap(values=("socket",), harm="traffic between hosts goes over TCP sockets", several_hosts=True),
    "NCCL_NET_GDR_LEVEL": Trap(
        values=("0", "loc"),
        harm="network cards do not read device memory: traffic is copied via the host",
        several_hosts=True,
    ),
    "NCCL_P2P_DISABLE": Trap(
        values=ON, harm="NVLink and PCIe between devices are unused: traffic goes via the host", several_devices=True
    ),
    "NCCL_SHM_DISABLE": Trap(
        values=ON,
        harm="processes of a host that reach each other by no P2P talk over the network card",
        several_devices=True,
    ),
    "CUDA_LAUNCH_BLOCKING": Trap(values=ON, harm="the host waits for every kernel: nothing overlaps"),
    "NCCL_DEBUG": Trap(values=("trace",), harm="every call of NCCL is logged, by every rank"),
    "TORCH_DISTRIBUTED_DEBUG": Trap(values=("detail",), harm="every collective is preceded by one that compares it"),
    "NCCL_BLOCKING_WAIT": Trap(values=ON, harm="the host waits for every collective"),
    "TORCH_NCCL_BLOCKING_WAIT": Trap(values=ON, harm="the host waits for every collective"),
    "NCCL_ASYNC_ERROR_HANDLING": Trap(values=("0",), harm="a collective that fails or times out hangs for ever"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": Trap(values=("0",), harm="a collective that fails or times out hangs for ever"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": Trap(values=ON, harm="every tensor asks the driver for its memory"),
    "NVTE_FLASH_ATTN": Trap(values=("0",), harm="Transformer Engine computes attention without FlashAttention"),
}
EXPLAINS = re.compile(
    r"\b(do not remove|don't remove|work-?around|hangs?|deadlock|needed|necessary|require[sd]?|must|otherwise|because|"
    r"avoid|prevents?|bug|issue|fix(es)?|crash(es)?|fails?|stuck|without|no (infiniband|nvlink|ib)|not support)"
    r"|没有|避免|否则|不支持|解决|卡住|卡死",
    re.IGNORECASE,
)
# Signs of a network that NCCL uses through a plugin, such as EFA: NCCL_IB_DISABLE does not affect it.
PLUGIN = re.compile(r"FI_PROVIDER|FI_EFA_\w+|NCCL_NET_PLUGIN|NCCL_FASTRAK_\w+|NCCL_GPUDIRECTTCPX_\w+|OFI_NCCL_\w+")
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check the environment variables of the file for credentials and for values that are traps."""
    variables = {
        name.removeprefix("env."): str(setting.value).strip()
        for name, setting in evidence.settings.items()
        if name.startswith("env.") and setting.value is not None
    }
    secrets = tuple(_secrets(evidence))
    if not variables:
        return secrets or (exempt("the file sets no environment variable"),)
    outcomes = [
        *secrets,
        *_traps(evidence, variables, limits.words("traps")),
        *_connections(evidence, variables, limits),
    ]
    return tuple(outcomes) or (passed(f"{len(variables)} environment variables, none of them a trap", value=0),)


def _secrets(evidence: Evidence) -> Iterator[Outcome]:
    """Yield a failure per variable or argument whose value is a credential; the value itself is never shown."""
    for name, setting in evidence.settings.items():
        if isinstance(setting.value, str) and is_secret(f"{name}={setting.value}"):
            variable = name.removeprefix("env.")
            yield failed(
                f"{variable} stands in the file with its value, which looks like a credential",
                at=f"setting:{name}",
                severity="error",
                impact=Impact(
                    note="no time by itself: files travel further than anybody remembers, and so do logs of them"
                ),
                fix=f"revoke it, and hand {variable} over in the environment of whoever starts the job",
            )


def _traps(evidence: Evidence, variables: dict[str, str], names: tuple[str, ...]) -> Iterator[Outcome]:
    one_host, one_device = _is_one_host(evidence), _is_one_device(evidence)
    for name in names:
        trap, value = TRAPS[name], variables.get(name, "")
        if (
            value.lower() not in trap.values
            or (trap.several_hosts and one_host)
            or (trap.several_devices and one_device)
        ):
            continue
        if name == "NCCL_IB_DISABLE" and any(PLUGIN.fullmatch(variable) for variable in variables):
            continue
        if name == "NCCL_NET_GDR_LEVEL" and _goes_by_sockets(variables):
            # Sockets never read device memory, so the setting costs nothing more.
            continue
        if name == "NVTE_FLASH_ATTN" and variables.get("NVTE_FUSED_ATTN") != "0":
            continue  # cuDNN's fused attention is used instead
        yield failed(
            f"{name}={value}: {trap.harm}",
            value=value,
            at=f"setting:env.{name}",
            severity="info" if _is_explained(evidence, name) else None,
            impact=Impact(note="how much depends on the machine; a setting for finding faults, left in"),
            fix=f"leave {name} out, or say why it stays in a waiver",
        )


def _goes_by_sockets(variables: dict[str, str]) -> bool:
    """Return whether another variable already keeps NCCL off InfiniBand and RoCE."""
    return any(variables.get(name, "").lower() in TRAPS[name].values for name in ("NCCL_IB_DISABLE", "NCCL_NET"))


# Settings with the number of hosts for a launcher: torchrun, DeepSpeed, Accelerate. If one exists, Slurm's number is
# only that of the allocated hosts, which may be more.
HOSTS, HELD = ("nnodes", "num_nodes", "num_machines"), ("SBATCH.nodes",)
SEVERAL = ("hostfile", "H", "machine_rank", "rdzv_endpoint")


def _is_one_host(evidence: Evidence) -> bool:
    """Return whether the job runs on one host: launchers use one unless they are given more."""
    if evidence.plan is not None:
        return evidence.plan.reliability.hosts == 1
    # DeepSpeed's launcher: localhost:0,1,2,3.
    include = evidence.find_setting("include", "i")
    if include is not None:
        return str(include.value).strip("\"' ").startswith("localhost") and "@" not in str(include.value)
    for names in (HOSTS, HELD):
        settings = [setting for name in names if (setting := evidence.find_setting(name)) is not None]
        if settings:
            return all(str(setting.value) == "1" for setting in settings)
    return evidence.find_setting(*SEVERAL) is None


def _is_one_device(evidence: Evidence) -> bool:
    if evidence.plan is not None:
        return evidence.plan.layout.devices <= evidence.plan.reliability.hosts
    visible = evidence.find_setting("env.CUDA_VISIBLE_DEVICES")
    if visible is not None and re.fullmatch(r"\d+", str(visible.value).strip("\"' ")):
        return True
    return evidence.setting_number("nproc_per_node", "num_gpus", "num_processes") == 1


def _is_explained(evidence: Evidence, name: str) -> bool:
    """Return whether a comment of the author states what the variable is needed for."""
    setting = evidence.find_setting(f"env.{name}")
    return setting is not None and EXPLAINS.search(setting.comment) is not None


def _connections(evidence: Evidence, variables: dict[str, str], limits: Limits) -> Iterator[Outcome]:
    value = variables.get(CONNECTIONS, "")
    if not value.isdigit() or evidence.practice.trainer not in ("megatron", "nemo") or evidence.changed:
        return
    if any("bubble" in name for name in evidence.settings):
        return  # a zero-bubble schedule has its own traffic to overlap
    tensor = evidence.the_job.parallel.tensor
    sharded = evidence.setting_flag("use_torch_fsdp2") or evidence.setting_flag("use_megatron_fsdp")
    queues = limits.number("connections")
    if _is_blackwell(evidence, int(value), limits):
        return
    if sharded and int(value) == queues:
        message = f"{CONNECTIONS}={value} with FSDP: gathers wait behind the products, and Megatron refuses it"
    elif not sharded and isinstance(tensor, int) and tensor > 1 and int(value) != queues:
        message = f"{CONNECTIONS}={value} with {tensor} tensor ranks: the overlap of their traffic needs one queue"
    else:
        return
    yield failed(
        message,
        value=int(value),
        threshold=queues,
        at=f"setting:env.{CONNECTIONS}",
        impact=Impact(note="kernels are not launched in the order that hides communication (Hopper and older)"),
        fix=f"{CONNECTIONS}={queues:g}" if not sharded else f"leave {CONNECTIONS} out",
    )


def _is_blackwell(evidence: Evidence, value: int, limits: Limits) -> bool:
    """Return whether kernel order does not depend on one queue.

    Without a known cluster, the value that recipes set on Blackwell identifies it.
    """
    if evidence.plan is not None:
        return evidence.plan.cluster.accelerator.family in limits.words("without_order")
    return value == limits.number("blackwell_queues")


RULE = Rule(
    id="ENV001",
    slug="environment-traps",
    severity="warning",
    requires="J",
    uses="P",
    requirement="No environment variable turns off links, overlap or error handling that the job relies on, or holds a "
    "credential.",
    why="""
Variables for finding a fault stay in scripts. `NCCL_P2P_DISABLE=1` sends traffic of 450 GB/s over a host's PCIe;
`NCCL_IB_DISABLE=1` replaces 400 Gb/s InfiniBand by TCP; `CUDA_LAUNCH_BLOCKING=1` makes every kernel wait for the one
before. Nothing fails, and the job is several times slower. Keys of trackers and hubs stay in scripts too, and are known
to everybody who reads them.
""",
    how="""
`export NAME=value` and `NAME=value command` of launch scripts, and environment tables of recipes. A variable is a
finding with the values that the page of the library names as such; those about links between hosts only where there are
several (the launcher's number goes before that of Slurm), `NCCL_NET_GDR_LEVEL` not where InfiniBand is off, those about
links within a host only with several devices in it; `NCCL_IB_DISABLE` is none where NCCL's network is a plugin, as on
EFA (`FI_PROVIDER`). A comment beside it that says what it is needed for makes it a remark.
`CUDA_DEVICE_MAX_CONNECTIONS` is 1 with Megatron's tensor parallelism, and not 1 with its FSDP; it is not judged on
Blackwell, and without a cluster not where it is 32, as recipes for Blackwell set it. A variable or argument whose value
looks like a credential, by the patterns of SEC004, is an error; `check` shows no such value.
""",
    limits={
        "traps": Limit(value=tuple(TRAPS), note="variables with a value that slows down or hides errors: our choice"),
        "without_order": Limit(value=("blackwell",), note="families that need no single queue: arguments.py"),
        "blackwell_queues": Limit(value=32, note="what Megatron-Bridge sets on Blackwell"),
        "connections": Limit(value=1, note="queues to a device with Megatron's tensor parallelism: arguments.py"),
    },
    bad="export NCCL_P2P_DISABLE=1\nexport CUDA_LAUNCH_BLOCKING=1",
    good="export NCCL_DEBUG=WARN",
    fix="Leave the variable out.",
    waive="A cloud without InfiniBand, where `NCCL_IB_DISABLE=1` only saves a search; hardware with a known fault.",
    history="2026.1: added in 0.7.",
    references=(
        Reference(text="NVIDIA NCCL user guide, environment variables", mark="recalled"),
        Reference(
            text="NVIDIA/Megatron-LM megatron/training/arguments.py: CUDA_DEVICE_MAX_CONNECTIONS", mark="recalled"
        ),
        Reference(text="PyTorch: CUDA semantics, CUDA_LAUNCH_BLOCKING; torch.distributed debugging", mark="recalled"),
    ),
    check=check,
)
