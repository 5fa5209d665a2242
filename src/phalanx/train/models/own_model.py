"""A user's own network in the engine: its tensors by name, its stages, and checks of what it supports.

It is built twice. Every rank builds its outline, without storage, to learn names, shapes and which weights are tied.
Rank 0 also builds it with storage, as the user would, and sends its values to all ranks: `whole_values`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import UninitializedParameter

from phalanx.errors import Problem, SystemFailure, UserError
from phalanx.job.model import ModelShape
from phalanx.job.parameter_counts import count_parameters
from phalanx.plan.layout import Layout
from phalanx.train.models.decoder import Decoder
from phalanx.train.models.protocol import Network, Staged, build_model
from phalanx.train.state.shards import STORED_DTYPES, dtype_name
from phalanx.units import first_few, format_bytes

# Parameters may differ by this share from the shape before the plan's memory is considered wrong
GAP = 0.02
PREFIX = "network."  # prepended to every name of the network
SHOWN = 6  # names listed per problem

Place = tuple[nn.Module, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """A parameter or buffer of the full network."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool
    saved: bool  # whether checkpoints contain it: all but buffers registered with persistent=False


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkOutline:
    """Every tensor of the full network by its own name, in its own order; a tied tensor once, under its first name."""

    tensors: Mapping[str, TensorSpec]
    tied: Mapping[str, str]  # other names of a tensor -> its first

    @classmethod
    def of(cls, network: nn.Module) -> NetworkOutline:
        """Build the outline of a network with or without storage."""
        saved = _saved_tensors(network)
        parameters = {id(param) for param in network.parameters()}
        tensors = {
            name: TensorSpec(
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                is_parameter=id(tensor) in parameters,
                saved=id(tensor) in saved,
            )
            for name, tensor in named_tensors(network)
        }
        first = {id(tensor): name for name, tensor in named_tensors(network)}
        all_names = [*network.named_parameters(remove_duplicate=False), *network.named_buffers(remove_duplicate=False)]
        tied = {name: first[id(tensor)] for name, tensor in all_names if name != first[id(tensor)]}
        return cls(tensors=tensors, tied=tied)

    @property
    def unsaved(self) -> list[str]:
        """Names of the buffers that no checkpoint contains."""
        return [name for name, spec in self.tensors.items() if not spec.saved]


class OwnStage(nn.Module):
    """A user's own network, or one stage of it, with the interface of `Decoder`, as the engine requires."""

    def __init__(self, shape: ModelShape, network: nn.Module, outline: NetworkOutline, *, last: bool = True) -> None:
        super().__init__()
        assert isinstance(network, Network)
        self.shape = shape
        # Of the full network
        self.outline = outline
        # Part of the decoder's interface; a user's own network computes its positions itself
        self.positions: Tensor | None = None
        self.network = network
        # A plain dict, so that the modules stay registered under their own names only
        self.layers = dict(network.blocks())
        self.embed = None
        self.norm = nn.Identity() if last else None
        self.head = nn.Identity() if last else None
        self._shared = _shared_places(network)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OwnStage:
        super()._apply(fn, recurse)
        # to_empty() from the meta device makes new tensors, one per name
        self.tie()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Run the network's forward."""
        out: Tensor = self.network(x)
        return out

    def blocks(self) -> Mapping[str, nn.Module]:
        """Return the network's blocks, by their names in this module."""
        return {PREFIX + name: block for name, block in self.layers.items()}

    def tie(self) -> None:
        """Tie again the parameters and buffers that the network registered under several names."""
        _tie_shared(self._shared)


# ---- building --------------------------------------------------------------------------------------------------------


def build_outline(shape: ModelShape, *, allow_code: bool = False, folder: Path = Path(), seed: int = 0) -> nn.Module:
    """Build a user's full network without storage for its parameters and buffers."""
    return _without_storage(lambda: build_model(shape, allow_code=allow_code, folder=folder, seed=seed))


def build_stage(
    shape: ModelShape,
    *,
    layers: range,
    first: bool,
    last: bool,
    allow_code: bool = False,
    folder: Path = Path(),
    whole: nn.Module | None = None,
) -> Decoder:
    """Build one stage of the job's network, without storage; `whole` is the network's outline if it already exists."""
    if not shape.module:
        with torch.device("meta"):
            return Decoder(shape, layers=layers, first=first, last=last)
    network = whole if whole is not None else build_outline(shape, allow_code=allow_code, folder=folder)
    outline = NetworkOutline.of(network)
    if not (first and last):
        assert isinstance(network, Staged), "refuse_network() comes first"
        full_network, stage_of = network, network.stage
        network = _without_storage(lambda: stage_of(layers, first=first, last=last))
        _refuse_other_names(shape, network, outline, layers)
        _take_plain_tensors(network, full_network)
    # Not a subclass, but the same interface
    return cast(Decoder, OwnStage(shape, network, outline, last=last))


