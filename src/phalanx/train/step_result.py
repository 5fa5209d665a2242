"""What the ranks of a step ask of each other, and what the step gave."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from phalanx.train.telemetry.clock import StepPhase
from phalanx.train.telemetry.noise import Noise


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
