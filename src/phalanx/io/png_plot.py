"""The plots of svg.py as PNG images, drawn with Pillow if it is installed (extra `png`)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from phalanx.errors import mistake
from phalanx.io.svg import PLANNED_STYLE, LinePlot, PlotLine, round_ticks

# PNG pixels per SVG pixel: sharp in print and on dense screens.
SCALE = 2
MARGIN = SCALE * 24  # above a plot, for its title
# Colours of the light page (io/style.py).
PAGE, INK, QUIET, GRID_LINE, AXIS = "#ffffff", "#22262e", "#5c6370", "#efece5", "#e3e0d9"
COLOURS = {"1": "#2b6a99", "2": "#b0701c", "3": "#4a7d5c", "4": "#8a5a9c", PLANNED_STYLE: QUIET}
BAND_OPACITY = 46  # of 255


def has_pillow() -> bool:
    """Return True if Pillow is installed."""
    from importlib.util import find_spec

    return find_spec("PIL") is not None


def check_pillow() -> None:
    """Raise UserError if Pillow is not installed."""
    if not has_pillow():
        raise mistake(
            "PNG", 'needs the Python package "pillow", which is not installed', fix="pip install 'phalanx[png]'"
        )


def png_of_plots(plots: Sequence[LinePlot]) -> bytes:
    """Return one PNG of all plots, one below the other; raise UserError if Pillow is not installed."""
    check_pillow()
    from PIL import Image

    images = [_draw_plot(plot) for plot in plots]
    combined = Image.new("RGB", (images[0].width, sum(image.height for image in images)), PAGE)
    top = 0
    for image in images:
        combined.paste(image, (0, top))
        top += image.height
    data = io.BytesIO()
    combined.save(data, format="PNG", optimize=True)
    return data.getvalue()


def _draw_plot(plot: LinePlot) -> Any:
    from PIL import Image, ImageDraw, ImageFont

    width, height = (SCALE * pixels for pixels in plot.size)
    picture = Image.new("RGB", (width, height + MARGIN), PAGE)
    pen = ImageDraw.Draw(picture, "RGBA")
    small, large = ImageFont.load_default(SCALE * 10), ImageFont.load_default(SCALE * 12)
    x_scale, y_scale = plot.scales()

    def at(x: float, y: float) -> tuple[float, float]:
        return SCALE * x_scale.at(x), SCALE * y_scale.at(y) + MARGIN

    x_begin, x_end = SCALE * x_scale.begin, SCALE * x_scale.end
    pen.text((x_begin, MARGIN / 2), plot.title, font=large, fill=INK, anchor="lm")
    for value in round_ticks(y_scale.low, y_scale.high):
        y = at(0.0, value)[1]
        pen.line([(x_begin, y), (x_end, y)], fill=GRID_LINE, width=SCALE)
        pen.text((x_begin - 6 * SCALE, y), plot.show(value), font=small, fill=QUIET, anchor="rm")
    base = SCALE * y_scale.begin + MARGIN
    for value in round_ticks(x_scale.low, x_scale.high):
        text = plot.show_x(value)
        half = small.getlength(text) / 2
        # The last label would be cut off at the edge.
        x = min(at(value, 0.0)[0], width - half)
        pen.text((x, base + 10 * SCALE), text, font=small, fill=QUIET, anchor="mm")
    pen.line([(x_begin, base), (x_end, base)], fill=AXIS, width=SCALE)
    for line in plot.lines:
        _draw_series(pen, line, at)
    return picture


def _draw_series(pen: Any, line: PlotLine, at: Any) -> None:
    colour = COLOURS.get(line.style, INK)
    rows = [
        (x, low, high)
        for x, low, high in zip(line.x, line.low, line.high, strict=False)
        if low is not None and high is not None
    ]
    if len(rows) > 1:
        outline = [at(x, high) for x, _, high in rows] + [at(x, low) for x, low, _ in reversed(rows)]
        faint = tuple(int(colour[place : place + 2], 16) for place in (1, 3, 5))
        pen.polygon(outline, fill=(*faint, BAND_OPACITY))
    points = [at(x, y) for x, y in zip(line.x, line.mean, strict=False) if y is not None]
    if line.dots or len(points) == 1:
        for x, y in points:
            pen.ellipse([x - 3 * SCALE, y - 3 * SCALE, x + 3 * SCALE, y + 3 * SCALE], fill=colour)
    elif line.style == PLANNED_STYLE:  # dashed: every second segment
        for begin, end in list(pairwise(points))[::2]:
            pen.line([begin, end], fill=colour, width=SCALE)
    else:
        pen.line(points, fill=colour, width=SCALE * 2, joint="curve")
