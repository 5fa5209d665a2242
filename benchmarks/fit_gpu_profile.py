"""Fit the profile `phalanx` to steps of the compiled trainer, on one half of them, and report on the other half.

    python benchmarks/fit_gpu_profile.py RESULT.jsonl [MORE.jsonl ...] [--write] [--table OUT.md]

Reads what `benchmarks/gpu_profile.py` wrote; a later line of a configuration replaces an earlier one. Only the scalars
of FITTED move, each with a log-normal prior; the physics of `physics.toml` is left alone. The widths of the 80 %
interval come from the errors of the fitting half too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

sys.path.insert(0, str(Path(__file__).parent))

from gpu_profile import Configuration, plan_of

from phalanx.plan.case_columns import build_cases, layout_columns
from phalanx.plan.cases import Cases
from phalanx.plan.physics import Profile, shipped_physics, shipped_profiles
from phalanx.plan.prediction import feature_widths, interval_features, step_interval
from phalanx.plan.request import PlanRequest, request_from_job
from phalanx.plan.step import StepTimes, predict_step

START = "pytorch"  # the profile this one begins as: eager PyTorch on the same card
FITTED = {  # value, log width of the prior
    "gemm": (1.0, 0.08),
    "elementwise": (1.0, 0.35),
    "flash": (1.6, 0.25),
    "expert": (1.0, 0.3),
    "loss": (0.5, 0.5),
    "cast": (2.5, 0.6),  # rounded along rows and, in two passes, along columns: 3 + 5 bytes where the constant has 3
    "launch_s": (2.5e-5, 0.6),
    "launch_sharpness": (6.0, 0.5),
    "narrow_kernels": (1.5, 0.6),
    "micro_s": (1e-3, 0.8),
    "step_s": (2e-3, 0.8),
    "optimizer_bytes": (40.0, 0.3),
    "accumulate_bytes": (10.0, 0.3),  # a 16-bit gradient is read and added to one in fp32: 2 + 4 + 4 bytes
}
FIXED = {  # read off the code
    "narrow_share": 1.0,  # train/parallel/float8.py: all three products
    "selective_attention": 0.0,  # train/parallel/recompute.py: attention and matrices are kept …
    "selective_streams": 1.0 / float(shipped_physics().selective),  # … and everything else is done again
    "early_stop": 1.0,  # torch.utils.checkpoint
    # Fitted on 16 November, when layers that recompute were not compiled (benchmarks/2026-11-16-h200-profile.md).
    "plain_elementwise": 2.586,
    "plain_cast": 1.455,
}
MORE = (
    "loss", "cast", *FIXED, "launch_sharpness", "narrow_kernels", "accumulate_bytes",
)  # fmt: skip
SCALE = 0.03  # errors below count squared, above linearly
LEAST_SCALE = 0.3


class Case:
    """A measured configuration as the planner sees it."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.name, self.held_back, self.issue = found["name"], found["held_back"], found["issue"]
        self.step_s, self.before_s = found["step_s"], found["predicted_s"]
        self.before = found["predicted_low_s"] <= found["step_s"] <= found["predicted_high_s"]
        keys = Configuration.__dataclass_fields__
        configuration = Configuration(**{key: value for key, value in found.items() if key in keys})
        with tempfile.TemporaryDirectory() as folder:
            plan = plan_of(configuration, "1xH200", "dataset", Path(folder))
        self.request: PlanRequest = request_from_job(plan.job, plan.cluster)[0]
        self.layout = plan.layout
        shipped = shipped_profiles()["phalanx"] if "phalanx" in shipped_profiles() else shipped_profiles()[START]
        # What the job's optimizer adds to a profile; the fit moves the profile below it.
        self.extra_bytes = float(self.request.profile.optimizer_bytes) - float(shipped.optimizer_bytes)
        self.newton_schulz = self.request.profile.newton_schulz

        self.table = build_cases(self.request, layout_columns([self.layout]))


class Batch:
    """Several cases as one table, so that a fit prices them at once."""

    def __init__(self, members: Sequence[Case]) -> None:
        def column(name: str) -> np.ndarray:
            return np.array([float(np.ravel(getattr(one.table, name))[0]) for one in members])

        self.table = Cases(**{item.name: column(item.name) for item in dataclasses.fields(Cases)})
        self.step_s = np.array([one.step_s for one in members])
        self._extra = np.array([one.extra_bytes for one in members])
        self._newton = np.array([float(one.newton_schulz) for one in members])

    def times(self, profile: Profile) -> StepTimes:
        """The steps under a profile."""
        own = replace(profile, optimizer_bytes=profile.optimizer_bytes + self._extra, newton_schulz=self._newton)
        return predict_step(self.table, shipped_physics(), own)


def profile_of(logs: np.ndarray, only: str) -> Profile:
    """The profile of logarithms of the fitted scalars over their priors; `only` one, the others are as shipped."""
    names = [only] if only else list(FITTED)
    values = {name: FITTED[name][0] * float(np.exp(log)) for name, log in zip(names, logs, strict=True)}
    if only:
        return replace(shipped_profiles()["phalanx"], **values)
    return replace(shipped_profiles()[START], **values, **FIXED)


def fit(members: list[Case], only: str) -> np.ndarray:
    """The most probable scalars, as logarithms over their priors."""
    widths = np.array([FITTED[only][1]] if only else [width for _, width in FITTED.values()])
    batch = Batch(members)

    def residuals(logs: np.ndarray) -> np.ndarray:
        profile = profile_of(logs, only)
        errors = np.log(batch.times(profile).step_s / batch.step_s) / SCALE
        soft = np.sign(errors) * np.sqrt(2.0 * (np.sqrt(1.0 + errors**2) - 1.0))
        return np.concatenate([soft, logs / widths])

    found = least_squares(residuals, np.zeros(len(widths)), diff_step=1e-3, ftol=1e-5)
    return found.x