def _without_storage(make: Callable[[], nn.Module]) -> nn.Module:
    """Build a network on the meta device; if its code needs values, build it with storage and discard that.

    The latter needs memory for the full network on this rank for a moment. Tensors that are neither parameters nor
    buffers keep their values, which only a network built with storage has.
    """
    try:
        with torch.device("meta"):
            network = make()
        if not any(_plain_tensors_on_meta(network)):
            return network
    except UserError:
        # Such as `.item()` of a drop rate; a user's own error is raised again below
        pass
    network = make()
    shared = _shared_places(network)
    network.to(device="meta")
    _tie_shared(shared)
    return network


def _plain_tensors_on_meta(network: nn.Module) -> Iterator[bool]:
    """Yield for every tensor in an ordinary attribute whether it has no values."""
    for module in network.modules():
        for _, value in _plain_attributes(module):
            yield any(tensor.is_meta for tensor in value)


def _plain_attributes(module: nn.Module) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield ordinary attributes of a module that are tensors or lists of them, which torch neither moves nor saves."""
    for name, value in vars(module).items():
        tensors = [
            item for item in (value if isinstance(value, list | tuple) else (value,)) if isinstance(item, Tensor)
        ]
        if tensors and not any(
            isinstance(item, nn.Parameter) for item in tensors
        ):  # recurrent layers list their weights
            yield name, tensors


def _take_plain_tensors(stage: nn.Module, whole: nn.Module) -> None:
    """Copy plain tensors from the full network, since a stage built with storage drew its own random numbers."""
    modules = dict(whole.named_modules())
    for name, module in stage.named_modules():
        if name in modules:
            attributes = vars(modules[name])
            for attribute, _ in list(_plain_attributes(module)):
                if attribute in attributes:
                    setattr(module, attribute, attributes[attribute])


def _refuse_other_names(shape: ModelShape, stage: nn.Module, outline: NetworkOutline, layers: range) -> None:
    """Raise UserError unless a stage's tensors are those of the full network, and tied tensors are together."""
    location = f"{shape.module} stage({layers.start}..{layers.stop - 1})"
    problems = []
    for name, tensor in named_tensors(stage):
        spec = outline.tensors.get(name)
        if spec is None or spec.shape != tuple(tensor.shape):
            mismatch = "has no tensor of that name" if spec is None else f"has it as {list(spec.shape)}"
            problems.append(
                Problem(
                    where=location,
                    what=f"holds {name} of {list(tensor.shape)}, and the whole network {mismatch}",
                    why="first values and checkpoints go by the names of the whole",
                    fix="give layers the names they have in the whole: nn.ModuleDict with their numbers as keys",
                )
            )
    stage_names = {name for name, _ in _all_names(stage)}
    for alias, name in outline.tied.items():
        if (alias in stage_names) != (name in stage_names):
            problems.append(
                Problem(
                    where=location,
                    what=f"holds one of {name} and {alias}, which are one tensor in the whole network",
                    why="two stages would train two copies of it apart",
                    fix="set parallel.pipeline = 1, or give each a weight of its own",
                )
            )
    if problems:
        raise UserError(problems)


# ---- first values ----------------------------------------------------------------------------------------------------


def whole_values(
    shape: ModelShape,
    outline: NetworkOutline,
    names: Sequence[str],
    *,
    seed: int,
    allow_code: bool,
    folder: Path = Path(),
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor in host memory) of a network built as its author would, in the order of `names`.

    Rank 0 builds it and broadcasts the tensors one by one: it needs host memory for the full network, every other
    rank for its largest tensor. So all ranks of all layouts start from the same bits, whatever the constructor draws
    from. All ranks must consume all tensors. Raises UserError on rank 0, SystemFailure on the others, if it cannot be
    built.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    values: dict[str, Tensor] = {}
    failure: UserError | None = None
    if rank == 0:
        try:
            built = build_model(shape, allow_code=allow_code, folder=folder, seed=seed)
            values = {name: tensor.detach() for name, tensor in named_tensors(built)}
            _refuse_other_outline(shape, NetworkOutline.of(built), outline)
        except UserError as error:
            failure = error
    if world > 1:
        success = torch.tensor([failure is None])
        dist.broadcast(success, src=0)
        if rank and not success.item():
            raise SystemFailure(Problem(where=f"rank {rank}", what=f"rank 0 could not build {shape.module}"))
    if failure is not None:
        raise failure
    for name in names:
        spec = outline.tensors[name]
        tensor = values[name].cpu().contiguous() if rank == 0 else torch.empty(spec.shape, dtype=spec.dtype)
        if world > 1 and tensor.numel():
            dist.broadcast(tensor.view(-1).view(torch.uint8), src=0)
        yield name, tensor


