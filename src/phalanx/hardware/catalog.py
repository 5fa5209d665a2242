"""The catalogue of accelerators with their aliases, and accelerators that a user adds in a file.

Values without a published source are documented estimates.
"""

from __future__ import annotations

import csv
import functools
import io
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import MOST_UNKNOWN, Problem, UserError, mistake, nearest
from phalanx.hardware.types import Accelerator
from phalanx.io.files import csv_columns, read_text, shipped_text
from phalanx.io.limits import MAX_RANKS
from phalanx.io.path_probes import is_file
from phalanx.io.toml import TomlFile, read_toml
from phalanx.units import GIB

# Best measured bf16 matmul over dense peak, by family; rows of data/accelerators.csv that have both, which come from
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
# A device without a measurement that shares its die with a measured one (same family, peak within SIBLING_PEAK) is
# scaled by the square root of their power limits: dynamic power grows with f·V² and V with f, so f ~ P^(1/3..1/2).
SIBLING_PEAK = 0.02
# AMD devices without a measurement: median of MI300X 0.51, MI325X 0.60, MI355X 0.63. TPUs: MaxText reports whole
# training steps at 66 to 70 % of peak on v5p (README, 2024-04), so their systolic matmuls alone must reach well over
# that; no figure is published, and with 0.88 our plans reach the same share.
MATMUL_FRACTION_BY_VENDOR = {"amd": 0.60, "google": 0.88}
MATMUL_FRACTION_DEFAULT = 0.78  # median over the 13 measured rows of the table


def find_accelerator(
    name: str, *, files: Sequence[Path] = (), environ: Mapping[str, str] | None = None, where: str = ""
) -> Accelerator:
    """Return the accelerator of a name: catalogue name, alias, or driver's name; entries in a user's files come first.

    >>> find_accelerator("NVIDIA H100 80GB HBM3").name, find_accelerator("v5p").name
    ('H100-80GB-SXM', 'TPU-v5p')
    """
    entries_by_name = {squeeze_name(entry.name): entry for entry in accelerators(files=files, environ=environ)}
    short = squeeze_name(name)
    entry = entries_by_name.get(short) or entries_by_name.get(squeeze_name(ALIASES.get(short, "")))
    if entry is not None:
        return entry
    raise _unknown_accelerator(name, [entry.name for entry in entries_by_name.values()], where)


def accelerators(*, files: Sequence[Path] = (), environ: Mapping[str, str] | None = None) -> tuple[Accelerator, ...]:
    """Return all known accelerators; a user's entry replaces a shipped one of the same name."""
    merged = {entry.name: entry for entry in shipped_accelerators()}
    for path in (*user_files(environ), *files):
        merged.update({entry.name: entry for entry in load_accelerators(path)})
    return tuple(merged.values())


@functools.cache
def shipped_accelerators() -> tuple[Accelerator, ...]:
    """Return the accelerators that ship with Phalanx."""
    path = Path("phalanx/hardware/data/accelerators.csv")
    return parse_table(data_text("accelerators.csv"), path)


def data_text(name: str) -> str:
    """Return the text of a data file that ships with this package."""
    return shipped_text(__file__, f"data/{name}")


def user_files(environ: Mapping[str, str] | None = None) -> tuple[Path, ...]:
    """Return a user's hardware files: `$PHALANX_HARDWARE` (several, joined like PATH), else the one in ~/.config."""
    env = os.environ if environ is None else environ
    paths_text = env.get("PHALANX_HARDWARE", "")
    if paths_text:
        return tuple(Path(name) for name in paths_text.split(os.pathsep) if name)
    home = env.get("XDG_CONFIG_HOME") or (os.path.join(env["HOME"], ".config") if env.get("HOME") else "")
    default_path = Path(home) / "phalanx" / "accelerators.toml"
    return (default_path,) if home and is_file(default_path) else ()


