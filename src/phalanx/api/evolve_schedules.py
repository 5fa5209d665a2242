"""`phalanx.evolve.schedules`: pipeline orders with smaller bubbles, for stages of given lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.api.evolve_search import FinishedSearch, finish_search, picture_lines
from phalanx.api.jobs import AnyJob, read_job
from phalanx.api.results import Overrides, PublicResult, Tell, teller
from phalanx.errors import mistake
from phalanx.hardware.types import Cluster
from phalanx.io.files import write_text
from phalanx.io.tables import text_table
from phalanx.plan.pipeline_order import MOST_MICRO_BATCHES, PlayedOrders, StageTimes, named_orders, order_mistake

if TYPE_CHECKING:
    from phalanx.evolve.schedule_problem import ScheduleProblem

WHERE = "phalanx evolve schedules"
MOST_STAGES = 256
# Actions of all ranks in a step: an evaluation simulates every one.
MOST_ACTIONS = 100_000
# Time of a backward relative to a forward: two matrix products for each one.
BACKWARD = 2.0
WEIGHT_SHARE = 0.5  # share of a backward that is in its second half


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleRow:
    """One order, timed on this pipeline."""

    name: str
    step: float  # in the unit of the stage times
    bubble: float  # share of the step in which the busiest rank waits
    activations: float  # peak of a rank, in micro-batches of an average stage
    burst: int
    orders: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class EvolvedSchedules(PublicResult):
    """A search over pipeline orders, compared with the known schedules; `write` saves the best one for a job.

    >>> search = phalanx.evolve.schedules(stages=4, micro_batches=8, evaluations=300)  # doctest: +SKIP
    >>> search.best.orders  # doctest: +SKIP
    """

    times: StageTimes
    micro_batches: int
    search: FinishedSearch
    rows: tuple[ScheduleRow, ...]  # known schedules first

    @property
    def best(self) -> ScheduleRow:
        """The row with the shortest step found."""
        return next(row for row in self.rows if row.name == "found")

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C."""
        return self.search.exit_code

    def to_dict(self) -> dict[str, Any]:
        """Return every row, and the best order of every cell."""
        from phalanx.io.codec import json_values

        return {
            "times": json_values(self.times),
            "micro_batches": self.micro_batches,
            "schedules": json_values(self.rows),
            **json_values(self.search.to_dict()),
        }

    def toml(self) -> str:
        """Return the best order as a [parallel] section."""
        orders = self.best.orders
        split = any("I" in order for order in orders)
        lines = "".join(f'    "{order}",\n' for order in orders)
        return (
            f"# {self.micro_batches} micro-batches, bubble {self.best.bubble:.1%}: made by phalanx evolve schedules\n"
            f"[parallel]\npipeline = {len(orders)}\nvirtual_pipeline = 1\n"
            f'schedule = "{"zero-bubble" if split else "1f1b"}"\norder = [\n{lines}]\n'
        )

    def write(self, path: str | Path) -> None:
        """Write `toml` to a file."""
        write_text(Path(path), self.toml(), fix="name another --out")

    def __str__(self) -> str:
        rows = [["order", "step", "bubble", "against 1f1b", "activations", "burst"]]
        plain = next(row.step for row in self.rows if row.name in ("1f1b", "gpipe"))
        plain = next((row.step for row in self.rows if row.name == "1f1b"), plain)
        for row in self.rows:
            gain = f"{plain / row.step - 1:+.1%}"
            rows.append(
                [row.name, f"{row.step:.4g}", f"{row.bubble:.1%}", gain, f"{row.activations:.1f}", f"{row.burst}"]
            )
        return "\n".join(
            [
                f"{len(self.times.forward)} stages, {self.micro_batches} micro-batches, forward "
                f"{', '.join(f'{forward_time:g}' for forward_time in self.times.forward)}; faster than 1f1b is +",
                "",
                *text_table(rows, right=range(1, 6)),
                "",
                *(f"rank {rank}: {order}" for rank, order in enumerate(self.best.orders)),
                "",
                *picture_lines(self.search),
                "",
                *self.search.summary_lines(),
            ]
        )


def schedules(
    job: AnyJob | None = None,
    cluster: str | Path | Cluster | None = None,
    *,
    stages: int = 4,
    micro_batches: int = 8,
    forward: Sequence[float] = (),
    backward: Sequence[float] = (),
    weight_share: float = WEIGHT_SHARE,
    send: float = 0.0,
    split: bool = True,
    evaluations: int = 1000,
    seed: int = 0,
    archive: str | Path | None = None,
    proposer: str = "",
    picture: str | Path | None = None,
    overrides: Overrides = (),
    progress: bool | Tell = False,
) -> EvolvedSchedules:
    """Search pipeline orders by MAP-Elites: the smallest bubble for each amount of activations × burst of messages.

    The pipeline is that of a job's plan, its stages timed by their layers; or `stages` ranks with `forward` and
    `backward` times (one for each; default 1 and twice the forward) and `send` for a message. `split` allows backward
    in two halves, the second of which takes `weight_share` of it. The trainer runs the result as `parallel.order`.
    Raises UserError for an archive of another pipeline.

    >>> import phalanx
    >>> search = phalanx.evolve.schedules(stages=2, micro_batches=4, evaluations=60)
    >>> search.best.step <= min(row.step for row in search.rows)
    True
    """
    from phalanx.evolve.schedule_problem import ScheduleProblem

    if job is not None:
        if forward or backward:
            raise mistake(
                WHERE, "a job and --forward or --backward", why="its plan says the times", fix="leave one out"
            )
        forward, micro_batches = _planned_stages(job, cluster, overrides)
    elif not forward:
        if not 2 <= stages <= MOST_STAGES:
            raise mistake("--stages", f"{stages} is not between 2 and {MOST_STAGES}")
        forward = (1.0,) * stages
    times = _stage_times(forward, backward, weight_share=weight_share, send=send)
    ranks = len(times.forward)
    if not 1 <= micro_batches <= MOST_MICRO_BATCHES or 3 * ranks * micro_batches > MOST_ACTIONS:
        raise mistake(
            "--micro-batches",
            f"{micro_batches} of {ranks} stages",
            why=f"an order has at most {MOST_MICRO_BATCHES:,} micro-batches and {MOST_ACTIONS:,} actions",
            fix="use fewer",
        )
    problem = ScheduleProblem(times=times, micro_batches=micro_batches, split=split)
    search = finish_search(
        problem,
        archive=Path(archive) if archive is not None else None,
        evaluations=evaluations,
        seed=seed,
        proposer=proposer,
        picture=picture,
        title=f"{ranks} stages, {micro_batches} micro-batches: 1 - bubble",
        show=lambda value: f"bubble {1 - value:.1%}",
        tell=teller(progress),
    )
    return EvolvedSchedules(
        times=times, micro_batches=micro_batches, search=search, rows=tuple(_compare(problem, search))
    )


