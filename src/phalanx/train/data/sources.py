"""Training data of the user's own: any dataset with `len()` and indices, or any iterable, of token sequences.

An item is a sequence of `data.sequence + 1` token numbers (list, array or tensor), or a dictionary with such
"input_ids" and, if some targets must not count, "labels" of the same length with -100 there, as in Hugging Face. A
shorter item is padded with targets that do not count.

A dataset with indices is shuffled and distributed like Phalanx's own: its position is the step. An iterable is read
in order by every rank, each keeping its own rows; its position is its `state_dict()` after the step, or else the
number of items read, which a resumed run skips. So both resume on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from phalanx.errors import mistake
from phalanx.job.schema import Job
from phalanx.plan.shrink_layout import BatchDeal
from phalanx.train.data.batches import IGNORED, Batches, BatchPlan, ReadAhead
from phalanx.train.data.sampler import GlobalSampler
from phalanx.train.data.token_samples import TokenDataset, Tokens

if TYPE_CHECKING:
    from phalanx.train.engine import Engine

WHERE = "plugins.data"


def open_batches(
    folder: Path, job: Job, plan: BatchPlan, engine: Engine, data: Any
) -> tuple[Batches | OwnBatches, TokenDataset | None]:
    """Return this rank's batches and the dataset of the job's folders.

    Args:
        folder: The run's folder, which relative dataset paths start from.
        job: The resolved job.
        plan: The batch sizes of all steps.
        engine: This rank's engine, for its layout and data rank.
        data: The user's own data, which replaces the folders' training text; None without.
    """
    dealing = BatchDeal.of(engine.settings.layout, reproducible=engine.settings.reproducible)
    dealing = replace(dealing, data_ranks=engine.data_ranks)
    data_rank, sequence, seed = engine.data_rank, job.data.sequence, job.data.seed
    folders = [folder / path for path in job.data.paths]
    dataset = TokenDataset.open(folders, "train", vocab=job.model.vocab) if folders else None
    if data is not None:
        name, vocab = job.plugins.data.partition("{")[0].strip().rpartition("/")[2], job.model.vocab
        own_batches = OwnBatches(
            data, plan, dealing, sequence=sequence, vocab=vocab, data_rank=data_rank, seed=seed, name=name
        )
        return own_batches, dataset
    assert dataset is not None
    batches = Batches(
        dataset,
        dataset.sampler(sequence, seed),
        plan,
        sequence=sequence,
        data_rank=data_rank,
        data_ranks=dealing.data_ranks,
        micro=dealing.micro,
        rounds=dealing.rounds,
        powers=dealing.powers,
        digest=dataset.digest,
    )
    return batches, dataset


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    """The rows of a step, and the position of the iterable after it."""

    step: int
    tokens: Tokens
    targets: Tokens
    position: Any


class OwnBatches:
    """This data rank's rows of every step, from a user's own data, read ahead by a thread.

    Same interface as `Batches`.
    """

    def __init__(
        self,
        data: Any,
        plan: BatchPlan,
        dealing: BatchDeal,
        *,
        sequence: int,
        vocab: int,
        data_rank: int,
        seed: int,
        name: str,
    ) -> None:
        self._plan, self._dealing, self._sequence, self._vocab, self._rank = plan, dealing, sequence, vocab, data_rank
        self.digest = f"own data {name}"
        self._indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
        if not self._indexed and not hasattr(data, "__iter__"):
            raise mistake(WHERE, f"{type(data).__name__} is neither a dataset with len() and indices nor an iterable")
        self._data = data
        if self._indexed:
            if not len(data):
                raise mistake(WHERE, f"{type(data).__name__} is empty")
            self._sampler = GlobalSampler(len(data), seed)
        self._iterator: Iterator[Any] | None = None
        # Passes through an iterable, and items of this pass
        self._passes = self._items = 0
        self._reader: ReadAhead[_Read] | None = None
        self._last: _Read | None = None

    # ---- as Batches ------------------------------------------------------------------------------------------------

    def get(self, step: int) -> tuple[Tokens, Tokens]:
        """Return (tokens, targets) of a step; the next steps are read in the background."""
        # The comparison of compiled code reads a step twice
        if self._last is not None and self._last.step == step:
            return self._last.tokens, self._last.targets
        if self._reader is None or self._reader.next_step != step:
            if not self._indexed and self._reader is not None:
                raise mistake(WHERE, f"step {step} is asked for out of order, and an iterable only goes forward")
            self.close()
            self._reader = ReadAhead(self._read_step, step)
        self._last = self._reader.take()
        return self._last.tokens, self._last.targets

    def position(self, step: int) -> Any:
        """Return the data position that a checkpoint must store after `step` steps."""
        return self._last.position if self._last is not None and self._last.step + 1 == step else None

    def restore_position(self, position: Any) -> None:
        """Continue from a stored position; must precede the first `get`."""
        if self._indexed or not position:
            return
        self._passes, self._items = int(position["passes"]), int(position["items"])
        if position.get("state") is not None:
            self._data.load_state_dict(position["state"])
            self._iterator = iter(self._data)
            return
        self._iterator = iter(self._data)
        for _ in range(self._items):
            next(self._iterator, None)

    def indices(self, step: int) -> Tokens:
        """Return the indices of this rank's samples in a step; of an iterable, their places in its order."""
        first, own_range = self._plan.at(step)[0], self._own_samples(step)
        if self._indexed:
            return self._sampler.indices(first + own_range.start, len(own_range))
        return np.arange(first + own_range.start, first + own_range.stop, dtype=np.int64)

    def close(self) -> None:
        """Stop reading ahead."""
        if self._reader is not None:
            self._reader.stop()
            self._reader = None

    # ---- reading ---------------------------------------------------------------------------------------------------

    def _own_samples(self, step: int) -> range:
        return self._dealing.real(self._rank, self._plan.at(step)[1])

    def _read_step(self, step: int) -> _Read:
        count, own_range = self._plan.at(step)[1], self._own_samples(step)
        if self._indexed:
            indices = self.indices(step) if len(own_range) else self._sampler.indices(self._plan.at(step)[0], 1)
            items = [self._data[int(index)] for index in indices]
        else:
            all_items = [self._next_item() for _ in range(count)]
            items = all_items[own_range.start : own_range.stop] or all_items[:1]
        rows = [self._token_row(item) for item in items]
        num_padding = self._dealing.rows(count) - len(rows)
        padding = [(rows[-1][0], np.full_like(rows[-1][1], IGNORED))] * num_padding
        if not len(own_range):
            rows = [(rows[0][0], np.full_like(rows[0][1], IGNORED))]
        tokens, targets = zip(*rows, *padding, strict=True)
        return _Read(step=step, tokens=np.stack(tokens), targets=np.stack(targets), position=self._source_position())

    def _next_item(self) -> Any:
        """Return the next item of an iterable, which is restarted when it ends."""
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self._data)
            for item in self._iterator:
                self._items += 1
                return item
            self._iterator, self._passes, self._items = None, self._passes + 1, 0
        raise mistake(
            WHERE,
            f"{type(self._data).__name__} gives nothing the second time",
            why=f"the job needs {self._plan.steps:,} steps, and it ended before",
            fix="let iter() start it anew each time, or lower data.tokens",
        )

    def _source_position(self) -> Any:
        if self._indexed:
            return None
        state = self._data.state_dict() if hasattr(self._data, "state_dict") else None
        return {"passes": self._passes, "items": self._items, "state": state}

    def _token_row(self, item: Any) -> tuple[Tokens, Tokens]:
        """Return (tokens, targets) of an item."""
        labels = None
        if isinstance(item, Mapping):
            if "input_ids" not in item:
                raise mistake(WHERE, f'an item has {", ".join(map(str, item))[:80]}, and no "input_ids"')
            item, labels = item["input_ids"], item.get("labels")
        ids = np.asarray(item, dtype=np.int64).reshape(-1)
        length = self._sequence + 1
        if not 2 <= len(ids) <= length:
            raise mistake(
                WHERE,
                f"an item of {len(ids):,} tokens, and data.sequence = {self._sequence:,}",
                why="a sequence and the target of its last token are one more",
                fix=f"give items of {length:,} tokens; shorter ones are filled up",
            )
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocab:
            raise mistake(WHERE, f"a token numbered {int(ids.max()):,}, and model.vocab = {self._vocab:,}")
        targets = ids[1:] if labels is None else np.asarray(labels, dtype=np.int64).reshape(-1)[1:]
        if len(targets) != len(ids) - 1:
            raise mistake(WHERE, f"{len(ids):,} input_ids and {len(targets) + 1:,} labels in one item")
        num_padding = length - len(ids)
        padded = np.pad(targets, (0, num_padding), constant_values=IGNORED)
        return np.pad(ids, (0, num_padding))[:-1], padded