def matmul_flops(accelerator: Accelerator, precision: str = "bf16") -> float:
    """Return the best sustained matmul rate in FLOP/s; 0 if the device does not support the precision.

    It is the measured rate, else a documented fraction of the peak.

    >>> [f"{matmul_flops(find_accelerator(name)):.4g}" for name in ("H100", "GB300")]
    ['7.945e+14', '1.968e+15']
    >>> matmul_flops(find_accelerator("A100"), "fp8")
    0.0
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
    # No measured rate is published: assume the same share of its peak as for fp8.
    if precision == "fp4":
        if accelerator.peak_fp8_flops <= 0:
            return 0.0
        return matmul_flops(accelerator, "fp8") * accelerator.peak_fp4_flops / accelerator.peak_fp8_flops
    if precision == "fp32":
        return accelerator.peak_fp32_flops * matmul_fraction(accelerator)
    suggestion = nearest(precision, ["bf16", "fp16", "fp8", "fp4", "fp32"])
    raise ValueError(f"precision {precision!r} is none of bf16, fp16, fp8, fp4, fp32 (nearest: {suggestion or 'bf16'})")


def sibling_matmul(accelerator: Accelerator, precision: str) -> float:
    """Return the measured rate of a shipped device with the same die, scaled by power; 0 if there is none."""

    def figures(entry: Accelerator) -> tuple[float, float]:
        if precision == "fp8":
            return entry.peak_fp8_flops, entry.matmul_fp8_flops
        return entry.peak_bf16_flops, entry.matmul_bf16_flops

    peak, _ = figures(accelerator)
    if peak <= 0 or accelerator.tdp_w <= 0:
        return 0.0
    for entry in shipped_accelerators():
        other_peak, measured = figures(entry)
        same_die = entry.family == accelerator.family and abs(other_peak / peak - 1.0) <= SIBLING_PEAK
        if same_die and measured > 0 and entry.tdp_w > 0:
            return measured * float((accelerator.tdp_w / entry.tdp_w) ** 0.5)
    return 0.0


def matmul_fraction(accelerator: Accelerator, precision: str = "bf16") -> float:
    """Return the share of peak that a good matmul reaches on this family, for devices without a measurement."""
    fp8 = precision == "fp8"
    if fp8 and accelerator.family in MATMUL_FRACTION_FP8:
        return MATMUL_FRACTION_FP8[accelerator.family]
    by_vendor = MATMUL_FRACTION_BY_VENDOR.get(accelerator.vendor, MATMUL_FRACTION_DEFAULT)
    return MATMUL_FRACTION.get(accelerator.family, by_vendor)


def _unknown_accelerator(name: str, names: Sequence[str], where: str) -> UserError:
    suggestion = nearest(name, [*names, *ALIASES])
    catalogue_name = ALIASES.get(suggestion, suggestion)
    family = [entry for entry in names if catalogue_name and entry.split("-")[0] == catalogue_name.split("-")[0]]
    choices = family or ["A100-80GB-SXM", "H100-80GB-SXM", "GB200-NVL72", "MI300X", "TPU-v5p"]
    return mistake(
        where,
        f"unknown accelerator {name[:60]!r}",
        why="its speed, memory and links are not in the catalogue",
        fix=f"did you mean {' or '.join(choices[:4])}? phalanx cluster --list shows all; "
        "add your own in ~/.config/phalanx/accelerators.toml",
    )


# Aliases: the names that users and drivers give to a device.


# Left: names as users write them, normalised by `squeeze_name`. Right: the catalogue's name. A bare family name means
# the variant in most training clusters: SXM boards, the largest memory.
ALIASES = {
    "p100": "P100-16GB-SXM",
    "v100": "V100-32GB-SXM",
    "v100sxm": "V100-32GB-SXM",
    "v10032gb": "V100-32GB-SXM",
    "v10016gb": "V100-16GB-SXM",
    "v100pcie": "V100-32GB-PCIe",
    "dgx2": "V100-32GB-SXM3",
    "a100": "A100-80GB-SXM",
    "a100sxm": "A100-80GB-SXM",
    "a100sxm4": "A100-80GB-SXM",
    "a10080gb": "A100-80GB-SXM",
    "a10040gb": "A100-40GB-SXM",
    "a100pcie": "A100-80GB-PCIe",
    "a800": "A800-80GB-SXM",
    "h100": "H100-80GB-SXM",
    "h100sxm": "H100-80GB-SXM",
    "h100sxm5": "H100-80GB-SXM",
    "h10080gb": "H100-80GB-SXM",
    "h100pcie": "H100-80GB-PCIe",
    "h10096gb": "H100-96GB-500W",
    "h800": "H800-SXM",
    "h200": "H200-141GB-SXM",
    "h200sxm": "H200-141GB-SXM",
    "gh200": "GH200-96GB",
    "b200": "B200-SXM",
    "b300": "B300-SXM",
    "gb200": "GB200-NVL72",
    "gb300": "GB300-NVL72",
    "rubinannounced": "Rubin",
    "vr200": "Rubin",
    "mi300": "MI300X",
    "mi455xannounced": "MI455X",
    "tpuv6e": "TPU-v6e-Trillium",
    "trillium": "TPU-v6e-Trillium",
    "tpuv7": "TPU-v7-Ironwood",
    "tpu7x": "TPU-v7-Ironwood",
    "ironwood": "TPU-v7-Ironwood",
    "v2": "TPU-v2",
    "v3": "TPU-v3",
    "v4": "TPU-v4",
    "v5e": "TPU-v5e",
    "v5litepod": "TPU-v5e",
    "tpuv5lite": "TPU-v5e",
    "v5p": "TPU-v5p",
    "v6e": "TPU-v6e-Trillium",
    "v7": "TPU-v7-Ironwood",
    "trn1": "Trainium1",
    "trainium": "Trainium1",
    "trn2": "Trainium2",
    "910b": "Ascend-910B",
    "cpu": "CPU-core",
    "core": "CPU-core",
    "3090": "RTX-3090",
    "4090": "RTX-4090",
    "5090": "RTX-5090",
    "a6000": "RTX-A6000",
    # As NVML reports them, after `squeeze_name` has dropped the vendor and the memory technology.
    "a100sxm440gb": "A100-40GB-SXM",
    "a100sxm480gb": "A100-80GB-SXM",
    "a10080gbpcie": "A100-80GB-PCIe",
    "a800sxm480gb": "A800-80GB-SXM",
    "h10080gbhbm3": "H100-80GB-SXM",
    "h10096gbhbm2e": "H100-96GB-500W",
    "v100sxm232gb": "V100-32GB-SXM",
    "v100sxm216gb": "V100-16GB-SXM",
    "v100sxm332gb": "V100-32GB-SXM3",
    "v100pcie32gb": "V100-32GB-PCIe",
    "p100sxm216gb": "P100-16GB-SXM",
    "gh200480gb": "GH200-96GB",
    "gh200144ghbm3e": "GH200-141GB",
}
_VENDORS = re.compile(r"^(nvidia|amd|google|intel|aws|huawei)(corporation)?[\s_-]*", re.IGNORECASE)
_PRODUCT_LINES = re.compile(r"\b(tesla|geforce|instinct|quadro|habana)\b", re.IGNORECASE)


def squeeze_name(name: str) -> str:
    """Return a name without vendor, product line, case or punctuation, for comparison.

    >>> squeeze_name("NVIDIA GeForce RTX 4090"), squeeze_name("H100-80GB-SXM")
    ('rtx4090', 'h10080gbsxm')
    """
    short = _PRODUCT_LINES.sub("", _VENDORS.sub("", name.strip()))
    return re.sub(r"[^a-z0-9]", "", short.lower())


# The keys of hardware files with their scale and bounds; one table per kind of record.


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberField:
    """One key of a file: the attribute it fills, the factor to SI units, and the values that make sense."""

    key: str
    attribute: str
    scale: float = 1.0
    least: float = 0.0
    most: float = 1e6  # in the file's unit
    whole: bool = False
    required: bool = False


ACCELERATOR_FIELDS = (
    NumberField(key="peak_bf16_tflops", attribute="peak_bf16_flops", scale=1e12, least=1e-4, required=True),
    NumberField(key="peak_fp8_tflops", attribute="peak_fp8_flops", scale=1e12),
    NumberField(key="peak_fp4_tflops", attribute="peak_fp4_flops", scale=1e12),
    NumberField(key="peak_fp32_tflops", attribute="peak_fp32_flops", scale=1e12),
    NumberField(key="matmul_bf16_tflops", attribute="matmul_bf16_flops", scale=1e12),
    NumberField(key="matmul_fp8_tflops", attribute="matmul_fp8_flops", scale=1e12),
    # Vendors write GiB of device memory as GB: an "80 GB" H100 reports 81,559 MiB.
    NumberField(key="memory_gib", attribute="memory_bytes", scale=GIB, least=1e-3, required=True),
    NumberField(key="memory_tb_per_s", attribute="memory_bytes_per_s", scale=1e12, least=1e-4, required=True),
    NumberField(key="link_gb_per_s", attribute="link_bytes_per_s", scale=1e9),
    NumberField(key="domain_devices", attribute="domain_devices", least=1, whole=True, required=True),
    NumberField(key="host_devices", attribute="host_devices", least=1, whole=True, required=True),
    NumberField(key="nic_gbps", attribute="nic_bytes_per_s", scale=1e9 / 8),
    NumberField(key="tdp_w", attribute="tdp_w"),
)
ACCELERATOR_TEXTS = ("name", "vendor", "family", "link", "price_item", "source", "notes")

CLUSTER_FIELDS = (
    NumberField(key="domain_devices", attribute="domain_devices", least=1, most=MAX_RANKS, whole=True),
    NumberField(key="domains", attribute="domains", least=1, most=MAX_RANKS, whole=True, required=True),
    NumberField(key="host_devices", attribute="host_devices", least=1, most=MAX_RANKS, whole=True),
    NumberField(key="link_gb_per_s", attribute="link_bytes_per_s", scale=1e9, least=1e-6),
    NumberField(key="nic_gbps", attribute="nic_bytes_per_s", scale=1e9 / 8, least=1e-6),
    NumberField(key="link_latency_us", attribute="link_latency_s", scale=1e-6),
    NumberField(key="nic_latency_us", attribute="nic_latency_s", scale=1e-6),
    NumberField(key="host_memory_gib", attribute="host_memory_bytes", scale=GIB, least=1e-3),
    NumberField(key="failures_per_host_day", attribute="failures_per_host_day", most=24 * 60),
    NumberField(key="power_w_per_device", attribute="power_w_per_device"),
    NumberField(key="pue", attribute="pue", least=1, most=10),
    NumberField(key="grid_gco2_per_kwh", attribute="grid_gco2_per_kwh", most=5000),
    NumberField(key="disk_gb_per_s", attribute="disk_bytes_per_s", scale=1e9, least=1e-6),
    NumberField(key="matmul_tflops", attribute="matmul_flops", scale=1e12, least=1e-6),
    NumberField(key="launch_us", attribute="launch_s", scale=1e-6),
)


def read_numbers(
    record: Mapping[str, object], fields: Iterable[NumberField], where: Callable[[str], str]
) -> tuple[dict[str, float], list[Problem]]:
    """Return attributes in SI units from a record in file units, and every mistake in it."""
    values: dict[str, float] = {}
    problems: list[Problem] = []
    for field in fields:
        raw = record.get(field.key)
        if raw is None or raw == "":
            if field.required:
                problems.append(Problem(where=where(""), what=f"{field.key} is missing", fix=_range_text(field)))
            continue
        number = _cell_number(raw)
        problem = _cell_problem(field, raw, number, where)
        if problem is not None:
            problems.append(problem)
        else:
            values[field.attribute] = int(number) if field.whole else number * field.scale
    return values, problems


def unknown_keys(keys: Iterable[str], known: Iterable[str], where: Callable[[str], str]) -> list[Problem]:
    """Return a problem for every unknown key, with the nearest known one."""
    choices = list(known)
    problems = []
    unknown = [key for key in keys if key not in choices]
    for key in unknown[:MOST_UNKNOWN]:
        suggestion = nearest(key, choices)
        fix = f"did you mean {suggestion}?" if suggestion else f"known keys: {', '.join(choices)}"
        problems.append(Problem(where=where(key), what=f"unknown key {key[:100]}", fix=fix))
    if len(unknown) > MOST_UNKNOWN:
        summary = f"{len(unknown) - MOST_UNKNOWN:,} more unknown keys"
        problems.append(Problem(where=where(unknown[MOST_UNKNOWN]), what=summary))
    return problems


def _cell_number(raw: object) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        return math.nan
    try:
        return float(raw)
    except (ValueError, OverflowError):
        return math.nan


def _cell_problem(field: NumberField, raw: object, number: float, where: Callable[[str], str]) -> Problem | None:
    setting = f"{field.key} = {str(raw)[:40]!r}" if isinstance(raw, str) else f"{field.key} = {str(raw)[:40]}"
    if not math.isfinite(number):
        return Problem(where=where(field.key), what=f"{setting} is not a number", fix=_range_text(field))
    if field.whole and number != int(number):
        return Problem(where=where(field.key), what=f"{setting} is not a whole number", fix=_range_text(field))
    if not field.least <= number <= field.most:
        return Problem(where=where(field.key), what=f"{setting} is out of range", fix=_range_text(field))
    return None


def _range_text(field: NumberField) -> str:
    kind = "a whole number" if field.whole else "a number"
    return f"give {kind} from {field.least:,g} to {field.most:,.12g}"


# Accelerators that a user adds: the same columns as the shipped table, as CSV or as `[[accelerator]]` in TOML.


COLUMNS = (*ACCELERATOR_TEXTS, *(field.key for field in ACCELERATOR_FIELDS))
_OPTIONAL_ZERO = {field.attribute: 0.0 for field in ACCELERATOR_FIELDS if not field.required}

Where = Callable[[str], str]


def load_accelerators(path: Path) -> tuple[Accelerator, ...]:
    """Return all accelerators of a user's file; raises UserError with every mistake in it, each with file:line."""
    if path.suffix == ".csv":
        records = list(_csv_records(read_text(path), path))
    elif path.suffix == ".toml":
        records = list(_toml_records(read_toml(path)))
    else:
        raise mistake(str(path), "is neither .csv nor .toml", fix="name it accelerators.toml or accelerators.csv")
    return _build_all(records)


