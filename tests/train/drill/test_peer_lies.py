"""False updates that a peer of a drill sends from a step on: each kind, and when."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from phalanx.errors import UserError
from phalanx.job.sync_section import SyncSettings
from phalanx.peers.facts import PeerProgress, RoundResult
from phalanx.peers.identity import PeerIdentity
from phalanx.record.run import Run
from phalanx.train.drill import peer_drill, peer_inject
from phalanx.train.drill.faults import PEER_FAULTS, parse_fault, parse_faults
from phalanx.train.drill.peer_drill import PeerDrillNumbers, PeerDrillResult, PeerDrillSettings
from phalanx.train.drill.peer_inject import SCALED, FaultyGroup
from phalanx.train.drill.peer_judge import PeerRecord


class Group:
    """Keeps what it is sent; every result is the number of its round."""

    id = "a"

    def __init__(self) -> None:
        self.sent: list[np.ndarray] = []

    def report(self, progress: PeerProgress) -> None:
        self.progress = progress

    def average(self, round_number: int, vector: np.ndarray, weight: float, codec: str, **_: Any) -> RoundResult:
        self.sent.append(vector)
        result = np.full(vector.size, float(round_number), dtype=np.float32)
        return RoundResult(round_number=round_number, committed=True, vector=result)


def updates(
    kind: str, monkeypatch: pytest.MonkeyPatch, weights_from: int = 0
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Honest updates of rounds 0 to 3, and what is sent of them by a peer that lies from step 2 on."""
    monkeypatch.setattr(peer_inject.firings, "claim_firing", lambda *_, **__: True)
    monkeypatch.setattr(peer_inject, "_flip_labels", lambda: None)
    group = Group()
    faults = parse_faults([f"lie:peer=2,kind={kind},step=2"], kinds=PEER_FAULTS)
    faulty = FaultyGroup(None, group, faults, number=2, weights_from=weights_from)  # type: ignore[arg-type]
    honest = [np.random.default_rng(number).normal(size=64).astype(np.float32) for number in range(4)]
    for number, vector in enumerate(honest):
        faulty.report(PeerProgress(step=number))
        faulty.average(number, vector, 1.0, "fp32")
    return honest, group.sent


