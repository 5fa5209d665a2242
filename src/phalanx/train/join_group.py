"""Functions by which a rank joins the others: its device, the store of a generation, and the group of all ranks."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from phalanx.elastic.gpus import take_shared_gpu
from phalanx.errors import Problem, SystemFailure
from phalanx.plan.plan import Plan
from phalanx.train.leave import number_ranks
from phalanx.train.rank_settings import Settings
from phalanx.train.telemetry.sharing import Sharers
from phalanx.units import plural


def take_device(plan: Plan, local_world: int) -> torch.device:
    """Select this rank's GPU, or set this rank's number of threads to its share of the cores; return the device."""
    if torch.cuda.is_available() and plan.cluster.accelerator.family != "cpu":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        is_new = not torch.cuda.is_initialized()
        torch.cuda.set_device(device)
        if is_new:
            _load_kernels(device)
            if Settings.of(plan.job, plan.layout, on_gpu=True).compile:
                _load_tracer()
        return device
    # One thread if results must not depend on the number of ranks: kernels split their sums by thread.
    torch.set_num_threads(1 if plan.job.numerics.reproducible else max(1, (os.cpu_count() or 1) // local_world))
    return torch.device("cpu")


def _load_kernels(device: torch.device) -> None:
    """Create the CUDA context and load the libraries of any step: matrix products, attention, loss, optimizer.

    A process that replaces another does this while the other ranks still leave the old membership; in the first step
    all ranks would wait for it, 0.5 s on an H200. Draws no random number.
    """
    with suppress(RuntimeError):  # what cannot be loaded raises where it is needed
        for dtype in (torch.float32, torch.bfloat16):
            weights = torch.ones(64, 64, device=device, dtype=dtype, requires_grad=True)
            heads = (weights @ weights).view(1, 4, 16, 64)
            attended = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            rows = F.rms_norm(attended.reshape(64, 64) + F.silu(weights), (64,))
            F.cross_entropy(rows.float(), torch.zeros(64, dtype=torch.long, device=device)).backward()
            torch.optim.AdamW([weights], fused=True).step()
        torch.cuda.synchronize(device)


def _load_tracer() -> None:
    """Trace a small model: dynamo's first-call set-up is half of the time of a replacement's first compilation."""
    with torch.random.fork_rng(devices=[]):  # creating the layer draws random weights
        layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.SiLU())
    torch.compile(layer, backend="eager")(torch.ones(2, 4))
    torch._dynamo.reset()


def count_slot_sharers(device: torch.device, slot: int, slots: Collection[int]) -> Sharers:
    """Return the number of ranks on this host, and of those that share this slot's device.

    All slots of a host see the same GPUs, and are assigned to them in turn.
    """
    if device.type != "cuda":
        return Sharers(host=len(slots), device=len(slots))
    count = torch.cuda.device_count()
    return Sharers(host=len(slots), device=sum(other_slot % count == slot % count for other_slot in slots))


def open_store_socket(address: str) -> socket.socket:
    """Return a listening socket for rank 0's store, on this host's own address; torch would listen on all addresses."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    listener.set_inheritable(False)
    return listener


def connect_store(where: list[Any], door: socket.socket | None, *, timeout_s: float) -> TCPStore:
    """Connect to the store of a generation at `where`; the rank that passes a socket (rank 0) serves it."""
    host, port = str(where[0]), int(where[1])
    return TCPStore(
        host,
        port,
        is_master=door is not None,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        # A duplicate, since the store closes its descriptor.
        master_listen_fd=os.dup(door.fileno()) if door is not None else None,
    )


def join_group(
    plan: Plan, device: torch.device, *, rank: int, world: int, store: Store | None, shared: bool = False
) -> float:
    """Create the process group of all ranks; return the seconds it took."""
    if shared:
        take_shared_gpu(os.environ)
    # Gloo in addition to NCCL, for tensors in host memory.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda" and plan.job.comm.algorithm != "auto":
        # For all-reduces only: NCCL has no tree for gathers and scatters (this syntax needs NCCL 2.24).
        os.environ["NCCL_ALGO"] = f"allreduce:{plan.job.comm.algorithm}"
    # CollectiveTimeouts shortens it once steps are steady.
    limit_s = plan.job.comm.init_timeout_s
    began_s = time.perf_counter()
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=limit_s),
            device_id=device if device.type == "cuda" else None,
        )
    except dist.DistError as error:
        if "timeout" not in str(error).lower():
            raise
        raise SystemFailure(
            Problem(
                where=f"rank {rank}",
                what=f"not all of {plural(world, 'rank')} arrived within {limit_s:g} s",
                why="every rank of the job must be started, with the same MASTER_ADDR and WORLD_SIZE",
                fix="look at the logs of the ranks that are missing, or raise comm.init_timeout_s",
            )
        ) from error
    number_ranks(world)
    return time.perf_counter() - began_s