def parse_table(text: str, path: Path) -> tuple[Accelerator, ...]:
    """Return the accelerators of a CSV text; `path` is used only in messages."""
    return _build_all(list(_csv_records(text, path)))


def build_accelerator(record: Mapping[str, object], where: Where) -> tuple[Accelerator | None, list[Problem]]:
    """Build one accelerator from one record in file units, or return the problems with it."""
    problems = unknown_keys(record, COLUMNS, where)
    numbers, complaints = read_numbers(record, ACCELERATOR_FIELDS, where)
    problems += complaints
    texts = {key: record.get(key, "") for key in ACCELERATOR_TEXTS}
    for key, text in texts.items():
        if not isinstance(text, str) or len(text) > 2000:
            problems.append(Problem(where=where(key), what=f"{key} is not a short text", fix=f'write {key} = "..."'))
    if not texts["name"]:
        problems.append(Problem(where=where("name"), what="the accelerator has no name", fix='write name = "..."'))
    if problems:
        return None, problems
    words = {key: str(text).strip() for key, text in texts.items()}
    words["family"] = words["family"] or "unknown"
    words["vendor"] = words["vendor"] or "unknown"
    return Accelerator(**words, **{**_OPTIONAL_ZERO, **numbers}), []  # type: ignore[arg-type]


