"""The monitor and the pings beside real ranks that use the same store and group."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from phalanx.job.schema import Telemetry
from phalanx.plan.layout import Layout
from phalanx.record.events import Event, read_events
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
    met = run_ranks(tasks.watch, 2, str(tmp_path), TWO, OFTEN)
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
