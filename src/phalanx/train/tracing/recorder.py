"""The recorder: listens to every operator a rank runs and keeps its messages, its FLOPs and its memory.

The same on real tensors over gloo and on fake ones over a fake group. It changes nothing of what it hears.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.train.engine import Engine
from phalanx.train.parallel.dims import Meshes
from phalanx.train.tracing.log import PHASES, MemoryPeak, RankTrace, TracedOperation, TraceGroup
from phalanx.train.tracing.meter import HOST, StorageMeter
from phalanx.train.tracing.operators import count_flops, flop_kind, group_of, kind_of, payload_of, peer_of, tensors_of
from phalanx.train.tracing.shortcuts import RunOperator, run_plainly

# Axes whose messages are made for the exchange and thrown away; on the others what arrives is computed with.
EXCHANGED = ("data", "shard", "replica", "expert data", "world")

WHERE = torch.ops.prim.device.default


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Enter it before the engine is built; `begin` starts the log, `finish` gives it."""

    def __init__(self, run: RunOperator = run_plainly) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run
        self.meter = StorageMeter()
        self._log: list[TracedOperation] = []
        self._flops: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._groups: dict[tuple[str, str], TraceGroup] = {}
        self._axes: Mapping[str, Sequence[str]] = {}
        self._widths: frozenset[int] = frozenset()
        self._updating = False
        self._quiet = 0  # number of the last batch of messages; anything else that happens ends a batch
        self._in_batch = False
        self._on = self._deaf = False
        self._depth = 0  # modules of blocks whose forward is running

    def attach(self, engine: Engine) -> None:
        """Learn the engine's groups and what its tensors are."""
        self._engine = engine
        self._axes = axis_names(engine.meshes)
        vocab = engine.shape.vocab
        self._widths = frozenset({vocab, vocab // engine.dims.tensor})
        offload = engine.settings.layout.offload
        parameters = (held.local for held in engine.held if held.is_parameter)
        self.meter.claim(HOST if offload == "parameters" else "parameters", parameters)
        self.meter.claim("parameters", (buffer for part in engine.parts for buffer in part.model.buffers()))
        state = [shard.tensor for shard in engine.optimizer.state()]
        copies = [master for _, master in engine.masters.copies]
        self.meter.claim(HOST if offload in ("optimizer", "parameters") else "optimizer", [*state, *copies])
        self.meter.look = lambda: held_gradients(engine)
        for part in engine.parts:
            part.model.register_forward_pre_hook(self._forward_begins)
            for block in part.model.layers.values():
                for inner in block.children():
                    inner.register_forward_pre_hook(self._enter_module)
                    inner.register_forward_hook(self._leave_module, always_call=True)
        whole = engine._forward_backward

        def forward_backward(*args: Any, **kwargs: Any) -> torch.Tensor:
            total = whole(*args, **kwargs)
            self._updating = True  # what follows belongs to the optimizer
            return total

        engine._forward_backward = forward_backward  # type: ignore[method-assign]

    def begin(self) -> None:
        """Everything so far was preparation."""
        self._log.clear()
        self._flops.clear()
        self._updating, self._on = False, True
        self._quiet, self._in_batch = 0, False
        self.meter.phase = "forward"
        self.meter.begin()

    def finish(self) -> RankTrace:
        """The step since `begin`."""
        engine, meter = self._engine, self.meter
        self._on = False
        parts = {name: nbytes for name, nbytes in meter.peak_parts.items() if nbytes}
        parts["working"] = parts.get("working", 0) + meter.peak_bytes - sum(parts.values())
        dims = engine.dims
        sizes = {axis: getattr(dims, axis) for axis in ("pipeline", "data", "context", "tensor")}
        return RankTrace(
            rank=dist.get_rank(),
            place={axis: (engine.meshes.index(axis), size) for axis, size in sizes.items()},
            stages=tuple(part.stage for part in engine.parts),
            layers=tuple(layer for part in engine.parts for layer in part.layers),
            operations=tuple(self._log),
            flops={phase: dict(self._flops[phase]) for phase in PHASES if phase in self._flops},
            peak=MemoryPeak(
                nbytes=meter.peak_bytes,
                phase=meter.peak_phase,
                parts_bytes=parts,
                rest_bytes=meter.live_bytes,
                host_bytes=meter.host_bytes,
            ),
        )

    # ---- listening -------------------------------------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch wraps every call below once more

    def __enter__(self) -> Recorder:
        self.meter.__enter__()
        self._whole = ShardingPropagator._propagate_tensor_meta_non_cached
        ShardingPropagator._propagate_tensor_meta_non_cached = self._without_recording(self._whole)  # type: ignore[method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)  # type: ignore[no-untyped-call]
        ShardingPropagator._propagate_tensor_meta_non_cached = self._whole  # type: ignore[method-assign]
        self.meter.__exit__()

    def _without_recording(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """DTensor runs operators on the shapes of the whole model to learn what they give: no rank computes that."""

        def run(*args: Any) -> Any:
            before, self._deaf = self._deaf, True
            try:
                return work(*args)
            finally:
                self._deaf = before

        return run

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # it becomes operators on local tensors, which come here
        named = kwargs or {}
        if self._deaf:
            return op(*args, **named)
        if op is WHERE:  # every second call of a step: there is nothing to hear in it
            return self._run(op, args, named)
        self.meter.phase = self._current_phase()
        out = self._run(op, args, named)
        kind = kind_of(op)
        if kind:
            self._record_call(kind, op, args, out)
            return out
        self._in_batch = False
        for tensor in tensors_of(out):
            wide = tensor.ndim > 1 and tensor.shape[-1] in self._widths
            self.meter.see(tensor, "logits" if wide else "")
        if self._on:
            what = flop_kind(op)
            if what:
                self._flops[self.meter.phase][what] += count_flops(op, args, named, out)
        return out

    def _current_phase(self) -> str:
        """Backward is told from forward by autograd's own count; recompute runs inside backward, with gradients on."""
        if self._updating:
            return "optimizer"
        if torch._C._current_graph_task_id() == -1:
            # Between the two, what was going on still is: FSDP2 reduces gradients after the graph has ended.
            return "backward" if self.meter.phase in ("recompute", "backward") else "forward"
        # Own autograd functions switch gradients off in their forward: there the module that runs tells.
        return "recompute" if torch.is_grad_enabled() or self._depth else "backward"

    def _enter_module(self, *_: Any) -> None:
        self._depth += 1

    def _leave_module(self, *_: Any) -> None:
        self._depth -= 1

    def _forward_begins(self, *_: Any) -> None:
        if torch._C._current_graph_task_id() == -1 and not self._updating:
            self.meter.phase = "forward"

    def _record_call(self, kind: str, op: Any, args: tuple[Any, ...], out: Any) -> None:
        group = self._trace_group(group_of(op, args), kind)
        part = "exchange" if group.axis in EXCHANGED else ""
        for tensor in tensors_of([args, out]):
            self.meter.see(tensor, part)
        message = kind in ("send", "receive")
        if message and not self._in_batch:
            self._quiet += 1
        self._in_batch = message
        if not self._on:
            return
        nbytes, dtype = payload_of(args, out)
        self._log.append(
            TracedOperation(
                kind=kind,
                nbytes=nbytes,
                dtype=dtype,
                group=group,
                phase=self.meter.phase,
                peer=peer_of(args, group_of(op, args)) if message else -1,
                batch=self._quiet if message else -1,
            )
        )

    def _trace_group(self, group: ProcessGroup, kind: str) -> TraceGroup:
        key = (group.group_name, kind)
        if key not in self._groups:
            ranks = tuple(dist.get_process_group_ranks(group))
            names = self._axes.get(group.group_name, ())
            # Beside the mesh there are the whole job, and the pairs of first and last stage of a tied table.
            whole = "world" if len(ranks) == dist.get_world_size() else "ends"
            self._groups[key] = TraceGroup(axis=axis_of(names, kind) or whole, ranks=ranks)
        return self._groups[key]


def axis_names(meshes: Meshes) -> dict[str, tuple[str, ...]]:
    """Name of each communicator -> the planner's names of its axes: all that span the whole job share one."""
    dims = meshes.dims
    grouped = dims.zero > 0 and dims.copies > 1 and dims.shard > 1
    outer = {"copies": "replica", "shard": "shard"} if grouped else {"copies": "data", "shard": "data"}
    found: dict[str, tuple[str, ...]] = {}

    def add(mesh: DeviceMesh, axis: str, word: str) -> None:
        if mesh[axis].size() > 1:
            name = mesh.get_group(axis).group_name
            found[name] = (*found.get(name, ()), word)

    for axis in ("copies", "shard"):
        add(meshes.dense, axis, outer[axis])
    for axis in ("context", "tensor", "pipeline"):
        add(meshes.work, axis, axis)
    add(meshes.dense, "tensor", "tensor")
    if meshes.experts is not None:
        for axis, word in (("copies", "expert data"), ("shard", "expert data"), ("expert", "expert")):
            add(meshes.experts, axis, word)
    return found


def axis_of(names: Sequence[str], kind: str) -> str:
    """Where axes share a communicator, messages and exchanges are not of those that only add up and gather."""
    if kind in ("send", "receive", "all-to-all"):
        names = [name for name in names if name not in EXCHANGED] or names
    else:
        names = [name for name in names if name != "pipeline"]
    return names[0] if names else ""


def held_gradients(engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything that holds gradients at this moment."""
    for held in engine.held:
        if held.tensor.grad is not None:
            yield "gradients", held.tensor.grad
        if engine.exchange is not None and held.trained:
            yield "gradients", engine.exchange.gradient(held.tensor)
    for shard in engine.shards:
        if shard.tensor.grad is not None:
            yield "gradients", shard.tensor.grad
    for part in engine.parts:
        for module in part.model.modules():
            if isinstance(module, FSDPModule):
                yield from (("gradients", tensor) for tensor in _unsharded_gradients(module))


def _unsharded_gradients(module: FSDPModule) -> Iterator[torch.Tensor]:
    """Gradients FSDP2 has not reduced yet, which only its own records know (torch 2.11 to 2.13)."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    for param in (param for group in groups for param in group.fsdp_params):
        unsharded = getattr(param, "_unsharded_param", None)
        for grad in (unsharded.grad if unsharded is not None else None, param.unsharded_accumulated_grad):
            if grad is not None:
                yield grad