def _build_all(records: list[tuple[Mapping[str, object], Where]]) -> tuple[Accelerator, ...]:
    result, problems = [], []
    for record, where in records:
        accelerator, complaints = build_accelerator(record, where)
        problems += complaints
        if accelerator is not None:
            result.append(accelerator)
    if problems:
        raise UserError(problems)
    return tuple(result)


def _csv_records(text: str, path: Path) -> Iterator[tuple[Mapping[str, object], Where]]:
    reader = csv.DictReader(io.StringIO(text), strict=True)
    try:
        header = csv_columns(reader, str(path))
        absent = [column for column in ("name", "peak_bf16_tflops", "memory_gib") if column not in header]
        if absent:
            raise mistake(f"{path}:1", f"columns missing: {', '.join(absent)}", fix=f"columns are {', '.join(COLUMNS)}")
        for row in reader:
            line = reader.line_num
            if None in row or None in row.values():
                fix = "quote texts that hold a comma"
                raise mistake(f"{path}:{line}", f"not {len(header)} columns as the header has", fix=fix)
            yield dict(row), lambda key, line=line: f"{path}:{line}"  # type: ignore[misc]
    except csv.Error as error:
        raise mistake(f"{path}:{reader.line_num}", f"not readable as CSV: {error}", fix="check the quotes") from None


def _toml_records(file: TomlFile) -> Iterator[tuple[Mapping[str, object], Where]]:
    entries = file.table.get("accelerator")
    if set(file.table) - {"accelerator"}:
        raise UserError(unknown_keys(file.table, ["accelerator"], lambda key: file.where(key)))
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        fix = "start each accelerator with a line [[accelerator]]"
        raise mistake(str(file.path), "holds no list of accelerators", fix=fix)
    for number, entry in enumerate(entries):
        yield entry, lambda key, number=number: file.where("accelerator", number, key)  # type: ignore[misc]
