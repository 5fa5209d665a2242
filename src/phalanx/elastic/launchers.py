"""Find this process's rank when another launcher started it: torchrun, srun, mpirun, mpiexec, or a user.

torchrun and Kubernetes operators set RANK, WORLD_SIZE and MASTER_ADDR. srun, Open MPI, the PMI launchers (MPICH, Intel
MPI, Cray PALS), Flux, jsrun and horovodrun each set other names and no address; what they leave out is derived here,
so that tasks of one step are ranks of one run and never a run each. Bare PMIx and Cray's aprun give a process its rank
but not the number of ranks: that is refused, because a guess would make a run of every rank.

A batch script and the shell of salloc are not tasks of a step. Slurm gives them SLURM_NTASKS, and the script
SLURM_PROCID = 0, but no SLURM_STEP_NUM_TASKS (observed with Slurm 22.05), so a plain `phalanx train` there starts its
own ranks.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.errors import UserError, mistake

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500  # torchrun's default
# Ports of derived addresses: below 32768, where Linux begins to assign ports by itself, and not torchrun's 29500.
FIRST_PORT, PORTS = 12_000, 16_000
MOST_RANKS = 10**7
# Slurm's own steps begin here: batch, extern and interactive (salloc).
FIRST_SPECIAL_STEP = 0xFFFFFFF0

_TASKS_PER_NODE = re.compile(r"(\d{1,7})(?:\(x(\d{1,7})\))?")
_HOST = re.compile(r"[A-Za-z0-9_.:%-]{1,255}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """One rank of a job that another launcher started, and the address where the ranks meet."""

    launcher: str  # as messages name it
    rank: int
    world: int
    local_rank: int | None = None
    local_world: int | None = None
    address: str
    port: int
    # All ranks are known to be on this host.
    one_host: bool = False
    # MASTER_ADDR is not set: the address is the first of the launcher's list of nodes.
    derived: bool = False

    def environ(self) -> dict[str, str]:
        """Return the variables that torch and the trainer read.

        The local rank and world size are left out where the launcher does not provide them.
        """
        variables = {"RANK": self.rank, "WORLD_SIZE": self.world, "MASTER_ADDR": self.address, "MASTER_PORT": self.port}
        if self.local_rank is not None:
            variables["LOCAL_RANK"] = self.local_rank
        if self.local_world is not None:
            variables["LOCAL_WORLD_SIZE"] = self.local_world
        return {name: str(value) for name, value in variables.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Claim:
    """The facts that one launcher's variables state about this process."""

    launcher: str
    command: str  # a command of the launcher that starts several ranks
    names: tuple[str, str]  # of the variables that hold rank and number of ranks
    rank: int
    world: int
    local_rank: int | None = None
    local_world: int | None = None
    # Of the launch: the same in all its ranks, another in the next launch.
    identity: str = ""
    first_host: str = ""  # where rank 0 is expected
    own_host: str = ""  # where this process is, in the same names

    @property
    def here(self) -> str:
        """The launcher's variables with their values, as text."""
        return f"{self.names[0]} = {self.rank}, {self.names[1]} = {self.world}"


def find_rank(environ: Mapping[str, str]) -> RankPlace | None:
    """Return this process's rank; None when no launcher started several processes, so that Phalanx starts the ranks.

    Raises UserError for an incomplete set of variables, and for sets that contradict each other: a guess could start a
    second run where one was meant.
    """
    claim = _innermost(environ)
    own = [name for name in ("RANK", "WORLD_SIZE") if environ.get(name)]
    if len(own) == 2 and environ.get("MASTER_ADDR"):
        return _explicit(environ, claim)
    if claim is None:
        _refuse_half(environ, own)
        return None
    for name, value in (("RANK", claim.rank), ("WORLD_SIZE", claim.world)):
        if environ.get(name) and whole_number(environ, name) != value:
            raise _contradiction(environ, claim, name)
    address, port = _meeting_place(environ, claim)
    return RankPlace(
        launcher=claim.launcher,
        rank=claim.rank,
        world=claim.world,
        local_rank=claim.local_rank,
        local_world=claim.local_world,
        address=address,
        port=port,
        one_host=claim.local_world == claim.world,
        derived=not environ.get("MASTER_ADDR"),
    )


