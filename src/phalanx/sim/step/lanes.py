"""One stage of the pipeline while a step runs: its device, its wires, and where the device's time went."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from phalanx.sim.step.exchange import Inner

DEVICE = "device"
SENDS = "sends"
BACKGROUND = "background"  # traffic of weights and gradients that runs beside compute
BUBBLE = "bubble_s"
WAITS = {BUBBLE: "bubble"}  # names of waiting; of traffic it is "wait for" it


class Span(NamedTuple):
    """Something that lasts: on the device of a stage, or on one of its wires. A step has up to a few 100,000."""

    stage: int
    track: str  # DEVICE, "link", "nic", SENDS or BACKGROUND
    name: str
    part: str  # a part of the plan's step, or "compute_s"
    start_s: float
    end_s: float


class Handover(NamedTuple):
    """An activation or its gradient on the way: the send that carries it, and the pass that takes it up."""

    source: int  # stage
    sent_s: float  # within the send
    target: int
    used_s: float  # the pass begins


class Lanes:
    """A stage's clock. The device does one thing at a time; sends and background traffic queue, each for itself."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.now_s = 0.0  # the device is free
        self.free_s = {SENDS: 0.0, BACKGROUND: 0.0}
        self.spans: list[Span] = []
        self.device_s: dict[str, float] = defaultdict(float)  # seconds of the step by part: work and waiting
        self.wire_s: dict[str, float] = defaultdict(float)

    def wait(self, until_s: float, part: str) -> None:
        """The device idles, on account of `part`."""
        if until_s > self.now_s:
            self._add(DEVICE, WAITS.get(part) or f"wait for {part.removesuffix('_s')}", part, self.now_s, until_s)
            self.device_s[part] += until_s - self.now_s
            self.now_s = until_s

    def busy(self, seconds: float, name: str, part: str) -> None:
        """The device works, or waits visibly for traffic of its own."""
        if seconds > 0:
            self._add(DEVICE, name, part, self.now_s, self.now_s + seconds)
            self.device_s[part] += seconds
            self.now_s += seconds

    def run(self, compute_s: float, inner: tuple[Inner, ...], layers: float, name: str) -> None:
        """Compute with the traffic inside it: what may hide does so at its end, the rest follows."""
        start = self.now_s
        self.busy(compute_s, name, "compute_s")
        most_hidden = sum((one.wire_s - one.exposed_s) * layers for one in inner)
        # No more hides than there is compute to hide behind.
        fits = min(1.0, compute_s / most_hidden) if most_hidden > 0 else 0.0
        at = max(start, self.now_s - fits * most_hidden)
        for one in inner:
            wire = one.wire_s * layers
            shown = wire - fits * (one.wire_s - one.exposed_s) * layers
            self._wire(one.tier, name, one.part, at, wire)
            at += wire
            self.busy(shown, f"{name} {one.part.removesuffix('_s')}", one.part)

    def queue(self, lane: str, ready_s: float, seconds: float, name: str, part: str) -> float:
        """Traffic that starts when its lane is free; returns when it has arrived."""
        start = max(ready_s, self.free_s[lane])
        if seconds > 0:
            self._wire(lane, name, part, start, seconds)
        self.free_s[lane] = start + seconds
        return start + seconds

    def _wire(self, track: str, name: str, part: str, start_s: float, seconds: float) -> None:
        if seconds > 0:
            self.wire_s[part] += seconds
            self._add(track, name, part, start_s, start_s + seconds)

    def _add(self, track: str, name: str, part: str, start_s: float, end_s: float) -> None:
        self.spans.append(Span(self.stage, track, name, part, start_s, end_s))
