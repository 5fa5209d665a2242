"""Fragments: parts of a model that are exchanged one after the other, and the steps at which each is due."""

from __future__ import annotations

import re
from collections.abc import Mapping

LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")


def assign_fragments(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """Return the fragment of each tensor: every `count`th layer together (arXiv:2501.18512), the rest to the smallest.

    >>> assign_fragments({"layers.0.w": 4, "layers.1.w": 4, "layers.2.w": 4, "embed": 9}, 2)
    {'layers.0.w': 0, 'layers.1.w': 1, 'layers.2.w': 0, 'embed': 1}
    """
    chosen: dict[str, int] = {}
    filled = [0] * count
    layers = {name: int(match[1]) for name in sizes if (match := LAYER.search(name))}
    for name in sorted(sizes, key=lambda name: (name not in layers, -sizes[name] * (name not in layers), name)):
        place = layers[name] % count if name in layers else filled.index(min(filled))
        chosen[name] = place
        filled[place] += sizes[name]
    return {name: chosen[name] for name in sizes}


def due_fragment(inner_step: int, *, inner_steps: int, fragments: int) -> int | None:
    """Return the fragment that is due after some inner steps; each is due once in `inner_steps`, at even distances.

    >>> [due_fragment(step, inner_steps=4, fragments=2) for step in range(1, 9)]
    [None, 0, None, 1, None, 0, None, 1]
    """
    place = (inner_step - 1) % inner_steps + 1
    ends = [(number + 1) * inner_steps // fragments for number in range(fragments)]
    return ends.index(place) if inner_step > 0 and place in ends else None