@pytest.mark.parametrize("kind", ["reversed", "scaled", "random", "copied", "stale", "flipped"])
def test_each_lie_lasts_from_its_step_on(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, sent = updates(kind, monkeypatch)
    assert all(np.array_equal(honest[number], sent[number]) for number in (0, 1))
    for number in (2, 3):
        expected = {
            "reversed": -honest[number],
            "scaled": SCALED * honest[number],
            "copied": np.full(64, number - 1.0),
            "stale": honest[0],
            "flipped": honest[number],  # of wrong targets already
        }
        if kind == "random":
            assert np.linalg.norm(sent[number]) == pytest.approx(np.linalg.norm(honest[number]), rel=1e-5)
            assert abs(np.dot(sent[number], honest[number])) < 0.5 * np.dot(honest[number], honest[number])
        else:
            assert np.allclose(sent[number], expected[kind])
        assert sent[number].dtype == np.float32


def test_gradients_are_honest(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, sent = updates("reversed", monkeypatch, weights_from=3)
    assert all(np.array_equal(honest[number], sent[number]) for number in range(3))
    assert np.array_equal(-honest[3], sent[3])


@pytest.mark.parametrize(("hides_pace", "pace"), [(False, 7.0), (True, 0.0)])
def test_a_pace_that_is_hidden_deals_equal_shares(hides_pace: bool, pace: float) -> None:
    group = Group()
    faulty = FaultyGroup(None, group, (), number=1, hides_pace=hides_pace)  # type: ignore[arg-type]
    faulty.report(PeerProgress(step=3, samples=5, samples_per_s=7.0))
    assert group.progress == PeerProgress(step=3, samples=5, samples_per_s=pace)


@pytest.mark.parametrize(
    ("faults", "has_liars", "compares_loss"),
    [
        (["kill:peer=2", "nan:peer=3"], False, False),
        (["liar:peer=2"], True, False),
        (["poison:peer=2"], True, False),
        (["lie:peer=2,kind=stale", "kill:peer=3"], True, True),
    ],
)
def test_a_drill_of_liars_trains_as_with_invited_members(
    faults: list[str], has_liars: bool, compares_loss: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scenes: list[PeerDrillSettings] = []
    injected: list[list[str]] = []
    lines: list[str] = []

    def train(scene: PeerDrillSettings, faults: Any) -> tuple[PeerDrillResult, list[PeerRecord]]:
        scenes.append(scene)
        injected.append([fault.text for fault in faults])
        return result, records

    event = {"event": "peer", "t": 9.0, "kind": "excluded", "peer": "b"}
    records = [
        PeerRecord(number=1, id="a", events=[{**event, "step": 56}]),
        PeerRecord(number=2, id="b", events=[{**event, "step": 16, "peer": "a"}]),  # a liar's word
        PeerRecord(number=3, id="c", events=[{**event, "step": 48}]),
    ]
    identities = (PeerIdentity.create("peer-1"), PeerIdentity.create("peer-2"))
    plan = SimpleNamespace(job=SimpleNamespace(sync=SyncSettings(mode="diloco", inner_steps=8)))
    numbers = PeerDrillNumbers(wall_s=1.0, peers=4, rounds=0, steps=0, faults=0, members=0.0, longest_s=0.0, met_s=None)
    result = PeerDrillResult(
        run=Run(path=tmp_path), state="done", message="", outcomes=(), not_fired=(), verdicts=(), numbers=numbers
    )
    monkeypatch.setattr(peer_drill, "train_drilled_peers", train)
    monkeypatch.setattr(peer_drill, "read_identities", lambda run: identities)
    scene = PeerDrillSettings(plan=plan, runs=tmp_path, peers=4, tell=lines.append)  # type: ignore[arg-type]
    found = peer_drill.perform_peer_drill(scene, parse_faults(faults, kinds=PEER_FAULTS))
    assert [(one.has_liars, one.compares_loss) for one in scenes] == [(has_liars, compares_loss)] * (1 + compares_loss)
    assert [one.identities for one in scenes] == [(), identities][: 1 + compares_loss]
    assert injected[1:] == [["leave:peer=2,step=40"]] * compares_loss  # before the exchange that excluded it
    assert [verdict.name for verdict in found.verdicts] == ["the loss is that of honest training"] * compares_loss
    text = '  updates are aggregated by "clipped-mean", as where members were invited'
    assert (text in lines) == has_liars


def test_a_lie_is_written_with_kind_or_how() -> None:
    fault = parse_fault("lie:peer=2,kind=stale,step=4", kinds=PEER_FAULTS)
    assert fault == parse_fault("lie:peer=2,how=stale,step=4", kinds=PEER_FAULTS)
    assert parse_fault(fault.text, kinds=PEER_FAULTS) == fault
    with pytest.raises(UserError, match="use one of reversed, scaled, random, copied, stale, flipped"):
        parse_fault("lie:kind=white", kinds=PEER_FAULTS)
    with pytest.raises(UserError, match="liar has no key 'kind'"):
        parse_fault("liar:kind=norm", kinds=PEER_FAULTS)


def test_wrong_targets_stay_in_range(monkeypatch: pytest.MonkeyPatch) -> None:
    class Batches:
        def read(self, samples: object) -> tuple[np.ndarray, np.ndarray]:
            return np.array([[0, 3, 5]]), np.array([[3, 7, peer_inject.IGNORED]])

    monkeypatch.setattr(peer_inject, "PeerBatches", Batches)
    peer_inject._flip_labels()
    tokens, targets = Batches().read(())
    assert tokens.tolist() == [[0, 3, 5]]
    assert targets.tolist() == [[2, 0, peer_inject.IGNORED]]
