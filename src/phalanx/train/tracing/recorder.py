"""The recorder: a dispatch mode that observes every operator of a rank and records messages, FLOPs and memory.

It works alike on real tensors over gloo and on fake ones over a fake group, and does not change what it observes.
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

# Axes whose received tensors only serve the exchange and are freed; on the other axes they are used in computation.
EXCHANGED = ("data", "shard", "replica", "expert data", "world")

WHERE = torch.ops.prim.device.default


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records a step: enter it before the engine is built, then call `begin` and `finish`."""

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
        # Number of the last batch of messages; any other operator ends a batch
        self._quiet = 0
        self._in_batch = False
        self._on = self._deaf = False
        # Nesting of running module forwards inside blocks
        self._depth = 0

    def attach(self, engine: Engine) -> None:
        """Learn the engine's groups and the categories of its tensors, and install hooks."""
        self._engine = engine
        self._axes = axis_names(engine.meshes)
        vocab = engine.shape.vocab
        self._widths = frozenset({vocab, vocab // engine.dims.tensor})
        offload = engine.settings.layout.offload
        parameters = (stage_tensor.local for stage_tensor in engine.held if stage_tensor.is_parameter)
        self.meter.claim(HOST if offload == "parameters" else "parameters", parameters)
        self.meter.claim("parameters", (buffer for stage in engine.parts for buffer in stage.model.buffers()))
        state = [shard.tensor for shard in engine.optimizer.state()]
        master_copies = [master for _, master in engine.masters.copies]
        self.meter.claim(HOST if offload in ("optimizer", "parameters") else "optimizer", [*state, *master_copies])
        self.meter.look = lambda: held_gradients(engine)
        for stage in engine.parts:
            stage.model.register_forward_pre_hook(self._forward_begins)
            for block in stage.model.layers.values():
                for submodule in block.children():
                    submodule.register_forward_pre_hook(self._enter_module)
                    submodule.register_forward_hook(self._leave_module, always_call=True)
        original = engine._forward_backward

        def forward_backward(*args: Any, **kwargs: Any) -> torch.Tensor:
            total = original(*args, **kwargs)
            # Everything after this belongs to the optimizer
            self._updating = True
            return total

        engine._forward_backward = forward_backward  # type: ignore[method-assign]

    def begin(self) -> None:
        """Start recording; everything before was preparation."""
        self._log.clear()
        self._flops.clear()
        self._updating, self._on = False, True
        self._quiet, self._in_batch = 0, False
        self.meter.phase = "forward"
        self.meter.begin()

    def finish(self) -> RankTrace:
        """Stop recording, and return the trace of the step since `begin`."""
        engine, meter = self._engine, self.meter
        self._on = False
        parts_bytes = {name: nbytes for name, nbytes in meter.peak_parts.items() if nbytes}
        parts_bytes["working"] = parts_bytes.get("working", 0) + meter.peak_bytes - sum(parts_bytes.values())
        dims = engine.dims
        sizes = {axis: getattr(dims, axis) for axis in ("pipeline", "data", "context", "tensor")}
        return RankTrace(
            rank=dist.get_rank(),
            place={axis: (engine.meshes.index(axis), size) for axis, size in sizes.items()},
            stages=tuple(stage.stage for stage in engine.parts),
            layers=tuple(layer for stage in engine.parts for layer in stage.layers),
            operations=tuple(self._log),
            flops={phase: dict(self._flops[phase]) for phase in PHASES if phase in self._flops},
            peak=MemoryPeak(
                nbytes=meter.peak_bytes,
                phase=meter.peak_phase,
                parts_bytes=parts_bytes,
                rest_bytes=meter.live_bytes,
                host_bytes=meter.host_bytes,
            ),
        )

    # ---- observing operators -----------------------------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch wraps every call below once more

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
        """Wrap DTensor's shape inference, which runs operators on full shapes that no rank computes, to be ignored."""

        def run(*args: Any) -> Any:
            was_deaf, self._deaf = self._deaf, True
            try:
                return work(*args)
            finally:
                self._deaf = was_deaf

        return run

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(tensor_type, DTensor) for tensor_type in types):
            # It becomes operators on local tensors, which are dispatched here
            return NotImplemented
        keyword_arguments = kwargs or {}
        if self._deaf:
            return op(*args, **keyword_arguments)
        # Every second call of a step, with nothing to record
        if op is WHERE:
            return self._run(op, args, keyword_arguments)
        self.meter.phase = self._current_phase()
        out = self._run(op, args, keyword_arguments)
        kind = kind_of(op)
        if kind:
            self._record_call(kind, op, args, out)
            return out
        self._in_batch = False
        for tensor in tensors_of(out):
            is_logits = tensor.ndim > 1 and tensor.shape[-1] in self._widths
            self.meter.see(tensor, "logits" if is_logits else "")
        if self._on:
            flop_category = flop_kind(op)
            if flop_category:
                self._flops[self.meter.phase][flop_category] += count_flops(op, args, keyword_arguments, out)
        return out

    def _current_phase(self) -> str:
        """Return the current phase: a running autograd graph task is backward.

        Recompute runs inside it with gradients on.
        """
        if self._updating:
            return "optimizer"
        if torch._C._current_graph_task_id() == -1:
            # Between steps of autograd the last phase continues: FSDP2 reduces gradients after the graph has ended.
            return "backward" if self.meter.phase in ("recompute", "backward") else "forward"
        # Custom autograd functions switch gradients off in their forward: there the running module decides.
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
            # Groups outside the mesh: all ranks of the job, and the pairs of first and last stage of a tied table.
            fallback = "world" if len(ranks) == dist.get_world_size() else "ends"
            self._groups[key] = TraceGroup(axis=axis_of(names, kind) or fallback, ranks=ranks)
        return self._groups[key]


def axis_names(meshes: Meshes) -> dict[str, tuple[str, ...]]:
    """Return communicator name -> the planner's names of its axes.

    Axes that span the whole job share a communicator.
    """
    dims = meshes.dims
    grouped = dims.zero > 0 and dims.copies > 1 and dims.shard > 1
    outer = {"copies": "replica", "shard": "shard"} if grouped else {"copies": "data", "shard": "data"}
    names: dict[str, tuple[str, ...]] = {}

    def add(mesh: DeviceMesh, axis: str, word: str) -> None:
        if mesh[axis].size() > 1:
            name = mesh.get_group(axis).group_name
            names[name] = (*names.get(name, ()), word)

    for axis in ("copies", "shard"):
        add(meshes.dense, axis, outer[axis])
    for axis in ("context", "tensor", "pipeline"):
        add(meshes.work, axis, axis)
    add(meshes.dense, "tensor", "tensor")
    if meshes.experts is not None:
        for axis, planner_axis in (("copies", "expert data"), ("shard", "expert data"), ("expert", "expert")):
            add(meshes.experts, axis, planner_axis)
    return names


def axis_of(names: Sequence[str], kind: str) -> str:
    """Return the axis of an operation on a communicator that several axes share.

    Messages and all-to-alls belong to axes such as pipeline or expert, sums and gathers to the others.
    """
    if kind in ("send", "receive", "all-to-all"):
        names = [name for name in names if name not in EXCHANGED] or names
    else:
        names = [name for name in names if name != "pipeline"]
    return names[0] if names else ""


def held_gradients(engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor that holds gradients at this moment."""
    for stage_tensor in engine.held:
        if stage_tensor.tensor.grad is not None:
            yield "gradients", stage_tensor.tensor.grad
        if engine.exchange is not None and stage_tensor.trained:
            yield "gradients", engine.exchange.gradient(stage_tensor.tensor)
    for shard in engine.shards:
        if shard.tensor.grad is not None:
            yield "gradients", shard.tensor.grad
    for stage in engine.parts:
        for module in stage.model.modules():
            if isinstance(module, FSDPModule):
                yield from (("gradients", tensor) for tensor in _unsharded_gradients(module))


def _unsharded_gradients(module: FSDPModule) -> Iterator[torch.Tensor]:
    """Yield gradients that FSDP2 has not reduced yet, which only its private state refers to (torch 2.11 to 2.13)."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    for param in (param for group in groups for param in group.fsdp_params):
        unsharded = getattr(param, "_unsharded_param", None)
        for grad in (unsharded.grad if unsharded is not None else None, param.unsharded_accumulated_grad):
            if grad is not None:
                yield grad
