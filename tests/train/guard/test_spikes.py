"""Gradients that are far too large are skipped, and only those."""

from __future__ import annotations

import json
import math

from phalanx.train.guard.spikes import SpikeDetector


def test_nothing_before_sixteen_steps() -> None:
    spikes = SpikeDetector(3.0)
    assert not any(spikes.is_spike(norm) for norm in [1.0] * 8 + [1000.0] * 7)
    assert not spikes.is_spike(1e9), "the sixteenth norm has fifteen before it"


def test_a_spike_is_many_times_the_median() -> None:
    spikes = SpikeDetector(3.0)
    for _ in range(16):
        spikes.is_spike(1.0)
    assert not spikes.is_spike(3.0)
    assert spikes.is_spike(3.1)
    assert [spikes.is_spike(50.0) for _ in range(20)] == [True] * 20, "what was skipped makes nothing usual"
    assert not spikes.is_spike(1.1)


def test_off() -> None:
    spikes = SpikeDetector(0.0)
    assert not any(spikes.is_spike(norm) for norm in [1.0] * 50 + [1e30])
    assert spikes.state() == {"norms": []}, "nothing is kept for a detector that is off"


def test_what_is_not_finite_is_left_to_others() -> None:
    spikes = SpikeDetector(3.0)
    for norm in [1.0] * 16 + [math.nan, math.inf]:
        assert not spikes.is_spike(norm)
    assert spikes.is_spike(3.1)


def test_a_new_level_becomes_usual_with_the_window() -> None:
    spikes = SpikeDetector(3.0, window=32)
    for _ in range(32):
        spikes.is_spike(1.0)
    assert not any(spikes.is_spike(2.5) for _ in range(20))
    assert not spikes.is_spike(7.0)


def test_the_default_window_is_128_norms() -> None:
    spikes = SpikeDetector(3.0)
    assert not any(spikes.is_spike(norm) for norm in [1.0] * 128 + [2.5] * 63)
    assert spikes.is_spike(7.0), "65 of the last 128 norms are 1.0"
    assert not any(spikes.is_spike(2.5) for _ in range(2))
    assert not spikes.is_spike(7.0), "65 of the last 128 norms are 2.5"


def test_small_norms_have_spikes_too() -> None:
    spikes = SpikeDetector(3.0)
    assert not any(spikes.is_spike(1e-6) for _ in range(16))
    assert spikes.is_spike(1e-5)


def test_a_run_of_nothing_but_zeros() -> None:
    spikes = SpikeDetector(3.0)
    for _ in range(16):
        spikes.is_spike(0.0)
    assert not spikes.is_spike(1.0)


def test_the_same_verdicts_after_a_checkpoint() -> None:
    norms = [1.0 + 0.1 * math.sin(step) for step in range(60)] + [9.0, 9.0]
    through, first, resumed = (
        SpikeDetector(3.0, window=32),
        SpikeDetector(3.0, window=32),
        SpikeDetector(3.0, window=32),
    )
    expected = [through.is_spike(norm) for norm in [*norms, 1.0, 9.0]]
    early = [first.is_spike(norm) for norm in norms]
    resumed.load(json.loads(json.dumps(first.state())))
    assert early + [resumed.is_spike(norm) for norm in [1.0, 9.0]] == expected
    assert resumed.state() == through.state()


def test_loading_replaces_the_norms_seen_before() -> None:
    """As in a process that went back to a checkpoint."""
    spikes = SpikeDetector(3.0, window=32)
    for _ in range(32):
        spikes.is_spike(100.0)
    spikes.load({"norms": [1.0] * 16})
    assert spikes.state() == {"norms": [1.0] * 16}
    assert spikes.is_spike(4.0)
