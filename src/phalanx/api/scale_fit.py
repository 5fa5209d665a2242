"""Fit a scaling law to a table of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.api.results import PublicResult
from phalanx.errors import mistake, nearest
from phalanx.io.codec import json_text, json_values
from phalanx.io.files import write_text
from phalanx.io.path_probes import is_folder
from phalanx.io.write_errors import write_failure
from phalanx.scale.fit_result import ScalingFit
from phalanx.scale.points import COUNTED, FLOPS_COUNTED, ScalingPoints, TableOptions

LEAST_DRAWS, MOST_DRAWS = 20, 20_000


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class FittedLaw(PublicResult):
    """A law with its intervals; `write` saves it for allocate and predict.

    >>> phalanx.scale.fit("runs.csv").write_plots("plots")  # doctest: +SKIP
    """

    fit: ScalingFit
    points: ScalingPoints

    def __str__(self) -> str:
        from phalanx.scale.fit_text import fit_text

        return fit_text(self.fit)

    def to_dict(self) -> dict[str, Any]:
        """Return the fit, as `write` writes it."""
        return dict(json_values(self.fit))

    def write_plots(self, path: str | Path) -> tuple[str, ...]:
        """Write IsoFLOP curves, residuals and the frontier; return the files' names.

        Into a folder as SVG, and as PNG too if Pillow is installed; or, if `path` ends in .png or .svg, all three into
        that one file.
        """
        from phalanx.io.png_plot import has_pillow, png_of_plots
        from phalanx.io.svg import stacked_svgs, standalone_svg
        from phalanx.scale.plots import fit_pictures

        check_plots(path)
        target, pictures = Path(path), fit_pictures(self.fit, self.points)
        kind = target.suffix.lower()
        if kind == ".png":
            _write_picture(target, png_of_plots(list(pictures.values())))
            return (target.name,)
        if kind == ".svg":
            combined = standalone_svg(stacked_svgs([picture.to_svg() for picture in pictures.values()]))
            _write_picture(target, f"{combined}\n".encode())
            return (target.name,)
        try:
            target.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_failure(target, error, fix="name a writable folder") from error
        names = []
        for name, picture in pictures.items():
            _write_picture(target / f"{name}.svg", f"{standalone_svg(picture.to_svg())}\n".encode())
            names.append(f"{name}.svg")
            if has_pillow():
                _write_picture(target / f"{name}.png", png_of_plots([picture]))
                names.append(f"{name}.png")
        return tuple(names)

    def write(self, path: str | Path) -> None:
        """Write the file that `allocate` and `predict` read."""
        write_text(Path(path), json_text(self.fit, indent=1) + "\n", fix="name another --out")


OTHER_PICTURES = frozenset({".gif", ".jpg", ".jpeg", ".pdf", ".webp", ".eps", ".ps", ".tiff", ".bmp"})


def check_plots(path: str | Path) -> None:
    """Raise UserError for a path that `write_plots` cannot write to; called before the fit, which takes longer."""
    from phalanx.io.png_plot import check_pillow

    target = Path(path)
    kind = target.suffix.lower()
    if kind in OTHER_PICTURES:
        raise mistake(
            str(target), f"{kind} is no format of these pictures", fix="name a folder, or a .svg or .png file"
        )
    if kind == ".png":
        check_pillow()


def _write_picture(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise write_failure(path, error, needed_bytes=len(data), fix="name another place with --plots") from error


def fit(
    source: str | Path,
    *,
    method: str = "vpnls",
    columns: Mapping[str, str] | None = None,
    where: Mapping[str, str] | None = None,
    params_counted: str = "unstated",
    flops_counted: str = "",
    drop_highest: int = 0,
    drop: Sequence[int] = (),
    mixed: bool = False,
    repeated: bool = False,
    draws: int = 400,
    seed: int = 0,
) -> FittedLaw:
    """Fit a scaling law to a CSV table, a run folder or a folder of runs.

    `method` is vpnls, huber3, isoflop, kaplan, overtrain or data-constrained. `columns` maps Phalanx's column names to
    the table's, `where` picks rows by their values, `drop` leaves out lines of the file. `draws` is the number of
    resamples for intervals (at least 20; 0 for no intervals), made from `seed`. Raises UserError for points that no
    law can be fitted to.

    >>> law = phalanx.scale.fit("runs.csv", method="huber3")  # doctest: +SKIP
    >>> law.write("law.json")  # doctest: +SKIP
    """
    from phalanx.scale.fit_points import METHODS, fit_law
    from phalanx.scale.points import read_points

    for option, value, choices in (
        ("--method", method, METHODS),
        ("--params-counted", params_counted, COUNTED),
        ("--flops-counted", flops_counted, {"": "", **FLOPS_COUNTED}),
    ):
        if value not in choices:
            close = nearest(value, choices)
            fix = f"did you mean {close}?" if close else f"use {', '.join(choice for choice in choices if choice)}"
            raise mistake(option, f'"{value[:40]}" is not known', fix=fix)
    if draws != 0 and not LEAST_DRAWS <= draws <= MOST_DRAWS:
        message = f"{draws} is neither 0 nor in {LEAST_DRAWS} to {MOST_DRAWS:,}"
        raise mistake("--draws", message, why="fewer say nothing of an interval", fix="use 400, or 0 for no intervals")
    if seed < 0:
        raise mistake("--seed", f"{seed} is negative", fix="give 0 or more")
    options = TableOptions(
        columns=columns or {},
        where=where or {},
        params_counted=params_counted,
        flops_counted=flops_counted,
        drop_highest=drop_highest,
        drop=tuple(drop),
        mixed=mixed,
        repeated=repeated,
    )
    path = Path(source)
    if is_folder(path):
        from phalanx.scale.run_points import read_run_points

        points = read_run_points(path, options)
    else:
        points = read_points(path, options)
    return FittedLaw(fit=fit_law(points, method=method, draws=draws, seed=seed), points=points)
