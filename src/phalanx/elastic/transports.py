"""The transports that NCCL can use on a host: NVLink, NVLS, InfiniBand, SHARP, or only sockets.

NCCL falls back silently from the fastest path to the next, down to TCP; a run is then slow without a reason in its
log. Facts are gathered in one place; their meaning is a plain function of them. Nothing here prevents a start: these
are warnings before ranks start, and notes for `phalanx show`.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import Problem
from phalanx.hardware.discover import discover
from phalanx.hardware.types import Machine
from phalanx.plan.plan import Plan
from phalanx.units import format_bytes, plural

# GPU generations with sums in the NVSwitch (NVLink SHARP): from the third generation of switches on, with Hopper.
NVLS_FAMILIES = ("hopper", "blackwell", "rubin")
# Interfaces that NCCL leaves out unless they are named or the only ones.
NEVER_CHOSEN = ("lo", "docker")
# Of the plan's assumption: less gets a warning.
NIC_SHARE = 0.5
# Thread blocks; such small values are meant for ranks that share a GPU.
FEW_BLOCKS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class TransportFacts:
    """The transports found on one host, and the plan's assumptions."""

    host: str
    ranks: int  # of the job on this host
    hosts: int  # of the job
    gpus: int
    gpu_name: str
    # Least of its GPUs; -1 where it could not be read.
    nvlinks: int
    # Kinds of connection between two GPUs, except NVLink.
    paths: tuple[str, ...]
    # Of one GPU; 0 where it could not be read.
    pcie_bytes_per_s: float
    # The plan's assumption for a link between GPUs.
    planned_link_bytes_per_s: float
    nvls: bool  # True when the GPUs' generation has it
    # One GPU may read another's memory; None where it was not checked.
    peer_access: bool | None
    infiniband: tuple[str, ...]  # names of the devices, RoCE and EFA included
    infiniband_bytes_per_s: float
    # Network interfaces, with their bytes/s; 0 where the driver does not report it.
    interfaces: Mapping[str, float]
    # Of a host; 0 where the plan has no network.
    planned_nic_bytes_per_s: float
    algorithm: str  # comm.algorithm
    settings: Mapping[str, str]  # NCCL_*


def facts_of(
    plan: Plan,
    machine: Machine,
    *,
    ranks: int,
    hosts: int,
    environ: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
    peer_access: bool | None = None,
) -> TransportFacts:
    """Gather the facts of this host."""
    device, cluster = plan.cluster.accelerator, plan.cluster
    cards = {nic.name: nic.bytes_per_s for nic in machine.nics if nic.kind == "ethernet"}
    try:
        names = sorted(os.listdir(root / "sys/class/net"))
    except OSError:
        names = sorted(cards)
    verbs = [nic for nic in machine.nics if nic.kind == "infiniband"]
    return TransportFacts(
        host=machine.hostname,
        ranks=ranks,
        hosts=hosts,
        gpus=len(machine.gpus),
        gpu_name=machine.gpus[0].name if machine.gpus else device.name,
        nvlinks=min((gpu.nvlinks for gpu in machine.gpus), default=-1),
        paths=tuple(sorted({path.kind for path in machine.gpu_paths if path.kind != "NVLink"})),
        pcie_bytes_per_s=min((gpu.pcie_bytes_per_s for gpu in machine.gpus), default=0.0),
        planned_link_bytes_per_s=cluster.link_bytes_per_s,
        nvls=device.family in NVLS_FAMILIES,
        peer_access=peer_access,
        infiniband=tuple(nic.name for nic in verbs),
        infiniband_bytes_per_s=sum(nic.bytes_per_s for nic in verbs),
        interfaces={name: cards.get(name, 0.0) for name in names},
        planned_nic_bytes_per_s=cluster.nic_bytes_per_s * min(ranks, cluster.domain_devices) if hosts > 1 else 0.0,
        algorithm=plan.job.comm.algorithm,
        settings={name: value for name, value in environ.items() if name.startswith("NCCL_")},
    )


def transport_warnings(facts: TransportFacts) -> list[Problem]:
    """Return the problems that make communication slower than the plan assumes, or stop it, with their remedies."""
    if facts.ranks * facts.hosts < 2:
        return []
    return [*_inside(facts), *_between(facts), *_forced(facts)]


def transport_notes(facts: TransportFacts) -> list[str]:
    """Return the warnings in a line each, and notes on features that this hardware does not have."""
    notes = [f"{problem.what}: {problem.why}" for problem in transport_warnings(facts)]
    several = facts.ranks > 1 and facts.gpus > 1
    if several and not facts.nvls and not any("NVLS" in text for text in notes):
        notes.append(f"{facts.gpu_name} has no NVLS: all-reduces are summed by the GPUs, not by the switch")
    if facts.hosts > 1 and facts.infiniband and not _is_on(facts, "NCCL_COLLNET_ENABLE"):
        notes.append("no SHARP: sums between hosts are made by GPUs (NCCL_COLLNET_ENABLE is not 1)")
    return notes


