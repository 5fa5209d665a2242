"""Records of runs that never happened: a small deterministic world whose digests follow from what was computed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import pytest

Event = dict[str, Any]
BATCH = 8


@dataclass
class Story:
    """Writes the events that a run with these epochs and steps would write; a clock ticks with every event."""

    supervisor: list[Event] = field(default_factory=list)
    ranks: list[Event] = field(default_factory=list)
    t: float = 1000.0
    state: str = "start"
    states: dict[int, str] = field(default_factory=lambda: {0: "start"})
    world: int = 0
    number: int = 0

    def epoch(self, world: int, *, step: int, source: str, reason: str = "", hosts: int = 1) -> None:
        """A new membership that restores `step`."""
        self.number, self.world, self.state = self.number + 1, world, self.states[step]
        members = [
            {"rank": r, "host": f"host{r * hosts // world}", "slot": r, "pid": 100 * self.number + r}
            for r in range(world)
        ]
        layout = {"data": world, "tensor": 1}
        self._supervisor("epoch", layout=layout, world=world, members=members, reason=reason)
        self._supervisor("restore", step=step, source=source)

    def step(self, step: int, *, ranks: list[int] | None = None, skipped: bool = False, **fields: Any) -> None:
        """All ranks take a step."""
        if not skipped:
            self.state = _hash(self.state, self.world, step)
        self.states[step + 1] = self.state
        share = -(-BATCH // self.world)
        for rank in range(self.world) if ranks is None else ranks:
            mine = list(range(BATCH * step + rank * share, BATCH * step + min(BATCH, (rank + 1) * share)))
            self.write(
                "step",
                rank=rank,
                step=step,
                loss=float(int(self.state[:4], 16)) if self.state != "start" else 1.0,
                digest=_hash(self.state, rank),
                samples=mine,
                held=step,
                skipped=skipped,
                **fields,
            )

    def checkpoint(self, step: int) -> None:
        """A commit on the disk."""
        self.write("checkpoint", rank=0, step=step, path=f"step-{step:08d}")

    def incident(self, rank: int) -> None:
        """A rank was lost."""
        self._supervisor("incident", rank=rank, host="host0", cause={"kind": "Signal"})

    def end(self, state: str = "done") -> None:
        """The run is over."""
        self._supervisor("end", state=state)

    def write(self, event: str, *, rank: int, **fields: Any) -> None:
        """One event of a rank."""
        self.t += 0.01
        self.ranks.append({"v": 1, "event": event, "t": self.t, "rank": rank, "epoch": self.number, **fields})

    def _supervisor(self, event: str, **fields: Any) -> None:
        self.t += 0.01
        body = {"v": 1, "event": event, "t": self.t, "rank": -1, "epoch": self.number, **fields}
        self.supervisor.append(body)


def _hash(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@pytest.fixture
def survived() -> Story:
    """Four ranks; rank 2 is killed in step 3, the job shrinks, grows again, and ends after 8 steps."""
    story = Story()
    story.epoch(4, step=0, source="start")
    for step in range(3):
        story.step(step)
    story.checkpoint(3)
    story.step(3, ranks=[0, 1, 3])
    story.incident(2)
    story.epoch(3, step=3, source="memory", reason="rank 2 was lost")
    story.step(3)
    story.step(4)
    story.epoch(4, step=5, source="memory", reason="grows")
    story.step(5)
    story.step(6, skipped=True)
    story.step(7)
    story.checkpoint(8)
    story.end()
    return story


@pytest.fixture
def replayed() -> Story:
    """The same member sequence without a fault."""
    story = Story()
    story.epoch(4, step=0, source="start")
    for step in range(3):
        story.step(step)
    story.epoch(3, step=3, source="memory")
    story.step(3)
    story.step(4)
    story.epoch(4, step=5, source="memory")
    story.step(5)
    story.step(6, skipped=True)
    story.step(7)
    story.end()
    return story


@pytest.fixture
def story() -> Story:
    """A run that has not begun."""
    return Story()