def _planned_stages(
    job: AnyJob, cluster: str | Path | Cluster | None, overrides: Overrides
) -> tuple[tuple[float, ...], int]:
    """Return the forward time of each stage of a job's plan, in layers, and its number of micro-batches."""
    from phalanx.plan.make import make_plan
    from phalanx.plan.memory_profile import head_layers
    from phalanx.plan.request import request_from_job
    from phalanx.plan.schedules import layers_of_stages
    from phalanx.plan.score import price_layouts

    resolved = read_job(job, overrides, where=WHERE)
    plan = make_plan(resolved, cluster)
    layout = plan.layout
    if layout.pipeline < 2:
        raise mistake(
            WHERE,
            f"the plan has no pipeline ({layout.name})",
            fix="ask for one: --set parallel.pipeline=4, or give --stages and --micro-batches instead of a job",
        )
    request, _ = request_from_job(resolved.job, plan.cluster)
    head = float(head_layers(price_layouts(request, [layout])[0]).max())
    layers = layers_of_stages(
        resolved.job.model.layers, layout.pipeline, embed_cost=1.0 if head > 0.5 else 0.0, head_cost=head
    )
    counts = [float(len(stage_layers)) for stage_layers in layers]
    return (*counts[:-1], counts[-1] + head), layout.accumulation


def _stage_times(
    forward: Sequence[float], backward: Sequence[float], *, weight_share: float, send: float
) -> StageTimes:
    for option, values in (("--forward", forward), ("--backward", backward)):
        if not all(0 < value < 1e9 for value in values):
            raise mistake(option, "not all numbers are above 0", fix=f"such as {option} 1,1,2,1")
    if not 2 <= len(forward) <= MOST_STAGES:
        raise mistake("--forward", f"{len(forward)} stages are not between 2 and {MOST_STAGES}")
    full_backward = tuple(float(time) for time in backward) or tuple(BACKWARD * time for time in forward)
    if len(full_backward) != len(forward):
        raise mistake(
            "--backward", f"{len(full_backward)} times for {len(forward)} stages", fix="give one for each stage"
        )
    if not 0 < weight_share < 1:
        raise mistake(
            "--weight-share", f"{weight_share:g} is not between 0 and 1", fix="0.5 where both halves cost alike"
        )
    if not 0 <= send < 1e9:
        raise mistake("--send", f"{send:g} is below 0")
    return StageTimes(
        forward=tuple(float(value) for value in forward),
        first_half=tuple((1 - weight_share) * value for value in full_backward),
        second_half=tuple(weight_share * value for value in full_backward),
        send=float(send),
    )


def _compare(problem: ScheduleProblem, found: FinishedSearch) -> list[ScheduleRow]:
    """Return the known schedules, the best order, and the best order that holds no more activations than 1F1B."""

    def row(name: str, orders: Sequence[str]) -> ScheduleRow:
        played: PlayedOrders = problem.play(orders)
        return ScheduleRow(
            name=name,
            step=played.makespan,
            bubble=played.bubble,
            activations=problem.peak(played),
            burst=played.burst,
            orders=tuple(orders),
        )

    count, ranks, rows = problem.micro_batches, problem.ranks, []
    for name in ("gpipe", "1f1b", "zero-bubble"):
        if name == "zero-bubble" and (not problem.split or count % max(1, count // ranks)):
            # The trainer's zero-bubble schedule works in complete rounds.
            continue
        orders = named_orders(name, ranks, count)
        if not order_mistake(orders):
            rows.append(row(name, orders))
    elites = [found.archive.entries[place_of_elite] for place_of_elite in found.archive.elites.values()]
    best = found.archive.best()
    if best is None:  # interrupted before the first evaluation
        return [*rows, row("found", rows[0].orders)]
    rows.append(row("found", best.genome["orders"]))
    room = next((known_row.activations for known_row in rows if known_row.name == "1f1b"), 0.0)
    small = [elite for elite in elites if elite.outcome.place is not None and elite.outcome.place[0] <= room + 1e-9]
    if small:
        rows.append(row("found, activations of 1f1b", max(small, key=lambda elite: elite.fitness).genome["orders"]))
    return rows
