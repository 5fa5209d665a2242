"""Values of one training step: the requests that ranks make, the result of the step, and its timing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from phalanx.train.telemetry.clock import StepPhase
from phalanx.train.telemetry.noise import Noise

if TYPE_CHECKING:
    from phalanx.train.telemetry.timeline import Sample


class StepRequest(IntEnum):
    """Requests that a rank makes to all ranks at the end of a step; a request by one rank is enough."""

    STOP = 0  # end the run after this step
    SAVE = 1  # write a checkpoint of this step
    REFORM = 2  # leave this membership after this step
    COPY_UNSAFE = 3  # this rank's copy of the state before this step is not safe in memory yet


NO_REQUESTS = (False,) * len(StepRequest)


class MemoryChanged(Exception):
    """Memory of some rank changed since the last update wrote it; no rank has updated anything in this step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The numbers of one step; the same on every rank, except for times and bytes sent."""

    loss: float  # nats per valid token
    tokens: int  # valid tokens of the global batch
    grad_norm: float
    skipped: bool  # the gradient was not finite, or a spike: no rank updated anything
    requests: tuple[bool, ...]  # indexed by StepRequest: True if some rank made the request
    compute_s: float  # this rank's own computing time
    wait_s: float  # this rank's time waiting for other ranks
    cpu_s: float | None = None  # processor time of `compute_s`, on a CPU
    core_wait_s: float | None = None  # during which this rank's thread was runnable and had no core
    bytes_sent: int | None = None  # by compressed gradient exchange on this rank
    noise: Noise | None = None  # of the gradient, from this step alone
    noise_samples: float | None = None  # the noise scale in sequences, from the last hundred steps or so
    phases: tuple[StepPhase, ...] = ()  # this rank's phases of the step, with their times
    is_round_due: bool = False  # True if some rank knows of model replicas that come back


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """A step that was taken: its result, and where its time went."""

    step: int  # its number, from 0
    result: StepResult
    lr: float
    duration_s: float  # from its begin to the end of the update, without the overhead of sampling it
    data_s: float  # part of duration_s: waiting for the batch
    before_s: float  # part of duration_s: until the engine began
    own_s: float  # part of duration_s: this rank's own work, with a core or waiting for one
    cpu_s: float | None  # processor time of this rank's thread; None where a device computes
    compile_s: float | None  # part of duration_s: compiling; None when nothing was compiled
    samples: Sequence[Sample]  # of the collectives; one if this step was sampled, else none