def scales(members: list[Case], profile: Profile) -> tuple[float, float]:
    """Factors on the common widths (uncertainty.toml): a tenth of the errors beyond each side, and more for the fit.

    Errors of a fit are smaller than those of new rows by about √((n - p) / n); of the scalars half count as fitted, the
    others stay near their priors.
    """
    below, above = feature_widths()
    batch = Batch(members)
    times = batch.times(profile)
    errors = np.log(batch.step_s / times.step_s) * np.sqrt(len(members) / (len(members) - len(FITTED) / 2.0))
    table = interval_features(batch.table, times)
    share = min(1.0, 0.9 * (1.0 + 1.0 / len(members)))  # of a new row, as in conformal prediction
    low, high = np.quantile(-errors / (table @ below), share), np.quantile(errors / (table @ above), share)
    return max(LEAST_SCALE, float(low)), max(LEAST_SCALE, float(high))


def report(members: list[Case], profile: Profile) -> str:
    """A line per configuration, and the summary of both halves."""
    lines = [
        "| configuration | half | measured | predicted before | | predicted now | | 80 % interval | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    summary = []
    for half in (False, True):
        errors, inside = [], []
        for one in (case for case in members if case.held_back is half):
            alone = Batch([one])
            times = alone.times(profile)
            step_s = float(times.step_s[0])
            low, high = (float(side[0]) for side in step_interval(alone.table, times, "phalanx"))
            errors.append(abs(step_s / one.step_s - 1.0))
            inside.append(low <= one.step_s <= high)
            issue = f" (issue: {one.issue})" if one.issue else ""
            lines.append(
                f"| {one.name}{issue} | {'held back' if half else 'fit'} | "
                f"{one.step_s * 1e3:,.0f} ms | {one.before_s * 1e3:,.0f} ms | {one.before_s / one.step_s - 1:+.0%} | "
                f"{step_s * 1e3:,.0f} ms | {step_s / one.step_s - 1:+.1%} | {low * 1e3:,.0f} to {high * 1e3:,.0f} ms | "
                f"{'inside' if inside[-1] else 'outside'} |"
            )
        before = [abs(one.before_s / one.step_s - 1.0) for one in members if one.held_back is half]
        covered = np.mean([one.before for one in members if one.held_back is half])
        summary.append(
            f"{'held back' if half else 'fit'}: {len(errors)} configurations, median {np.median(errors):.1%}, p90 "
            f"{np.quantile(errors, 0.9):.1%}, interval covers {np.mean(inside):.0%} (before: {np.median(before):.1%}, "
            f"{np.quantile(before, 0.9):.1%}, {covered:.0%})"
        )
    return "\n".join([*summary, "", *lines])


def write(profile: Profile, widths: tuple[float, float] | None) -> None:
    """Put the profile and its widths into the package's tables; None keeps the widths."""
    folder = Path(__file__).parent.parent / "src/phalanx/plan"
    tables = [("physics.toml", "profile.phalanx", {key: getattr(profile, key) for key in _written(profile)})]
    if widths is not None:
        tables.append(("uncertainty.toml", "scale.phalanx", {"below": widths[0], "above": widths[1]}))
    for name, section, values in tables:
        text = (folder / name).read_text(encoding="utf-8")
        block = f"[{section}]\n" + "".join(f"{key} = {float(value):.4g}\n" for key, value in values.items()) + "\n"
        text = re.sub(rf"\[{re.escape(section)}\]\n(?:[^\[\n]+\n)*\n?", "", text)
        default = f"[{section.split('.')[0]}.default]"
        (folder / name).write_text(text.replace(default, block + default), encoding="utf-8")


def _written(profile: Profile) -> list[str]:
    unlike = Profile()
    known = re.search(r"\[profile\.default\]\n((?:.+\n)+)", _physics_text())
    shipped = [line.split(" = ")[0] for line in known.group(1).splitlines()] if known else []
    more = [name for name in MORE if name not in shipped]
    return [*shipped, *(name for name in more if getattr(profile, name) != getattr(unlike, name))]


def _physics_text() -> str:
    return (Path(__file__).parent.parent / "src/phalanx/plan/physics.toml").read_text(encoding="utf-8")


def main() -> None:
    """Fit, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--table", type=Path, help="write the table as Markdown")
    parser.add_argument("--check", action="store_true", help="fit nothing: report on the shipped profile")
    parser.add_argument("--only", choices=tuple(FITTED), default="", help="fit this one; the others stay as shipped")
    args = parser.parse_args()
    lines = [json.loads(line) for path in args.results for line in path.read_text(encoding="utf-8").splitlines()]
    found = {one["name"]: one for one in lines if one["status"] == "ok"}
    members = [Case(one) for one in found.values()]
    fitting = [one for one in members if not one.held_back]
    logs = None if args.check else fit(fitting, args.only)
    profile = shipped_profiles()["phalanx"] if logs is None else profile_of(logs, args.only)
    if not args.check:
        print({name: float(f"{getattr(profile, name):.4g}") for name in FITTED})
    if args.write and logs is not None:
        write(profile, None if args.only else scales(fitting, profile))
        from phalanx.plan.physics import shipped_table
        from phalanx.plan.prediction import _uncertainty_table

        for kept in (shipped_table, shipped_profiles, _uncertainty_table):
            kept.cache_clear()
        profile = shipped_profiles()["phalanx"]
    page = report(members, profile)
    print(page)
    if args.table:
        args.table.write_text(page + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
