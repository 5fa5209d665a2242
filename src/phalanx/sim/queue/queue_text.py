"""The page that `phalanx sim --queue` prints."""

from __future__ import annotations

from phalanx.io.tables import text_bar, text_table
from phalanx.sim.queue.job_trace_file import JobTrace
from phalanx.sim.queue.queue_policy import QueuePolicy
from phalanx.sim.queue.queue_report import JobGroup, NodeUse, QueueReport
from phalanx.units import format_count, format_seconds, plural

BAR = 24
MOST_TEAMS = 12  # shown on the page; the JSON has all
BACKFILL_WORDS = {"none": "FIFO without backfill", "easy": "EASY backfill", "conservative": "conservative backfill"}


def policy_words(policy: QueuePolicy) -> str:
    """Describe the policy in a line."""
    words = [BACKFILL_WORDS[policy.backfill]]
    if policy.preemption:
        words.append("preemption")
    if policy.team:
        words.append(f"{plural(len(policy.team), 'team')} with quotas{' and reclaim' if policy.reclaim else ''}")
    if policy.fair_share:
        words.append("fair share")
    words.append({"first": "no packing", "preferred": "packing", "required": "required domains"}[policy.packing])
    return ", ".join(words)


def queue_page(report: QueueReport, trace: JobTrace, policy: QueuePolicy, cluster: str) -> str:
    """Format the use of nodes, waiting times by size and team, and losses."""
    use = report.first_to_last_submission if report.first_to_last_submission.hours else report.whole
    until = "until the last submission" if use is report.first_to_last_submission else "until the last job ended"
    lines = [
        f"{plural(report.jobs, 'job')} on {plural(report.nodes, 'node')} ({cluster}): {policy_words(policy)}",
        f"  {trace.source}",
        "",
        f"NODE UTILIZATION ({format_seconds(use.hours * 3600)}, {until})",
        *_use_lines(use),
        "",
        "QUEUE WAIT BY JOB SIZE, from submission to the first start",
        *_group_lines(report.by_size, "nodes"),
    ]
    if len(report.by_team) > 1:
        most = sorted(report.by_team, key=lambda team: -team.node_hours)[:MOST_TEAMS]
        shown = (
            f", the {MOST_TEAMS} of {len(report.by_team):,} with the most work"
            if len(report.by_team) > MOST_TEAMS
            else ""
        )
        lines += ["", f"QUEUE WAIT BY TEAM{shown}", *_group_lines(tuple(most), "team")]
    lines += ["", "NODE-HOURS USED", *_work_lines(report)]
    if trace.left_out:
        lines.append(
            f"  {plural(trace.left_out, 'line')} of the trace left out: jobs that were cancelled before they started"
        )
    if report.never_fit:
        lines.append(
            f"  {plural(report.never_fit, 'job')} can never start: they need more nodes than the domain or quota has"
        )
    if report.unfinished:
        lines.append(f"  {plural(report.unfinished, 'job')} did not finish within a year of the last submission")
    return "\n".join(lines)


def _use_lines(use: NodeUse) -> list[str]:
    rows = [("busy", use.busy), *((f"idle: {reason}", share) for reason, share in use.idle.items())]
    rows.append(("failed or drained", use.out_of_service))
    shown = [(name, f"{share:.1%}", text_bar(share, BAR)) for name, share in rows if share > 0 or name == "busy"]
    return text_table(shown, right=(1,), indent=2)


def _group_lines(groups: tuple[JobGroup, ...], noun: str) -> list[str]:
    rows = [(noun, "jobs", "median", "p90", "p99", "longest", "node-hours", "preempted")]
    for group in groups:
        wait = group.waiting
        times = ("-",) * 4
        if wait is not None:
            times = tuple(_wait_text(value) for value in (wait.median_s, wait.p90_s, wait.p99_s, wait.most_s))  # type: ignore[assignment]
        rows.append((group.name, f"{group.jobs:,}", *times, format_count(group.node_hours), f"{group.preemptions:,}"))
    return text_table(rows, right=range(1, 8), indent=2)


def _wait_text(seconds: float) -> str:
    return "0 s" if seconds < 0.5 else format_seconds(seconds)


def _work_lines(report: QueueReport) -> list[str]:
    total_hours = report.useful_node_hours + report.lost_node_hours + report.overhead_node_hours
    rows = [
        ("useful", report.useful_node_hours, f"{report.finished:,} of {plural(report.jobs, 'job')} finished"),
        ("lost", report.lost_node_hours, _loss_text(report)),
        ("overhead", report.overhead_node_hours, "start-up, restarts, early ends"),
    ]
    shown = [
        (name, f"{hours / total_hours if total_hours else 0.0:.1%}", format_count(hours), words)
        for name, hours, words in rows
    ]
    lines = text_table([("", "share", "node-hours", ""), *shown], right=(1, 2), indent=2)
    lines.append(f"  fragmentation: jobs span {report.racks_over_least:.2f} times the minimum number of racks")
    return lines


def _loss_text(report: QueueReport) -> str:
    return (
        f"{plural(report.node_failures, 'node failure')}, {plural(report.job_interruptions, 'job interruption')} by "
        f"them, {plural(report.preemptions, 'preemption')}"
    )
