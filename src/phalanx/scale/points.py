"""The table a law is fitted to: one row per trained model (or per token count of a model), checked before any fit.

Columns of the file (docs/scaling.md):

    run            name of the run                                  optional
    params         parameters N as the law counts them              required
    tokens         training tokens D                                required; or flops, then D = C / 6N
    flops          training FLOPs C                                 optional: 6·N·D
    loss           final held-out loss, nats per token              required
    tokenizer      identity of the tokenizer                        optional; two different ones are an error
    data           identity of the training data                    optional; two different ones are an error
    seed lr batch_tokens                                            optional, stored
    parametrization  such as completep:64:3:8, with the base shape  optional, stored: the learning rate depends on it
    unique_tokens  tokens before they repeat                        optional; for data-constrained
    weight         weight of a row                                  optional: 1; rows of weight 0 are excluded
    budget         FLOPs of the IsoFLOP curve a row belongs to      optional: rows with nearly equal flops
    status         rows are excluded unless "done", "ok" or empty   optional
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import Problem, UserError, mistake, nearest
from phalanx.scale.table_rows import Row, read_number, read_rows
from phalanx.units import first_few, plural

Array = NDArray[np.float64]

NUMBERS = ("params", "tokens", "flops", "loss", "lr", "batch_tokens", "unique_tokens", "weight", "budget")
COUNTS = ("params", "tokens", "flops")
TEXTS = ("run", "tokenizer", "data", "seed", "status", "parametrization")
COLUMNS = (*NUMBERS, *TEXTS)
# Other common names of the columns, without regard to case, blanks and hyphens; the first that a file has is read.
ALIASES = {
    "params": ("n", "parameters", "num_params", "n_params", "num_parameters", "n_parameters", "model_size"),
    "tokens": ("d", "train_tokens", "training_tokens", "num_tokens", "n_tokens", "tokens_seen"),
    "flops": ("c", "compute", "flop", "train_flop", "train_flops", "training_flop", "training_flops", "total_flops"),
    "loss": ("l", "eval_loss", "val_loss", "valid_loss", "validation_loss", "heldout_loss", "final_loss"),
    "run": ("name",),
    "lr": ("learning_rate",),
    "data": ("dataset", "train_set"),
    "batch_tokens": ("global_batch_tokens",),
    "weight": ("weights",),
}
FINISHED = ("", "done", "ok", "finished")
MOST_NAMED = 5  # rows of a table with the same mistake that are listed
SMALLEST = float(np.nextafter(0.0, 1.0))
# Outside these limits a number is implausible, and sums over the table overflow.
LIMITS = {
    "params": (1.0, 1e18),
    "tokens": (1.0, 1e24),
    # From 1e-30: some tables count FLOPs in their own units, for which a warning is given.
    "flops": (1e-30, 1e45),
    "loss": (1e-9, 1e9),
    "weight": (0.0, 1e12),
}
FIXES = {
    "params": "write it as 125000000, 1.25e8 or 125M, or leave the row out",
    "loss": "a diverged run is no point of a law: leave the row out, or set its status to diverged",
    "weight": "give 1 to rows that count as usual, and 0 to those that are to be left out",
}
COUNTED = {
    "total": "all parameters, embedding and head included",
    "no-embedding": "without the embedding; head included",
    "no-embedding-no-head": "without embedding and head (Kaplan's count)",
    "active": "parameters one token uses, embedding and head included",
    "unstated": "not stated by the table: a law holds only for models counted the same way",
}
FLOPS_COUNTED = {
    "6nd": "6·N·D",
    "head": "6·N·D with the head's matrix product",
    "head+attention": "every matrix product, attention scores too",
    "unstated": "not stated by the table",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingPoints:
    """The rows of a table as columns, in the order of the file; `line` holds their line numbers."""

    source: str
    params: Array
    tokens: Array
    flops: Array
    loss: Array
    run: tuple[str, ...]
    line: tuple[int, ...]
    params_counted: str = "unstated"
    flops_counted: str = "6nd"
    flops_are_given: bool = False
    unique_tokens: Array | None = None
    weight: Array | None = None
    budget: Array | None = None
    lr: Array | None = None
    batch_tokens: Array | None = None
    seed: tuple[str, ...] = ()
    parametrization: tuple[str, ...] = ()
    tokenizer: str = ""
    data: str = ""
    left_out: tuple[str, ...] = ()  # sentences on excluded rows, with the reason
    digest: str = field(default="")

    def __len__(self) -> int:
        return len(self.loss)

    def take(self, rows: Sequence[int] | NDArray[np.intp] | NDArray[np.bool_]) -> ScalingPoints:
        """Return a selection of the rows."""
        from dataclasses import replace

        picked = np.arange(len(self))[np.asarray(rows)]

        def some(values: Array | None) -> Array | None:
            return None if values is None else values[picked]

        return replace(
            self,
            params=self.params[picked],
            tokens=self.tokens[picked],
            flops=self.flops[picked],
            loss=self.loss[picked],
            run=tuple(self.run[row] for row in picked),
            line=tuple(self.line[row] for row in picked),
            seed=tuple(self.seed[row] for row in picked) if self.seed else (),
            parametrization=tuple(self.parametrization[row] for row in picked) if self.parametrization else (),
            unique_tokens=some(self.unique_tokens),
            weight=some(self.weight),
            budget=some(self.budget),
            lr=some(self.lr),
            batch_tokens=some(self.batch_tokens),
        )

    def place(self, row: int) -> str:
        """Return the place of a row for messages: file and line, and its run."""
        position = f"{self.source}:{self.line[row]}"
        return f"{position} ({self.run[row]})" if self.run[row] else position

    def name(self, row: int) -> str:
        """Return the name of a row for messages."""
        return self.run[row] or f"line {self.line[row]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TableOptions:
    """Options for reading a table: column names, row filters and counting conventions."""

    # Column name here to its name in the file, or "name*1e6" for a column in millions.
    columns: Mapping[str, str] = field(default_factory=dict)
    where: Mapping[str, str] = field(default_factory=dict)  # column -> the value that a row must have
    params_counted: str = "unstated"
    flops_counted: str = ""
    drop_highest: int = 0  # rows with the largest losses
    drop: tuple[int, ...] = ()  # lines of the file to exclude
    mixed: bool = False  # several tokenizers or data sets are intended
    # Rows with equal size, tokens and seed are intended: repeated measurements.
    repeated: bool = False


def read_points(path: Path, options: TableOptions | None = None) -> ScalingPoints:
    """Read the rows of a table; raises UserError with every mistake in it."""
    options = options or TableOptions()
    columns, rows = read_rows(path, lambda columns: _number_columns(columns, options))
    names = _find_columns(path, columns, options)
    for name, factor in [(name, _unit_factor(name)) for name in names.values() if name not in columns]:
        rows = [
            (line, {**row, name: _times(row.get(name.rpartition("*")[0].strip(), ""), factor)}) for line, row in rows
        ]
    rows = [row for row in rows if all(row[1].get(key) == value for key, value in options.where.items())]
    return make_points(str(path), rows, names, options)


def _unit_factor(name: str) -> float:
    """Return 1e6 for "params_m*1e6"; 0 where the name has no such factor."""
    digits = name.rpartition("*")[2].strip()
    return float(digits) if re.fullmatch(r"\d+(\.\d*)?([eE]\+?\d{1,2})?", digits) else 0.0


def _times(text: str, factor: float) -> str:
    try:
        return repr(read_number(text, is_count=True) * factor)
    except ValueError:
        # Reported with its line when numbers are read.
        return text


def _plain_name(name: str) -> str:
    return re.sub(r"[\s_-]+", "_", name.strip().lower())


def _find_columns(path: Path, columns: Sequence[str], options: TableOptions) -> dict[str, str]:
    """Return the name in the file of each known column, with *1e6 where it is in millions; raises UserError."""
    problems = []
    scaled = [name for name in options.columns.values() if name not in columns and _unit_factor(name) > 0.0]
    required = [name.rpartition("*")[0].strip() if name in scaled else name for name in options.columns.values()]
    for name in (*required, *options.where):
        if name not in columns:
            near = nearest(name, columns)
            fix = f'did you mean "{near}"?' if near else f"it has {first_few(columns, 12)}"
            problems.append(Problem(where=f"{path}:1", what=f'has no column "{name}"', fix=fix))
    for name in options.columns:
        if name not in COLUMNS:
            fix = f"the columns are {', '.join(COLUMNS)}"
            problems.append(Problem(where=f"--column {name}", what="is no column of a scaling table", fix=fix))
    names = _name_columns(columns, options)
    if problems:
        raise UserError(problems)
    columns_text = f"the file has {first_few(columns, 12)}"
    if "loss" not in names:
        fix = f"name it with --column loss=THEIRS; {columns_text}"
        problems.append(Problem(where=f"{path}:1", what='has no column "loss"', fix=fix))
    missing = [name for name in ("params", "tokens", "flops") if name not in names]
    if len(missing) > 1:
        fix = f"name them with --column {missing[0]}=THEIRS, or THEIRS*1e6 for one in millions; {columns_text}"
        problem = f'has no column "{missing[0]}" and no "{missing[1]}"; two of params, tokens and flops are needed'
        problems.append(Problem(where=f"{path}:1", what=problem, fix=fix))
    if problems:
        raise UserError(problems)
    return names


def _name_columns(columns: Sequence[str], options: TableOptions) -> dict[str, str]:
    """Return the name of each known column in the file, from the options or from ALIASES."""
    plain = {_plain_name(name): name for name in reversed(columns)}
    names = {}
    for name in COLUMNS:
        if name in options.columns:
            names[name] = options.columns[name]
        elif match := next((plain[alias] for alias in (name, *ALIASES.get(name, ())) if alias in plain), None):
            names[name] = match
    return names


def _number_columns(columns: Sequence[str], options: TableOptions) -> dict[str, str]:
    """Return the number columns with their names in the file, without *1e6."""
    names = {name: file_name for name, file_name in _name_columns(columns, options).items() if name in NUMBERS}
    return {
        name: file_name if file_name in columns else file_name.rpartition("*")[0].strip()
        for name, file_name in names.items()
    }


def make_points(
    source: str,
    rows: Sequence[Row],
    known: Mapping[str, str],
    options: TableOptions,
) -> ScalingPoints:
    """Return rows of texts as checked columns; `known` maps each column to its name in the rows.

    Raises UserError for missing rows, wrong numbers, mixed tokenizers or data, and repeated rows that the options do
    not allow.
    """
    if not rows:
        problem = "no row is left" if options.where else "has a header but no rows"
        raise mistake(source, problem, fix="look at --where" if options.where else "add a row per trained model")
    left_out: list[str] = []
    if "status" in known:
        unfinished = [row for _, row in rows if row.get(known["status"], "").lower() not in FINISHED]
        rows = [entry for entry in rows if entry[1].get(known["status"], "").lower() in FINISHED]
        if unfinished:
            names = [row.get(known.get("run", ""), "") or "a run without a name" for row in unfinished]
            left_out.append(f"{plural(len(unfinished), 'run')} that did not finish: {first_few(names, 4)}")
        if not rows:
            raise mistake(
                source, f"all {plural(len(unfinished), 'run')} are unfinished", fix="wait for them, or resume them"
            )
    values, problems = _read_numbers(source, rows, known)
    if problems:
        raise UserError(problems)
    for name, source_name in (("tokens", "params"), ("params", "tokens")):
        if name not in values:
            values[name] = values["flops"] / (6.0 * values[source_name])
            _check_derived(source, rows, name, source_name, values[name])
    texts = {name: [row.get(known[name], "") for _, row in rows] for name in TEXTS if name in known}
    for name in ("tokenizer", "data"):
        distinct = sorted({*texts.get(name, ())} - {""})
        if len(distinct) > 1 and not options.mixed:
            raise mistake(
                source,
                f"mixes {len(distinct)} values of {name}: {first_few(distinct, 4)}",
                why="losses of different tokenizers or data cannot be put on one curve",
                fix=f'pick one with --where "{known[name]}={distinct[0]}", or say --mixed if they compare',
            )
    has_flops = "flops" in values
    points = ScalingPoints(
        source=source,
        params=values["params"],
        tokens=values["tokens"],
        flops=values.get("flops", 6.0 * values["params"] * values["tokens"]),
        loss=values["loss"],
        run=tuple(texts.get("run", [""] * len(rows))),
        line=tuple(line for line, _ in rows),
        params_counted=options.params_counted,
        flops_counted=options.flops_counted or ("unstated" if has_flops else "6nd"),
        flops_are_given=has_flops,
        unique_tokens=values.get("unique_tokens"),
        weight=values.get("weight"),
        budget=values.get("budget"),
        lr=values.get("lr"),
        batch_tokens=values.get("batch_tokens"),
        seed=tuple(texts.get("seed", ())),
        parametrization=tuple(texts.get("parametrization", ())),
        tokenizer=next((value for value in texts.get("tokenizer", ()) if value), ""),
        data=next((value for value in texts.get("data", ()) if value), ""),
    )
    points = _without_repeats(points, options, left_out)
    if points.weight is not None and (unweighted := int((points.weight == 0.0).sum())):
        left_out.append(f"{plural(unweighted, 'row')} of weight 0")
        points = points.take(points.weight > 0.0)
    if options.drop:
        if unknown := sorted(set(options.drop) - set(points.line)):
            raise mistake(
                "--drop",
                f"{source} has no row on line {first_few([str(line) for line in unknown], MOST_NAMED)}",
                fix=f"use the lines under OUTLIERS; rows are on {min(points.line)} to {max(points.line)}",
            )
        is_dropped = np.isin(points.line, options.drop)
        if is_dropped.all():
            raise mistake("--drop", f"leaves none of {plural(len(points), 'row')}", fix="name fewer lines")
        left_out.append(f"{plural(int(is_dropped.sum()), 'row')} on the lines of --drop, as asked")
        points = points.take(~is_dropped)
    if options.drop_highest < 0:
        raise mistake("--drop-highest", f"{options.drop_highest} is negative", fix="give a number of rows")
    if options.drop_highest:
        if options.drop_highest >= len(points):
            raise mistake("--drop-highest", f"{options.drop_highest} leaves none of {plural(len(points), 'row')}")
        order = np.argsort(points.loss, kind="stable")
        dropped = order[len(order) - options.drop_highest :]
        left_out.append(f"the {plural(options.drop_highest, 'row')} with the highest loss, as asked")
        points = points.take(np.setdiff1d(np.arange(len(points)), dropped))
    from dataclasses import replace

    return replace(points, left_out=tuple(left_out), digest=data_digest(points))


def _read_numbers(source: str, rows: Sequence[Row], known: Mapping[str, str]) -> tuple[dict[str, Array], list[Problem]]:
    """Read every number column; non-positive values are problems in the columns that the law needs."""
    values: dict[str, Array] = {}
    problems: list[Problem] = []
    for name in NUMBERS:
        if name not in known:
            continue
        is_needed = name in ("params", "tokens", "flops", "loss", "weight")
        # A weight of 0 leaves its row out; no other number may be 0.
        least, noun = (0.0, "a number of at least 0") if name == "weight" else (SMALLEST, "a positive number")
        column = np.empty(len(rows))
        column_problems: list[Problem] = []
        for index, (line, row) in enumerate(rows):
            text = row.get(known[name], "")
            try:
                column[index] = read_number(text, is_count=name != "loss")
            except ValueError:
                column[index] = math.nan
            lowest, highest = LIMITS.get(name, (-math.inf, math.inf))
            if is_needed and not (math.isfinite(column[index]) and column[index] >= least):
                problem = f'{known[name]} = "{text[:40]}" is not {noun}' if text else f"{known[name]} is empty"
                column_problems.append(
                    Problem(where=f"{source}:{line}", what=problem, fix=FIXES.get(name, FIXES["params"]))
                )
            elif is_needed and not lowest <= column[index] <= highest:
                problem = f'{known[name]} = "{text[:40]}" is not within {lowest:g} to {highest:g}'
                fix = f"look at its unit: a column in millions is read with --column '{name}=THEIRS*1e6'"
                column_problems.append(
                    Problem(where=f"{source}:{line}", what=problem, fix=fix if name in COUNTS else FIXES[name])
                )
        if len(column_problems) > MOST_NAMED:
            more = f"{known[name]} is wrong in {plural(len(column_problems) - MOST_NAMED, 'more row')}"
            column_problems = [*column_problems[:MOST_NAMED], Problem(where=source, what=more)]
        problems += column_problems
        if is_needed or np.isfinite(column).any():
            values[name] = column
    return values, problems


def _check_derived(source: str, rows: Sequence[Row], name: str, other: str, column: Array) -> None:
    """Raise UserError where C = 6·N·D gives an implausible count."""
    lowest, highest = LIMITS[name]
    implausible = np.flatnonzero(~((column >= lowest) & (column <= highest)))
    if len(implausible):
        line, value = rows[implausible[0]][0], column[implausible[0]]
        raise mistake(
            f"{source}:{line}",
            f"{name} = flops / (6·{other}) = {value:.3g} is not within {lowest:g} to {highest:g}",
            fix=f"look at the units of flops and {other}, or add a column {name}",
        )


def _without_repeats(points: ScalingPoints, options: TableOptions, left_out: list[str]) -> ScalingPoints:
    """Raise UserError for rows that repeat another unless the options allow it; equal rows then count once."""
    first_rows: dict[tuple[object, ...], int] = {}
    # Losses of all rows so far by key: an equal row need not follow the first.
    losses: set[tuple[object, ...]] = set()
    keep, duplicates = [], []
    problems = []
    for row in range(len(points)):
        seed = points.seed[row] if points.seed else ""
        lr = points.lr[row] if points.lr is not None and np.isfinite(points.lr[row]) else None
        key = (points.run[row], points.params[row], points.tokens[row], points.flops[row], seed, lr)
        first = first_rows.setdefault(key, row)
        is_new = (*key, points.loss[row]) not in losses
        losses.add((*key, points.loss[row]))
        if first == row or (options.repeated and is_new):
            keep.append(row)
            continue
        place = f"{points.source}:{points.line[row]}"
        problem = f"repeats line {points.line[first]} (N {points.params[row]:.4g}, D {points.tokens[row]:.4g})"
        if not is_new:
            fix = "leave it out, or say --repeated: equal rows then count once"
            duplicates.append(
                Problem(where=place, what=problem, why="a row that counts twice pulls the law to it", fix=fix)
            )
        else:
            problem += f" with another loss: {points.loss[first]:.5g} and {points.loss[row]:.5g}"
            fix = "keep one of them, give each its seed, or say --repeated if both were measured"
            problems.append(Problem(where=place, what=problem, fix=fix))
    if duplicates and not options.repeated:
        problems += duplicates
    if problems:
        more = len(problems) - MOST_NAMED
        if more > 0:
            problem = f"repeats rows {plural(more, 'more time')}"
            problems = [*problems[:MOST_NAMED], Problem(where=points.source, what=problem)]
        raise UserError(problems)
    if duplicates:
        left_out.append(f"{plural(len(duplicates), 'duplicate row')}")
    return points.take(np.array(keep, dtype=np.intp))


def data_digest(points: ScalingPoints) -> str:
    """Return the SHA-256 of a law's data: sizes, tokens, FLOPs, losses and weights, regardless of row order."""
    columns = [points.params, points.tokens, points.flops, points.loss]
    if points.weight is not None:
        columns.append(points.weight)
    rows = zip(*columns, strict=True)
    lines = sorted(",".join(repr(float(value)) for value in row) for row in rows)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
