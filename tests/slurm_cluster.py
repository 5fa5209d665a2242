"""A real Slurm of 16 nodes on this machine: own munge key, own ports, own folders, nothing left behind.

The binaries are those that `.ci/packages` unpacked into the virtual environment, or those on the path.
"""

from __future__ import annotations

import getpass
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

NODES = 16
UNPACKED = Path(sys.prefix) / "slurm"
PATIENCE_S = 300.0  # nothing here is asserted to be quick: where it hangs, the test ends

CONF = """\
ClusterName=phalanxtest
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={base}/munge.socket,cred_expire=5
{plugins}
SlurmctldPort={port}
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool/%n
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd-%n.pid
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0
SlurmdTimeout=20
KillWait=30
InactiveLimit=0
MinJobAge=3600
UnkillableStepTimeout=300
TopologyPlugin=topology/tree
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 Boards=1 SocketsPerBoard=1 \
CoresPerSocket=4 ThreadsPerCore=1 RealMemory=1000 State=UNKNOWN
NodeName=far1 NodeHostname=elsewhere NodeAddr=127.0.0.1 Port={away} CPUs=4 RealMemory=1000 State=DOWN
PartitionName=low Nodes=n[1-8] PriorityTier=1 PreemptMode=REQUEUE GraceTime=120 Default=YES State=UP
PartitionName=high Nodes=n[1-8] PriorityTier=100 PreemptMode=OFF State=UP
PartitionName=wide Nodes=n[9-14] PreemptMode=OFF State=UP
PartitionName=pair Nodes=n[15-16] PreemptMode=OFF State=UP MaxTime=10
PartitionName=shut Nodes=n[15-16] PreemptMode=OFF State=DOWN
PartitionName=far Nodes=far1 PreemptMode=OFF State=UP
"""


def missing_slurm() -> str:
    """Why there is no Slurm to test with; empty when there is."""
    if (UNPACKED / "usr/sbin/slurmctld-wlm").exists() or shutil.which("slurmctld"):
        return ""
    return "no Slurm: .ci/packages unpacks it where apt-get can download"