def refuse_several(environ: Mapping[str, str], verb: str) -> None:
    """Raise UserError when a launcher started this command several times, each of which would make its own run."""
    place = find_rank(environ)
    if place is not None and place.world > 1:
        raise mistake(
            verb,
            f"{place.launcher} started it {place.world:,} times, but it starts its own ranks",
            why=f"that would be {place.world:,} runs at once, in one folder",
            fix="start it once: without the launcher, or as a single task (srun --ntasks=1)",
        )


def whole_number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a variable that holds a count or a rank; raises UserError for anything but a whole number."""
    text = environ.get(name) or ("" if default is None else str(default))
    if not text.isascii() or not text.isdigit() or int(text) > MOST_RANKS:
        raise mistake(
            name,
            f"{text[:40]!r} is not a whole number",
            why="it tells the process its rank or the number of ranks",
            fix="leave it to the launcher (torchrun, srun, mpirun)",
        )
    return int(text)


def derived_port(identity: str) -> int:
    """Return a port that is the same in all ranks of a launch, and most likely another one in the next launch.

    >>> derived_port("slurm 4711.0") == derived_port("slurm 4711.0") != derived_port("slurm 4711.1")
    True
    """
    return FIRST_PORT + zlib.crc32(identity.encode()) % PORTS


def first_of_hostlist(text: str) -> str:
    """Return the first host of a list in Slurm's notation; "" for any other text.

    >>> first_of_hostlist("gpu[003-007,9],cpu1"), first_of_hostlist("rack[2-3]n[01-04]"), first_of_hostlist("a,b")
    ('gpu003', 'rack2n01', 'a')
    """
    letters, depth, skipping = [], 0, False
    for letter in text.strip():
        if letter == "[":
            depth, skipping = depth + 1, False
        elif letter == "]":
            depth, skipping = depth - 1, False
        elif depth and letter in "-,":
            # The rest of this range is other hosts.
            skipping = True
        elif not depth and letter == ",":
            break
        elif not skipping:
            letters.append(letter)
    name = "".join(letters)
    return name if not depth and _HOST.fullmatch(name) else ""


def tasks_on_node(text: str, node: int) -> int | None:
    """Return the task count of one node in SLURM_STEP_TASKS_PER_NODE; None when the text does not contain it.

    >>> tasks_on_node("4(x2),3", 1), tasks_on_node("4(x2),3", 2), tasks_on_node("4", 1)
    (4, 3, None)
    """
    for entry in text.split(","):
        match = _TASKS_PER_NODE.fullmatch(entry.strip())
        if match is None:
            return None
        repeated = int(match[2] or 1)
        if node < repeated:
            return int(match[1])
        node -= repeated
    return None


def _innermost(environ: Mapping[str, str]) -> _Claim | None:
    """Return the claim of the launcher that is nearest to this process and started several; None without one.

    mpirun inside Slurm starts its daemons with srun, and srun --mpi=pmi2 sets PMI's names as well: the variables of
    the outer launcher stay, and describe the daemons.
    """
    slurm = _slurm(environ)
    claims = [read_claim(environ) for read_claim in (_open_mpi, _mvapich, _horovod, _jsrun, _flux, _pmi)] + [slurm]
    innermost = next((claim for claim in claims if claim is not None and claim.world > 1), None)
    if innermost is None and not any(claims):
        _refuse_lone_rank(environ)
    if innermost is not None and slurm is not None and (slurm.rank, slurm.world) == (innermost.rank, innermost.world):
        # The same rank twice, and Slurm also provides the hosts of the ranks.
        return slurm
    return innermost


def _open_mpi(environ: Mapping[str, str]) -> _Claim | None:
    return _counted(
        environ,
        launcher="Open MPI",
        command="mpirun -n",
        names=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        local_ranks=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_worlds=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        identities=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    )


def _mvapich(environ: Mapping[str, str]) -> _Claim | None:
    return _counted(
        environ,
        launcher="MVAPICH",
        command="mpirun_rsh -np",
        names=("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        local_ranks=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_worlds=("MV2_COMM_WORLD_LOCAL_SIZE",),
        identities=(),
    )


def _horovod(environ: Mapping[str, str]) -> _Claim | None:
    """Read horovodrun over gloo; over MPI it starts mpirun, whose variables give the same rank."""
    return _counted(
        environ,
        launcher="horovodrun",
        command="horovodrun -np",
        names=("HOROVOD_RANK", "HOROVOD_SIZE"),
        local_ranks=("HOROVOD_LOCAL_RANK",),
        local_worlds=("HOROVOD_LOCAL_SIZE",),
        identities=("HOROVOD_GLOO_RENDEZVOUS_PORT",),
    )


def _jsrun(environ: Mapping[str, str]) -> _Claim | None:
    return _counted(
        environ,
        launcher="jsrun",
        command="jsrun -n",
        names=("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
        local_ranks=("JSM_NAMESPACE_LOCAL_RANK",),
        local_worlds=("JSM_NAMESPACE_LOCAL_SIZE",),
        identities=("LSB_JOBID",),
    )


def _flux(environ: Mapping[str, str]) -> _Claim | None:
    return _counted(
        environ,
        launcher="Flux",
        command="flux run -n",
        names=("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
        local_ranks=("FLUX_TASK_LOCAL_ID",),
        local_worlds=(),
        identities=("FLUX_JOB_ID",),
    )


def _pmi(environ: Mapping[str, str]) -> _Claim | None:
    """Read MPICH and Intel MPI (MPI_LOCALRANKID), Cray PALS (PALS_LOCAL_RANKID), srun --mpi=pmi2."""
    return _counted(
        environ,
        launcher="PMI (mpiexec)",
        command="mpiexec -n",
        names=("PMI_RANK", "PMI_SIZE"),
        local_ranks=("PMI_LOCAL_RANK", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "SLURM_LOCALID"),
        local_worlds=("PMI_LOCAL_SIZE", "MPI_LOCALNRANKS"),
        identities=("PALS_APID", "PMI_JOBID"),
    )


def _counted(
    environ: Mapping[str, str],
    *,
    launcher: str,
    command: str,
    names: tuple[str, str],
    local_ranks: tuple[str, ...],
    local_worlds: tuple[str, ...],
    identities: tuple[str, ...],
) -> _Claim | None:
    """Read the variables of an MPI launcher; inside Slurm rank 0 is on the first node of the allocation."""
    set_names = [name for name in names if environ.get(name)]
    if len(set_names) == 1:
        raise _half_of(set_names[0], names)
    if not set_names:
        return None
    rank, world = (whole_number(environ, name) for name in names)
    identity = next((environ[name] for name in identities if environ.get(name)), "")
    slurm = environ.get("SLURM_JOB_ID", "")
    claim = _Claim(
        launcher=launcher,
        command=command,
        names=names,
        rank=rank,
        world=world,
        local_rank=next((whole_number(environ, name) for name in local_ranks if environ.get(name)), None),
        local_world=next((whole_number(environ, name) for name in local_worlds if environ.get(name)), None),
        identity=f"{launcher} {identity} {slurm}" if identity or slurm else "",
        first_host=first_of_hostlist(environ.get("SLURM_JOB_NODELIST", "")),
        own_host=environ.get("SLURMD_NODENAME", ""),
    )
    return _sound(claim)


def _slurm(environ: Mapping[str, str]) -> _Claim | None:
    """Read a task of an srun step; the step counts, the allocation around it may be larger."""
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    step = _slurm_step(environ)
    if _is_special(step):
        return None
    if not environ.get(names[1]):
        # A numbered step is srun's: a task 0 without the number of tasks is not a batch script.
        if step.isdigit() and environ.get(names[0]) and environ.get("SLURM_NTASKS", "") != "1":
            raise _half_of(names[0], names)
        return None
    if not environ.get(names[0]):
        raise _half_of(names[1], names)
    one_node = environ.get("SLURM_STEP_NUM_NODES") == "1"
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    world = whole_number(environ, names[1])
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    claim = _Claim(
        launcher="srun",
        command="srun --ntasks=",
        names=names,
        rank=whole_number(environ, names[0]),
        world=world,
        local_rank=whole_number(environ, "SLURM_LOCALID") if environ.get("SLURM_LOCALID") else None,
        local_world=world if one_node else tasks_on_node(per_node, whole_number(environ, "SLURM_NODEID", 0)),
        identity=f"slurm {environ.get('SLURM_JOB_ID', '')}.{step}",
        first_host=first_of_hostlist(nodes),
        own_host=environ.get("SLURMD_NODENAME", ""),
    )
    return _sound(claim)


def _slurm_step(environ: Mapping[str, str]) -> str:
    return environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""


def _is_special(step: str) -> bool:
    return step.isdigit() and int(step) >= FIRST_SPECIAL_STEP


def _sound(claim: _Claim) -> _Claim:
    if claim.rank >= claim.world:
        raise mistake(
            claim.names[0],
            f"{claim.rank} is not below {claim.names[1]} = {claim.world}",
            why="ranks count from 0",
            fix=f"leave both to {claim.launcher}",
        )
    return claim


def _explicit(environ: Mapping[str, str], claim: _Claim | None) -> RankPlace:
    """Return the rank from RANK, WORLD_SIZE and MASTER_ADDR, as torchrun, an operator or a script sets them."""
    rank, world = whole_number(environ, "RANK"), whole_number(environ, "WORLD_SIZE")
    if rank >= world:
        raise mistake(
            "RANK",
            f"{rank} is not below WORLD_SIZE = {world}",
            why="ranks count from 0",
            fix="leave both to the launcher (torchrun, srun, mpirun)",
        )
    torchrun = bool(environ.get("TORCHELASTIC_RUN_ID"))
    if claim is not None and torchrun:
        groups = whole_number(environ, "GROUP_WORLD_SIZE", claim.world)
        if groups < claim.world:
            raise mistake(
                "phalanx train",
                f"each of {claim.world:,} {claim.launcher} tasks started its own torchrun for {groups:,} "
                f"host{'s' if groups != 1 else ''}",
                why=f"that would be {claim.world // max(groups, 1):,} runs at once, in one folder",
                fix=f"connect them: torchrun --nnodes {claim.world} --rdzv-backend c10d --rdzv-endpoint HOST:29500 …; "
                "or start one task per rank without torchrun",
            )
    elif claim is not None and world <= claim.world and (rank, world) != (claim.rank, claim.world):
        raise _contradiction(environ, claim, "RANK" if world == claim.world else "WORLD_SIZE")
    return RankPlace(
        launcher="torchrun" if torchrun else "a launcher",
        rank=rank,
        world=world,
        local_rank=whole_number(environ, "LOCAL_RANK") if environ.get("LOCAL_RANK") else None,
        local_world=whole_number(environ, "LOCAL_WORLD_SIZE") if environ.get("LOCAL_WORLD_SIZE") else None,
        address=environ["MASTER_ADDR"],
        port=whole_number(environ, "MASTER_PORT", DEFAULT_PORT),
    )


def _meeting_place(environ: Mapping[str, str], claim: _Claim) -> tuple[str, int]:
    """Return address and port of rank 0: from MASTER_ADDR and MASTER_PORT, else derived where that is safe."""
    port = whole_number(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else 0
    port = port or (derived_port(claim.identity) if claim.identity else DEFAULT_PORT)
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"], port
    # One host: no other host needs to reach it.
    if claim.local_world == claim.world:
        return LOOPBACK, port
    if not claim.first_host:
        raise mistake(
            claim.launcher,
            f"started {claim.world:,} ranks ({claim.here}), but does not say on which host rank 0 runs",
            why="ranks meet at MASTER_ADDR",
            fix="set MASTER_ADDR to that host in every rank (Open MPI: mpirun -x MASTER_ADDR=HOST; "
            "MPICH: mpiexec -genv MASTER_ADDR HOST; Slurm: export it before srun)",
        )
    if claim.rank == 0 and claim.own_host and claim.own_host != claim.first_host:
        raise mistake(
            claim.launcher,
            f"rank 0 runs on {claim.own_host}, but {claim.first_host} is the first node of the list",
            why="the other ranks would look for it there",
            fix=f"export MASTER_ADDR={claim.own_host} before the start, or keep rank 0 on the first node",
        )
    return claim.first_host, port


def _refuse_half(environ: Mapping[str, str], own: list[str]) -> None:
    """Raise UserError for RANK or WORLD_SIZE without the rest.

    WORLD_SIZE = 1 alone is harmless, and so is MASTER_ADDR.
    """
    if not own or ("WORLD_SIZE" in own and whole_number(environ, "WORLD_SIZE") == 1):
        return
    every = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
    missing = [name for name in every if not environ.get(name)]
    raise mistake(
        ", ".join(f"{name} = {environ[name][:40]}" for name in own),
        f"set in the environment, without {' and '.join(missing)}",
        why="a rank needs all of these variables; without them, every process would start its own run",
        fix=f"set {', '.join(every)} in every rank (torchrun does, srun and mpirun need none of them), "
        f"or unset {' and '.join(own)}",
    )


def _refuse_lone_rank(environ: Mapping[str, str]) -> None:
    """Raise UserError for a rank above 0 without the number of ranks; rank 0 may be a batch script or a shell.

    A process with RANK and WORLD_SIZE set has completed what its launcher left out.
    """
    if (environ.get("RANK") and environ.get("WORLD_SIZE")) or _is_special(_slurm_step(environ)):
        return
    for name in ("PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE", "SLURM_PROCID"):
        if environ.get(name) and whole_number(environ, name) > 0:
            raise mistake(
                name,
                f"is {environ[name][:40]}, and nothing says how many ranks there are",
                why="a launcher started this process as one of several; each would start its own run",
                fix="set RANK, WORLD_SIZE and MASTER_ADDR in every rank (containers drop variables unless told to keep "
                f"them), or unset {name} to start a run of its own",
            )


def _half_of(given: str, names: tuple[str, str]) -> UserError:
    missing = names[1] if given == names[0] else names[0]
    return mistake(
        given,
        f"is set in the environment, but {missing} is not",
        why="a rank needs all of these variables; without them, every process would start its own run",
        fix=f"pass both to the command (containers drop variables unless told to keep them), or unset {given}",
    )


def _contradiction(environ: Mapping[str, str], claim: _Claim, name: str) -> UserError:
    launcher_name = claim.names[0 if name == "RANK" else 1]
    value = claim.rank if name == "RANK" else claim.world
    why = (
        "a batch script is always task 0, and every task inherits what it exports"
        if name == "RANK"
        else f"each of the {claim.world:,} tasks would start its own run, or wait for ranks that never arrive"
    )
    return mistake(
        name,
        f"{environ[name][:40]} contradicts {launcher_name} = {value} of {claim.launcher}",
        why=why,
        fix=f"unset RANK and WORLD_SIZE: {claim.launcher} provides both. To start independent runs, start each "
        f"one separately "
        "(Slurm: srun --ntasks=1 --exact … & for each)",
    )
