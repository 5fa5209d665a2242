"""Simulation of a cluster's queue: many jobs, a policy, and the idle, waiting and lost times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.api.results import Overrides, PublicResult, Tell, teller
from phalanx.errors import mistake
from phalanx.hardware.cluster import resolve_cluster
from phalanx.hardware.types import Cluster
from phalanx.io.codec import json_values
from phalanx.units import first_few, plural

if TYPE_CHECKING:
    from phalanx.sim.queue.job_state import JobState
    from phalanx.sim.queue.job_trace_file import JobTrace
    from phalanx.sim.queue.queue_job import QueueJob
    from phalanx.sim.queue.queue_policy import QueuePolicy
    from phalanx.sim.queue.queue_report import QueueReport

SYNTHETIC = "synthetic"
DEFAULT_JOBS, DEFAULT_DAYS, DEFAULT_LOAD = 50_000, 30.0, 0.85
WHERE = "phalanx sim --queue"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class QueueSimulation(PublicResult):
    """The result of a simulated job trace on a cluster under a policy."""

    cluster: str
    trace: JobTrace
    policy: QueuePolicy
    seed: int
    report: QueueReport
    states: tuple[JobState, ...]

    def __str__(self) -> str:
        from phalanx.sim.queue.queue_text import queue_page

        return queue_page(self.report, self.trace, self.policy, self.cluster)

    def to_dict(self) -> dict[str, Any]:
        """Return the report and the policy; `starts` has the jobs themselves."""
        values = {
            "cluster": self.cluster,
            "trace": self.trace.source,
            "left_out": self.trace.left_out,
            "seed": self.seed,
        }
        return {**values, "policy": json_values(self.policy), **json_values(self.report)}

    def starts(self) -> list[tuple[str, float, float]]:
        """Return name, first start and end of every job, in order of submission; -1 for what did not happen."""
        return [(state.job.name, state.first_start_s, state.end_s) for state in self.states]


def simulate_queue(
    trace: str | Path | Sequence[QueueJob] = SYNTHETIC,
    cluster: str | Path | Cluster = "8xH100:7500",
    *,
    policy: str | Path | QueuePolicy = "easy",
    overrides: Overrides = (),
    jobs: int | None = None,
    days: float | None = None,
    load: float | None = None,
    seed: int = 0,
    progress: bool | Tell = False,
) -> QueueSimulation:
    """Simulate a cluster that serves a queue of jobs of all sizes, with failures and drains.

    `trace` is a .csv or .swf file, a list of QueueJob, or "synthetic": `jobs` in `days` that request `load` of the
    cluster. `policy` is fifo, easy, conservative, or a .toml file; `overrides` set single keys of it, such as
    `["preemption=true"]`. Node failures follow the cluster's rate; the same seed gives the same result.

    >>> simulation = simulate_queue("synthetic", "8xH100:16", jobs=20, days=1, policy="fifo")
    >>> simulation.report.finished
    20
    """
    from phalanx.sim.queue.queue_policy import read_policy
    from phalanx.sim.queue.queue_report import queue_report
    from phalanx.sim.queue.simulate_queue import simulate_jobs

    tell = teller(progress)
    rules = read_policy(policy, overrides)
    machines = cluster if isinstance(cluster, Cluster) else resolve_cluster(cluster)
    job_trace = _trace(trace, machines, rules, jobs, days, load, seed)
    if rules.team and (strange := {job.team for job in job_trace.jobs} - {team.name for team in rules.team}):
        unknown = sorted(strange - {""})
        message = "the trace has jobs without a team, but the policy defines teams"
        if unknown:
            message = f"the policy does not define team{'s' if len(unknown) > 1 else ''} {first_few(unknown, 3)}"
        raise mistake(job_trace.source, message, fix="name every team of the trace in [[team]] of the policy")
    rate = rules.failures_per_node_day
    if rate is None:
        rate = machines.failures_per_host_day
    outcome = simulate_jobs(job_trace.jobs, nodes=machines.hosts, policy=rules, failures_per_node_day=rate, seed=seed)
    if outcome.never_fit:
        first = outcome.never_fit[0]
        tell(
            f"warning: {plural(len(outcome.never_fit), 'job')} can never start here, such as {first.name} with "
            f"{plural(first.nodes, 'node')}"
        )
    return QueueSimulation(
        cluster=machines.name,
        trace=job_trace,
        policy=replace(rules, failures_per_node_day=rate),
        seed=seed,
        report=queue_report(outcome, nodes_per_rack=rules.nodes_per_rack),
        states=outcome.states,
    )


def _trace(
    given: str | Path | Sequence[QueueJob],
    cluster: Cluster,
    policy: QueuePolicy,
    jobs: int | None,
    days: float | None,
    load: float | None,
    seed: int,
) -> JobTrace:
    from phalanx.errors import Problem, UserError
    from phalanx.sim.queue.job_trace_file import JobTrace, read_trace
    from phalanx.sim.queue.queue_job import in_order_of_submission, job_faults
    from phalanx.sim.queue.synthetic import synthetic_jobs

    if str(given) == SYNTHETIC:
        return synthetic_jobs(
            nodes=cluster.hosts,
            jobs=DEFAULT_JOBS if jobs is None else jobs,
            days=DEFAULT_DAYS if days is None else days,
            load=DEFAULT_LOAD if load is None else load,
            seed=seed,
            teams=tuple(team.name for team in policy.team),
        )
    for option, value in (("jobs", jobs), ("days", days), ("load", load)):
        if value is not None:
            raise mistake(
                WHERE, f"--{option} applies to synthetic jobs only, but a trace was given", fix="leave it out"
            )
    if isinstance(given, str | Path):
        return read_trace(Path(given), devices_per_node=max(1, cluster.devices // cluster.hosts))
    problems = [Problem(where=queue_job.name, what=fault) for queue_job in given for fault in job_faults(queue_job)]
    if problems:
        raise UserError(problems)
    return JobTrace(source=plural(len(given), "job"), jobs=in_order_of_submission(list(given), "trace"))
