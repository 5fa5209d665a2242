"""The same job on fewer devices: the layout after ranks are lost, and the distribution of its batch.

Only the number of data ranks changes. Tensor, context, pipeline and expert ranks hold parts of the model whose shapes
depend on their number; the number of data ranks only decides which rank computes which sequences. The batch stays the
same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.plan.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchDeal:
    """The distribution of a batch's sequences to data ranks: whole micro-batches in order, the last ones padded.

    Every rank runs the same number of micro-batches, because ranks with more would wait in collectives for those with
    fewer. A micro-batch holds the same sequences for any number of ranks, so its gradient has the same bits.

    >>> dealing = BatchDeal(data_ranks=3)
    >>> dealing.rows(8), [dealing.real(rank, 8) for rank in range(3)]
    (3, [range(0, 3), range(3, 6), range(6, 8)])
    """

    data_ranks: int
    micro: int = 1  # sequences per micro-batch
    rounds: int = 1  # pipeline ranks, for a schedule that works in rounds of as many micro-batches; 1 for the others
    powers: bool = False  # micro-batches are summed in a binary tree, which needs 1, 2, 4, 8, … of them

    @classmethod
    def of(cls, layout: Layout, *, reproducible: bool = False) -> BatchDeal:
        """Return the way a layout distributes its batches."""
        # torch's schedules for these order micro-batches in rounds of as many as there are pipeline ranks.
        in_rounds = layout.pipeline > 1 and (layout.schedule == "zero-bubble" or layout.virtual_pipeline > 1)
        rounds = layout.pipeline if in_rounds else 1
        return cls(data_ranks=layout.data, micro=layout.micro_batch, rounds=rounds, powers=reproducible)

    def micro_batches(self, sequences: int) -> int:
        """Return the fewest micro-batches per rank that hold `sequences` and that the schedule can order.

        >>> BatchDeal(data_ranks=3, micro=2).micro_batches(8)
        2
        >>> BatchDeal(data_ranks=1, rounds=4).micro_batches(9)  # two rounds of 5
        10
        """
        count = max(1, -(-sequences // (self.data_ranks * self.micro)))
        if self.powers:
            return 1 << (count - 1).bit_length()
        # Ends at a multiple of `rounds` at the latest.
        while count % max(1, count // self.rounds):
            count += 1
        return count

    def rows(self, sequences: int) -> int:
        """Return the number of sequences that each rank runs, including padding."""
        return self.micro_batches(sequences) * self.micro

    def real(self, rank: int, sequences: int) -> range:
        """Return the sequences of the batch that a data rank gets; empty for the last ranks of a small batch."""
        rows = self.rows(sequences)
        return range(min(rank * rows, sequences), min((rank + 1) * rows, sequences))


def shrink_layout(layout: Layout, *, ranks: int, sequences: int, reproducible: bool = False) -> Layout | None:
    """Return the layout with the most data ranks, at most those of `layout`, that fits `ranks`; None if none does.

    A shrunken job grows again by the same call: `layout` is the planned layout, `ranks` the present number of ranks.
    The state that each rank holds may grow where fewer ranks share one copy.

    >>> planned = Layout(data=4, shard=4, tensor=1, context=1, pipeline=2, virtual_pipeline=1, expert=1, zero=3,
    ...                  sequence_parallel=False, micro_batch=1, accumulation=4, recompute="none", precision="bf16",
    ...                  schedule="1f1b", offload="none", compression="none")
    >>> shrink_layout(planned, ranks=7, sequences=16).name
    'TP1·CP1·PP2·DP3 (ZeRO-3, EP1) mbs1 no-recompute'
    >>> shrink_layout(planned, ranks=7, sequences=16).accumulation, shrink_layout(planned, ranks=1, sequences=16)
    (6, None)
    """
    ranks_per_data_rank = layout.devices // layout.data
    for data in range(min(layout.data, ranks // ranks_per_data_rank), 0, -1):
        stage = data * layout.context * layout.tensor
        if stage % layout.expert == 0 and not (reproducible and data & (data - 1)):
            fewer = replace(layout, data=data, shard=_shard_degree(layout, data * layout.context))
            count = BatchDeal.of(fewer, reproducible=reproducible).micro_batches(sequences)
            return replace(fewer, accumulation=count)
    return None


def _shard_degree(layout: Layout, replicas: int) -> int:
    """Return the ranks per sharded copy: as many as before or more, so that none holds more state than planned."""
    if not layout.zero or layout.shard <= 1:
        return layout.shard
    return next((size for size in range(layout.shard, replicas) if replicas % size == 0), replicas)
