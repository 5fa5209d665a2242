"""Every accelerator Phalanx knows, the ones a person adds, and documented figures where nobody published one."""

from __future__ import annotations

import functools
import importlib.resources
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.errors import UserError, mistake, nearest
from phalanx.hardware.aliases import ALIASES, squeeze
from phalanx.hardware.types import Accelerator
from phalanx.hardware.userfile import load_accelerators, parse_table

# Best measured bf16 matmul over dense peak, by family; rows of data/accelerators.csv that carry both, which come from
# stas00/ml-engineering (2026-08): A100 271.2/312, H100 794.5/989, B200 1745/2250, MI300X 668.4/1300, MI355X 1565/2500,
# Gaudi2 418.7/432, Gaudi3 1243/1677.
MATMUL_FRACTION = {
    "ampere": 0.87,
    "hopper": 0.80,
    "blackwell": 0.78,
    "cdna3": 0.51,
    "cdna4": 0.63,
    "gaudi2": 0.97,
    "gaudi3": 0.74,
}
# The same for fp8: H100 1402.6/1979, B200 3432.5/4500, Gaudi2 826.5/865, Gaudi3 1289.5/1677.
MATMUL_FRACTION_FP8 = {"hopper": 0.71, "blackwell": 0.76, "gaudi2": 0.96, "gaudi3": 0.77}
# A part nobody measured that shares its die with one somebody did (same family, peak within SIBLING_PEAK) is scaled by
# the square root of their power limits: dynamic power grows with f·V² and V with f, so f ~ P^(1/3..1/2).
SIBLING_PEAK = 0.02
# AMD parts without a row of their own: median of MI300X 0.51, MI325X 0.60, MI355X 0.63.
# TPUs: MaxText reports whole training steps at 66 to 70 % of peak on v5p (README, 2024-04), so their systolic matmuls
# alone must reach well over that; nobody published the figure, and 0.88 makes our plans end there too.
MATMUL_FRACTION_BY_VENDOR = {"amd": 0.60, "google": 0.88}
MATMUL_FRACTION_DEFAULT = 0.78  # median over the 13 measured rows of the table


def find(
    name: str, *, files: Sequence[Path] = (), environ: Mapping[str, str] | None = None, where: str = ""
) -> Accelerator:
    """The accelerator a name means: catalogue name, alias, or what the driver prints; a user's own files come first.

    >>> find("NVIDIA H100 80GB HBM3").name, find("v5p").name
    ('H100-80GB-SXM', 'TPU-v5p')
    """
    known = {squeeze(entry.name): entry for entry in accelerators(files=files, environ=environ)}
    short = squeeze(name)
    entry = known.get(short) or known.get(squeeze(ALIASES.get(short, "")))
    if entry is not None:
        return entry
    raise _unknown(name, [entry.name for entry in known.values()], where)


def accelerators(*, files: Sequence[Path] = (), environ: Mapping[str, str] | None = None) -> tuple[Accelerator, ...]:
    """All known accelerators; a user's entry replaces a shipped one of the same name."""
    merged = {entry.name: entry for entry in shipped()}
    for path in (*user_files(environ), *files):
        merged.update({entry.name: entry for entry in load_accelerators(path)})
    return tuple(merged.values())


@functools.cache
def shipped() -> tuple[Accelerator, ...]:
    """The accelerators that come with Phalanx."""
    path = Path("phalanx/hardware/data/accelerators.csv")
    return parse_table(data_text("accelerators.csv"), path)


def data_text(name: str) -> str:
    """The text of a data file that ships with this package."""
    return (importlib.resources.files("phalanx.hardware") / "data" / name).read_text(encoding="utf-8")


def user_files(environ: Mapping[str, str] | None = None) -> tuple[Path, ...]:
    """Hardware files a person keeps: `$PHALANX_HARDWARE` (several, joined like PATH), else the one in ~/.config."""
    env = os.environ if environ is None else environ
    named = env.get("PHALANX_HARDWARE", "")
    if named:
        return tuple(Path(part) for part in named.split(os.pathsep) if part)
    home = env.get("XDG_CONFIG_HOME") or (os.path.join(env["HOME"], ".config") if env.get("HOME") else "")
    usual = Path(home) / "phalanx" / "accelerators.toml"
    return (usual,) if home and usual.is_file() else ()


