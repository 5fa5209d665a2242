"""Plots of a run's values over its steps, which a notebook shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.record.run import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlot:
    """The plots of some values of a run."""

    names: tuple[str, ...]
    svgs: tuple[str, ...]  # an empty text for a value that was not recorded

    def __repr__(self) -> str:
        return f"<RunPlot: {', '.join(self.names)}>"

    def _repr_html_(self) -> str:
        from phalanx.io.notebook import document_as_html
        from phalanx.io.style import REPORT_CSS

        figures = "".join(
            f"<figure><figcaption><b>{name}</b></figcaption>{svg}</figure>"
            for name, svg in zip(self.names, self.svgs, strict=True)
        )
        return document_as_html(f'<style>{REPORT_CSS}</style><div class="plots">{figures}</div>', height=320)


def plot_run(run: Run, names: Sequence[str], *, rank: int | None) -> RunPlot:
    """Plot each value: its mean over the steps, between its minimum and maximum."""
    from phalanx.io.svg import PlotLine, axis_format, line_plot
    from phalanx.record.archive.history import RunHistory

    history = RunHistory.open(run)
    svgs = []
    for name in names:
        curve = history.curve(name, rank=rank)
        line = PlotLine(label=name, x=curve.step, mean=curve.mean, low=curve.low, high=curve.high, style="1")
        svgs.append(line_plot(name, [line], show=axis_format(curve.unit)))
    return RunPlot(names=tuple(names), svgs=tuple(svgs))
