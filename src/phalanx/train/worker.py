"""One rank's process under an agent: joins each membership of the run and trains in it.

A rank that loses a peer keeps its process: it leaves the process group, waits for its rank number in the next
membership, and rebuilds its model and state from copies in host memory or from disk.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from phalanx.elastic.fence import commit_fence
from phalanx.elastic.heartbeat_board import NO_STEP, Phase
from phalanx.elastic.local_launch import LauncherTask
from phalanx.elastic.membership import HostMembership
from phalanx.elastic.rank_link import Interrupted, RankLink
from phalanx.elastic.rank_process import take_rank
from phalanx.elastic.rank_ranges import RankRanges
from phalanx.elastic.replica_store import ReplicaStore
from phalanx.elastic.restore_point import RestorePoint
from phalanx.elastic.untrusted import set_untrusted_aside
from phalanx.errors import PhalanxError
from phalanx.io.listen import is_loopback_host
from phalanx.plan.model_replicas import ModelReplicas
from phalanx.plan.plan import Plan
from phalanx.record.events import EventWriter
from phalanx.record.provenance import redact
from phalanx.record.run import open_run
from phalanx.train.drill_hooks import drill_hooks_of
from phalanx.train.flight import FlightRecord, is_lost_peer, last_collective
from phalanx.train.guard.divergence_verdict import Divergence
from phalanx.train.join_group import connect_store, count_slot_sharers, join_group, open_store_socket, take_device
from phalanx.train.leave import CommunicatorAbort, check_device, forget_groups
from phalanx.train.listeners import listening_sockets, refuse_strangers
from phalanx.train.parallel.across_replicas import AcrossReplicas
from phalanx.train.rank_control import RankControl, UntrustedState
from phalanx.train.rank_training import train_rank
from phalanx.train.regroup import ReplicaRounds
from phalanx.train.slow_links.peer_session import PeerSession
from phalanx.train.slow_links.peer_worker import join_training
from phalanx.train.state.async_saver import HostCopies
from phalanx.train.state.in_memory import InMemoryCheckpointer, ReplicaAddress
from phalanx.train.state.replica_directory import ReplicaDirectory
from phalanx.train.state.replica_reader import ReplicaSource
from phalanx.train.state.replica_server import ReplicaServer
from phalanx.train.telemetry.monitor import PeerRendezvous, SensorCache, monitored_rank
from phalanx.train.telemetry.sharing import Sharers

# Beyond the time after which a replica counts as lost: until the coordinator has sent who is present.
ROUND_S = 10.0
# Event writers of earlier memberships that a full disk kept from writing; each holds at most 4 MiB.
MOST_UNWRITTEN = 8


class Rank:
    """The process in one slot of a host: trains in one membership after the other until its agent ends the run."""

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
        # Index and number of the slots of this machine, not of its present ranks: they determine the number of threads,
        # which changes the bits of results, and ranks come and go.
        self._local_rank = task.local_rank if task is not None else link.slot
        self._local_world = task.local_world if task is not None else replica_store.slots
        self._task, self._allow_code = task, allow_code
        self.plan = Plan.from_json(self.run.plan_text(), where=str(self.run.plan_json))
        # By the plan, not by the present number of ranks, so that a rank continues to write to the same file.
        ranks_from = self.plan.job.telemetry.host_files_from
        self._shares_files = 0 < ranks_from <= self.plan.layout.devices
        self._unwritten: list[EventWriter] = []
        self._server: ReplicaServer | None = None
        self._host_copies = HostCopies()
        self._compared: set[str] = set()
        self._sensors = SensorCache()

    def serve(self) -> None:
        """Take part in memberships until the run is over; errors that this rank caused itself are raised."""
        while (message := self.link.next_form()) is not None:
            membership = HostMembership.from_json(message)
            rank = membership.ranks.get(self.link.slot)
            if rank is not None:
                self._take_part(membership, rank)
        self._close_events()

    def _take_part(self, membership: HostMembership, rank: int) -> None:
        """Train in one membership, then leave it and report to the agent why it ended."""
        generation = membership.generation
        local_world = len(membership.ranks) if self._task is None else self._local_world
        log = self.run.host_log(self.host) if self._shares_files else None
        take_rank(self.run, rank, world=membership.world, slot=self._local_rank, local_world=local_world, host_log=log)
        self.link.record = FlightRecord(self.run, rank=rank, generation=generation)
        abort = self.link.abort = CommunicatorAbort()
        report: dict[str, Any] = {"step": NO_STEP, "why": ""}
        try:
            self.link.enter(generation)
            self.link.progress(NO_STEP, Phase.BUILDING)
            state, step = self._train_membership(membership, rank)
            report |= {"state": state, "step": step}
        except Interrupted:
            pass
        except UntrustedState as error:
            # The suspects too: rank 0 may belong to another model replica and not learn of it.
            if rank == 0 or rank in error.suspects:
                self._set_untrusted_aside(generation, error.sound)
            report |= {
                "step": error.step,
                "why": str(error),
                "fault": error.fault,
                "sound": error.sound,
                "suspects": error.suspects,
                "evidence": error.evidence,
            }
        except BaseException as error:
            # If the membership is over or a peer is lost, this rank leaves; its own errors end the process.
            if not (self.link.is_over(generation) or is_lost_peer(error)):
                raise
            report |= {"step": self.link.step, "why": redact(f"{type(error).__name__}: {error}", os.environ)}
        # Not while an error is handled: its traceback holds the engine, and with it the memory of the device.
        self._leave_membership(generation, abort, report)

    def _set_untrusted_aside(self, generation: int, sound: int) -> None:
        """Move checkpoints of an untrusted state out of the way, before anything else: the run may end here."""
        # If this fails, the coordinator does it.
        with suppress(PhalanxError, OSError), commit_fence(self.run, generation):
            set_untrusted_aside(self.run, after=sound)

    def _leave_membership(self, generation: int, abort: CommunicatorAbort, left: Mapping[str, Any]) -> None:
        """Abort communicators, leave the process groups, free the engine, and report `left` to the agent."""
        # The training loop did not end normally: write the flight record.
        if "state" not in left:
            self.link.record()
        self.link.may_beat = lambda: True
        abort.wait()
        self.link.leave()
        collective = last_collective()
        forget_groups()
        gc.collect()  # engines hold each other in circles
        check_device()
        self.link.send("left", epoch=generation, last_collective=collective, **left)

    def _train_membership(self, membership: HostMembership, rank: int) -> tuple[str, int]:
        """Join the ranks of a membership and train; return how the loop ended and the steps done.

        The steps in order: take the device, send the port of this rank's store to the coordinator, wait for its `go`
        with the addresses of all stores, join the process group, open the events, and run `train_rank`.
        """
        hooks = drill_hooks_of(self.run, rank, self.link.slot)
        self.link.may_beat = hooks.heartbeat_allowed
        hooks.joining(membership.generation, rank, membership.world)
        across = self._across_replicas(membership, rank)
        # Rank and world size in torch's world, which with model replicas is this replica.
        inner = (across.position, across.replicas.size) if across is not None else (rank, membership.world)
        # First: a new process creates its CUDA context while the other ranks still leave the old membership.
        device = take_device(self.plan, self._local_world)
        with ExitStack() as stack:
            store_socket = stack.enter_context(open_store_socket(self.address)) if inner[0] == 0 else None
            self.link.store_port = port = store_socket.getsockname()[1] if store_socket is not None else 0
            self.link.send(
                "ready", epoch=membership.generation, port=port, replica_port=self._replica_port(membership.generation)
            )
            session = None
            # Rank 0 holds the session for all ranks of this peer.
            if self.plan.job.sync.has_peers and rank == 0:
                session = PeerSession(self.run, self.plan.job)
                stack.callback(session.close)
            # These stay open: they authenticate their clients.
            open_sockets = listening_sockets()
            # Not with model replicas: those that come back connect to this store.
            if store_socket is not None and across is None:
                open_sockets = {
                    name: number for name, number in open_sockets.items() if number != store_socket.fileno()
                }
            go = self.link.go(membership.generation)
            timeout_s = self.plan.job.comm.init_timeout_s
            # This replica was lost, and joins others that are training.
            is_late = bool(go.get("late"))
            store_address = go["stores"][across.replica] if across is not None else go["store"]
            tcp_store = connect_store(store_address, store_socket, timeout_s=timeout_s)
            store = PrefixStore(f"{membership.generation}", tcp_store)
            shared = self._shares_gpu(device)
            # Copies are on hosts of all replicas, so they are announced in the store that all replicas use.
            common_store = store
            if across is not None and across.replica and not is_late:
                common_store = PrefixStore(
                    f"{membership.generation}", connect_store(go["store"], None, timeout_s=timeout_s)
                )
            directory = self._announce_copies(membership, go, common_store)
            joined_s = join_group(self.plan, device, rank=inner[0], world=inner[1], store=store, shared=shared)
            # Not with NCCL, which connects ranks at their first collective, through sockets that listen until then.
            if device.type == "cpu":
                refuse_strangers(open_sockets)
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
            stack.enter_context(
                self._monitored_rank(membership, rank, events, device, None if across is not None else store)
            )
            checkpointer = self._memory_checkpointer(membership, inner, go, events)
            if checkpointer is not None:
                stack.callback(checkpointer.close)
            rounds = self._replica_rounds(membership, across, go, events) if across is not None else None
            # leaves_at: the steps at which a replay changes its membership.
            control = RankControl(
                stop=lambda: self.link.board.stopping,
                progress=self.link.progress,
                generation=membership.generation,
                went_s=float(go["went_s"]),
                reform=lambda: self.link.board.reforming,
                leaves_at=frozenset(
                    int(formation["from_step"]) for formation in self.run.launch().get("formations", ())
                )
                - {0},
                keeper=checkpointer,
                case=Divergence.from_json(go["case"]) if go.get("case") else None,
                copies=self._host_copies,
                compared=self._compared,
                hooks=hooks,
                fence=lambda: commit_fence(self.run, membership.generation),
                over=lambda: self.link.is_over(membership.generation),
                rounds=rounds,
                peers=join_training(session, self.plan, events, lambda: self.link.board.stopping)
                if self.plan.job.sync.has_peers
                else None,
            )
            copies = self._replica_source(go, directory) if directory is not None else None
            return train_rank(
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
                report_restored=partial(self.link.send, "restored", epoch=membership.generation),
            )

    def _close_events(self, *events: EventWriter) -> None:
        """Close event writers, and keep those with events that could not be written.

        Events that a full disk refused exist only in this process; they are written in the next membership or at the
        end.
        """
        self._unwritten = [writer for writer in (*self._unwritten, *events) if not writer.close()][-MOST_UNWRITTEN:]

    def _across_replicas(self, membership: HostMembership, rank: int) -> AcrossReplicas | None:
        """Return this rank's place among model replicas, where the job leaves out a lost replica.

        None where all ranks are one world.
        """
        if self.plan.job.fault.on_loss != "leave-out":
            return None
        replicas = ModelReplicas.of(membership.layout)
        return AcrossReplicas(replicas, rank) if replicas.count > 1 else None

    def _replica_rounds(
        self, membership: HostMembership, across: AcrossReplicas, go: Mapping[str, Any], events: EventWriter
    ) -> ReplicaRounds:
        """Return the object that connects this rank to the model replicas present in each round."""
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

    def _shares_gpu(self, device: torch.device) -> bool:
        """Return True if ranks of this machine share a GPU.

        Decided by slots: the answer must not change when ranks are lost.
        """
        if device.type != "cuda":
            return False
        if self._task is not None:
            # The launcher's tasks have exchanged which GPUs they use.
            return self._task.shares_gpu
        # Hosts with loopback addresses are all this one machine, and share its GPUs.
        hosts = len(self.run.launch().get("hosts", ())) if is_loopback_host(self.address) else 1
        return self.replica_store.slots * max(hosts, 1) > torch.cuda.device_count()

    def _monitored_rank(
        self, membership: HostMembership, rank: int, events: EventWriter, device: torch.device, store: Store | None
    ) -> AbstractContextManager[None]:
        """Return the context in which telemetry watches this rank and its peers."""
        power_w = self.plan.cluster.accelerator.tdp_w
        meeting = PeerRendezvous(store=store, secret=self._secret, address=self.address) if store is not None else None
        return monitored_rank(
            events,
            lambda: self._sensors.of(device, power_w),
            meeting,
            telemetry=self.plan.job.telemetry,
            layout=membership.layout,
            rank=rank,
            generation=membership.generation,
            sharers=self._count_sharers(membership, device),
        )

    def _count_sharers(self, membership: HostMembership, device: torch.device) -> Sharers:
        """Return the number of ranks that share this machine, and of those that share this rank's device."""
        if self._task is None:
            return count_slot_sharers(device, self.link.slot, membership.ranks)
        share = -(-self._local_world // torch.cuda.device_count()) if self._task.shares_gpu else 1
        return Sharers(host=self._local_world, device=share if device.type == "cuda" else self._local_world)

    def _replica_port(self, generation: int) -> int:
        """Start the server of in-memory copies if copies are made; return its port, else 0."""
        if not self.plan.reliability.memory_every:
            return 0
        if self._server is None:
            self._server = ReplicaServer(self.replica_store, secret=self._secret, address=self.address, host=self.host)
        self._server.admit(generation)
        return self._server.port

    def _memory_checkpointer(
        self, membership: HostMembership, inner: tuple[int, int], go: Mapping[str, Any], events: EventWriter
    ) -> InMemoryCheckpointer | None:
        """Return the checkpointer that copies the state to host memory and to a peer host; None if that is off."""
        if not self.plan.reliability.memory_every:
            return None
        peer_address = None
        # Model replicas are each other's copies, in which a shard has the same number: then no peer is needed.
        # By slot: the place for this rank's copy on another host, and that host's address and port.
        if (peers := go.get("peers")) and inner[1] == membership.world:
            slot, host, port = peers[str(self.link.slot)]
            peer_address = ReplicaAddress(host=str(host), port=int(port), slot=int(slot))
        restore = go.get("restore")
        return InMemoryCheckpointer(
            self.replica_store,
            slot=self.link.slot,
            rank=inner[0],
            world=inner[1],
            generation=membership.generation,
            secret=self._secret,
            peer=peer_address,
            restored=(int(restore["epoch"]), int(restore["step"])) if restore else None,
            address=self.address,
            tell=partial(events.write, "memory", epoch=membership.generation),
            check=partial(self._check_over, membership.generation),
        )

    def _check_over(self, generation: int) -> None:
        """Raise Interrupted if the membership is over."""
        if self.link.is_over(generation):
            raise Interrupted

    def _announce_copies(
        self, membership: HostMembership, go: Mapping[str, Any], store: Store
    ) -> ReplicaDirectory | None:
        """Return the directory of in-memory copies to restore from; None where none are used.

        The first rank of each host announces the copies that its host holds.
        """
        if not (restore := go.get("restore")):
            return None
        numbers = {name: int(restore[name]) for name in ("step", "world", "hosts")}
        directory = ReplicaDirectory(store, generation=int(restore["epoch"]), **numbers)
        if self.link.slot == min(membership.ranks):
            server = (self.address, self._server.port) if self._server is not None else (self.address, 0)
            directory.announce(self.host, server, self.replica_store.held())
        return directory

    def _replica_source(self, go: Mapping[str, Any], places: ReplicaDirectory) -> ReplicaSource:
        """Return the source that restores this rank's state from in-memory copies of any host."""
        restore = go["restore"]
        numbers = {name: int(restore[name]) for name in ("step", "world")}
        return ReplicaSource(
            RestorePoint(places=places, generation=int(restore["epoch"]), **numbers),
            replica_store=self.replica_store,
            local_host=self.host,
            peers=places.servers,
            secret=self._secret,
            bind=self.address,
            writers=RankRanges.from_json(restore["writers"]),
        )