def matmul_flops(accelerator: Accelerator, precision: str = "bf16") -> float:
    """Best sustained matmul rate in FLOP/s: the measured one, else a documented fraction of peak; 0 if unsupported.

    >>> f"{matmul_flops(find('H100')):.4g}", f"{matmul_flops(find('GB300')):.4g}", matmul_flops(find("A100"), "fp8")
    ('7.945e+14', '1.968e+15', 0.0)
    """
    if precision in ("bf16", "fp16"):
        return (
            accelerator.matmul_bf16_flops
            or sibling_matmul(accelerator, "bf16")
            or accelerator.peak_bf16_flops * matmul_fraction(accelerator)
        )
    if precision == "fp8":
        return (
            accelerator.matmul_fp8_flops
            or sibling_matmul(accelerator, "fp8")
            or accelerator.peak_fp8_flops * matmul_fraction(accelerator, "fp8")
        )
    if precision == "fp4":  # nobody published one: as far below its peak as fp8
        if accelerator.peak_fp8_flops <= 0:
            return 0.0
        return matmul_flops(accelerator, "fp8") * accelerator.peak_fp4_flops / accelerator.peak_fp8_flops
    if precision == "fp32":
        return accelerator.peak_fp32_flops * matmul_fraction(accelerator)
    near = nearest(precision, ["bf16", "fp16", "fp8", "fp4", "fp32"])
    raise ValueError(f"precision {precision!r} is none of bf16, fp16, fp8, fp4, fp32 (nearest: {near or 'bf16'})")


def sibling_matmul(accelerator: Accelerator, precision: str) -> float:
    """The measured rate of a shipped part with the same die, scaled by power; 0 when there is none."""

    def figures(entry: Accelerator) -> tuple[float, float]:
        if precision == "fp8":
            return entry.peak_fp8_flops, entry.matmul_fp8_flops
        return entry.peak_bf16_flops, entry.matmul_bf16_flops

    peak, _ = figures(accelerator)
    if peak <= 0 or accelerator.tdp_w <= 0:
        return 0.0
    for entry in shipped():
        other_peak, measured = figures(entry)
        same_die = entry.family == accelerator.family and abs(other_peak / peak - 1.0) <= SIBLING_PEAK
        if same_die and measured > 0 and entry.tdp_w > 0:
            return measured * float((accelerator.tdp_w / entry.tdp_w) ** 0.5)
    return 0.0


def matmul_fraction(accelerator: Accelerator, precision: str = "bf16") -> float:
    """The share of peak a good matmul reaches on this family, for devices without a measurement of their own."""
    fp8 = precision == "fp8"
    if fp8 and accelerator.family in MATMUL_FRACTION_FP8:
        return MATMUL_FRACTION_FP8[accelerator.family]
    by_vendor = MATMUL_FRACTION_BY_VENDOR.get(accelerator.vendor, MATMUL_FRACTION_DEFAULT)
    return MATMUL_FRACTION.get(accelerator.family, by_vendor)


def _unknown(name: str, names: Sequence[str], where: str) -> UserError:
    near = nearest(name, [*names, *ALIASES])
    meant = ALIASES.get(near, near)
    family = [entry for entry in names if meant and entry.split("-")[0] == meant.split("-")[0]]
    choices = family or ["A100-80GB-SXM", "H100-80GB-SXM", "GB200-NVL72", "MI300X", "TPU-v5p"]
    return mistake(
        where,
        f"unknown accelerator {name[:60]!r}",
        why="its speed, memory and links are not in the catalogue",
        fix=f"did you mean {' or '.join(choices[:4])}? phalanx cluster --list shows all; "
        "add your own in ~/.config/phalanx/accelerators.toml",
    )
