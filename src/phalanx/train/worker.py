"""One rank of a run: joins the others, builds its part of the job, and trains; under an agent, again and again.

A rank that loses a peer keeps its process: it leaves the process group, waits for its place in the next membership, and
builds itself anew from what host memory or the disk holds.
"""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from phalanx.elastic.fence import commit_fence
from phalanx.elastic.gpus import take_shared_gpu
from phalanx.elastic.heartbeat_board import NO_STEP, Phase
from phalanx.elastic.local_launch import LauncherTask
from phalanx.elastic.membership import HostMembership
from phalanx.elastic.rank_link import Interrupted, RankLink
from phalanx.elastic.rank_process import take_rank
from phalanx.elastic.rank_ranges import RankRanges
from phalanx.elastic.replica_store import ReplicaStore
from phalanx.elastic.restore_point import RestorePoint
from phalanx.errors import PhalanxError, Problem, SystemFailure, UserError, mistake
from phalanx.job.dataset import MANIFEST
from phalanx.job.schema import Job
from phalanx.plan.model_replicas import ModelReplicas
from phalanx.plan.plan import Plan
from phalanx.record.events import EventWriter
from phalanx.record.provenance import redact
from phalanx.record.run import Run, open_run
from phalanx.train.drill_hooks import drill_hooks_of
from phalanx.train.engine import Engine
from phalanx.train.flight import FlightRecord, is_lost_peer, last_collective
from phalanx.train.guard.divergence_verdict import Divergence
from phalanx.train.guard.spikes import SpikeDetector
from phalanx.train.leave import CommunicatorAbort, check_device, forget_groups, number_ranks
from phalanx.train.listeners import listening_sockets, refuse_strangers
from phalanx.train.loop import TrainingLoop
from phalanx.train.memory import MemoryMeter
from phalanx.train.models.own_model import build_outline, differs_from_shape
from phalanx.train.parallel.across_replicas import AcrossReplicas
from phalanx.train.plugins import load_plugins, refuse_plugins
from phalanx.train.rank_control import RankControl, UntrustedState
from phalanx.train.regroup import ReplicaRounds
from phalanx.train.settings import Settings
from phalanx.train.state.async_saver import HostCopies
from phalanx.train.state.in_memory import InMemoryCheckpointer, ReplicaAddress
from phalanx.train.state.paths import commit_step
from phalanx.train.state.rank_state import seed_random_state
from phalanx.train.state.reader import list_commits
from phalanx.train.state.replica_directory import ReplicaDirectory
from phalanx.train.state.replica_reader import ReplicaSource
from phalanx.train.state.replica_server import ReplicaServer
from phalanx.train.state.retention import delete_commits_after, remove_drafts
from phalanx.train.state.training_state import (
    RestoredRun,
    checkpoint_shards,
    load_hf_weights,
    restore_from_replicas,
    restore_newest_checkpoint,
)
from phalanx.train.telemetry.communicators import tell_communicators
from phalanx.train.telemetry.monitor import PeerRendezvous, SensorCache, monitored_rank
from phalanx.train.telemetry.sharing import Sharers, is_loopback
from phalanx.units import plural

ROUND_S = 10.0  # beyond the time after which a replica counts as lost, to hear who is present
MOST_UNWRITTEN = 8  # memberships whose last events wait for a disk that takes them; 4 MiB each at most