def facts_here(plan: Plan, *, slots: int) -> TransportFacts | None:
    """Gather the facts of this host, which has `slots` places for ranks; None where ranks run on CPUs."""
    if plan.cluster.accelerator.family == "cpu":
        return None
    hosts = max(1, -(-plan.layout.devices // max(1, slots)))
    return facts_of(plan, discover(), ranks=min(slots, plan.layout.devices), hosts=hosts, peer_access=_peer_access())


def _inside(facts: TransportFacts) -> Iterator[Problem]:
    """Yield problems between the GPUs of one host."""
    if facts.ranks < 2:
        return
    if 0 < facts.gpus < facts.ranks:
        yield Problem(
            where=facts.host,
            what=f"{facts.ranks} ranks share {plural(facts.gpus, 'GPU')}",
            why="they take turns: what is computed is right, how fast it goes says nothing",
        )
    several = facts.gpus > 1
    if several and facts.nvlinks == 0:
        way = f" ({', '.join(facts.paths)})" if facts.paths else ""
        rate = f" at {format_bytes(facts.pcie_bytes_per_s)}/s" if facts.pcie_bytes_per_s else ""
        counted = f"; the plan assumed {format_bytes(facts.planned_link_bytes_per_s)}/s"
        yield Problem(
            where=facts.host,
            what=f"no NVLink between its {facts.gpus} × {facts.gpu_name}",
            why=f"NCCL goes over PCIe{way}{rate}{counted}",
            fix="look at nvidia-smi topo -m; plan for what is here: phalanx plan JOB --cluster local",
        )
    if _is_on(facts, "NCCL_P2P_DISABLE") or (several and facts.peer_access is False):
        named = _is_on(facts, "NCCL_P2P_DISABLE")
        yield Problem(
            where=facts.host,
            what="NCCL_P2P_DISABLE=1" if named else "its GPUs cannot read each other's memory",
            why="every message between its GPUs goes through host memory",
            fix="unset it" if named else "look at nvidia-smi topo -p2p r; ACS and IOMMU of virtual machines forbid it",
        )
    if _is_on(facts, "NCCL_SHM_DISABLE"):
        yield Problem(
            where=facts.host,
            what="NCCL_SHM_DISABLE=1",
            why="what does not go from GPU to GPU goes over the network card, also inside the host",
            fix="unset it",
        )
    wants_nvls = facts.algorithm == "nvls" or "NVLS" in facts.settings.get("NCCL_ALGO", "").upper()
    switched_off = facts.settings.get("NCCL_NVLS_ENABLE") == "0"
    if several and facts.nvls and facts.nvlinks != 0 and switched_off:
        yield Problem(
            where=facts.host,
            what="NCCL_NVLS_ENABLE=0 switches sums in the NVSwitch (NVLS) off",
            why="all-reduces inside the host are summed by the GPUs, which sends every byte twice",
            fix="unset it, unless its buffers do not fit; phalanx fabric collective --no-nvls shows what it costs",
        )
    if wants_nvls and (not facts.nvls or switched_off or facts.nvlinks == 0):
        reason = "NCCL_NVLS_ENABLE=0" if switched_off else f"{facts.gpu_name} here has no NVSwitch that sums"
        yield Problem(
            where=facts.host,
            what=f"NVLS is asked for, and there is none: {reason}",
            why="NCCL refuses, or takes ring and tree instead",
            fix='set comm.algorithm = "auto"',
        )


def _between(facts: TransportFacts) -> Iterator[Problem]:
    """Yield problems between hosts, and of the interface that even one host needs at the start."""
    named = facts.settings.get("NCCL_SOCKET_IFNAME", "")
    chosen = chosen_interfaces(named, facts.interfaces)
    if named and not chosen:
        yield Problem(
            where=facts.host,
            what=f"NCCL_SOCKET_IFNAME={named} fits none of its interfaces ({', '.join(facts.interfaces) or 'none'})",
            why="NCCL would not start: it meets the other ranks over sockets",
            fix="name one of them, or unset it",
        )
    if facts.hosts < 2:
        return
    off = _is_on(facts, "NCCL_IB_DISABLE")
    plugin = facts.settings.get("NCCL_NET_PLUGIN", "none") != "none" or facts.settings.get("NCCL_NET", "IB") != "IB"
    if (off or not facts.infiniband) and not (plugin and not off):
        where = chosen[0] if chosen else "an interface of its choice"
        speed = facts.interfaces.get(where, 0.0)
        at_rate = f" at {format_bytes(speed)}/s" if speed else ""
        counted = facts.planned_nic_bytes_per_s
        plan = f"; the plan assumed {format_bytes(counted)}/s of this host" if counted else ""
        what = (
            f"NCCL_IB_DISABLE=1 switches {', '.join(facts.infiniband) or 'InfiniBand'} off"
            if off
            else "no InfiniBand, RoCE or EFA device (/sys/class/infiniband)"
        )
        yield Problem(
            where=facts.host,
            what=what,
            why=f"NCCL uses TCP sockets on {where}{at_rate}, without GPUDirect{plan}",
            fix="unset it"
            if off
            else "load the drivers and pass the devices into the container; ibv_devinfo lists them",
        )
    elif 0 < facts.infiniband_bytes_per_s < NIC_SHARE * facts.planned_nic_bytes_per_s:
        yield Problem(
            where=facts.host,
            what=f"{', '.join(facts.infiniband)} together carry {format_bytes(facts.infiniband_bytes_per_s)}/s",
            why=f"the plan assumed {format_bytes(facts.planned_nic_bytes_per_s)}/s of this host",
            fix="look at ibstat for ports that are down, or plan for these: phalanx cluster",
        )


def _forced(facts: TransportFacts) -> Iterator[Problem]:
    """Yield a warning for each variable that overrides NCCL's choices."""
    for name in ("NCCL_ALGO", "NCCL_PROTO"):
        if value := facts.settings.get(name):
            own = f"allreduce:{facts.algorithm}"
            if name == "NCCL_ALGO" and value == own:
                # Set because of comm.algorithm.
                continue
            yield Problem(
                where=facts.host,
                what=f"{name}={value} is forced",
                why="NCCL chooses by message size and topology; one choice for all sizes is slower for most",
                fix="unset it, or set comm.algorithm in the job for all-reduces alone"
                if name == "NCCL_ALGO"
                else "unset it",
            )
    for name in ("NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS"):
        value = facts.settings.get(name, "")
        if value.isdigit() and 0 < int(value) <= FEW_BLOCKS and facts.gpus >= facts.ranks:
            yield Problem(
                where=facts.host,
                what=f"{name}={value} leaves NCCL few thread blocks",
                why="its kernels cannot fill NVLink or a fast network card with them",
                fix="unset it",
            )


def _is_on(facts: TransportFacts, name: str) -> bool:
    return facts.settings.get(name, "0") not in ("", "0")


def chosen_interfaces(named: str, interfaces: Mapping[str, float] | Sequence[str]) -> list[str]:
    """Return the interfaces that NCCL_SOCKET_IFNAME selects: prefixes; after "=" exact names, after "^" all others.

    >>> chosen_interfaces("eth", ["lo", "eth0", "eth1"]), chosen_interfaces("^eth", ["lo", "eth0", "ib0"])
    (['eth0', 'eth1'], ['ib0'])
    >>> chosen_interfaces("=eth", ["eth0"]), chosen_interfaces("", ["lo", "docker0", "eth0"])
    ([], ['eth0'])
    """
    names = list(interfaces)
    usual = [name for name in names if not name.startswith(NEVER_CHOSEN)] or names
    if not named:
        return usual
    inverse, rest = named.startswith("^"), named.removeprefix("^")
    exact, rest = rest.startswith("="), rest.removeprefix("=")
    wanted = [word for word in rest.split(",") if word]

    def fits(name: str) -> bool:
        # A colon separates the port, as in "eth0:20000".
        return any(
            name == word.partition(":")[0] if exact else name.startswith(word.partition(":")[0]) for word in wanted
        )

    return [name for name in usual if not fits(name)] if inverse else [name for name in names if fits(name)]


def _peer_access() -> bool | None:
    """Return True when every GPU can read the next one's memory.

    Returns None where torch is not imported, because the import takes seconds.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return None
    try:
        return all(torch.cuda.can_device_access_peer(index, (index + 1) % count) for index in range(count))
    except RuntimeError:
        return None


# The network interface that has an address: gloo and NCCL need names, users write addresses.


# linux/sockios.h: the IPv4 address of an interface.
_SIOCGIFADDR = 0x8915
LIBRARIES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def interface_of(address: str) -> str | None:
    """Return the name of the interface with this address; None when no interface of this host has it.

    >>> interface_of("127.0.0.1")
    'lo'
    """
    if ":" in address:
        return _interface_of_6(socket.inet_pton(socket.AF_INET6, address).hex())
    try:
        wanted = socket.inet_aton(socket.gethostbyname(address))
    except OSError:
        # No such name; binding the address raises the error.
        return None
    if wanted[0] == 127:
        return "lo"
    return next(
        (name for name, interface_address in interface_addresses() if socket.inet_aton(interface_address) == wanted),
        None,
    )


def interface_addresses() -> list[tuple[str, str]]:
    """Return every interface of this host that has an IPv4 address, with the first of its addresses."""
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            # An interface without an IPv4 address.
            with suppress(OSError):
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                addresses.append((name, socket.inet_ntoa(answer[20:24])))
    return addresses


def _interface_of_6(wanted: str) -> str | None:
    for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
        interface_address, *_, name = line.split()
        if interface_address == wanted:
            return name
    return None


def address_towards(host: str) -> str:
    """Return this host's address on the route to another host; the loopback where that cannot be looked up.

    >>> address_towards("127.0.0.1")
    '127.0.0.1'
    """
    with suppress(OSError, UnicodeError):
        family, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            # Sends nothing: only the route is looked up.
            asking.connect(place)
            return str(asking.getsockname()[0])
    return "127.0.0.1"