def _refuse_other_outline(shape: ModelShape, real: NetworkOutline, outline: NetworkOutline) -> None:
    """Raise UserError if the network built with storage has other tensors than the outline that all ranks know."""
    differing = [
        name for name in {**real.tensors, **outline.tensors} if real.tensors.get(name) != outline.tensors.get(name)
    ]
    if differing or real.tied != outline.tied:
        names = first_few(differing or sorted({*real.tied, *outline.tied}), SHOWN)
        raise UserError(
            [
                Problem(
                    where=shape.module,
                    what=f"built other tensors the second time: {names}",
                    why="every rank builds the network to know its tensors, and all must find the same",
                    fix="let nothing but shape and arguments decide what is built",
                )
            ]
        )


# ---- unsupported combinations ----------------------------------------------------------------------------------------


def refuse_network(
    shape: ModelShape, network: nn.Module, layout: Layout, *, compute: str = "fp32", reproducible: bool = False
) -> None:
    """Raise UserError for job settings that the user's own network does not support or that lose its state."""
    if not shape.module:
        return
    problems = [
        *_axis_problems(shape, network, layout),
        *_tensor_problems(network),
        *_sharding_problems(network, layout),
        *_numeric_problems(network, layout, compute=compute, reproducible=reproducible),
    ]
    if problems:
        raise UserError(problems)


def _axis_problems(shape: ModelShape, network: nn.Module, layout: Layout) -> Iterator[Problem]:
    if layout.pipeline > 1 and not isinstance(network, Staged):
        yield Problem(
            where="parallel.pipeline",
            what=f"pipeline = {layout.pipeline}, but {shape.module} offers no stage(layers, first, last)",
            why="only its author knows how it may be cut",
            fix="write stage(), or set parallel.pipeline = 1",
        )
    for axis in ("tensor", "context", "expert"):
        degree = getattr(layout, axis)
        if degree > 1:
            yield Problem(
                where=f"parallel.{axis}",
                what=f"{axis} = {degree} with a network of your own, {shape.module}",
                why="only our own layers are split that way yet",
                fix=f"set parallel.{axis} = 1; data, shard, zero, recompute and offload work",
            )


def _tensor_problems(network: nn.Module) -> Iterator[Problem]:
    """Yield problems with tensors that cannot be trained or saved as they are."""
    saved = _saved_tensors(network)
    for name, param in network.named_parameters():
        if isinstance(param, UninitializedParameter):
            yield Problem(
                where=name,
                what="is a lazy parameter: its size is not known before the first forward",
                why="memory and shards are laid out before any token is seen",
                fix="give the layer its input size, such as nn.Linear in place of nn.LazyLinear",
            )
        elif not param.is_floating_point():
            yield Problem(
                where=name,
                what=f"is a parameter of {dtype_name(param.dtype)}",
                why="parameters are cast to the precisions of the job, in which it would be another value",
                fix="register it as a buffer" if not param.is_complex() else "keep torch.view_as_real of it",
            )
    for name, buffer in network.named_buffers():
        if id(buffer) in saved and dtype_name(buffer.dtype) not in STORED_DTYPES:
            yield Problem(
                where=name,
                what=f"is a buffer of {dtype_name(buffer.dtype)}, which checkpoints cannot hold",
                fix="register it with persistent=False if it never changes, or in another format "
                f"({', '.join(STORED_DTYPES)}; torch.view_as_real of a complex one)",
            )
    for name, _ in _all_names(network):
        if "#" in name or not name.isprintable():
            yield Problem(
                where=ascii(name),
                what='a name with "#" or an unprintable character',
                why='checkpoints name the optimizer\'s state "parameter#state"',
                fix="rename it",
            )
    for name, module in network.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield Problem(
                where=name or type(module).__name__,
                what=f"{type(module).__name__} keeps extra state (get_extra_state)",
                why="checkpoints hold parameters and buffers: it would be lost when the run goes on elsewhere",
                fix="keep it in a registered buffer",
            )


