"""The table a law is fitted to: one row per trained model (or per token count of one), checked before any fit.

Columns of the file (docs/scaling.md):

    run            name of the run                                  optional
    params         parameters N as the law counts them              required
    tokens         training tokens D                                required; or flops, then D = C / 6N
    flops          training FLOPs C                                 optional: 6·N·D
    loss           final held-out loss, nats per token              required
    tokenizer      identity of the tokenizer                        optional; two of them are refused
    data           identity of the training data                    optional; two of them are refused
    seed lr batch_tokens                                            optional, kept
    parametrization  as completep:64:3:8, with the base shape       optional, kept: what the learning rate belongs to
    unique_tokens  tokens before they repeat                        optional; for data-constrained
    weight         how often a row counts                           optional: 1; 0 leaves it out
    budget         FLOPs of the IsoFLOP curve a row belongs to      optional: rows with nearly equal flops
    status         anything but "done", "ok" or empty is left out   optional
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
# What other people call them, without regard to case, blanks and hyphens; the first that a file has is read.
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
MOST_NAMED = 5  # rows of a table that are wrong in the same way
SMALLEST = float(np.nextafter(0.0, 1.0))
# Beyond these a number is no such thing, and sums over the table overflow.
LIMITS = {
    "params": (1.0, 1e18),
    "tokens": (1.0, 1e24),
    "flops": (1e-30, 1e45),  # from 1e-30: some tables count them in units of their own, which is warned of
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
    """Rows as columns, in the order of the file. `line` is where a row stands in it."""

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
    left_out: tuple[str, ...] = ()  # sentences: what was dropped, and why
    digest: str = field(default="")

    def __len__(self) -> int:
        return len(self.loss)

    def take(self, rows: Sequence[int] | NDArray[np.intp] | NDArray[np.bool_]) -> ScalingPoints:
        """Some of the rows."""
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
            run=tuple(self.run[one] for one in picked),
            line=tuple(self.line[one] for one in picked),
            seed=tuple(self.seed[one] for one in picked) if self.seed else (),
            parametrization=tuple(self.parametrization[one] for one in picked) if self.parametrization else (),
            unique_tokens=some(self.unique_tokens),
            weight=some(self.weight),
            budget=some(self.budget),
            lr=some(self.lr),
            batch_tokens=some(self.batch_tokens),
        )

    def place(self, row: int) -> str:
        """Where a row stands: file and line, and its run."""
        where = f"{self.source}:{self.line[row]}"
        return f"{where} ({self.run[row]})" if self.run[row] else where

    def name(self, row: int) -> str:
        """How a message calls a row."""
        return self.run[row] or f"line {self.line[row]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TableOptions:
    """What of a table is read, and as what."""

    columns: Mapping[str, str] = field(default_factory=dict)  # ours -> theirs, or "theirs*1e6" for one in millions
    where: Mapping[str, str] = field(default_factory=dict)  # column -> the value that a row must have
    params_counted: str = "unstated"
    flops_counted: str = ""
    drop_highest: int = 0  # rows with the largest losses
    drop: tuple[int, ...] = ()  # lines of the file
    mixed: bool = False  # several tokenizers or data sets are meant
    repeated: bool = False  # rows with equal size, tokens and seed are meant: repeated measurements


def read_points(path: Path, options: TableOptions | None = None) -> ScalingPoints:
    """The rows of a table; every mistake in it at once, as UserError."""
    options = options or TableOptions()
    columns, rows = read_rows(path, lambda columns: _number_columns(columns, options))
    known = _find_columns(path, columns, options)
    for name, factor in [(name, _unit_factor(name)) for name in known.values() if name not in columns]:
        rows = [
            (line, {**row, name: _times(row.get(name.rpartition("*")[0].strip(), ""), factor)}) for line, row in rows
        ]
    rows = [one for one in rows if all(one[1].get(key) == value for key, value in options.where.items())]
    return make_points(str(path), rows, known, options)


def _unit_factor(name: str) -> float:
    """1e6 of "params_m*1e6"; 0 where that is not what it says."""
    digits = name.rpartition("*")[2].strip()
    return float(digits) if re.fullmatch(r"\d+(\.\d*)?([eE]\+?\d{1,2})?", digits) else 0.0


def _times(text: str, factor: float) -> str:
    try:
        return repr(read_number(text, is_count=True) * factor)
    except ValueError:
        return text  # said with its line when numbers are read


def _plain_name(name: str) -> str:
    return re.sub(r"[\s_-]+", "_", name.strip().lower())


def _find_columns(path: Path, columns: Sequence[str], options: TableOptions) -> dict[str, str]:
    """Our name of each column that is there -> its name in the file, with *1e6 where it is in millions."""
    problems = []
    scaled = [one for one in options.columns.values() if one not in columns and _unit_factor(one) > 0.0]
    wanted = [one.rpartition("*")[0].strip() if one in scaled else one for one in options.columns.values()]
    for name in (*wanted, *options.where):
        if name not in columns:
            near = nearest(name, columns)
            fix = f'did you mean "{near}"?' if near else f"it has {first_few(columns, 12)}"
            problems.append(Problem(where=f"{path}:1", what=f'has no column "{name}"', fix=fix))
    for name in options.columns:
        if name not in COLUMNS:
            fix = f"the columns are {', '.join(COLUMNS)}"
            problems.append(Problem(where=f"--column {name}", what="is no column of a scaling table", fix=fix))
    known = _name_columns(columns, options)
    if problems:
        raise UserError(problems)
    has = f"the file has {first_few(columns, 12)}"
    if "loss" not in known:
        fix = f"name it with --column loss=THEIRS; {has}"
        problems.append(Problem(where=f"{path}:1", what='has no column "loss"', fix=fix))
    missing = [name for name in ("params", "tokens", "flops") if name not in known]
    if len(missing) > 1:
        fix = f"name them with --column {missing[0]}=THEIRS, or THEIRS*1e6 for one in millions; {has}"
        what = f'has no column "{missing[0]}" and no "{missing[1]}"; two of params, tokens and flops are needed'
        problems.append(Problem(where=f"{path}:1", what=what, fix=fix))
    if problems:
        raise UserError(problems)
    return known


def _name_columns(columns: Sequence[str], options: TableOptions) -> dict[str, str]:
    """Our name of each column -> what the options or our aliases call it."""
    plain = {_plain_name(name): name for name in reversed(columns)}
    known = {}
    for name in COLUMNS:
        if name in options.columns:
            known[name] = options.columns[name]
        elif found := next((plain[one] for one in (name, *ALIASES.get(name, ())) if one in plain), None):
            known[name] = found
    return known


def _number_columns(columns: Sequence[str], options: TableOptions) -> dict[str, str]:
    """Those of numbers alone, under their names in the file: without *1e6."""
    known = {name: other for name, other in _name_columns(columns, options).items() if name in NUMBERS}
    return {name: other if other in columns else other.rpartition("*")[0].strip() for name, other in known.items()}


def make_points(
    source: str,
    rows: Sequence[Row],
    known: Mapping[str, str],
    options: TableOptions,
) -> ScalingPoints:
    """Rows of texts as checked columns; `known` is our name of each column -> its name in the rows."""
    if not rows:
        what = "no row is left" if options.where else "has a header but no rows"
        raise mistake(source, what, fix="look at --where" if options.where else "add a row per trained model")
    left_out: list[str] = []
    if "status" in known:
        late = [row for _, row in rows if row.get(known["status"], "").lower() not in FINISHED]
        rows = [one for one in rows if one[1].get(known["status"], "").lower() in FINISHED]
        if late:
            names = [row.get(known.get("run", ""), "") or "a run without a name" for row in late]
            left_out.append(f"{plural(len(late), 'run')} that did not finish: {first_few(names, 4)}")
        if not rows:
            raise mistake(source, f"all {plural(len(late), 'run')} are unfinished", fix="wait for them, or resume them")
    values, problems = _read_numbers(source, rows, known)
    if problems:
        raise UserError(problems)
    for name, other in (("tokens", "params"), ("params", "tokens")):
        if name not in values:
            values[name] = values["flops"] / (6.0 * values[other])
            _check_derived(source, rows, name, other, values[name])
    texts = {name: [row.get(known[name], "") for _, row in rows] for name in TEXTS if name in known}
    for name in ("tokenizer", "data"):
        kinds = sorted({*texts.get(name, ())} - {""})
        if len(kinds) > 1 and not options.mixed:
            raise mistake(
                source,
                f"mixes {len(kinds)} values of {name}: {first_few(kinds, 4)}",
                why="losses of different tokenizers or data cannot be put on one curve",
                fix=f'pick one with --where "{known[name]}={kinds[0]}", or say --mixed if they compare',
            )
    given = "flops" in values
    points = ScalingPoints(
        source=source,
        params=values["params"],
        tokens=values["tokens"],
        flops=values.get("flops", 6.0 * values["params"] * values["tokens"]),
        loss=values["loss"],
        run=tuple(texts.get("run", [""] * len(rows))),
        line=tuple(line for line, _ in rows),
        params_counted=options.params_counted,
        flops_counted=options.flops_counted or ("unstated" if given else "6nd"),
        flops_are_given=given,
        unique_tokens=values.get("unique_tokens"),
        weight=values.get("weight"),
        budget=values.get("budget"),
        lr=values.get("lr"),
        batch_tokens=values.get("batch_tokens"),
        seed=tuple(texts.get("seed", ())),
        parametrization=tuple(texts.get("parametrization", ())),
        tokenizer=next((one for one in texts.get("tokenizer", ()) if one), ""),
        data=next((one for one in texts.get("data", ()) if one), ""),
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
    """Every column of numbers; a value that is no positive number is a problem where the law needs it."""
    values: dict[str, Array] = {}
    problems: list[Problem] = []
    for name in NUMBERS:
        if name not in known:
            continue
        needed = name in ("params", "tokens", "flops", "loss", "weight")
        # A weight of 0 leaves its row out; no other number may be 0.
        least, kind = (0.0, "a number of at least 0") if name == "weight" else (SMALLEST, "a positive number")
        column = np.empty(len(rows))
        wrong: list[Problem] = []
        for place, (line, row) in enumerate(rows):
            text = row.get(known[name], "")
            try:
                column[place] = read_number(text, is_count=name != "loss")
            except ValueError:
                column[place] = math.nan
            lowest, highest = LIMITS.get(name, (-math.inf, math.inf))
            if needed and not (math.isfinite(column[place]) and column[place] >= least):
                what = f'{known[name]} = "{text[:40]}" is not {kind}' if text else f"{known[name]} is empty"
                wrong.append(Problem(where=f"{source}:{line}", what=what, fix=FIXES.get(name, FIXES["params"])))
            elif needed and not lowest <= column[place] <= highest:
                what = f'{known[name]} = "{text[:40]}" is not within {lowest:g} to {highest:g}'
                fix = f"look at its unit: a column in millions is read with --column '{name}=THEIRS*1e6'"
                wrong.append(Problem(where=f"{source}:{line}", what=what, fix=fix if name in COUNTS else FIXES[name]))
        if len(wrong) > MOST_NAMED:
            more = f"{known[name]} is wrong in {plural(len(wrong) - MOST_NAMED, 'more row')}"
            wrong = [*wrong[:MOST_NAMED], Problem(where=source, what=more)]
        problems += wrong
        if needed or np.isfinite(column).any():
            values[name] = column
    return values, problems


def _check_derived(source: str, rows: Sequence[Row], name: str, other: str, column: Array) -> None:
    """Raise UserError where C = 6·N·D makes a count that is none."""
    lowest, highest = LIMITS[name]
    wrong = np.flatnonzero(~((column >= lowest) & (column <= highest)))
    if len(wrong):
        line, value = rows[wrong[0]][0], column[wrong[0]]
        raise mistake(
            f"{source}:{line}",
            f"{name} = flops / (6·{other}) = {value:.3g} is not within {lowest:g} to {highest:g}",
            fix=f"look at the units of flops and {other}, or add a column {name}",
        )


def _without_repeats(points: ScalingPoints, options: TableOptions, left_out: list[str]) -> ScalingPoints:
    """Rows that repeat another one are refused unless they are meant; then equal ones count once."""
    seen: dict[tuple[object, ...], int] = {}
    losses: set[tuple[object, ...]] = set()  # of what was seen: an equal row need not follow the first
    keep, same = [], []
    problems = []
    for row in range(len(points)):
        seed = points.seed[row] if points.seed else ""
        lr = points.lr[row] if points.lr is not None and np.isfinite(points.lr[row]) else None
        key = (points.run[row], points.params[row], points.tokens[row], points.flops[row], seed, lr)
        first = seen.setdefault(key, row)
        is_new = (*key, points.loss[row]) not in losses
        losses.add((*key, points.loss[row]))
        if first == row or (options.repeated and is_new):
            keep.append(row)
            continue
        where = f"{points.source}:{points.line[row]}"
        what = f"repeats line {points.line[first]} (N {points.params[row]:.4g}, D {points.tokens[row]:.4g})"
        if not is_new:
            fix = "leave it out, or say --repeated: equal rows then count once"
            same.append(Problem(where=where, what=what, why="a row that counts twice pulls the law to it", fix=fix))
        else:
            what += f" with another loss: {points.loss[first]:.5g} and {points.loss[row]:.5g}"
            fix = "keep one of them, give each its seed, or say --repeated if both were measured"
            problems.append(Problem(where=where, what=what, fix=fix))
    if same and not options.repeated:
        problems += same
    if problems:
        more = len(problems) - MOST_NAMED
        if more > 0:
            what = f"repeats rows {plural(more, 'more time')}"
            problems = [*problems[:MOST_NAMED], Problem(where=points.source, what=what)]
        raise UserError(problems)
    if same:
        left_out.append(f"{plural(len(same), 'duplicate row')}")
    return points.take(np.array(keep, dtype=np.intp))


def data_digest(points: ScalingPoints) -> str:
    """SHA-256 of what a law is fitted to: sizes, tokens, FLOPs, losses and weights, in any order of the rows."""
    columns = [points.params, points.tokens, points.flops, points.loss]
    if points.weight is not None:
        columns.append(points.weight)
    rows = zip(*columns, strict=True)
    lines = sorted(",".join(repr(float(value)) for value in row) for row in rows)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
