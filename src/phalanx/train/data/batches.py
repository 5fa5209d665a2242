"""Assignment of samples to steps and data ranks, with batch ramps and background reading."""

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
IGNORED = -100  # target of a token that is not scored, the value that torch ignores


class Samples(Protocol):
    """Source of token samples."""

    def samples(self, indices: Tokens, length: int) -> Tokens:
        """Return the samples at `indices` as rows [count, length + 1]."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A range of steps with one batch size."""

    first_step: int
    first_sequence: int
    sequences: int  # per step


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """The sampler positions of every step, including the batch ramp. Steps count from 0."""

    stages: tuple[Stage, ...]
    steps: int
    sequence: int

    @classmethod
    def of(cls, batch: Batch, *, sequence: int, tokens: int) -> BatchPlan:
        """Build the plan: a ramp stage lasts until its tokens were seen, the last step reaches or passes `tokens`."""
        stages: list[Stage] = []
        step = position = 0
        for until_tokens, size in _ramp_stages(batch, sequence, tokens):
            # Ceiling division: a stage ends with the first whole sequence that reaches its tokens.
            remaining = -(-until_tokens // sequence) - position
            if remaining <= 0:
                continue
            stages.append(Stage(first_step=step, first_sequence=position, sequences=size))
            count = -(-remaining // size)
            step, position = step + count, position + count * size
        return cls(stages=tuple(stages), steps=step, sequence=sequence)

    def at(self, step: int) -> tuple[int, int]:
        """Return (first position, sequences) of a step; steps after the last keep the last batch size."""
        stage = self.stages[bisect.bisect_right(self.stages, step, key=lambda stage: stage.first_step) - 1]
        return stage.first_sequence + (step - stage.first_step) * stage.sequences, stage.sequences

    def tokens_before(self, step: int) -> int:
        """Return the number of training tokens before a step."""
        return self.at(step)[0] * self.sequence

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """All numbers of sequences per step that occur, ascending."""
        return tuple(sorted({stage.sequences for stage in self.stages}))


def _ramp_stages(batch: Batch, sequence: int, tokens: int) -> Iterator[tuple[int, int]]:
    for stage in batch.ramp:
        yield min(stage.until_tokens, tokens), max(1, stage.global_tokens // sequence)
    yield tokens, batch.global_sequences or max(1, batch.global_tokens // sequence)


def steady_ramp(*, start: int, increment: int, over_sequences: int, full: int, sequence: int) -> tuple[RampStage, ...]:
    """Build the ramp that other trainers write as "start increment samples".

    `full` is reached in equal shares of the samples. BLOOM wrote 16 16 9_765_625 with a full batch of 2,048
    (bigscience tr11-176B-ml chronicles).
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

    The batch is distributed in order and in whole micro-batches (`BatchDeal`), so the global batch is the same for
    every number of ranks. Rows after the last sequence pad micro-batches: they repeat a sequence and none of their
    targets counts.
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
        """Return (tokens, targets) of a step, int64 [b, sequence] each; the next steps are read in the background."""
        if self._ahead is None or self._ahead.next_step != step:
            self.close()
            self._ahead = ReadAhead(self.read, step)
        rows = self._ahead.take()
        tokens, targets = rows[:, :-1], rows[:, 1:]
        num_real = len(self._real_samples(step))
        if num_real < len(rows):
            targets = targets.copy()  # shares its memory with the tokens
            targets[num_real:] = IGNORED
        return tokens, targets

    def position(self, step: int) -> Any:
        """Return the data position that a checkpoint must store: None, since the step determines it."""
        return None

    def restore_position(self, position: Any) -> None:
        """Do nothing: the step determines the position."""

    def indices(self, step: int) -> Tokens:
        """Return the indices of the samples that this rank trains on in a step."""
        own_range = self._real_samples(step)
        return self._sampler.indices(self._plan.at(step)[0] + own_range.start, len(own_range))

    def read(self, step: int) -> Tokens:
        """Read rows [b, sequence + 1] of a step; padding rows come last."""
        first, sequences = self._plan.at(step)
        own_indices = self.indices(step)
        # Padding repeats real text, so that a padding row costs no more time than another.
        real_rows = self._dataset.samples(
            own_indices if len(own_indices) else self._sampler.indices(first, 1), self._sequence
        )
        num_padding = self._dealing.rows(sequences) - len(real_rows)
        return np.ascontiguousarray(
            np.concatenate([real_rows, np.repeat(real_rows[-1:], num_padding, axis=0)]) if num_padding else real_rows
        )

    def _real_samples(self, step: int) -> range:
        """Return the range of this rank's sequences, relative to the first of the batch."""
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
                item: T | Exception = read(step)
            # Passed to the training loop, which requested the step
            except Exception as error:
                item = error
            while not self._stopped.is_set():
                try:
                    self._queue.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if isinstance(item, Exception):
                return
            step += 1

    def take(self) -> T:
        """Return the next step's rows; raise the exception that reading raised."""
        item = self._queue.get()
        if isinstance(item, Exception):
            self._stopped.set()
            self.next_step = -1
            raise item
        self.next_step += 1
        return item

    def stop(self) -> None:
        """Stop the thread and wait for it."""
        self._stopped.set()
        self._thread.join()