def _sharding_problems(network: nn.Module, layout: Layout) -> Iterator[Problem]:
    """Yield problems with parameters that FSDP2 cannot shard, or would silently duplicate."""
    if not layout.zero:
        return
    for name, param in network.named_parameters():
        if not isinstance(param, UninitializedParameter) and not param.dim():
            yield Problem(
                where=name,
                what=f"is a parameter without dimensions, and zero = {layout.zero} cuts along the first",
                fix="make it nn.Parameter(torch.tensor([value])), or set parallel.zero = 0",
            )
    block_names: dict[int, set[str]] = {}
    blocks = cast(Network, network).blocks()
    for name, param in network.named_parameters(remove_duplicate=False):
        block_name = next((block for block in blocks if name.startswith(f"{block}.")), "")
        block_names.setdefault(id(param), set()).add(block_name)
    first = {id(param): name for name, param in network.named_parameters()}
    for key, places in block_names.items():
        if len(places) > 1:
            shared = [place or "the rest of the network" for place in sorted(places)]
            yield Problem(
                where=first[key],
                what=f"is one parameter in {first_few(shared, SHOWN)}",
                why=f"zero = {layout.zero} shards every block by itself, and would make two parameters of it",
                fix="set parallel.zero = 0, or share it only within a block or only outside of blocks",
            )


def _numeric_problems(network: nn.Module, layout: Layout, *, compute: str, reproducible: bool) -> Iterator[Problem]:
    for name, module in network.named_modules():
        tracked = isinstance(module, _BatchNorm) and module.running_mean is not None
        if tracked and compute not in ("fp32", "fp64"):
            yield Problem(
                where=name,
                what=f"{type(module).__name__} with precision.compute = {compute!r}",
                why="its statistics stay in float32, which torch does not mix with weights of fewer bits",
                fix='set precision.compute = "fp32", or use nn.LayerNorm, nn.GroupNorm or nn.RMSNorm',
            )
        if reproducible and tracked:
            yield Problem(
                where=name,
                what=f"{type(module).__name__} with numerics.reproducible",
                why="its statistics follow the order of micro-batches, which is another on other ranks",
                fix="set track_running_stats=False, or numerics.reproducible = false",
            )
        if reproducible and _draws_numbers(module):
            yield Problem(
                where=name,
                what=f"{type(module).__name__} with numerics.reproducible",
                why="every rank draws its own random numbers, so the bits depend on the number of ranks",
                fix="set its dropout to 0, or numerics.reproducible = false",
            )


def _draws_numbers(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    return isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0


def differs_from_shape(model: nn.Module, shape: ModelShape) -> Problem | None:
    """Return a warning if the network does not have the size the plan assumed, buffers included."""
    real = sum(parameter.numel() for parameter in model.parameters())
    buffers_bytes = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    planned = count_parameters(shape).total
    # Relative to master weights of 4 bytes
    large = buffers_bytes > GAP * planned * 4
    if abs(real / planned - 1.0) <= GAP and not large:
        return None
    and_buffers = f" and {format_bytes(buffers_bytes)} of buffers" if large else ""
    return Problem(
        where=f"model {shape.name}",
        what=f"{shape.module} built {real:,} parameters{and_buffers}, the shape says {planned:,}",
        why="memory and step time were planned for the shape, which knows no buffers"
        if large
        else "memory and step time were planned for the shape",
        fix="change layers, hidden, ffn or vocab under [model] to describe it",
    )


# ---- tensors by name -------------------------------------------------------------------------------------------------


def named_tensors(network: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Return every parameter, then every buffer, each under its first name."""
    return [*network.named_parameters(), *network.named_buffers()]


def tables_of(network: nn.Module, vocab: int) -> set[str]:
    """Return the names of embeddings and of parameters with a dimension of the vocabulary's size."""
    embeddings = {
        id(module.weight) for module in network.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    return {name for name, param in network.named_parameters() if id(param) in embeddings or vocab in param.shape}


def lookup_tables(stages: Sequence[nn.Module], vocab: int) -> frozenset[str]:
    """Apply `tables_of` to every user's own network among the stages; return names as optimizers see them."""
    owns = [stage for stage in stages if isinstance(stage, OwnStage)]
    return frozenset(PREFIX + name for stage in owns for name in tables_of(stage.network, vocab))


def _all_names(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from network.named_parameters(remove_duplicate=False)
    yield from network.named_buffers(remove_duplicate=False)


def _saved_tensors(network: nn.Module) -> set[int]:
    """Return the ids of the parameters and buffers in the state_dict()."""
    return {id(tensor) for tensor in network.state_dict(keep_vars=True).values()}


def _shared_places(network: nn.Module) -> list[list[Place]]:
    """Return, for every parameter and buffer registered several times, all of its places."""
    places: dict[int, list[Place]] = {}
    for module in network.modules():
        tensors: dict[str, Any] = {**module._parameters, **module._buffers}
        for name, tensor in tensors.items():
            if tensor is not None:
                places.setdefault(id(tensor), []).append((module, name))
    return [same_tensor for same_tensor in places.values() if len(same_tensor) > 1]


def _tie_shared(shared: list[list[Place]]) -> None:
    for (module, name), *duplicates in shared:
        for other_module, other_name in duplicates:
            setattr(other_module, other_name, getattr(module, name))