class Rank:
    """A process that an agent keeps in a slot: trains in one membership after the other until it is told to end."""

    def __init__(
        self,
        *,
        run: Path,
        link: RankLink,
        replica_store: ReplicaStore,
        host: str,
        address: str,
        secret: bytes,
        notes: Sequence[str] = (),
        task: LauncherTask | None = None,
        allow_code: bool = False,
    ) -> None:
        self.run, self.link, self.replica_store, self.host, self.address = (
            open_run(str(run)),
            link,
            replica_store,
            host,
            address,
        )
        self._secret, self._notes = secret, notes  # what NCCL cannot use on this host
        # Its place among the ranks of this machine. By slots, not by ranks: the number of threads changes bits, and
        # ranks come and go.
        self._local_rank = task.local_rank if task is not None else link.slot
        self._local_world = task.local_world if task is not None else replica_store.slots
        self._task, self._allow_code = task, allow_code
        self.plan = Plan.from_json(self.run.plan_text(), where=str(self.run.plan_json))
        # By the plan, not by the ranks that are left: a rank goes on where it wrote before.
        ranks_from = self.plan.job.telemetry.host_files_from
        self._shares_files = 0 < ranks_from <= self.plan.layout.devices
        self._unwritten: list[EventWriter] = []
        self._server: ReplicaServer | None = None
        self._host_copies = HostCopies()
        self._compared: set[str] = set()
        self._sensors = SensorCache()

    def serve(self) -> None:
        """Take part in memberships until the run is over; whatever is this rank's own fault is raised."""
        while (form := self.link.next_form()) is not None:
            membership = HostMembership.from_json(form)
            rank = membership.ranks.get(self.link.slot)
            if rank is not None:
                self._take_part(membership, rank)
        self._close_events()

    def _take_part(self, membership: HostMembership, rank: int) -> None:
        epoch = membership.generation
        local_world = len(membership.ranks) if self._task is None else self._local_world
        log = self.run.host_log(self.host) if self._shares_files else None
        take_rank(self.run, rank, world=membership.world, slot=self._local_rank, local_world=local_world, host_log=log)
        self.link.record = FlightRecord(self.run, rank=rank, epoch=epoch)
        abort = self.link.abort = CommunicatorAbort()
        left: dict[str, Any] = {"step": NO_STEP, "why": ""}
        try:
            self.link.enter(epoch)
            self.link.progress(NO_STEP, Phase.BUILDING)
            state, step = self._train(membership, rank)
            left |= {"state": state, "step": step}
        except Interrupted:
            pass
        except UntrustedState as error:
            if rank == 0 or rank in error.suspects:  # rank 0 may be of another model replica, and not know
                self._delete_untrusted(epoch, error.sound)
            left |= {
                "step": error.step,
                "why": str(error),
                "fault": error.fault,
                "sound": error.sound,
                "suspects": error.suspects,
                "evidence": error.evidence,
            }
        except BaseException as error:
            # A peer is gone, and with it the connection; or the error is our own, and the agent will hear of it.
            if not (self.link.is_over(epoch) or is_lost_peer(error)):
                raise
            left |= {"step": self.link.step, "why": redact(f"{type(error).__name__}: {error}", os.environ)}
        # Not while an error is handled: its traceback holds the engine, and with it the memory of the device.
        self._leave(epoch, abort, left)

    def _delete_untrusted(self, epoch: int, sound: int) -> None:
        """Delete checkpoints of a state that was found astray, before anything else: the run may end here."""
        with suppress(PhalanxError, OSError), commit_fence(self.run, epoch):  # else the next membership does it
            delete_commits_after(self.run.checkpoints, sound)

    def _leave(self, epoch: int, abort: CommunicatorAbort, left: Mapping[str, Any]) -> None:
        if "state" not in left:  # it did not come out of its loop by itself
            self.link.record()
        self.link.may_beat = lambda: True
        abort.wait()
        self.link.leave()
        collective = last_collective()
        forget_groups()
        gc.collect()  # engines hold each other in circles
        check_device()
        self.link.send("left", epoch=epoch, last_collective=collective, **left)

    def _train(self, membership: HostMembership, rank: int) -> tuple[str, int]:
        hooks = drill_hooks_of(self.run, rank, self.link.slot)
        self.link.may_beat = hooks.heartbeat_allowed
        hooks.joining(membership.generation, rank)
        across = self._across(membership, rank)
        inner = (across.position, across.replicas.size) if across is not None else (rank, membership.world)
        # Before anybody is waited for: a new process makes its CUDA context while the others leave what they were at.
        device = _device(self.plan, self._local_world)
        with ExitStack() as stack:
            door = stack.enter_context(_door(self.address)) if inner[0] == 0 else None
            self.link.store_port = port = door.getsockname()[1] if door is not None else 0
            self.link.send(
                "ready", epoch=membership.generation, port=port, vault=self._replica_port(membership.generation)
            )
            known = listening_sockets()  # not to be closed to strangers: they defend themselves
            if door is not None and across is None:  # else replicas that come back meet at this store
                known = {name: number for name, number in known.items() if number != door.fileno()}
            go = self.link.go(membership.generation)
            patience_s = self.plan.job.comm.init_timeout_s
            is_late = bool(go.get("late"))  # this replica was lost, and joins one that trains
            meets_at = go["stores"][across.replica] if across is not None else go["store"]
            place = _store(meets_at, door, timeout_s=patience_s)
            store = PrefixStore(f"{membership.generation}", place)
            shared = self._shares(device)
            # Copies lie on hosts of all replicas: they are announced where all of them meet.
            common = store
            if across is not None and across.replica and not is_late:
                common = PrefixStore(f"{membership.generation}", _store(go["store"], None, timeout_s=patience_s))
            places = self._announce_copies(membership, go, common)
            joined_s = _join(self.plan, device, rank=inner[0], world=inner[1], store=store, shared=shared)
            if device.type == "cpu":  # NCCL connects ranks when they first meet, through sockets that listen till then
                refuse_strangers(known)
            self._close_events()  # before another writer opens the same file
            host_file = self.run.host_events(self.host) if self._shares_files else None
            events = EventWriter(
                self.run.events(rank),
                rank=rank,
                host_file=host_file,
                generation=membership.generation,
                earlier=self._unwritten,
            )
            stack.callback(self._close_events, events)
            stack.enter_context(self._watched(membership, rank, events, device, None if across is not None else store))
            keeper = self._keeper(membership, inner, go, events)
            if keeper is not None:
                stack.callback(keeper.close)
            rounds = self._rounds(membership, across, go, events) if across is not None else None
            # Steps at which a replay changes its membership.
            control = RankControl(
                stop=lambda: self.link.board.stopping,
                progress=self.link.progress,
                epoch=membership.generation,
                went_s=float(go["went_s"]),
                reform=lambda: self.link.board.reforming,
                leaves_at=frozenset(int(one["from_step"]) for one in self.run.launch().get("formations", ())) - {0},
                keeper=keeper,
                case=Divergence.from_json(go["case"]) if go.get("case") else None,
                copies=self._host_copies,
                compared=self._compared,
                hooks=hooks,
                fence=lambda: commit_fence(self.run, membership.generation),
                over=lambda: self.link.is_over(membership.generation),
                rounds=rounds,
            )
            copies = self._copies(go, places) if places is not None else None
            return train(
                self.run,
                replace(self.plan, layout=across.replicas.inner if across is not None else membership.layout),
                device,
                events,
                control,
                copies=copies,
                at_most=go.get("at_most"),
                store=store,
                joined_s=joined_s,
                notes=self._notes,
                allow_code=self._allow_code,
                built=partial(self.link.send, "built", epoch=membership.generation) if is_late else None,
                enter_round=self.link.enter_round,
            )

    def _close_events(self, *events: EventWriter) -> None:
        """What a full disk refused waits for the next membership, or the end: this process has it, and nobody else."""
        self._unwritten = [one for one in (*self._unwritten, *events) if not one.close()][-MOST_UNWRITTEN:]

    def _across(self, membership: HostMembership, rank: int) -> AcrossReplicas | None:
        """This rank's place among model replicas, where a lost one is left out; None where all ranks are one world."""
        if self.plan.job.fault.on_loss != "leave-out":
            return None
        replicas = ModelReplicas.of(membership.layout)
        return AcrossReplicas(replicas, rank) if replicas.count > 1 else None

    def _rounds(
        self, membership: HostMembership, across: AcrossReplicas, go: Mapping[str, Any], events: EventWriter
    ) -> ReplicaRounds:
        fault, generation = self.plan.job.fault, membership.generation
        first = None
        if not go.get("late"):
            first = {"round": 0, "present": list(range(across.replicas.count)), "store": go["store"]}
        return ReplicaRounds(
            across,
            generation=generation,
            first=first,
            # A process that is stopped counts as lost after dead_after_s; a replica that is built takes longer.
            wait=lambda after: self.link.next_round(
                generation, after, ROUND_S + (self.plan.job.comm.init_timeout_s if after < 0 else fault.dead_after_s)
            ),
            is_due=self.link.is_round_due,
            timeout_s=self.plan.job.comm.init_timeout_s,
            tell=partial(events.write, "regroup", epoch=generation),
            confirm=partial(self.link.send, "connected", epoch=generation),
        )

    def _shares(self, device: torch.device) -> bool:
        """Whether ranks here share a GPU; by slots, as it must not depend on who is left."""
        if device.type != "cuda":
            return False
        if self._task is not None:
            return self._task.shares_gpu  # the tasks of a launcher have told each other
        # Hosts of a loopback address are one machine that plays several, and its GPUs are all of theirs.
        hosts = len(self.run.launch().get("hosts", ())) if is_loopback(self.address) else 1
        return self.replica_store.slots * max(hosts, 1) > torch.cuda.device_count()

    def _watched(
        self, membership: HostMembership, rank: int, events: EventWriter, device: torch.device, store: Store | None
    ) -> AbstractContextManager[None]:
        power_w = self.plan.cluster.accelerator.tdp_w
        meeting = PeerRendezvous(store=store, secret=self._secret, address=self.address) if store is not None else None
        return monitored_rank(
            events,
            lambda: self._sensors.of(device, power_w),
            meeting,
            telemetry=self.plan.job.telemetry,
            layout=membership.layout,
            rank=rank,
            epoch=membership.generation,
            sharers=self._sharers(membership, device),
        )

    def _sharers(self, membership: HostMembership, device: torch.device) -> Sharers:
        """Ranks that share this machine and its device."""
        if self._task is None:
            return _sharers(device, self.link.slot, membership.ranks)
        share = -(-self._local_world // torch.cuda.device_count()) if self._task.shares_gpu else 1
        return Sharers(host=self._local_world, device=share if device.type == "cuda" else self._local_world)

    def _replica_port(self, epoch: int) -> int:
        if not self.plan.reliability.memory_every:
            return 0
        if self._server is None:
            self._server = ReplicaServer(self.replica_store, secret=self._secret, address=self.address, host=self.host)
        self._server.admit(epoch)
        return self._server.port

    def _keeper(
        self, membership: HostMembership, inner: tuple[int, int], go: Mapping[str, Any], events: EventWriter
    ) -> InMemoryCheckpointer | None:
        if not self.plan.reliability.memory_every:
            return None
        where = None
        # Model replicas are each other's copies: the same shard is under the same number in the memory of each.
        if (told := go.get("peers")) and inner[
            1
        ] == membership.world:  # by slot: our place among the guests of a rank elsewhere, and where that listens
            place, host, port = told[str(self.link.slot)]
            where = ReplicaAddress(host=str(host), port=int(port), slot=int(place))
        restore = go.get("restore")
        return InMemoryCheckpointer(
            self.replica_store,
            slot=self.link.slot,
            rank=inner[0],
            world=inner[1],
            epoch=membership.generation,
            secret=self._secret,
            peer=where,
            restored=(int(restore["epoch"]), int(restore["step"])) if restore else None,
            address=self.address,
            tell=partial(events.write, "memory", epoch=membership.generation),
            check=partial(self._check_over, membership.generation),
        )

    def _check_over(self, epoch: int) -> None:
        if self.link.is_over(epoch):
            raise Interrupted

    def _announce_copies(
        self, membership: HostMembership, go: Mapping[str, Any], store: Store
    ) -> ReplicaDirectory | None:
        """Where replicas lie that are restored from: each host tells of its own, and is asked by who needs one."""
        if not (restore := go.get("restore")):
            return None
        numbers = {name: int(restore[name]) for name in ("epoch", "step", "world", "hosts")}
        directory = ReplicaDirectory(store, **numbers)
        if self.link.slot == min(membership.ranks):
            server = (self.address, self._server.port) if self._server is not None else (self.address, 0)
            directory.announce(self.host, server, self.replica_store.held())
        return directory

    def _copies(self, go: Mapping[str, Any], places: ReplicaDirectory) -> ReplicaSource:
        restore = go["restore"]
        numbers = {name: int(restore[name]) for name in ("epoch", "step", "world")}
        return ReplicaSource(
            RestorePoint(places=places, **numbers),
            replica_store=self.replica_store,
            local_host=self.host,
            peers=places.servers,
            secret=self._secret,
            bind=self.address,
            writers=RankRanges.from_json(restore["writers"]),
        )


def train(
    folder: Run,
    plan: Plan,
    device: torch.device,
    events: EventWriter,
    control: RankControl,
    *,
    copies: ReplicaSource | None = None,
    at_most: int | None = None,
    store: Store | None = None,
    joined_s: float = 0.0,
    notes: Sequence[str] = (),
    allow_code: bool = False,
    built: Callable[[], None] | None = None,
    enter_round: Callable[[int], None] = lambda number: None,
) -> tuple[str, int]:
    """Build the engine, take up where the run stands, and run the loop; how it ended, and after how many steps.

    `copies` is where memory holds the state; without, the newest checkpoint is taken, of `at_most` so many steps.
    Making the group of all ranks, who met in `store`, took `joined_s`. `allow_code` is the word of whoever started the
    agent: what the run folder says of it counts for nothing. `built` is called by a replica that joins others late,
    and `enter_round` before replicas are connected: sockets from then on are cut when one is lost.
    """
    across = control.rounds.across if control.rounds is not None else None
    began_s, memory = time.monotonic(), MemoryMeter(device)
    job = plan.job
    plugins = load_plugins(job, allow_code=allow_code)
    listening = listening_sockets()  # what plug-ins open is theirs
    refuse_plugins(job.plugins, plan.layout, loss_parallel=job.parallel.loss_parallel)
    engine = Engine(
        job.model,
        Settings.of(job, plan.layout, on_gpu=device.type == "cuda", allow_code=allow_code),
        job.optim,
        device=device,
        state_dtype=job.precision.optimizer_state,
        across=across,
    )
    if device.type == "cpu":
        refuse_strangers(listening)
    engine.spikes = SpikeDetector(job.train.spike_factor)
    tell_communicators(
        events,
        store,
        engine.meshes.group_times,
        joined_s=joined_s,
        epoch=control.epoch,
        device=device,
        notes=notes,
    )
    control.hooks.restoring(control.epoch, across.rank if across is not None else dist.get_rank())
    if dist.get_rank() == 0 and (across is None or across.replica == 0) and built is None:
        remove_drafts(folder.checkpoints)  # what dead processes left half done
        if at_most is not None:
            delete_commits_after(folder.checkpoints, at_most)
    if built is not None:
        engine.initialise_unsaved()
        restored, source = RestoredRun(), "replica"
    else:
        restored, source = _restore(engine, folder, copies, at_most)
        if job.train.weights and not restored.step:
            load_hf_weights(engine, Path(job.train.weights))
    loop = TrainingLoop(folder, plan, engine, events, memory, control, plugins)
    try:
        if control.rounds is not None:
            restored = _meet_replicas(control, engine, restored, built, enter_round)
            if built is not None:  # what the process before left in memory is in that of the other replicas too
                loop.checkpoints.safe_step = restored.step
        if restored.data and restored.data != loop.data_digest:
            raise _other_data(job, before=restored.data, now=loop.data_digest)
        loop.restore_extras(engine.restored_extras)
        warnings = [*restored.warnings, *_other_size(job, engine.settings)]
        events.write(
            "ready",
            step=restored.step,
            epoch=control.epoch,
            source=source,
            seconds=time.monotonic() - began_s,
            warnings=warnings,
        )
        if control.keeper is not None and source != "memory":  # fresh memory costs more to touch than to fill
            control.keeper.reserve(checkpoint_shards(engine))
            loop.checkpoints.saver.reserve(checkpoint_shards(engine))
        control.progress(restored.step, Phase.BUILDING)  # the first step may compile
        return loop.run(restored.step), loop.step
    finally:
        loop.close()


def _meet_replicas(
    control: RankControl,
    engine: Engine,
    restored: RestoredRun,
    built: Callable[[], None] | None,
    enter_round: Callable[[int], None],
) -> RestoredRun:
    """Connect to the other replicas for the first time; whoever is behind them takes their state."""
    assert control.rounds is not None
    if built is not None:
        built()
    else:
        enter_round(0)
    step = control.rounds.regroup(engine, restored.step)
    control.check()
    return restored if step == restored.step else replace(restored, step=step, data="")


def _restore(engine: Engine, folder: Run, copies: ReplicaSource | None, at_most: int | None) -> tuple[RestoredRun, str]:
    """From memory, else from the disk, else first values; a copy that turns out damaged is no reason to stop."""
    warnings: tuple[str, ...] = ()
    engine.initialise_unsaved()
    if copies is not None:
        found = restore_from_replicas(engine, copies)
        if not found.warnings:
            return found, "memory"
        warnings = found.warnings
    found = restore_newest_checkpoint(engine, folder.checkpoints, at_most=at_most, run_id=folder.run_id)
    if at_most is None and dist.get_rank() == 0:
        warnings = (*warnings, *_lost_checkpoint(folder, found.step))
    if not found.step:
        engine.initialise()
        seed_random_state(engine.settings.seed, rank=dist.get_rank(), world=dist.get_world_size())
    return replace(found, warnings=(*warnings, *found.warnings)), "disk" if found.step else "start"


def _lost_checkpoint(folder: Run, restored_step: int) -> list[str]:
    """A warning where a newer step than the one restored was saved, and is no longer there."""
    newest = folder.committed_step()
    if newest is None or newest <= restored_step:
        return []
    if newest in {commit_step(place.name) for place in list_commits(folder.checkpoints)}:
        return []  # damaged: the reason was told
    what = f"the checkpoint of step {newest:,} was saved, and is gone"
    why = f"training goes on from step {restored_step:,}" if restored_step else "training starts again from step 0"
    return [Problem(where=str(folder.checkpoints), what=what, why=why).render()]


def _other_data(job: Job, *, before: str, now: str) -> UserError:
    """The data is not what the checkpoint had learnt from; names the folder where digests differ."""
    paths, old, new = job.data.paths, before.split("+"), now.split("+")
    if job.plugins.data or not len(paths) == len(old) == len(new):
        where, digests = job.plugins.data or ", ".join(paths), ""
    else:
        place = next(index for index, pair in enumerate(zip(old, new, strict=True)) if len(set(pair)) > 1)
        where = str(Path(paths[place]) / MANIFEST)
        digests = f": its digest is {new[place][:12]}…, and the checkpoint was trained on {old[place][:12]}…"
    return mistake(
        where,
        f"holds other tokens than the run has learnt from so far{digests}",
        why="the next batches would not be those that come next",
        fix="put the old dataset back (phalanx data show prints its digest), or start a new run",
    )


def _other_size(job: Job, settings: Settings) -> list[str]:
    """A warning where a network of the user's own is not of the size that was planned."""
    if not job.model.module:
        return []
    network = build_outline(job.model, allow_code=settings.allow_code)
    found = differs_from_shape(network, job.model)
    return [found.render()] if found is not None else []


def _device(plan: Plan, local_world: int) -> torch.device:
    """The GPU of this rank, or a fair share of the cores."""
    if torch.cuda.is_available() and plan.cluster.accelerator.family != "cpu":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        is_new = not torch.cuda.is_initialized()
        torch.cuda.set_device(device)
        if is_new:
            _load_kernels(device)
            if Settings.of(plan.job, plan.layout, on_gpu=True).compile:
                _load_tracer()
        return device
    # One thread where bits must not depend on the number of ranks: kernels split their sums by thread.
    torch.set_num_threads(1 if plan.job.numerics.reproducible else max(1, (os.cpu_count() or 1) // local_world))
    return torch.device("cpu")


def _load_kernels(device: torch.device) -> None:
    """Make the CUDA context and load what any step needs: libraries of matrix products, attention, loss, optimizer.

    A process that replaces another does so while the others leave the old membership; in its first step all would wait
    for it, 0.5 s on an H200. Draws no random number.
    """
    with suppress(RuntimeError):  # whatever is not there will be missed where it is needed
        for dtype in (torch.float32, torch.bfloat16):
            weights = torch.ones(64, 64, device=device, dtype=dtype, requires_grad=True)
            heads = (weights @ weights).view(1, 4, 16, 64)
            mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            rows = F.rms_norm(mixed.reshape(64, 64) + F.silu(weights), (64,))
            F.cross_entropy(rows.float(), torch.zeros(64, dtype=torch.long, device=device)).backward()
            torch.optim.AdamW([weights], fused=True).step()
        torch.cuda.synchronize(device)


def _load_tracer() -> None:
    """Trace something small: what dynamo sets up at its first call is half of a replacement's first compilation."""
    with torch.random.fork_rng(devices=[]):  # the weights of a layer are drawn
        layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.SiLU())
    torch.compile(layer, backend="eager")(torch.ones(2, 4))
    torch._dynamo.reset()


def _sharers(device: torch.device, slot: int, slots: Collection[int]) -> Sharers:
    """Those of a slot among the slots of its agent's host, which all see the same GPUs and take them in turn."""
    if device.type != "cuda":
        return Sharers(host=len(slots), device=len(slots))
    count = torch.cuda.device_count()
    return Sharers(host=len(slots), device=sum(one % count == slot % count for one in slots))


def _door(address: str) -> socket.socket:
    """A socket for rank 0's store, on our own address only: torch would listen on all of them."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    door = socket.create_server((address, 0), family=family)
    door.set_inheritable(False)
    return door


def _store(where: list[Any], door: socket.socket | None, *, timeout_s: float) -> TCPStore:
    """The store where the ranks of a generation meet; rank 0 holds it."""
    host, port = str(where[0]), int(where[1])
    return TCPStore(
        host,
        port,
        is_master=door is not None,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        # The descriptor becomes the store's own.
        master_listen_fd=os.dup(door.fileno()) if door is not None else None,
    )


def _ranks_missing(rank: int, world: int, limit_s: float) -> SystemFailure:
    return SystemFailure(
        Problem(
            where=f"rank {rank}",
            what=f"not all of {plural(world, 'rank')} arrived within {limit_s:g} s",
            why="every rank of the job must be started, with the same MASTER_ADDR and WORLD_SIZE",
            fix="look at the logs of the ranks that are missing, or raise comm.init_timeout_s",
        )
    )


def _join(
    plan: Plan, device: torch.device, *, rank: int, world: int, store: Store | None, shared: bool = False
) -> float:
    """Make the group of all ranks; the seconds it took."""
    if shared:
        take_shared_gpu(os.environ)
    # Gloo beside NCCL: what is kept in host memory is exchanged there too.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda" and plan.job.comm.algorithm != "auto":
        # Of all-reduces only: NCCL has no tree for gathers and scatters (the form is of NCCL 2.24 and later).
        os.environ["NCCL_ALGO"] = f"allreduce:{plan.job.comm.algorithm}"
    limit_s = plan.job.comm.init_timeout_s  # train.patience shortens it once steps are steady
    began_s = time.perf_counter()
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=limit_s),
            device_id=device if device.type == "cuda" else None,
        )
    except dist.DistError as error:
        if "timeout" not in str(error).lower():
            raise
        raise _ranks_missing(rank, world, limit_s) from error
    number_ranks(world)
    return time.perf_counter() - began_s
