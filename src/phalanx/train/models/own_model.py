"""A network of the user's own as the engine holds it: its tensors by name, its stages, what it cannot be asked to do.

It is built twice. Every rank builds its outline, without storage, to learn names, shapes and which weights are one.
Rank 0 also builds it for real, as the user would, and hands its values to all: `whole_values`.
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

GAP = 0.02  # parameters may differ from the shape by this share before the plan's memory is called wrong
PREFIX = "network."  # of every name, in front of the network's own
SHOWN = 6  # names listed per problem

Place = tuple[nn.Module, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """A parameter or buffer of the whole network."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool
    saved: bool  # whether checkpoints hold it: all but buffers registered with persistent=False


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkOutline:
    """Every tensor of the whole network by its own name, in its own order; a tied one once, under its first name."""

    tensors: Mapping[str, TensorSpec]
    tied: Mapping[str, str]  # other names of a tensor -> its first

    @classmethod
    def of(cls, network: nn.Module) -> NetworkOutline:
        """Of a network with or without storage."""
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
        everyone = [*network.named_parameters(remove_duplicate=False), *network.named_buffers(remove_duplicate=False)]
        tied = {name: first[id(tensor)] for name, tensor in everyone if name != first[id(tensor)]}
        return cls(tensors=tensors, tied=tied)

    @property
    def unsaved(self) -> list[str]:
        """Names of the buffers that no checkpoint holds."""
        return [name for name, spec in self.tensors.items() if not spec.saved]


class OwnStage(nn.Module):
    """A network of the user's own, or one stage of it, with the outside of our decoder: what the engine works on."""

    def __init__(self, shape: ModelShape, network: nn.Module, outline: NetworkOutline, *, last: bool = True) -> None:
        super().__init__()
        assert isinstance(network, Network)
        self.shape = shape
        self.outline = outline  # of the whole network
        self.positions: Tensor | None = None  # of the decoder; a network of one's own counts for itself
        self.network = network
        self.layers = dict(network.blocks())  # a plain dict: the modules stay registered under their own names only
        self.embed = None
        self.norm = nn.Identity() if last else None
        self.head = nn.Identity() if last else None
        self._shared = _shared_places(network)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OwnStage:
        super()._apply(fn, recurse)
        self.tie()  # to_empty() from the meta device makes new tensors, one per name
        return self

    def forward(self, x: Tensor) -> Tensor:
        """As the network's own."""
        out: Tensor = self.network(x)
        return out

    def blocks(self) -> Mapping[str, nn.Module]:
        """The network's own, by their names from here."""
        return {PREFIX + name: block for name, block in self.layers.items()}

    def tie(self) -> None:
        """Make one again of what the network built as one parameter or buffer under several names."""
        _tie_shared(self._shared)


# ---- building --------------------------------------------------------------------------------------------------------


def build_outline(shape: ModelShape, *, allow_code: bool = False, folder: Path = Path(), seed: int = 0) -> nn.Module:
    """The whole network of the user's own, its parameters and buffers without storage."""
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
    """One stage of the job's network, without storage, for the engine; `whole` is its outline, if it is at hand."""
    if not shape.module:
        with torch.device("meta"):
            return Decoder(shape, layers=layers, first=first, last=last)
    network = whole if whole is not None else build_outline(shape, allow_code=allow_code, folder=folder)
    outline = NetworkOutline.of(network)
    if not (first and last):
        assert isinstance(network, Staged), "refuse_network() comes first"
        full, cut = network, network.stage
        network = _without_storage(lambda: cut(layers, first=first, last=last))
        _refuse_other_names(shape, network, outline, layers)
        _take_plain_tensors(network, full)
    return cast(Decoder, OwnStage(shape, network, outline, last=last))  # the same outside, by hand


def _without_storage(make: Callable[[], nn.Module]) -> nn.Module:
    """A network on the meta device: built there, or, where its code needs values, built for real and emptied.

    The second costs this rank the memory of the whole network for a moment. Tensors that are no parameters or buffers
    keep their values, as only a network that was built for real has them.
    """
    try:
        with torch.device("meta"):
            network = make()
        if not any(_plain_tensors_on_meta(network)):
            return network
    except UserError:
        pass  # `.item()` of a drop rate, say; a mistake of the user's own is met again
    network = make()
    shared = _shared_places(network)
    network.to(device="meta")
    _tie_shared(shared)
    return network


def _plain_tensors_on_meta(network: nn.Module) -> Iterator[bool]:
    """For every tensor that is an ordinary attribute: whether it was left without values."""
    for module in network.modules():
        for _, value in _plain_attributes(module):
            yield any(one.is_meta for one in value)


def _plain_attributes(module: nn.Module) -> Iterator[tuple[str, list[Tensor]]]:
    """Ordinary attributes of a module that are tensors or lists of them, which nobody moves, fills or saves."""
    for name, value in vars(module).items():
        found = [one for one in (value if isinstance(value, list | tuple) else (value,)) if isinstance(one, Tensor)]
        if found and not any(isinstance(one, nn.Parameter) for one in found):  # recurrent layers list their weights
            yield name, found


def _take_plain_tensors(stage: nn.Module, whole: nn.Module) -> None:
    """A stage that was built for real drew numbers of its own: let it have the whole network's."""
    known = dict(whole.named_modules())
    for name, module in stage.named_modules():
        if name in known:
            there = vars(known[name])
            for attribute, _ in list(_plain_attributes(module)):
                if attribute in there:
                    setattr(module, attribute, there[attribute])


