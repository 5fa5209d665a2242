"""Work that needs whole tensors, shared out: each rank gets some of them whole, works, and gives the parts back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from phalanx.train.optim.whole import Cut, join, pad, part_of

Work = Callable[[torch.Tensor], torch.Tensor]


def spread(boxes: Sequence[torch.Tensor], undo: Sequence[Cut], work: Work) -> list[torch.Tensor]:
    """`work`, which keeps the shape, on tensors that were all cut alike; gives this rank's box of every result.

    Tensor i goes to rank i modulo the ranks of the last cut, all of them in one message, and so on outwards. Every
    rank of the groups must call this with as many boxes.
    """
    if not undo or not boxes:
        return [work(box) for box in boxes]
    cut, me = undo[0], undo[0].group.rank()
    like = pad(boxes[0], cut)
    counts = [len(range(rank, len(boxes), cut.ranks)) for rank in range(cut.ranks)]
    mine = [counts[me]] * cut.ranks
    sent = [pad(box, cut) for rank in range(cut.ranks) for box in boxes[rank :: cut.ranks]]
    came = _exchange(sent, counts, mine, like, cut)
    wholes = [join([came[rank][k] for rank in range(cut.ranks)], cut) for k in range(counts[me])]
    finished = spread(wholes, undo[1:], work)
    sent = [pad(part_of(whole, cut, rank), cut) for rank in range(cut.ranks) for whole in finished]
    came = _exchange(sent, mine, counts, like, cut)
    return [came[i % cut.ranks][i // cut.ranks].narrow(cut.dim, 0, cut.length(me)) for i in range(len(boxes))]


def _exchange(
    tensors: Sequence[torch.Tensor], give: list[int], take: list[int], like: torch.Tensor, cut: Cut
) -> list[torch.Tensor]:
    """Send the first `give[0]` tensors to rank 0, and so on; `take[r]` of them come from rank r, stacked."""
    size = like.numel()
    result = like.new_empty(sum(take) * size)
    flat = torch.cat([like.new_empty(0), *(tensor.reshape(-1) for tensor in tensors)])
    if size:
        dist.all_to_all_single(
            result, flat, [count * size for count in take], [count * size for count in give], group=cut.group
        )
    return list(torch.split(result.view(sum(take), *like.shape), take))
