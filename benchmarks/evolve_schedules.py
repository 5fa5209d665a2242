"""A pipeline order that `phalanx evolve schedules` found against 1F1B, in four real processes with uneven stages.

    PYTHONPATH=src python benchmarks/evolve_schedules.py [--unit-ms 20] [--steps 5]

The trainer's own schedule builder runs both orders over gloo. Stages compute a small layer and then wait for their
share of time (forward, gradients of the input, gradients of the weights), so that four ranks need no four cores. Losses
and weights after all steps must be equal.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import phalanx
from phalanx.plan.pipeline_order import named_orders
from phalanx.train.parallel.pipeline import build_schedule

WIDTH, ROWS, MICRO_BATCHES = 32, 4, 8
LIMIT_S = 90.0
FORWARD = (1.0, 1.0, 2.0, 1.0)


class Wait(torch.autograd.Function):
    """The identity, which takes some time forward and some backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grad, None, None


class SlowLayer(nn.Module):
    """One layer of a stage; the gradient of its weight takes time of its own."""

    def __init__(self, seed: int, unit_s: float) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=rng, dtype=torch.float64) / WIDTH**0.5)
        self.unit_s = unit_s

    def forward(self, x: Tensor) -> Tensor:
        weight = Wait.apply(self.weight, 0.0, self.unit_s)
        return torch.tanh(Wait.apply(x, self.unit_s, self.unit_s) @ weight)


def run_rank(rank: int, orders: tuple[str, ...], unit_s: float, steps: int, port: int, answers: Any) -> None:
    """Train for some steps; the last rank answers with losses, all with a sum of their weights."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)  # a rank that waits for ever says where
    dist.init_process_group("gloo", rank=rank, world_size=len(orders))
    layer = SlowLayer(rank, FORWARD[rank] * unit_s)
    like = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    schedule, stages = build_schedule(
        [(rank, layer)],  # type: ignore[list-item]
        stages=len(orders),
        group=dist.group.WORLD,  # type: ignore[arg-type]
        name="1f1b",
        micro_batches=MICRO_BATCHES,
        loss=lambda out, target: (out - target).square().mean(),
        shapes=lambda _: (like.requires_grad_(), like),
        device=torch.device("cpu"),
        order=orders,
    )
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    rng = torch.Generator().manual_seed(7)
    found, times = [], []
    for _ in range(steps):
        x, target = (torch.randn(ROWS * MICRO_BATCHES, WIDTH, generator=rng, dtype=torch.float64) for _ in range(2))
        optimizer.zero_grad()
        dist.barrier()
        start, losses = time.monotonic(), []
        given = (x,) if rank == 0 else ()
        if rank == len(orders) - 1:
            schedule.step(*given, target=target, losses=losses)
        else:
            schedule.step(*given)
        for stage in stages:
            stage.finish_sends()
        dist.barrier()
        times.append(time.monotonic() - start)
        optimizer.step()
        found.append(float(sum(one.detach() for one in losses)) / MICRO_BATCHES if losses else 0.0)
    answers.put((rank, found, times, float(layer.weight.detach().abs().sum())))
    dist.barrier()
    dist.destroy_process_group()


def measure(orders: tuple[str, ...], unit_s: float, steps: int, port: int) -> tuple[list[float], float, list[float]]:
    """Losses, median seconds of a step without the first, and the ranks' sums of weights."""
    context = mp.get_context("spawn")
    answers = context.Queue()
    arguments = (orders, unit_s, steps, port, answers)
    ranks = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(len(orders))]
    for process in ranks:
        process.start()
    found = sorted(answers.get(timeout=LIMIT_S + 30) for _ in ranks)
    for process in ranks:
        process.join()
    times = sorted(found[-1][2][1:])
    return found[-1][1], times[len(times) // 2], [one[3] for one in found]


def main() -> None:
    """Both orders, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--unit-ms", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    unit_s = args.unit_ms / 1e3
    found = phalanx.evolve.schedules(forward=FORWARD, micro_batches=MICRO_BATCHES, evaluations=600)
    rows = {row.name: row for row in found.rows}
    orders = {
        "1f1b": named_orders("1f1b", len(FORWARD), MICRO_BATCHES),
        "zero-bubble": named_orders("zero-bubble", len(FORWARD), MICRO_BATCHES),
        "found": rows["found"].orders,
    }
    measured = {}
    for place, (name, order) in enumerate(orders.items()):
        measured[name] = measure(order, unit_s, args.steps, 29_640 + place)
        losses, seconds, _ = measured[name]
        plain = measured["1f1b"][1]
        print(
            f"{name}: predicted {rows[name].step * unit_s:.3f} s ({rows['1f1b'].step / rows[name].step - 1:+.1%}), "
            f"measured {seconds:.3f} s ({plain / seconds - 1:+.1%}), last loss {losses[-1]:.15f}"
        )
    for name in ("zero-bubble", "found"):
        loss = max(abs(a - b) for a, b in zip(measured[name][0], measured["1f1b"][0], strict=True))
        weights = max(abs(a - b) for a, b in zip(measured[name][2], measured["1f1b"][2], strict=True))
        print(f"{name} against 1f1b: losses differ by {loss:.1e}, sums of weights by {weights:.1e}")
    print("\n".join(found.best.orders))


if __name__ == "__main__":
    main()