def _refuse_other_names(shape: ModelShape, stage: nn.Module, outline: NetworkOutline, layers: range) -> None:
    """A stage holds tensors of the whole network, and all names of a tied one or none."""
    where = f"{shape.module} stage({layers.start}..{layers.stop - 1})"
    problems = []
    for name, tensor in named_tensors(stage):
        spec = outline.tensors.get(name)
        if spec is None or spec.shape != tuple(tensor.shape):
            there = "has no tensor of that name" if spec is None else f"has it as {list(spec.shape)}"
            problems.append(
                Problem(
                    where=where,
                    what=f"holds {name} of {list(tensor.shape)}, and the whole network {there}",
                    why="first values and checkpoints go by the names of the whole",
                    fix="give layers the names they have in the whole: nn.ModuleDict with their numbers as keys",
                )
            )
    held = {name for name, _ in _all_names(stage)}
    for other, name in outline.tied.items():
        if (other in held) != (name in held):
            problems.append(
                Problem(
                    where=where,
                    what=f"holds one of {name} and {other}, which are one tensor in the whole network",
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
    """(name, whole tensor in host memory) of a network built as its author would, in the order of `names`.

    Rank 0 builds it and sends the tensors one by one: it needs host memory for the whole network, every other rank for
    its largest tensor. So all ranks of all layouts start from the same bits, whatever the constructor draws from. All
    ranks must take all of them.
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
        built_well = torch.tensor([failure is None])
        dist.broadcast(built_well, src=0)
        if rank and not built_well.item():
            raise SystemFailure(Problem(where=f"rank {rank}", what=f"rank 0 could not build {shape.module}"))
    if failure is not None:
        raise failure
    for name in names:
        spec = outline.tensors[name]
        whole = values[name].cpu().contiguous() if rank == 0 else torch.empty(spec.shape, dtype=spec.dtype)
        if world > 1 and whole.numel():
            dist.broadcast(whole.view(-1).view(torch.uint8), src=0)
        yield name, whole


def _refuse_other_outline(shape: ModelShape, real: NetworkOutline, outline: NetworkOutline) -> None:
    """Without storage a network may be built otherwise than with: then no rank but this one would know its tensors."""
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


# ---- what it cannot be asked to do -----------------------------------------------------------------------------------


def refuse_network(
    shape: ModelShape, network: nn.Module, layout: Layout, *, compute: str = "fp32", reproducible: bool = False
) -> None:
    """Raises UserError when the job asks for what a network of the user's own does not offer, or would lose of it."""
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
    """Tensors that could be neither trained nor saved as what they are."""
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
    """What FSDP2 cannot shard, or would silently make two of."""
    if not layout.zero:
        return
    for name, param in network.named_parameters():
        if not isinstance(param, UninitializedParameter) and not param.dim():
            yield Problem(
                where=name,
                what=f"is a parameter without dimensions, and zero = {layout.zero} cuts along the first",
                fix="make it nn.Parameter(torch.tensor([value])), or set parallel.zero = 0",
            )
    homes: dict[int, set[str]] = {}
    blocks = cast(Network, network).blocks()
    for name, param in network.named_parameters(remove_duplicate=False):
        home = next((block for block in blocks if name.startswith(f"{block}.")), "")
        homes.setdefault(id(param), set()).add(home)
    first = {id(param): name for name, param in network.named_parameters()}
    for key, places in homes.items():
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
    """A warning when the network is not of the size the plan was made for, buffers included."""
    real = sum(parameter.numel() for parameter in model.parameters())
    buffers_bytes = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    planned = count_parameters(shape).total
    large = buffers_bytes > GAP * planned * 4  # beside master weights of 4 bytes
    if abs(real / planned - 1.0) <= GAP and not large:
        return None
    beside = f" and {format_bytes(buffers_bytes)} of buffers" if large else ""
    return Problem(
        where=f"model {shape.name}",
        what=f"{shape.module} built {real:,} parameters{beside}, the shape says {planned:,}",
        why="memory and step time were planned for the shape, which knows no buffers"
        if large
        else "memory and step time were planned for the shape",
        fix="change layers, hidden, ffn or vocab under [model] to describe it",
    )


# ---- tensors by name -------------------------------------------------------------------------------------------------


def named_tensors(network: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Every parameter, then every buffer; one that has several names under its first."""
    return [*network.named_parameters(), *network.named_buffers()]


def tables_of(network: nn.Module, vocab: int) -> set[str]:
    """Parameters whose rows are looked up or scored one by one: embeddings, and what has the vocabulary as a side."""
    embeddings = {id(one.weight) for one in network.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag)}
    return {name for name, param in network.named_parameters() if id(param) in embeddings or vocab in param.shape}


def lookup_tables(stages: Sequence[nn.Module], vocab: int) -> frozenset[str]:
    """`tables_of` every network of the user's own among the stages, under the names that optimizers see."""
    owns = [stage for stage in stages if isinstance(stage, OwnStage)]
    return frozenset(PREFIX + name for stage in owns for name in tables_of(stage.network, vocab))


def _all_names(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from network.named_parameters(remove_duplicate=False)
    yield from network.named_buffers(remove_duplicate=False)


def _saved_tensors(network: nn.Module) -> set[int]:
    """The parameters and buffers of its state_dict(), by id."""
    return {id(tensor) for tensor in network.state_dict(keep_vars=True).values()}


def _shared_places(network: nn.Module) -> list[list[Place]]:
    """The places of every parameter and buffer that has several."""
    places: dict[int, list[Place]] = {}
    for module in network.modules():
        held: dict[str, Any] = {**module._parameters, **module._buffers}
        for name, tensor in held.items():
            if tensor is not None:
                places.setdefault(id(tensor), []).append((module, name))
    return [found for found in places.values() if len(found) > 1]


def _tie_shared(shared: list[list[Place]]) -> None:
    for (module, name), *others in shared:
        for other, again in others:
            setattr(other, again, getattr(module, name))
