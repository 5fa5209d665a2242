"""The batch script of a launch: readable and complete, so it can also be submitted by hand (`sbatch launch.sh`)."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.errors import mistake
from phalanx.launch.resource_request import NODE_MODULE, LaunchRequest
from phalanx.launch.system import REQUEUE, WANTS_TO_GO_ON

# Minutes and seconds to wait for nodes below few switches, before any nodes are accepted.
SWITCH_WAIT = "5:00"
_PLAIN = re.compile(r"[0-9A-Za-z._,:@=+%\[\]()&|*!/-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmFacts:
    """Facts about the live cluster; the defaults apply where it could not be queried."""

    leaf_nodes: int = 0  # nodes below the smallest switch; 0 without a topology
    most_time_s: float = math.inf  # the partition's limit


def batch_script(requests: Sequence[LaunchRequest], facts: SlurmFacts) -> str:
    """Return one script for one request, or an array for several requests of the same shape."""
    first = requests[0]
    is_array = len(requests) > 1
    options = [f"--job-name={first.group or first.name}", f"--nodes={first.all_hosts}", "--ntasks-per-node=1"]
    if first.shares_hosts:
        options += [f"--cpus-per-task={first.devices_per_host}"] if first.accelerator == "cpu" else []
    else:
        options += ["--exclusive"]
    options += ["--requeue", "--open-mode=append", "--no-kill"]
    options += [f"--gpus-per-node={first.devices_per_host}"] if first.accelerator != "cpu" else []
    options += [f"--time={max(1, int(limit_s(first, facts) // 60))}", f"--signal=B:USR1@{int(save_s(first, facts))}"]
    settings = first.settings
    scheduler_options = (("partition", settings.queue), ("account", settings.account), ("qos", settings.qos))
    options += [f"--{name}={value}" for name, value in scheduler_options if value]
    options += [f"--switches={count}@{SWITCH_WAIT}" for count in (switches(first, facts),) if count]
    if is_array:  # the script opens the log of its own run
        options += [f"--array=0-{len(requests) - 1}", "--output=/dev/null"]
    else:
        options += [f"--chdir={first.run}", "--output=logs/slurm-%j.log"]
    options += settings.options
    spares = f", {first.spares} of them spare" if first.spares else ""
    container = _container_options(first)
    lines = [
        "#!/bin/bash",
        f"# phalanx launch: {first.group or first.name}, one agent on each of {first.all_hosts} nodes{spares}.",
        "# The agents start the ranks, and replace lost ranks, agents and nodes inside this allocation.",
        *(f"#SBATCH {_sbatch_option(option)}" for option in options),
        "set -u",
        *_which_run(requests),
        *(f"export {name}={shlex.quote(value)}" for name, value in first.environ.items()),
        *(f"module load {shlex.quote(module)}" for module in settings.modules),
        *settings.preamble,
        _BODY.format(
            python=shlex.quote(first.agent[0]),
            module=NODE_MODULE,
            container=container,
            # With a container, commands that run once need it too.
            first_node=f'srun --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME"{container} ' if container else "",
            interface=shlex.quote(settings.interface),
            hosts=first.hosts,
            slots=first.devices_per_host,
            serve=" ".join(shlex.quote(word) for word in first.agent[5:]),
            save=int(save_s(first, facts)),
            requeue=REQUEUE,
            stop=WANTS_TO_GO_ON,
        ).rstrip("\n"),
    ]
    return "\n".join(lines) + "\n"


_BODY = """\
node=({python} -P -m {module})
on_every_node() {{ srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0{container} "$@"; }}
on_first_node() {{ {first_node}"$@"; }}

back_to_queue() {{  # Slurm ends this script when the job is back in the queue; one that is cancelled is not running
    [ "$(squeue --noheader --job "$SLURM_JOB_ID" --format=%T)" = RUNNING ] &&
        scontrol requeue "$SLURM_JOB_ID" && sleep 120
}}

# USR1 comes before the time limit, TERM with a preemption: also while the nodes gather, when there is nothing to save.
told=nothing
trap 'told=limit' USR1
trap 'told=preempted' TERM

# Every node says where it is in the network, and proves that it sees the run; ranks are numbered in this order.
on_every_node "${{node[@]}}" describe "$RUN" --interface {interface} >"$RUN/logs/hosts.txt"
on_first_node "${{node[@]}}" prepare "$RUN" --hosts {hosts} --slots {slots} <"$RUN/logs/hosts.txt"
code=$?
if [ "$told" = preempted ]; then back_to_queue; exit {requeue}; fi
if [ "$code" != 0 ]; then exit "$code"; fi

# From now on USR1 makes the run save and end. TERM comes to the agents, too.
# If this node is lost, and this script with it, another node does the rest.
trap 'echo {stop} >"$RUN/stop"' USR1
trap : TERM
if [ "$told" = limit ]; then echo {stop} >"$RUN/stop"; fi
on_every_node "${{node[@]}}" serve {serve} --script-node "${{SLURMD_NODENAME:-}}" --save-s {save} "$RUN" &
agents=$!
while kill -0 "$agents" 2>/dev/null; do wait "$agents"; done  # a signal ends wait, not the agents

on_first_node "${{node[@]}}" conclude "$RUN"
code=$?
if [ "$code" = {requeue} ]; then back_to_queue; fi
exit "$code"
"""


def limit_s(request: LaunchRequest, facts: SlurmFacts) -> float:
    """Return the requested time limit; a longer run is requeued and resumes."""
    return min(request.time_limit_s, facts.most_time_s)


def save_s(request: LaunchRequest, facts: SlurmFacts) -> float:
    """Return how long before the limit the signal is sent: at most half of the limit."""
    # sbatch accepts at most 65,535 seconds for --signal.
    return min(request.save_s, limit_s(request, facts) / 2, 65535)


def switches(request: LaunchRequest, facts: SlurmFacts) -> int:
    """Return the fewest leaf switches that hold the nodes; 0 without multi-host groups or a known topology.

    Nodes are numbered switch by switch, so groups of neighbours are below one switch where they fit.
    """
    if not facts.leaf_nodes or not request.placement:
        return 0
    return math.ceil(request.all_hosts / facts.leaf_nodes)


def _which_run(requests: Sequence[LaunchRequest]) -> list[str]:
    if len(requests) == 1:
        return [f"RUN={shlex.quote(requests[0].run)}"]
    names = [f"  {shlex.quote(request.run)}" for request in requests]
    return [
        *("RUNS=(", *names, ")", "RUN=${RUNS[$SLURM_ARRAY_TASK_ID]}", 'cd "$RUN" || exit'),
        'exec >>"logs/slurm-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID.log" 2>&1',
    ]


def _sbatch_option(option: str) -> str:
    """Return an option as sbatch reads it from a comment: quoted if it contains blanks."""
    if _PLAIN.fullmatch(option):
        return option
    name, _, value = option.partition("=")
    if '"' in value or "\\" in value or not value.isprintable():
        raise mistake(f"sbatch {name}", f"{value[:80]!r} cannot be written into a batch script", fix="use plain names")
    return f'{name}="{value}"'


def _container_options(request: LaunchRequest) -> str:
    """Return the options of pyxis; the run folder, the data and the weights are always mounted."""
    settings = request.settings
    if not settings.image:
        return ""
    required_paths = [request.run, *(path for _, path in request.inputs)]
    mounts = ",".join(dict.fromkeys((*(f"{path}:{path}" for path in required_paths), *settings.mounts)))
    return f" --container-image={shlex.quote(settings.image)} --container-mounts={shlex.quote(mounts)}"
