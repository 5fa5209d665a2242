"""Which rank a process is: environments as real launchers made them (Slurm 22.05, Open MPI 4.1 inside and outside)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_dataset import write_dataset

from phalanx.elastic.launchers import derived_port, find_rank, refuse_several
from phalanx.errors import UserError

BATCH = {  # a script of sbatch --nodes=2 --ntasks=4
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "gpu[01-02]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "3,1",
    "SLURMD_NODENAME": "gpu01",
}
STEP = BATCH | {  # task 3 of `srun` in it, on the second node
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "gpu02",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[01-02]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
}
ONE_NODE = STEP | {  # task 1 of `srun --ntasks=2 --nodes=1`
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURMD_NODENAME": "gpu01",
    "SLURM_STEP_NODELIST": "gpu01",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}
MPI = {  # rank 1 of `mpirun -n 2` on one host
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1591541761",
    "PMIX_RANK": "1",
}
# rank 3 of mpirun in that batch script: Open MPI's daemons are the two tasks of an srun step
MPI_IN_SLURM = STEP | {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "PMIX_NAMESPACE": "1570766849",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "gpu01",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "7",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
PALS = {"PMI_RANK": "9", "PMI_SIZE": "16", "PALS_LOCAL_RANKID": "1", "PALS_APID": "ab-12"}


FLUX = {
    "FLUX_TASK_RANK": "1",
    "FLUX_JOB_SIZE": "2",
    "FLUX_TASK_LOCAL_ID": "0",
    "FLUX_JOB_ID": "f2Xy",
    "PMI_RANK": "1",  # its shell sets them too
    "PMI_SIZE": "2",
}
JSRUN = {
    "JSM_NAMESPACE_RANK": "5",
    "JSM_NAMESPACE_SIZE": "12",
    "JSM_NAMESPACE_LOCAL_RANK": "5",
    "JSM_NAMESPACE_LOCAL_SIZE": "6",
    "PMIX_RANK": "5",
    "LSB_JOBID": "77",
}
HOROVOD = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        (STEP, (3, 4, "0", "1", "gpu01", derived_port("slurm 1.0"))),
        (ONE_NODE, (1, 2, "1", "2", "127.0.0.1", derived_port("slurm 1.0"))),
        (ONE_NODE | {"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2, "1", "2", "127.0.0.1", derived_port("slurm 1.0"))),
        (STEP | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}, (3, 4, "0", "1", "10.0.0.1", 1234)),
        (STEP | {"RANK": "3", "WORLD_SIZE": "4"}, (3, 4, "0", "1", "gpu01", derived_port("slurm 1.0"))),
        (MPI, (1, 2, "1", "2", "127.0.0.1", derived_port("Open MPI 1591541761 "))),
        (MPI_IN_SLURM, (3, 4, "0", "1", "gpu01", derived_port("Open MPI 1570766849 1"))),
        (TORCHRUN, (5, 8, "1", "4", "gpu01", 29400)),
        (TORCHRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, (5, 8, "1", "4", "gpu01", 29400)),
        (MPICH, (1, 4, "1", "4", "127.0.0.1", 29500)),
        (PALS | {"MASTER_ADDR": "n1"}, (9, 16, "1", None, "n1", derived_port("PMI (mpiexec) ab-12 "))),
        (FLUX | {"MASTER_ADDR": "n1"}, (1, 2, "0", None, "n1", derived_port("Flux f2Xy "))),
        (HOROVOD, (1, 2, "1", "2", "127.0.0.1", 29500)),
        (JSRUN | {"MASTER_ADDR": "n1"}, (5, 12, "5", "6", "n1", derived_port("jsrun 77 "))),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, (1, 2, None, None, "h", 29500)),
    ],
)
def test_what_each_launcher_says(environ: dict[str, str], place: tuple[object, ...]) -> None:
    found = find_rank(environ)
    assert found is not None
    names = found.environ()
    local = names.get("LOCAL_RANK"), names.get("LOCAL_WORLD_SIZE")
    assert (found.rank, found.world, *local, found.address, found.port) == place
    assert (names["RANK"], names["WORLD_SIZE"]) == (str(found.rank), str(found.world))
    assert (names["MASTER_ADDR"], names["MASTER_PORT"]) == (found.address, str(found.port))


@pytest.mark.parametrize(
    "environ",
    [
        {},
        BATCH,
        {name: value for name, value in BATCH.items() if "ID" not in name or "JOB" in name},  # the shell of salloc
        STEP | {"SLURM_STEP_ID": "4294967290"},  # salloc with LaunchParameters=use_interactive_step
        STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun --ntasks=1
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"PMIX_RANK": "0"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"},
        {"MASTER_ADDR": "gpu01", "MASTER_PORT": "29500"},  # a batch script exports them for srun
        {"WORLD_SIZE": "1"},
        {"RANK": "", "WORLD_SIZE": "", "MASTER_ADDR": ""},
    ],
)
def test_where_the_ranks_are_ours_to_start(environ: dict[str, str]) -> None:
    assert find_rank(environ) is None
    refuse_several(environ, "phalanx drill")


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"RANK": "0"}, "RANK = 0: set in the environment, without WORLD_SIZE and MASTER_ADDR"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE = 2: set in the environment, without RANK and MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK = 0, WORLD_SIZE = 2: set in the environment, without MASTER_ADDR"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_RANK: is set in the environment, but OMPI_COMM_WORLD_SIZE is"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE: is set in the environment, but PMI_RANK is not"),
        ({"FLUX_JOB_SIZE": "2"}, "FLUX_JOB_SIZE: is set in the environment, but FLUX_TASK_RANK is not"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK: is 1, and nothing says how many ranks there are"),
        ({"PALS_RANKID": "3"}, "PALS_RANKID: is 3, and nothing says how many ranks there are"),
        ({"ALPS_APP_PE": "2"}, "ALPS_APP_PE: is 2, and nothing says how many ranks there are"),
        ({"HOROVOD_RANK": "0"}, "HOROVOD_RANK: is set in the environment, but HOROVOD_SIZE is not"),
        # task 0 of a step whose other variables a container dropped: a batch script has no numbered step
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"},
            "SLURM_PROCID: is set in the environment, but SLURM_STEP_NUM_TASKS is not",
        ),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "SLURM_PROCID: is 1, and nothing says how many ranks there are"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS: is set in the environment, but SLURM_PROCID is not"),
        (STEP | {"SLURM_PROCID": "4"}, "SLURM_PROCID: 4 is not below SLURM_STEP_NUM_TASKS = 4"),
        (STEP | {"SLURM_PROCID": "-1"}, "SLURM_PROCID: '-1' is not a whole number"),
        (STEP | {"RANK": "0"}, "RANK: 0 contradicts SLURM_PROCID = 3 of srun"),
        (STEP | {"WORLD_SIZE": "8"}, "WORLD_SIZE: 8 contradicts SLURM_STEP_NUM_TASKS = 4 of srun"),
        # exported by a batch script, where SLURM_PROCID is 0
        (STEP | {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "gpu01"}, "RANK: 0 contradicts SLURM_PROCID = 3"),
        (
            STEP | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "gpu01"},
            "WORLD_SIZE: 1 contradicts SLURM_STEP_NUM_TASKS = 4",
        ),
        (
            STEP | TORCHRUN | {"GROUP_WORLD_SIZE": "1"},
            "phalanx train: each of 4 srun tasks started its own torchrun for 1 host\n  that would be 4 runs at once",
        ),
        (
            STEP | {"SLURM_PROCID": "0", "SLURM_NODEID": "1"},
            "srun: rank 0 runs on gpu02, but gpu01 is the first node of the list",
        ),
        (PALS, "PMI (mpiexec): started 16 ranks (PMI_RANK = 9, PMI_SIZE = 16), but does not say on which host rank 0"),
    ],
)
def test_half_a_set_and_contradictions_are_refused(environ: dict[str, str], told: str) -> None:
    with pytest.raises(UserError) as caught:
        find_rank(environ)
    assert str(caught.value).startswith(told)
    assert all(problem.why and problem.fix for problem in caught.value.problems)


def test_a_verb_that_starts_its_own_ranks_is_started_once() -> None:
    with pytest.raises(UserError) as caught:
        refuse_several(STEP, "phalanx drill")
    assert str(caught.value) == (
        "phalanx drill: srun started it 4 times, but it starts its own ranks\n"
        "  that would be 4 runs at once, in one folder\n"
        "  start it once: without the launcher, or as a single task (srun --ntasks=1)"
    )


def test_a_derived_port_is_no_port_that_linux_hands_out() -> None:
    ports = {derived_port(f"slurm {job}.{step}") for job in range(200) for step in range(5)}
    assert all(10_000 <= port < 29_500 for port in ports)
    assert len(ports) > 900, "launches seldom meet"


JOB = """\
name = "launched"
[model]
layers = 2
hidden = 32
heads = 4
kv_heads = 2
ffn = 64
vocab = 320
[data]
path = "data"
sequence = 32
[batch]
global_tokens = 256
[precision]
compute = "fp32"
[train]
samples = 0
[cluster]
spec = "local-cpu:2"
"""


@pytest.mark.slow
def test_two_processes_of_a_launcher_are_one_run(tmp_path: Path) -> None:
    """With the machine's mpirun where there is one; else as two tasks of an srun step, by their environment."""
    write_dataset(tmp_path, documents=500, heldout=0.01)
    (tmp_path / "job.toml").write_text(JOB)
    foreign = ("RANK", "WORLD_SIZE", "MASTER_", "SLURM", "OMPI_", "PMI")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environ["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "phalanx", "train", "job.toml", "--steps", "3"]

    def outcome(*calls: tuple[list[str], dict[str, str]]) -> list[tuple[int, str]]:
        running = [
            subprocess.Popen(words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for words, env in calls
        ]
        said = [process.communicate(timeout=600)[0] for process in running]
        return [(process.returncode, text) for process, text in zip(running, said, strict=True)]

    def as_tasks(*extra: list[str]) -> list[tuple[list[str], dict[str, str]]]:
        step = ONE_NODE | {"SLURM_JOB_ID": str(os.getpid())}
        return [
            ([*command, *words], environ | step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)})
            for rank, words in enumerate(extra)
        ]

    launcher = shutil.which("mpirun")
    if launcher:
        root = ["--allow-run-as-root"] if os.getuid() == 0 else []
        ((code, text),) = outcome(([launcher, *root, "--oversubscribe", "-n", "2", *command], environ))
        assert code == 0, text
    else:
        ended = outcome(*as_tasks([], []))
        assert [code for code, _ in ended] == [0, 0], ended
    (run,) = (tmp_path / "runs").iterdir()
    assert sorted(path.name for path in run.glob("events-*.jsonl")) == ["events-00000.jsonl", "events-00001.jsonl"]

    # Two jobs, as somebody who wants a sweep would start them: refused by both, and no second folder.
    for (code, text), told in zip(
        outcome(*as_tasks([], ["--set", "optim.lr=1e-5"])),
        ("rank 0: nothing was started, because not all ranks belong together", "rank 1: was started with another job"),
        strict=True,
    ):
        assert code == 2, text
        assert told in text
    assert len(list((tmp_path / "runs").iterdir())) == 1
