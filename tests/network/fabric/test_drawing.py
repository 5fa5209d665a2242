"""Labels of a panel keep out of each other's way; axes and numbers are short and right."""

from __future__ import annotations

import re

from phalanx.network.fabric.decisions_picture import LETTER_PX, Axis, point_labels, ticks_below
from phalanx.units import format_seconds


def test_labels_never_overlap() -> None:
    points = [(100.0, 200.0, "16 QPs 2.02"), (100.0, 200.0, "256 paths 2.02"), (310.0, 205.0, "packets 1.06")]
    boxes = [
        (float(x), float(x) + LETTER_PX * len(text), float(y))
        for x, y, text in re.findall(
            r'x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)<', "".join(point_labels(points, right=320))
        )
    ]
    assert len(boxes) == 3
    for index, (start, end, height) in enumerate(boxes):
        assert end <= 320
        for other_start, other_end, other in boxes[:index]:
            assert abs(height - other) >= 16 or start >= other_end or end <= other_start


def test_numbers_are_short_but_keep_their_zeros() -> None:
    shown = "".join(ticks_below(Axis(low=1e-5, high=10, start=0, end=100), [1e-5, 10.0], format_seconds))
    assert ">10 µs<" in shown
    assert ">10 s<" in shown
    assert ">0.01<" in "".join(ticks_below(Axis(low=1e-5, high=10, start=0, end=100), [0.01], str))
