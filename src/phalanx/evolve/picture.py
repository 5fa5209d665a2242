"""The grid of an archive as text and as an SVG file: one cell for the best candidate of each combination of axes."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape
from typing import Any

from phalanx.evolve.archive import Archive
from phalanx.io.style import REPORT_CSS
from phalanx.io.svg import svg_element

SHADES = ".:-=+*#%@"  # from the least fit to the fittest
CELL_WIDTH, CELL_HEIGHT = 44, 26
LEFT, TOP, BOTTOM = 120, 54, 96


def grid_text(archive: Archive) -> str:
    """Draw the grid in characters: the first axis upwards, the second to the right, the fittest cells darkest."""
    rows_axis, columns_axis = archive.axes
    shares = _shares(archive)
    width = max(len(label) for label in rows_axis.labels)
    lines = [f"{rows_axis.name} (up) × {columns_axis.name} (right), {SHADES[0]} slow to {SHADES[-1]} fast"]
    for row in reversed(range(rows_axis.size)):
        marks = "".join(_mark(shares.get((row, column))) for column in range(columns_axis.size))
        lines.append(f"{rows_axis.labels[row]:>{width}} |{marks}|")
    lines.append(f"{'':>{width}}  {columns_axis.labels[0]} … {columns_axis.labels[-1]}")
    return "\n".join(lines)


def _mark(share: float | None) -> str:
    """Return the character of a cell: a space where it is empty."""
    return " " if share is None else SHADES[min(len(SHADES) - 1, int(share * len(SHADES)))]


def _shares(archive: Archive) -> dict[tuple[int, int], float]:
    """Scale the fitness of each filled cell to 0 (lowest) … 1 (highest), by its logarithm where all are positive."""
    values = {cell: archive.entries[number].fitness for cell, number in archive.elites.items()}
    if not values:
        return {}
    if all(value > 0 for value in values.values()):
        values = {cell: math.log(value) for cell, value in values.items()}
    low, high = min(values.values()), max(values.values())
    return {cell: (value - low) / (high - low) if high > low else 1.0 for cell, value in values.items()}


def grid_svg(archive: Archive, *, title: str, show: Callable[[float], str]) -> str:
    """Draw the grid as a complete SVG document; a cell's tooltip shows its fitness."""
    rows_axis, columns_axis = archive.axes
    shares = _shares(archive)
    width = LEFT + CELL_WIDTH * columns_axis.size + 16
    height = TOP + CELL_HEIGHT * rows_axis.size + BOTTOM
    parts = [
        f"<style>{REPORT_CSS.replace('<', '')}</style>",
        svg_element("rect", width="100%", height="100%", fill="var(--ground, #fff)"),
        _label(title, x=16, y=24, font_size=15),
        _label(f"up: {rows_axis.name}; right: {columns_axis.name}", x=16, y=42, font_size=11),
    ]
    for row in range(rows_axis.size):
        y = TOP + CELL_HEIGHT * (rows_axis.size - 1 - row)
        parts.append(_label(rows_axis.labels[row], x=LEFT - 8, y=y + 17, font_size=11, text_anchor="end"))
        for column in range(columns_axis.size):
            x, share = LEFT + CELL_WIDTH * column, shares.get((row, column))
            box: dict[str, Any] = {"x": x, "y": y, "width": CELL_WIDTH - 2, "height": CELL_HEIGHT - 2}
            if share is None:
                parts.append(svg_element("rect", **box, fill="none", stroke="#8884"))
                continue
            best = archive.entries[archive.elites[row, column]].fitness
            words = f"{show(best)}; {rows_axis.labels[row]}; {columns_axis.labels[column]}"
            colour = f"hsl({225 - 185 * share:.0f} 75% {35 + 25 * share:.0f}%)"
            parts.append(svg_element("rect", svg_element("title", escape(words)), **box, fill=colour))
    for column in range(columns_axis.size):
        x, y = LEFT + CELL_WIDTH * column + 14, height - BOTTOM + 14
        parts.append(_label(columns_axis.labels[column], x=x, y=y, font_size=11, transform=f"rotate(50 {x} {y})"))
    return svg_element(
        "svg",
        "".join(parts),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
        role="img",
        aria_label=f"{title}: {len(shares)} of {rows_axis.size * columns_axis.size} cells filled",
    )


def _label(text: str, **attributes: object) -> str:
    return svg_element("text", escape(text), fill="var(--ink, #222)", font_family="sans-serif", **attributes)
