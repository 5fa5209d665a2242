"""How the trainer that will run the job behaves, where no key of the job says so: part of the J evidence.

Phalanx's own behaviour is stated with the document that describes it; that of another trainer as its documentation
or code states it. None is "not known", and never counts as good.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Practice:
    """Habits of a trainer."""

    trainer: str  # "phalanx", "torchtitan", "megatron", "deepspeed", "accelerate", "nemo"
    loss_scale: str | None = None  # "dynamic", "static" or "none"
    sums_in: str | None = None  # format of gradients while they are summed, where the job schema has no word for it
    pipeline_fill: int | None = None  # micro-batches after which a pipeline is drained; None: those of a whole step
    token_weighted_loss: bool | None = None  # accumulated loss divided by all valid tokens
    fp8_spares_sensitive: bool | None = None  # embeddings, norms, head and router stay in 16 bit or more
    skips_together: bool | None = None  # a step that is not finite is skipped by all ranks
    error_feedback: bool | None = None  # of biased gradient compression
    saves: bool | None = None  # False: it is set up to make no checkpoints at all
    checkpoint_format: str | None = None  # "safetensors", "dcp", "torch-pickle", "zarr" …
    atomic_commit: bool | None = None  # a checkpoint is visible only when it is complete
    verifies_digests: bool | None = None
    resumes_exactly: tuple[str, ...] | None = None  # parts of the state that a resume brings back, as CKP006 names them
    heartbeat_s: float | None = None  # how often a rank says that it lives; 0: it never does
    memory_copies: str | None = None  # where: "other rack" (if there is one), "other host", "other process", "none"
    preflight: bool | None = None  # every (re)start looks at its hosts first
    step_transaction: bool | None = None  # old epochs are fenced, steps commit or do not
    bounded_restarts: int | None = None  # failures in a row before it gives up
    telemetry: tuple[str, ...] | None = None  # series it writes: utilization, memory, peers, noise, energy, steps
    listens: tuple[str, ...] | None = None  # addresses it listens on by default
    authenticated: bool | None = None  # its control sockets ask who is there
    sources: Mapping[str, str] | None = None  # field -> where that is written
