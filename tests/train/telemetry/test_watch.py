"""The monitor and the pings beside real ranks that use the same store and group."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phalanx.job.run_sections import Telemetry
from phalanx.plan.layout import Layout
from phalanx.record.events import Event, EventWriter, read_events
from phalanx.train.join_group import count_slot_sharers
from phalanx.train.telemetry import monitor
from phalanx.train.telemetry.monitor import Monitor, PeerRendezvous, monitored_rank
from phalanx.train.telemetry.sharing import DeviceCard, Sharers, card_of, count_sharers
from phalanx.train.verify.ranks import run_ranks

sys.path.append(str(Path(__file__).parent))  # the ranks import their task by name
tasks = importlib.import_module("watch_tasks")

TWO = Layout(
    data=2, shard=1, tensor=1, context=1, pipeline=1, virtual_pipeline=1, expert=1, zero=0, sequence_parallel=False,
    micro_batch=1, accumulation=1, recompute="none", precision="fp32", schedule="1f1b", offload="none",
    compression="none",
)  # fmt: skip
OFTEN = Telemetry(interval_s=0.1, peers_every_s=0.3)


def told(folder: Path, kind: str) -> list[Event]:
    events = [event for rank in range(2) for event in read_events(folder / f"events-{rank:05d}.jsonl")[0]]
    return [event for event in events if event["event"] == kind]


def test_ranks_without_an_agent_meet_and_tell_of_themselves_and_each_other(tmp_path: Path) -> None:
    found = run_ranks(tasks.watch, 2, str(tmp_path), TWO, OFTEN)
    met = [meeting for meeting, _ in found]
    assert [sharers for _, sharers in found] == [Sharers(host=2, device=2)] * 2
    assert met[0].secret == met[1].secret
    assert len(set(met[0].secret)) > 8  # drawn
    assert met[0].address == "127.0.0.1"
    answered = {(event["rank"], pair["peer"]) for event in told(tmp_path, "peers") for pair in event["pairs"]}
    assert answered == {(0, 1), (1, 0)}
    assert all(pair["p50_s"] > 0 for event in told(tmp_path, "peers")[:1] for pair in event["pairs"])
    assert {event["rank"] for event in told(tmp_path, "monitor")} == {0, 1}
    assert {event["epoch"] for event in told(tmp_path, "monitor")} == {4}


def test_an_address_that_cannot_be_bound_costs_the_latency_and_nothing_else(tmp_path: Path) -> None:
    run_ranks(tasks.blocked, 2, str(tmp_path), TWO, OFTEN)
    assert told(tmp_path, "peers") == []
    assert len(told(tmp_path, "monitor")) >= 2
    (first, _) = told(tmp_path, "remark")
    assert first["text"].startswith("the latency to other ranks is not measured (OSError: ")
    assert first["text"].endswith("; training goes on")


@pytest.fixture
def events(tmp_path: Path) -> EventWriter:
    return EventWriter(tmp_path / "events-00000.jsonl", rank=0)


def remarks(tmp_path: Path) -> list[str]:
    return [event["text"] for event in read_events(tmp_path / "events-00000.jsonl")[0] if event["event"] == "remark"]


class Refusing:
    """A store whose server is gone."""

    def set(self, key: str, value: str) -> None:
        raise dist.DistError("Broken pipe; hf_abcdefgh\nsecond line")


def test_whatever_cannot_be_started_is_told_and_the_rank_goes_on(
    tmp_path: Path, events: EventWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(self: Monitor) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Monitor, "start", no_thread)
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    meeting = PeerRendezvous(store=Refusing(), secret=bytes(32), address="127.0.0.1")  # type: ignore[arg-type]
    with monitored_rank(
        events,
        lambda: 1 // 0,  # type: ignore[arg-type, return-value]
        meeting,
        telemetry=OFTEN,
        layout=TWO,
        rank=0,
        generation=0,
        sharers=Sharers(),
    ):
        went_on = True
    assert went_on
    assert remarks(tmp_path) == [
        "the device is not watched (RuntimeError: can't start new thread); training goes on",
        "the latency to other ranks is not measured (DistError: Broken pipe; [HF_TOKEN]); training goes on",
    ]


def test_a_group_that_breaks_at_the_meeting_is_left_to_the_training(
    tmp_path: Path, events: EventWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(card: DeviceCard) -> list[DeviceCard]:
        raise dist.DistBackendError("Connection closed by peer")

    monkeypatch.setattr(monitor, "exchange_cards", broken)
    assert monitor.meet_peers(Refusing(), {}, torch.device("cpu"), events) == (None, Sharers())  # type: ignore[arg-type]
    assert len(remarks(tmp_path)) == 1


def card(host: str, device: str, address: str = "") -> DeviceCard:
    return DeviceCard(host=host.ljust(16).encode(), device=device.ljust(16).encode(), address=address)


def test_sharers_are_counted_by_host_and_by_device() -> None:
    """Two hosts of two GPUs, three ranks on the first host: two of them on one GPU."""
    cards = [card("a", "gpu 0"), card("a", "gpu 0"), card("a", "gpu 1"), card("b", "gpu 2")]
    assert [count_sharers(one, cards) for one in cards] == [
        Sharers(host=3, device=2),
        Sharers(host=3, device=2),
        Sharers(host=3, device=1),
        Sharers(host=1, device=1),
    ]


def test_an_agents_ranks_take_the_gpus_of_their_host_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    slots = (0, 1, 2)  # slot 3 has fallen
    assert [count_slot_sharers(torch.device("cuda"), slot, slots).device for slot in slots] == [2, 1, 2]
    assert count_slot_sharers(torch.device("cpu"), 0, slots) == Sharers(host=3, device=3)


@pytest.mark.parametrize("address", ["", "10.1.2.3", "127.0.1.1", "fd00::7"])
def test_a_card_arrives_as_it_was(address: str) -> None:
    made = card_of(torch.device("cpu"), address=address, secret=bytes(range(32)))
    assert DeviceCard.decode(made.encode()) == made
    assert (
        DeviceCard.decode(card_of(torch.device("cpu"), address="no address", secret=bytes(32)).encode()).address == ""
    )


@pytest.mark.parametrize(("far", "wanted"), [("10.9.9.2", "10.9.9.1"), ("127.0.0.1", "127.0.0.1")])
def test_a_host_that_knows_itself_as_loopback_takes_the_address_towards_the_others(
    far: str, wanted: str, tmp_path: Path, events: EventWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian writes `127.0.1.1 host` into /etc/hosts, and MASTER_ADDR is that host."""
    routes = {"first": "127.0.0.1", "10.9.9.2": "10.9.9.1"}
    monkeypatch.setattr(monitor, "_address_towards", lambda host: routes[host])
    monkeypatch.setattr(monitor, "exchange_cards", lambda mine: [mine, mine, card("far", "x", far)])
    meeting, sharers = monitor.meet_peers(dist.HashStore(), {"MASTER_ADDR": "first"}, torch.device("cpu"), events)
    assert meeting is not None
    assert (meeting.address, sharers) == (wanted, Sharers(host=2, device=2))
    assert len(remarks(tmp_path)) == (wanted == "127.0.0.1")
