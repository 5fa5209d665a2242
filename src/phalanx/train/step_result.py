"""What the ranks of a step ask of each other, what the step gave, and where its time went."""

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
    """What a rank may ask of all the others at the end of a step; one voice is enough."""

    STOP = 0  # end the run after this step
    SAVE = 1  # write a checkpoint of this step
    REFORM = 2  # leave this membership after this step
    COPY_UNSAFE = 3  # my copy of the state before this step is not safe in memory yet


NO_REQUESTS = (False,) * len(StepRequest)


class MemoryChanged(Exception):
    """What lay in some rank's memory is not what the last update left there: no rank has updated anything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step gave, the same on every rank."""

    loss: float  # nats per valid token
    tokens: int  # valid tokens of the global batch
    grad_norm: float
    skipped: bool  # the gradient was not finite, or refused: no rank updated anything
    requests: tuple[bool, ...]  # by StepRequest: whether some rank made it
    compute_s: float  # this rank's own time
    wait_s: float  # this rank's waiting for others
    cpu_s: float | None = None  # processor time of `compute_s`, on a CPU
    core_wait_s: float | None = None  # for which this rank's thread could have run and had no core
    bytes_sent: int | None = None  # by compressed gradient exchange on this rank
    noise: Noise | None = None  # of the gradient, from this step alone
    noise_samples: float | None = None  # the noise scale in sequences, from the last hundred steps or so
    phases: tuple[StepPhase, ...] = ()  # what this rank worked on, and when
    is_round_due: bool = False  # whether some rank knows of model replicas that come back


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """A step that was taken, and where its time went."""

    step: int  # its number, from 0
    result: StepResult
    lr: float
    duration_s: float  # from its begin to the end of the update, less what it was held up to be looked into
    data_s: float  # of it waiting for the batch
    before_s: float  # of it until the engine began
    own_s: float  # of it this rank's own time: computing, and what surrounds it, with a core or without
    cpu_s: float | None  # processor time of this rank's thread; None where a device computes
    compile_s: float | None  # compiling, in the middle of it; None when nothing was
    samples: Sequence[Sample]  # one when the step was looked into
