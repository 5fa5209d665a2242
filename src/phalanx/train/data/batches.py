"""Steps to samples: how many sequences each step learns from, and which of them are this rank's."""

from __future__ import annotations

import bisect
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from phalanx.job.schema import Batch, RampStage
from phalanx.plan.shrink_layout import BatchDeal
from phalanx.train.data.sampler import Sampler
from phalanx.train.data.token_samples import Tokens

PREFETCH = 2
IGNORED = -100  # target of a token that is not scored, as in torch


class Samples(Protocol):
    """Where the tokens come from."""

    def samples(self, indices: Tokens, length: int) -> Tokens:
        """Rows [count, length + 1]."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Steps of one batch size."""

    first_step: int
    first_sequence: int
    sequences: int  # per step


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """Which positions of the sampler every step takes, the ramp of the batch included. Steps count from 0."""

    stages: tuple[Stage, ...]
    steps: int
    sequence: int

    @classmethod
    def of(cls, batch: Batch, *, sequence: int, tokens: int) -> BatchPlan:
        """Walk the ramp: a stage lasts until its tokens were seen, the last step reaches or passes `tokens`."""
        stages: list[Stage] = []
        step = position = 0
        for until, size in _ramp_stages(batch, sequence, tokens):
            left = -(-until // sequence) - position
            if left <= 0:
                continue
            stages.append(Stage(first_step=step, first_sequence=position, sequences=size))
            count = -(-left // size)
            step, position = step + count, position + count * size
        return cls(stages=tuple(stages), steps=step, sequence=sequence)

    def at(self, step: int) -> tuple[int, int]:
        """(first position, sequences) of a step; the last batch size goes on behind the last step."""
        stage = self.stages[bisect.bisect_right(self.stages, step, key=lambda stage: stage.first_step) - 1]
        return stage.first_sequence + (step - stage.first_step) * stage.sequences, stage.sequences

    def tokens_before(self, step: int) -> int:
        """Tokens learnt from when a step begins."""
        return self.at(step)[0] * self.sequence

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Every number of sequences per step that occurs."""
        return tuple(sorted({stage.sequences for stage in self.stages}))


def _ramp_stages(batch: Batch, sequence: int, tokens: int) -> Iterator[tuple[int, int]]:
    for stage in batch.ramp:
        yield min(stage.until_tokens, tokens), max(1, stage.global_tokens // sequence)
    yield tokens, batch.global_sequences or max(1, batch.global_tokens // sequence)


def steady_ramp(*, start: int, increment: int, over_sequences: int, full: int, sequence: int) -> tuple[RampStage, ...]:
    """The ramp other trainers write as "start increment samples": `full` is reached in equal shares of the samples.

    BLOOM wrote 16 16 9_765_625 with a full batch of 2,048 (bigscience tr11-176B-ml chronicles).
    """
    count = (full - start) // increment
    return tuple(
        RampStage(
            until_tokens=-(-over_sequences * (number + 1) // count) * sequence,
            global_tokens=(start + number * increment) * sequence,
        )
        for number in range(count)
    )


class Batches:
    """This data rank's part of every global batch, read ahead by a thread.

    The batch is dealt in order and in whole micro-batches (`BatchDeal`), so the whole is the same for every number of
    ranks. Rows beyond the last sequence fill micro-batches up: they repeat a sequence and none of their targets counts.
    """

    def __init__(
        self,
        dataset: Samples,
        sampler: Sampler,
        plan: BatchPlan,
        *,
        sequence: int,
        data_rank: int,
        data_ranks: int,
        micro: int = 1,
        rounds: int = 1,
        powers: bool = False,
        digest: str = "",
    ) -> None:
        self._dataset, self._sampler, self._plan, self._sequence = dataset, sampler, plan, sequence
        self._rank, self.digest = data_rank, digest
        self._dealing = BatchDeal(data_ranks=data_ranks, micro=micro, rounds=rounds, powers=powers)
        self._ahead: ReadAhead[Tokens] | None = None

    def get(self, step: int) -> tuple[Tokens, Tokens]:
        """(tokens, targets), int64 [b, sequence] each, of a step; the steps that follow are read in the background."""
        if self._ahead is None or self._ahead.next_step != step:
            self.close()
            self._ahead = ReadAhead(self.read, step)
        rows = self._ahead.take()
        tokens, targets = rows[:, :-1], rows[:, 1:]
        real = len(self._real_samples(step))
        if real < len(rows):
            targets = targets.copy()  # shares its memory with the tokens
            targets[real:] = IGNORED
        return tokens, targets

    def position(self, step: int) -> Any:
        """What a checkpoint must keep of the place in the data after `step` steps: nothing, the step tells it."""
        return None

    def restore_position(self, position: Any) -> None:
        """Nothing to take up."""

    def indices(self, step: int) -> Tokens:
        """The samples that this rank learns from in a step."""
        mine = self._real_samples(step)
        return self._sampler.indices(self._plan.at(step)[0] + mine.start, len(mine))

    def read(self, step: int) -> Tokens:
        """Rows [b, sequence + 1] of a step, read now; those that fill up come last."""
        first, sequences = self._plan.at(step)
        mine = self.indices(step)
        # Something with the lengths and words of real text, so that a filling row costs no more than another.
        real = self._dataset.samples(mine if len(mine) else self._sampler.indices(first, 1), self._sequence)
        missing = self._dealing.rows(sequences) - len(real)
        return np.ascontiguousarray(np.concatenate([real, np.repeat(real[-1:], missing, axis=0)]) if missing else real)

    def _real_samples(self, step: int) -> range:
        """This rank's sequences, counted from the first of the batch."""
        return self._dealing.real(self._rank, self._plan.at(step)[1])

    def close(self) -> None:
        """Stop reading ahead."""
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = None


T = TypeVar("T")


class ReadAhead(Generic[T]):
    """A thread that reads the next steps into a short queue."""

    def __init__(self, read: Callable[[int], T], first_step: int) -> None:
        self.next_step = first_step
        self._queue: queue.Queue[T | Exception] = queue.Queue(maxsize=PREFETCH)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read_ahead, args=(read, first_step), name="batches", daemon=True)
        self._thread.start()

    def _read_ahead(self, read: Callable[[int], T], step: int) -> None:
        while not self._stopped.is_set():
            try:
                found: T | Exception = read(step)
            except Exception as error:  # handed to the loop, which asked for the step
                found = error
            while not self._stopped.is_set():
                try:
                    self._queue.put(found, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if isinstance(found, Exception):
                return
            step += 1

    def take(self) -> T:
        """The next step's rows; raises what reading raised."""
        found = self._queue.get()
        if isinstance(found, Exception):
            self._stopped.set()
            self.next_step = -1
            raise found
        self.next_step += 1
        return found

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopped.set()
        self._thread.join()