class SlurmCluster:
    """The daemons, and the environment in which Slurm's commands find them."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self._processes: list[subprocess.Popen[bytes]] = []
        self.slurmd: dict[str, subprocess.Popen[bytes]] = {}
        self.environ = {**os.environ, "SLURM_CONF": str(base / "slurm.conf")}
        plugins = ""
        self._unpacked = (UNPACKED / "usr/sbin/slurmctld-wlm").exists()
        if self._unpacked:
            [library] = [path for path in (UNPACKED / "usr/lib").glob("*/slurm-wlm") if path.is_dir()]
            plugins = f"PluginDir={library}"
            paths = [str(library), str(library.parent), os.environ.get("LD_LIBRARY_PATH", "")]
            self.environ["LD_LIBRARY_PATH"] = os.pathsep.join(path for path in paths if path)
            self.environ["PATH"] = f"{UNPACKED}/usr/bin:{UNPACKED}/usr/sbin:{os.environ['PATH']}"
        ports = free_ports(NODES + 2)
        conf = CONF.format(
            host=platform.node(),
            user=getpass.getuser(),
            base=base,
            plugins=plugins,
            port=ports[0],
            nodes=NODES,
            first=ports[1],
            last=ports[NODES],
            away=ports[NODES + 1],
        )
        for folder in ("state", "spool"):
            (base / folder).mkdir()
        (base / "slurm.conf").write_text(conf)
        leaves = [f"SwitchName=leaf{leaf} Nodes=n[{4 * leaf + 1}-{4 * leaf + 4}]" for leaf in range(NODES // 4)]
        top = "SwitchName=spine Switches=leaf[0-3]"
        (base / "topology.conf").write_text("\n".join([*leaves, top]) + "\n")
        (base / "cgroup.conf").write_text("CgroupAutomount=no\n")

    def start(self) -> None:
        """munged, slurmctld and the slurmds; returns when every node is idle."""
        key = self.base / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        options = [f"--{name}-file={self.base}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self._spawn("munged", "--foreground", "--force", f"--socket={self.base}/munge.socket", *options)
        wait_for(lambda: (self.base / "munge.socket").exists(), "munged")
        self._spawn(self._daemon("slurmctld"), "-D", "-c", "-f", str(self.base / "slurm.conf"))
        for number in range(NODES):
            self.start_node(f"n{number + 1}")
        wait_for(
            lambda: self.run("sinfo", "-h", "-p", "low,wide,pair", "-t", "idle", "-o", "%D").split() != [], "slurmctld"
        )
        wait_for(self._is_idle, "16 idle nodes")

    def _is_idle(self) -> bool:
        return len(self.run("sinfo", "-h", "-N", "-t", "idle", "-p", "low,wide,pair", "-o", "%N").split()) == NODES

    def start_node(self, name: str) -> None:
        """One slurmd."""
        (self.base / "spool" / name).mkdir(exist_ok=True)
        stepd = ["-d", str(UNPACKED / "usr/sbin/slurmstepd-wlm")] if self._unpacked else []
        self.slurmd[name] = self._spawn(
            self._daemon("slurmd"), "-D", "-N", name, "-f", str(self.base / "slurm.conf"), *stepd
        )

    def lose_node(self, name: str) -> None:
        """The machine is gone: its slurmd, its step daemons and everything they started."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                environ = process.environ()
                if environ.get("SLURMD_NODENAME") == name and environ.get("SLURM_CONF") == self.environ["SLURM_CONF"]:
                    parent = process.parent()
                    is_daemon = parent is not None and "slurmstepd" in " ".join(parent.cmdline())
                    found += [parent, process] if is_daemon else [process]
        # All at once, since a child of srun that outlives it ends the step on the other nodes; then children first,
        # because the kernel wakes stopped orphans.
        for act in (psutil.Process.suspend, psutil.Process.kill):
            for process in sorted(found, key=lambda one: one.pid, reverse=True):
                with suppress(psutil.Error):
                    act(process)
        self.slurmd[name].kill()
        shutil.rmtree(
            self.base / "spool" / name
        )  # a script that it finds there when it is back, Slurm does not replace

    def run(self, *command: str) -> str:
        """What one of Slurm's commands prints."""
        done = subprocess.run(
            command, capture_output=True, text=True, env=self.environ, timeout=PATIENCE_S, check=False
        )
        return done.stdout

    def processes(self, word: str) -> list[psutil.Process]:
        """Processes of jobs in this cluster whose command line holds `word`."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if (
                    word in " ".join(process.cmdline())
                    and process.environ().get("SLURM_CONF") == self.environ["SLURM_CONF"]
                ):
                    found.append(process)
        return found

    def stop(self) -> None:
        """End everything, also what jobs left behind."""
        with suppress(subprocess.SubprocessError):
            self.run("scancel", "--user", getpass.getuser())
        for process in reversed(self._processes):
            process.kill()
            process.wait()
        for process in self.processes(str(self.base)) + self.processes("phalanx"):
            if process.pid != os.getpid():
                with suppress(psutil.Error):
                    process.kill()

    def _daemon(self, name: str) -> str:
        return f"{name}-wlm" if self._unpacked else name

    def _spawn(self, *command: str) -> subprocess.Popen[bytes]:
        log = open(self.base / f"{Path(command[0]).name}.out", "ab")  # noqa: SIM115
        with log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environ,
                cwd=self.base,
                start_new_session=True,
            )
        self._processes.append(process)
        return process


def wait_for(is_so: Callable[[], object], what: str, *, patience_s: float = PATIENCE_S) -> None:
    """Return when it is so; fail when it never is."""
    deadline = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < deadline, f"waited {patience_s:g} s for {what}"
        time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    """So many ports in a row that nobody listens on."""
    for first in range(21000 + os.getpid() % 5000, 32000, count):
        sockets = []
        try:
            for port in range(first, first + count):
                one = socket.socket()
                sockets.append(one)
                one.bind(("127.0.0.1", port))
            return list(range(first, first + count))
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
    raise AssertionError("no free ports")


SIGKILL = signal.SIGKILL
