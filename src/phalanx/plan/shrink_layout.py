"""The same job on fewer devices: which layout is left when ranks are lost, and how its batch is dealt.

Only data ranks come and go. Tensor, context, pipeline and expert ranks hold parts of the model that nobody else has the
shape for; a data rank more or less changes only who computes which sequences. The batch stays what it was.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.plan.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchDeal:
    """How the sequences of a batch are dealt to data ranks: whole micro-batches in order, the last ones filled up.

    Every rank runs the same number of micro-batches, or those that have more would wait in collectives for those that
    have fewer. A micro-batch holds the same sequences for any number of ranks, so its gradient has the same bits.

    >>> dealing = BatchDeal(data_ranks=3)
    >>> dealing.rows(8), [dealing.real(rank, 8) for rank in range(3)]
    (3, [range(0, 3), range(3, 6), range(6, 8)])
    """

    data_ranks: int
    micro: int = 1  # sequences of a micro-batch
    rounds: int = 1  # pipeline ranks of a schedule that works in rounds of them; 1 for the others
    powers: bool = False  # micro-batches are summed in a binary tree, which wants 1, 2, 4, 8, … of them

    @classmethod
    def of(cls, layout: Layout, *, reproducible: bool = False) -> BatchDeal:
        """As a layout deals its batches."""
        # Whether torch's schedule orders micro-batches in rounds of the pipeline's ranks.
        in_rounds = layout.pipeline > 1 and (layout.schedule == "zero-bubble" or layout.virtual_pipeline > 1)
        rounds = layout.pipeline if in_rounds else 1
        return cls(data_ranks=layout.data, micro=layout.micro_batch, rounds=rounds, powers=reproducible)

    def micro_batches(self, sequences: int) -> int:
        """The fewest micro-batches on each rank that hold a batch of `sequences` and that the schedule can order.

        >>> BatchDeal(data_ranks=3, micro=2).micro_batches(8)
        2
        >>> BatchDeal(data_ranks=1, rounds=4).micro_batches(9)  # two rounds of 5
        10
        """
        count = max(1, -(-sequences // (self.data_ranks * self.micro)))
        if self.powers:
            return 1 << (count - 1).bit_length()
        while count % max(1, count // self.rounds):  # ends at a multiple of `rounds` at the latest
            count += 1
        return count

    def rows(self, sequences: int) -> int:
        """Sequences that each rank runs, those that fill up included."""
        return self.micro_batches(sequences) * self.micro

    def real(self, rank: int, sequences: int) -> range:
        """The sequences of the batch that fall to a data rank; none for the last ranks of a small batch."""
        rows = self.rows(sequences)
        return range(min(rank * rows, sequences), min((rank + 1) * rows, sequences))


def shrink_layout(layout: Layout, *, ranks: int, sequences: int, reproducible: bool = False) -> Layout | None:
    """The layout with the most data ranks, at most those of `layout`, that fits `ranks`; None when none does.

    A shrunken job grows again by the same call: `layout` is what was planned, `ranks` are those there are now. What
    each rank must hold may grow where fewer of them share one copy.

    >>> planned = Layout(data=4, shard=4, tensor=1, context=1, pipeline=2, virtual_pipeline=1, expert=1, zero=3,
    ...                  sequence_parallel=False, micro_batch=1, accumulation=4, recompute="none", precision="bf16",
    ...                  schedule="1f1b", offload="none", compression="none")
    >>> shrink_layout(planned, ranks=7, sequences=16).name
    'TP1·CP1·PP2·DP3 (ZeRO-3, EP1) mbs1 no-recompute'
    >>> shrink_layout(planned, ranks=7, sequences=16).accumulation, shrink_layout(planned, ranks=1, sequences=16)
    (6, None)
    """
    each = layout.devices // layout.data
    for data in range(min(layout.data, ranks // each), 0, -1):
        stage = data * layout.context * layout.tensor
        if stage % layout.expert == 0 and not (reproducible and data & (data - 1)):
            fewer = replace(layout, data=data, shard=_shard_degree(layout, data * layout.context))
            count = BatchDeal.of(fewer, reproducible=reproducible).micro_batches(sequences)
            return replace(fewer, accumulation=count)
    return None


def _shard_degree(layout: Layout, replicas: int) -> int:
    """As many ranks to a copy as before, or a few more: fewer would hold more than there is memory for."""
    if not layout.zero or layout.shard <= 1:
        return layout.shard
    return next((size for size in range(layout.shard, replicas) if replicas % size == 0), replicas)
