"""Simulate hosts as network namespaces of one machine, joined by a bridge, whose links can be cut, slow or lossy."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack, suppress
from types import TracebackType

from phalanx.errors import Problem, SystemFailure

# A private range, used only inside the namespaces.
SUBNET = "10.213.77"
DEVICE = "eth0"  # in every host's namespace
TIMEOUT_S = 10.0
# For kernels without netem: a token bucket with this low rate delays packets, one with this short queue loses some.
NARROW = ("tbf", "rate", "20mbit", "burst", "16kb", "latency", "400ms")
SHORT = ("tbf", "rate", "100mbit", "burst", "16kb", "limit", "17kb")


class DrillNetwork:
    """A context that makes one namespace per host and one for the switch, and removes them at the end."""

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts
        self._mark = f"phx{os.getpid()}"
        self._stack = ExitStack()

    def __enter__(self) -> DrillNetwork:
        if shutil.which("ip") is None or shutil.which("tc") is None:
            raise _network_refused("ip and tc are not installed")
        try:
            self._add_namespace(self._switch_name)
            self._run_ip("-n", self._switch_name, "link", "add", "br0", "type", "bridge")
            self._run_ip("-n", self._switch_name, "link", "set", "br0", "up")
            for host in range(self.hosts):
                self._join_host(host)
        except subprocess.SubprocessError as error:
            self._stack.close()
            raise _network_refused(_error_text(error)) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def prefix(self, host: int) -> tuple[str, ...]:
        """Return the command prefix that runs a command on a host."""
        return ("ip", "netns", "exec", self._host_name(host))

    def address(self, host: int) -> str:
        """Return the IP address of a host."""
        return f"{SUBNET}.{host + 1}"

    def cut(self, host: int) -> None:
        """Cut the link of a host."""
        self._run_ip("-n", self._switch_name, "link", "set", f"port{host}", "down")

    def heal(self, host: int) -> None:
        """Restore the link of a host, with full speed and without loss."""
        self._run_ip("-n", self._switch_name, "link", "set", f"port{host}", "up")
        for space, device in self._link_ends(host):
            with suppress(subprocess.SubprocessError):
                self._run_tc("-n", space, "qdisc", "del", "dev", device, "root")

    def slow(self, host: int, delay_s: float) -> str:
        """Delay the packets of a host by `delay_s`; returns the traffic-control arguments that were used."""
        return self._shape_link(host, ("netem", "delay", f"{delay_s * 1000:.0f}ms"), NARROW)

    def lose(self, host: int, share: float) -> str:
        """Lose a share of the packets of a host; returns the traffic-control arguments that were used."""
        return self._shape_link(host, ("netem", "loss", f"{share * 100:.2f}%"), SHORT)

    def _shape_link(self, host: int, wanted: tuple[str, ...], instead: tuple[str, ...]) -> str:
        for words in (wanted, instead):
            try:
                for space, device in self._link_ends(host):
                    self._run_tc("-n", space, "qdisc", "replace", "dev", device, "root", *words)
                return " ".join(words)
            except subprocess.SubprocessError as error:
                refused = _network_refused(_error_text(error))
        raise refused

    def _join_host(self, host: int) -> None:
        name, port = self._host_name(host), f"port{host}"
        self._add_namespace(name)
        self._run_ip(
            "link", "add", DEVICE, "netns", name, "type", "veth", "peer", "name", port, "netns", self._switch_name
        )
        self._run_ip("-n", self._switch_name, "link", "set", port, "master", "br0", "up")
        self._run_ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", DEVICE)
        for device in (DEVICE, "lo"):
            self._run_ip("-n", name, "link", "set", device, "up")

    def _add_namespace(self, name: str) -> None:
        self._run_ip("netns", "add", name)
        self._stack.callback(self._remove_namespace, name)

    def _remove_namespace(self, name: str) -> None:
        with suppress(subprocess.SubprocessError):
            self._run_ip("netns", "del", name)

    def _link_ends(self, host: int) -> tuple[tuple[str, str], ...]:
        return (self._switch_name, f"port{host}"), (self._host_name(host), DEVICE)

    @property
    def _switch_name(self) -> str:
        return f"{self._mark}-switch"

    def _host_name(self, host: int) -> str:
        return f"{self._mark}-{host}"

    def _run_ip(self, *words: str) -> None:
        _run_command("ip", *words)

    def _run_tc(self, *words: str) -> None:
        _run_command("tc", *words)


def _run_command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)


def _error_text(error: subprocess.SubprocessError) -> str:
    stderr = getattr(error, "stderr", b"") or b""
    return stderr.decode("utf-8", "replace").strip().splitlines()[-1] if stderr.strip() else str(error)


def _network_refused(what: str) -> SystemFailure:
    return SystemFailure(
        Problem(
            where="network namespaces",
            what=f"not allowed here: {what[:200]}",
            why="partitions and bad links need hosts with a network of their own",
            fix="run as root on Linux with iproute2, or leave these faults out",
        )
    )
