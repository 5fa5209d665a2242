"""Expert parallelism: each rank holds some experts, and tokens travel to the experts they chose and back.

Two splits. Expert ranks hold whole experts and exchange tokens (`ExpertExchange`). Without expert ranks, the tensor
group splits every expert along its width and sums the partial results (`ExpertSlices`). No token is dropped, and the
order of every sum is fixed.

T tokens of this rank, K experts per token, M = T · K visits, E experts, P expert ranks, R visits received, D model, F
width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from phalanx.errors import mistake
from phalanx.train.kernels.moe_permute import permute_rows
from phalanx.train.models.moe import Experts, Moe, count_visits, run_evenly, run_locally, sort_visits
from phalanx.train.parallel import exchanges
from phalanx.train.parallel.dims import Meshes

# Dimension, first row of this rank, rows of the whole
Offset = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertExchange:
    """Token exchange where each rank of `group` holds E / P whole experts.

    `same` is the tensor group if its ranks hold the same tokens: each rank then takes its share of them. With
    sequence parallelism they hold different tokens and `same` is None. `balanced` is for dry runs on tensors without
    values: every expert is assumed to be chosen equally often, so that sizes are known.
    """

    group: ProcessGroup
    num_experts: int
    same: ProcessGroup | None = None
    balanced: bool = False

    def __call__(self, experts: Experts, x_TD: Tensor, choice_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """Return the weighted output of the chosen experts for every token."""
        if self.same is None:
            return self._dispatch_tokens(experts, x_TD, choice_TK, weight_TK)
        _check_tokens(len(x_TD), self.same.size())
        own_choice_TK = choice_TK.chunk(self.same.size())[self.same.rank()]
        x_TD, weight_TK = (exchanges.split_tokens(tensor, self.same) for tensor in (x_TD, weight_TK))
        return exchanges.join_tokens(self._dispatch_tokens(experts, x_TD, own_choice_TK, weight_TK), self.same)

    def offsets(self) -> Mapping[str, Offset]:
        """Return the dimension, first row and full size of this rank's part of the stacked experts."""
        start = self.group.rank() * (self.num_experts // self.group.size())
        return dict.fromkeys(("gate", "up", "down"), (0, start, self.num_experts))

    def _dispatch_tokens(self, experts: Experts, x_TD: Tensor, choice_TK: Tensor, weight_TK: Tensor) -> Tensor:
        if self.balanced:
            choice_TK = even_choice(choice_TK, self.num_experts)
        order_M, back_TK = sort_visits(choice_TK, self.num_experts)
        leaving_PE = count_visits(choice_TK, self.num_experts).view(self.group.size(), -1)
        arriving_PE = exchanges.all_to_all(leaving_PE, self.group)
        send, receive, sizes_E = self._exchange_sizes(leaving_PE, arriving_PE, choice_TK.numel())
        x_MD = experts.gather_visits(x_TD, order_M, back_TK)
        x_RD = exchanges.exchange_rows(x_MD, self.group, send=send, receive=receive)
        y_RD = _run_arrived(experts, x_RD, arriving_PE, sizes_E)
        y_MD = exchanges.exchange_rows(y_RD, self.group, send=receive, receive=send)
        return experts.combine_answers(y_MD, order_M, back_TK, weight_TK)

    def _exchange_sizes(
        self, leaving_PE: Tensor, arriving_PE: Tensor, visits: int
    ) -> tuple[list[int], list[int], Tensor | list[int]]:
        """Return the visits to and from every rank, as integers, and the visits of every local expert."""
        if not self.balanced:
            send, receive = torch.stack([leaving_PE.sum(1), arriving_PE.sum(1)]).tolist()
            return send, receive, arriving_PE.sum(0)
        rank, ranks = self.group.rank(), self.group.size()
        local_experts = self.num_experts // ranks
        sizes = even_sizes(visits, self.num_experts)
        send = [sum(sizes[peer * local_experts : (peer + 1) * local_experts]) for peer in range(ranks)]
        return (
            send,
            [send[rank]] * ranks,
            [size * ranks for size in sizes[rank * local_experts : (rank + 1) * local_experts]],
        )


def _run_arrived(experts: Experts, x_RD: Tensor, arriving_PE: Tensor, sizes_E: Tensor | list[int]) -> Tensor:
    """Run the local experts: visits arrive ordered by rank, then expert, and are reordered by expert, then rank."""
    ranks, local_experts = arriving_PE.shape
    expert_PE = torch.arange(local_experts, device=x_RD.device).repeat(ranks)
    expert_R = expert_PE.repeat_interleave(arriving_PE.flatten(), output_size=len(x_RD))
    order_R = expert_R.argsort(stable=True)
    back_R = order_R.argsort()
    y_RD = experts(permute_rows(x_RD, order_R, back_R), sizes_E)
    return permute_rows(y_RD, back_R, order_R)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertSlices:
    """Token handling where each rank of the tensor group holds a slice of every expert's width, as of a dense MLP."""

    group: ProcessGroup
    width: int  # F of the unsplit expert
    sequence_parallel: bool  # whether the ranks of the group hold different tokens
    balanced: bool = False

    def __call__(self, experts: Experts, x_TD: Tensor, choice_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """Return the weighted output of the chosen experts for every token."""
        run = run_evenly if self.balanced else run_locally
        if not self.sequence_parallel:
            x_TD, weight_TK = (exchanges.share_input(tensor, self.group) for tensor in (x_TD, weight_TK))
            return exchanges.add_up(run(experts, x_TD, choice_TK, weight_TK), self.group)
        x_TD, weight_TK = (exchanges.gather_tokens(tensor, self.group) for tensor in (x_TD, weight_TK))
        choice_TK = exchanges.all_gather(choice_TK, self.group).flatten(0, 1)
        return exchanges.scatter_tokens(run(experts, x_TD, choice_TK, weight_TK), self.group)

    def offsets(self) -> Mapping[str, Offset]:
        """Return the dimension, first row and full size of this rank's slice of every expert's width."""
        start = self.group.rank() * (self.width // self.group.size())
        return {"gate": (1, start, self.width), "up": (1, start, self.width), "down": (2, start, self.width)}


def split_experts(model: nn.Module, meshes: Meshes, *, sequence_parallel: bool) -> None:
    """Keep this rank's part of every mixture of experts, with or without storage, and set how tokens reach it.

    With `sequence_parallel` the tensor ranks hold different tokens: the router sees only some of them on each rank,
    so its gradient is summed over the tensor group. Ranks that share a sequence sum their token counts for the
    auxiliary loss. Does nothing to a model without experts, or where nothing is split. Raises UserError if sizes do
    not divide.
    """
    tensor = meshes.dense.get_group("tensor") if meshes.dims.tensor > 1 else None
    sharing = [meshes.group("context")] if meshes.dims.context > 1 else []
    sharing += [tensor] if tensor is not None and sequence_parallel else []
    for _, moe in expert_layers(model):
        moe.sum_over_sequence = partial(_sum_over, groups=sharing)
        if meshes.experts is not None:
            group = meshes.experts.get_group("expert")
            _check_divides(moe.experts.up.shape[0], group.size())
            same = None if sequence_parallel else tensor
            moe.dispatch = ExpertExchange(group=group, num_experts=moe.experts.up.shape[0], same=same)
        elif tensor is not None:
            width = moe.experts.up.shape[1]
            _check_width(width, tensor.size())
            moe.dispatch = ExpertSlices(group=tensor, width=width, sequence_parallel=sequence_parallel)
        else:
            continue
        _cut_experts(moe.experts, moe.dispatch)
        if tensor is not None and sequence_parallel:
            _sum_gradient(moe.router, tensor)


def balance_routing(model: nn.Module) -> None:
    """For dry runs, assume from now on that every expert is chosen equally often, regardless of the router."""
    for _, moe in expert_layers(model):
        if isinstance(moe.dispatch, (ExpertExchange, ExpertSlices)):
            moe.dispatch = replace(moe.dispatch, balanced=True)
        else:
            moe.dispatch = run_evenly


def expert_offset(model: nn.Module) -> Mapping[str, Offset]:
    """Return (dimension, first row here, rows of the unsplit tensor) of every parameter that `split_experts` split."""
    return {
        f"{name}.experts.{parameter}".lstrip("."): moe.dispatch.offsets()[parameter]
        for name, moe in expert_layers(model)
        if isinstance(moe.dispatch, (ExpertExchange, ExpertSlices))
        for parameter, _ in moe.experts.named_parameters()
    }


def expert_layers(model: nn.Module) -> Iterator[tuple[str, Moe]]:
    """Yield every mixture of experts of a model, with its name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Moe))


@dataclass(frozen=True, kw_only=True, slots=True)
class Imbalance:
    """Unevenness of the expert load; 1.0 is even. All ranks wait for the busiest expert rank."""

    expert: float  # tokens of the busiest expert over the mean
    rank: float  # tokens of the busiest expert rank over the mean
    busiest_expert: int
    busiest_rank: int


def expert_imbalance(counts_E: Tensor, ranks: int) -> Imbalance:
    """Compute the imbalance from each expert's tokens, summed over all ranks, with the experts on `ranks` ranks.

    >>> expert_imbalance(torch.tensor([6, 2, 2, 2]), 2)
    Imbalance(expert=2.0, rank=1.3333333333333333, busiest_expert=0, busiest_rank=0)
    """
    counts = [int(count) for count in counts_E.tolist()]
    experts_per_rank = len(counts) // ranks
    loads = [sum(counts[rank * experts_per_rank : (rank + 1) * experts_per_rank]) for rank in range(ranks)]

    def over(values: list[int]) -> float:
        return max(values) * len(values) / sum(values) if sum(values) else 1.0

    return Imbalance(
        expert=over(counts),
        rank=over(loads),
        busiest_expert=counts.index(max(counts)),
        busiest_rank=loads.index(max(loads)),
    )


def even_choice(choice_TK: Tensor, experts: int) -> Tensor:
    """Return experts chosen in turn, with the shape of the router's choice."""
    return (torch.arange(choice_TK.numel(), device=choice_TK.device) % experts).view_as(choice_TK)


def even_sizes(visits: int, experts: int) -> list[int]:
    """Return the visits of each expert when experts are chosen in turn.

    >>> even_sizes(10, 4)
    [3, 3, 2, 2]
    """
    base, remainder = divmod(visits, experts)
    return [base + (expert < remainder) for expert in range(experts)]


def _cut_experts(experts: Experts, dispatch: ExpertExchange | ExpertSlices) -> None:
    offsets, ranks = dispatch.offsets(), dispatch.group.size()
    for name, parameter in list(experts.named_parameters()):
        dim, start, full_size = offsets[name]
        own_part = parameter.detach().narrow(dim, start, full_size // ranks).clone()
        setattr(experts, name, nn.Parameter(own_part, requires_grad=parameter.requires_grad))


def _sum_gradient(router: nn.Module, group: ProcessGroup) -> None:
    """Sum the gradient of the router's weight over `group`.

    Hooks around the router's forward do it, not a hook on the parameter, because allocating and sharding the model
    replace parameters. An instance attribute takes precedence over a registered parameter, so forward reads the
    summing weight.
    """

    def begin(module: nn.Module, _: object) -> None:
        module.__dict__["weight"] = exchanges.share_input(module.get_parameter("weight"), group)

    def end(module: nn.Module, *_: object) -> None:
        del module.__dict__["weight"]

    router.register_forward_pre_hook(begin)
    router.register_forward_hook(end, always_call=True)


@torch.no_grad()
def _sum_over(x: Tensor, groups: list[ProcessGroup]) -> Tensor:
    """Sum token counts over the groups; counts carry no gradient."""
    for group in groups:
        x = exchanges.all_reduce(x, group)
    return x


def _check_tokens(tokens: int, ranks: int) -> None:
    if tokens % ranks:
        raise mistake(
            "parallel.tensor",
            f"{tokens} tokens of a micro-batch do not divide over {ranks} tensor ranks",
            why="each tensor rank sends its own share of the tokens to the experts",
            fix=f"use a sequence that is a multiple of {ranks}, or fewer tensor ranks",
        )


def _check_divides(experts: int, ranks: int) -> None:
    if experts % ranks:
        divisor = next(n for n in range(ranks, 0, -1) if experts % n == 0)
        raise mistake(
            "parallel.expert",
            f"{ranks} expert ranks do not divide the model's {experts} experts",
            why="each expert rank must hold whole experts",
            fix=f"use {divisor}",
        )


def _check_width(width: int, ranks: int) -> None:
    if width % ranks:
        raise mistake(
            "parallel.tensor",
            f"{ranks} tensor ranks do not divide the experts' width of {width}",
            why="without expert ranks the tensor group splits every expert along its width",
            fix="use a number of tensor ranks that divides it, or expert ranks",
        )
